//! The arguments of `adit ca` and `adit ca token`, and what the commands do with them.

use std::fs::OpenOptions;
use std::future::Future;
use std::io::Write;
use std::net::SocketAddr;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use clap::{Args, ValueEnum};
use ipnet::IpNet;

use super::audit::AuditLog;
use super::authorize::{PodRules, ServiceAccount};
use super::cluster::{self, ClusterSettings, Opened};
use super::counts::Counts;
use super::folder::KeyFolder;
use super::health::serve_health;
use super::limits::LimitSettings;
use super::review::Reviewer;
use super::rotation::Watched;
use super::serve::{Server, Settings};
use super::service::Callers;
use super::status::Telling;
use super::token::{TokenRequest, TokenVerifier, make};
use crate::admin::Readiness;
use crate::identity::{BoxFuture, TrustDomain};
use crate::mesh::MeshHandle;
use crate::mesh::source::StatusHandle;
use crate::telemetry::LogFormat;

/// Run the certificate authority.
///
/// It serves Istio's certificate service over TLS. A node proxy that proves by its token who and where it is gets
/// certificates for the identities of the pods on its own node, and for nothing else. Every grant and refusal is a
/// log line of the target "audit", whatever the log's level is.
#[derive(Debug, Clone, Args)]
pub struct CaArgs {
    /// Folder of the CA's keys, made on first start with mode 0700. Clients trust `root.pem` in it.
    #[arg(long, env = "ADIT_CA_DIR", value_name = "DIR", default_value = "/var/lib/adit/ca")]
    pub dir: PathBuf,
    /// Address and port to listen on.
    #[arg(long, env = "ADIT_CA_LISTEN", value_name = "ADDRESS", default_value = "[::]:15012")]
    pub listen: SocketAddr,
    /// DNS name or IP address under which clients reach the CA. May be given more than once. [default: in a cluster the
    /// names of the Service adit-ca, else adit-ca.adit-system.svc, localhost and its addresses]
    #[arg(long = "name", env = "ADIT_CA_NAMES", value_name = "NAME", value_delimiter = ',')]
    pub names: Vec<String>,
    /// The same as --mesh-file.
    #[arg(long, env = "ADIT_CA_MESH", value_name = "FILE")]
    pub mesh: Option<PathBuf>,
    /// JSON Web Key Set file to verify callers' tokens with. Read again when it changes.
    #[arg(
        long,
        env = "ADIT_CA_JWKS",
        value_name = "FILE",
        default_value = "/var/lib/adit/issuer/jwks.json"
    )]
    pub jwks: PathBuf,
    /// The issuer that callers' tokens must come from.
    #[arg(long, env = "ADIT_CA_ISSUER", value_name = "URL", default_value = DEFAULT_ISSUER)]
    pub issuer: String,
    /// The audience that callers' tokens must be for. May be given more than once.
    #[arg(
        long = "audience", env = "ADIT_CA_AUDIENCE", value_name = "NAME", value_delimiter = ',',
        default_value = DEFAULT_AUDIENCE
    )]
    pub audiences: Vec<String>,
    /// Service account of the node proxies, as namespace/name. May be given more than once.
    #[arg(
        long = "node-proxy", env = "ADIT_CA_NODE_PROXIES", value_name = "ACCOUNT", value_delimiter = ',',
        default_value = DEFAULT_NODE_PROXY
    )]
    pub node_proxies: Vec<ServiceAccount>,
    /// The longest lifetime granted (30s, 15m, 24h, 7d).
    #[arg(long, env = "ADIT_CA_MAX_TTL", value_name = "DURATION", default_value = "24h", value_parser = duration)]
    pub max_ttl: Duration,
    /// The lifetime granted to callers that ask for none.
    #[arg(long, env = "ADIT_CA_DEFAULT_TTL", value_name = "DURATION", default_value = "24h", value_parser = duration)]
    pub default_ttl: Duration,
    /// How many requests a second one node is granted in the long run.
    #[arg(long, env = "ADIT_CA_NODE_RATE", value_name = "COUNT", default_value = "100", value_parser = clap::value_parser!(u32).range(1..))]
    pub node_rate: u32,
    /// How many requests one node is granted at once after it was quiet: more than it has identities.
    #[arg(long, env = "ADIT_CA_NODE_BURST", value_name = "COUNT", default_value = "1000", value_parser = clap::value_parser!(u32).range(1..))]
    pub node_burst: u32,
    /// How many requests of one node may be under way.
    #[arg(long, env = "ADIT_CA_NODE_IN_FLIGHT", value_name = "COUNT", default_value = "256", value_parser = clap::value_parser!(u32).range(1..))]
    pub node_in_flight: u32,
    /// How many connections one address, or one /64 of IPv6, may have, each node needing one. To be raised where more
    /// nodes than that share one: behind NAT or a load-balancer (see --caller-ranges), or in one network of IPv6.
    #[arg(long, env = "ADIT_CA_ADDRESS_CONNECTIONS", value_name = "COUNT", default_value = "128", value_parser = clap::value_parser!(u32).range(1..))]
    pub address_connections: u32,
    /// How many requests from one address, or one /64 of IPv6, may be under way. To be raised with
    /// --address-connections.
    #[arg(long, env = "ADIT_CA_ADDRESS_REQUESTS", value_name = "COUNT", default_value = "512", value_parser = clap::value_parser!(u32).range(1..))]
    pub address_requests: u32,
    /// Where readiness and metrics are served, for probes and Prometheus; nowhere if left out.
    #[arg(long, env = "ADIT_CA_HEALTH", value_name = "ADDRESS")]
    pub health: Option<SocketAddr>,
    /// In a cluster: the CA's own namespace, with its Secret and its ConfigMap.
    #[arg(long, env = "ADIT_CA_NAMESPACE", value_name = "NAME", default_value = "adit-system")]
    pub namespace: String,
    /// In a cluster: the Secret of the CA's own roots, made on first start and changed by `adit ca rotate`.
    #[arg(long, env = "ADIT_CA_KEY_SECRET", value_name = "NAME", default_value = "adit-ca-key")]
    pub key_secret: String,
    /// In a cluster: a Secret with an intermediate of another hierarchy, to sign by instead: ca-cert.pem, ca-key.pem,
    /// root-cert.pem and cert-chain.pem as Istio has them, or tls.crt, tls.key and ca.crt as cert-manager has.
    #[arg(long, env = "ADIT_CA_INTERMEDIATE_SECRET", value_name = "NAME")]
    pub intermediate_secret: Option<String>,
    /// In a cluster: the ConfigMap that the root is published in.
    #[arg(
        long,
        env = "ADIT_CA_ROOT_CONFIG_MAP",
        value_name = "NAME",
        default_value = "adit-ca-root"
    )]
    pub root_config_map: String,
    /// In a cluster: the ConfigMap in which `adit ca rotate` asks for changes of keys.
    #[arg(
        long,
        env = "ADIT_CA_ROTATION_CONFIG_MAP",
        value_name = "NAME",
        default_value = "adit-ca-rotation"
    )]
    pub rotation_config_map: String,
    /// In a cluster: the Lease of the replica that may change keys.
    #[arg(long, env = "ADIT_CA_LEASE", value_name = "NAME", default_value = "adit-ca")]
    pub lease: String,
    /// In a cluster: a ClusterTrustBundle to publish the roots in besides, such as mesh.adit:ca:roots.
    #[arg(long, env = "ADIT_CA_TRUST_BUNDLE", value_name = "NAME")]
    pub trust_bundle: Option<String>,
    /// In a cluster: whether a call must come from an address of its caller's node.
    #[arg(
        long,
        env = "ADIT_CA_CHECK_CALLER_ADDRESS",
        value_name = "SWITCH",
        default_value = "on"
    )]
    pub check_caller_address: Switch,
    /// In a cluster: addresses from which the proxy of any node may call, where the network rewrites them.
    #[arg(long, env = "ADIT_CA_CALLER_RANGES", value_name = "CIDR", value_delimiter = ',')]
    pub caller_ranges: Vec<IpNet>,
}

