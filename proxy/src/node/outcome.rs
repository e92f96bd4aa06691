//! How the pods of this node stand, for whoever asks.

use std::sync::{Arc, Mutex, PoisonError};

use serde::Serialize;

use super::{Capture, PodStanding};

/// How a pod stands to the mesh, in words.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Outcome {
    /// The pod's unique name for life.
    pub uid: Arc<str>,
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// `captured`, `enrolled` where the test has not ended yet, `waiting`, `failed`, `barred` or `outside`.
    pub capture: &'static str,
    /// Why it is not captured, where there is something to say.
    pub reason: Option<String>,
    /// The identity that it speaks as, where it is enrolled.
    pub identity: Option<String>,
}

impl Outcome {
    /// All that [`Outcome::capture`] may say.
    pub const CAPTURES: [&str; 6] = ["captured", "enrolled", "waiting", "failed", "barred", "outside"];

    /// That of a pod that stands so, where `tested` tells how the last test of its enrolment ended.
    pub fn of(standing: &PodStanding, tested: Option<&Result<(), String>>) -> Self {
        let (capture, reason) = match (&standing.capture, tested) {
            (Capture::Enrolled(_), Some(Ok(()))) => ("captured", None),
            (Capture::Enrolled(_), Some(Err(error))) => ("failed", Some(error.clone())),
            (Capture::Enrolled(_), None) => ("enrolled", None),
            (Capture::Waiting, _) => ("waiting", None),
            (Capture::Failed(error), _) => ("failed", Some(error.clone())),
            (Capture::Barred(bar), _) => ("barred", Some(bar.to_string())),
            (Capture::Outside, _) => ("outside", None),
        };
        let identity = match &standing.capture {
            Capture::Enrolled(pod) => Some(pod.identity().to_string()),
            _ => None,
        };
        let workload = &standing.workload;
        Self {
            uid: Arc::clone(&workload.uid),
            namespace: workload.namespace.to_string(),
            name: workload.name.to_string(),
            capture,
            reason,
            identity,
        }
    }
}

/// How all pods of this node stand; clones show the same.
#[derive(Debug, Clone, Default)]
pub struct Outcomes(Arc<Mutex<Arc<Vec<Outcome>>>>);

impl Outcomes {
    /// As it was told last.
    pub fn all(&self) -> Arc<Vec<Outcome>> {
        Arc::clone(&self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub(super) fn set(&self, outcomes: Vec<Outcome>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Arc::new(outcomes);
    }
}
