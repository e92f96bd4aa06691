//! One issued certificate with its key, chain and roots, ready for handshakes.

use std::fmt;
use std::sync::Arc;
use std::time::SystemTime;

use rustls::sign::CertifiedKey;
use rustls::{ClientConfig, RootCertStore, ServerConfig};

use super::chain::{CertificateError, Chain, Leaf, validity, verify};
use super::key::PrivateKey;
use super::verify::{ClientVerifier, ServerVerifier};
use super::{SpiffeId, TrustDomain, tls};

/// An X.509 SVID: immutable, verified when made, shared as `Arc<Certificate>`. Its key is wiped when the last
/// holder, including the TLS connections made with it, is gone.
pub struct Certificate {
    id: SpiffeId,
    serial: Arc<str>,
    not_before: SystemTime,
    not_after: SystemTime,
    roots: Arc<RootCertStore>,
    server: Arc<ServerConfig>,
    client: ClientConfig,
}

impl Certificate {
    /// Takes a CA's answer to a request for `id` with `key`. The leaf must be for that identity and key, and
    /// the chain must lead to one of the answer's own roots and be valid now.
    pub fn new(id: &SpiffeId, chain_pem: &[String], key: PrivateKey) -> Result<Self, CertificateError> {
        Self::new_at(id, chain_pem, key, SystemTime::now())
    }

    pub(crate) fn new_at(
        id: &SpiffeId,
        chain_pem: &[String],
        key: PrivateKey,
        now: SystemTime,
    ) -> Result<Self, CertificateError> {
        let Chain { presented, roots } = Chain::parse(chain_pem)?;
        let leaf = Leaf::parse(presented.first().ok_or(CertificateError::Empty)?)?;
        if leaf.id != *id {
            return Err(CertificateError::WrongIdentity {
                expected: id.clone(),
                found: leaf.id,
            });
        }
        if leaf.public_key != key.public_key() {
            return Err(CertificateError::WrongKey);
        }
        verify(&presented, &roots, now)?;
        let (not_before, not_after) = validity(&presented)?;
        let trust_domain = TrustDomain::parse(id.trust_domain()).map_err(|reason| CertificateError::BadIdentity {
            uri: id.to_string(),
            reason,
        })?;

        let certified = Arc::new(CertifiedKey::new(presented, key.signing_key()?));
        let tls_failed = |e: rustls::Error| CertificateError::Untrusted(e.to_string());
        let client_verifier = Arc::new(ClientVerifier::new(roots.clone(), trust_domain)?);
        let server = tls::server_config(certified.clone(), client_verifier).map_err(tls_failed)?;
        let self_verifier = Arc::new(ServerVerifier::new(roots.clone(), id.clone()));
        let client = tls::client_config(certified, self_verifier).map_err(tls_failed)?;
        Ok(Self {
            id: id.clone(),
            serial: leaf.serial.into(),
            not_before,
            not_after,
            roots,
            server: Arc::new(server),
            client,
        })
    }

    /// Whose certificate this is.
    pub fn id(&self) -> &SpiffeId {
        &self.id
    }

    /// The leaf's serial number, lower-case hexadecimal.
    pub fn serial(&self) -> &Arc<str> {
        &self.serial
    }

    /// When the whole chain has become valid.
    pub fn not_before(&self) -> SystemTime {
        self.not_before
    }

    /// When the first certificate of the chain expires.
    pub fn not_after(&self) -> SystemTime {
        self.not_after
    }

    /// Whether the whole chain is valid at `now`.
    pub fn is_valid_at(&self, now: SystemTime) -> bool {
        self.not_before <= now && now < self.not_after
    }

    /// How to answer handshakes as this identity: TLS 1.3, HTTP/2, and a client certificate that chains to this
    /// certificate's roots with one identity of the same trust domain.
    pub fn server_config(&self) -> Arc<ServerConfig> {
        self.server.clone()
    }

    /// How to begin handshakes as this identity with a server that must be `expected`. Cheap: the costly
    /// parts are shared with every other configuration of this certificate.
    pub fn client_config(&self, expected: &SpiffeId) -> Arc<ClientConfig> {
        let mut config = self.client.clone();
        let verifier = ServerVerifier::new(self.roots.clone(), expected.clone());
        config.dangerous().set_certificate_verifier(Arc::new(verifier));
        Arc::new(config)
    }
}

impl fmt::Debug for Certificate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Certificate")
            .field("id", &self.id)
            .field("serial", &self.serial)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::identity::testing::{LeafOptions, TestCa, id};

    #[test]
    fn a_good_answer_gives_serial_and_validity() {
        let ca = TestCa::new();
        let cart = id("shop", "cart");
        let certificate = ca.certificate(&cart);
        let now = SystemTime::now();
        assert_eq!(certificate.id(), &cart);
        assert!(!certificate.serial().is_empty() && certificate.serial().bytes().all(|b| b.is_ascii_hexdigit()));
        assert!(certificate.is_valid_at(now));
        assert!(!certificate.is_valid_at(certificate.not_after()));
        assert!(!certificate.is_valid_at(certificate.not_before() - Duration::from_secs(1)));
        assert!(!format!("{certificate:?}").to_lowercase().contains("key"));
    }

    #[test]
    fn an_answer_for_another_identity_or_key_is_refused() {
        let ca = TestCa::new();
        let (cart, other) = (id("shop", "cart"), id("shop", "till"));
        let (answer, key) = ca.issue(&other);
        assert_eq!(
            Certificate::new(&cart, &answer, key).unwrap_err(),
            CertificateError::WrongIdentity {
                expected: cart.clone(),
                found: other
            }
        );
        let (answer, _) = ca.issue(&cart);
        let another = PrivateKey::generate().unwrap();
        assert_eq!(
            Certificate::new(&cart, &answer, another).unwrap_err(),
            CertificateError::WrongKey
        );
    }

    #[test]
    fn a_chain_that_does_not_lead_to_its_own_root_is_refused() {
        let cart = id("shop", "cart");
        let (mut answer, key) = TestCa::new().issue(&cart);
        answer[2] = TestCa::new().root_pem();
        assert!(matches!(
            Certificate::new(&cart, &answer, key),
            Err(CertificateError::Untrusted(_))
        ));
    }

    #[test]
    fn expired_early_and_wrongly_purposed_certificates_are_refused() {
        let ca = TestCa::new();
        let cart = id("shop", "cart");
        let now = SystemTime::now();
        let hour = Duration::from_secs(3600);
        let refusal = |options: LeafOptions| {
            let (answer, key) = ca.issue_with(&cart, options);
            Certificate::new(&cart, &answer, key).unwrap_err()
        };
        let at = |from, to| LeafOptions {
            not_before: from,
            not_after: to,
            ..LeafOptions::default()
        };
        assert_eq!(refusal(at(now - 2 * hour, now - hour)), CertificateError::Expired);
        assert_eq!(refusal(at(now + hour, now + 2 * hour)), CertificateError::NotYetValid);
        let server_only = LeafOptions {
            client_auth: false,
            ..LeafOptions::default()
        };
        assert_eq!(refusal(server_only), CertificateError::Purpose);
        let client_only = LeafOptions {
            server_auth: false,
            ..LeafOptions::default()
        };
        assert_eq!(refusal(client_only), CertificateError::Purpose);
    }
}
