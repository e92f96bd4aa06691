//! What becomes of pods, told to whom it concerns: each enrolment is tested, and its outcome written to the pod's status.

use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::{JoinSet, spawn_blocking};
use tokio::time::{Instant, sleep_until};

use super::condition::{Capture, PodStanding, Wanted, condition};
use super::outcome::{Outcome, Outcomes};
use super::pod_status::{PodStatus, WriteError};
use super::{CaptureTests, LocalPod};
use crate::mesh::{Captured, Workload};

/// How many tests are under way at a time.
const TESTS: usize = 2;
/// How many writes are under way at a time.
const WRITES: usize = 8;
/// After how long a test that failed is made again.
const RETEST: Duration = Duration::from_secs(5);
/// How long writing pauses after the API could not be reached or has refused, at first and at most.
const PAUSE: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(30));

/// How the pods of this node stand, as who enrols them tells it.
pub type Standings = watch::Receiver<Arc<Vec<PodStanding>>>;

/// Who is told what goes wrong with a pod: in a word, and in words.
pub type Complain = Box<dyn Fn(&Workload, &'static str, &str) + Send + Sync>;

/// Tests pods and tells how they stand.
pub struct Report {
    tests: CaptureTests,
    pods_cgroup: PathBuf,
    /// None where there is no API to write to.
    status: Option<Arc<PodStatus>>,
    complain: Complain,
    outcomes: Outcomes,
    /// How the last test of each pod ended, and of which of its enrolments it was.
    tested: HashMap<Arc<str>, Tested>,
    testing: HashSet<Arc<str>>,
    /// What was written last, which the mesh may not know yet.
    written: HashMap<Arc<str>, Option<Captured>>,
    writing: HashSet<Arc<str>>,
    /// What was complained of last.
    complaints: HashMap<Arc<str>, Vec<Complaint>>,
    pause: Duration,
    resume: Instant,
    last_error: Option<String>,
}

struct Tested {
    pod: Arc<LocalPod>,
    /// After how many repairs.
    repairs: u32,
    result: Result<(), String>,
    at: Instant,
}

/// What is wrong: in a word, and in words.
type Complaint = (&'static str, String);
type TestEnd = (Arc<LocalPod>, u32, Result<(), String>);
type WriteEnd = (Arc<Workload>, Option<Captured>, Result<(), WriteError>);

impl Report {
    /// Tests by `tests`, below `pods_cgroup`.
    pub fn new(tests: CaptureTests, pods_cgroup: PathBuf, status: Option<PodStatus>, complain: Complain) -> Self {
        Self {
            tests,
            pods_cgroup,
            status: status.map(Arc::new),
            complain,
            outcomes: Outcomes::default(),
            tested: HashMap::new(),
            testing: HashSet::new(),
            written: HashMap::new(),
            writing: HashSet::new(),
            complaints: HashMap::new(),
            pause: PAUSE.0,
            resume: Instant::now(),
            last_error: None,
        }
    }

    /// Shows how pods stand, and how their last tests ended, in `outcomes` too.
    #[must_use]
    pub fn showing(mut self, outcomes: Outcomes) -> Self {
        self.outcomes = outcomes;
        self
    }

    /// Follows how pods stand until nobody tells it any more. Cancelling leaves conditions as they are.
    pub async fn follow(mut self, mut standings: Standings) {
        let mut testing: JoinSet<TestEnd> = JoinSet::new();
        let mut writing: JoinSet<WriteEnd> = JoinSet::new();
        loop {
            let now = Arc::clone(&standings.borrow_and_update());
            self.forget(&now);
            let mut next = Instant::now() + RETEST;
            for standing in now.iter() {
                self.test(standing, &mut testing, &mut next);
                self.tell(standing, &mut writing, &mut next);
            }
            let outcomes = now.iter().map(|standing| Outcome::of(standing, self.result(standing)));
            self.outcomes.set(outcomes.collect());
            tokio::select! {
                changed = standings.changed() => if changed.is_err() {
                    return;
                },
                Some(Ok((pod, repairs, result))) = testing.join_next() => self.note_test(pod, repairs, result),
                Some(Ok((workload, condition, result))) = writing.join_next() => self.note_write(&workload, condition, result),
                () = sleep_until(next), if !self.idle(&now) => {}
            }
        }
    }

    /// Whether there is nothing to be done again by itself.
    fn idle(&self, now: &[PodStanding]) -> bool {
        let failed = |standing: &PodStanding| {
            matches!(standing.capture, Capture::Enrolled(_)) && !matches!(self.result(standing), Some(Ok(())))
        };
        Instant::now() >= self.resume && !now.iter().any(failed)
    }

    fn forget(&mut self, now: &[PodStanding]) {
        let listed: HashSet<&Arc<str>> = now.iter().map(|standing| &standing.workload.uid).collect();
        self.tested.retain(|uid, _| listed.contains(uid));
        self.written.retain(|uid, _| listed.contains(uid));
        self.complaints.retain(|uid, _| listed.contains(uid));
    }

    /// How the test of the enrolment that the pod has now ended.
    fn result(&self, standing: &PodStanding) -> Option<&Result<(), String>> {
        let Capture::Enrolled(pod) = &standing.capture else {
            return None;
        };
        let tested = self.tested.get(&standing.workload.uid)?;
        (Arc::ptr_eq(&tested.pod, pod) && tested.repairs == standing.repairs).then_some(&tested.result)
    }

    fn test(&mut self, standing: &PodStanding, tests: &mut JoinSet<TestEnd>, next: &mut Instant) {
        let Capture::Enrolled(pod) = &standing.capture else {
            return;
        };
        let due = match self.result(standing) {
            Some(Ok(())) => return,
            Some(Err(_)) => self.tested.get(pod.uid()).map(|tested| tested.at + RETEST),
            None => None,
        };
        if let Some(due) = due.filter(|due| *due > Instant::now()) {
            *next = due.min(*next);
            return;
        }
        if self.testing.len() >= TESTS || !self.testing.insert(Arc::clone(pod.uid())) {
            return;
        }
        let (tests_under_way, pods_cgroup, pod) = (self.tests.clone(), self.pods_cgroup.clone(), Arc::clone(pod));
        let repairs = standing.repairs;
        tests.spawn(async move {
            let tested = Arc::clone(&pod);
            let run = move || {
                tests_under_way
                    .run(&pods_cgroup, &tested)
                    .map_err(|error| error.to_string())
            };
            let result = spawn_blocking(run).await;
            (pod, repairs, result.unwrap_or_else(|error| Err(error.to_string())))
        });
    }

    fn note_test(&mut self, pod: Arc<LocalPod>, repairs: u32, result: Result<(), String>) {
        self.testing.remove(pod.uid());
        let name = format!("{}/{}", pod.workload().namespace, pod.workload().name);
        match &result {
            Ok(()) => tracing::debug!("pod {name} is captured"),
            Err(error) => tracing::warn!("pod {name}: {error}"),
        }
        let uid = Arc::clone(pod.uid());
        let at = Instant::now();
        let tested = Tested {
            pod,
            repairs,
            result,
            at,
        };
        self.tested.insert(uid, tested);
    }

    /// Writes the pod's condition, if it is another than the API has, and complains of what is wrong, once.
    fn tell(&mut self, standing: &PodStanding, writes: &mut JoinSet<WriteEnd>, next: &mut Instant) {
        let workload = &standing.workload;
        self.complain_of(standing);
        let (Some(status), Some(details)) = (&self.status, &workload.pod) else {
            return;
        };
        let is = match self.written.get(&workload.uid) {
            Some(written) => written.as_ref(),
            None => details.captured.as_ref(),
        };
        let to_be = match condition(&standing.capture, self.result(standing), is) {
            Wanted::Undecided => return,
            Wanted::None => None,
            Wanted::Condition(condition) => Some(condition),
        };
        if to_be.as_ref() == is || self.writing.contains(&workload.uid) {
            return;
        }
        if Instant::now() < self.resume {
            *next = self.resume.min(*next);
            return;
        }
        if self.writing.len() >= WRITES {
            return;
        }
        let turns = is.map(|is| is.status) != to_be.as_ref().map(|to_be| to_be.status);
        self.writing.insert(Arc::clone(&workload.uid));
        let (status, workload) = (Arc::clone(status), Arc::clone(workload));
        writes.spawn(async move {
            let result = status.write(&workload, to_be.as_ref(), turns).await;
            (workload, to_be, result)
        });
    }

    fn note_write(&mut self, workload: &Workload, condition: Option<Captured>, result: Result<(), WriteError>) {
        self.writing.remove(&workload.uid);
        match result {
            // Of a pod that is no more there is nothing to be told.
            Ok(()) | Err(WriteError::Gone) => {
                self.written.insert(Arc::clone(&workload.uid), condition);
                self.pause = PAUSE.0;
                if self.last_error.take().is_some() {
                    tracing::info!("the conditions of pods can be written again");
                }
            }
            Err(WriteError::Api(error)) => {
                let text = error.to_string();
                if self.last_error.as_ref() != Some(&text) {
                    tracing::warn!("{text}; trying again");
                    self.last_error = Some(text);
                }
                self.resume = Instant::now() + self.pause.mul_f64(0.5 + fastrand::f64());
                self.pause = (self.pause * 2).min(PAUSE.1);
            }
        }
    }

    fn complain_of(&mut self, standing: &PodStanding) {
        let workload = &standing.workload;
        let now = complaints(standing, self.result(standing));
        let before = self.complaints.get(&workload.uid);
        for complaint in &now {
            if before.is_none_or(|before| !before.contains(complaint)) {
                let (reason, text) = complaint;
                (self.complain)(workload, reason, text);
            }
        }
        match now.is_empty() {
            true => drop(self.complaints.remove(&workload.uid)),
            false => drop(self.complaints.insert(Arc::clone(&workload.uid), now)),
        }
    }
}

/// What is wrong with a pod that stands so, where `tested` tells how its last test ended.
fn complaints(standing: &PodStanding, tested: Option<&Result<(), String>>) -> Vec<Complaint> {
    let of_capture = match (&standing.capture, tested) {
        (Capture::Failed(text), _) => Some(("EnrolmentFailed", text.clone())),
        (Capture::Barred(bar), _) => Some((bar.reason(), bar.to_string())),
        (Capture::Enrolled(_), Some(Err(text))) => Some(("SelfTestFailed", text.clone())),
        _ => None,
    };
    // What annotations say matters where the pod is captured, or is to be. All in one: of events about one thing the last
    // stands for all.
    let faults = standing.workload.pod.as_ref().map(|pod| pod.faults.join("; "));
    let of_annotations = faults
        .filter(|text| !text.is_empty() && !matches!(standing.capture, Capture::Barred(_) | Capture::Outside))
        .map(|text| ("InvalidAnnotation", text));
    let of_repairs = (standing.repairs > 0).then(|| {
        let text = format!(
            "something in the pod or on its node took its capture away; it has been put right, for the {}. time",
            standing.repairs
        );
        ("CaptureLost", text)
    });
    of_capture.into_iter().chain(of_repairs).chain(of_annotations).collect()
}

#[cfg(test)]
mod tests {
    use super::super::Bar;
    use super::*;
    use crate::mesh::{PodDetails, test_workload};

    #[test]
    fn bad_annotations_are_complained_of_where_they_matter_beside_what_else_is_wrong() {
        let reasons = |capture: Capture, faults: &[&str]| {
            let mut workload = test_workload("shop", "cart", "10.0.0.1");
            workload.pod = Some(Arc::new(PodDetails {
                faults: faults.iter().map(|fault| (*fault).to_owned()).collect(),
                ..PodDetails::default()
            }));
            let workload = Arc::new(workload);
            let standing = PodStanding {
                workload,
                capture,
                repairs: 0,
            };
            complaints(&standing, None)
        };
        let invalid = ("InvalidAnnotation", "a; b".to_owned());
        let failed = ("EnrolmentFailed", "no".to_owned());
        assert_eq!(reasons(Capture::Waiting, &["a", "b"]), std::slice::from_ref(&invalid));
        assert_eq!(
            reasons(Capture::Failed("no".to_owned()), &["a", "b"]),
            [failed, invalid]
        );
        assert_eq!(reasons(Capture::Waiting, &[]), []);
        assert_eq!(reasons(Capture::Outside, &["a"]), []);
        assert_eq!(reasons(Capture::Barred(Bar::HostNetwork), &["a"])[0].0, "HostNetwork");
    }
}
