//! Making node tokens where no Kubernetes makes them: the issuer's key, its published key set, and tokens.

use std::path::PathBuf;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use jsonwebtoken::jwk::{Jwk, JwkSet, PublicKeyUse, ThumbprintHash};
use jsonwebtoken::{Algorithm, EncodingKey, Header};
use rcgen::KeyPair;
use rustls_pki_types::PrivatePkcs8KeyDer;
use rustls_pki_types::pem::PemObject;
use thiserror::Error;
use zeroize::{Zeroize, Zeroizing};

use super::authorize::ServiceAccount;
use super::files::{FileError, Folder, PRIVATE, PUBLIC};
use super::token::{Audience, Bound, Claims, Kubernetes};

const KEY_FILE: &str = "issuer.key";
/// The key set's name in the issuer's folder.
pub(super) const JWKS_FILE: &str = "jwks.json";

/// Why no token was made.
#[derive(Debug, Error)]
pub enum MintError {
    /// The issuer's folder is not usable.
    #[error(transparent)]
    File(#[from] FileError),
    /// A key could not be made, or the token not be signed.
    #[error("making a token failed: {0}")]
    Crypto(String),
}

/// What a token is to say.
#[derive(Debug, Clone)]
pub struct TokenRequest {
    /// The issuer's folder: its key and `jwks.json` are made in it on first use.
    pub dir: PathBuf,
    /// The issuer's name, as the CA expects it.
    pub issuer: String,
    /// For whom the token is.
    pub audience: String,
    /// The node proxy's service account.
    pub account: ServiceAccount,
    /// The node proxy's pod.
    pub pod: String,
    /// The node it runs on.
    pub node: String,
    /// How long the token is valid.
    pub ttl: Duration,
}

/// Makes a token in the shape of a Kubernetes projected service account token, bound to a pod and a node.
pub fn make(request: &TokenRequest) -> Result<String, MintError> {
    make_at(request, SystemTime::now())
}

pub(super) fn make_at(request: &TokenRequest, now: SystemTime) -> Result<String, MintError> {
    let folder = Folder::open_in_turn(&request.dir)?;
    let (key, key_id) = issuer_key(&folder)?;
    let now = now.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let ServiceAccount { namespace, name } = &request.account;
    let claims = Claims {
        iss: request.issuer.clone(),
        sub: format!("system:serviceaccount:{namespace}:{name}"),
        aud: Audience::Many(vec![request.audience.clone()]),
        exp: now.saturating_add(request.ttl.as_secs()),
        iat: Some(now),
        nbf: Some(now),
        kubernetes: Kubernetes {
            namespace: namespace.clone(),
            serviceaccount: bound(name),
            pod: Some(bound(&request.pod)),
            node: Some(bound(&request.node)),
        },
    };
    let header = Header {
        kid: Some(key_id),
        ..Header::new(Algorithm::ES256)
    };
    jsonwebtoken::encode(&header, &claims, &key).map_err(crypto)
}

/// The issuer's key and key id, made on first use. The key set is written again if it is missing.
fn issuer_key(folder: &Folder) -> Result<(EncodingKey, String), MintError> {
    let pem = match folder.read_private(KEY_FILE)? {
        Some(pem) => pem,
        None => {
            let mut pair = KeyPair::generate().map_err(crypto)?;
            let pem = Zeroizing::new(pair.serialize_pem().into_bytes());
            pair.zeroize();
            folder.create(KEY_FILE, &pem, PRIVATE)?;
            pem
        }
    };
    let damaged = |reason: String| FileError::damaged(&folder.file(KEY_FILE), reason);
    let der = PrivatePkcs8KeyDer::from_pem_slice(&pem).map_err(|e| damaged(e.to_string()))?;
    let key = EncodingKey::from_ec_der(der.secret_pkcs8_der());
    let mut jwk = Jwk::from_encoding_key(&key, Algorithm::ES256).map_err(|e| damaged(e.to_string()))?;
    let key_id = jwk.thumbprint(ThumbprintHash::SHA256).map_err(crypto)?;
    jwk.common.key_id = Some(key_id.clone());
    jwk.common.public_key_use = Some(PublicKeyUse::Signature);
    if folder.read(JWKS_FILE)?.is_none() {
        let set = serde_json::to_vec_pretty(&JwkSet { keys: vec![jwk] }).map_err(crypto)?;
        folder.create(JWKS_FILE, &set, PUBLIC)?;
    }
    Ok((key, key_id))
}

/// An object's reference with a uid made up, since no API server has given one.
fn bound(name: &str) -> Bound {
    let (high, low) = (fastrand::u64(..), fastrand::u64(..));
    let uid = format!(
        "{:08x}-{:04x}-4{:03x}-{:04x}-{:012x}",
        high >> 32,
        high >> 16 & 0xffff,
        high & 0xfff,
        low >> 48 & 0x3fff | 0x8000,
        low & 0xffff_ffff_ffff
    );
    Bound {
        name: name.to_string(),
        uid,
    }
}

fn crypto(error: impl ToString) -> MintError {
    MintError::Crypto(error.to_string())
}
