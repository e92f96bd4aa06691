//! One identity of the store: its certificate and the task that keeps it fresh.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use arc_swap::ArcSwapOption;
use tokio::sync::{Notify, watch};
use tokio::task::AbortHandle;
use tokio::time::Instant;

use super::queue::{Ended, Priority};
use super::schedule::{apart, refresh_after, retry_after};
use super::store::Shared;
use super::{BoxFuture, CallOutcome, Certificate, IdentityState, IdentityStatus, IssueError, Issued, SpiffeId};

/// While a connection waits for the identity, the CA is asked at most this often.
const DEMAND_INTERVAL: Duration = Duration::from_secs(1);
/// Within this time all identities are asked for anew whose certificates rest on what is distrusted or revoked since.
const DISTRUSTED_SPREAD: Duration = Duration::from_secs(2);

pub(super) struct Entry {
    pub(super) id: SpiffeId,
    /// Changed only under the store's lock.
    pub(super) leases: AtomicUsize,
    current: ArcSwapOption<Certificate>,
    progress: Mutex<Progress>,
    /// Connections waiting in `CertStore::get`.
    waiters: AtomicUsize,
    demand: Notify,
    /// Counts attempts; moves once more when the identity is forgotten.
    attempts: watch::Sender<u64>,
    task: Mutex<Option<AbortHandle>>,
}

#[derive(Default)]
struct Progress {
    failures: u32,
    last_error: Option<Arc<IssueError>>,
    next_attempt: Option<SystemTime>,
}

/// A connection that waits; counted while it exists.
pub(super) struct Waiter<'a>(&'a Entry);

impl Drop for Waiter<'_> {
    fn drop(&mut self) {
        self.0.waiters.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Entry {
    pub(super) fn start(id: SpiffeId, shared: Arc<Shared>) -> Arc<Self> {
        let entry = Arc::new(Self {
            id,
            leases: AtomicUsize::new(1),
            current: ArcSwapOption::empty(),
            progress: Mutex::default(),
            waiters: AtomicUsize::new(0),
            demand: Notify::new(),
            attempts: watch::Sender::new(0),
            task: Mutex::new(None),
        });
        let runtime = shared.runtime.clone();
        let task = runtime.spawn(keep_fresh(entry.clone(), shared));
        *lock(&entry.task) = Some(task.abort_handle());
        entry
    }

    /// The certificate, if it is valid at `now`.
    pub(super) fn valid_at(&self, now: SystemTime) -> Option<Arc<Certificate>> {
        self.current
            .load_full()
            .filter(|certificate| certificate.is_valid_at(now))
    }

    /// Registers a waiting connection and asks for an attempt at once.
    pub(super) fn wait(&self) -> Waiter<'_> {
        self.waiters.fetch_add(1, Ordering::AcqRel);
        self.demand.notify_one();
        Waiter(self)
    }

    /// Told of each attempt's end.
    pub(super) fn attempts(&self) -> watch::Receiver<u64> {
        self.attempts.subscribe()
    }

    pub(super) fn last_error(&self) -> Option<Arc<IssueError>> {
        lock(&self.progress).last_error.clone()
    }

    /// Ends the task, and with it a call in flight, and lets go of the certificate.
    pub(super) fn stop(&self) {
        if let Some(task) = lock(&self.task).take() {
            task.abort();
        }
        self.current.store(None);
        self.attempts.send_modify(|count| *count += 1);
    }

    pub(super) fn status(&self, now: SystemTime) -> IdentityStatus {
        let current = self.current.load_full();
        let progress = lock(&self.progress);
        let state = match &current {
            Some(certificate) if !certificate.is_valid_at(now) => IdentityState::Expired,
            Some(_) if progress.last_error.is_some() => IdentityState::Stale,
            Some(_) => IdentityState::Valid,
            None if progress.last_error.is_some() => IdentityState::Failed,
            None => IdentityState::Pending,
        };
        IdentityStatus {
            id: self.id.clone(),
            state,
            serial: current.as_ref().map(|certificate| certificate.serial().clone()),
            issuer: current.as_ref().map(|certificate| certificate.issuer().clone()),
            root: current.as_ref().map(|certificate| certificate.root().clone()),
            not_before: current.as_ref().map(|certificate| certificate.not_before()),
            not_after: current.as_ref().map(|certificate| certificate.not_after()),
            next_attempt: progress.next_attempt,
            failures: progress.failures,
            last_error: progress.last_error.as_ref().map(|error| error.to_string()),
            pods: self.leases.load(Ordering::Acquire),
        }
    }

    fn is_demanded(&self) -> bool {
        self.waiters.load(Ordering::Acquire) > 0
    }

    /// Waits until a connection waits.
    async fn demanded(&self) {
        while !self.is_demanded() {
            self.demand.notified().await;
        }
    }

    fn priority(&self, shared: &Shared) -> Priority {
        if self.is_demanded() {
            Priority::Waiting
        } else if self.valid_at(shared.now()).is_none() {
            Priority::Enrolled
        } else {
            Priority::Renewal
        }
    }
}

