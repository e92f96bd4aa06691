//! Whether a peer's chain is acceptable: one pure decision for both roles and for both times at which it is taken.

use std::cell::RefCell;
use std::time::{SystemTime, UNIX_EPOCH};

use rustls_pki_types::{CertificateDer, SignatureVerificationAlgorithm, UnixTime};
use webpki::{EndEntityCert, KeyUsage, VerifiedPath, spki_for_anchor};

use super::certificates::{Fault, key_fault, signature_fault};
use super::compose::Snapshot;
use super::crl::{self, Subject, Word};
use super::settings::CrlPolicy;
use crate::identity::chain::{CertificateError, check_bounds, cut, hex, identity, last_issuer, parse};
use crate::identity::tls::provider;
use crate::identity::{SpiffeId, TrustDomain};

/// Whether a path that leads to a root is admitted.
type Admit<'a> = &'a dyn Fn(&VerifiedPath<'_>) -> Result<(), webpki::Error>;

/// Which end of a handshake the one is whose chain is looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Role {
    /// It has connected.
    Client,
    /// It has been connected to.
    Server,
}

/// Why a chain is looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::identity) enum Purpose {
    /// To begin a connection: all must be well.
    Handshake,
    /// To go on with one that was begun in order: only what has become known against it counts. Time passes, roots are
    /// retired and lists run out without a fault of the peer's.
    Live,
}

/// All that the decision rests on, but for the chain.
#[derive(Debug, Clone, Copy)]
pub(in crate::identity) struct Check<'a> {
    pub(in crate::identity) snapshot: &'a Snapshot,
    /// Our own trust domain.
    pub(in crate::identity) home: &'a TrustDomain,
    pub(in crate::identity) role: Role,
    pub(in crate::identity) purpose: Purpose,
    pub(in crate::identity) at: UnixTime,
}

