{{- define "adit.labels" -}}
app.kubernetes.io/name: adit
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end -}}

{{- define "adit.selector" -}}
app.kubernetes.io/name: adit
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "adit.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}

{{- define "adit.rootNamespace" -}}
{{ .Values.rootNamespace | default .Release.Namespace }}
{{- end -}}

{{/* What the authority is told of the mesh, as agents are by variables. */}}
{{- define "adit.sourceArgs" -}}
- --source=kubernetes
- --trust-domain={{ .Values.trustDomain }}
- --cluster-domain={{ .Values.clusterDomain }}
- --root-namespace={{ include "adit.rootNamespace" . }}
- --enrolment-label={{ .Values.enrolment.label }}
{{- with .Values.clusterRanges }}
- --cluster-ranges={{ join "," . }}
{{- end }}
- --log-level={{ .Values.logLevel }}
- --log-format={{ .Values.logFormat }}
{{- end -}}

{{- define "adit.audience" -}}
{{ if .Values.ca.enabled }}adit-ca{{ else }}{{ .Values.externalCA.audience }}{{ end }}
{{- end -}}

{{/* What every pod of Adit has, but the agents' users and capabilities. */}}
{{- define "adit.unprivileged" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{/* What an agent may do. docs/install.md says which line of the program needs which. */}}
{{- define "adit.agentSecurity" -}}
runAsUser: 0
runAsGroup: 0
privileged: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
  add: [DAC_READ_SEARCH, NET_ADMIN, SYS_ADMIN, SYS_PTRACE]
seccompProfile: {type: RuntimeDefault}
# The runtimes' default profile forbids to look at other pods' processes, by which their network namespaces are found.
appArmorProfile: {type: Unconfined}
{{- end -}}