/// Whether something is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Switch {
    /// It is.
    On,
    /// It is not.
    Off,
}

/// Make a node token, for use without a cluster.
///
/// The token has the shape of Kubernetes' projected service account tokens and lets the node proxy on the given
/// node authenticate to the CA. The issuer's key and its `jwks.json`, which `adit ca --jwks` reads, are made on
/// first use.
#[derive(Debug, Clone, Args)]
pub struct TokenArgs {
    /// Folder of the token issuer, made on first use with mode 0700. Keep it apart from the CA's own.
    #[arg(
        long = "issuer-dir",
        env = "ADIT_CA_ISSUER_DIR",
        value_name = "DIR",
        default_value = "/var/lib/adit/issuer"
    )]
    pub dir: PathBuf,
    /// The node that the token is bound to.
    #[arg(long, value_name = "NAME")]
    pub node: String,
    /// The node proxy's pod [default: adit-<node>].
    #[arg(long, value_name = "NAME")]
    pub pod: Option<String>,
    /// The node proxy's service account, as namespace/name.
    #[arg(long, value_name = "ACCOUNT", default_value = DEFAULT_NODE_PROXY)]
    pub account: ServiceAccount,
    /// The issuer's name, as `adit ca --issuer` expects it.
    #[arg(long, env = "ADIT_CA_ISSUER", value_name = "URL", default_value = DEFAULT_ISSUER)]
    pub issuer: String,
    /// The audience, as `adit ca --audience` expects it.
    #[arg(long, env = "ADIT_CA_AUDIENCE", value_name = "NAME", default_value = DEFAULT_AUDIENCE)]
    pub audience: String,
    /// How long the token is valid (30s, 15m, 24h, 7d).
    #[arg(long, value_name = "DURATION", default_value = "24h", value_parser = duration)]
    pub ttl: Duration,
    /// Write the token to this file (mode 0600, replaced whole) instead of standard output.
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
}

