//! Who calls: JSON Web Tokens in the shape of Kubernetes' projected service account tokens.

use std::fmt;
use std::path::PathBuf;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use jsonwebtoken::{Algorithm, Validation};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::authorize::ServiceAccount;
use super::jwks::{JwksFile, VerifyingKey};

pub use super::mint::{MintError, TokenRequest, make};

/// The longest token accepted.
pub const MAX_TOKEN_BYTES: usize = 16 * 1024;
/// The algorithms accepted. Anything symmetric, and `none`, is not among them.
const ALGORITHMS: [Algorithm; 2] = [Algorithm::RS256, Algorithm::ES256];
/// How far the issuer's clock may be ahead.
const CLOCK_SKEW: Duration = Duration::from_secs(10);
const SUBJECT_PREFIX: &str = "system:serviceaccount:";

/// Why a token does not authenticate its bearer.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum TokenError {
    /// There is none.
    #[error("no bearer token")]
    Missing,
    /// Longer than [`MAX_TOKEN_BYTES`].
    #[error("a token of {0} bytes is too long")]
    TooLong(usize),
    /// Not a JSON Web Token, or signed with an unknown algorithm.
    #[error("not a JSON Web Token: {0}")]
    Malformed(String),
    /// Signed with an algorithm that is not accepted here.
    #[error("tokens signed with {0} are not accepted, only RS256 and ES256")]
    Algorithm(String),
    /// The header demands an extension.
    #[error("the token's header has critical extensions")]
    Critical,
    /// No key of the JWKS file fits.
    #[error("the token is signed with a key that is not in the key set (key id {0:?})")]
    UnknownKey(Option<String>),
    /// The signature is not the key's.
    #[error("the token's signature does not verify")]
    Signature,
    /// The payload is not that of a service account token.
    #[error("the token's claims are not a service account token's: {0}")]
    Claims(String),
    /// From somebody else.
    #[error("the token's issuer {found:?} is not {expected:?}")]
    Issuer {
        /// What is accepted.
        expected: String,
        /// What the token says.
        found: String,
    },
    /// For somebody else.
    #[error("the token's audience {found:?} does not include {expected:?}")]
    Audience {
        /// What is accepted.
        expected: String,
        /// What the token says.
        found: Vec<String>,
    },
    /// Too old.
    #[error("the token has expired")]
    Expired,
    /// Too early.
    #[error("the token is not valid yet")]
    NotYetValid,
    /// `sub` and the `kubernetes.io` claim name different accounts, or `sub` is no service account's.
    #[error("the token's subject {0:?} is not a service account, or not that of its kubernetes.io claim")]
    Subject(String),
    /// The API server does not accept it.
    #[error("the API server does not accept the token: {0}")]
    Rejected(String),
    /// The API server cannot be asked.
    #[error("the API server cannot be asked about the token: {0}")]
    Unreviewed(String),
}

/// An object that a token is bound to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bound {
    /// Its name.
    pub name: String,
    /// Its uid.
    pub uid: String,
}

/// An authenticated caller.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Caller {
    /// Its service account.
    pub account: ServiceAccount,
    /// The pod that the token was made for.
    pub pod: Option<Bound>,
    /// The node of that pod.
    pub node: Option<Bound>,
}

impl fmt::Display for Caller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.account)?;
        if let Some(pod) = &self.pod {
            write!(f, " pod {}", pod.name)?;
        }
        Ok(())
    }
}

/// The claims read and written here.
#[derive(Serialize, Deserialize)]
pub(super) struct Claims {
    pub(super) iss: String,
    pub(super) sub: String,
    pub(super) aud: Audience,
    pub(super) exp: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) iat: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) nbf: Option<u64>,
    #[serde(rename = "kubernetes.io")]
    pub(super) kubernetes: Kubernetes,
}

#[derive(Serialize, Deserialize)]
#[serde(untagged)]
pub(super) enum Audience {
    One(String),
    Many(Vec<String>),
}

impl Audience {
    pub(super) fn into_vec(self) -> Vec<String> {
        match self {
            Self::One(one) => vec![one],
            Self::Many(many) => many,
        }
    }
}

#[derive(Serialize, Deserialize)]
pub(super) struct Kubernetes {
    pub(super) namespace: String,
    pub(super) serviceaccount: Bound,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) pod: Option<Bound>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) node: Option<Bound>,
}

