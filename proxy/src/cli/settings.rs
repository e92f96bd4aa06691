//! The settings of `adit node`, checked and complete.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::Duration;

use thiserror::Error;

use super::args::{NodeArgs, StartupMode, Switch};
use super::logging::LogSettings;
use super::source::SourceSettings;
use super::values::BpfLog;
use crate::identity::{TrustDomain, TrustSettings};
use crate::telemetry::LogFormat;

/// HTTP/2 lets no window be larger than this (RFC 9113, 6.9.1).
const MAX_WINDOW: u32 = (1 << 31) - 1;

/// Why settings, each well-formed, do not go together.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum SettingsError {
    /// The admin address is not a loopback address.
    #[error("--admin {0}: the admin page answers anybody who reaches it, so it must be a loopback address")]
    AdminNotLoopback(SocketAddr),
    /// The authority's address is not `https://host:port`.
    #[error("--ca-address {0}: not of the form https://host:port")]
    CaAddress(String),
    /// The mesh is to come from a file, and none is named.
    #[error("--mesh-file is needed, unless --source is kubernetes")]
    NoMeshFile,
    /// A mesh file that nobody would read.
    #[error("--mesh-file {}: with --source kubernetes no mesh file is read; leave out one of the two", .0.display())]
    MeshFileUnused(PathBuf),
    /// A trust domain is said to be ours and to be another.
    #[error(
        "--trust-domain-alias {0} and --trust-domain-bundle {0}=…: it is either this mesh's trust domain or another"
    )]
    AliasAndForeign(TrustDomain),
    /// A stream's window is larger than its tunnel's.
    #[error("--connection-window {connection} is less than --stream-window {stream}: one stream could fill the tunnel")]
    Windows {
        /// The tunnel's window, in bytes.
        connection: u32,
        /// A stream's window, in bytes.
        stream: u32,
    },
}

/// How the certificate authority is reached, and what is asked of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CaClientSettings {
    /// `https://host:port`.
    pub address: String,
    /// PEM file of the roots that its server certificate must chain to.
    pub root: PathBuf,
    /// File of this node's token.
    pub token: PathBuf,
    /// The name that its server certificate must bear, where it is not the address's host.
    pub server_name: Option<String>,
    /// The lifetime asked for each certificate.
    pub certificate_ttl: Duration,
}

/// Where certificates are taken from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CertificateSource {
    /// A certificate authority.
    Authority(CaClientSettings),
    /// Files that another system keeps fresh.
    Folder(PathBuf),
    /// The SPIRE agent with this admin socket.
    Spire(String),
}

/// Everything that `adit node` needs to know.
#[derive(Debug, Clone)]
pub struct NodeSettings {
    /// Level and form of the log.
    pub log: LogSettings,
    /// This node's name.
    pub node_name: String,
    /// Where nodes, workloads, services and policies are learned from.
    pub source: SourceSettings,
    /// The cgroup that holds all pods; `auto` where that is to be found out.
    pub pods_cgroup: PathBuf,
    /// What becomes of connects of pods that nobody has looked at yet.
    pub startup: StartupMode,
    /// The kubelet's cgroup, where its probes are to reach enrolled pods under any policy.
    pub kubelet_cgroup: Option<PathBuf>,
    /// The kubelet's command name; empty where every process of its cgroup is it.
    pub kubelet_command: String,
    /// The folder of a bpffs in which maps and programs are pinned.
    pub bpf_dir: PathBuf,
    /// The folder of the socket by which one process hands over to the next.
    pub run_dir: PathBuf,
    /// Where certificates are taken from.
    pub certificates: CertificateSource,
    /// The cluster's name, sent with each request to an authority.
    pub cluster_id: String,
    /// What peers are verified against.
    pub trust: TrustSettings,
    /// How long a connection waits for a certificate that is not there yet.
    pub identity_wait: Duration,
    /// Threads that carry connections; at least 1.
    pub workers: usize,
    /// Connections that are carried for one pod at once; none where it follows from the limit of open files.
    pub max_connections_per_pod: Option<u32>,
    /// The deadline of one attempt to reach the next hop.
    pub connect_timeout: Duration,
    /// The deadline of each of TLS, HTTP/2 set-up and CONNECT.
    pub handshake_timeout: Duration,
    /// How long open connections may go on after SIGTERM, or after another process has taken over.
    pub drain_deadline: Duration,
    /// How long new connections are still taken after a signal, for a successor to take over.
    pub await_successor: Duration,
    /// HTTP/2 window of a stream, in bytes.
    pub stream_window: u32,
    /// HTTP/2 window of a tunnel, in bytes; at least that of a stream.
    pub connection_window: u32,
    /// Streams in one tunnel; at least 1.
    pub max_streams: u32,
    /// Where the admin page listens: a loopback address.
    pub admin: SocketAddr,
    /// Where metrics and readiness are served besides.
    pub metrics: Option<SocketAddr>,
    /// The Unix socket at which probes are answered.
    pub probe_socket: Option<PathBuf>,
    /// The form of the access log; none where it is off.
    pub access_log: Option<LogFormat>,
    /// For which pods the kernel programs explain themselves.
    pub bpf_log: BpfLog,
    /// The version of the layout of maps, by which the folder of pins is named.
    pub layout: u32,
    /// Maps that are to have other sizes than they are made for.
    pub map_entries: HashMap<String, u32>,
}

