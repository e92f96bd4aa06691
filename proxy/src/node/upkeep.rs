//! What the enrolled pods need while nothing about them changes: that they stay captured, whatever is done to programs
//! and pins, and that they are handed over and taken back.

use std::collections::BTreeSet;
use std::os::fd::AsFd as _;
use std::sync::Arc;

use super::capture_test::CAPTURE_TEST;
use super::change::{Change, change};
use super::enrol::{Enrolled, first_of, wanted};
use super::{EnrolError, Enrolment, LocalPod, listen_in};
use crate::identity::SpiffeId;
use crate::mesh::{Mesh, SameNode};
use crate::steer::PodSteering;

/// The identities of the pods of `node` that should be enrolled.
pub fn wanted_identities(node: &str, mesh: &Mesh) -> BTreeSet<SpiffeId> {
    wanted(node, mesh).map(|workload| workload.identity.clone()).collect()
}

/// What of an enrolled pod has to be put right.
#[derive(Debug, Clone, Copy)]
pub(super) enum Broken {
    Listeners,
    Capture,
}

impl Enrolment {
    /// Looks whether all that captures pods is in its place, and puts right what is not. Returns what was not, in words.
    ///
    /// # Errors
    ///
    /// Something could not be put right.
    pub fn check(&mut self) -> Result<Vec<String>, EnrolError> {
        let repairs = self.steering.repair()?;
        let mut done = repairs.done;
        // A privileged process of the pod can close any socket of its namespace, the proxy's listeners too.
        let closed = self.server.take_broken().into_iter();
        self.broken.extend(closed.map(|uid| (uid, Broken::Listeners)));
        let of_cookie = |pod: &Enrolled| repairs.pods.contains(&pod.cookie);
        let uncaptured = self.enrolled.iter().filter(|(_, pod)| of_cookie(pod));
        self.broken
            .extend(uncaptured.map(|(uid, _)| (Arc::clone(uid), Broken::Capture)));
        let mut failed = None;
        for (uid, what) in std::mem::take(&mut self.broken) {
            match self.put_right(&uid) {
                Ok(None) => {}
                Ok(Some(name)) => done.push(match what {
                    Broken::Listeners => format!("somebody closed listeners of pod {name}"),
                    Broken::Capture => format!("pod {name} was not captured"),
                }),
                Err(error) => {
                    self.broken.insert(uid, what);
                    failed.get_or_insert(error);
                }
            }
        }
        match failed {
            Some(error) => Err(error),
            None => Ok(done),
        }
    }

    /// Captures the pod anew, which is to be enrolled; gives its name.
    fn put_right(&mut self, uid: &str) -> Result<Option<String>, EnrolError> {
        let Some(pod) = self.pods.get(uid) else { return Ok(None) };
        self.listen_anew(&pod)?;
        let Some(enrolled) = self.enrolled.get_mut(uid) else {
            return Ok(None);
        };
        enrolled.repairs += 1;
        let workload = &enrolled.workload;
        Ok(Some(format!("{}/{}", workload.namespace, workload.name)))
    }

    /// Takes back what a successor may have taken that did not get as far as to serve.
    pub fn reclaim(&self) -> Result<(), EnrolError> {
        self.steering.repair()?;
        self.steering.reread_exclusions()?;
        for uid in self.enrolled.keys() {
            if let Some(pod) = self.pods.get(uid) {
                self.listen_anew(&pod)?;
            }
        }
        Ok(())
    }

    /// Ends what is open of pods that are no more, or are not what they were. For a proxy that has handed over: maps and
    /// pins are its successor's.
    pub fn end_departed(&mut self, mesh: &Mesh) {
        self.enrolled.retain(|uid, pod| {
            let now = mesh.workload_by_uid(uid);
            let stays = now.is_some_and(|workload| change(pod, workload) != Change::Anew);
            if !stays {
                self.pods.remove(uid);
                self.server.removed(uid);
            }
            stays
        });
    }

    /// Gives the pod new listeners, and attaches it to them.
    fn listen_anew(&self, pod: &Arc<LocalPod>) -> Result<(), EnrolError> {
        let listeners = listen_in(pod.netns(), self.workers)?;
        let workload = pod.workload();
        self.steering.attach_pod(&PodSteering {
            namespace: &workload.namespace,
            name: &workload.name,
            netns: pod.netns().as_fd(),
            cookie: pod.netns().cookie(),
            identity: Some(pod.identity()),
            same_node_encrypted: workload.same_node == SameNode::Encrypted,
            exclusions: workload.exclusions.as_deref(),
            kept: &CAPTURE_TEST,
            addresses: &workload.addresses,
            local_ports: pod.local_ports(),
            listeners: first_of(&listeners),
        })?;
        self.server.listening(pod, listeners);
        Ok(())
    }
}
