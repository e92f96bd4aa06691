//! The way from a source to everybody who asks: the latest snapshot and word of a newer one.

use std::fmt;
use std::sync::{Arc, OnceLock};

use arc_swap::ArcSwap;
use tokio::sync::watch;

use super::Mesh;
use super::aliases::Aliases;
use crate::identity::TrustDomain;

/// The latest [`Mesh`], shared between the source that publishes and all that read. Clones are one.
#[derive(Clone)]
pub struct MeshHandle(Arc<Shared>);

struct Shared {
    latest: ArcSwap<Mesh>,
    aliases: OnceLock<Aliases>,
    generation: watch::Sender<u64>,
}

impl MeshHandle {
    /// A handle on a first snapshot, generation 1.
    pub fn new(mesh: Mesh) -> Self {
        Self(Arc::new(Shared {
            latest: ArcSwap::from_pointee(mesh),
            aliases: OnceLock::new(),
            generation: watch::Sender::new(1),
        }))
    }

    /// The latest snapshot. Never blocks.
    pub fn load(&self) -> Arc<Mesh> {
        self.0.latest.load_full()
    }

    /// Says which further names the mesh's trust domain has: from now on policies know who bears one by the mesh's own.
    /// To be said once, before anything is published by others.
    pub fn set_aliases(&self, names: Vec<TrustDomain>) {
        if !names.is_empty() && self.0.aliases.set(Aliases::new(names)).is_ok() {
            self.publish((*self.load()).clone());
        }
    }

    /// Replaces the snapshot, tells all subscribers, and returns the new generation.
    pub fn publish(&self, mut mesh: Mesh) -> u64 {
        if let Some(aliases) = self.0.aliases.get() {
            aliases.resolve(&mut mesh);
        }
        let mesh = Arc::new(mesh);
        let mut published = 0;
        // Stored under the sender's lock: who sees generation n loads the snapshot n or a later one.
        self.0.generation.send_modify(|generation| {
            self.0.latest.store(mesh);
            *generation += 1;
            published = *generation;
        });
        published
    }

    /// How many snapshots have been published, the first included.
    pub fn generation(&self) -> u64 {
        *self.0.generation.borrow()
    }

    /// The generation as a watch; it changes after the new snapshot is there to load.
    pub fn subscribe(&self) -> watch::Receiver<u64> {
        self.0.generation.subscribe()
    }
}

impl fmt::Debug for MeshHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MeshHandle")
            .field("generation", &self.generation())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mesh::snapshot::tests::{parts, workload};

    #[tokio::test]
    async fn a_subscriber_of_a_generation_loads_its_snapshot() {
        let handle = MeshHandle::new(Mesh::build(parts()).unwrap());
        let mut watch = handle.subscribe();
        let mut next = parts();
        next.workloads.push(workload("shop", "cart", "10.0.0.1"));
        assert_eq!(handle.clone().publish(Mesh::build(next).unwrap()), 2);
        watch.changed().await.unwrap();
        assert_eq!((*watch.borrow_and_update(), handle.generation()), (2, 2));
        assert!(handle.load().workload_by_uid("shop/cart").is_some());
    }
}
