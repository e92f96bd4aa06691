//! One issued certificate with its key, chain and roots, ready for handshakes.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use rustls::sign::CertifiedKey;
use rustls::{ClientConfig, ServerConfig};
use rustls_pki_types::{CertificateDer, UnixTime};

use super::chain::{CertificateError, Chain, Leaf, last_issuer, validity};
use super::key::PrivateKey;
use super::trust::{Check, PeerChain, Purpose, Role, Root, Trust};
use super::verify::{ClientVerifier, ServerVerifier};
use super::{SpiffeId, TrustDomain, tls};

/// An X.509 SVID: immutable, verified when made, shared as `Arc<Certificate>`. Its key is wiped when the last
/// holder, including the TLS connections made with it, is gone.
pub struct Certificate {
    id: SpiffeId,
    serial: Arc<str>,
    issuer: Arc<str>,
    root: Arc<str>,
    not_before: SystemTime,
    not_after: SystemTime,
    home: TrustDomain,
    key: Arc<CertifiedKey>,
    /// The roots that came with it, until they are learnt.
    roots: Vec<Root>,
    trust: Trust,
    /// Whether the chain was found acceptable, and at which generation of trust: that, doubled, and one if it was not.
    verdict: AtomicU64,
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
        Self::of(id, Chain::parse(chain_pem)?, key, now)
    }

    /// The same in DER: leaf and intermediates, and apart from them the roots.
    pub(super) fn of_der(
        id: &SpiffeId,
        presented: Vec<CertificateDer<'static>>,
        roots: &[CertificateDer<'_>],
        key: PrivateKey,
    ) -> Result<Self, CertificateError> {
        Self::of(id, Chain::of(presented, roots)?, key, SystemTime::now())
    }

    fn of(id: &SpiffeId, chain: Chain, key: PrivateKey, now: SystemTime) -> Result<Self, CertificateError> {
        let Chain { presented, roots } = chain;
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
        let home = TrustDomain::parse(id.trust_domain()).map_err(|reason| CertificateError::BadIdentity {
            uri: id.to_string(),
            reason,
        })?;
        let trust = Trust::of(&roots);
        acceptable(&trust, &home, &presented, Purpose::Handshake, now)?;
        let (not_before, not_after) = validity(&presented)?;
        let root = presented.split_first().map(|(leaf, rest)| last_issuer(leaf, rest));
        let key = Arc::new(CertifiedKey::new(presented, key.signing_key()?));
        let (server, client) = configurations(&trust, &home, id, &key)?;
        Ok(Self {
            id: id.clone(),
            serial: leaf.serial.into(),
            issuer: leaf.issuer.into(),
            root: root.unwrap_or_default().into(),
            not_before,
            not_after,
            home,
            key,
            roots,
            verdict: AtomicU64::new(2 * trust.generation()),
            trust,
            server,
            client,
        })
    }

    /// The same, with peers verified against `trust`, which first learns the roots that came with the certificate.
    /// Refused if the chain rests on what is distrusted or revoked there.
    pub fn trusting(mut self, trust: &Trust) -> Result<Self, CertificateError> {
        let roots = std::mem::take(&mut self.roots);
        if !roots.is_empty() {
            trust.learn(
                &roots,
                self.not_after.duration_since(self.not_before).unwrap_or_default(),
            );
        }
        let generation = trust.generation();
        acceptable(trust, &self.home, &self.key.cert, Purpose::Live, self.not_before)?;
        (self.server, self.client) = configurations(trust, &self.home, &self.id, &self.key)?;
        self.verdict = AtomicU64::new(2 * generation);
        self.trust = trust.clone();
        Ok(self)
    }

    /// Whose certificate this is.
    pub fn id(&self) -> &SpiffeId {
        &self.id
    }

    /// The name of who signed the leaf.
    pub fn issuer(&self) -> &Arc<str> {
        &self.issuer
    }

    /// The name of the root that the chain leads to.
    pub fn root(&self) -> &Arc<str> {
        &self.root
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

    /// Whether the whole chain is valid at `now`, and nothing has become known against it.
    pub fn is_valid_at(&self, now: SystemTime) -> bool {
        self.not_before <= now && now < self.not_after && self.is_trusted()
    }

    /// Whether the chain rests on nothing that is distrusted or revoked by now. Cheap, unless there was a change.
    pub fn is_trusted(&self) -> bool {
        let generation = self.trust.generation();
        let verdict = self.verdict.load(Ordering::Relaxed);
        if verdict / 2 == generation {
            return verdict.is_multiple_of(2);
        }
        let fault = acceptable(&self.trust, &self.home, &self.key.cert, Purpose::Live, self.not_before).err();
        if let Some(fault) = &fault {
            tracing::warn!(identity = %self.id, serial = %self.serial, "our own certificate is of no more use: {fault}");
        }
        self.verdict
            .store(2 * generation + u64::from(fault.is_some()), Ordering::Relaxed);
        fault.is_none()
    }

    /// What peers are verified against.
    pub fn trust(&self) -> &Trust {
        &self.trust
    }

    /// Remembers the chain that a peer has proven in a handshake with this certificate. The handshake began when trust
    /// was at `generation`.
    pub fn remember(
        &self,
        chain: &[CertificateDer<'_>],
        role: Role,
        generation: u64,
    ) -> Result<Arc<PeerChain>, CertificateError> {
        self.trust.remember(chain, &self.home, role, generation)
    }

    /// How to answer handshakes as this identity: TLS 1.3, HTTP/2, and a client certificate that chains to a root
    /// that is trusted for its identity's trust domain.
    pub fn server_config(&self) -> Arc<ServerConfig> {
        self.server.clone()
    }

    /// How to begin handshakes as this identity with a server that must be `expected`. Cheap: the costly
    /// parts are shared with every other configuration of this certificate.
    pub fn client_config(&self, expected: &SpiffeId) -> Arc<ClientConfig> {
        let mut config = self.client.clone();
        let verifier = ServerVerifier::new(self.trust.clone(), self.home.clone(), expected.clone());
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

/// Whether a chain of our own may be used by both ends of a connection.
fn acceptable(
    trust: &Trust,
    home: &TrustDomain,
    chain: &[CertificateDer<'_>],
    purpose: Purpose,
    at: SystemTime,
) -> Result<(), CertificateError> {
    let (leaf, rest) = chain.split_first().ok_or(CertificateError::Empty)?;
    for role in [Role::Server, Role::Client] {
        let check = Check {
            snapshot: &trust.snapshot(),
            home,
            role,
            purpose,
            at: UnixTime::since_unix_epoch(at.duration_since(UNIX_EPOCH).unwrap_or_default()),
        };
        check.verify(leaf, rest)?;
    }
    Ok(())
}

fn configurations(
    trust: &Trust,
    home: &TrustDomain,
    id: &SpiffeId,
    key: &Arc<CertifiedKey>,
) -> Result<(Arc<ServerConfig>, ClientConfig), CertificateError> {
    let failed = |error: rustls::Error| CertificateError::Untrusted(error.to_string());
    let client_verifier = Arc::new(ClientVerifier::new(trust.clone(), home.clone()));
    let server = tls::server_config(Arc::clone(key), client_verifier).map_err(failed)?;
    let server_verifier = Arc::new(ServerVerifier::new(trust.clone(), home.clone(), id.clone()));
    let client = tls::client_config(Arc::clone(key), server_verifier).map_err(failed)?;
    Ok((Arc::new(server), client))
}

#[cfg(test)]
impl Certificate {
    /// Leaf and intermediates.
    pub(super) fn presented(&self) -> &[CertificateDer<'static>] {
        &self.key.cert
    }

    /// The same, verifying clients against one trust and servers against another, whatever they think of this one.
    pub(super) fn for_test(&self, of_clients: &Trust, of_servers: &Trust) -> Self {
        let (server, _) = configurations(of_clients, &self.home, &self.id, &self.key).unwrap();
        let (_, client) = configurations(of_servers, &self.home, &self.id, &self.key).unwrap();
        Self {
            id: self.id.clone(),
            serial: self.serial.clone(),
            issuer: self.issuer.clone(),
            root: self.root.clone(),
            not_before: self.not_before,
            not_after: self.not_after,
            home: self.home.clone(),
            key: self.key.clone(),
            roots: Vec::new(),
            trust: of_servers.clone(),
            verdict: AtomicU64::new(0),
            server,
            client,
        }
    }

    /// The same, trusting these authorities.
    pub(super) fn clone_for_test(&self, authorities: &[&super::testing::TestCa]) -> Self {
        let trust = Trust::of(&authorities.iter().map(|ca| ca.root()).collect::<Vec<_>>());
        self.for_test(&trust, &trust)
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
            Err(CertificateError::UnknownIssuer { .. })
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
