//! The condition `mesh.adit/Captured`: what it says follows from how a pod stands.

use std::sync::Arc;

use super::{Bar, Enrolment, LocalPod, barred};
use crate::mesh::{Captured, Mesh, Workload};

/// A pod of this node, and how it stands.
#[derive(Clone)]
pub struct PodStanding {
    /// The pod as the mesh has it.
    pub workload: Arc<Workload>,
    /// How it stands.
    pub capture: Capture,
    /// How often its capture was found to be gone, and put right, since it was enrolled.
    pub repairs: u32,
}

/// How a pod stands to the mesh.
#[derive(Clone)]
pub enum Capture {
    /// It is enrolled; whether its connections are captured, a test tells.
    Enrolled(Arc<LocalPod>),
    /// It is to be enrolled as soon as it has a process and an address.
    Waiting,
    /// It could not be enrolled, and why.
    Failed(String),
    /// It is wanted in the mesh by its labels, and is never enrolled.
    Barred(Bar),
    /// It is not wanted in the mesh.
    Outside,
}

/// What the pod's condition is to be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Wanted {
    /// As it is: it is not known yet.
    Undecided,
    /// There is to be none.
    None,
    /// This.
    Condition(Captured),
}

impl Enrolment {
    /// How the pods of this node stand that the mesh lists.
    pub fn standings(&self, mesh: &Mesh) -> Vec<PodStanding> {
        let all = mesh.local_workloads(self.node());
        all.map(|workload| PodStanding {
            workload: Arc::clone(workload),
            capture: self.capture(workload),
            repairs: self.enrolled.get(&workload.uid).map_or(0, |pod| pod.repairs),
        })
        .collect()
    }

    fn capture(&self, workload: &Workload) -> Capture {
        let uid = &workload.uid;
        if let Some(reason) = self.failed.get(uid) {
            return Capture::Failed(reason.clone());
        }
        if let Some(bar) = barred(workload) {
            return Capture::Barred(bar);
        }
        match self.pods.get(uid) {
            Some(pod) if !pod.workload().addresses.is_empty() => Capture::Enrolled(pod),
            None if !self.wants(workload) => Capture::Outside,
            _ => Capture::Waiting,
        }
    }
}

/// What the condition is to be of a pod that stands so, where `tested` tells how its last test ended.
pub fn condition(capture: &Capture, tested: Option<&Result<(), String>>, is: Option<&Captured>) -> Wanted {
    let says = |status, reason: &str, message: String| {
        Wanted::Condition(Captured {
            status,
            reason: reason.to_owned(),
            message,
        })
    };
    match (capture, tested) {
        (Capture::Enrolled(pod), Some(Ok(()))) => {
            let message = format!(
                "a test connection from within the pod was captured; it speaks as {}",
                pod.identity()
            );
            says(true, "Captured", message)
        }
        (Capture::Enrolled(_), Some(Err(error))) => says(false, "SelfTestFailed", error.clone()),
        (Capture::Failed(reason), _) => says(false, "EnrolmentFailed", reason.clone()),
        // It was captured once, and nothing is left of that.
        (Capture::Waiting, _) if is.is_some_and(|is| is.status) => {
            let message = "the pod has no process or no address in a network namespace of its own".to_owned();
            says(false, "NoNetworkNamespace", message)
        }
        (Capture::Enrolled(_), None) | (Capture::Waiting, _) => Wanted::Undecided,
        (Capture::Barred(_) | Capture::Outside, _) => Wanted::None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_condition_is_false_where_capture_failed_or_was_lost_and_gone_with_the_mesh() {
        let captured = Captured {
            status: true,
            reason: "Captured".to_owned(),
            message: String::new(),
        };
        let reason = |capture: &Capture, is: Option<&Captured>| match condition(capture, None, is) {
            Wanted::Condition(condition) if !condition.status => condition.reason,
            Wanted::Condition(_) => "true".to_owned(),
            Wanted::None => "none".to_owned(),
            Wanted::Undecided => "undecided".to_owned(),
        };
        for (capture, is, expected) in [
            (Capture::Waiting, None, "undecided"),
            (Capture::Waiting, Some(&captured), "NoNetworkNamespace"),
            (Capture::Failed("no".to_owned()), Some(&captured), "EnrolmentFailed"),
            (Capture::Barred(Bar::HostNetwork), None, "none"),
            (Capture::Outside, Some(&captured), "none"),
        ] {
            assert_eq!(reason(&capture, is), expected);
        }
    }
}
