//! The client of a CA that serves `istio.v1.auth.IstioCertificateService`.

use std::collections::BTreeMap;
use std::error::Error as _;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use http::Uri;
use prost_types::value::Kind;
use prost_types::{Struct, Value};
use thiserror::Error;
use tokio::io::AsyncReadExt;
use tonic::metadata::{Ascii, MetadataKey, MetadataMap, MetadataValue};
use tonic::transport::{Channel, ClientTlsConfig, Endpoint};
use tonic::{Code, Request, Status};

use super::chain::MAX_CHAIN_BYTES;
use super::proto::istio_certificate_service_client::IstioCertificateServiceClient;
use super::proto::{IMPERSONATED_IDENTITY, IstioCertificateRequest};
use super::{BoxFuture, Certificate, IssueError, Issued, Issuer, PrivateKey, SpiffeId};

/// The largest token and root files read.
const MAX_TOKEN_BYTES: u64 = 16 * 1024;
const MAX_ROOT_BYTES: u64 = 1024 * 1024;
/// The longest piece of a CA's message that is repeated in ours.
const MAX_REASON_CHARS: usize = 300;
/// What an istiod says where it knows the token, but does not grant the identity (`security/pkg/server/ca/server.go`). Its
/// status is the one for a token that it does not know.
const ISTIOD_DENIES: &str = "request impersonation authentication failure";

/// How to reach a CA.
#[derive(Debug, Clone)]
pub struct CaSettings {
    /// `https://host:port`.
    pub address: String,
    /// PEM file of the roots that the CA's serving certificate must chain to. Read again for each call.
    pub root: PathBuf,
    /// The name that the serving certificate must have, if not the address's host.
    pub server_name: Option<String>,
    /// The file of the bearer token. Read again for each call.
    pub token: PathBuf,
    /// Sent as the header `clusterid`; left out when empty.
    pub cluster_id: String,
    /// Further headers, name and value.
    pub headers: Vec<(String, String)>,
    /// The lifetime to ask for.
    pub ttl: Duration,
    /// How long a call may take, connecting included.
    pub deadline: Duration,
}

impl Default for CaSettings {
    fn default() -> Self {
        Self {
            address: "https://istiod.istio-system.svc:15012".into(),
            root: "/var/run/secrets/istio/root-cert.pem".into(),
            server_name: None,
            token: "/var/run/secrets/tokens/istio-token".into(),
            cluster_id: "Kubernetes".into(),
            headers: Vec::new(),
            ttl: Duration::from_secs(24 * 60 * 60),
            deadline: Duration::from_secs(5),
        }
    }
}

/// What is wrong with the settings.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum CaSettingsError {
    /// The address is not `https://host:port`.
    #[error("the CA's address {0:?} is not of the form https://host:port")]
    Address(String),
    /// A header's name or value cannot be sent.
    #[error("the CA header {0:?} cannot be sent: its name or value has forbidden characters")]
    Header(String),
}

/// Asks one CA for certificates. Every call has a fresh key, reads token and roots afresh and shares one HTTP/2
/// connection, which is made anew after a call that timed out or when the roots change.
pub struct CaClient {
    settings: CaSettings,
    endpoint: Endpoint,
    server_name: String,
    headers: Vec<(MetadataKey<Ascii>, MetadataValue<Ascii>)>,
    channel: Mutex<Option<Trusted>>,
}

/// A connection and the roots that it was verified against.
struct Trusted {
    roots: Vec<u8>,
    channel: Channel,
}

