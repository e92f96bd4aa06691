//! Outbound and inbound: decide, connect, relay.
//!
//! A few workers, each a thread with a runtime of its own, carry all connections. The kernel spreads connections over
//! the workers, and whatever belongs to one connection, its tunnel included, stays with one worker: a byte crosses no
//! thread on its way.

mod accept;
mod dependents;
mod direct;
mod inbound;
mod outbound;
mod places;
pub mod record;
mod services;
mod standing;
mod track;
mod verdicts;
mod worker;

use std::collections::HashSet;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tokio::sync::watch;

use crate::hbone::HboneSettings;
use crate::identity::CertStore;
use crate::mesh::MeshHandle;
use crate::node::{CaptureTests, LocalPods};
use crate::steer::{Clients, Flows};
use record::Observer;

pub use direct::DirectConnections;
pub use places::PodLimit;
pub use verdicts::{Unplaced, Verdicts};
pub use worker::Workers;

/// How the data plane behaves.
#[derive(Debug, Clone)]
pub struct DataplaneSettings {
    /// How long a connection to a tunnel's peer, an application or a plain destination may take.
    pub connect_timeout: Duration,
    /// How many connections are carried for one pod at once.
    pub connections_per_pod: PodLimit,
    /// Sizes and times of tunnels.
    pub hbone: HboneSettings,
}

/// What all workers use.
pub struct Dataplane {
    /// What exists.
    pub mesh: MeshHandle,
    /// The certificates.
    pub certs: CertStore,
    /// Where captured connections were going.
    pub flows: Flows,
    /// Where applications are told their true clients.
    pub clients: Clients,
    /// The enrolled pods.
    pub pods: LocalPods,
    /// The uids of pods of which a listener has been closed by somebody else.
    pub broken: Mutex<HashSet<Arc<str>>>,
    /// Which connections test whether their pod is captured.
    pub tests: CaptureTests,
    /// How many connections are carried for all pods together.
    pub carried: Arc<AtomicU32>,
    /// When it was last logged that a pod has no more places.
    pub no_place_logged: Mutex<Option<Instant>>,
    /// Who is told of connections.
    pub observer: Arc<dyn Observer>,
    /// How to behave.
    pub settings: DataplaneSettings,
    /// Whether pods that were enrolled before this process came are still being taken over.
    pub enrolling: watch::Receiver<bool>,
    /// Whether the process takes no more connections.
    pub draining: watch::Receiver<bool>,
    /// The number of the next connection.
    pub next_id: AtomicU64,
}

impl Dataplane {
    fn next_id(&self) -> u64 {
        self.next_id.fetch_add(1, Ordering::Relaxed)
    }
}
