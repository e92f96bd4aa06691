//! Enrolment: which pods of this node are steered follows from the mesh.

use std::collections::{HashMap, HashSet};
use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::time::Duration;

use thiserror::Error;

use super::{LocalPod, LocalPods, Netns, NetnsError, PodListeners, listen_in};
use crate::identity::CertStore;
use crate::mesh::{Mesh, Protocol, SameNode, Workload};
use crate::steer::{ListenerFds, PodSteering, SteerError, Steering};

/// How long after a failure a pod is tried again.
pub const RETRY: Duration = Duration::from_secs(1);

/// Why a pod could not be enrolled.
#[derive(Debug, Error)]
pub enum EnrolError {
    /// Its network namespace cannot be used.
    #[error(transparent)]
    Netns(#[from] NetnsError),
    /// Another pod is enrolled in the network namespace.
    #[error("its network namespace is that of another enrolled pod; two pods cannot share one")]
    NetnsTaken,
    /// The kernel programs did not take it.
    #[error(transparent)]
    Steer(#[from] SteerError),
}

/// Who serves enrolled pods: the data plane.
pub trait PodServer: Send + Sync {
    /// A pod has been enrolled; one set of listeners for each worker.
    fn added(&self, pod: &Arc<LocalPod>, listeners: Vec<PodListeners>);
    /// A pod that is enrolled has more listeners; what is open of it goes on.
    fn listening(&self, pod: &Arc<LocalPod>, listeners: Vec<PodListeners>);
    /// A pod has left: what is open of it ends.
    fn removed(&self, uid: &str);
}

/// The pods of this node as they are enrolled. They stay captured when it is dropped, and are refused then.
pub struct Enrolment {
    node: String,
    pub(super) steering: Arc<Steering>,
    certs: CertStore,
    pub(super) pods: LocalPods,
    pub(super) server: Arc<dyn PodServer>,
    pub(super) workers: usize,
    pub(super) enrolled: HashMap<Arc<str>, Enrolled>,
    /// Pods that could not be enrolled, and why: each reason is logged once.
    failed: HashMap<Arc<str>, String>,
    /// Pods whose network namespace could not be looked at.
    unseen: HashSet<Arc<str>>,
}

pub(super) struct Enrolled {
    pub(super) workload: Arc<Workload>,
    /// The network namespace's.
    pub(super) cookie: u64,
    /// Whether there are listeners. Where not, all that the pod dials or is sent is refused.
    pub(super) served: bool,
}

/// The pods that should be enrolled, by their uids.
type Wanted<'m> = HashMap<&'m Arc<str>, &'m Arc<Workload>>;

/// The pods of `node` that should be enrolled.
pub(super) fn wanted<'m>(node: &str, mesh: &'m Mesh) -> impl Iterator<Item = &'m Arc<Workload>> {
    mesh.local_workloads(node)
        .filter(|workload| workload.protocol == Protocol::Hbone && workload.netns.is_some())
}

impl Enrolment {
    /// Enrols pods of `node`, to be served by `server` with `workers` workers.
    pub fn new(
        node: &str,
        steering: Arc<Steering>,
        certs: CertStore,
        pods: LocalPods,
        server: Arc<dyn PodServer>,
        workers: usize,
    ) -> Self {
        Self {
            node: node.to_owned(),
            steering,
            certs,
            pods,
            server,
            workers,
            enrolled: HashMap::new(),
            failed: HashMap::new(),
            unseen: HashSet::new(),
        }
    }

    /// The node whose pods these are.
    pub fn node(&self) -> &str {
        &self.node
    }

    /// Makes the enrolled pods those that the mesh says. Returns whether some pod has to be tried again.
    pub fn reconcile(&mut self, mesh: &Mesh) -> bool {
        let wanted = self.wanted(mesh);
        self.failed.retain(|uid, _| wanted.contains_key(uid));
        self.unseen.retain(|uid| wanted.contains_key(uid));
        for workload in wanted.values() {
            let was_replaced = || {
                let pod = self.pods.get(&workload.uid);
                pod.is_some_and(|pod| pod.netns().was_replaced())
            };
            let is_done =
                |pod: &Enrolled| pod.served && !needs_new_enrolment(&pod.workload, workload) && !was_replaced();
            if !self.enrolled.get(&workload.uid).is_some_and(is_done) {
                self.try_add(workload, &wanted);
            }
        }
        // Only now: a namespace that another pod has taken over is never let go in between.
        let leaving: Vec<Arc<str>> = self
            .enrolled
            .keys()
            .filter(|uid| !wanted.contains_key(*uid))
            .cloned()
            .collect();
        for uid in leaving {
            self.set_free(&uid);
            self.remove(&uid);
        }
        let swept = self.steering.sweep_adopted(self.unseen.is_empty());
        if swept > 0 {
            tracing::info!("let go {swept} pods that had left while no proxy ran");
        }
        if self.failed.is_empty() {
            match self.steering.remove_other_versions() {
                Ok(0) => {}
                Ok(count) => tracing::info!("removed the programs and maps of {count} other versions"),
                Err(error) => tracing::warn!("{error}"),
            }
        }
        !self.failed.is_empty()
    }

