//! One identity of the store: its certificate and the task that keeps it fresh.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use arc_swap::ArcSwapOption;
use tokio::sync::{Notify, SemaphorePermit, watch};
use tokio::task::AbortHandle;
use tokio::time::Instant;

use super::store::Shared;
use super::{Certificate, IdentityState, IdentityStatus, IssueError, SpiffeId, backoff, refresh_after};

/// While a connection waits for the identity, the CA is asked at most this often.
const DEMAND_INTERVAL: Duration = Duration::from_secs(1);
/// After an outage is seen to be over, the identities that met it try again within this time.
const RECOVERY_SPREAD: Duration = Duration::from_secs(2);

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
    pub(super) fn wait(&self) -> (Waiter<'_>, watch::Receiver<u64>) {
        self.waiters.fetch_add(1, Ordering::AcqRel);
        let attempts = self.attempts.subscribe();
        self.demand.notify_one();
        (Waiter(self), attempts)
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
}

/// Fetches, then refreshes until the identity is forgotten. Ended by `Entry::stop`; being cancelled at any
/// point leaves nothing behind.
async fn keep_fresh(entry: Arc<Entry>, shared: Arc<Shared>) {
    loop {
        let permit = turn(&entry, &shared).await;
        let started = Instant::now();
        let result = shared.call(&entry.id).await;
        drop(permit);
        let outage = result.as_ref().is_err_and(IssueError::is_outage);
        let pause = settle(&entry, &shared, result);
        entry.attempts.send_modify(|count| *count += 1);
        pause_before_next(&entry, &shared, started, pause, outage).await;
        lock(&entry.progress).next_attempt = None;
    }
}

/// Waits for a turn among the calls in flight. Some turns are kept for identities that connections wait for.
async fn turn<'a>(entry: &Entry, shared: &'a Shared) -> Option<SemaphorePermit<'a>> {
    let demanded = async {
        while !entry.is_demanded() {
            entry.demand.notified().await;
        }
        shared.reserved.acquire().await
    };
    tokio::select! {
        biased;
        permit = shared.turns.acquire() => permit.ok(),
        permit = demanded => permit.ok(),
    }
}

/// Takes in the result of an attempt and says how long to pause.
fn settle(entry: &Entry, shared: &Shared, result: Result<Certificate, IssueError>) -> Duration {
    let now = (shared.settings.now)();
    let random = (shared.settings.random)();
    let mut progress = lock(&entry.progress);
    let pause = match result {
        Ok(certificate) => {
            let pause = refresh_after(certificate.not_before(), certificate.not_after(), now, random);
            tracing::info!(
                identity = %entry.id, serial = %certificate.serial(), refresh_in_s = pause.as_secs(),
                "certificate issued"
            );
            entry.current.store(Some(Arc::new(certificate)));
            *progress = Progress::default();
            shared.recovered.notify_waiters();
            pause
        }
        Err(error) => {
            progress.failures = progress.failures.saturating_add(1);
            let pause = backoff(progress.failures, random);
            tracing::warn!(
                identity = %entry.id, failures = progress.failures, retry_in_s = pause.as_secs_f32(), %error,
                "no certificate issued"
            );
            progress.last_error = Some(Arc::new(error));
            pause
        }
    };
    progress.next_attempt = now.checked_add(pause);
    pause
}

/// Sleeps until the next attempt is due by the wall clock, or sooner: a connection waits for the identity, or
/// another identity's success shows that an outage is over.
async fn pause_before_next(entry: &Entry, shared: &Shared, started: Instant, pause: Duration, outage: bool) {
    let settled = (shared.settings.now)();
    let mut due = Instant::now() + pause;
    let due_by_clock = settled.checked_add(pause);
    let on_demand = started + DEMAND_INTERVAL;
    loop {
        let now = (shared.settings.now)();
        let monotonic = Instant::now();
        let unserved = entry.valid_at(now).is_none();
        // A clock that was set back by more than a pause would otherwise postpone a refresh for ever, and
        // one that was set forward must not leave an expired certificate until the sleep ends.
        if monotonic >= due || due_by_clock.is_some_and(|due| now >= due) {
            return;
        }
        let demanded = unserved && entry.is_demanded();
        if demanded && monotonic >= on_demand {
            return;
        }
        let wake = if demanded {
            on_demand.min(due)
        } else {
            due.min(monotonic + shared.settings.clock_check)
        };
        tokio::select! {
            () = tokio::time::sleep_until(wake) => {}
            () = entry.demand.notified(), if !demanded => {}
            () = shared.recovered.notified(), if outage => {
                let spread = RECOVERY_SPREAD.mul_f64((shared.settings.random)().clamp(0.0, 1.0));
                due = due.min(Instant::now() + spread);
            }
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What is guarded stays whole even if a holder panicked.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
