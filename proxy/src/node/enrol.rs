//! Enrolment: which pods of this node are steered follows from the mesh.

use std::cell::OnceCell;
use std::collections::{HashMap, HashSet};
use std::net::IpAddr;
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use thiserror::Error;

use super::bars::barred;
use super::capture_test::CAPTURE_TEST;
use super::change::{Change, change, with_addresses};
use super::pod_cgroup::{FoundNetns, PodCgroups, inode};
use super::upkeep::Broken;
use super::{LocalPod, LocalPods, Netns, NetnsError, PodListeners, listen_in};
use crate::identity::CertStore;
use crate::mesh::{Mesh, Protocol, SameNode, Unlisted, Workload};
use crate::steer::{ListenerFds, PodSteering, SteerError, Steering};

/// How long after a failure a pod is tried again.
pub const RETRY: Duration = Duration::from_secs(1);
/// How often a pod that was enrolled before it had an address is looked at, and for how long; then as after a failure.
const ADDRESS_POLL: (Duration, Duration) = (Duration::from_millis(10), Duration::from_secs(10));

/// Why a pod could not be enrolled.
#[derive(Debug, Error)]
pub enum EnrolError {
    /// It has no process by which its network namespace could be found.
    #[error("no process of it is in a network namespace of its own yet")]
    NoProcess,
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
    /// A pod is enrolled, and has these listeners; one set for each worker. Nothing more is taken by any that it had
    /// before; what is open goes on.
    fn listening(&self, pod: &Arc<LocalPod>, listeners: Vec<PodListeners>);
    /// The uids of pods of which a listener has been closed by somebody else, since this was last asked.
    fn take_broken(&self) -> HashSet<Arc<str>>;
    /// A pod has left the mesh, and lives on: nothing more is taken of it, what is open goes on.
    fn retired(&self, uid: &str);
    /// A pod is no more: what is open of it ends.
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
    pub(super) failed: HashMap<Arc<str>, String>,
    /// Pods of which something is not in its place, until it is again.
    pub(super) broken: HashMap<Arc<str>, Broken>,
    /// Pods whose network namespace could not be looked at.
    unseen: HashSet<Arc<str>>,
    /// Pods that have left the mesh and of which something may still be open.
    retired: HashSet<Arc<str>>,
    /// The cgroup of all pods.
    pods_cgroup: PathBuf,
    /// The inode of this process's own network namespace.
    host: u64,
}

pub(super) struct Enrolled {
    pub(super) workload: Arc<Workload>,
    /// The network namespace's.
    pub(super) cookie: u64,
    /// Whether there are listeners. Where not, all that the pod dials or is sent is refused.
    pub(super) served: bool,
    /// The addresses by which it is enrolled: those that the mesh knows and, where its namespace was found by its
    /// cgroup, those that it has.
    pub(super) addresses: Vec<IpAddr>,
    /// By which process its namespace was found, where it was.
    pub(super) found: Option<FoundNetns>,
    pub(super) since: Instant,
    /// How often its capture was found to be gone, and put right.
    pub(super) repairs: u32,
}

/// The pods that should be enrolled, by their uids.
type Wanted<'m> = HashMap<&'m Arc<str>, &'m Arc<Workload>>;

/// The pods of `node` that should be enrolled.
pub(super) fn wanted<'m>(node: &str, mesh: &'m Mesh) -> impl Iterator<Item = &'m Arc<Workload>> {
    mesh.local_workloads(node).filter(|workload| is_wanted(workload))
}

fn is_wanted(workload: &Workload) -> bool {
    workload.protocol == Protocol::Hbone && barred(workload).is_none()
}

