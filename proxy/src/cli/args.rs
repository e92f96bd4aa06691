//! The flags of `adit node`, as clap reads them.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::builder::{ArgPredicate, NonEmptyStringValueParser};
use clap::{Args, ValueEnum};

use super::source::SourceArgs;
use super::trust::TrustArgs;
use super::values::{BpfLog, LogLevel, parse_bytes, parse_duration, parse_map_entries, parse_positive_duration};
use crate::telemetry::LogFormat;

const NODE_HEADING: &str = "Node";
const CA_HEADING: &str = "Certificates";
const PLANE_HEADING: &str = "Carrying connections";
const TUNNEL_HEADING: &str = "Tunnel";
const ADMIN_HEADING: &str = "Watching it";
const COMMON_HEADING: &str = "Configuration and log";

/// Find it out.
pub(super) const AUTO: &str = "auto";

/// The value of what a run needs, where nothing is run.
pub(super) const UNUSED: &str = "-";

pub(super) const LONG_ABOUT: &str = "\
Runs the proxy of this node: loads the kernel programs, enrols the pods of this node that the mesh \
has, by a file or by labels in the cluster, fetches a certificate for each of their identities, and carries their connections. It \
needs root, cgroup v2, bpffs and Linux 6.1 or newer, and says what is missing where something is.

SIGTERM and SIGINT drain: no new connections (after --await-successor), those open go on until \
--drain-deadline. Pods stay enrolled when the proxy ends, however it ends, and are refused until it runs again; --uninstall lets \
them go.";

pub(super) const EXAMPLES: &str = "\
Examples:
  Everything by flags:
    adit node --node-name worker-1 --mesh-file /etc/adit/mesh.yaml \\
        --ca-address https://ca.example:15012 --ca-root /etc/adit/ca-root.pem

  In a cluster:
    adit node --node-name worker-1 --source kubernetes \\
        --ca-address https://adit-ca.adit-system.svc:15012 --ca-root /etc/adit/ca-root.pem

  From a file, with one setting changed for this run:
    adit node --config /etc/adit/node.yaml --log-level adit=debug

  Without Adit, as before:
    adit node --uninstall

  What it is doing:
    curl 127.0.0.1:15000/healthz/ready
    curl 127.0.0.1:15000/metrics
    curl 127.0.0.1:15000/debug/state";

/// Flags that every long-running command has.
#[derive(Debug, Clone, Args)]
pub struct LogArgs {
    /// A YAML file of settings; its keys are the names of the flags
    #[arg(long, value_name = "FILE", env = "ADIT_CONFIG", help_heading = COMMON_HEADING)]
    pub config: Option<PathBuf>,

    /// What is logged: error, warn, info, debug or trace, or a list such as info,adit::hbone=debug
    #[arg(long, value_name = "FILTER", env = "ADIT_LOG_LEVEL", default_value = "info", help_heading = COMMON_HEADING)]
    pub log_level: LogLevel,

    /// How log lines look
    #[arg(long, value_name = "FORMAT", env = "ADIT_LOG_FORMAT", default_value = "logfmt", help_heading = COMMON_HEADING)]
    pub log_format: LogFormat,
}

/// With one of these there is no authority.
const WITHOUT_CA: [&str; 3] = ["uninstall", "certificate_folder", "spire_socket"];
const UNUSED_WITHOUT_CA: [(&str, ArgPredicate, &str); 3] = [
    (WITHOUT_CA[0], ArgPredicate::IsPresent, UNUSED),
    (WITHOUT_CA[1], ArgPredicate::IsPresent, UNUSED),
    (WITHOUT_CA[2], ArgPredicate::IsPresent, UNUSED),
];

/// Whether something is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Switch {
    On,
    Off,
}

/// What becomes of connects of pods that nobody has looked at yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum StartupMode {
    /// They are refused.
    Enforced,
    /// They pass, in plaintext and whatever policies say, and are counted.
    Permissive,
}

