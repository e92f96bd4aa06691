//! The TLS parameters of the mesh: version 1.3, HTTP/2 by ALPN, no server name, no resumption.

use std::sync::{Arc, LazyLock};

use rustls::client::Resumption;
use rustls::client::danger::ServerCertVerifier;
use rustls::crypto::{CryptoProvider, aws_lc_rs};
use rustls::server::NoServerSessionStorage;
use rustls::server::danger::ClientCertVerifier;
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::{CipherSuite, ClientConfig, ServerConfig};

/// The application protocol of HBONE.
const ALPN_H2: &[u8] = b"h2";

/// The suites that HBONE's peers speak, most preferred first: the cheaper one for each byte, and no weaker in practice.
const CIPHER_SUITES: [CipherSuite; 2] = [
    CipherSuite::TLS13_AES_128_GCM_SHA256,
    CipherSuite::TLS13_AES_256_GCM_SHA384,
];

static PROVIDER: LazyLock<Arc<CryptoProvider>> = LazyLock::new(|| {
    // The provider's default groups begin with X25519MLKEM768.
    let mut provider = aws_lc_rs::default_provider();
    let suites = &provider.cipher_suites;
    provider.cipher_suites = CIPHER_SUITES
        .iter()
        .filter_map(|id| suites.iter().find(|suite| suite.suite() == *id))
        .copied()
        .collect();
    Arc::new(provider)
});

/// The cryptography of every connection of the mesh.
pub(crate) fn provider() -> &'static Arc<CryptoProvider> {
    &PROVIDER
}

pub(super) fn server_config(
    key: Arc<CertifiedKey>,
    verifier: Arc<dyn ClientCertVerifier>,
) -> Result<ServerConfig, rustls::Error> {
    let mut config = ServerConfig::builder_with_provider(provider().clone())
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .with_client_cert_verifier(verifier)
        .with_cert_resolver(Arc::new(SingleCertAndKey::from(key)));
    config.alpn_protocols = vec![ALPN_H2.to_vec()];
    // A resumed session would outlive the verification of the client's certificate.
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    // For the tunnel's own record layer.
    config.enable_secret_extraction = true;
    Ok(config)
}

pub(super) fn client_config(
    key: Arc<CertifiedKey>,
    verifier: Arc<dyn ServerCertVerifier>,
) -> Result<ClientConfig, rustls::Error> {
    let mut config = ClientConfig::builder_with_provider(provider().clone())
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .dangerous()
        .with_custom_certificate_verifier(verifier)
        .with_client_cert_resolver(Arc::new(SingleCertAndKey::from(key)));
    config.alpn_protocols = vec![ALPN_H2.to_vec()];
    config.enable_sni = false;
    config.resumption = Resumption::disabled();
    config.enable_secret_extraction = true;
    Ok(config)
}

#[cfg(test)]
mod tests {
    use rustls::NamedGroup;

    use super::*;

    #[test]
    fn the_post_quantum_hybrid_is_the_preferred_key_exchange() {
        assert_eq!(provider().kx_groups[0].name(), NamedGroup::X25519MLKEM768);
        assert_eq!(
            provider()
                .cipher_suites
                .iter()
                .map(|suite| suite.suite())
                .collect::<Vec<_>>(),
            CIPHER_SUITES
        );
    }
}