impl Enrolment {
    /// Enrols pods of `node`, whose cgroups are below `pods_cgroup`, to be served by `server` with `workers` workers.
    pub fn new(
        node: &str,
        pods_cgroup: &Path,
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
            broken: HashMap::new(),
            unseen: HashSet::new(),
            retired: HashSet::new(),
            pods_cgroup: pods_cgroup.to_owned(),
            host: inode(Path::new("/proc/self/ns/net")).unwrap_or_default(),
        }
    }

    /// The node whose pods these are.
    pub fn node(&self) -> &str {
        &self.node
    }

    /// Makes the enrolled pods those that the mesh says. Returns when this is to be done again although the mesh has not
    /// changed and nothing was born.
    pub fn reconcile(&mut self, mesh: &Mesh) -> Option<Duration> {
        let wanted = self.wanted(mesh);
        self.failed.retain(|uid, _| wanted.contains_key(uid));
        self.unseen.retain(|uid| wanted.contains_key(uid));
        let (root, host) = (self.pods_cgroup.clone(), self.host);
        let cgroups = PodCgroups::new(&root, host);
        for workload in wanted.values() {
            let change = self.change(workload, &cgroups);
            if change != Change::None {
                self.try_add(workload, &wanted, &cgroups, change);
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
            self.leave(&uid, mesh, &cgroups);
        }
        let gone: Vec<Arc<str>> = self
            .retired
            .extract_if(|uid| mesh.workload_by_uid(uid).is_none())
            .collect();
        for uid in gone.iter().filter(|uid| !self.enrolled.contains_key(*uid)) {
            self.server.removed(uid);
        }
        let left = OnceCell::new();
        let swept = self.steering.sweep_adopted(|cookie| {
            let left = left.get_or_init(|| self.outside(mesh, &cgroups));
            self.unseen.is_empty() && left.as_ref().is_none_or(|left| left.contains(&cookie))
        });
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
        self.again(&wanted)
    }

    /// The namespaces of this node's pods that are listed and not in the mesh. None where all are that it does not list.
    fn outside(&self, mesh: &Mesh, cgroups: &PodCgroups<'_>) -> Option<HashSet<u64>> {
        let cookie = |workload: &Arc<Workload>| {
            let found = cgroups.netns(workload.cgroup_uid())?;
            let netns = Netns::open(&found.path).ok()?;
            (netns.inode() == found.inode).then(|| netns.cookie())
        };
        let outside = || mesh.local_workloads(&self.node).filter(|workload| !is_wanted(workload));
        (mesh.unlisted() == Unlisted::Awaited).then(|| outside().filter_map(cookie).collect())
    }

    /// When pods are to be looked at again.
    fn again(&self, wanted: &Wanted<'_>) -> Option<Duration> {
        let unaddressed = |pod: &Enrolled| pod.found.is_some() && pod.addresses.is_empty();
        let is_new = |pod: &Enrolled| pod.since.elapsed() < ADDRESS_POLL.1;
        let mut pods = self.enrolled.values();
        if pods.any(|pod| unaddressed(pod) && is_new(pod)) {
            return Some(ADDRESS_POLL.0);
        }
        let outlived = |(uid, pod): (&Arc<str>, &Enrolled)| !wanted.contains_key(uid) || unaddressed(pod);
        (!self.failed.is_empty() || self.enrolled.iter().any(outlived)).then_some(RETRY)
    }

    /// What has to be done about a pod that should be enrolled.
    fn change(&mut self, workload: &Arc<Workload>, cgroups: &PodCgroups<'_>) -> Change {
        let Some(pod) = self.enrolled.get_mut(&workload.uid) else {
            return Change::Anew;
        };
        let local = self.pods.get(&workload.uid);
        let (true, Some(local)) = (pod.served, local) else {
            return Change::Anew;
        };
        let moved = match &mut pod.found {
            None => local.netns().was_replaced(),
            Some(found) if inode(&found.path) == Some(found.inode) => false,
            // The process by which it was found has gone.
            Some(found) => match cgroups.netns(workload.cgroup_uid()) {
                Some(now) if now.inode == found.inode => {
                    *found = now;
                    false
                }
                now => now.is_some(),
            },
        };
        if moved {
            return Change::Anew;
        }
        match change(pod, workload) {
            Change::Exclusions => Change::Exclusions,
            // Those that it has are looked at as long as the mesh does not know them.
            Change::None if pod.found.is_none() || !workload.addresses.is_empty() => Change::None,
            Change::None | Change::Addresses => match local.netns().addresses() {
                Ok(inside) if with_addresses(workload, &inside).addresses != pod.addresses => Change::Addresses,
                _ => Change::None,
            },
            Change::Anew => Change::Anew,
        }
    }

    /// Whether the pod should be enrolled.
    pub(super) fn wants(&self, workload: &Workload) -> bool {
        *workload.node == *self.node && is_wanted(workload)
    }

    /// The pods that should be enrolled, by their uids.
    pub(super) fn wanted<'m>(&self, mesh: &'m Mesh) -> Wanted<'m> {
        wanted(&self.node, mesh)
            .map(|workload| (&workload.uid, workload))
            .collect()
    }

    fn try_add(&mut self, workload: &Arc<Workload>, wanted: &Wanted<'_>, cgroups: &PodCgroups<'_>, change: Change) {
        match self.add(workload, wanted, cgroups, change) {
            Ok(()) if change == Change::Addresses => drop(self.failed.remove(&workload.uid)),
            Ok(()) if change == Change::Exclusions => {
                tracing::info!(
                    "pod {}/{}: what it excludes has changed",
                    workload.namespace,
                    workload.name
                );
                self.failed.remove(&workload.uid);
            }
            // It is looked for again when it is born.
            Err(EnrolError::NoProcess) => {
                tracing::debug!("pod {}/{} has no process yet", workload.namespace, workload.name);
                self.failed.remove(&workload.uid);
            }
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

    /// Opens the pod's network namespace, and tells how it was found where the mesh does not say where it is.
    fn open(&self, workload: &Workload, cgroups: &PodCgroups<'_>) -> Result<(Netns, Option<FoundNetns>), EnrolError> {
        if let Some(path) = &workload.netns {
            return Ok((Netns::open(path)?, None));
        }
        let found = cgroups.netns(workload.cgroup_uid()).ok_or(EnrolError::NoProcess)?;
        match Netns::open(&found.path) {
            Ok(netns) if netns.inode() == found.inode => Ok((netns, Some(found))),
            // The process has gone in the meantime, or into another namespace.
            Ok(_) => Err(EnrolError::NoProcess),
            Err(_) if inode(&found.path) != Some(found.inode) => Err(EnrolError::NoProcess),
            Err(error) => Err(error.into()),
        }
    }

    fn add(
        &mut self,
        workload: &Arc<Workload>,
        wanted: &Wanted<'_>,
        cgroups: &PodCgroups<'_>,
        change: Change,
    ) -> Result<(), EnrolError> {
        let opened = self.open(workload, cgroups);
        // Of a pod without a process there is nothing that could be let go by mistake.
        if matches!(opened, Ok(_) | Err(EnrolError::NoProcess)) {
            self.unseen.remove(&workload.uid);
        } else {
            self.unseen.insert(Arc::clone(&workload.uid));
        }
        let (netns, found) = opened?;
        let workload = match &found {
            Some(_) => with_addresses(workload, &netns.addresses()?),
            None => Arc::clone(workload),
        };
        let workload = &workload;
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
            exclusions: workload.exclusions.as_deref(),
            kept: &CAPTURE_TEST,
            addresses: &workload.addresses,
            local_ports: made.as_ref().map_or([0, 0], |(local_ports, _)| *local_ports),
            listeners,
        })?;
        let now = Enrolled {
            workload: Arc::clone(workload),
            cookie,
            served: made.is_ok(),
            addresses: workload.addresses.clone(),
            found,
            since: Instant::now(),
            repairs: 0,
        };
        let before = self.enrolled.insert(Arc::clone(&workload.uid), now);
        if let Some(holder) = holder {
            self.remove(&holder);
        }
        if let Some(before) = before {
            if change == Change::Anew {
                self.server.removed(&workload.uid);
            }
            self.release_unless_held(before.cookie);
        }
        // Should it ever be let go, it is to be looked at anew.
        self.steering.namespaces().remove_other(cookie)?;
        let (local_ports, listeners) = made?;
        let pod = Arc::new(LocalPod::new(Arc::clone(workload), netns, local_ports, place, lease));
        self.pods.insert(&pod);
        self.server.listening(&pod, listeners);
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

    /// Lets go a pod that is not wanted any more.
    fn leave(&mut self, uid: &Arc<str>, mesh: &Mesh, cgroups: &PodCgroups<'_>) {
        let listed = mesh.workload_by_uid(uid);
        if listed.is_none() && mesh.unlisted() == Unlisted::Awaited && self.is_alive(uid, cgroups) {
            // It was deleted without waiting for its end: what is left of it gets no way around.
            self.stop_serving(uid);
            return;
        }
        if listed.is_some() || mesh.unlisted() == Unlisted::Outside {
            self.set_free(uid);
        }
        if listed.is_some() {
            self.let_go(uid);
            self.server.retired(uid);
            self.retired.insert(Arc::clone(uid));
        } else {
            self.remove(uid);
        }
    }

    /// Whether a process is left of a pod that was found by its cgroup.
    fn is_alive(&self, uid: &str, cgroups: &PodCgroups<'_>) -> bool {
        let pod = self.enrolled.get(uid).filter(|pod| pod.found.is_some());
        pod.is_some_and(|pod| cgroups.netns(pod.workload.cgroup_uid()).is_some())
    }

    /// Steers the pod no more. Established connections are not touched.
    fn let_go(&mut self, uid: &str) {
        if let Some(pod) = self.enrolled.remove(uid) {
            tracing::info!("pod {}/{} has left", pod.workload.namespace, pod.workload.name);
            self.release_unless_held(pod.cookie);
            self.pods.remove(uid);
        }
    }

    fn remove(&mut self, uid: &str) {
        self.let_go(uid);
        self.server.removed(uid);
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