const DEFAULT_ISSUER: &str = "https://kubernetes.default.svc.cluster.local";
const DEFAULT_AUDIENCE: &str = "adit-ca";
const DEFAULT_NODE_PROXY: &str = "adit-system/adit-node";
/// The Service's name in a cluster.
const SERVICE: &str = "adit-ca";
/// How long connections are still accepted after the stop was asked for: the Service leads here for a moment longer.
const LAME_DUCK: Duration = Duration::from_secs(2);

/// How long the Lease may take to be released.
const RELEASE: Duration = Duration::from_secs(5);

/// What the command line does not say.
pub struct Surroundings {
    /// The workloads and nodes, kept up to date by somebody else.
    pub mesh: MeshHandle,
    /// When the mesh was heard of last.
    pub status: StatusHandle,
    /// Completes when the mesh is whole for the first time.
    pub synced: BoxFuture<'static, ()>,
    /// The cluster, where the mesh is that of a cluster.
    pub client: Option<kube::Client>,
    /// The cluster's DNS domain.
    pub cluster_domain: String,
    /// The trust domain to sign for.
    pub trust_domain: TrustDomain,
    /// A name of this process, for people.
    pub host: String,
    /// How lines of the audit log look.
    pub log_format: LogFormat,
}

/// `adit ca`: serves until `shutdown` completes and open calls have ended.
pub async fn run(
    args: CaArgs,
    surroundings: Surroundings,
    shutdown: impl Future<Output = ()> + Send,
) -> anyhow::Result<()> {
    let (readiness, counts) = (Readiness::new(), Counts::default());
    let starting = readiness.pending("start");
    let telling = Telling::new(counts.clone());
    let (ending, ended) = tokio::sync::oneshot::channel::<()>();
    if let Some(address) = args.health {
        serve_health(address, readiness.clone(), &counts, telling.clone()).await?;
    }
    let mut shutdown = pin!(shutdown);
    let opening = open(&args, &surroundings, &readiness, &counts, ended);
    // The cluster may keep us waiting for long.
    let (opened, callers) = tokio::select! {
        opened = opening => opened?,
        () = &mut shutdown => return Ok(()),
    };
    let Opened {
        authority,
        upkeep,
        watched,
        leadership,
    } = opened;
    let (leadership, election) = leadership.unzip();
    telling.opened(authority.clone(), watched, leadership);
    let in_cluster = surroundings.client.is_some();
    let settings = Settings {
        names: names(&args, in_cluster, &surroundings.cluster_domain),
        pods: in_cluster.then(|| PodRules {
            check_address: args.check_caller_address == Switch::On,
            caller_ranges: args.caller_ranges,
            heard: Some(surroundings.status.clone()),
        }),
        listen: args.listen,
        node_proxies: args.node_proxies,
        max_ttl: args.max_ttl,
        default_ttl: args.default_ttl,
        limits: LimitSettings {
            rate: args.node_rate,
            burst: args.node_burst,
            in_flight: args.node_in_flight,
            of_address: args.address_requests as usize,
            connections_of_address: args.address_connections as usize,
            ..LimitSettings::default()
        },
    };
    let audit = AuditLog::on_standard_error(surroundings.log_format, counts.clone());
    let server = Server::bind(settings, authority, callers, surroundings.mesh, counts, audit).await?;
    let synced = readiness.pending("the first whole state of the mesh");
    tokio::spawn(async move {
        surroundings.synced.await;
        synced.done();
    });
    starting.done();
    let stop = async {
        shutdown.await;
        if in_cluster {
            let _stopping = readiness.pending("stopping");
            tokio::time::sleep(LAME_DUCK).await;
        }
    };
    let outcome = tokio::select! {
        served = server.run(stop) => served.map_err(anyhow::Error::from),
        error = upkeep => Err(error.into()),
    };
    drop(ending);
    if let Some(election) = election {
        // Another replica need not wait for the Lease to lapse.
        let _ = tokio::time::timeout(RELEASE, election).await;
    }
    outcome
}

