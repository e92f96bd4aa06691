//! Enrolment: which pods of this node are steered follows from the mesh.

use std::collections::HashMap;
use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::time::Duration;

use thiserror::Error;

use super::{LocalPod, LocalPods, Netns, NetnsError, PodListeners, listen_in};
use crate::identity::CertStore;
use crate::mesh::{Mesh, Protocol, SameNode, Workload};
use crate::steer::{PodAttachment, PodSteering, SteerError, Steering};

/// How long after a failure a pod is tried again.
pub const RETRY: Duration = Duration::from_secs(1);

/// Why a pod could not be enrolled.
#[derive(Debug, Error)]
pub enum EnrolError {
    /// Its network namespace cannot be used.
    #[error(transparent)]
    Netns(#[from] NetnsError),
    /// The kernel programs did not take it.
    #[error(transparent)]
    Steer(#[from] SteerError),
}

/// Who serves enrolled pods: the data plane.
pub trait PodServer: Send + Sync {
    /// A pod has been enrolled; one set of listeners for each worker.
    fn added(&self, pod: &Arc<LocalPod>, listeners: Vec<PodListeners>);
    /// A pod has left: what is open of it ends.
    fn removed(&self, uid: &str);
}

/// The pods of `node` that should be enrolled.
pub(super) fn wanted<'m>(node: &str, mesh: &'m Mesh) -> impl Iterator<Item = &'m Arc<Workload>> {
    mesh.local_workloads(node)
        .filter(|workload| workload.protocol == Protocol::Hbone && workload.netns.is_some())
}

/// The pods of this node as they are enrolled. Dropping it lets them all go.
pub struct Enrolment {
    node: String,
    steering: Arc<Steering>,
    certs: CertStore,
    pods: LocalPods,
    server: Arc<dyn PodServer>,
    workers: usize,
    enrolled: HashMap<Arc<str>, Enrolled>,
    /// Pods that could not be enrolled, and why: each reason is logged once.
    failed: HashMap<Arc<str>, String>,
}

struct Enrolled {
    workload: Arc<Workload>,
    /// Dropped first: nothing is steered to a pod that is no longer served.
    _attachment: PodAttachment,
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
        }
    }

    /// Makes the enrolled pods those that the mesh says. Returns whether some pod has to be tried again.
    pub fn reconcile(&mut self, mesh: &Mesh) -> bool {
        let wanted: HashMap<&Arc<str>, &Arc<Workload>> = wanted(&self.node, mesh)
            .map(|workload| (&workload.uid, workload))
            .collect();
        let leaving: Vec<Arc<str>> = self
            .enrolled
            .iter()
            .filter(|(uid, pod)| {
                wanted
                    .get(uid)
                    .is_none_or(|workload| needs_new_enrolment(&pod.workload, workload))
                    || self.pods.get(uid).is_some_and(|pod| pod.netns().was_replaced())
            })
            .map(|(uid, _)| Arc::clone(uid))
            .collect();
        for uid in leaving {
            if !wanted.contains_key(&uid) {
                self.set_free(&uid);
            }
            self.remove(&uid);
        }
        self.failed.retain(|uid, _| wanted.contains_key(uid));
        for workload in wanted.into_values() {
            if !self.enrolled.contains_key(&workload.uid) {
                self.try_add(workload);
            }
        }
        !self.failed.is_empty()
    }

    /// The pods that could not be enrolled, and why.
    pub fn failures(&self) -> impl Iterator<Item = (&str, &str)> {
        self.failed.iter().map(|(uid, reason)| (&**uid, reason.as_str()))
    }

    fn try_add(&mut self, workload: &Arc<Workload>) {
        match self.add(workload) {
            Ok(enrolled) => {
                tracing::info!(
                    "pod {}/{} is enrolled as {}",
                    workload.namespace,
                    workload.name,
                    workload.identity
                );
                self.failed.remove(&workload.uid);
                self.enrolled.insert(Arc::clone(&workload.uid), enrolled);
            }
            Err(error) => {
                let reason = error.to_string();
                if self.failed.get(&workload.uid) != Some(&reason) {
                    tracing::warn!(
                        "pod {}/{} cannot be enrolled, trying again: {reason}",
                        workload.namespace,
                        workload.name
                    );
                    self.failed.insert(Arc::clone(&workload.uid), reason);
                }
            }
        }
    }

    fn add(&self, workload: &Arc<Workload>) -> Result<Enrolled, EnrolError> {
        let path = workload.netns.as_deref().unwrap_or_else(|| std::path::Path::new(""));
        let netns = Netns::open(path)?;
        // The CA is asked before anything is steered, so that a certificate is there when the first byte needs it.
        let lease = self.certs.acquire(&workload.identity);
        let local_ports = netns.local_port_range()?;
        let listeners = listen_in(&netns, self.workers)?;
        // Workers that share a port are one group to the kernel, of which any member leads to all.
        let Some(first) = listeners.first() else {
            unreachable!("there is always a worker")
        };
        let attachment = self.steering.attach_pod(&PodSteering {
            namespace: &workload.namespace,
            name: &workload.name,
            netns: netns.as_fd(),
            cookie: netns.cookie(),
            identity: Some(&workload.identity),
            same_node_encrypted: workload.same_node == SameNode::Encrypted,
            addresses: &workload.addresses,
            local_ports,
            outbound: first.outbound.as_fd(),
            hbone: first.hbone.as_fd(),
            plaintext: first.plaintext.as_fd(),
        })?;
        // Should it ever be let go, it is to be looked at anew.
        self.steering.namespaces().remove_other(netns.cookie())?;
        let pod = Arc::new(LocalPod::new(
            Arc::clone(workload),
            netns,
            local_ports,
            &attachment,
            lease,
        ));
        self.pods.insert(&pod);
        self.server.added(&pod, listeners);
        Ok(Enrolled {
            workload: Arc::clone(workload),
            _attachment: attachment,
        })
    }

    /// Lets the pod, which leaves the mesh, connect as one that never was in it.
    fn set_free(&self, uid: &str) {
        let Some(pod) = self.pods.get(uid) else { return };
        if let Err(error) = self.steering.namespaces().add_other(pod.netns().cookie()) {
            tracing::warn!("{error}; until it is looked at again, its connects are those of a pod that starts");
        }
    }

    fn remove(&mut self, uid: &str) {
        if let Some(pod) = self.enrolled.remove(uid) {
            tracing::info!("pod {}/{} has left", pod.workload.namespace, pod.workload.name);
            drop(pod);
            self.pods.remove(uid);
            self.server.removed(uid);
        }
    }
}

/// Whether the pod must be enrolled anew: what the kernel or the store of certificates was told has changed.
fn needs_new_enrolment(old: &Workload, new: &Workload) -> bool {
    old.identity != new.identity
        || old.addresses != new.addresses
        || old.netns != new.netns
        || old.same_node != new.same_node
}
