//! The keys that sign: roots that live ten years, an intermediate that lives one and signs the leaves.

use std::fmt;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use rcgen::{ExtendedKeyUsagePurpose, KeyPair, SanType, SubjectPublicKeyInfo};
use rustls::sign::CertifiedKey;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use thiserror::Error;
use tokio::sync::watch;
use zeroize::Zeroize;

use super::files::FileError;
use super::folder::KeyFolder;
use super::keyring::{Keyring, fingerprint};
use super::provided::Provided;
use super::signer::{self, Signer};
use crate::identity::{SpiffeId, TrustDomain};

/// Why the authority cannot be opened or cannot sign.
#[derive(Debug, Error)]
pub enum AuthorityError {
    /// Its folder is not usable.
    #[error(transparent)]
    File(#[from] FileError),
    /// What is there belongs to the authority of another trust domain.
    #[error("{place} is the authority of {found}, not of the trust domain {expected}")]
    TrustDomain {
        /// Where it is kept.
        place: String,
        /// What was asked for.
        expected: TrustDomain,
        /// What is there.
        found: String,
    },
    /// The root has expired.
    #[error("the root certificate in {0} has expired; move it away to start a new CA")]
    RootExpired(String),
    /// A key or certificate that was handed over is not sound.
    #[error("{place} is unusable: {reason}")]
    Unsound {
        /// Where it is kept.
        place: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The certificate that signs has expired, and there is no newer one.
    #[error("the certificate that signs has expired; put a newer one into {0}")]
    SignerExpired(String),
    /// A name for the serving certificate is neither a DNS name nor an IP address.
    #[error("{0:?} is neither a DNS name nor an IP address")]
    Name(String),
    /// The cryptographic library failed.
    #[error("signing failed: {0}")]
    Sign(String),
}

impl From<rcgen::Error> for AuthorityError {
    fn from(error: rcgen::Error) -> Self {
        Self::Sign(error.to_string())
    }
}

/// A certificate just signed.
#[derive(Debug, Clone)]
pub struct SignedCertificate {
    /// PEM: leaf, intermediate, root.
    pub chain: Vec<String>,
    /// The leaf's serial number, lower-case hexadecimal.
    pub serial: String,
    /// When the leaf expires.
    pub not_after: SystemTime,
}

/// A certificate authority for one trust domain.
pub struct Authority {
    trust_domain: TrustDomain,
    /// PEM of the roots that clients must trust, one or more.
    bundle: watch::Sender<Arc<str>>,
    keeping: Mutex<Keeping>,
    signing: Mutex<Arc<Signing>>,
}

/// Whose the key is that signs, and so who renews it.
enum Keeping {
    /// Our own root's; the intermediate below it is this process's alone and lives in memory.
    Own {
        root: Arc<Signer>,
        /// Of the keyring that it comes from.
        epoch: u64,
        revision: u64,
        place: String,
    },
    /// Of somebody else's hierarchy, who renews it. Where it is kept.
    Provided { place: String },
}

/// What signs leaves.
struct Signing {
    signer: Signer,
    /// The certificates between the signer's own and the root.
    above: Vec<CertificateDer<'static>>,
    /// PEM of what follows the leaf in an answer: the signer's certificate, those above, last the roots.
    chain: Vec<String>,
}

impl Authority {
    /// Opens the authority in a folder, or founds it if the folder is empty or missing. What is there but not
    /// sound is reported and left as it is.
    pub fn open(dir: &Path, trust_domain: &TrustDomain) -> Result<Self, AuthorityError> {
        Ok(KeyFolder::open(dir)?.authority(trust_domain)?.0)
    }

    /// An authority of roots that are kept at `place`. Several processes may have the same: each signs by an intermediate
    /// of its own.
    pub(super) fn of_keyring(
        place: &str,
        keyring: &Keyring,
        trust_domain: &TrustDomain,
    ) -> Result<Self, AuthorityError> {
        let root = Arc::new(signing_root(place, keyring, trust_domain)?);
        let intermediate = intermediate_in_memory(&root, trust_domain, SystemTime::now())?;
        let bundle = keyring.bundle();
        Ok(Self {
            trust_domain: trust_domain.clone(),
            signing: Mutex::new(Arc::new(Signing::below(intermediate, &bundle))),
            bundle: watch::Sender::new(bundle.into()),
            keeping: Mutex::new(Keeping::Own {
                root,
                epoch: keyring.epoch,
                revision: keyring.revision,
                place: place.into(),
            }),
        })
    }

    /// Signs as the keyring says from now on, and has its roots trusted. One that is older than what is in use is left alone.
    pub(super) fn adopt(&self, keyring: &Keyring) -> Result<(), AuthorityError> {
        let mut keeping = lock(&self.keeping);
        let Keeping::Own {
            root,
            epoch,
            revision,
            place,
        } = &mut *keeping
        else {
            return Ok(());
        };
        let bundle = keyring.bundle();
        if keyring.revision < *revision || (keyring.revision == *revision && *bundle == **self.bundle.borrow()) {
            return Ok(());
        }
        let new = signing_root(place, keyring, &self.trust_domain)?;
        let mut signing = lock(&self.signing);
        let next = if new.pem == root.pem && keyring.epoch == *epoch {
            Signing::again(&signing, &bundle)?
        } else {
            let intermediate = intermediate_in_memory(&new, &self.trust_domain, SystemTime::now())?;
            *root = Arc::new(new);
            Signing::below(intermediate, &bundle)
        };
        (*epoch, *revision) = (keyring.epoch, keyring.revision);
        *signing = Arc::new(next);
        tracing::info!(
            root = fingerprint(&root.pem),
            revision = *revision,
            phase = ?keyring.phase(),
            "took over what the keys are now"
        );
        self.bundle.send_replace(bundle.into());
        Ok(())
    }

    /// The revision of the keyring in use.
    pub(super) fn revision(&self) -> Option<u64> {
        match &*lock(&self.keeping) {
            Keeping::Own { revision, .. } => Some(*revision),
            Keeping::Provided { .. } => None,
        }
    }

    /// An authority that signs by somebody else's intermediate, which is kept at `place`.
    pub fn from_provided(place: &str, provided: Provided, trust_domain: &TrustDomain) -> Result<Self, AuthorityError> {
        check_provided(place, &provided, trust_domain)?;
        Ok(Self {
            trust_domain: trust_domain.clone(),
            bundle: watch::Sender::new(provided.roots_pem.as_str().into()),
            signing: Mutex::new(Arc::new(Signing::provided(provided))),
            keeping: Mutex::new(Keeping::Provided { place: place.into() }),
        })
    }

    /// Signs by this newer intermediate from now on, and has its roots trusted. One below a root that was not among those so
    /// far is refused: those who trust them would not trust what it signs.
    pub fn replace_provided(&self, place: &str, provided: Provided) -> Result<(), AuthorityError> {
        check_provided(place, &provided, &self.trust_domain)?;
        if !provided.leads_to(&self.root_pem(), SystemTime::now()) {
            let reason = "it is below none of the roots in use; add its root to them first, and change over to it later, or \
                          restart the CA to change over at once";
            return Err(unsound(place, reason.into()));
        }
        let roots = Arc::<str>::from(provided.roots_pem.as_str());
        *lock(&self.signing) = Arc::new(Signing::provided(provided));
        self.bundle.send_if_modified(|known| {
            let changed = *known != roots;
            *known = roots;
            changed
        });
        Ok(())
    }

    /// The trust domain that it signs for.
    pub fn trust_domain(&self) -> &TrustDomain {
        &self.trust_domain
    }

    /// The root certificates, PEM.
    pub fn root_pem(&self) -> Arc<str> {
        self.bundle.borrow().clone()
    }

    /// The same, as they change.
    pub fn roots(&self) -> watch::Receiver<Arc<str>> {
        self.bundle.subscribe()
    }

    /// When the certificate that signs expires.
    pub fn signer_not_after(&self) -> SystemTime {
        lock(&self.signing).signer.not_after
    }

    /// Signs a workload's certificate. It has an empty subject and the identity as its only name.
    pub fn sign(
        &self,
        identity: &SpiffeId,
        public_key: &SubjectPublicKeyInfo,
        ttl: Duration,
    ) -> Result<SignedCertificate, AuthorityError> {
        let now = SystemTime::now();
        let names = vec![SanType::URI(identity.as_str().try_into()?)];
        let both = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        let signing = self.signing(now)?;
        let (leaf, serial, not_after) = signing.signer.sign_leaf(public_key, names, both, ttl, now)?;
        let chain = std::iter::once(leaf.pem())
            .chain(signing.chain.iter().cloned())
            .collect();
        Ok(SignedCertificate {
            chain,
            serial,
            not_after,
        })
    }

    /// Makes a key and a certificate for serving TLS under DNS names and IP addresses, and says when it expires and what has
    /// signed it.
    pub(super) fn serving_certificate(
        &self,
        names: &[String],
        ttl: Duration,
        now: SystemTime,
    ) -> Result<(CertifiedKey, SystemTime, String), AuthorityError> {
        let names = names
            .iter()
            .map(|name| signer::serving_name(name))
            .collect::<Result<Vec<_>, _>>()?;
        let mut pair = KeyPair::generate()?;
        let signing = self.signing(now)?;
        let usage = vec![ExtendedKeyUsagePurpose::ServerAuth];
        let (leaf, _, not_after) = signing.signer.sign_leaf(&pair, names, usage, ttl, now)?;
        let der = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(pair.serialized_der()));
        let key = rustls::crypto::aws_lc_rs::sign::any_ecdsa_type(&der);
        pair.zeroize();
        let key = key.map_err(|e| AuthorityError::Sign(e.to_string()))?;
        let mut chain = vec![leaf.der().clone(), signing.signer.certificate.clone()];
        chain.extend(signing.above.iter().cloned());
        Ok((CertifiedKey::new(chain, key), not_after, signing.signer.pem.clone()))
    }

    /// The certificate that signs, PEM.
    pub(super) fn signer_pem(&self) -> String {
        lock(&self.signing).signer.pem.clone()
    }

    /// What signs; an intermediate of our own is replaced by a new one when less than a third of its life is left.
    fn signing(&self, now: SystemTime) -> Result<Arc<Signing>, AuthorityError> {
        let known = lock(&self.signing).clone();
        if !known.signer.is_due(now) {
            return Ok(known);
        }
        let keeping = lock(&self.keeping);
        let mut signing = lock(&self.signing);
        match &*keeping {
            Keeping::Own { root, .. } if signing.signer.is_due(now) && signing.signer.not_after < root.not_after => {
                let intermediate = intermediate_in_memory(root, &self.trust_domain, now)?;
                *signing = Arc::new(Signing::below(intermediate, &self.root_pem()));
            }
            Keeping::Provided { place } if signing.signer.not_after <= now => {
                return Err(AuthorityError::SignerExpired(place.clone()));
            }
            _ => {}
        }
        Ok(signing.clone())
    }
}

impl fmt::Debug for Authority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Authority({})", self.trust_domain)
    }
}

