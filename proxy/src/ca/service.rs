//! The certificate service: authenticate, authorise, sign, and write each outcome to the audit log.

use std::collections::HashSet;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use prost_types::value::Kind;
use tokio::time::{Instant, timeout_at};
use tonic::metadata::MetadataMap;
use tonic::{Request, Response, Status};

use super::authority::{Authority, AuthorityError, SignedCertificate};
use super::authorize::{Refusal, Rules, authorize};
use super::counts::Counts;
use super::csr::{self, CsrError};
use super::review::Reviewer;
use super::token::{Caller, TokenError, TokenVerifier};
use crate::identity::SpiffeId;
use crate::identity::proto::istio_certificate_service_server::IstioCertificateService;
use crate::identity::proto::{IMPERSONATED_IDENTITY, IstioCertificateRequest, IstioCertificateResponse};
use crate::mesh::MeshHandle;

/// The longest piece of a caller's text that is repeated in the log.
const MAX_LOGGED_CHARS: usize = 256;
/// Callers' pods remembered at once.
const MAX_SEEN: usize = 50_000;

pub(super) struct Service {
    pub(super) authority: Arc<Authority>,
    pub(super) callers: Callers,
    pub(super) rules: Rules,
    pub(super) mesh: MeshHandle,
    /// How long a call waits for the mesh to show what the caller has seen already.
    pub(super) patience: Duration,
    pub(super) seen: Seen,
    pub(super) counts: Counts,
    pub(super) default_ttl: Duration,
    pub(super) max_ttl: Duration,
}

/// Who says who calls.
pub(super) enum Callers {
    /// The keys of a file.
    KeySet(TokenVerifier),
    /// The API server.
    Reviewed(Reviewer),
}

impl Callers {
    async fn authenticate(&self, token: &str, now: SystemTime) -> Result<Caller, TokenError> {
        match self {
            Self::KeySet(verifier) => verifier.verify(token, now),
            Self::Reviewed(reviewer) => reviewer.authenticate(token).await,
        }
    }
}

/// Pods that have been granted something: who is among them, but not in the mesh, has gone.
#[derive(Debug, Default)]
pub(super) struct Seen(Mutex<HashSet<String>>);

impl Seen {
    fn add(&self, uid: &str) {
        let mut seen = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if !seen.contains(uid) {
            // What is forgotten is told "not yet" instead of "gone", and is refused all the same.
            if seen.len() >= MAX_SEEN {
                seen.clear();
            }
            seen.insert(uid.to_owned());
        }
    }

    fn has(&self, uid: &str) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).contains(uid)
    }
}