impl CaClient {
    /// Checks the settings. Nothing is read or dialled before the first call.
    pub fn new(settings: CaSettings) -> Result<Self, CaSettingsError> {
        let bad_address = || CaSettingsError::Address(settings.address.clone());
        let uri: Uri = settings.address.parse().map_err(|_| bad_address())?;
        let host = uri.host().filter(|host| !host.is_empty()).ok_or_else(bad_address)?;
        if uri.scheme_str() != Some("https") || uri.port_u16().is_none() || !matches!(uri.path(), "" | "/") {
            return Err(bad_address());
        }
        let host = host.trim_start_matches('[').trim_end_matches(']').to_string();
        let server_name = settings.server_name.clone().unwrap_or(host);
        let mut headers = Vec::new();
        let cluster = (!settings.cluster_id.is_empty()).then(|| ("clusterid".into(), settings.cluster_id.clone()));
        for (name, value) in cluster.iter().chain(&settings.headers) {
            let bad_header = || CaSettingsError::Header(name.clone());
            let key = MetadataKey::from_bytes(name.to_ascii_lowercase().as_bytes()).map_err(|_| bad_header())?;
            headers.push((key, value.parse().map_err(|_| bad_header())?));
        }
        let endpoint = Endpoint::from(uri)
            .connect_timeout(settings.deadline)
            .tcp_nodelay(true)
            .tcp_keepalive(Some(Duration::from_secs(60)))
            .http2_keep_alive_interval(Duration::from_secs(30))
            .keep_alive_timeout(Duration::from_secs(10))
            .keep_alive_while_idle(false);
        Ok(Self {
            settings,
            endpoint,
            server_name,
            headers,
            channel: Mutex::default(),
        })
    }

    async fn call(&self, id: &SpiffeId) -> Result<Certificate, IssueError> {
        let key = PrivateKey::generate()?;
        let request = self.request(id, &key).await?;
        let mut client =
            IstioCertificateServiceClient::new(self.channel().await?).max_decoding_message_size(MAX_CHAIN_BYTES);
        let answer = client
            .create_certificate(request)
            .await
            .map_err(|status| self.failure(&status))?
            .into_inner();
        Certificate::new(id, &answer.cert_chain, key).map_err(|reason| IssueError::Answer {
            ca: self.describe(),
            reason,
        })
    }

    async fn request(&self, id: &SpiffeId, key: &PrivateKey) -> Result<Request<IstioCertificateRequest>, IssueError> {
        let identity = Value {
            kind: Some(Kind::StringValue(id.to_string())),
        };
        let mut request = Request::new(IstioCertificateRequest {
            csr: key.request(id)?,
            validity_duration: i64::try_from(self.settings.ttl.as_secs()).unwrap_or(i64::MAX),
            metadata: Some(Struct {
                fields: BTreeMap::from([(IMPERSONATED_IDENTITY.into(), identity)]),
            }),
        });
        self.fill_headers(request.metadata_mut()).await?;
        Ok(request)
    }

    async fn fill_headers(&self, metadata: &mut MetadataMap) -> Result<(), IssueError> {
        for (name, value) in &self.headers {
            metadata.append(name.clone(), value.clone());
        }
        let path = &self.settings.token;
        let unusable = |reason: &str| file_error("token file", path, reason);
        let token = read_bounded("token file", path, MAX_TOKEN_BYTES).await?;
        let token = str::from_utf8(&token).map_err(|_| unusable("it is not text"))?.trim();
        if token.is_empty() {
            return Err(unusable("it is empty"));
        }
        let mut bearer: MetadataValue<Ascii> = format!("Bearer {token}")
            .parse()
            .map_err(|_| unusable("it has characters that a header cannot carry"))?;
        // Keeps the token out of the peer's header compression table and out of debug output.
        bearer.set_sensitive(true);
        metadata.insert("authorization", bearer);
        Ok(())
    }

