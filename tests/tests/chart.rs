//! The Helm chart: what values make of it. Needs Helm, in the folder `ADIT_K8S_BIN` or on `PATH`.
#![expect(clippy::unwrap_used, reason = "a test panics where it fails, its helpers too")]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

use serde_json::{Value, json};

const CHART: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy/chart/adit");

fn helm() -> Command {
    let named = env::var_os("ADIT_K8S_BIN").map(|folder| Path::new(&folder).join("helm"));
    let program = named
        .filter(|program| program.is_file())
        .unwrap_or_else(|| PathBuf::from("helm"));
    Command::new(program)
}

/// What `helm template` makes of these values, or what it says against them.
fn render(values: &[&str]) -> Result<Vec<Value>, String> {
    let mut command = helm();
    command.args(["template", "adit", CHART, "--namespace=adit-system"]);
    for value in values {
        command.args(["--set", value]);
    }
    let output = command
        .output()
        .unwrap_or_else(|error| panic!("starting {command:?}: {error}"));
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).into_owned());
    }
    let text = String::from_utf8(output.stdout).unwrap();
    let documents = text.split("\n---").map(|text| text.trim_start_matches("---"));
    let documents =
        documents.map(|text| serde_saphyr::from_str(text).unwrap_or_else(|error| panic!("{error}:\n{text}")));
    Ok(documents.filter(|document: &Value| !document.is_null()).collect())
}

fn find<'a>(documents: &'a [Value], kind: &str, name: &str) -> Option<&'a Value> {
    documents
        .iter()
        .find(|document| document["kind"] == kind && document["metadata"]["name"] == name)
}

/// The settings of a container: its arguments, and its variables as the flags that they stand for.
fn settings(documents: &[Value], kind: &str, name: &str) -> Vec<String> {
    let object = find(documents, kind, name).unwrap_or_else(|| panic!("no {kind} {name}"));
    let container = &object["spec"]["template"]["spec"]["containers"][0];
    let args = container["args"].as_array().unwrap().iter().filter_map(Value::as_str);
    let variables = container["env"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|variable| {
            let flag = variable["name"].as_str()?.strip_prefix("ADIT_")?.to_lowercase();
            Some(format!("--{}={}", flag.replace('_', "-"), variable["value"].as_str()?))
        });
    args.map(str::to_owned).chain(variables).collect()
}

