//! An enrolled pod of this node.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;

use arc_swap::ArcSwap;

use super::Netns;
use crate::identity::{IdentityLease, SpiffeId};
use crate::mesh::Workload;
use crate::steer::PodPlace;

/// What the data plane needs of an enrolled pod.
pub struct LocalPod {
    workload: Arc<Workload>,
    netns: Netns,
    local_ports: [u16; 2],
    place: PodPlace,
    lease: IdentityLease,
    /// How many connections are carried for it now.
    carried: AtomicU32,
}

impl LocalPod {
    pub(super) fn new(
        workload: Arc<Workload>,
        netns: Netns,
        local_ports: [u16; 2],
        place: PodPlace,
        lease: IdentityLease,
    ) -> Self {
        Self {
            workload,
            netns,
            local_ports,
            place,
            lease,
            carried: AtomicU32::new(0),
        }
    }

    /// The pod as it was when it was enrolled; the mesh may know more by now.
    pub fn workload(&self) -> &Arc<Workload> {
        &self.workload
    }

    /// The pod's unique name for life.
    pub fn uid(&self) -> &Arc<str> {
        &self.workload.uid
    }

    /// The pod's network namespace.
    pub fn netns(&self) -> &Netns {
        &self.netns
    }

    /// The namespace's range of local ports.
    pub fn local_ports(&self) -> [u16; 2] {
        self.local_ports
    }

    /// Its name as a destination of the kernel's verdicts.
    pub fn slot(&self) -> u32 {
        self.place.slot
    }

    /// The number of its identity among the sources of the kernel's verdicts.
    pub fn source(&self) -> u32 {
        self.place.source
    }

    /// How many connections are carried for it now.
    pub fn carried(&self) -> &AtomicU32 {
        &self.carried
    }

    /// The identity of whatever comes from the pod's network namespace.
    pub fn identity(&self) -> &SpiffeId {
        self.lease.id()
    }
}

/// The enrolled pods, by uid. Clones share them.
#[derive(Clone, Default)]
pub struct LocalPods(Arc<ArcSwap<HashMap<Arc<str>, Arc<LocalPod>>>>);

impl LocalPods {
    /// The pod of this uid, if it is enrolled.
    pub fn get(&self, uid: &str) -> Option<Arc<LocalPod>> {
        self.0.load().get(uid).cloned()
    }

    /// All of them.
    pub fn all(&self) -> Arc<HashMap<Arc<str>, Arc<LocalPod>>> {
        self.0.load_full()
    }

    pub(super) fn insert(&self, pod: &Arc<LocalPod>) {
        self.0.rcu(|pods| {
            let mut pods = HashMap::clone(pods);
            pods.insert(Arc::clone(pod.uid()), Arc::clone(pod));
            pods
        });
    }

    pub(super) fn remove(&self, uid: &str) {
        self.0.rcu(|pods| {
            let mut pods = HashMap::clone(pods);
            pods.remove(uid);
            pods
        });
    }
}
