//! A root: a certificate that is trusted for its own sake.

use std::time::SystemTime;

use aws_lc_rs::digest::{SHA256, digest};
use rustls_pki_types::{CertificateDer, TrustAnchor};
use x509_parser::x509::X509Version;

use super::certificates::{Fault, key_fault};
use crate::identity::CertificateError;
use crate::identity::chain::{hex, parse, system_time};

/// A SHA-256 digest.
pub(super) type Digest = [u8; 32];

/// One trusted certificate, reduced to what verification needs.
#[derive(Debug, Clone)]
pub(in crate::identity) struct Root {
    /// Of the whole certificate.
    pub(super) fingerprint: Digest,
    /// Of its public key, by which it is known in whatever certificate it appears.
    pub(super) key: Digest,
    pub(super) subject: Box<str>,
    pub(super) not_before: SystemTime,
    pub(super) not_after: SystemTime,
    pub(super) anchor: TrustAnchor<'static>,
}

impl Root {
    /// Takes a certificate for a root, if it may be one.
    pub(in crate::identity) fn parse(der: &CertificateDer<'_>) -> Result<Self, CertificateError> {
        let certificate = parse(der)?;
        // Certificates of the first version have no extensions to say it by.
        let is_authority = match certificate.basic_constraints() {
            Ok(Some(constraints)) => constraints.value.ca,
            Ok(None) => certificate.version() == X509Version::V1,
            Err(_) => false,
        };
        if !is_authority {
            return Err(CertificateError::NotAnAuthority(certificate.subject().to_string()));
        }
        if let Some(Fault(fault)) = key_fault(certificate.public_key()) {
            return Err(CertificateError::Weak(format!(
                "the root {}: {fault}",
                certificate.subject()
            )));
        }
        let anchor = webpki::anchor_from_trusted_cert(der)
            .map_err(|error| CertificateError::Unparsable(error.to_string()))?
            .to_owned();
        let validity = certificate.validity();
        Ok(Self {
            fingerprint: sha256(der),
            key: sha256(certificate.public_key().raw),
            subject: certificate.subject().to_string().into(),
            not_before: system_time(validity.not_before.timestamp()),
            not_after: system_time(validity.not_after.timestamp()),
            anchor,
        })
    }

    /// As `openssl x509 -fingerprint -sha256` has it, in lower case and without colons.
    pub(super) fn name(&self) -> String {
        hex(&self.fingerprint)
    }
}

pub(super) fn sha256(bytes: &[u8]) -> Digest {
    let mut result = [0; 32];
    result.copy_from_slice(digest(&SHA256, bytes).as_ref());
    result
}