#[test]
fn values_become_settings() {
    for (values, kind, name, present, absent) in [
        (
            &[][..],
            "DaemonSet",
            "adit-node",
            &[
                "--source=kubernetes",
                "--enrolment-label=mesh.adit/mode=enabled",
                "--root-namespace=adit-system",
                "--ca-address=https://adit-ca.adit-system.svc:15012",
                "--pods-cgroup=auto",
                "--kubelet-cgroup=auto",
                "--startup=enforced",
                "--drain-deadline=600s",
                "--await-successor=5s",
                "--access-log=on",
                "--metrics=$(NODE_ADDRESS):15020",
            ][..],
            &["--cluster-ranges=", "--ca-server-name=adit-ca.adit-system.svc"][..],
        ),
        (
            &[
                "enrolment.label=istio.io/dataplane-mode=ambient",
                "clusterRanges={10.0.0.0/8,fd00::/8}",
                "kubelet.cgroup=",
                "accessLog=false",
                "drainDeadlineSeconds=30",
                "ca.clusterIP=10.96.0.15",
                "metrics.address=[::]",
                "node.extraArgs={--workers=4}",
            ],
            "DaemonSet",
            "adit-node",
            &[
                "--enrolment-label=istio.io/dataplane-mode=ambient",
                "--cluster-ranges=10.0.0.0/8,fd00::/8",
                "--access-log=off",
                "--drain-deadline=30s",
                "--ca-address=https://10.96.0.15:15012",
                "--ca-server-name=adit-ca.adit-system.svc",
                "--metrics=[::]:15020",
                "--workers=4",
            ],
            &["--kubelet-cgroup=", "--kubelet-cgroup=auto"],
        ),
        (
            &[
                "ca.enabled=false",
                "externalCA.address=https://istiod.istio-system.svc:15012",
            ],
            "DaemonSet",
            "adit-node",
            &[
                "--ca-address=https://istiod.istio-system.svc:15012",
                "--ca-root=/var/run/secrets/adit-ca-root/root-cert.pem",
                "--cluster-id=Kubernetes",
            ],
            &[
                "--ca-address=https://adit-ca.adit-system.svc:15012",
                "--ca-server-name=",
            ],
        ),
        (
            &[
                "ca.enabled=false",
                "externalCA.address=https://10.96.0.15:15012",
                "externalCA.serverName=istiod.istio-system.svc",
                "clusterID=east",
            ],
            "DaemonSet",
            "adit-node",
            &["--ca-server-name=istiod.istio-system.svc", "--cluster-id=east"],
            &[],
        ),
        (
            &["ca.enabled=false", "spire.socketFolder=/run/spire/adit"],
            "DaemonSet",
            "adit-node",
            &["--spire-socket=/run/adit-spire/admin.sock"],
            &[
                "--ca-root=/var/run/secrets/adit-ca-root/root-cert.pem",
                "--ca-token=/var/run/secrets/tokens/adit-ca",
            ],
        ),
        (
            &["trust.caBundle=true"],
            "DaemonSet",
            "adit-node",
            &[
                "--trust-bundle=/var/run/secrets/adit-ca-root/root-cert.pem",
                "--distrust=/var/run/adit-trust/distrusted",
                "--crl-policy=lenient",
            ],
            &["--crl=/var/run/adit-crl"],
        ),
        (
            &[
                "trust.caBundle=true",
                "trust.bundles={new.pem}",
                "trust.domains.b\\.example=b.pem",
                "trust.domains.a\\.example=a.pem",
                "trust.aliases={old.example,older.example}",
                "trust.crl.secret=lists",
                "trust.crl.policy=strict",
            ],
            "DaemonSet",
            "adit-node",
            &[
                "--trust-bundle=/var/run/secrets/adit-ca-root/root-cert.pem,/var/run/adit-trust/new.pem",
                "--trust-domain-bundle=a.example=/var/run/adit-trust/a.pem,b.example=/var/run/adit-trust/b.pem",
                "--trust-domain-alias=old.example,older.example",
                "--crl=/var/run/adit-crl",
                "--crl-policy=strict",
            ],
            &[],
        ),
        (
            &[
                "ca.enabled=false",
                "externalCA.address=https://istiod.istio-system.svc:15012",
                "trust.bundles={new.pem}",
            ],
            "DaemonSet",
            "adit-node",
            &["--trust-bundle=/var/run/adit-trust/new.pem"],
            &[],
        ),
        (
            &["ca.existingSecret=cacerts", "trustDomain=example.org"],
            "Deployment",
            "adit-ca",
            &[
                "--source=kubernetes",
                "--trust-domain=example.org",
                "--namespace=adit-system",
                "--node-proxy=adit-system/adit-node",
                "--intermediate-secret=cacerts",
            ],
            &[],
        ),
    ] {
        let documents = render(values).unwrap();
        let settings = settings(&documents, kind, name);
        for flag in present {
            assert!(
                settings.iter().any(|setting| setting == flag),
                "{values:?}: {flag} is missing: {settings:?}"
            );
        }
        for flag in absent {
            assert!(
                !settings.iter().any(|setting| setting == flag),
                "{values:?}: {flag} is there: {settings:?}"
            );
        }
    }
}

#[test]
fn values_shape_the_pods() {
    for (value, kind, name, pointer, expected) in [
        (
            "drainDeadlineSeconds=30",
            "DaemonSet",
            "adit-node",
            "/spec/template/spec/terminationGracePeriodSeconds",
            json!(60),
        ),
        (
            "node.maxSurge=25%",
            "DaemonSet",
            "adit-node",
            "/spec/updateStrategy/rollingUpdate",
            json!({ "maxSurge": "25%", "maxUnavailable": 0 }),
        ),
        (
            "cgroupRoot=/sys/fs/cgroup/unified",
            "DaemonSet",
            "adit-node",
            "/spec/template/spec/volumes/0/hostPath/path",
            json!("/sys/fs/cgroup/unified"),
        ),
        (
            "image.tag=v2",
            "DaemonSet",
            "adit-node",
            "/spec/template/spec/containers/0/image",
            json!("localhost/adit:v2"),
        ),
        (
            "image.tag=v2",
            "DaemonSet",
            "adit-uninstall",
            "/spec/template/spec/initContainers/0/image",
            json!("localhost/adit:v2"),
        ),
        ("ca.replicas=3", "Deployment", "adit-ca", "/spec/replicas", json!(3)),
        (
            "ca.clusterIP=10.96.0.15",
            "Service",
            "adit-ca",
            "/spec/clusterIP",
            json!("10.96.0.15"),
        ),
    ] {
        let documents = render(&[value]).unwrap();
        let object = find(&documents, kind, name).unwrap_or_else(|| panic!("{value}: no {kind} {name}"));
        assert_eq!(
            object.pointer(pointer),
            Some(&expected),
            "{value}: {kind} {name} {pointer}"
        );
    }
}