/// The service account of a user name or subject such as `system:serviceaccount:adit-system:adit-node`. Names with
/// separators in them could read as another account's.
pub(super) fn account_of(subject: &str) -> Option<ServiceAccount> {
    let (namespace, name) = subject.strip_prefix(SUBJECT_PREFIX)?.split_once(':')?;
    if [namespace, name].iter().any(|part| part.contains(['/', ':'])) {
        return None;
    }
    format!("{namespace}/{name}").parse().ok()
}

/// Verifies tokens against a JWKS file, an issuer and an audience.
pub(super) struct TokenVerifier {
    jwks: JwksFile,
    expected: Expected,
}

/// From whom tokens must be, and for whom.
pub(super) struct Expected {
    pub(super) issuer: String,
    pub(super) audiences: Vec<String>,
}

impl TokenVerifier {
    pub(super) fn new(jwks: PathBuf, issuer: String, audiences: Vec<String>) -> Self {
        let jwks = JwksFile::new(jwks);
        if jwks.keys().is_empty() {
            tracing::warn!(path = %jwks.path().display(), "no token keys yet: every caller is refused until there are");
        }
        Self {
            jwks,
            expected: Expected { issuer, audiences },
        }
    }

    /// Authenticates the bearer of a token.
    pub(super) fn verify(&self, token: &str, now: SystemTime) -> Result<Caller, TokenError> {
        self.expected.verify(token, &self.jwks.keys(), now)
    }
}

impl Expected {
    /// Authenticates the bearer of a token, if one of these keys has signed it.
    pub(super) fn verify(&self, token: &str, keys: &[VerifyingKey], now: SystemTime) -> Result<Caller, TokenError> {
        if token.len() > MAX_TOKEN_BYTES {
            return Err(TokenError::TooLong(token.len()));
        }
        self.caller(verify_signature(token, keys)?, now)
    }

    /// Who bears a token of these claims, which have been verified.
    pub(super) fn caller(&self, claims: Claims, now: SystemTime) -> Result<Caller, TokenError> {
        self.check(&claims, now)?;
        let Kubernetes {
            namespace,
            serviceaccount,
            pod,
            node,
        } = claims.kubernetes;
        let account = account_of(&claims.sub)
            .filter(|account| account.namespace == namespace && account.name == serviceaccount.name)
            .ok_or(TokenError::Subject(claims.sub))?;
        Ok(Caller { account, pod, node })
    }

    fn check(&self, claims: &Claims, now: SystemTime) -> Result<(), TokenError> {
        if claims.iss != self.issuer {
            return Err(TokenError::Issuer {
                expected: self.issuer.clone(),
                found: claims.iss.clone(),
            });
        }
        let audiences = match &claims.aud {
            Audience::One(one) => std::slice::from_ref(one),
            Audience::Many(many) => many.as_slice(),
        };
        if !audiences.iter().any(|audience| self.audiences.contains(audience)) {
            return Err(TokenError::Audience {
                expected: self.audiences.join(" or "),
                found: audiences.to_vec(),
            });
        }
        let now = now.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        if now >= claims.exp {
            return Err(TokenError::Expired);
        }
        if claims
            .nbf
            .is_some_and(|nbf| nbf > now.saturating_add(CLOCK_SKEW.as_secs()))
        {
            return Err(TokenError::NotYetValid);
        }
        Ok(())
    }
}

fn verify_signature(token: &str, keys: &[VerifyingKey]) -> Result<Claims, TokenError> {
    let malformed = |e: jsonwebtoken::errors::Error| TokenError::Malformed(e.to_string());
    let header = jsonwebtoken::decode_header(token).map_err(malformed)?;
    if !ALGORITHMS.contains(&header.alg) {
        return Err(TokenError::Algorithm(format!("{:?}", header.alg)));
    }
    if header.crit.is_some() {
        return Err(TokenError::Critical);
    }
    // Only the signature is checked there; the claims are checked here, by our clock.
    let mut validation = Validation::new(header.alg);
    validation.required_spec_claims.clear();
    validation.validate_exp = false;
    validation.validate_aud = false;
    let mut fits = keys
        .iter()
        .filter(|key| key.algorithm == header.alg && (header.kid.is_none() || key.kid == header.kid))
        .peekable();
    if fits.peek().is_none() {
        return Err(TokenError::UnknownKey(header.kid));
    }
    for key in fits {
        use jsonwebtoken::errors::ErrorKind;
        match jsonwebtoken::decode::<serde_json::Value>(token, &key.key, &validation) {
            Ok(data) => {
                return serde_json::from_value(data.claims).map_err(|e| TokenError::Claims(e.to_string()));
            }
            Err(e) if *e.kind() == ErrorKind::InvalidSignature => {}
            Err(e) => return Err(malformed(e)),
        }
    }
    Err(TokenError::Signature)
}
