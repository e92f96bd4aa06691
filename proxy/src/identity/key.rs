//! Private keys of certificates: made here, used once for a request, wiped when dropped.

use std::fmt;
use std::sync::Arc;

use rcgen::{CertificateParams, DistinguishedName, KeyPair, PublicKeyData, SanType};
use rustls::sign::SigningKey;
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};
use thiserror::Error;
use zeroize::Zeroize;

use super::SpiffeId;

/// Why a key could not be made or used. But for [`KeyError::Read`] it does not happen on a sound system.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum KeyError {
    /// The random generator or the cryptographic library failed.
    #[error("making an ECDSA P-256 key failed: {0}")]
    Generate(String),
    /// The certificate signing request could not be written.
    #[error("writing a certificate signing request for {id} failed: {reason}")]
    Request {
        /// The identity asked for.
        id: SpiffeId,
        /// What the encoder said.
        reason: String,
    },
    /// What was handed over is not a key that can be used.
    #[error("not a private key that can be used: {0}")]
    Read(String),
    /// The TLS library refuses the key.
    #[error("the TLS library refuses the key: {0}")]
    Use(String),
}

/// A private key that never leaves the process; ECDSA P-256 where it is made here. Its encoded form is wiped on drop; the TLS
/// library's copy is wiped when the last connection that uses it is gone.
pub struct PrivateKey(KeyPair);

impl PrivateKey {
    /// Makes a fresh key.
    pub fn generate() -> Result<Self, KeyError> {
        KeyPair::generate()
            .map(Self)
            .map_err(|e| KeyError::Generate(e.to_string()))
    }

    /// A key that another system has made, PEM.
    pub fn from_pem(pem: &[u8]) -> Result<Self, KeyError> {
        let failed = |reason: &dyn fmt::Display| KeyError::Read(reason.to_string());
        let mut der = PrivateKeyDer::from_pem_slice(pem).map_err(|e| failed(&e))?;
        let pair = KeyPair::try_from(&der);
        der.zeroize();
        pair.map(Self).map_err(|e| failed(&e))
    }

    /// The same, PKCS#8 in DER.
    pub(crate) fn from_pkcs8(der: &[u8]) -> Result<Self, KeyError> {
        let der = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(der));
        let pair = KeyPair::try_from(&der).map_err(|e| KeyError::Read(e.to_string()))?;
        Ok(Self(pair))
    }

    /// The key, PKCS#8 in DER.
    #[cfg(test)]
    pub(crate) fn to_pkcs8(&self) -> Vec<u8> {
        self.0.serialize_der()
    }

    /// The key, PEM.
    #[cfg(test)]
    pub(crate) fn to_pem(&self) -> String {
        self.0.serialize_pem()
    }

    /// A PEM signing request for this key with an empty subject and `id` as its only alternative name.
    pub fn request(&self, id: &SpiffeId) -> Result<String, KeyError> {
        let failed = |e: rcgen::Error| KeyError::Request {
            id: id.clone(),
            reason: e.to_string(),
        };
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        params.subject_alt_names = vec![SanType::URI(id.as_str().try_into().map_err(failed)?)];
        params
            .serialize_request(&self.0)
            .and_then(|request| request.pem())
            .map_err(failed)
    }

    /// The public half as a DER SubjectPublicKeyInfo.
    pub(crate) fn public_key(&self) -> Vec<u8> {
        self.0.subject_public_key_info()
    }

    /// The key in the form that TLS signs with.
    pub(crate) fn signing_key(&self) -> Result<Arc<dyn SigningKey>, KeyError> {
        let der = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(self.0.serialized_der()));
        rustls::crypto::aws_lc_rs::sign::any_supported_type(&der).map_err(|e| KeyError::Use(e.to_string()))
    }
}

impl Drop for PrivateKey {
    fn drop(&mut self) {
        self.0.zeroize();
    }
}

impl fmt::Debug for PrivateKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PrivateKey(..)")
    }
}

#[cfg(test)]
mod tests {
    use x509_parser::prelude::{FromDer, GeneralName, ParsedExtension, X509CertificationRequest};

    use super::*;

    #[test]
    fn a_request_has_an_empty_subject_one_uri_name_and_a_valid_signature() {
        let id = SpiffeId::parse("spiffe://cluster.local/ns/shop/sa/cart").unwrap();
        let key = PrivateKey::generate().unwrap();
        let pem = key.request(&id).unwrap();
        let (_, block) = x509_parser::pem::parse_x509_pem(pem.as_bytes()).unwrap();
        let (_, request) = X509CertificationRequest::from_der(&block.contents).unwrap();
        request.verify_signature().unwrap();
        assert_eq!(request.certification_request_info.subject.iter().count(), 0);
        assert_eq!(request.certification_request_info.subject_pki.raw, key.public_key());
        let names: Vec<_> = request
            .requested_extensions()
            .unwrap()
            .filter_map(|extension| match extension {
                ParsedExtension::SubjectAlternativeName(names) => Some(names.general_names.clone()),
                _ => None,
            })
            .flatten()
            .collect();
        assert_eq!(names, [GeneralName::URI(id.as_str())]);
    }

    #[test]
    fn debug_output_shows_nothing_of_the_key() {
        assert_eq!(format!("{:?}", PrivateKey::generate().unwrap()), "PrivateKey(..)");
    }
}
