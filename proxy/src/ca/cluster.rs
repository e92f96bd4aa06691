//! The authority as a part of a cluster: its key and its root are kept there, and its callers are known there.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use kube::Client;
use thiserror::Error;

use super::authority::{Authority, AuthorityError};
use super::root::PublishedRoot;
use super::secret::SecretPlace;
use crate::admin::{Pending, Readiness};
use crate::identity::TrustDomain;

/// Between attempts to reach the API server at start.
const RETRY: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(10));

/// Where the authority keeps what is its own.
#[derive(Debug, Clone)]
pub struct ClusterSettings {
    /// The namespace of the Secrets and the ConfigMap.
    pub namespace: String,
    /// The Secret of its own root, made if it is not there.
    pub key_secret: String,
    /// A Secret with an intermediate of somebody else's hierarchy, to be used instead.
    pub intermediate_secret: Option<String>,
    /// The ConfigMap that the root is published in.
    pub root_config_map: String,
}

/// Why something in the cluster cannot be used.
#[derive(Debug, Error)]
pub enum ClusterError {
    /// The API server refuses, or is away.
    #[error("cannot {action} {place}: {reason}")]
    Api {
        /// What was tried.
        action: &'static str,
        /// On what.
        place: String,
        /// What the API server or the transport said.
        reason: String,
    },
    /// What users are to provide is not there.
    #[error("{0} is not there; make it, or leave out --intermediate-secret")]
    Missing(String),
    /// What is there is not sound.
    #[error(transparent)]
    Authority(#[from] AuthorityError),
}

impl ClusterError {
    /// Whether it may be otherwise in a moment without anybody's doing.
    fn may_pass(&self) -> bool {
        matches!(self, Self::Api { .. } | Self::Missing(_))
    }
}

pub(super) fn api_error(action: &'static str, place: &str) -> impl FnOnce(kube::Error) -> ClusterError {
    move |error| {
        let reason = match error {
            kube::Error::Api(status) => status.message.clone(),
            error => crate::identity::causes(&error),
        };
        ClusterError::Api {
            action,
            place: place.to_owned(),
            reason,
        }
    }
}

/// Whether somebody else has made or changed the object first.
pub(super) fn is_conflict(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if status.code == 409)
}

/// What runs as long as the authority does. Ends only when it must not go on.
pub(super) type Upkeep = Pin<Box<dyn Future<Output = ClusterError> + Send>>;

/// Opens the authority of the cluster, waiting for the API server if need be, and publishes its root.
pub(super) async fn open(
    client: Client,
    settings: &ClusterSettings,
    trust_domain: &TrustDomain,
    readiness: &Readiness,
) -> Result<(Arc<Authority>, Upkeep), ClusterError> {
    let place = |name: &str| SecretPlace::new(client.clone(), &settings.namespace, name);
    let pending = readiness.pending("the key");
    let (authority, upkeep): (_, Upkeep) = match &settings.intermediate_secret {
        Some(name) => {
            let place = place(name);
            let authority = Arc::new(insist(&pending, || place.open_provided(trust_domain)).await?);
            (authority.clone(), Box::pin(place.keep_provided(authority)))
        }
        None => {
            let place = place(&settings.key_secret);
            let authority = Arc::new(insist(&pending, || place.open_root(trust_domain)).await?);
            (authority.clone(), Box::pin(place.keep_root(authority)))
        }
    };
    pending.done();
    let (namespace, name) = (&settings.namespace, &settings.root_config_map);
    let root = PublishedRoot::new(client, namespace, name, authority.root_pem().to_owned());
    tokio::spawn(root.keep(readiness.pending("publishing the root")));
    Ok((authority, upkeep))
}

/// Tries until it succeeds, or fails in a way that does not pass.
async fn insist<T, F>(pending: &Pending, mut attempt: impl FnMut() -> F) -> Result<T, ClusterError>
where
    F: Future<Output = Result<T, ClusterError>>,
{
    let mut pause = RETRY.0;
    loop {
        match attempt().await {
            Err(error) if error.may_pass() => {
                tracing::warn!(%error, retry_in_s = pause.as_secs_f32(), "no key yet");
                pending.update(format!("the key: {error}"));
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(RETRY.1);
            }
            done => return done,
        }
    }
}