impl Signing {
    /// Directly below our own root.
    fn below(signer: Signer, root_pem: &str) -> Self {
        Self {
            chain: vec![signer.pem.clone(), root_pem.to_owned()],
            above: Vec::new(),
            signer,
        }
    }

    /// The same signer, with other roots after it.
    fn again(&self, root_pem: &str) -> Result<Self, AuthorityError> {
        let signer = Signer::parse_unsigned(self.signer.key_pem().as_bytes(), self.signer.pem.as_bytes());
        Ok(Self::below(signer.map_err(AuthorityError::Sign)?, root_pem))
    }

    fn provided(provided: Provided) -> Self {
        let mut chain = vec![provided.signer.pem.clone()];
        chain.extend(provided.above_pem);
        chain.push(provided.roots_pem);
        Self {
            signer: provided.signer,
            above: provided.above,
            chain,
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn unsound(place: &str, reason: String) -> AuthorityError {
    AuthorityError::Unsound {
        place: place.into(),
        reason,
    }
}

/// The root that signs, if it is sound.
fn signing_root(place: &str, keyring: &Keyring, trust_domain: &TrustDomain) -> Result<Signer, AuthorityError> {
    let (key, certificate) = keyring.signing();
    let root = Signer::parse(key.as_bytes(), certificate.as_bytes(), None).map_err(|reason| unsound(place, reason))?;
    check_root(place, &root, trust_domain, SystemTime::now())?;
    Ok(root)
}

fn check_root(place: &str, root: &Signer, trust_domain: &TrustDomain, now: SystemTime) -> Result<(), AuthorityError> {
    let found = signer::trust_domain_of(&root.certificate);
    if found.as_deref() != Some(&format!("spiffe://{trust_domain}")) {
        return Err(AuthorityError::TrustDomain {
            place: place.into(),
            expected: trust_domain.clone(),
            found: found.unwrap_or_else(|| "no trust domain".into()),
        });
    }
    if root.not_after <= now {
        return Err(AuthorityError::RootExpired(place.into()));
    }
    Ok(())
}

/// A root that names a trust domain must name ours; most people's roots name none.
fn check_provided(place: &str, provided: &Provided, trust_domain: &TrustDomain) -> Result<(), AuthorityError> {
    match signer::trust_domain_of(&provided.signer.certificate) {
        Some(found) if found != format!("spiffe://{trust_domain}") => Err(AuthorityError::TrustDomain {
            place: place.into(),
            expected: trust_domain.clone(),
            found,
        }),
        _ => Ok(()),
    }
}

fn intermediate_in_memory(
    root: &Signer,
    trust_domain: &TrustDomain,
    now: SystemTime,
) -> Result<Signer, AuthorityError> {
    let content = root.make_intermediate(trust_domain, now)?;
    tracing::info!(%trust_domain, "made a new intermediate");
    Signer::parse(&content, &content, Some(&root.certificate)).map_err(AuthorityError::Sign)
}

#[cfg(test)]
mod tests;
