//! The programs that make machines into a cluster, and what each is told.

use std::ffi::OsString;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context;
use serde_json::json;

use super::images::PAUSE;
use super::layout::{API_SERVER, Machine, POD_RANGES, Prefix, SERVICE_RANGES};
use super::programs;

/// A program of a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Service {
    /// The store of the API server.
    Etcd,
    /// The API server.
    ApiServer,
    /// All controllers of Kubernetes.
    ControllerManager,
    /// The scheduler.
    Scheduler,
    /// What runs containers.
    Containerd,
    /// The agent of a node.
    Kubelet,
    /// What makes services' addresses work on a node.
    KubeProxy,
}

impl Service {
    /// The program's name, and that of its cgroup and log.
    pub fn name(self) -> &'static str {
        match self {
            Service::Etcd => "etcd",
            Service::ApiServer => "kube-apiserver",
            Service::ControllerManager => "kube-controller-manager",
            Service::Scheduler => "kube-scheduler",
            Service::Containerd => "containerd",
            Service::Kubelet => "kubelet",
            Service::KubeProxy => "kube-proxy",
        }
    }

    /// Those of a machine, in the order in which they start.
    pub(super) fn of(machine: Machine, kube_proxy: bool) -> Vec<Service> {
        match machine {
            Machine::ControlPlane => vec![
                Service::Etcd,
                Service::ApiServer,
                Service::ControllerManager,
                Service::Scheduler,
            ],
            Machine::Node(_) if kube_proxy => vec![Service::Containerd, Service::Kubelet, Service::KubeProxy],
            Machine::Node(_) => vec![Service::Containerd, Service::Kubelet],
        }
    }

    /// Program and arguments.
    pub(super) fn command(self, prefix: &Prefix, machine: Machine) -> anyhow::Result<Vec<OsString>> {
        let program = match self {
            Service::Containerd => programs::host(self.name())?,
            _ => programs::kubernetes(self.name())?,
        };
        let mut command = vec![program.into_os_string()];
        command.extend(self.arguments(prefix, machine).into_iter().map(OsString::from));
        Ok(command)
    }

    fn arguments(self, prefix: &Prefix, machine: Machine) -> Vec<String> {
        let folder = prefix.folder(machine);
        let pki = |file: &str| prefix.pki(file).display().to_string();
        let config = |file: &str| folder.join(file).display().to_string();
        match self {
            Service::Etcd => etcd(&folder),
            Service::ApiServer => api_server(&pki),
            Service::ControllerManager => vec![
                format!("--kubeconfig={}", pki("controller-manager.kubeconfig")),
                "--bind-address=127.0.0.1".into(),
                "--leader-elect=false".into(),
                "--use-service-account-credentials".into(),
                format!("--service-account-private-key-file={}", pki("service-accounts.key")),
                format!("--root-ca-file={}", pki("ca.crt")),
                // A test's hundreds of pods are not to wait for a budget made for big clusters.
                "--kube-api-qps=300".into(),
                "--kube-api-burst=500".into(),
                // A killed node is noticed within a test's patience.
                "--node-monitor-period=1s".into(),
                "--node-monitor-grace-period=20s".into(),
            ],
            Service::Scheduler => vec![
                format!("--kubeconfig={}", pki("scheduler.kubeconfig")),
                "--bind-address=127.0.0.1".into(),
                "--leader-elect=false".into(),
                "--kube-api-qps=300".into(),
                "--kube-api-burst=500".into(),
            ],
            Service::Containerd => vec!["--config".into(), config("containerd.toml")],
            Service::Kubelet => vec![
                format!("--config={}", config("kubelet.json")),
                format!("--kubeconfig={}", pki(&format!("{machine}.kubeconfig"))),
                format!("--hostname-override={machine}"),
                format!("--node-ip={},{}", machine.v4(), machine.v6()),
            ],
            Service::KubeProxy => vec![
                format!("--config={}", config("kube-proxy.json")),
                format!("--hostname-override={machine}"),
            ],
        }
    }
}