/// The flags of `adit node`.
#[derive(Debug, Clone, Args)]
pub struct NodeArgs {
    /// This node's name, as the mesh's source and the authority know it
    #[arg(long, value_name = "NAME", env = "ADIT_NODE_NAME", help_heading = NODE_HEADING,
          value_parser = NonEmptyStringValueParser::new(),
          required = false, required_unless_present = "uninstall", default_value_if("uninstall", ArgPredicate::IsPresent, UNUSED))]
    pub(super) node_name: String,

    /// The cgroup v2 directory below which the cgroups of all pods lie. `auto` is what kubelets call it: kubepods.slice or
    /// kubepods, below the mounted cgroup v2
    #[arg(long, value_name = "PATH", env = "ADIT_PODS_CGROUP", help_heading = NODE_HEADING, default_value = AUTO)]
    pub(super) pods_cgroup: PathBuf,

    /// The folder of a bpffs in which maps and programs are kept while the proxy is away. It is made where it is
    /// missing, and a bpffs is mounted at /sys/fs/bpf where there is none, but not by a container
    #[arg(long, value_name = "PATH", env = "ADIT_BPF_DIR", help_heading = NODE_HEADING,
          default_value = "/sys/fs/bpf/adit")]
    pub(super) bpf_dir: PathBuf,

    /// The folder of the socket by which one proxy of this node hands over to the next
    #[arg(long, value_name = "PATH", env = "ADIT_RUN_DIR", help_heading = NODE_HEADING, default_value = "/run/adit")]
    pub(super) run_dir: PathBuf,

    /// Instead of running: lets all pods go, and removes whatever any version has left below --bpf-dir
    #[arg(long, help_heading = NODE_HEADING)]
    pub(super) uninstall: bool,

    /// With --uninstall: does not end when it is done, but when it is told to stop; for a container that is not to be
    /// started again
    #[arg(long, requires = "uninstall", help_heading = NODE_HEADING)]
    pub(super) stay: bool,

    /// What becomes of connects of a pod that has just been born, until it is enrolled or known not to be in the mesh
    #[arg(long, value_name = "MODE", env = "ADIT_STARTUP", help_heading = NODE_HEADING, default_value = "enforced")]
    pub(super) startup: StartupMode,

    /// The kubelet's cgroup v2 directory, such as /sys/fs/cgroup/system.slice/kubelet.service, or `auto` to find it by its
    /// process (hostPID): its probes then reach enrolled pods under any policy. Where it is left out, they are decided on as any plaintext peer
    #[arg(long, value_name = "PATH", env = "ADIT_KUBELET_CGROUP", help_heading = NODE_HEADING)]
    pub(super) kubelet_cgroup: Option<PathBuf>,

    /// The command name of the kubelet among the processes of its cgroup; empty where each of them may probe
    #[arg(long, value_name = "NAME", env = "ADIT_KUBELET_COMMAND", help_heading = NODE_HEADING,
          default_value = "kubelet")]
    pub(super) kubelet_command: String,

    /// Take certificates from files that another system keeps fresh, and from no authority: tls.crt, tls.key and ca.crt in
    /// PATH/NAMESPACE/SERVICE-ACCOUNT for each identity
    #[arg(long, value_name = "PATH", env = "ADIT_CERTIFICATE_FOLDER", help_heading = CA_HEADING)]
    pub(super) certificate_folder: Option<PathBuf>,

    /// Take certificates from the SPIRE agent of this node, and from no authority: its admin socket, an absolute path. The
    /// agent must name this proxy's SPIFFE ID among its authorized_delegates
    #[arg(long, value_name = "PATH", env = "ADIT_SPIRE_SOCKET", help_heading = CA_HEADING,
          conflicts_with_all = ["certificate_folder", "ca_address"])]
    pub(super) spire_socket: Option<String>,

    /// The certificate authority, as https://host:port
    #[arg(long, value_name = "URL", env = "ADIT_CA_ADDRESS", help_heading = CA_HEADING,
          value_parser = NonEmptyStringValueParser::new(),
          required = false, required_unless_present_any = WITHOUT_CA, default_value_ifs(UNUSED_WITHOUT_CA))]
    pub(super) ca_address: String,

    /// PEM file of the roots that the authority's own server certificate must chain to
    #[arg(long, value_name = "FILE", env = "ADIT_CA_ROOT", help_heading = CA_HEADING,
          required = false, required_unless_present_any = WITHOUT_CA, default_value_ifs(UNUSED_WITHOUT_CA))]
    pub(super) ca_root: PathBuf,

    /// File of the token that proves to the authority which node this is; read anew for each request
    #[arg(long, value_name = "FILE", env = "ADIT_CA_TOKEN", help_heading = CA_HEADING,
          default_value = "/var/run/secrets/tokens/istio-token")]
    pub(super) ca_token: PathBuf,

    /// The name that the authority's server certificate must bear; the host of --ca-address where it is left out
    #[arg(long, value_name = "NAME", env = "ADIT_CA_SERVER_NAME", help_heading = CA_HEADING,
          value_parser = NonEmptyStringValueParser::new())]
    pub(super) ca_server_name: Option<String>,

    /// The cluster's name, sent to the authority and shown in metrics
    #[arg(long, value_name = "NAME", env = "ADIT_CLUSTER_ID", help_heading = CA_HEADING,
          default_value = "Kubernetes", value_parser = NonEmptyStringValueParser::new())]
    pub(super) cluster_id: String,

    /// The lifetime asked for each certificate; the authority may grant less
    #[arg(long, value_name = "DURATION", env = "ADIT_CERTIFICATE_TTL", help_heading = CA_HEADING,
          default_value = "24h", value_parser = parse_positive_duration)]
    pub(super) certificate_ttl: Duration,

    /// How long a connection waits for a certificate that is not there yet
    #[arg(long, value_name = "DURATION", env = "ADIT_IDENTITY_WAIT", help_heading = CA_HEADING,
          default_value = "5s", value_parser = parse_duration)]
    pub(super) identity_wait: Duration,

    /// Threads that carry connections; each connection stays on one. As many as the CPUs this process may use, where
    /// it is left out
    #[arg(long, value_name = "N", env = "ADIT_WORKERS", help_heading = PLANE_HEADING,
          value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub(super) workers: Option<u16>,

    /// Connections that are carried for one pod at once, both ways together; further ones are refused. Where it
    /// is left out, pods share half as many as this process may open files: each may have three times as many as are free
    /// still, so that one alone gets three quarters, and others always find some left
    #[arg(long, value_name = "N", env = "ADIT_MAX_CONNECTIONS_PER_POD", help_heading = PLANE_HEADING,
          value_parser = clap::value_parser!(u32).range(1..))]
    pub(super) max_connections_per_pod: Option<u32>,

    /// How long one attempt to reach the next hop may take
    #[arg(long, value_name = "DURATION", env = "ADIT_CONNECT_TIMEOUT", help_heading = PLANE_HEADING,
          default_value = "10s", value_parser = parse_positive_duration)]
    pub(super) connect_timeout: Duration,

    /// How long TLS and HTTP/2 set-up with a tunnel's peer may take together; the answer to a CONNECT may take this and
    /// --connect-timeout
    #[arg(long, value_name = "DURATION", env = "ADIT_HANDSHAKE_TIMEOUT", help_heading = PLANE_HEADING,
          default_value = "10s", value_parser = parse_positive_duration)]
    pub(super) handshake_timeout: Duration,

    /// How long open connections may go on after SIGTERM, or after another proxy has taken over
    #[arg(long, value_name = "DURATION", env = "ADIT_DRAIN_DEADLINE", help_heading = PLANE_HEADING,
          default_value = "10m", value_parser = parse_duration)]
    pub(super) drain_deadline: Duration,

    /// How long new connections are still taken after SIGTERM, for a proxy that is started only then to take over
    /// without a gap. A second signal ends that
    #[arg(long, value_name = "DURATION", env = "ADIT_AWAIT_SUCCESSOR", help_heading = PLANE_HEADING,
          default_value = "0s", value_parser = parse_duration)]
    pub(super) await_successor: Duration,

    /// Bytes that the peer may send on one connection in a tunnel before this end has read them
    #[arg(long, value_name = "SIZE", env = "ADIT_STREAM_WINDOW", help_heading = TUNNEL_HEADING,
          default_value = "1MiB", value_parser = parse_bytes)]
    pub(super) stream_window: u32,

    /// The same for a whole tunnel. Where it is left out, as much as all its streams together, so that no stalled
    /// stream can hold up the others
    #[arg(long, value_name = "SIZE", env = "ADIT_CONNECTION_WINDOW", help_heading = TUNNEL_HEADING,
          value_parser = parse_bytes)]
    pub(super) connection_window: Option<u32>,

    /// Connections that share one tunnel before another is opened
    #[arg(long, value_name = "N", env = "ADIT_MAX_STREAMS", help_heading = TUNNEL_HEADING, default_value = "100",
          value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub(super) max_streams: u32,

    /// Where readiness, metrics and state are served; a loopback address
    #[arg(long, value_name = "ADDRESS", env = "ADIT_ADMIN", help_heading = ADMIN_HEADING,
          default_value = "127.0.0.1:15000")]
    pub(super) admin: SocketAddr,

    /// Where metrics and readiness, and nothing else, are served to whoever may reach it, such as 10.0.0.1:15020. Nowhere
    /// but on the admin page, where it is left out
    #[arg(long, value_name = "ADDRESS", env = "ADIT_METRICS", help_heading = ADMIN_HEADING)]
    pub(super) metrics: Option<SocketAddr>,

    /// A Unix socket at which this very process answers `adit probe`. While one proxy takes over from another, the
    /// admin page is the other's
    #[arg(long, value_name = "PATH", env = "ADIT_PROBE_SOCKET", help_heading = ADMIN_HEADING)]
    pub(super) probe_socket: Option<PathBuf>,

    /// Whether a line on standard output tells of each connection that has ended
    #[arg(long, value_name = "SWITCH", env = "ADIT_ACCESS_LOG", help_heading = ADMIN_HEADING, default_value = "on")]
    pub(super) access_log: Switch,

    /// For which pod the kernel programs explain their decisions in the log: none, all, or NAMESPACE/NAME
    #[arg(long, value_name = "PODS", env = "ADIT_BPF_LOG", help_heading = ADMIN_HEADING, default_value = "none")]
    pub(super) bpf_log: BpfLog,

    /// For tests: the version in whose folder maps and programs are pinned, as if this were of that layout
    #[arg(long, value_name = "VERSION", hide = true, default_value_t = adit_common::LAYOUT)]
    pub(super) layout: u32,

    /// For tests: a map and how many entries it has, instead of those it is made for
    #[arg(long, value_name = "MAP=N", hide = true, value_parser = parse_map_entries)]
    pub(super) map_entries: Vec<(String, u32)>,

    #[command(flatten)]
    pub(super) trust: TrustArgs,

    #[command(flatten)]
    pub(super) source: SourceArgs,

    #[command(flatten)]
    pub(super) log: LogArgs,
}
