//! The keys that sign: a root that lives ten years, an intermediate that lives one and signs the leaves.

use std::fmt;
use std::net::IpAddr;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, PKCS_ECDSA_P256_SHA256, PublicKeyData, SanType, SerialNumber, SubjectPublicKeyInfo,
};
use rustls::sign::CertifiedKey;
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use thiserror::Error;
use x509_parser::prelude::{FromDer, GeneralName, X509Certificate};
use zeroize::{Zeroize, Zeroizing};

use super::files::{FileError, Folder, PRIVATE, PUBLIC};
use crate::identity::{SpiffeId, TrustDomain};

/// The root's key and certificate.
const ROOT_FILE: &str = "root.key";
/// The root's certificate alone, for clients.
const ROOT_CERTIFICATE_FILE: &str = "root.pem";
/// The intermediate's key and certificate.
const INTERMEDIATE_FILE: &str = "intermediate.key";

const DAY: Duration = Duration::from_secs(24 * 60 * 60);
const ROOT_LIFETIME: Duration = DAY.saturating_mul(3650);
const INTERMEDIATE_LIFETIME: Duration = DAY.saturating_mul(365);
/// Certificates are valid from a little before they are made, for peers whose clocks are behind.
const BACKDATED: Duration = Duration::from_secs(60);

/// Why the authority cannot be opened or cannot sign.
#[derive(Debug, Error)]
pub enum AuthorityError {
    /// Its folder is not usable.
    #[error(transparent)]
    File(#[from] FileError),
    /// The folder belongs to the authority of another trust domain.
    #[error("{folder} is the authority of {found}, not of the trust domain {expected}")]
    TrustDomain {
        /// The folder.
        folder: String,
        /// What was asked for.
        expected: TrustDomain,
        /// What is there.
        found: String,
    },
    /// The root has expired.
    #[error("the root certificate in {0} has expired; move the folder away to start a new CA")]
    RootExpired(String),
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

/// A certificate authority for one trust domain, kept in a folder that it holds while it lives.
pub struct Authority {
    folder: Folder,
    trust_domain: TrustDomain,
    root: Signer,
    intermediate: Mutex<Arc<Signer>>,
}

/// A key with its certificate.
struct Signer {
    issuer: Issuer<'static, KeyPair>,
    certificate: CertificateDer<'static>,
    pem: String,
    not_after: SystemTime,
    lifetime: Duration,
}

impl Authority {
    /// Opens the authority in a folder, or founds it if the folder is empty or missing. What is there but not
    /// sound is reported and left as it is.
    pub fn open(dir: &Path, trust_domain: &TrustDomain) -> Result<Self, AuthorityError> {
        Self::open_at(dir, trust_domain, SystemTime::now())
    }

    pub(super) fn open_at(dir: &Path, trust_domain: &TrustDomain, now: SystemTime) -> Result<Self, AuthorityError> {
        let folder = Folder::open(dir)?;
        let root = open_root(&folder, trust_domain, now)?;
        let intermediate = match folder.read_private(INTERMEDIATE_FILE)? {
            Some(content) => {
                let signer = Signer::parse(&folder, INTERMEDIATE_FILE, &content, Some(&root.certificate))?;
                if signer.is_due(now) {
                    make_intermediate(&folder, &root, trust_domain, now)?
                } else {
                    signer
                }
            }
            None => make_intermediate(&folder, &root, trust_domain, now)?,
        };
        let intermediate = Mutex::new(Arc::new(intermediate));
        Ok(Self {
            folder,
            trust_domain: trust_domain.clone(),
            root,
            intermediate,
        })
    }

    /// The trust domain that it signs for.
    pub fn trust_domain(&self) -> &TrustDomain {
        &self.trust_domain
    }

    /// The root certificate, PEM.
    pub fn root_pem(&self) -> &str {
        &self.root.pem
    }

    /// Signs a workload's certificate. It has an empty subject and the identity as its only name.
    pub fn sign(
        &self,
        identity: &SpiffeId,
        public_key: &SubjectPublicKeyInfo,
        ttl: Duration,
    ) -> Result<SignedCertificate, AuthorityError> {
        self.sign_at(identity, public_key, ttl, SystemTime::now())
    }

    pub(super) fn sign_at(
        &self,
        identity: &SpiffeId,
        public_key: &SubjectPublicKeyInfo,
        ttl: Duration,
        now: SystemTime,
    ) -> Result<SignedCertificate, AuthorityError> {
        let names = vec![SanType::URI(identity.as_str().try_into()?)];
        let both = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        let intermediate = self.intermediate(now)?;
        let (leaf, serial, not_after) = leaf(&intermediate, public_key, names, both, ttl, now)?;
        let chain = vec![leaf.pem(), intermediate.pem.clone(), self.root.pem.clone()];
        Ok(SignedCertificate {
            chain,
            serial,
            not_after,
        })
    }

    /// Makes a key and a certificate for serving TLS under DNS names and IP addresses.
    pub(super) fn serving_certificate(
        &self,
        names: &[String],
        ttl: Duration,
        now: SystemTime,
    ) -> Result<CertifiedKey, AuthorityError> {
        let names = names
            .iter()
            .map(|name| serving_name(name))
            .collect::<Result<Vec<_>, _>>()?;
        let mut pair = KeyPair::generate()?;
        let intermediate = self.intermediate(now)?;
        let usage = vec![ExtendedKeyUsagePurpose::ServerAuth];
        let (leaf, _, _) = leaf(&intermediate, &pair, names, usage, ttl, now)?;
        let der = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(pair.serialized_der()));
        let key = rustls::crypto::aws_lc_rs::sign::any_ecdsa_type(&der);
        pair.zeroize();
        let key = key.map_err(|e| AuthorityError::Sign(e.to_string()))?;
        Ok(CertifiedKey::new(
            vec![leaf.der().clone(), intermediate.certificate.clone()],
            key,
        ))
    }

    /// The intermediate, replaced by a new one when less than a third of its life is left.
    fn intermediate(&self, now: SystemTime) -> Result<Arc<Signer>, AuthorityError> {
        let mut intermediate = self.intermediate.lock().unwrap_or_else(PoisonError::into_inner);
        if intermediate.is_due(now) && intermediate.not_after < self.root.not_after {
            *intermediate = Arc::new(make_intermediate(&self.folder, &self.root, &self.trust_domain, now)?);
        }
        Ok(intermediate.clone())
    }
}

impl fmt::Debug for Authority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Authority({})", self.trust_domain)
    }
}

