//! Certificates of a SPIRE agent on this node, by its Delegated Identity API.

mod bundles;
mod proto;
mod socket;

use std::sync::Arc;
use std::time::Duration;

use rustls_pki_types::CertificateDer;
use thiserror::Error;
use tokio::task::AbortHandle;
use tonic::Streaming;
use zeroize::Zeroize;

use self::bundles::Bundles;
use self::proto::{Selector, SubscribeToX509sviDsRequest, SubscribeToX509sviDsResponse, X509svidWithKey};
use self::socket::AdminSocket;
use super::chain::MAX_CHAIN_BYTES;
use super::{BoxFuture, Certificate, IssueError, Issued, Issuer, PrivateKey, SpiffeId, Trust, TrustDomain};

/// Who has attested what is asked by.
const ATTESTOR: &str = "k8s";
/// How many of the identities that the agent has instead of the one asked for are named.
const MAX_NAMED: usize = 4;

/// How a SPIRE agent is reached.
#[derive(Debug, Clone)]
pub struct SpireSettings {
    /// The agent's admin socket (`admin_socket_path`), an absolute path.
    pub socket: String,
    /// The mesh's trust domain, which is the agent's too.
    pub home: TrustDomain,
    /// How long a call may take. The agent answers at once but where the SPIRE server has yet to sign.
    pub deadline: Duration,
}

/// What is wrong with the settings.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum SpireSettingsError {
    /// The socket is not an absolute path.
    #[error("the admin socket of the SPIRE agent, {0:?}, is not an absolute path")]
    Socket(String),
}

impl SpireSettings {
    /// The usual deadline.
    pub const DEADLINE: Duration = Duration::from_secs(10);
}

/// Takes certificates, with the keys that the agent has made for them, by the selectors `k8s:ns:NAMESPACE` and
/// `k8s:sa:SERVICE-ACCOUNT`. The agent tells of changes itself. Its bundles are followed for as long as this is there:
/// that of our own trust domain becomes roots of ours, those of others are federated.
pub struct SpireAgent {
    socket: Arc<AdminSocket>,
    bundles: Bundles,
    following: AbortHandle,
}

impl SpireAgent {
    /// Begins to follow the agent's bundles, which `trust` takes in, on the current runtime.
    pub fn start(settings: &SpireSettings, trust: Trust) -> Result<Self, SpireSettingsError> {
        let socket = Arc::new(AdminSocket::new(&settings.socket, settings.deadline)?);
        let bundles = Bundles::new(Arc::clone(&socket), settings.home.clone(), trust);
        let following = tokio::spawn(bundles.clone().follow()).abort_handle();
        Ok(Self {
            socket,
            bundles,
            following,
        })
    }

    async fn subscribe(&self, id: &SpiffeId) -> Result<Issued, IssueError> {
        let roots = self.bundles.home().await?;
        let mut updates = self
            .socket
            .client()
            .max_decoding_message_size(MAX_CHAIN_BYTES)
            .subscribe_to_x509svi_ds(by_selectors(id))
            .await
            .map_err(|status| self.socket.failure(&status))?
            .into_inner();
        let update = updates.message().await.map_err(|status| self.socket.failure(&status))?;
        let mut update = Update(update.ok_or_else(|| self.socket.ended())?);
        let (chain, key) = update.take(id).ok_or_else(|| IssueError::NoEntry {
            ca: self.describe(),
            id: id.clone(),
            reason: update.describe(),
        })?;
        let leaf = chain.first().cloned();
        let unusable = |reason| IssueError::Answer {
            ca: self.describe(),
            reason,
        };
        let key = key.map_err(|error| unusable(error.into()))?;
        let certificate = Certificate::of_der(id, chain, &roots, key).map_err(unusable)?;
        Ok(Issued {
            certificate,
            changed: Box::pin(changed(updates, id.clone(), leaf)),
        })
    }
}

impl Issuer for SpireAgent {
    fn issue<'a>(&'a self, id: &'a SpiffeId) -> BoxFuture<'a, Result<Issued, IssueError>> {
        Box::pin(self.socket.in_time(self.subscribe(id)))
    }

    fn describe(&self) -> String {
        self.socket.to_string()
    }
}

impl Drop for SpireAgent {
    fn drop(&mut self) {
        self.following.abort();
    }
}

fn by_selectors(id: &SpiffeId) -> SubscribeToX509sviDsRequest {
    let selector = |value: String| Selector {
        r#type: ATTESTOR.to_owned(),
        value,
    };
    SubscribeToX509sviDsRequest {
        selectors: vec![
            selector(format!("ns:{}", id.namespace())),
            selector(format!("sa:{}", id.service_account())),
        ],
    }
}

/// Waits until the agent no longer has this very certificate for the identity, or the call has ended: whoever asks again
/// learns what there is instead, or why there is nothing.
async fn changed(
    mut updates: Streaming<SubscribeToX509sviDsResponse>,
    id: SpiffeId,
    leaf: Option<CertificateDer<'static>>,
) {
    // The agent tells of bundles by this way too: the certificate is then the same.
    while let Ok(Some(update)) = updates.message().await {
        if !Update(update).has(&id, leaf.as_deref().unwrap_or_default()) {
            return;
        }
    }
}

/// What the agent has for the selectors. Its keys are wiped when it is dropped; the buffer that they came in is the
/// transport's, and is not.
struct Update(SubscribeToX509sviDsResponse);

impl Update {
    /// Chain and key of exactly this identity. An entry may have fewer selectors than we ask by, so that others match, too.
    fn take(&mut self, id: &SpiffeId) -> Option<(Vec<CertificateDer<'static>>, Result<PrivateKey, super::KeyError>)> {
        let svid = self.0.x509_svids.iter_mut().find(|svid| name(svid) == id.as_str())?;
        let key = PrivateKey::from_pkcs8(&svid.x509_svid_key);
        let chain = svid.x509_svid.take()?.cert_chain;
        Some((chain.into_iter().map(CertificateDer::from).collect(), key))
    }

    fn has(&self, id: &SpiffeId, leaf: &[u8]) -> bool {
        self.0.x509_svids.iter().any(|svid| {
            let chain = svid.x509_svid.as_ref().and_then(|svid| svid.cert_chain.first());
            name(svid) == id.as_str() && chain.is_some_and(|first| first == leaf)
        })
    }

    fn describe(&self) -> String {
        let named: Vec<String> = self.0.x509_svids.iter().take(MAX_NAMED).map(name).collect();
        if named.is_empty() {
            return "no entry matches its selectors".to_owned();
        }
        format!(
            "of {} entries that match its selectors none is of it, but of {}",
            self.0.x509_svids.len(),
            named.join(", ")
        )
    }
}

impl Drop for Update {
    fn drop(&mut self) {
        for svid in &mut self.0.x509_svids {
            svid.x509_svid_key.zeroize();
        }
    }
}

fn name(svid: &X509svidWithKey) -> String {
    let id = svid.x509_svid.as_ref().and_then(|svid| svid.id.as_ref());
    id.map_or_else(
        || "a certificate without a SPIFFE ID".to_owned(),
        |id| format!("spiffe://{}{}", id.trust_domain, id.path),
    )
}

#[cfg(test)]
mod tests;