    /// The pods that should be enrolled, by their uids.
    pub(super) fn wanted<'m>(&self, mesh: &'m Mesh) -> Wanted<'m> {
        wanted(&self.node, mesh)
            .map(|workload| (&workload.uid, workload))
            .collect()
    }

    /// The pods that could not be enrolled, and why.
    pub fn failures(&self) -> impl Iterator<Item = (&str, &str)> {
        self.failed.iter().map(|(uid, reason)| (&**uid, reason.as_str()))
    }

    fn try_add(&mut self, workload: &Arc<Workload>, wanted: &Wanted<'_>) {
        match self.add(workload, wanted) {
            Ok(()) => {
                tracing::info!(
                    "pod {}/{} is enrolled as {}",
                    workload.namespace,
                    workload.name,
                    workload.identity
                );
                self.failed.remove(&workload.uid);
            }
            Err(error) => {
                // What it was is not what it should be: nothing is carried for it until it is.
                self.stop_serving(&workload.uid);
                let reason = error.to_string();
                if self.failed.get(&workload.uid) != Some(&reason) {
                    let until = if self.enrolled.contains_key(&workload.uid) {
                        "; until then its connections are refused"
                    } else {
                        ""
                    };
                    tracing::warn!(
                        "pod {}/{} cannot be enrolled, trying again{until}: {reason}",
                        workload.namespace,
                        workload.name
                    );
                    self.failed.insert(Arc::clone(&workload.uid), reason);
                }
            }
        }
    }

    fn add(&mut self, workload: &Arc<Workload>, wanted: &Wanted<'_>) -> Result<(), EnrolError> {
        self.unseen.insert(Arc::clone(&workload.uid));
        let path = workload.netns.as_deref().unwrap_or_else(|| std::path::Path::new(""));
        let netns = Netns::open(path)?;
        self.unseen.remove(&workload.uid);
        let cookie = netns.cookie();
        let holder = self
            .enrolled
            .iter()
            .find(|(uid, pod)| **uid != workload.uid && pod.cookie == cookie);
        let stays = |uid, pod: &Enrolled| {
            let wanted: Option<&&Arc<Workload>> = wanted.get(uid);
            wanted.is_some_and(|workload| pod.workload.netns == workload.netns)
        };
        if holder.is_some_and(|(uid, pod)| stays(uid, pod)) {
            return Err(EnrolError::NetnsTaken);
        }
        let holder = holder.map(|(uid, _)| Arc::clone(uid));

        // The CA is asked before anything is steered, so that a certificate is there when the first byte needs it.
        let lease = self.certs.acquire(&workload.identity);
        let made = netns
            .local_port_range()
            .and_then(|local_ports| Ok((local_ports, listen_in(&netns, self.workers)?)));
        let listeners = made.as_ref().ok().and_then(|(_, listeners)| first_of(listeners));
        // Without listeners too: a pod that should be enrolled is refused rather than open.
        let place = self.steering.attach_pod(&PodSteering {
            namespace: &workload.namespace,
            name: &workload.name,
            netns: netns.as_fd(),
            cookie,
            identity: Some(&workload.identity),
            same_node_encrypted: workload.same_node == SameNode::Encrypted,
            addresses: &workload.addresses,
            local_ports: made.as_ref().map_or([0, 0], |(local_ports, _)| *local_ports),
            listeners,
        })?;
        let now = Enrolled {
            workload: Arc::clone(workload),
            cookie,
            served: made.is_ok(),
        };
        let before = self.enrolled.insert(Arc::clone(&workload.uid), now);
        if let Some(holder) = holder {
            self.remove(&holder);
        }
        if let Some(before) = before {
            self.server.removed(&workload.uid);
            self.release_unless_held(before.cookie);
        }
        // Should it ever be let go, it is to be looked at anew.
        self.steering.namespaces().remove_other(cookie)?;
        let (local_ports, listeners) = made?;
        let pod = Arc::new(LocalPod::new(Arc::clone(workload), netns, local_ports, place, lease));
        self.pods.insert(&pod);
        self.server.added(&pod, listeners);
        Ok(())
    }

    /// Ends what is open of the pod, and listens no more for it; it stays captured.
    fn stop_serving(&mut self, uid: &str) {
        if let Some(pod) = self.enrolled.get_mut(uid)
            && std::mem::take(&mut pod.served)
        {
            self.pods.remove(uid);
            self.server.removed(uid);
        }
    }

    /// Lets the pod, which leaves the mesh, connect as one that never was in it.
    fn set_free(&self, uid: &str) {
        let Some(pod) = self.enrolled.get(uid) else { return };
        if let Err(error) = self.steering.namespaces().add_other(pod.cookie) {
            tracing::warn!("{error}; until it is looked at again, its connects are those of a pod that starts");
        }
    }

    fn remove(&mut self, uid: &str) {
        if let Some(pod) = self.enrolled.remove(uid) {
            tracing::info!("pod {}/{} has left", pod.workload.namespace, pod.workload.name);
            self.release_unless_held(pod.cookie);
            self.pods.remove(uid);
            self.server.removed(uid);
        }
    }

    fn release_unless_held(&self, cookie: u64) {
        if !self.enrolled.values().any(|pod| pod.cookie == cookie) {
            self.steering.release_pod(cookie);
        }
    }
}

/// Workers that share a port are one group to the kernel, of which any member leads to all.
pub(super) fn first_of(listeners: &[PodListeners]) -> Option<ListenerFds<'_>> {
    listeners.first().map(|first| ListenerFds {
        outbound: first.outbound.as_fd(),
        hbone: first.hbone.as_fd(),
        plaintext: first.plaintext.as_fd(),
    })
}

/// Whether the pod must be enrolled anew: what the kernel or the store of certificates was told has changed.
pub(super) fn needs_new_enrolment(old: &Workload, new: &Workload) -> bool {
    old.identity != new.identity
        || old.addresses != new.addresses
        || old.netns != new.netns
        || old.same_node != new.same_node
}
