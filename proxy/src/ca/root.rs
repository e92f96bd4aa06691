//! The roots that clients must trust, published as a ConfigMap and kept as it should be.

use std::sync::Arc;
use std::time::Duration;

use futures_util::TryStreamExt;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::api::{ObjectMeta, PostParams, WatchEvent, WatchParams};
use kube::{Api, Client};
use tokio::sync::watch;

use super::cluster::{ClusterError, api_error, is_conflict};
use crate::admin::Pending;

/// The key under which node proxies find the root.
const ROOT: &str = "root-cert.pem";
/// At least this long between two attempts: two authorities that are being exchanged must not fight faster.
const PAUSE: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));

/// A ConfigMap with the roots.
pub(super) struct PublishedRoot {
    api: Api<ConfigMap>,
    name: String,
    place: String,
    roots: watch::Receiver<Arc<str>>,
}

impl PublishedRoot {
    pub(super) fn new(client: Client, namespace: &str, name: &str, roots: watch::Receiver<Arc<str>>) -> Self {
        Self {
            api: Api::namespaced(client, namespace),
            name: name.into(),
            place: format!("the ConfigMap {namespace}/{name}"),
            roots,
        }
    }

    /// Publishes the root, and again whenever somebody changes or deletes it. `pending` is until the first success.
    pub(super) async fn keep(mut self, pending: Pending) {
        let mut pending = Some(pending);
        let mut pause = PAUSE.0;
        loop {
            let pem = self.roots.borrow_and_update().clone();
            match self.publish(&pem).await {
                Ok(version) => {
                    if let Some(pending) = pending.take() {
                        pending.done();
                    }
                    pause = PAUSE.0;
                    let mut roots = self.roots.clone();
                    tokio::select! {
                        () = self.until_changed(&version, &pem) => {}
                        // A new root must be known as soon as may be.
                        Ok(()) = roots.changed() => continue,
                    }
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot publish the root");
                    if let Some(pending) = &pending {
                        pending.update(format!("publishing the root: {error}"));
                    }
                    pause = (pause * 2).min(PAUSE.1);
                }
            }
            tokio::time::sleep(pause).await;
        }
    }

    /// Makes the ConfigMap what it should be, and gives the version that is.
    async fn publish(&self, pem: &str) -> Result<String, ClusterError> {
        let found = self
            .api
            .get_opt(&self.name)
            .await
            .map_err(api_error("read", &self.place))?;
        let (made, done) = match found {
            Some(found) if is_right(&found, pem) => (Ok(found), None),
            Some(mut found) => {
                found.data.get_or_insert_default().insert(ROOT.into(), pem.into());
                let replaced = self.api.replace(&self.name, &PostParams::default(), &found).await;
                (replaced, Some("updated"))
            }
            None => {
                let new = ConfigMap {
                    metadata: ObjectMeta {
                        name: Some(self.name.clone()),
                        ..ObjectMeta::default()
                    },
                    data: Some([(ROOT.into(), pem.into())].into()),
                    ..ConfigMap::default()
                };
                (self.api.create(&PostParams::default(), &new).await, Some("created"))
            }
        };
        match made {
            Ok(made) => {
                if let Some(done) = done {
                    tracing::info!("{done} {} with the roots", self.place);
                }
                Ok(made.metadata.resource_version.unwrap_or_default())
            }
            // Somebody else was faster, most likely another replica with the same root: that is looked at next.
            Err(error) if is_conflict(&error) => Ok(String::new()),
            Err(error) => Err(api_error("write", &self.place)(error)),
        }
    }

    /// Waits until the ConfigMap is not what it should be, or that cannot be told any more.
    async fn until_changed(&self, version: &str, pem: &str) {
        if version.is_empty() {
            return;
        }
        let only = WatchParams::default().fields(&format!("metadata.name={}", self.name));
        let watched = async {
            let mut events = std::pin::pin!(self.api.watch(&only, version).await?);
            while let Some(event) = events.try_next().await? {
                match event {
                    WatchEvent::Added(found) | WatchEvent::Modified(found) if is_right(&found, pem) => {}
                    WatchEvent::Bookmark(_) => {}
                    _ => break,
                }
            }
            Ok::<_, kube::Error>(())
        };
        if let Err(error) = watched.await {
            tracing::debug!(%error, "the watch of {} ended", self.place);
        }
    }
}

fn is_right(found: &ConfigMap, pem: &str) -> bool {
    found
        .data
        .as_ref()
        .and_then(|data| data.get(ROOT))
        .is_some_and(|published| published == pem)
}
