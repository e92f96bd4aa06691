//! The certificate service: authenticate, authorise, sign, and write each outcome to the audit log.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use prost_types::value::Kind;
use tonic::metadata::MetadataMap;
use tonic::{Request, Response, Status};

use super::authority::{Authority, AuthorityError, SignedCertificate};
use super::authorize::{Placement, Refusal, Rules, authorize};
use super::csr::{self, CsrError};
use super::token::{Caller, TokenError, TokenVerifier};
use crate::identity::proto::istio_certificate_service_server::IstioCertificateService;
use crate::identity::proto::{IMPERSONATED_IDENTITY, IstioCertificateRequest, IstioCertificateResponse};

/// The longest piece of a caller's text that is repeated in the log.
const MAX_LOGGED_CHARS: usize = 256;

pub(super) struct Service {
    pub(super) authority: Arc<Authority>,
    pub(super) tokens: TokenVerifier,
    pub(super) rules: Rules,
    pub(super) placement: Arc<dyn Placement>,
    pub(super) default_ttl: Duration,
    pub(super) max_ttl: Duration,
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
            Self::Token(_) => Status::unauthenticated(reason),
            Self::Refused(_) => Status::permission_denied(reason),
            Self::Csr(_) => Status::invalid_argument(reason),
            // What is wrong with our own folder is no concern of the caller's.
            Self::Authority(_) => Status::internal("the CA cannot sign now; its log says why"),
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
    fn decide(
        &self,
        metadata: &MetadataMap,
        request: &IstioCertificateRequest,
        audit: &mut Audit,
    ) -> Result<SignedCertificate, Denial> {
        let now = SystemTime::now();
        audit.identity = requested_identity(request).map(|text| text.chars().take(MAX_LOGGED_CHARS).collect());
        let caller = self.tokens.verify(bearer(metadata)?, now)?;
        let caller = audit.caller.insert(caller);
        let identity = authorize(
            &self.rules,
            caller,
            requested_identity(request),
            self.placement.as_ref(),
        )?;
        let public_key = csr::public_key(&request.csr)?;
        Ok(self
            .authority
            .sign(&identity, &public_key, self.lifetime(request.validity_duration))?)
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
        match self.decide(&metadata, &message, &mut audit) {
            Ok(signed) => {
                audit.granted(&signed);
                Ok(Response::new(IstioCertificateResponse {
                    cert_chain: signed.chain,
                }))
            }
            Err(denial) => {
                audit.refused(&denial);
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
