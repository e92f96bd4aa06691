//! A key that signs, with its certificate.

use std::net::IpAddr;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, PublicKeyData, SanType, SerialNumber,
};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use x509_parser::prelude::{FromDer, GeneralName, X509Certificate};
use zeroize::{Zeroize, Zeroizing};

use super::authority::AuthorityError;
use crate::identity::{TrustDomain, hex};

const DAY: Duration = Duration::from_secs(24 * 60 * 60);
const ROOT_LIFETIME: Duration = DAY.saturating_mul(3650);
const INTERMEDIATE_LIFETIME: Duration = DAY.saturating_mul(365);
/// Certificates are valid from a little before they are made, for peers whose clocks are behind.
const BACKDATED: Duration = Duration::from_secs(60);

/// A key with its certificate.
pub(super) struct Signer {
    issuer: Issuer<'static, KeyPair>,
    pub(super) certificate: CertificateDer<'static>,
    pub(super) pem: String,
    pub(super) not_after: SystemTime,
    lifetime: Duration,
}

impl Signer {
    /// Takes a key and its certificate, PEM, which `parent` (or itself) must have signed; or says what is wrong.
    pub(super) fn parse(key: &[u8], certificate: &[u8], parent: Option<&CertificateDer<'_>>) -> Result<Self, String> {
        let signer = Self::parse_unsigned(key, certificate)?;
        let (_, parsed) = x509(&signer.certificate)?;
        let parent = match parent {
            Some(parent) => Some(x509(parent)?.1),
            None => None,
        };
        parsed
            .verify_signature(parent.as_ref().map(|parent| parent.public_key()))
            .map_err(|_| "the certificate is not signed by the root".to_string())?;
        drop(parsed);
        Ok(signer)
    }

    /// As [`Signer::parse`], whoever has signed the certificate.
    pub(super) fn parse_unsigned(key: &[u8], certificate: &[u8]) -> Result<Self, String> {
        let key = PrivateKeyDer::from_pem_slice(key).map_err(|e| format!("private key: {e}"))?;
        let pair = KeyPair::try_from(&key).map_err(|e| format!("private key: {e}"))?;
        let (der, pem) = certificates(certificate)?
            .into_iter()
            .next()
            .ok_or("there is no certificate")?;
        let (_, parsed) = x509(&der)?;
        if parsed.public_key().raw != pair.subject_public_key_info() {
            return Err("key and certificate do not belong together".into());
        }
        if !parsed.is_ca() {
            return Err("the certificate is not an authority's".into());
        }
        let usage = parsed.key_usage().map_err(|e| format!("certificate: {e}"))?;
        if usage.is_some_and(|usage| !usage.value.key_cert_sign()) {
            return Err("the certificate's key usage does not allow signing certificates".into());
        }
        let span = parsed.validity();
        let (from, to) = (
            span.not_before.timestamp().max(0) as u64,
            span.not_after.timestamp().max(0) as u64,
        );
        drop(parsed);
        let issuer = Issuer::from_ca_cert_der(&der, pair).map_err(|e| e.to_string())?;
        Ok(Self {
            issuer,
            certificate: der,
            pem,
            not_after: UNIX_EPOCH + Duration::from_secs(to),
            lifetime: Duration::from_secs(to.saturating_sub(from)),
        })
    }

    /// Whether less than a third of its life is left.
    pub(super) fn is_due(&self, now: SystemTime) -> bool {
        self.not_after.duration_since(now).unwrap_or_default() < self.lifetime / 3
    }

    /// The private key, PEM.
    pub(super) fn key_pem(&self) -> Zeroizing<String> {
        Zeroizing::new(self.issuer.key().serialize_pem())
    }

    /// Makes an intermediate below this root: key and certificate, PEM.
    pub(super) fn make_intermediate(
        &self,
        trust_domain: &TrustDomain,
        now: SystemTime,
    ) -> Result<Zeroizing<Vec<u8>>, AuthorityError> {
        let mut pair = KeyPair::generate()?;
        let mut params = authority_params("intermediate", trust_domain, &pair, 0);
        params.not_before = (now - BACKDATED).into();
        params.not_after = (now + INTERMEDIATE_LIFETIME).min(self.not_after).into();
        params.use_authority_key_identifier_extension = true;
        let content = key_and_certificate(&pair, &params.signed_by(&pair, &self.issuer)?);
        pair.zeroize();
        Ok(content)
    }

