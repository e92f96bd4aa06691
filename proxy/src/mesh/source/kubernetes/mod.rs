//! The Kubernetes API as the source of truth: pods, services and policies straight from the API server.
//!
//! Each kind is listed once and then watched by a [`follow::Follower`]; all of them tell one [`state::State`] what has
//! become of its objects, from which the mesh follows. Where the API is away, what is known stays in force.

mod api;
mod error;
pub mod events;
mod follow;
mod health;
mod hook;
mod kind;
mod objects;
mod pods;
pub mod policies;
mod services;
mod settings;
mod state;
mod strings;
mod wire;

use std::time::{Duration, SystemTime};

use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep_until};

pub use error::KubernetesError;
pub use hook::{PolicyConversion, PolicyKind};
pub use settings::{EnrolmentLabel, KubernetesSettings, NoLabel, View};

use super::{SourceStatus, StatusHandle, Synced};
use crate::mesh::{Mesh, MeshHandle, Unlisted};
use follow::{Event, Follower};
use health::Health;
use kind::Kind;
use state::State;

/// How long after a publication the next may come: what changes in between comes with it. A change after a quiet time is
/// published at once.
const COALESCE: Duration = Duration::from_millis(50);
/// How many events may wait to be taken account of.
const WAITING: usize = 256;

/// The cluster, to be watched.
pub struct KubernetesSource {
    client: Client,
    view: View,
    state: State,
    mesh: MeshHandle,
    status: StatusHandle,
    whole: watch::Sender<bool>,
}

impl KubernetesSource {
    /// Makes ready to ask the API server, without asking it yet: until [`Self::synced`] the mesh is empty.
    pub async fn open(settings: KubernetesSettings, view: View) -> Result<Self, KubernetesError> {
        let client = client(&settings).await?;
        let cluster_domain = settings.cluster_domain.as_str().into();
        let empty = Mesh::empty(settings.trust_domain.clone(), cluster_domain, Unlisted::Awaited);
        let mesh = MeshHandle::new(empty);
        let status = StatusHandle::new(SourceStatus {
            last_loaded: SystemTime::now(),
            generation: mesh.generation(),
            last_error: Some("the cluster's state has not been read yet".to_owned()),
            heard: None,
        });
        let policies = policies::Conversion::new(&settings.root_namespace);
        Ok(Self {
            client,
            state: State::new(settings, view.clone(), Box::new(policies)),
            view,
            mesh,
            status,
            whole: watch::Sender::new(false),
        })
    }

    /// The mesh as it is known.
    pub fn mesh(&self) -> MeshHandle {
        self.mesh.clone()
    }

    /// How the source is doing.
    pub fn status(&self) -> StatusHandle {
        self.status.clone()
    }

    /// What tells that the whole state has been read.
    pub fn synced(&self) -> Synced {
        Synced::new(self.whole.subscribe())
    }

    /// The client, for what else is to be asked of the API server.
    pub fn client(&self) -> Client {
        self.client.clone()
    }

    /// Follows the cluster for as long as the future is polled.
    pub async fn watch(mut self) {
        let (events, mut heard) = mpsc::channel(WAITING);
        let health = Health::new(Some(self.status.clone()));
        let kinds: &[Kind] = match self.view {
            View::Node(_) => &Kind::ALL,
            View::Authority => &Kind::PLACEMENT,
        };
        let followers: Vec<_> = kinds
            .iter()
            .map(|kind| Follower::new(self.client.clone(), *kind, events.clone(), health.clone()))
            .map(|follower| AbortOnDrop(tokio::spawn(follower.run())))
            .collect();
        drop(events);
        self.take_in(&mut heard).await;
        drop(followers);
    }

    async fn take_in(&mut self, heard: &mut mpsc::Receiver<Event>) {
        let mut next_publication = Instant::now();
        let mut waiting = false;
        loop {
            tokio::select! {
                event = heard.recv() => match event {
                    Some(event) => self.state.apply(event),
                    None => return,
                },
                () = sleep_until(next_publication), if waiting => {}
            }
            while let Ok(event) = heard.try_recv() {
                self.state.apply(event);
                if waiting && Instant::now() >= next_publication {
                    break;
                }
            }
            if !self.state.is_whole() {
                continue;
            }
            waiting = Instant::now() < next_publication;
            if !waiting && let Some(mesh) = self.state.take_changed() {
                self.publish(mesh);
                next_publication = Instant::now() + COALESCE;
            }
        }
    }

    fn publish(&self, mesh: Mesh) {
        if !*self.whole.borrow() {
            let (workloads, services) = (mesh.workload_count(), mesh.services().count());
            tracing::info!(workloads, services, "the cluster's state is known");
        }
        let generation = self.mesh.publish(mesh);
        self.status.update(|status| {
            status.last_loaded = SystemTime::now();
            status.generation = generation;
        });
        self.whole.send_replace(true);
    }
}

/// Ends a task with what needs it.
struct AbortOnDrop(tokio::task::JoinHandle<()>);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

async fn client(settings: &KubernetesSettings) -> Result<Client, KubernetesError> {
    let mut config = match &settings.kubeconfig {
        Some(file) => {
            let refused = |reason: String| KubernetesError::Kubeconfig {
                file: file.clone(),
                reason,
            };
            let kubeconfig = Kubeconfig::read_from(file).map_err(|error| refused(error.to_string()))?;
            let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await;
            config.map_err(|error| refused(error.to_string()))?
        }
        None => Config::incluster().map_err(|error| KubernetesError::NotInCluster(error.to_string()))?,
    };
    // Followers try again by themselves, and tell.
    config.default_retry = false;
    Client::try_from(config).map_err(|error| KubernetesError::Client(error.to_string()))
}
