//! Certificate signing requests: whose key it is, proven, and nothing else that they say.

use rcgen::SubjectPublicKeyInfo;
use thiserror::Error;
use x509_parser::oid_registry::{OID_EC_P256, OID_KEY_TYPE_EC_PUBLIC_KEY, OID_NIST_EC_P384, OID_SIG_ED25519};
use x509_parser::prelude::{FromDer, X509CertificationRequest};
use x509_parser::public_key::PublicKey;

/// The largest request accepted, PEM.
const MAX_CSR_BYTES: usize = 16 * 1024;
const RSA_BITS: std::ops::RangeInclusive<usize> = 2048..=8192;

/// Why a signing request is not acceptable.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum CsrError {
    /// Larger than any honest request.
    #[error("a signing request of {0} bytes is too large")]
    TooLarge(usize),
    /// Not one PEM block of a certificate request.
    #[error("the signing request is not PEM of a CERTIFICATE REQUEST")]
    NotPem,
    /// Not PKCS#10.
    #[error("the signing request is not PKCS#10: {0}")]
    Unparsable(String),
    /// The key is of a kind or size that is not certified here.
    #[error("the key is {0}; P-256, P-384, Ed25519 and RSA of 2048 to 8192 bits are certified")]
    Key(String),
    /// The request is not signed by the key in it.
    #[error("the signing request is not signed by its own key")]
    Signature,
}

/// Takes the public key from a request that proves the possession of its private half. The names and extensions
/// that the request asks for are ignored: what is certified follows from who asks, not from what is asked.
pub(super) fn public_key(pem: &str) -> Result<SubjectPublicKeyInfo, CsrError> {
    if pem.len() > MAX_CSR_BYTES {
        return Err(CsrError::TooLarge(pem.len()));
    }
    let (_, block) = x509_parser::pem::parse_x509_pem(pem.as_bytes()).map_err(|_| CsrError::NotPem)?;
    if !matches!(block.label.as_str(), "CERTIFICATE REQUEST" | "NEW CERTIFICATE REQUEST") {
        return Err(CsrError::NotPem);
    }
    let (rest, request) =
        X509CertificationRequest::from_der(&block.contents).map_err(|e| CsrError::Unparsable(e.to_string()))?;
    if !rest.is_empty() {
        return Err(CsrError::Unparsable("bytes after its end".into()));
    }
    let key = &request.certification_request_info.subject_pki;
    check_key(key)?;
    request.verify_signature().map_err(|_| CsrError::Signature)?;
    SubjectPublicKeyInfo::from_der(key.raw).map_err(|e| CsrError::Key(format!("not usable: {e}")))
}