/// Why a call got no certificate.
#[derive(Debug, thiserror::Error)]
enum Denial {
    #[error("{0}")]
    Token(#[from] TokenError),
    #[error("{0}")]
    Refused(#[from] Refusal),
    #[error("{0}")]
    Csr(#[from] CsrError),
    #[error("{0}")]
    Authority(#[from] AuthorityError),
}

impl Denial {
    fn status(&self) -> Status {
        let reason = self.to_string();
        match self {
            Self::Token(TokenError::Unreviewed(_)) => Status::unavailable(reason),
            Self::Token(_) => Status::unauthenticated(reason),
            Self::Refused(refusal) if refusal.is_ignorance() => Status::unavailable(reason),
            Self::Refused(_) => Status::permission_denied(reason),
            Self::Csr(_) => Status::invalid_argument(reason),
            // What is wrong with our own folder is no concern of the caller's.
            Self::Authority(_) => Status::internal("the CA cannot sign now; its log says why"),
        }
    }
}

impl Denial {
    /// The reason in one word, for metrics.
    fn word(&self) -> &'static str {
        match self {
            Self::Token(TokenError::Missing) => "no_token",
            Self::Token(TokenError::Audience { .. }) => "audience",
            Self::Token(TokenError::Unreviewed(_)) => "not_reviewed",
            Self::Token(_) => "token",
            Self::Refused(refusal) => refusal.word(),
            Self::Csr(_) => "signing_request",
            Self::Authority(_) => "internal",
        }
    }
}

/// What is known of a call, for the audit log.
#[derive(Default)]
struct Audit {
    peer: Option<SocketAddr>,
    caller: Option<Caller>,
    identity: Option<String>,
}

impl Service {
    async fn decide(
        &self,
        metadata: &MetadataMap,
        request: &IstioCertificateRequest,
        audit: &mut Audit,
    ) -> Result<SignedCertificate, Denial> {
        let now = SystemTime::now();
        audit.identity = requested_identity(request).map(|text| text.chars().take(MAX_LOGGED_CHARS).collect());
        let caller = self.callers.authenticate(bearer(metadata)?, now).await?;
        let caller = &*audit.caller.insert(caller);
        let peer = audit.peer.map(|peer| peer.ip());
        let identity = self.authorize(caller, peer, requested_identity(request)).await?;
        let public_key = csr::public_key(&request.csr)?;
        Ok(self
            .authority
            .sign(&identity, &public_key, self.lifetime(request.validity_duration))?)
    }

    /// Decides, and waits a moment where the mesh may not show yet what the caller knows: an agent asks for a pod's
    /// certificate as soon as it hears of the pod, which may be before this process does.
    async fn authorize(
        &self,
        caller: &Caller,
        peer: Option<IpAddr>,
        requested: Option<&str>,
    ) -> Result<SpiffeId, Refusal> {
        let mut changes = self.mesh.subscribe();
        let deadline = Instant::now() + self.patience;
        loop {
            changes.borrow_and_update();
            let verdict = authorize(&self.rules, caller, peer, requested, &self.mesh.load());
            let uid = caller.pod.as_ref().map_or("", |pod| &pod.uid);
            match &verdict {
                Ok(_) => self.seen.add(uid),
                Err(Refusal::PodUnknown(name)) if self.seen.has(uid) => return Err(Refusal::PodGone(name.clone())),
                Err(refusal) if refusal.may_pass() => {
                    if let Ok(Ok(())) = timeout_at(deadline, changes.changed()).await {
                        continue;
                    }
                }
                Err(_) => {}
            }
            return verdict;
        }
    }

    fn lifetime(&self, asked: i64) -> Duration {
        match u64::try_from(asked) {
            Ok(seconds) if seconds > 0 => Duration::from_secs(seconds).min(self.max_ttl),
            _ => self.default_ttl.min(self.max_ttl),
        }
    }
}

#[tonic::async_trait]
impl IstioCertificateService for Service {
    async fn create_certificate(
        &self,
        request: Request<IstioCertificateRequest>,
    ) -> Result<Response<IstioCertificateResponse>, Status> {
        let mut audit = Audit {
            peer: request.remote_addr(),
            ..Audit::default()
        };
        let (metadata, _, message) = request.into_parts();
        match self.decide(&metadata, &message, &mut audit).await {
            Ok(signed) => {
                audit.granted(&signed);
                self.counts.issued(self.authority.signer_not_after());
                Ok(Response::new(IstioCertificateResponse {
                    cert_chain: signed.chain,
                }))
            }
            Err(denial) => {
                audit.refused(&denial);
                self.counts.refused(denial.word());
                Err(denial.status())
            }
        }
    }
}

impl Audit {
    fn granted(&self, signed: &SignedCertificate) {
        tracing::info!(
            target: "audit",
            outcome = "granted",
            caller = self.caller(),
            node = self.node(),
            identity = self.identity(),
            reason = "",
            serial = signed.serial,
            not_after = seconds(signed.not_after),
            peer = self.peer.map(tracing::field::display),
            "certificate granted"
        );
    }

    fn refused(&self, denial: &Denial) {
        tracing::warn!(
            target: "audit",
            outcome = "refused",
            caller = self.caller(),
            node = self.node(),
            identity = self.identity(),
            // The log escapes what a caller may have put into its token or request.
            reason = denial.to_string(),
            serial = "",
            not_after = 0,
            peer = self.peer.map(tracing::field::display),
            "certificate refused"
        );
    }

    fn caller(&self) -> String {
        self.caller
            .as_ref()
            .map_or_else(|| "unknown".into(), ToString::to_string)
    }

    fn node(&self) -> &str {
        self.caller
            .as_ref()
            .and_then(|caller| caller.node.as_ref())
            .map_or("", |node| &node.name)
    }

    fn identity(&self) -> &str {
        self.identity.as_deref().unwrap_or_default()
    }
}

fn requested_identity(request: &IstioCertificateRequest) -> Option<&str> {
    match request
        .metadata
        .as_ref()?
        .fields
        .get(IMPERSONATED_IDENTITY)?
        .kind
        .as_ref()?
    {
        Kind::StringValue(identity) => Some(identity),
        _ => None,
    }
}

fn bearer(metadata: &MetadataMap) -> Result<&str, TokenError> {
    let mut values = metadata.get_all("authorization").iter();
    let (Some(value), None) = (values.next(), values.next()) else {
        return Err(TokenError::Missing);
    };
    let text = value.to_str().map_err(|_| TokenError::Malformed("not text".into()))?;
    let (scheme, token) = text.split_once(' ').ok_or(TokenError::Missing)?;
    if !scheme.eq_ignore_ascii_case("bearer") {
        return Err(TokenError::Missing);
    }
    Ok(token.trim())
}

fn seconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}