    /// Signs a leaf. Gives it, its serial number in hexadecimal, and when it expires.
    pub(super) fn sign_leaf(
        &self,
        public_key: &impl PublicKeyData,
        names: Vec<SanType>,
        usage: Vec<ExtendedKeyUsagePurpose>,
        ttl: Duration,
        now: SystemTime,
    ) -> Result<(rcgen::Certificate, String, SystemTime), AuthorityError> {
        let mut params = CertificateParams::default();
        let serial = serial();
        let serial_text = hex(serial.as_ref());
        let not_after = (now + ttl).min(self.not_after);
        params.distinguished_name = DistinguishedName::new();
        params.subject_alt_names = names;
        params.is_ca = IsCa::ExplicitNoCa;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = usage;
        params.use_authority_key_identifier_extension = true;
        params.not_before = (now - BACKDATED).into();
        params.not_after = not_after.into();
        params.serial_number = Some(serial);
        Ok((params.signed_by(public_key, &self.issuer)?, serial_text, not_after))
    }
}

/// Makes a root: key and certificate, PEM.
pub(super) fn make_root(trust_domain: &TrustDomain, now: SystemTime) -> Result<Zeroizing<Vec<u8>>, AuthorityError> {
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

fn authority_params(role: &str, trust_domain: &TrustDomain, pair: &KeyPair, depth: u8) -> CertificateParams {
    let mut params = CertificateParams::default();
    // Path building goes by names: two generations of a role must not share one.
    let tag = hex(&pair.public_key_raw()[1..5]);
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

pub(super) fn serving_name(name: &str) -> Result<SanType, AuthorityError> {
    if let Ok(address) = name.parse::<IpAddr>() {
        return Ok(SanType::IpAddress(address));
    }
    let bad = || AuthorityError::Name(name.to_string());
    rustls_pki_types::DnsName::try_from(name).map_err(|_| bad())?;
    Ok(SanType::DnsName(name.try_into().map_err(|_| bad())?))
}

/// The URI of the trust domain that an authority's certificate names, if it names any.
pub(super) fn trust_domain_of(certificate: &CertificateDer<'_>) -> Option<String> {
    let (_, parsed) = X509Certificate::from_der(certificate).ok()?;
    let names = parsed.subject_alternative_name().ok()??;
    names.value.general_names.iter().find_map(|name| match name {
        GeneralName::URI(uri) => Some((*uri).to_string()),
        _ => None,
    })
}

/// The certificates of a text, which may hold other things too, each with its PEM block alone.
pub(super) fn certificates(content: &[u8]) -> Result<Vec<(CertificateDer<'static>, String)>, String> {
    const BEGIN: &str = "-----BEGIN CERTIFICATE-----";
    const END: &str = "-----END CERTIFICATE-----";
    let mut text = str::from_utf8(content).map_err(|_| "certificate: not text".to_string())?;
    let mut found = Vec::new();
    while let Some(start) = text.find(BEGIN) {
        let length = text[start..].find(END).ok_or("a certificate is cut off")? + END.len();
        let block = format!("{}\n", &text[start..start + length]);
        let der = CertificateDer::from_pem_slice(block.as_bytes()).map_err(|e| format!("certificate: {e}"))?;
        found.push((der, block));
        text = &text[start + length..];
    }
    Ok(found)
}

/// A certificate taken apart.
pub(super) fn x509<'a>(der: &'a CertificateDer<'_>) -> Result<(&'a [u8], X509Certificate<'a>), String> {
    X509Certificate::from_der(der).map_err(|e| format!("certificate: {e}"))
}

fn key_and_certificate(pair: &KeyPair, certificate: &rcgen::Certificate) -> Zeroizing<Vec<u8>> {
    let key = Zeroizing::new(pair.serialize_pem());
    Zeroizing::new([key.as_bytes(), certificate.pem().as_bytes()].concat())
}
