//! The certificate service: authenticate, authorise, sign, and write each outcome to the audit log.

use std::collections::HashSet;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use prost_types::value::Kind;
use tokio::time::{Instant, timeout_at};
use tonic::metadata::MetadataMap;
use tonic::{Request, Response, Status};

use super::audit::{AuditLog, Entry, Outcome};
use super::authority::{Authority, AuthorityError, SignedCertificate};
use super::authorize::{Grant, Refusal, Rules, authorize};
use super::counts::Counts;
use super::csr::{self, CsrError};
use super::limits::{Limits, Overload};
use super::review::Reviewer;
use super::token::{Caller, TokenError, TokenVerifier};
use crate::identity::proto::istio_certificate_service_server::IstioCertificateService;
use crate::identity::proto::{IMPERSONATED_IDENTITY, IstioCertificateRequest, IstioCertificateResponse};
use crate::mesh::MeshHandle;

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
    pub(super) limits: Limits,
    pub(super) audit: AuditLog,
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
    async fn authenticate(&self, token: &str, peer: Option<IpAddr>, now: SystemTime) -> Result<Caller, TokenError> {
        match self {
            Self::KeySet(verifier) => verifier.verify(token, now),
            Self::Reviewed(reviewer) => reviewer.authenticate(token, peer).await,
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
    Overload(#[from] Overload),
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
            Self::Overload(_) => Status::resource_exhausted(reason),
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
            Self::Overload(overload) => overload.word(),
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

impl Service {
    async fn decide(
        &self,
        metadata: &MetadataMap,
        request: &IstioCertificateRequest,
        entry: &mut Entry,
    ) -> Result<(SignedCertificate, Duration), Denial> {
        let requested = requested_identity(request);
        entry.asks_for(requested);
        let peer = entry.peer.map(|peer| peer.ip());
        let entered = self.limits.enter(peer)?;
        let caller = self
            .callers
            .authenticate(bearer(metadata)?, peer, SystemTime::now())
            .await?;
        let caller = &*entry.caller.insert(caller);
        let _admitted = self.limits.admit(entered, caller, Instant::now().into_std())?;
        let granted = self.authorize(caller, peer, requested).await?;
        (entry.node, entry.pod) = (Some(granted.node), Some(granted.pod));
        let public_key = csr::public_key(&request.csr)?;
        let lifetime = self.lifetime(request.validity_duration);
        let signed = self.authority.sign(&granted.identity, &public_key, lifetime)?;
        Ok((signed, lifetime))
    }

    /// Decides, and waits a moment where the mesh may not show yet what the caller knows: an agent asks for a pod's
    /// certificate as soon as it hears of the pod, which may be before this process does.
    async fn authorize(
        &self,
        caller: &Caller,
        peer: Option<IpAddr>,
        requested: Option<&str>,
    ) -> Result<Grant, Refusal> {
        let mut changes = self.mesh.subscribe();
        let deadline = Instant::now() + self.patience;
        loop {
            changes.borrow_and_update();
            self.rules.check_view()?;
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
        let mut entry = Entry {
            peer: request.remote_addr(),
            ..Entry::default()
        };
        let (metadata, _, message) = request.into_parts();
        match self.decide(&metadata, &message, &mut entry).await {
            Ok((signed, lifetime)) => {
                let granted = Outcome::Granted {
                    serial: &signed.serial,
                    lifetime,
                    not_after: signed.not_after,
                };
                self.audit.write(&entry, &granted);
                self.counts.issued(self.authority.signer_not_after());
                Ok(Response::new(IstioCertificateResponse {
                    cert_chain: signed.chain,
                }))
            }
            Err(denial) => {
                let rule = denial.word();
                let refused = Outcome::Refused {
                    rule,
                    reason: &denial.to_string(),
                };
                self.audit.write(&entry, &refused);
                self.counts.refused(rule);
                if let Denial::Overload(overload) = &denial {
                    self.counts.limited(overload.word());
                }
                Err(denial.status())
            }
        }
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