    /// The shared connection, made anew if the roots have changed since.
    async fn channel(&self) -> Result<Channel, IssueError> {
        let path = &self.settings.root;
        let roots = read_bounded("CA root file", path, MAX_ROOT_BYTES).await?;
        let mut trusted = self.channel.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = trusted.as_ref().filter(|known| known.roots == roots) {
            return Ok(known.channel.clone());
        }
        let tls = ClientTlsConfig::new()
            .domain_name(&self.server_name)
            .ca_certificate(tonic::transport::Certificate::from_pem(&roots));
        let channel = self
            .endpoint
            .clone()
            .tls_config(tls)
            .map_err(|e| file_error("CA root file", path, &causes(&e)))?
            .connect_lazy();
        *trusted = Some(Trusted {
            roots,
            channel: channel.clone(),
        });
        Ok(channel)
    }

    fn failure(&self, status: &Status) -> IssueError {
        let ca = self.describe();
        let reason = describe_status(status);
        match status.code() {
            Code::Unauthenticated if status.message() == ISTIOD_DENIES => IssueError::PermissionDenied { ca, reason },
            Code::Unauthenticated => IssueError::Unauthenticated { ca, reason },
            Code::PermissionDenied => IssueError::PermissionDenied { ca, reason },
            Code::DeadlineExceeded | Code::Cancelled => self.deadline_passed(),
            Code::ResourceExhausted => IssueError::Busy { ca, reason },
            Code::OutOfRange => IssueError::Oversized { ca, reason },
            Code::InvalidArgument | Code::FailedPrecondition | Code::NotFound | Code::Unimplemented => {
                IssueError::Rejected { ca, reason }
            }
            _ => IssueError::Unavailable { ca, reason },
        }
    }

    fn deadline_passed(&self) -> IssueError {
        IssueError::Deadline {
            ca: self.describe(),
            seconds: self.settings.deadline.as_secs(),
        }
    }
}

impl Issuer for CaClient {
    fn issue<'a>(&'a self, id: &'a SpiffeId) -> BoxFuture<'a, Result<Issued, IssueError>> {
        Box::pin(async move {
            let result = tokio::time::timeout(self.settings.deadline, self.call(id)).await;
            let result = result.unwrap_or_else(|_| {
                // The connection may be black-holed: the next call makes a new one.
                *self.channel.lock().unwrap_or_else(PoisonError::into_inner) = None;
                Err(self.deadline_passed())
            });
            result.map(Issued::from)
        })
    }

    fn describe(&self) -> String {
        format!("the CA at {}", self.settings.address)
    }
}

pub(super) async fn read_bounded(what: &'static str, path: &Path, limit: u64) -> Result<Vec<u8>, IssueError> {
    let failed = |e: std::io::Error| file_error(what, path, &e.to_string());
    let mut content = Vec::new();
    let file = tokio::fs::File::open(path).await.map_err(failed)?;
    file.take(limit + 1).read_to_end(&mut content).await.map_err(failed)?;
    if content.len() as u64 > limit {
        return Err(file_error(what, path, "it is too large"));
    }
    Ok(content)
}

pub(super) fn file_error(what: &'static str, path: &Path, reason: &str) -> IssueError {
    IssueError::File {
        what,
        path: path.display().to_string(),
        reason: reason.to_string(),
    }
}

/// The peer's words, cut and without control characters, and the causes below them.
pub(super) fn describe_status(status: &Status) -> String {
    let mut text = status.message().to_string();
    if let Some(cause) = status.source() {
        let _ = write!(text, ": {}", causes(cause));
    }
    let text: String = text
        .chars()
        .take(MAX_REASON_CHARS)
        .map(|c| if c.is_control() { ' ' } else { c })
        .collect();
    if text.is_empty() {
        status.code().description().to_string()
    } else {
        text
    }
}

/// An error and its causes. A cause that the text already tells is left out.
pub(crate) fn causes(error: &dyn std::error::Error) -> String {
    causes_after(error, ": ")
}

/// The same, with these words before each cause.
pub(crate) fn causes_after(error: &dyn std::error::Error, before: &str) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let words = cause.to_string();
        if !text.contains(&words) {
            text.push_str(before);
            text.push_str(&words);
        }
        next = cause.source();
    }
    text
}

#[cfg(test)]
mod tests;