#[test]
fn parts_come_and_go_with_their_values() {
    for (values, kind, name, there) in [
        (&[][..], "Deployment", "adit-ca", true),
        (
            &["ca.enabled=false", "externalCA.address=https://ca:1"],
            "Deployment",
            "adit-ca",
            false,
        ),
        (
            &["ca.enabled=false", "externalCA.address=https://ca:1"],
            "ClusterRole",
            "adit-ca",
            false,
        ),
        (&[], "PodDisruptionBudget", "adit-ca", true),
        (&["ca.replicas=1"], "PodDisruptionBudget", "adit-ca", false),
        (&[], "Service", "adit-node-metrics", true),
        (&["metrics.enabled=false"], "Service", "adit-node-metrics", false),
        (&[], "PodMonitor", "adit-node", false),
        (&["metrics.podMonitor.enabled=true"], "PodMonitor", "adit-node", true),
        (&["metrics.podMonitor.enabled=true"], "PodMonitor", "adit-ca", true),
        (&[], "PrometheusRule", "adit", false),
        (&["metrics.rules.enabled=true"], "PrometheusRule", "adit", true),
        (&[], "DaemonSet", "adit-uninstall", true),
        (&["uninstall.enabled=false"], "DaemonSet", "adit-uninstall", false),
        (&[], "ValidatingAdmissionPolicy", "adit-node-status", true),
        (
            &[],
            "CustomResourceDefinition",
            "peerauthentications.security.istio.io",
            true,
        ),
        (
            &["policies.installDefinitions=false"],
            "CustomResourceDefinition",
            "peerauthentications.security.istio.io",
            false,
        ),
    ] {
        let documents = render(values).unwrap();
        assert_eq!(
            find(&documents, kind, name).is_some(),
            there,
            "{values:?}: {kind} {name}"
        );
    }
}

#[test]
fn values_that_mean_nothing_are_refused() {
    for (value, told) in [
        ("startup=never", "startup"),
        ("nonsense=1", "nonsense"),
        ("node.nonsense=1", "nonsense"),
        ("enrolment.label=enabled", "enrolment/label"),
        ("cgroupRoot=sys", "cgroupRoot"),
        ("clusterID=", "clusterID"),
        ("drainDeadlineSeconds=-1", "drainDeadlineSeconds"),
        ("awaitSuccessorSeconds=21", "awaitSuccessorSeconds"),
        ("ca.replicas=0", "replicas"),
        ("ca.enabled=false", "externalCA.address"),
        ("spire.socketFolder=/run/spire", "ca.enabled=false"),
        ("spire.socketFolder=run/spire", "spire"),
        ("metrics.port=0", "port"),
        ("clusterRanges={10.0.0.1}", "clusterRanges"),
        ("policies.installDefinitions=never", "installDefinitions"),
        ("trust.crl.policy=never", "policy"),
        ("trust.bundles={a/b}", "bundles"),
        ("trust.aliases={Old}", "aliases"),
        ("trust.nonsense=1", "nonsense"),
    ] {
        let error = render(&[value]).expect_err(value);
        assert!(error.contains(told), "{value}: {error}");
    }
}