/// When the next call is due.
#[derive(Debug, Clone, Copy)]
enum Next {
    /// When so much of the life of the certificate in force is over, by the wall clock. `random` is the jitter.
    Refresh { random: f64 },
    /// Then, after a failure.
    Retry(Instant),
}

/// Fetches, then refreshes until the identity is forgotten. Ended by `Entry::stop`; being cancelled at any
/// point leaves nothing behind.
async fn keep_fresh(entry: Arc<Entry>, shared: Arc<Shared>) {
    let mut steps = shared.steps.subscribe();
    let mut tried = None;
    loop {
        let turn = shared.gate.turn(entry.priority(&shared), tried, entry.demanded()).await;
        let started = Instant::now();
        let result = shared.call(&entry.id).await;
        let ended = match &result {
            Err(error) if error.is_outage() => Ended::Away,
            // It was never asked.
            Err(error) if error.outcome() == CallOutcome::Local => Ended::Abandoned,
            _ => Ended::Answered,
        };
        turn.end(ended);
        tried = (ended == Ended::Away).then(Instant::now);
        let (result, changed) = match result {
            Ok(Issued { certificate, changed }) => (Ok(certificate), changed),
            Err(error) => (Err(error), Box::pin(std::future::pending()) as BoxFuture<'static, ()>),
        };
        let next = settle(&entry, &shared, result);
        entry.attempts.send_modify(|count| *count += 1);
        tokio::select! {
            () = pause(&entry, &shared, started, next, &mut steps) => {}
            // The source says so.
            () = changed => tokio::time::sleep_until(started + DEMAND_INTERVAL).await,
        }
        lock(&entry.progress).next_attempt = None;
    }
}

/// Takes in the result of an attempt and says when the next is due.
fn settle(entry: &Entry, shared: &Shared, result: Result<Certificate, IssueError>) -> Next {
    let now = shared.now();
    let random = (shared.settings.random)();
    let mut progress = lock(&entry.progress);
    match result {
        Ok(certificate) => {
            let valid_for = certificate.not_after().duration_since(now).unwrap_or_default();
            tracing::info!(
                identity = %entry.id, serial = %certificate.serial(), valid_for_s = valid_for.as_secs(),
                "certificate issued"
            );
            entry.current.store(Some(Arc::new(certificate)));
            *progress = Progress::default();
            Next::Refresh { random }
        }
        Err(error) => {
            progress.failures = progress.failures.saturating_add(1);
            let left = entry
                .valid_at(now)
                .and_then(|certificate| certificate.not_after().duration_since(now).ok());
            let pause = retry_after(progress.failures, error.is_outage(), left, random);
            // An outage of hours is not to fill the log.
            if progress.failures.is_power_of_two() {
                tracing::warn!(
                    identity = %entry.id, failures = progress.failures, retry_in_s = pause.as_secs_f32(),
                    valid_for_s = left.map(|left| left.as_secs()), %error,
                    "no certificate issued"
                );
            }
            progress.last_error = Some(Arc::new(error));
            Next::Retry(Instant::now() + pause)
        }
    }
}

/// Sleeps until the next attempt is due, or sooner if a connection waits for the identity. After a step of the wall clock
/// what is due is decided anew: a refresh by the certificate's life, and what failed is tried again, as the clock may
/// have been why.
async fn pause(entry: &Entry, shared: &Shared, started: Instant, next: Next, steps: &mut watch::Receiver<u64>) {
    steps.mark_unchanged();
    let mut distrusted = shared.settings.trust.changes();
    let mut stepped = false;
    loop {
        let due = match next {
            Next::Retry(_) if stepped => return,
            Next::Retry(at) => at,
            Next::Refresh { random } => {
                let Some(certificate) = entry.current.load_full() else {
                    return;
                };
                let now = shared.now();
                let due = refresh_after(certificate.not_before(), certificate.not_after(), now, random);
                let left = certificate.not_after().duration_since(now).unwrap_or_default();
                Instant::now()
                    + match certificate.is_trusted() {
                        false => DISTRUSTED_SPREAD.mul_f64(random.clamp(0.0, 1.0)),
                        true if stepped => due,
                        true => due.max(apart(left)),
                    }
            }
        };
        lock(&entry.progress).next_attempt = shared.now().checked_add(due - Instant::now());
        let demanded = async {
            loop {
                entry.demanded().await;
                tokio::time::sleep_until(started + DEMAND_INTERVAL).await;
                if entry.is_demanded() && entry.valid_at(shared.now()).is_none() {
                    break;
                }
                entry.demand.notified().await;
            }
        };
        tokio::select! {
            () = tokio::time::sleep_until(due) => return,
            () = demanded => return,
            // The sender lives as long as `shared`.
            _ = steps.changed() => stepped = true,
            _ = distrusted.changed() => {}
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What is guarded stays whole even if a holder panicked.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
