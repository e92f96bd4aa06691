//! The arguments of `adit ca` and `adit ca token`, and what the commands do with them.

use std::fs::OpenOptions;
use std::future::Future;
use std::io::Write;
use std::net::SocketAddr;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use clap::Args;

use super::authorize::{Placement, ServiceAccount};
use super::serve::{Settings, serve};
use super::token::{TokenRequest, make};
use crate::identity::TrustDomain;

/// Run the certificate authority.
///
/// It serves Istio's certificate service over TLS. A node proxy that proves by its token who and where it is gets
/// certificates for the identities of the pods on its own node, and for nothing else. Every grant and refusal is a
/// log line of the target "audit".
#[derive(Debug, Clone, Args)]
pub struct CaArgs {
    /// Folder of the CA's keys, made on first start with mode 0700. Clients trust `root.pem` in it.
    #[arg(long, env = "ADIT_CA_DIR", value_name = "DIR", default_value = "/var/lib/adit/ca")]
    pub dir: PathBuf,
    /// Address and port to listen on.
    #[arg(long, env = "ADIT_CA_LISTEN", value_name = "ADDRESS", default_value = "[::]:15012")]
    pub listen: SocketAddr,
    /// DNS name or IP address under which clients reach the CA. May be given more than once.
    #[arg(
        long = "name",
        env = "ADIT_CA_NAMES",
        value_name = "NAME",
        value_delimiter = ',',
        default_value = "adit-ca.adit-system.svc,localhost,127.0.0.1,::1"
    )]
    pub names: Vec<String>,
    /// The trust domain to sign for.
    #[arg(
        long,
        env = "ADIT_CA_TRUST_DOMAIN",
        value_name = "NAME",
        default_value = "cluster.local"
    )]
    pub trust_domain: TrustDomain,
    /// The mesh file: which workloads run on which node. Read again when it changes.
    #[arg(long, env = "ADIT_CA_MESH", value_name = "FILE")]
    pub mesh: PathBuf,
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
    /// The audience that callers' tokens must be for.
    #[arg(long, env = "ADIT_CA_AUDIENCE", value_name = "NAME", default_value = DEFAULT_AUDIENCE)]
    pub audience: String,
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
const DEFAULT_AUDIENCE: &str = "istio-ca";
const DEFAULT_NODE_PROXY: &str = "adit-system/adit";

impl From<CaArgs> for Settings {
    fn from(args: CaArgs) -> Self {
        Self {
            dir: args.dir,
            listen: args.listen,
            names: args.names,
            trust_domain: args.trust_domain,
            jwks: args.jwks,
            issuer: args.issuer,
            audience: args.audience,
            node_proxies: args.node_proxies,
            max_ttl: args.max_ttl,
            default_ttl: args.default_ttl,
        }
    }
}

/// `adit ca`: serves until `shutdown` completes. `placement` is what the mesh file (`CaArgs::mesh`) says.
pub async fn run(
    args: CaArgs,
    placement: Arc<dyn Placement>,
    shutdown: impl Future<Output = ()> + Send,
) -> anyhow::Result<()> {
    Ok(serve(args.into(), placement, shutdown).await?)
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
fn duration(text: &str) -> Result<Duration, String> {
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
