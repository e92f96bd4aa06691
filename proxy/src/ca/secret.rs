//! The authority's key in Secrets of the cluster: its own root, made once, or an intermediate that users provide.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use kube::api::{ObjectMeta, PostParams};
use kube::{Api, Client};
use zeroize::{Zeroize, Zeroizing};

use super::authority::{Authority, AuthorityError};
use super::cluster::{ClusterError, api_error, is_conflict};
use super::provided::{self, Provided};
use crate::identity::TrustDomain;

/// The keys of our own Secret.
const ROOT_KEY: &str = "root-key.pem";
const ROOT_CERTIFICATE: &str = "root-cert.pem";
/// The names that cert-manager gives to what Istio's users call `ca-cert.pem` and so on. Its certificate is followed by
/// those above.
const TLS_CERTIFICATE: &str = "tls.crt";
const TLS_KEY: &str = "tls.key";
const TLS_ROOT: &str = "ca.crt";
/// How often it is looked whether a Secret is still what it was.
const LOOK_EVERY: Duration = Duration::from_secs(30);

/// A Secret of one namespace.
#[derive(Clone)]
pub(super) struct SecretPlace {
    api: Api<Secret>,
    name: String,
    /// For people: `the Secret namespace/name`.
    place: String,
}

impl SecretPlace {
    pub(super) fn new(client: Client, namespace: &str, name: &str) -> Self {
        Self {
            api: Api::namespaced(client, namespace),
            name: name.into(),
            place: format!("the Secret {namespace}/{name}"),
        }
    }

    async fn read(&self) -> Result<Option<Content>, ClusterError> {
        let found = self.api.get_opt(&self.name).await;
        Ok(found.map_err(api_error("read", &self.place))?.map(Content))
    }

    /// The authority of the root in the Secret. Where there is no Secret it is made, with a new root; of several
    /// processes that do so at once one wins, and all have its root.
    pub(super) async fn open_root(&self, trust_domain: &TrustDomain) -> Result<Authority, ClusterError> {
        loop {
            let content = match self.read().await? {
                Some(content) => content,
                None => match self.create(&Authority::new_root(trust_domain)?).await? {
                    Some(created) => created,
                    None => continue,
                },
            };
            return self.root_of(&content, trust_domain);
        }
    }

    fn root_of(&self, content: &Content, trust_domain: &TrustDomain) -> Result<Authority, ClusterError> {
        let key = self.needed(content, ROOT_KEY)?;
        let certificate = self.needed(content, ROOT_CERTIFICATE)?;
        Ok(Authority::from_root(&self.place, key, certificate, trust_domain)?)
    }