impl fmt::Display for Service {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

fn etcd(folder: &Path) -> Vec<String> {
    let (clients, peers) = ("http://127.0.0.1:2379", "http://127.0.0.1:2380");
    [
        ("--name", "cp".to_owned()),
        ("--data-dir", folder.join("etcd").display().to_string()),
        ("--listen-client-urls", clients.to_owned()),
        ("--advertise-client-urls", clients.to_owned()),
        ("--listen-peer-urls", peers.to_owned()),
        ("--initial-advertise-peer-urls", peers.to_owned()),
        ("--initial-cluster", format!("cp={peers}")),
        ("--log-level", "warn".to_owned()),
        // What is here need not outlive a loss of power.
        ("--unsafe-no-fsync", "true".to_owned()),
    ]
    .map(|(name, value)| format!("{name}={value}"))
    .to_vec()
}

fn api_server(pki: &dyn Fn(&str) -> String) -> Vec<String> {
    [
        ("--etcd-servers", "http://127.0.0.1:2379".to_owned()),
        ("--bind-address", API_SERVER.to_string()),
        ("--advertise-address", API_SERVER.to_string()),
        ("--secure-port", "6443".to_owned()),
        ("--tls-cert-file", pki("apiserver.crt")),
        ("--tls-private-key-file", pki("apiserver.key")),
        ("--client-ca-file", pki("ca.crt")),
        ("--kubelet-certificate-authority", pki("ca.crt")),
        ("--kubelet-client-certificate", pki("apiserver-kubelet.crt")),
        ("--kubelet-client-key", pki("apiserver-kubelet.key")),
        // There is no DNS between machines for their names.
        ("--kubelet-preferred-address-types", "InternalIP".to_owned()),
        (
            "--service-account-issuer",
            "https://kubernetes.default.svc.cluster.local".to_owned(),
        ),
        ("--service-account-key-file", pki("service-accounts.pub")),
        ("--service-account-signing-key-file", pki("service-accounts.key")),
        ("--service-cluster-ip-range", SERVICE_RANGES.to_owned()),
        ("--authorization-mode", "Node,RBAC".to_owned()),
        ("--enable-admission-plugins", "NodeRestriction".to_owned()),
        ("--allow-privileged", "true".to_owned()),
        // Webhooks are called at pods' addresses: the control plane has no kube-proxy.
        ("--enable-aggregator-routing", "true".to_owned()),
        ("--profiling", "false".to_owned()),
    ]
    .map(|(name, value)| format!("{name}={value}"))
    .to_vec()
}

/// Writes what the programs of a node read.
pub(super) fn configure(prefix: &Prefix, node: Machine) -> anyhow::Result<()> {
    let folder = prefix.folder(node);
    let cni = folder.join("root/etc/cni/net.d");
    fs::create_dir_all(&cni).with_context(|| format!("make {}", cni.display()))?;
    let resolver = folder.join("resolv.conf");
    let files: [(PathBuf, String); 5] = [
        (folder.join("containerd.toml"), containerd()),
        (cni.join("10-adit.conflist"), pod_network(node).to_string()),
        (resolver.clone(), String::new()),
        (
            folder.join("kubelet.json"),
            kubelet(prefix, node, &resolver).to_string(),
        ),
        (folder.join("kube-proxy.json"), kube_proxy(prefix).to_string()),
    ];
    for (path, text) in files {
        fs::write(&path, text).with_context(|| format!("write {}", path.display()))?;
    }
    Ok(())
}

/// For containerd 1.6 and 1.7. What it has no use for here is off, so that it starts in a moment.
fn containerd() -> String {
    let off = [
        "io.containerd.snapshotter.v1.aufs",
        "io.containerd.snapshotter.v1.btrfs",
        "io.containerd.snapshotter.v1.devmapper",
        "io.containerd.snapshotter.v1.zfs",
        "io.containerd.internal.v1.opt",
        "io.containerd.internal.v1.tracing",
        "io.containerd.tracing.processor.v1.otlp",
    ];
    // Root of a container has no right to lower its processes' score below its own (CAP_SYS_RESOURCE).
    format!(
        r#"version = 2
root = "/var/lib/containerd"
state = "/run/containerd"
oom_score = 0
disabled_plugins = {off:?}

[grpc]
address = "/run/containerd/containerd.sock"

[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{PAUSE}"
restrict_oom_score_adj = true

[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "/usr/lib/cni"
conf_dir = "/etc/cni/net.d"

[plugins."io.containerd.grpc.v1.cri".containerd]
snapshotter = "overlayfs"

[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
options = {{ SystemdCgroup = false }}
"#
    )
}

fn pod_network(node: Machine) -> serde_json::Value {
    let ranges: Vec<_> = node
        .pod_ranges()
        .iter()
        .map(|range| json!([{"subnet": range}]))
        .collect();
    json!({
        "cniVersion": "0.4.0",
        "name": "pods",
        "plugins": [
            {
                "type": "bridge",
                "bridge": "cni0",
                "isGateway": true,
                "hairpinMode": true,
                "ipam": {
                    "type": "host-local",
                    "ranges": ranges,
                    "routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}],
                },
            },
            {"type": "portmap", "capabilities": {"portMappings": true}, "snat": true},
        ],
    })
}

fn kubelet(prefix: &Prefix, node: Machine, resolver: &Path) -> serde_json::Value {
    json!({
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        // Some hosts have their controllers in the hierarchies of old.
        "failCgroupV1": false,
        "cgroupDriver": "cgroupfs",
        "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
        "healthzBindAddress": "127.0.0.1",
        "failSwapOn": false,
        "authentication": {
            "anonymous": {"enabled": false},
            "webhook": {"enabled": true, "cacheTTL": "2s"},
            "x509": {"clientCAFile": prefix.pki("ca.crt")},
        },
        "authorization": {
            "mode": "Webhook",
            "webhook": {"cacheAuthorizedTTL": "2s", "cacheUnauthorizedTTL": "2s"},
        },
        "tlsCertFile": prefix.pki(&format!("{node}.crt")),
        "tlsPrivateKeyFile": prefix.pki(&format!("{node}.key")),
        "rotateCertificates": false,
        "resolvConf": resolver,
        "clusterDomain": "cluster.local",
        "clusterDNS": ["10.96.0.10"],
        "makeIPTablesUtilChains": false,
        "enforceNodeAllocatable": ["pods"],
        // However full the disk of the host is, nothing is to be evicted for it.
        "imageGCHighThresholdPercent": 100,
        "evictionHard": {"memory.available": "50Mi", "nodefs.available": "0%", "nodefs.inodesFree": "0%",
                         "imagefs.available": "0%"},
        // `kubectl logs` shows the newest file only, and tests look for lines.
        "containerLogMaxSize": "200Mi",
        "maxPods": 250,
        "registryPullQPS": 0,
        "eventRecordQPS": 0,
        "kubeAPIQPS": 200,
        "kubeAPIBurst": 400,
        "nodeStatusUpdateFrequency": "5s",
        "volumeStatsAggPeriod": "0s",
        "runtimeRequestTimeout": "1m",
    })
}

fn kube_proxy(prefix: &Prefix) -> serde_json::Value {
    json!({
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "clientConnection": {"kubeconfig": prefix.pki("kube-proxy.kubeconfig")},
        "mode": "nftables",
        "clusterCIDR": POD_RANGES,
        // Machine-wide limits are the host's.
        "conntrack": {"maxPerCore": 0, "min": 0},
        "healthzBindAddress": "127.0.0.1:10256",
        "metricsBindAddress": "127.0.0.1:10249",
    })
}