impl TryFrom<NodeArgs> for NodeSettings {
    type Error = SettingsError;

    fn try_from(args: NodeArgs) -> Result<Self, SettingsError> {
        if !args.admin.ip().is_loopback() {
            return Err(SettingsError::AdminNotLoopback(args.admin));
        }
        let certificates = match (args.spire_socket, args.certificate_folder) {
            (Some(socket), _) => CertificateSource::Spire(socket),
            (None, Some(folder)) => CertificateSource::Folder(folder),
            (None, None) if !is_authority(&args.ca_address) => return Err(SettingsError::CaAddress(args.ca_address)),
            (None, None) => CertificateSource::Authority(CaClientSettings {
                address: args.ca_address,
                root: args.ca_root,
                token: args.ca_token,
                server_name: args.ca_server_name,
                certificate_ttl: args.certificate_ttl,
            }),
        };
        let connection_window = args
            .connection_window
            .unwrap_or_else(|| args.stream_window.saturating_mul(args.max_streams).min(MAX_WINDOW));
        if connection_window < args.stream_window {
            return Err(SettingsError::Windows {
                connection: connection_window,
                stream: args.stream_window,
            });
        }
        let log_format = args.log.log_format;
        Ok(Self {
            log: args.log.into(),
            node_name: args.node_name,
            source: args.source.try_into()?,
            pods_cgroup: args.pods_cgroup,
            startup: args.startup,
            kubelet_cgroup: args.kubelet_cgroup,
            kubelet_command: args.kubelet_command,
            bpf_dir: args.bpf_dir,
            run_dir: args.run_dir,
            certificates,
            cluster_id: args.cluster_id,
            trust: args.trust.try_into()?,
            identity_wait: args.identity_wait,
            // More threads than CPUs only make them wait for each other; the work never blocks.
            workers: args.workers.map_or_else(cpus, usize::from),
            max_connections_per_pod: args.max_connections_per_pod,
            connect_timeout: args.connect_timeout,
            handshake_timeout: args.handshake_timeout,
            drain_deadline: args.drain_deadline,
            await_successor: args.await_successor,
            stream_window: args.stream_window,
            connection_window,
            max_streams: args.max_streams,
            admin: args.admin,
            metrics: args.metrics,
            probe_socket: args.probe_socket,
            access_log: (args.access_log == Switch::On).then_some(log_format),
            bpf_log: args.bpf_log,
            layout: args.layout,
            map_entries: args.map_entries.into_iter().collect(),
        })
    }
}

/// The CPUs that this process may use, by its affinity and cgroup quota.
fn cpus() -> usize {
    std::thread::available_parallelism().map_or(1, NonZeroUsize::get)
}

