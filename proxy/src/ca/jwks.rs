//! The keys that tokens are verified with, from a file that may change while the CA runs.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use jsonwebtoken::jwk::{AlgorithmParameters, EllipticCurve, JwkSet, PublicKeyUse};
use jsonwebtoken::{Algorithm, DecodingKey};

const MAX_JWKS_BYTES: u64 = 1024 * 1024;

/// One key that is fit for verifying tokens.
pub(super) struct VerifyingKey {
    pub(super) kid: Option<String>,
    pub(super) algorithm: Algorithm,
    pub(super) key: DecodingKey,
}

/// A JWKS file, parsed again whenever its content changes. While it is broken the last good keys stay in force.
pub(super) struct JwksFile {
    path: PathBuf,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// What was read last, good or not.
    seen: Option<Result<Vec<u8>, String>>,
    keys: Arc<Vec<VerifyingKey>>,
}

impl JwksFile {
    pub(super) fn new(path: PathBuf) -> Self {
        Self {
            path,
            state: Mutex::default(),
        }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// The keys as of now.
    pub(super) fn keys(&self) -> Arc<Vec<VerifyingKey>> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let read = self.read();
        if state.seen.as_ref() != Some(&read) {
            match read.as_ref().map_err(Clone::clone).and_then(|content| parse(content)) {
                Ok(keys) => {
                    tracing::info!(path = %self.path.display(), keys = keys.len(), "token keys loaded");
                    state.keys = Arc::new(keys);
                }
                Err(reason) => tracing::warn!(
                    path = %self.path.display(), %reason, keys_kept = state.keys.len(),
                    "the file of token keys is unusable; what was loaded before stays in force"
                ),
            }
            state.seen = Some(read);
        }
        state.keys.clone()
    }

    fn read(&self) -> Result<Vec<u8>, String> {
        let mut content = Vec::new();
        File::open(&self.path)
            .and_then(|file| file.take(MAX_JWKS_BYTES).read_to_end(&mut content))
            .map_err(|e| e.to_string())?;
        Ok(content)
    }
}

/// The keys of a key set that tokens may be signed with.
pub(super) fn parse(content: &[u8]) -> Result<Vec<VerifyingKey>, String> {
    let set: JwkSet = serde_json::from_slice(content).map_err(|e| format!("not a JSON Web Key Set: {e}"))?;
    let keys: Vec<_> = set
        .keys
        .iter()
        .filter_map(|jwk| {
            // Keys for encryption, for shared secrets or for other algorithms are passed over.
            let algorithm = match &jwk.algorithm {
                AlgorithmParameters::RSA(_) => Algorithm::RS256,
                AlgorithmParameters::EllipticCurve(ec) if ec.curve == EllipticCurve::P256 => Algorithm::ES256,
                _ => return None,
            };
            if jwk
                .common
                .public_key_use
                .as_ref()
                .is_some_and(|usage| *usage != PublicKeyUse::Signature)
            {
                return None;
            }
            let key = DecodingKey::from_jwk(jwk).ok()?;
            Some(VerifyingKey {
                kid: jwk.common.key_id.clone(),
                algorithm,
                key,
            })
        })
        .collect();
    if keys.is_empty() {
        return Err("it has no RSA or P-256 key for signatures".into());
    }
    Ok(keys)
}