async fn open(
    args: &CaArgs,
    surroundings: &Surroundings,
    readiness: &Readiness,
    counts: &Counts,
    ended: tokio::sync::oneshot::Receiver<()>,
) -> anyhow::Result<(Opened, Callers)> {
    let audiences = args.audiences.clone();
    let Some(client) = &surroundings.client else {
        let (authority, folder, keyring) = KeyFolder::open(&args.dir)?.authority(&surroundings.trust_domain)?;
        let (authority, watched) = (Arc::new(authority), Watched::default());
        watched.set(&keyring);
        let keeping = folder.keep(authority.clone(), args.max_ttl, watched.clone());
        let opened = Opened {
            authority,
            upkeep: Box::pin(async move {
                keeping.await;
                std::future::pending().await
            }),
            watched,
            leadership: None,
        };
        let tokens = TokenVerifier::new(args.jwks.clone(), args.issuer.clone(), audiences);
        return Ok((opened, Callers::KeySet(tokens)));
    };
    let settings = ClusterSettings {
        namespace: args.namespace.clone(),
        key_secret: args.key_secret.clone(),
        intermediate_secret: args.intermediate_secret.clone(),
        root_config_map: args.root_config_map.clone(),
        rotation_config_map: args.rotation_config_map.clone(),
        lease: args.lease.clone(),
        trust_bundle: args.trust_bundle.clone(),
        longest: args.max_ttl,
        host: surroundings.host.clone(),
    };
    let stop = async move { drop(ended.await) };
    let opened = cluster::open(client.clone(), &settings, &surroundings.trust_domain, readiness, stop).await?;
    let reviewer = Reviewer::new(client.clone(), audiences, counts.clone());
    Ok((opened, Callers::Reviewed(reviewer)))
}

/// The names of the serving certificate.
fn names(args: &CaArgs, in_cluster: bool, cluster_domain: &str) -> Vec<String> {
    if !args.names.is_empty() {
        return args.names.clone();
    }
    let namespace = &args.namespace;
    if in_cluster {
        return vec![
            SERVICE.into(),
            format!("{SERVICE}.{namespace}"),
            format!("{SERVICE}.{namespace}.svc"),
            format!("{SERVICE}.{namespace}.svc.{cluster_domain}"),
        ];
    }
    ["adit-ca.adit-system.svc", "localhost", "127.0.0.1", "::1"]
        .map(String::from)
        .into()
}

/// `adit ca token`: prints a token, or writes it to a file.
pub fn run_token(args: TokenArgs) -> anyhow::Result<()> {
    let token = make(&TokenRequest {
        pod: args.pod.unwrap_or_else(|| format!("adit-{}", args.node)),
        dir: args.dir,
        issuer: args.issuer,
        audience: args.audience,
        account: args.account,
        node: args.node,
        ttl: args.ttl,
    })?;
    match &args.out {
        Some(path) => {
            write_token(path, &token).with_context(|| format!("cannot write the token to {}", path.display()))
        }
        None => writeln!(std::io::stdout(), "{token}").context("cannot print the token"),
    }
}

/// Replaces the file in one step: a proxy reads it afresh for each call and must never see half of it.
fn write_token(path: &Path, token: &str) -> std::io::Result<()> {
    let mut staged = path.as_os_str().to_owned();
    staged.push(format!(".{:016x}", fastrand::u64(..)));
    let staged = PathBuf::from(staged);
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&staged)?;
    file.write_all(token.as_bytes())?;
    std::fs::rename(&staged, path)
}

/// Parses a number with a unit: s, m, h or d.
pub(super) fn duration(text: &str) -> Result<Duration, String> {
    let bad = || format!("{text:?} is not a duration such as 30s, 15m, 24h or 7d");
    let unit = text.chars().last().ok_or_else(bad)?;
    let seconds = match unit {
        's' => 1,
        'm' => 60,
        'h' => 60 * 60,
        'd' => 24 * 60 * 60,
        _ => return Err(bad()),
    };
    let number: u64 = text[..text.len() - 1].parse().map_err(|_| bad())?;
    // A hundred years: more is a mistake, and would overflow dates.
    let total = number
        .checked_mul(seconds)
        .filter(|total| (1..=100 * 365 * 24 * 60 * 60).contains(total));
    total.map(Duration::from_secs).ok_or_else(bad)
}
