//! Verification of the peer in a handshake: its chain leads to our roots and its identity is acceptable.

use std::fmt;
use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::verify_server_cert_signed_by_trust_anchor;
use rustls::crypto::{WebPkiSupportedAlgorithms, verify_tls13_signature};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{ParsedCertificate, WebPkiClientVerifier};
use rustls::{
    CertificateError as TlsReason, DigitallySignedStruct, DistinguishedName, Error, OtherError, RootCertStore,
    SignatureScheme,
};
use rustls_pki_types::{CertificateDer, ServerName, UnixTime};

use super::chain::{CertificateError, check_bounds, peer_identity};
use super::tls::provider;
use super::{SpiffeId, TrustDomain};

/// A server's certificate must chain to our roots and be exactly the expected identity's.
/// Addresses and host names play no part.
pub(super) struct ServerVerifier {
    roots: Arc<RootCertStore>,
    algorithms: WebPkiSupportedAlgorithms,
    expected: SpiffeId,
}

impl ServerVerifier {
    pub(super) fn new(roots: Arc<RootCertStore>, expected: SpiffeId) -> Self {
        Self {
            roots,
            algorithms: provider().signature_verification_algorithms,
            expected,
        }
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
        check_bounds(leaf, rest).map_err(refused)?;
        let parsed = ParsedCertificate::try_from(leaf)?;
        verify_server_cert_signed_by_trust_anchor(&parsed, &self.roots, rest, now, self.algorithms.all)?;
        let found = peer_identity(std::slice::from_ref(leaf)).map_err(refused)?;
        if found != self.expected {
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
        Err(Error::General("TLS 1.2 is not spoken here".into()))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, certificate, signature, &self.algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }
}

impl fmt::Debug for ServerVerifier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ServerVerifier({})", self.expected)
    }
}

/// A client must present a certificate that chains to our roots and whose one identity is of our trust domain.
#[derive(Debug)]
pub(super) struct ClientVerifier {
    chain: Arc<dyn ClientCertVerifier>,
    trust_domain: TrustDomain,
}

impl ClientVerifier {
    pub(super) fn new(roots: Arc<RootCertStore>, trust_domain: TrustDomain) -> Result<Self, CertificateError> {
        let chain = WebPkiClientVerifier::builder_with_provider(roots, provider().clone())
            // A peer of the mesh has one certificate; the names of our roots would only cost bytes.
            .clear_root_hint_subjects()
            .build()
            .map_err(|e| CertificateError::Untrusted(e.to_string()))?;
        Ok(Self { chain, trust_domain })
    }
}

impl ClientCertVerifier for ClientVerifier {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.chain.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        leaf: &CertificateDer<'_>,
        rest: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        check_bounds(leaf, rest).map_err(refused)?;
        let verified = self.chain.verify_client_cert(leaf, rest, now)?;
        let found = peer_identity(std::slice::from_ref(leaf)).map_err(refused)?;
        if found.trust_domain() != self.trust_domain.as_str() {
            return Err(refused(CertificateError::WrongTrustDomain {
                expected: self.trust_domain.clone(),
                found,
            }));
        }
        Ok(verified)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.chain.verify_tls12_signature(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.chain.verify_tls13_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.chain.supported_verify_schemes()
    }
}

/// Carries our reason through the TLS library into its error and the peer's alert.
fn refused(error: CertificateError) -> Error {
    Error::InvalidCertificate(TlsReason::Other(OtherError(Arc::new(error))))
}