impl Check<'_> {
    /// Says whose chain it is, if it leads to a root of that identity's own trust domain, by acceptable certificates.
    pub(in crate::identity) fn verify(
        &self,
        leaf: &CertificateDer<'_>,
        rest: &[CertificateDer<'_>],
    ) -> Result<SpiffeId, CertificateError> {
        check_bounds(leaf, rest)?;
        let parsed = parse(leaf)?;
        let id = identity(&parsed)?;
        if let Some(Fault(fault)) = key_fault(parsed.public_key()) {
            return Err(CertificateError::Weak(format!("the certificate of {id}: {fault}")));
        }
        let anchors =
            self.snapshot
                .anchors(self.home, id.trust_domain())
                .ok_or_else(|| CertificateError::WrongTrustDomain {
                    expected: self.home.clone(),
                    found: id.clone(),
                })?;
        let anchors = match self.purpose {
            Purpose::Handshake => anchors.current(),
            Purpose::Live => anchors.with_retired(),
        };
        let usage = match self.role {
            Role::Client => KeyUsage::client_auth(),
            Role::Server => KeyUsage::server_auth(),
        };
        // What our own part of the decision has found; the library's errors have no room for it.
        let found = RefCell::new(None);
        let admit = |path: &VerifiedPath<'_>| {
            self.admit(path).map_err(|error| {
                let code = code(&error);
                *found.borrow_mut() = Some(error);
                code
            })
        };
        let admit: Option<Admit<'_>> = self.snapshot.looks_into_paths().then_some(&admit);
        let verified = EndEntityCert::try_from(leaf).and_then(|parsed| {
            parsed
                .verify_for_usage(algorithms(), anchors, rest, self.at, usage, None, admit)
                .map(|_| ())
        });
        verified.map_err(|error| match (error, found.take()) {
            (
                webpki::Error::CertRevoked | webpki::Error::CertDistrusted | webpki::Error::UnknownRevocationStatus,
                Some(reason),
            ) => reason,
            (error, _) => self.explain(error, &id, leaf, rest),
        })?;
        Ok(id)
    }

    /// Whether nothing is known against any certificate of a path that leads to a root.
    fn admit(&self, path: &VerifiedPath<'_>) -> Result<(), CertificateError> {
        let snapshot = self.snapshot;
        let anchor_key = spki_for_anchor(path.anchor());
        // From the root to the leaf.
        let mut issuer_key = anchor_key;
        let leaf: &webpki::Cert<'_> = path.end_entity();
        let certificates = path.intermediate_certificates().rev().chain([leaf]);
        for certificate in certificates {
            let key = certificate.subject_public_key_info();
            if !snapshot.distrust.is_empty() && snapshot.distrust.has(&certificate.der(), &key) {
                return Err(CertificateError::Distrusted);
            }
            if !snapshot.crls.is_empty() || snapshot.crl_policy == CrlPolicy::Strict {
                let subject = Subject {
                    serial: certificate.serial(),
                    issuer: certificate.issuer(),
                    issuer_key: &issuer_key,
                    is_leaf: std::ptr::eq(certificate, leaf),
                };
                self.judge(&subject)?;
            }
            issuer_key = key;
        }
        Ok(())
    }

    fn judge(&self, subject: &Subject<'_>) -> Result<(), CertificateError> {
        let must_be_known = self.purpose == Purpose::Handshake && self.snapshot.crl_policy == CrlPolicy::Strict;
        let serial = || hex(subject.serial);
        match crl::ask(&self.snapshot.crls, subject, time(self.at)) {
            Word::Revoked => Err(CertificateError::Revoked { serial: serial() }),
            Word::Expired if must_be_known => Err(CertificateError::RevocationExpired { serial: serial() }),
            Word::Nothing if must_be_known => Err(CertificateError::RevocationUnknown { serial: serial() }),
            Word::Good | Word::Expired | Word::Nothing => Ok(()),
        }
    }

    /// The library's reason, in words for who has to put it right. Only here the rest of the chain is taken apart.
    fn explain(
        &self,
        error: webpki::Error,
        id: &SpiffeId,
        leaf: &CertificateDer<'_>,
        rest: &[CertificateDer<'_>],
    ) -> CertificateError {
        use webpki::Error;
        match error {
            Error::CertExpired { .. } | Error::InvalidCertValidity => CertificateError::Expired,
            Error::CertNotValidYet { .. } => CertificateError::NotYetValid,
            Error::RequiredEkuNotFoundContext(_) | Error::EmptyEkuExtension => CertificateError::Purpose,
            Error::NameConstraintViolation => CertificateError::NameConstraints,
            Error::PathLenConstraintViolated => CertificateError::PathLength,
            Error::CaUsedAsEndEntity => CertificateError::AuthorityAsLeaf,
            Error::EndEntityUsedAsCa => CertificateError::LeafAsAuthority,
            Error::CertRevoked | Error::CertDistrusted => CertificateError::Distrusted,
            Error::BadDer | Error::BadDerTime | Error::TrailingData(_) => {
                CertificateError::Unparsable("bad encoding".into())
            }
            error => weakness(leaf, rest).unwrap_or_else(|| match error {
                Error::UnknownIssuer if self.is_distrusted(id, rest, leaf) => CertificateError::Distrusted,
                Error::UnknownIssuer => CertificateError::UnknownIssuer {
                    domain: id.trust_domain().to_owned(),
                    issuer: last_issuer(leaf, rest),
                },
                error => CertificateError::Untrusted(error.to_string()),
            }),
        }
    }

    /// Whether the chain names an issuer that would be trusted, were it not distrusted.
    fn is_distrusted(&self, id: &SpiffeId, rest: &[CertificateDer<'_>], leaf: &CertificateDer<'_>) -> bool {
        let issuer = last_issuer(leaf, rest);
        self.snapshot
            .barred(self.home, id.trust_domain())
            .any(|subject| *subject == *issuer)
    }
}

/// What the library is told where a path is not admitted: it tries others, and last gives the gravest reason.
fn code(error: &CertificateError) -> webpki::Error {
    match error {
        CertificateError::Revoked { .. } => webpki::Error::CertRevoked,
        CertificateError::Distrusted => webpki::Error::CertDistrusted,
        _ => webpki::Error::UnknownRevocationStatus,
    }
}

/// The algorithms by which certificates may be signed.
fn algorithms() -> &'static [&'static dyn SignatureVerificationAlgorithm] {
    provider().signature_verification_algorithms.all
}

/// The first key or signature of the chain that is too weak.
pub(in crate::identity) fn weakness(
    leaf: &CertificateDer<'_>,
    rest: &[CertificateDer<'_>],
) -> Option<CertificateError> {
    std::iter::once(leaf).chain(rest).find_map(|der| {
        let certificate = parse(der).ok()?;
        let self_signed = certificate.subject() == certificate.issuer();
        let signature = || signature_fault(&certificate.signature_algorithm).filter(|_| !self_signed);
        let Fault(fault) = key_fault(certificate.public_key()).or_else(signature)?;
        Some(CertificateError::Weak(format!(
            "the certificate {}: {fault}",
            named(&certificate)
        )))
    })
}

fn named(certificate: &x509_parser::certificate::X509Certificate<'_>) -> String {
    let subject = certificate.subject().to_string();
    if subject.is_empty() {
        format!("with the serial {}", hex(certificate.raw_serial()))
    } else {
        format!("{:?}", cut(&subject))
    }
}

pub(super) fn unix(time: SystemTime) -> UnixTime {
    UnixTime::since_unix_epoch(time.duration_since(UNIX_EPOCH).unwrap_or_default())
}

fn time(unix: UnixTime) -> SystemTime {
    UNIX_EPOCH + std::time::Duration::from_secs(unix.as_secs())
}