/// No pod of Adit is privileged, or may write to its image.
#[test]
fn no_container_is_privileged() {
    let documents = render(&[]).unwrap();
    let mut seen = 0;
    for object in &documents {
        let pod = &object["spec"]["template"]["spec"];
        for container in ["containers", "initContainers"]
            .iter()
            .filter_map(|key| pod[key].as_array())
            .flatten()
        {
            let security = &container["securityContext"];
            let name = &object["metadata"]["name"];
            assert_ne!(security["privileged"], true, "{name}");
            assert_eq!(security["readOnlyRootFilesystem"], true, "{name}");
            assert_eq!(security["capabilities"]["drop"], json!(["ALL"]), "{name}");
            assert_eq!(security["seccompProfile"]["type"], "RuntimeDefault", "{name}");
            seen += 1;
        }
    }
    assert!(seen >= 6, "{seen}");
}

/// A declared port of a pod on the node's network is reserved: a second agent could not be placed beside the first.
#[test]
fn agents_reserve_no_port_of_the_node() {
    let documents = render(&["metrics.enabled=true"]).unwrap();
    let agent = find(&documents, "DaemonSet", "adit-node").unwrap();
    let pod = &agent["spec"]["template"]["spec"];
    assert_eq!(pod["hostNetwork"], true);
    assert!(pod["containers"][0]["ports"].is_null());
}

/// The folder of the SPIRE agent's socket is mounted, so that one that is started anew is seen, and what an authority needs
/// is not.
#[test]
fn agents_have_the_folder_of_spires_socket_and_no_token() {
    let documents = render(&["ca.enabled=false", "spire.socketFolder=/run/spire/adit"]).unwrap();
    let agent = find(&documents, "DaemonSet", "adit-node").unwrap();
    let pod = &agent["spec"]["template"]["spec"];
    let named = |list: &Value, name: &str| list.as_array().unwrap().iter().find(|one| one["name"] == name).cloned();
    let volume = named(&pod["volumes"], "spire").unwrap();
    assert_eq!(volume["hostPath"]["path"], "/run/spire/adit");
    let mounts = &pod["containers"][0]["volumeMounts"];
    assert_eq!(
        named(mounts, "spire").unwrap(),
        json!({ "name": "spire", "mountPath": "/run/adit-spire", "readOnly": true })
    );
    for name in ["ca-root", "ca-token"] {
        assert_eq!((named(&pod["volumes"], name), named(mounts, name)), (None, None));
    }
}

/// Only what is run on uninstalling is a hook, and all of it is taken away afterwards.
#[test]
fn hooks_are_for_uninstalling_and_leave_nothing() {
    let documents = render(&[]).unwrap();
    for object in &documents {
        let (name, annotations) = (
            object["metadata"]["name"].as_str().unwrap(),
            &object["metadata"]["annotations"],
        );
        if name.starts_with("adit-uninstall") {
            assert_eq!(annotations["helm.sh/hook"], "pre-delete", "{name}");
            assert_eq!(
                annotations["helm.sh/hook-delete-policy"], "before-hook-creation,hook-succeeded",
                "{name}"
            );
        } else {
            assert!(annotations["helm.sh/hook"].is_null(), "{name}");
        }
    }
}

/// What is run in an agent's container, such as `adit check`, has the agent's settings.
#[test]
fn agents_have_their_settings_by_variables() {
    let documents = render(&[]).unwrap();
    let agent = find(&documents, "DaemonSet", "adit-node").unwrap();
    let container = &agent["spec"]["template"]["spec"]["containers"][0];
    assert_eq!(container["args"], json!(["node"]));
    assert_eq!(
        container["readinessProbe"]["exec"]["command"],
        json!(["/adit", "probe"])
    );
    let variables = container["env"].as_array().unwrap();
    let node = variables.iter().find(|variable| variable["name"] == "ADIT_NODE_NAME");
    assert_eq!(
        node.unwrap()["valueFrom"]["fieldRef"]["fieldPath"],
        "spec.nodeName",
        "{variables:?}"
    );
}

/// Every value is explained, and the schema knows it.
#[test]
fn the_linter_finds_nothing() {
    let output = helm().args(["lint", "--strict", CHART]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    let version = env!("CARGO_PKG_VERSION");
    let chart = fs::read_to_string(Path::new(CHART).join("Chart.yaml")).unwrap();
    assert!(
        chart.contains(&format!("\nversion: {version}\nappVersion: {version}\n")),
        "the chart is of another version"
    );
}