impl Signer {
    /// Reads a key with its certificate, which `parent` (or itself) must have signed.
    fn parse(
        folder: &Folder,
        name: &str,
        content: &[u8],
        parent: Option<&CertificateDer<'_>>,
    ) -> Result<Self, FileError> {
        let path = folder.file(name);
        let damaged = |reason: String| FileError::damaged(&path, reason);
        let key = PrivatePkcs8KeyDer::from_pem_slice(content).map_err(|e| damaged(format!("private key: {e}")))?;
        let pair = KeyPair::from_pkcs8_der_and_sign_algo(&key, &PKCS_ECDSA_P256_SHA256)
            .map_err(|e| damaged(format!("private key: {e}")))?;
        let certificate = CertificateDer::from_pem_slice(content).map_err(|e| damaged(format!("certificate: {e}")))?;
        let parse = |der| X509Certificate::from_der(der).map_err(|e| damaged(format!("certificate: {e}")));
        let (_, parsed) = parse(&certificate)?;
        if parsed.public_key().raw != pair.subject_public_key_info() {
            return Err(damaged("key and certificate do not belong together".into()));
        }
        if !parsed.is_ca() {
            return Err(damaged("the certificate is not an authority's".into()));
        }
        let parent = match parent {
            Some(parent) => Some(parse(parent)?.1),
            None => None,
        };
        parsed
            .verify_signature(parent.as_ref().map(|parent| parent.public_key()))
            .map_err(|_| damaged("the certificate is not signed by the root".into()))?;
        let span = parsed.validity();
        let (from, to) = (
            span.not_before.timestamp().max(0) as u64,
            span.not_after.timestamp().max(0) as u64,
        );
        let pem = pem_of(&path, content)?;
        let issuer = Issuer::from_ca_cert_der(&certificate, pair).map_err(|e| damaged(e.to_string()))?;
        let not_after = UNIX_EPOCH + Duration::from_secs(to);
        let lifetime = Duration::from_secs(to.saturating_sub(from));
        drop(parsed);
        Ok(Self {
            issuer,
            certificate,
            pem,
            not_after,
            lifetime,
        })
    }

    fn is_due(&self, now: SystemTime) -> bool {
        self.not_after.duration_since(now).unwrap_or_default() < self.lifetime / 3
    }
}

/// The certificate's block of a file that holds key and certificate.
fn pem_of(path: &Path, content: &[u8]) -> Result<String, FileError> {
    const BEGIN: &str = "-----BEGIN CERTIFICATE-----";
    let text = str::from_utf8(content).map_err(|_| FileError::damaged(path, "not text"))?;
    let start = text
        .find(BEGIN)
        .ok_or_else(|| FileError::damaged(path, "no certificate"))?;
    Ok(text[start..].to_string())
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
            let content = make_root(trust_domain, now)?;
            folder.create(ROOT_FILE, &content, PRIVATE)?;
            content
        }
    };
    let root = Signer::parse(folder, ROOT_FILE, &content, None)?;
    let found = trust_domain_of(&root.certificate);
    if found != format!("spiffe://{trust_domain}") {
        let folder = folder.file("").display().to_string();
        return Err(AuthorityError::TrustDomain {
            folder,
            expected: trust_domain.clone(),
            found,
        });
    }
    if root.not_after <= now {
        return Err(AuthorityError::RootExpired(path.display().to_string()));
    }
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

