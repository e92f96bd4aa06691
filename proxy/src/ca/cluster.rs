//! The authority as a part of a cluster: its key and its root are kept there, and its callers are known there.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use kube::Client;
use thiserror::Error;

use super::authority::{Authority, AuthorityError};
use super::leader::{Candidate, Leadership, Times};
use super::root::PublishedRoot;
use super::rotation::{Desk, Keeper, Watched};
use super::secret::SecretPlace;
use super::trust_bundle::TrustBundle;
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
    /// The ConfigMap that the roots are published in.
    pub root_config_map: String,
    /// The ConfigMap of requests for a change of keys.
    pub rotation_config_map: String,
    /// The Lease of whoever may change keys.
    pub lease: String,
    /// The ClusterTrustBundle that the roots are published in besides, if any.
    pub trust_bundle: Option<String>,
    /// The longest lifetime of a leaf.
    pub longest: Duration,
    /// A name of this process, for people.
    pub host: String,
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
    /// Somebody has put another authority's in their place.
    #[error("{0} has other roots than those in use; the CA starts anew with what is there now")]
    Replaced(String),
    /// Somebody else is to make it.
    #[error("{0} is not there yet, and is made by whichever replica leads")]
    NoLeader(String),
    /// A Secret of an earlier version, which cannot be changed.
    #[error(
        "{0} is immutable, as earlier versions made it, and so its keys cannot be changed; replace it once by one that is not: \
         kubectl get -o json, without .immutable and .metadata.resourceVersion, into kubectl replace --force -f -"
    )]
    Immutable(String),
    /// What is there is not sound.
    #[error(transparent)]
    Authority(#[from] AuthorityError),
}

impl ClusterError {
    /// Whether it may be otherwise in a moment without anybody's doing.
    fn may_pass(&self) -> bool {
        matches!(self, Self::Api { .. } | Self::Missing(_) | Self::NoLeader(_))
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

/// An authority of a cluster, opened.
pub(super) struct Opened {
    pub(super) authority: Arc<Authority>,
    pub(super) upkeep: Upkeep,
    /// Of the keys, where they are its own.
    pub(super) watched: Watched,
    /// Who may change them, and the task that stands for election, which is done when it has let go.
    pub(super) leadership: Option<(Leadership, tokio::task::JoinHandle<()>)>,
}

/// Opens the authority of the cluster, waiting for the API server if need be, and publishes its roots. `stop` ends what
/// stands for election.
pub(super) async fn open(
    client: Client,
    settings: &ClusterSettings,
    trust_domain: &TrustDomain,
    readiness: &Readiness,
    stop: impl Future<Output = ()> + Send + 'static,
) -> Result<Opened, ClusterError> {
    let namespace = &settings.namespace;
    let place = |name: &str| SecretPlace::new(client.clone(), namespace, name);
    let pending = readiness.pending("the key");
    let opened = match &settings.intermediate_secret {
        Some(name) => {
            let place = place(name);
            let authority = Arc::new(insist(&pending, || place.open_provided(trust_domain)).await?);
            Opened {
                authority: authority.clone(),
                upkeep: Box::pin(place.keep_provided(authority)),
                watched: Watched::default(),
                leadership: None,
            }
        }
        None => {
            let candidate = Candidate::new(
                client.clone(),
                namespace,
                &settings.lease,
                &settings.host,
                Times::default(),
            );
            let leadership = candidate.leadership();
            let election = tokio::spawn(candidate.run(stop));
            let keeper = Keeper {
                place: place(&settings.key_secret),
                desk: Desk::new(client.clone(), namespace, &settings.rotation_config_map),
                leadership: leadership.clone(),
                trust_domain: trust_domain.clone(),
                longest: settings.longest,
                watched: Watched::default(),
            };
            let (authority, held) = insist(&pending, || keeper.open()).await?;
            let authority = Arc::new(authority);
            let watched = keeper.watched.clone();
            Opened {
                authority: authority.clone(),
                upkeep: Box::pin(keeper.keep(authority, held)),
                watched,
                leadership: Some((leadership, election)),
            }
        }
    };
    pending.done();
    let root = PublishedRoot::new(
        client.clone(),
        namespace,
        &settings.root_config_map,
        opened.authority.roots(),
    );
    tokio::spawn(root.keep(readiness.pending("publishing the root")));
    if let Some(name) = &settings.trust_bundle {
        tokio::spawn(TrustBundle::new(client, name, opened.authority.roots()).keep());
    }
    Ok(opened)
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
