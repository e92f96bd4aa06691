//! Verification of the peer in a handshake: its chain leads to a root that is trusted for its identity's trust domain.

use std::fmt;
use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{WebPkiSupportedAlgorithms, verify_tls13_signature};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{
    AlertDescription, CertificateError as TlsReason, DigitallySignedStruct, DistinguishedName, Error, InvalidMessage,
    OtherError, SignatureScheme,
};
use rustls_pki_types::{CertificateDer, ServerName, UnixTime};

use super::chain::CertificateError;
use super::tls::provider;
use super::trust::{Check, Purpose, Role, Trust, weakness};
use super::{SpiffeId, TrustDomain};

/// What both roles have in common.
struct Verifier {
    trust: Trust,
    /// Our own trust domain.
    home: TrustDomain,
    algorithms: WebPkiSupportedAlgorithms,
}

impl Verifier {
    fn new(trust: Trust, home: TrustDomain) -> Self {
        Self {
            trust,
            home,
            algorithms: provider().signature_verification_algorithms,
        }
    }

    fn verify(
        &self,
        leaf: &CertificateDer<'_>,
        rest: &[CertificateDer<'_>],
        role: Role,
        at: UnixTime,
    ) -> Result<SpiffeId, Error> {
        let check = Check {
            snapshot: &self.trust.snapshot(),
            home: &self.home,
            role,
            purpose: Purpose::Handshake,
            at,
        };
        check.verify(leaf, rest).map_err(refused)
    }

    fn verify_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, certificate, signature, &self.algorithms)
            .map_err(|error| weakness(certificate, &[]).map_or(error, refused))
    }
}

fn no_tls12() -> Error {
    Error::General("TLS 1.2 is not spoken here".into())
}

/// A server's certificate must be the expected identity's. Addresses and host names play no part.
pub(super) struct ServerVerifier {
    verifier: Verifier,
    expected: SpiffeId,
}

impl ServerVerifier {
    pub(super) fn new(trust: Trust, home: TrustDomain, expected: SpiffeId) -> Self {
        Self {
            verifier: Verifier::new(trust, home),
            expected,
        }
    }

    fn is_expected(&self, found: &SpiffeId) -> bool {
        let Verifier { trust, home, .. } = &self.verifier;
        *found == self.expected || trust.canonical(home, found) == trust.canonical(home, &self.expected)
    }
}

impl ServerCertVerifier for ServerVerifier {
    fn verify_server_cert(
        &self,
        leaf: &CertificateDer<'_>,
        rest: &[CertificateDer<'_>],
        _name: &ServerName<'_>,
        _ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let found = self.verifier.verify(leaf, rest, Role::Server, now)?;
        if !self.is_expected(&found) {
            return Err(refused(CertificateError::WrongIdentity {
                expected: self.expected.clone(),
                found,
            }));
        }
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(no_tls12())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.verifier.verify_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.verifier.algorithms.supported_schemes()
    }
}

impl fmt::Debug for ServerVerifier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ServerVerifier({})", self.expected)
    }
}

/// A client may be whoever it proves to be, of a trust domain that is ours or federated with it.
pub(super) struct ClientVerifier(Verifier);

impl ClientVerifier {
    pub(super) fn new(trust: Trust, home: TrustDomain) -> Self {
        Self(Verifier::new(trust, home))
    }
}

impl ClientCertVerifier for ClientVerifier {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        // A peer of the mesh has one certificate; the names of our roots would only cost bytes.
        &[]
    }

    fn verify_client_cert(
        &self,
        leaf: &CertificateDer<'_>,
        rest: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        self.0.verify(leaf, rest, Role::Client, now)?;
        Ok(ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(no_tls12())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.0.verify_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.algorithms.supported_schemes()
    }
}

impl fmt::Debug for ClientVerifier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ClientVerifier({})", self.0.home)
    }
}

/// Carries our reason through the TLS library. Where TLS has an alert for it, the peer is told by that one.
fn refused(error: CertificateError) -> Error {
    Error::InvalidCertificate(match error {
        CertificateError::Expired => TlsReason::Expired,
        CertificateError::NotYetValid => TlsReason::NotValidYet,
        CertificateError::Purpose => TlsReason::InvalidPurpose,
        other => TlsReason::Other(OtherError(Arc::new(other))),
    })
}

/// What a failed handshake means, in words for who has to put it right.
pub(crate) fn explain(error: &Error) -> String {
    let ours = |error: &CertificateError| format!("the peer's certificate is refused: {error}");
    match error {
        Error::InvalidCertificate(reason) => match reason {
            TlsReason::Expired | TlsReason::ExpiredContext { .. } => ours(&CertificateError::Expired),
            TlsReason::NotValidYet | TlsReason::NotValidYetContext { .. } => ours(&CertificateError::NotYetValid),
            TlsReason::InvalidPurpose | TlsReason::InvalidPurposeContext { .. } => ours(&CertificateError::Purpose),
            TlsReason::Other(OtherError(reason)) => format!("the peer's certificate is refused: {reason}"),
            TlsReason::BadSignature => "the peer does not have the private key of the certificate that it shows".into(),
            reason => format!("the peer's certificate is refused: {reason}"),
        },
        Error::InvalidMessage(
            InvalidMessage::HandshakePayloadTooLarge | InvalidMessage::CertificatePayloadTooLarge,
        ) => "the peer's certificate is refused: its chain is larger than 64 KiB".into(),
        Error::NoCertificatesPresented => "the peer shows no certificate".into(),
        Error::AlertReceived(alert) => match told(*alert) {
            Some(reason) => format!("the peer refuses our certificate: {reason}"),
            None => format!("the peer gives up: {alert:?}"),
        },
        other => other.to_string(),
    }
}

/// What a peer means by an alert, where it is about our certificate.
fn told(alert: AlertDescription) -> Option<&'static str> {
    Some(match alert {
        AlertDescription::CertificateExpired => "it has expired, or is not valid yet, by the peer's clock",
        AlertDescription::CertificateRevoked => "it is revoked",
        AlertDescription::UnknownCA => "its root is not one that the peer trusts",
        AlertDescription::BadCertificate | AlertDescription::UnsupportedCertificate => "it is not of a kind it takes",
        AlertDescription::CertificateUnknown | AlertDescription::AccessDenied => "the peer's log tells why",
        AlertDescription::CertificateRequired => "it has seen none",
        AlertDescription::DecryptError => "its signature does not verify",
        _ => return None,
    })
}