fn is_authority(address: &str) -> bool {
    address.parse::<http::Uri>().is_ok_and(|uri| {
        uri.scheme_str() == Some("https")
            && uri.host().is_some_and(|host| !host.is_empty())
            && uri.port().is_some()
            && matches!(uri.path(), "" | "/")
            && uri.query().is_none()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::{CommandFactory, FromArgMatches, Parser};

    #[derive(Debug, Parser)]
    struct Node {
        #[command(flatten)]
        args: NodeArgs,
    }

    fn settings(more: &[&str]) -> Result<NodeSettings, SettingsError> {
        let mut args = vec!["node", "--node-name=n", "--mesh-file=/m", "--ca-root=/r"];
        if !more.iter().any(|arg| arg.starts_with("--ca-address")) {
            args.push("--ca-address=https://ca:15012");
        }
        args.extend(more);
        Node::from_arg_matches(&Node::command().get_matches_from(args))
            .unwrap()
            .args
            .try_into()
    }

    #[test]
    fn a_tunnels_window_holds_all_its_streams() {
        let settings = settings(&["--stream-window=64KiB", "--max-streams=10"]).unwrap();
        assert_eq!((settings.stream_window, settings.connection_window), (65_536, 655_360));
    }

    #[test]
    fn a_tunnels_window_is_never_above_the_protocols_limit() {
        assert_eq!(
            settings(&["--stream-window=1GiB"]).unwrap().connection_window,
            MAX_WINDOW
        );
    }

    #[test]
    fn settings_that_do_not_go_together_are_refused() {
        let admin = "192.0.2.1:15000".parse().unwrap();
        for (args, reason) in [
            (&["--admin=192.0.2.1:15000"][..], SettingsError::AdminNotLoopback(admin)),
            (
                &["--stream-window=2MiB", "--connection-window=1MiB"],
                SettingsError::Windows {
                    connection: 1 << 20,
                    stream: 2 << 20,
                },
            ),
            (
                &["--ca-address=http://ca:1"],
                SettingsError::CaAddress("http://ca:1".into()),
            ),
            (
                &["--ca-address=https://ca"],
                SettingsError::CaAddress("https://ca".into()),
            ),
            (&["--ca-address=ca:15012"], SettingsError::CaAddress("ca:15012".into())),
            (&["--source=kubernetes"], SettingsError::MeshFileUnused("/m".into())),
        ] {
            assert_eq!(settings(args).unwrap_err(), reason, "{args:?}");
        }
    }

    #[test]
    fn certificates_have_one_source() {
        let source = |args: &[&str]| {
            let args = [&["node", "--node-name=n", "--mesh-file=/m"], args].concat();
            let matches = Node::command().try_get_matches_from(args)?;
            let args = Node::from_arg_matches(&matches)?.args;
            Ok::<_, clap::Error>(NodeSettings::try_from(args).unwrap().certificates)
        };
        let (socket, folder) = ("--spire-socket=/run/spire/admin.sock", "--certificate-folder=/c");
        let spire = CertificateSource::Spire("/run/spire/admin.sock".into());
        assert_eq!(source(&[socket]).unwrap(), spire);
        assert_eq!(source(&[folder]).unwrap(), CertificateSource::Folder("/c".into()));
        let ca = ["--ca-address=https://ca:1", "--ca-root=/r"];
        assert!(matches!(source(&ca).unwrap(), CertificateSource::Authority(_)));
        for refused in [&[][..], &[socket, folder], &[socket, ca[0], ca[1]]] {
            assert!(source(refused).is_err(), "{refused:?}");
        }
    }

    #[test]
    fn the_access_log_follows_the_logs_form() {
        assert_eq!(settings(&[]).unwrap().access_log, Some(LogFormat::Logfmt));
        assert_eq!(
            settings(&["--log-format=json"]).unwrap().access_log,
            Some(LogFormat::Json)
        );
        assert_eq!(settings(&["--access-log=off"]).unwrap().access_log, None);
    }
}