fn make_root(trust_domain: &TrustDomain, now: SystemTime) -> Result<Zeroizing<Vec<u8>>, AuthorityError> {
    let mut pair = KeyPair::generate()?;
    let mut params = authority_params("root", trust_domain, &pair, 1);
    // SPIFFE: an authority's certificate names its trust domain.
    params.subject_alt_names = vec![SanType::URI(format!("spiffe://{trust_domain}").try_into()?)];
    params.not_before = (now - BACKDATED).into();
    params.not_after = (now + ROOT_LIFETIME).into();
    let content = key_and_certificate(&pair, &params.self_signed(&pair)?);
    pair.zeroize();
    Ok(content)
}

fn make_intermediate(
    folder: &Folder,
    root: &Signer,
    trust_domain: &TrustDomain,
    now: SystemTime,
) -> Result<Signer, AuthorityError> {
    let mut pair = KeyPair::generate()?;
    let mut params = authority_params("intermediate", trust_domain, &pair, 0);
    params.not_before = (now - BACKDATED).into();
    params.not_after = (now + INTERMEDIATE_LIFETIME).min(root.not_after).into();
    params.use_authority_key_identifier_extension = true;
    let content = key_and_certificate(&pair, &params.signed_by(&pair, &root.issuer)?);
    pair.zeroize();
    folder.replace(INTERMEDIATE_FILE, &content, PRIVATE)?;
    tracing::info!(%trust_domain, "made a new intermediate");
    Ok(Signer::parse(
        folder,
        INTERMEDIATE_FILE,
        &content,
        Some(&root.certificate),
    )?)
}

fn authority_params(role: &str, trust_domain: &TrustDomain, pair: &KeyPair, depth: u8) -> CertificateParams {
    let mut params = CertificateParams::default();
    // Path building goes by names: two generations of a role must not share one.
    let tag: String = pair.public_key_raw()[1..5]
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    params.distinguished_name = DistinguishedName::new();
    params
        .distinguished_name
        .push(DnType::OrganizationName, trust_domain.as_str());
    params
        .distinguished_name
        .push(DnType::CommonName, format!("Adit {role} {tag}"));
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(depth));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params.serial_number = Some(serial());
    params
}

fn leaf(
    signer: &Signer,
    public_key: &impl PublicKeyData,
    names: Vec<SanType>,
    usage: Vec<ExtendedKeyUsagePurpose>,
    ttl: Duration,
    now: SystemTime,
) -> Result<(rcgen::Certificate, String, SystemTime), AuthorityError> {
    let mut params = CertificateParams::default();
    let serial = serial();
    let serial_text = serial.as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
    let not_after = (now + ttl).min(signer.not_after);
    params.distinguished_name = DistinguishedName::new();
    params.subject_alt_names = names;
    params.is_ca = IsCa::ExplicitNoCa;
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = usage;
    params.use_authority_key_identifier_extension = true;
    params.not_before = (now - BACKDATED).into();
    params.not_after = not_after.into();
    params.serial_number = Some(serial);
    Ok((params.signed_by(public_key, &signer.issuer)?, serial_text, not_after))
}

/// 16 random bytes that read as a positive number of full length (RFC 5280 4.1.2.2).
fn serial() -> SerialNumber {
    let mut bytes = [0; 16];
    // The generator fails only where no key could have been made either.
    if aws_lc_rs::rand::fill(&mut bytes).is_err() {
        bytes = fastrand::u128(..).to_be_bytes();
    }
    bytes[0] = bytes[0] & 0x3f | 0x40;
    SerialNumber::from_slice(&bytes)
}

fn serving_name(name: &str) -> Result<SanType, AuthorityError> {
    if let Ok(address) = name.parse::<IpAddr>() {
        return Ok(SanType::IpAddress(address));
    }
    let bad = || AuthorityError::Name(name.to_string());
    rustls_pki_types::DnsName::try_from(name).map_err(|_| bad())?;
    Ok(SanType::DnsName(name.try_into().map_err(|_| bad())?))
}

fn trust_domain_of(root: &CertificateDer<'_>) -> String {
    let names = X509Certificate::from_der(root).ok().and_then(|(_, parsed)| {
        let names = parsed.subject_alternative_name().ok()??;
        names.value.general_names.iter().find_map(|name| match name {
            GeneralName::URI(uri) => Some((*uri).to_string()),
            _ => None,
        })
    });
    names.unwrap_or_else(|| "no trust domain".into())
}

fn key_and_certificate(pair: &KeyPair, certificate: &rcgen::Certificate) -> Zeroizing<Vec<u8>> {
    let key = Zeroizing::new(pair.serialize_pem());
    Zeroizing::new([key.as_bytes(), certificate.pem().as_bytes()].concat())
}