fn check_key(key: &x509_parser::x509::SubjectPublicKeyInfo<'_>) -> Result<(), CsrError> {
    let algorithm = &key.algorithm.algorithm;
    if *algorithm == OID_SIG_ED25519 {
        return Ok(());
    }
    if *algorithm == OID_KEY_TYPE_EC_PUBLIC_KEY {
        let curve = key
            .algorithm
            .parameters
            .as_ref()
            .and_then(|parameters| parameters.as_oid().ok());
        return match curve {
            Some(curve) if curve == OID_EC_P256 || curve == OID_NIST_EC_P384 => Ok(()),
            _ => Err(CsrError::Key("on another elliptic curve".into())),
        };
    }
    match key.parsed() {
        Ok(PublicKey::RSA(rsa)) if RSA_BITS.contains(&rsa.key_size()) => Ok(()),
        Ok(PublicKey::RSA(rsa)) => Err(CsrError::Key(format!("RSA of {} bits", rsa.key_size()))),
        _ => Err(CsrError::Key(format!("of the algorithm {algorithm}"))),
    }
}

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, KeyPair, PublicKeyData};
    use rustls_pki_types::CertificateSigningRequestDer;
    use rustls_pki_types::pem::PemObject;

    use super::*;

    fn request(algorithm: &'static rcgen::SignatureAlgorithm) -> (KeyPair, String) {
        let key = KeyPair::generate_for(algorithm).unwrap();
        let pem = CertificateParams::default()
            .serialize_request(&key)
            .unwrap()
            .pem()
            .unwrap();
        (key, pem)
    }

    fn as_pem(der: &[u8]) -> String {
        use std::fmt::Write as _;
        let mut text = String::from("-----BEGIN CERTIFICATE REQUEST-----\n");
        for line in base64(der).as_bytes().chunks(64) {
            writeln!(text, "{}", str::from_utf8(line).unwrap()).unwrap();
        }
        text + "-----END CERTIFICATE REQUEST-----\n"
    }

    fn base64(bytes: &[u8]) -> String {
        const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
        let mut text = String::new();
        for chunk in bytes.chunks(3) {
            let word = chunk.iter().fold(0u32, |word, byte| word << 8 | u32::from(*byte)) << (8 * (3 - chunk.len()));
            for place in 0..4 {
                let digit = ALPHABET[(word >> (18 - 6 * place) & 63) as usize] as char;
                text.push(if place <= chunk.len() { digit } else { '=' });
            }
        }
        text
    }

    #[test]
    fn the_key_of_every_supported_kind_is_taken_over_exactly() {
        for algorithm in [
            &rcgen::PKCS_ECDSA_P256_SHA256,
            &rcgen::PKCS_ECDSA_P384_SHA384,
            &rcgen::PKCS_ED25519,
            &rcgen::PKCS_RSA_SHA256,
        ] {
            let (key, pem) = request(algorithm);
            assert_eq!(
                public_key(&pem).unwrap().subject_public_key_info(),
                key.subject_public_key_info()
            );
        }
    }

    #[test]
    fn malformed_requests_are_refused_with_the_reason() {
        let (_, pem) = request(&rcgen::PKCS_ECDSA_P256_SHA256);
        let der = CertificateSigningRequestDer::from_pem_slice(pem.as_bytes())
            .unwrap()
            .to_vec();
        let mut bad_signature = der.clone();
        *bad_signature.last_mut().unwrap() ^= 1;
        let mut trailing = der.clone();
        trailing.push(0);
        let unparsable = |der: &[u8]| assert!(matches!(public_key(&as_pem(der)), Err(CsrError::Unparsable(_))));

        assert_eq!(public_key(&as_pem(&der)).map(|_| ()), Ok(()));
        assert_eq!(public_key(&as_pem(&bad_signature)).unwrap_err(), CsrError::Signature);
        assert_eq!(public_key(""), Err(CsrError::NotPem));
        assert_eq!(public_key("garbage"), Err(CsrError::NotPem));
        assert_eq!(
            public_key(&pem.replace("CERTIFICATE REQUEST", "CERTIFICATE")),
            Err(CsrError::NotPem)
        );
        assert!(matches!(
            public_key(&"x".repeat(MAX_CSR_BYTES + 1)),
            Err(CsrError::TooLarge(_))
        ));
        unparsable(&trailing);
        unparsable(&[]);
        unparsable(&[0x30]);
        unparsable(&[0xff; 300]);
        for length in 1..der.len() {
            assert!(public_key(&as_pem(&der[..length])).is_err());
        }
    }

    #[test]
    fn another_key_than_the_signing_one_is_refused() {
        let (_, pem) = request(&rcgen::PKCS_ECDSA_P256_SHA256);
        let (other, _) = request(&rcgen::PKCS_ECDSA_P256_SHA256);
        let der = CertificateSigningRequestDer::from_pem_slice(pem.as_bytes())
            .unwrap()
            .to_vec();
        let (_, parsed) = X509CertificationRequest::from_der(&der).unwrap();
        let own = parsed.certification_request_info.subject_pki.raw;
        let at = der.windows(own.len()).position(|window| window == own).unwrap();
        let mut swapped = der.clone();
        swapped[at..at + own.len()].copy_from_slice(&other.subject_public_key_info());
        assert_eq!(public_key(&as_pem(&swapped)), Err(CsrError::Signature));
    }

    #[test]
    fn a_curve_that_is_not_certified_is_refused() {
        let (_, pem) = request(&rcgen::PKCS_ECDSA_P521_SHA512);
        assert!(matches!(public_key(&pem), Err(CsrError::Key(_))));
    }
}