    fn needed<'a>(&self, content: &'a Content, key: &str) -> Result<&'a [u8], AuthorityError> {
        content.get(key).ok_or_else(|| self.unsound(format!("it has no {key}")))
    }

    fn unsound(&self, reason: String) -> AuthorityError {
        AuthorityError::Unsound {
            place: self.place.clone(),
            reason,
        }
    }

    /// Makes the Secret of a key and certificate, PEM; none if somebody else has just made one.
    async fn create(&self, root: &[u8]) -> Result<Option<Content>, ClusterError> {
        let Some((key, certificate)) = split(root) else {
            return Err(self.unsound("a root was made without a certificate".into()).into());
        };
        let data = [(ROOT_KEY, key), (ROOT_CERTIFICATE, certificate)];
        // Dropped as content, so that the key in it is wiped.
        let secret = Content(Secret {
            metadata: ObjectMeta {
                name: Some(self.name.clone()),
                ..ObjectMeta::default()
            },
            data: Some(data.map(|(name, pem)| (name.into(), ByteString(pem.to_vec()))).into()),
            immutable: Some(true),
            ..Secret::default()
        });
        match self.api.create(&PostParams::default(), &secret.0).await {
            Ok(created) => {
                tracing::info!("made a new root and put it into {}", self.place);
                Ok(Some(Content(created)))
            }
            Err(error) if is_conflict(&error) => Ok(None),
            Err(error) => Err(api_error("create", &self.place)(error)),
        }
    }

    /// The authority of the intermediate in the Secret.
    pub(super) async fn open_provided(&self, trust_domain: &TrustDomain) -> Result<Authority, ClusterError> {
        let content = self.read().await?.ok_or_else(|| self.missing())?;
        Ok(Authority::from_provided(
            &self.place,
            self.provided(&content)?,
            trust_domain,
        )?)
    }

    fn missing(&self) -> ClusterError {
        ClusterError::Missing(self.place.clone())
    }

    fn provided(&self, content: &Content) -> Result<Provided, AuthorityError> {
        let (certificate, key, root, chain) = if content.get(provided::CERTIFICATE).is_some() {
            (
                provided::CERTIFICATE,
                provided::KEY,
                provided::ROOTS,
                content.get(provided::CHAIN),
            )
        } else {
            (TLS_CERTIFICATE, TLS_KEY, TLS_ROOT, content.get(TLS_CERTIFICATE))
        };
        let [certificate, key, roots] = [certificate, key, root].map(|name| self.needed(content, name));
        Provided::parse(certificate?, key?, roots?, chain, SystemTime::now()).map_err(|reason| self.unsound(reason))
    }

    /// Sees to it that the Secret keeps the root that is in use. Ends, with the reason, if it has another.
    pub(super) async fn keep_root(self, authority: Arc<Authority>) -> ClusterError {
        loop {
            tokio::time::sleep(LOOK_EVERY).await;
            match self.read().await {
                Ok(Some(content)) if content.get(ROOT_CERTIFICATE) == Some(authority.root_pem().as_bytes()) => {}
                Ok(Some(_)) => {
                    let reason = "its root is no longer the one in use; the CA starts anew with what is there now";
                    return self.unsound(reason.into()).into();
                }
                Ok(None) => self.restore(&authority).await,
                Err(error) => tracing::warn!(%error, "cannot look after the root's key"),
            }
        }
    }

    async fn restore(&self, authority: &Authority) {
        let Some(key) = authority.root_key() else { return };
        let root = Zeroizing::new([key.as_bytes(), authority.root_pem().as_bytes()].concat());
        match self.create(&root).await {
            Ok(_) => tracing::warn!("{} was gone; it has the root in use again", self.place),
            Err(error) => tracing::error!(%error, "the root's key is gone from the cluster"),
        }
    }

    /// Takes newer intermediates from the Secret as they come, below the same root.
    pub(super) async fn keep_provided(self, authority: Arc<Authority>) -> ClusterError {
        let mut seen = None;
        loop {
            let taken = match self.read().await {
                Ok(Some(content)) if content.version() == seen => Ok(false),
                Ok(Some(content)) => {
                    let first = seen.is_none();
                    seen = content.version();
                    self.provided(&content)
                        .and_then(|provided| authority.replace_provided(&self.place, provided))
                        .map(|()| !first)
                        .map_err(ClusterError::from)
                }
                Ok(None) => Err(self.missing()),
                Err(error) => Err(error),
            };
            match taken {
                Ok(true) => tracing::info!("took a newer intermediate from {}", self.place),
                Ok(false) => {}
                Err(error) => tracing::error!(%error, "the intermediate that was loaded before stays in use"),
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }
}

/// A Secret whose content is wiped when dropped.
struct Content(Secret);

impl Content {
    fn get(&self, key: &str) -> Option<&[u8]> {
        let data: &BTreeMap<_, _> = self.0.data.as_ref()?;
        Some(&data.get(key)?.0)
    }

    fn version(&self) -> Option<String> {
        self.0.metadata.resource_version.clone()
    }
}

impl Drop for Content {
    fn drop(&mut self) {
        for value in self.0.data.iter_mut().flat_map(|data| data.values_mut()) {
            value.0.zeroize();
        }
    }
}

/// Key and certificate of a text that has one after the other.
fn split(pem: &[u8]) -> Option<(&[u8], &[u8])> {
    const BEGIN: &[u8] = b"-----BEGIN CERTIFICATE-----";
    let at = pem.windows(BEGIN.len()).position(|window| window == BEGIN)?;
    Some(pem.split_at(at))
}
