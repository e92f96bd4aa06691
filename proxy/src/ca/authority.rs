//! The keys that sign: a root that lives ten years, an intermediate that lives one and signs the leaves.

use std::fmt;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use rcgen::{ExtendedKeyUsagePurpose, KeyPair, SanType, SubjectPublicKeyInfo};
use rustls::sign::CertifiedKey;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use thiserror::Error;
use zeroize::{Zeroize, Zeroizing};

use super::files::{FileError, Folder, PRIVATE, PUBLIC};
use super::provided::Provided;
use super::signer::{self, Signer};
use crate::identity::{SpiffeId, TrustDomain};

/// The root's key and certificate.
const ROOT_FILE: &str = "root.key";
/// The root's certificate alone, for clients.
const ROOT_CERTIFICATE_FILE: &str = "root.pem";
/// The intermediate's key and certificate.
const INTERMEDIATE_FILE: &str = "intermediate.key";

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
    root_pem: String,
    keeping: Keeping,
    signing: Mutex<Arc<Signing>>,
}

/// Where the keys come from, and so who renews what signs.
enum Keeping {
    /// A folder that this process holds: root and intermediate are kept in it.
    Folder { folder: Folder, root: Signer },
    /// A root handed over; the intermediate is this process's own and lives in memory.
    Root { root: Signer },
    /// A key of somebody else's hierarchy, who renews it. Where it is kept.
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
        let now = SystemTime::now();
        let folder = Folder::open(dir)?;
        let root = open_root(&folder, trust_domain, now)?;
        let kept = match folder.read_private(INTERMEDIATE_FILE)? {
            Some(content) => Some(parse_file(
                &folder,
                INTERMEDIATE_FILE,
                &content,
                Some(&root.certificate),
            )?),
            None => None,
        };
        let intermediate = match kept.filter(|kept| !kept.is_due(now)) {
            Some(kept) => kept,
            None => renew_in_folder(&folder, &root, trust_domain, now)?,
        };
        Ok(Self {
            trust_domain: trust_domain.clone(),
            root_pem: root.pem.clone(),
            signing: Mutex::new(Arc::new(Signing::below(intermediate, &root.pem))),
            keeping: Keeping::Folder { folder, root },
        })
    }

    /// An authority of a root's key and certificate, PEM, that are kept at `place`. Several processes may have the
    /// same root: each signs by an intermediate of its own.
    pub fn from_root(
        place: &str,
        key: &[u8],
        certificate: &[u8],
        trust_domain: &TrustDomain,
    ) -> Result<Self, AuthorityError> {
        let now = SystemTime::now();
        let root = Signer::parse(key, certificate, None).map_err(|reason| unsound(place, reason))?;
        check_root(place, &root, trust_domain, now)?;
        let intermediate = intermediate_in_memory(&root, trust_domain, now)?;
        Ok(Self {
            trust_domain: trust_domain.clone(),
            root_pem: root.pem.clone(),
            signing: Mutex::new(Arc::new(Signing::below(intermediate, &root.pem))),
            keeping: Keeping::Root { root },
        })
    }

    /// An authority that signs by somebody else's intermediate, which is kept at `place`.
    pub fn from_provided(place: &str, provided: Provided, trust_domain: &TrustDomain) -> Result<Self, AuthorityError> {
        check_provided(place, &provided, trust_domain)?;
        Ok(Self {
            trust_domain: trust_domain.clone(),
            root_pem: provided.roots_pem.clone(),
            signing: Mutex::new(Arc::new(Signing::provided(provided))),
            keeping: Keeping::Provided { place: place.into() },
        })
    }

    /// Signs by this newer intermediate from now on. One below another root is refused: those who trust the root so
    /// far would not trust what it signs.
    pub fn replace_provided(&self, place: &str, provided: Provided) -> Result<(), AuthorityError> {
        check_provided(place, &provided, &self.trust_domain)?;
        if provided.roots_pem != self.root_pem {
            let reason = "its root is another than the one in use; restart the CA to change over to it";
            return Err(unsound(place, reason.into()));
        }
        *lock(&self.signing) = Arc::new(Signing::provided(provided));
        Ok(())
    }

    /// A new root's key and certificate, PEM, one after the other.
    pub fn new_root(trust_domain: &TrustDomain) -> Result<Zeroizing<Vec<u8>>, AuthorityError> {
        signer::make_root(trust_domain, SystemTime::now())
    }

    /// The trust domain that it signs for.
    pub fn trust_domain(&self) -> &TrustDomain {
        &self.trust_domain
    }

    /// The root certificate, PEM; several where they were provided so.
    pub fn root_pem(&self) -> &str {
        &self.root_pem
    }

    /// The private key of the root, PEM, where it is this authority's own.
    pub(super) fn root_key(&self) -> Option<Zeroizing<String>> {
        match &self.keeping {
            Keeping::Folder { root, .. } | Keeping::Root { root } => Some(root.key_pem()),
            Keeping::Provided { .. } => None,
        }
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

    /// Makes a key and a certificate for serving TLS under DNS names and IP addresses, and says when it expires.
    pub(super) fn serving_certificate(
        &self,
        names: &[String],
        ttl: Duration,
        now: SystemTime,
    ) -> Result<(CertifiedKey, SystemTime), AuthorityError> {
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
        Ok((CertifiedKey::new(chain, key), not_after))
    }

    /// What signs; an intermediate of our own is replaced by a new one when less than a third of its life is left.
    fn signing(&self, now: SystemTime) -> Result<Arc<Signing>, AuthorityError> {
        let mut signing = lock(&self.signing);
        let signer = &signing.signer;
        let renewed = match &self.keeping {
            Keeping::Folder { folder, root } if signer.is_due(now) && signer.not_after < root.not_after => {
                Some((renew_in_folder(folder, root, &self.trust_domain, now)?, root))
            }
            Keeping::Root { root } if signer.is_due(now) && signer.not_after < root.not_after => {
                Some((intermediate_in_memory(root, &self.trust_domain, now)?, root))
            }
            Keeping::Provided { place } if signer.not_after <= now => {
                return Err(AuthorityError::SignerExpired(place.clone()));
            }
            _ => None,
        };
        if let Some((intermediate, root)) = renewed {
            *signing = Arc::new(Signing::below(intermediate, &root.pem));
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

fn open_root(folder: &Folder, trust_domain: &TrustDomain, now: SystemTime) -> Result<Signer, AuthorityError> {
    let path = folder.file(ROOT_FILE);
    let published = folder.read(ROOT_CERTIFICATE_FILE)?;
    let content = match folder.read_private(ROOT_FILE)? {
        Some(content) => content,
        None if published.is_some() => {
            let reason = format!("it is missing, but {ROOT_CERTIFICATE_FILE} is there");
            return Err(FileError::damaged(&path, reason).into());
        }
        None => {
            let content = signer::make_root(trust_domain, now)?;
            folder.create(ROOT_FILE, &content, PRIVATE)?;
            content
        }
    };
    let root = parse_file(folder, ROOT_FILE, &content, None)?;
    check_root(&path.display().to_string(), &root, trust_domain, now)?;
    match published {
        None => folder.create(ROOT_CERTIFICATE_FILE, root.pem.as_bytes(), PUBLIC)?,
        Some(published) if published == root.pem.as_bytes() => {}
        Some(_) => {
            let reason = format!("it is not the certificate of {ROOT_FILE}");
            return Err(FileError::damaged(&folder.file(ROOT_CERTIFICATE_FILE), reason).into());
        }
    }
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

/// Reads a key with its certificate from a file of the folder.
fn parse_file(
    folder: &Folder,
    name: &str,
    content: &[u8],
    parent: Option<&CertificateDer<'_>>,
) -> Result<Signer, FileError> {
    Signer::parse(content, content, parent).map_err(|reason| FileError::damaged(&folder.file(name), reason))
}

fn renew_in_folder(
    folder: &Folder,
    root: &Signer,
    trust_domain: &TrustDomain,
    now: SystemTime,
) -> Result<Signer, AuthorityError> {
    let content = root.make_intermediate(trust_domain, now)?;
    folder.replace(INTERMEDIATE_FILE, &content, PRIVATE)?;
    tracing::info!(%trust_domain, "made a new intermediate");
    Ok(parse_file(
        folder,
        INTERMEDIATE_FILE,
        &content,
        Some(&root.certificate),
    )?)
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
mod tests {
    use super::*;
    use crate::ca::csr;
    use crate::identity::{Certificate, PrivateKey};

    fn domain() -> TrustDomain {
        TrustDomain::parse("cluster.local").unwrap()
    }

    fn from_root(pem: &[u8]) -> Result<Authority, AuthorityError> {
        Authority::from_root("the Secret", pem, pem, &domain())
    }

    /// A certificate as a node proxy takes it.
    fn certificate(authority: &Authority) -> Certificate {
        let id = SpiffeId::parse("spiffe://cluster.local/ns/shop/sa/cart").unwrap();
        let key = PrivateKey::generate().unwrap();
        let public_key = csr::public_key(&key.request(&id).unwrap()).unwrap();
        let signed = authority.sign(&id, &public_key, Duration::from_secs(600)).unwrap();
        Certificate::new(&id, &signed.chain, key).unwrap()
    }

    #[test]
    fn two_replicas_of_one_root_sign_by_intermediates_of_their_own_under_the_same_root() {
        let root = Authority::new_root(&domain()).unwrap();
        let [one, two] = [from_root(&root).unwrap(), from_root(&root).unwrap()];
        assert_eq!(one.root_pem(), two.root_pem());
        assert!(String::from_utf8_lossy(&root).contains(one.root_pem()));
        let intermediate = |authority: &Authority| lock(&authority.signing).signer.pem.clone();
        assert_ne!(intermediate(&one), intermediate(&two));
        certificate(&one);
        certificate(&two);
    }

    #[test]
    fn a_root_of_another_trust_domain_or_without_its_key_is_refused() {
        let foreign = Authority::new_root(&TrustDomain::parse("elsewhere").unwrap()).unwrap();
        assert!(matches!(from_root(&foreign), Err(AuthorityError::TrustDomain { .. })));
        assert!(matches!(from_root(b"nothing"), Err(AuthorityError::Unsound { .. })));
    }

    #[test]
    fn a_provided_intermediate_signs_and_is_replaced_only_below_the_same_root() {
        let provided = |root: &Authority| {
            let Keeping::Root { root } = &root.keeping else {
                panic!()
            };
            let made = root.make_intermediate(&domain(), SystemTime::now()).unwrap();
            Provided::parse(&made, &made, root.pem.as_bytes(), None, SystemTime::now()).unwrap()
        };
        let [root, other] = [(); 2].map(|()| from_root(&Authority::new_root(&domain()).unwrap()).unwrap());
        let authority = Authority::from_provided("the Secret", provided(&root), &domain()).unwrap();
        assert_eq!(authority.root_pem(), root.root_pem());
        assert!(authority.root_key().is_none());
        certificate(&authority);
        authority.replace_provided("the Secret", provided(&root)).unwrap();
        certificate(&authority);
        assert!(authority.replace_provided("the Secret", provided(&other)).is_err());
        certificate(&authority);
    }
}
