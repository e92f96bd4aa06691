//! The authority's keys in Secrets of the cluster: its own roots, or an intermediate that users provide.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use kube::api::{ObjectMeta, PostParams};
use kube::{Api, Client};
use zeroize::Zeroize;

use super::authority::{Authority, AuthorityError};
use super::cluster::{ClusterError, api_error, is_conflict};
use super::keyring::Keyring;
use super::provided::{self, Provided};
use crate::identity::TrustDomain;

/// The keys of our own Secret: the root that signs, and all roots with what is to become of them.
const ROOT_KEY: &str = "root-key.pem";
const ROOT_CERTIFICATE: &str = "root-cert.pem";
const KEYRING: &str = "keyring.json";
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

    /// The roots in the Secret, if it is there.
    pub(super) async fn load(&self) -> Result<Option<Kept>, ClusterError> {
        let Some(content) = self.read().await? else {
            return Ok(None);
        };
        let keyring = match content.get(KEYRING) {
            Some(written) => Keyring::read(written),
            None => Keyring::of_root(
                self.needed(&content, ROOT_KEY)?,
                self.needed(&content, ROOT_CERTIFICATE)?,
            ),
        };
        let keyring = keyring.map_err(|reason| self.unsound(reason))?;
        Ok(Some(Kept { keyring, content }))
    }

    fn needed<'a>(&self, content: &'a Content, key: &str) -> Result<&'a [u8], AuthorityError> {
        content.get(key).ok_or_else(|| self.unsound(format!("it has no {key}")))
    }

    pub(super) fn unsound(&self, reason: String) -> AuthorityError {
        AuthorityError::Unsound {
            place: self.place.clone(),
            reason,
        }
    }

    /// Makes the Secret; says whether somebody else has not just made one.
    pub(super) async fn create(&self, keyring: &Keyring) -> Result<bool, ClusterError> {
        let secret = Content(Secret {
            metadata: ObjectMeta {
                name: Some(self.name.clone()),
                ..ObjectMeta::default()
            },
            data: Some(self.data(keyring)?),
            ..Secret::default()
        });
        match self.api.create(&PostParams::default(), &secret.0).await {
            Ok(created) => drop(Content(created)),
            Err(error) if is_conflict(&error) => return Ok(false),
            Err(error) => return Err(api_error("create", &self.place)(error)),
        }
        Ok(true)
    }

    /// Puts these roots in the place of what was read; says whether nobody else has changed it since.
    pub(super) async fn replace(&self, keyring: &Keyring, mut was: Kept) -> Result<bool, ClusterError> {
        if was.is_immutable() {
            return Err(ClusterError::Immutable(self.place.clone()));
        }
        if was.content.version().is_none_or(|version| version.is_empty()) {
            return Err(self.unsound("the API server gave it no version".into()).into());
        }
        // The version in the metadata makes the API server refuse where there is a newer one.
        let mut data = self.data(keyring)?;
        std::mem::swap(was.content.0.data.get_or_insert_default(), &mut data);
        wipe(&mut data);
        match self
            .api
            .replace(&self.name, &PostParams::default(), &was.content.0)
            .await
        {
            Ok(replaced) => drop(Content(replaced)),
            Err(error) if is_conflict(&error) => return Ok(false),
            Err(error) => return Err(api_error("change", &self.place)(error)),
        }
        Ok(true)
    }

    fn data(&self, keyring: &Keyring) -> Result<BTreeMap<String, ByteString>, AuthorityError> {
        let (key, certificate) = keyring.signing();
        let all = keyring.write().map_err(|reason| self.unsound(reason))?;
        let data = [
            (ROOT_KEY, key.as_bytes()),
            (ROOT_CERTIFICATE, certificate.as_bytes()),
            (KEYRING, &all),
        ];
        Ok(data
            .map(|(name, content)| (name.into(), ByteString(content.to_vec())))
            .into())
    }

    pub(super) fn place(&self) -> &str {
        &self.place
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

    /// Takes newer intermediates from the Secret as they come, below the same root.
    pub(super) async fn keep_provided(self, authority: Arc<Authority>) -> ClusterError {
        let mut seen = None;
        loop {
            let taken = match self.read().await {
                Ok(Some(content)) if content.version() == seen => Ok(false),
                Ok(Some(content)) => {
                    let first = seen.is_none();
                    let taken = self
                        .provided(&content)
                        .and_then(|provided| authority.replace_provided(&self.place, provided));
                    // One that is not valid yet, by our clock, is tried again.
                    if taken.is_ok() {
                        seen = content.version();
                    }
                    taken.map(|()| !first).map_err(ClusterError::from)
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

/// Roots as they are kept, and the version of the Secret that they were read from.
pub(super) struct Kept {
    pub(super) keyring: Keyring,
    content: Content,
}

impl Kept {
    /// Whether it cannot be changed, as earlier versions made it.
    pub(super) fn is_immutable(&self) -> bool {
        self.content.0.immutable == Some(true)
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
        self.0.data.iter_mut().for_each(wipe);
    }
}

fn wipe(data: &mut BTreeMap<String, ByteString>) {
    data.values_mut().for_each(|value| value.0.zeroize());
}
