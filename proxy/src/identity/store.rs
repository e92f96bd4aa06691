//! The certificates of this node: one entry for each identity of an enrolled pod.

use std::collections::HashMap;
use std::collections::hash_map;
use std::fmt;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, SystemTime};

use prometheus_client::metrics::histogram::Histogram;
use thiserror::Error;
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::task::AbortHandle;
use tokio::time::Instant;

use super::entry::Entry;
use super::gate::{Gate, Random};
use super::status::Counters;
use super::{
    CallOutcome, Certificate, IdentityLease, IdentityStatus, IssueError, Issued, Issuer, SpiffeId, StoreStats, Trust,
};

/// Seconds: from a CA on the same machine to a call's deadline.
const LATENCY_BUCKETS: [f64; 10] = [0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 2.5, 5.0];
/// What the wall clock may gain or lose between two looks without having been stepped.
const CLOCK_TOLERANCE: Duration = Duration::from_millis(500);

/// How the store behaves, and the clock and chance that it goes by.
#[derive(Clone)]
pub struct StoreSettings {
    /// How long a connection waits for an identity that has no certificate.
    pub wait: Duration,
    /// How many calls to the CA may be in flight at once, 2 or more. A quarter is kept for identities that
    /// connections wait for.
    pub concurrency: usize,
    /// How often the wall clock is compared, so that a step of it or a suspended machine is noticed.
    pub clock_check: Duration,
    /// The wall clock.
    pub now: Arc<dyn Fn() -> SystemTime + Send + Sync>,
    /// What peers are verified against; learns the roots that come with certificates.
    pub trust: Trust,
    /// Uniform in 0..1.
    pub random: Random,
}

impl Default for StoreSettings {
    fn default() -> Self {
        Self {
            wait: Duration::from_secs(5),
            concurrency: 8,
            clock_check: Duration::from_secs(10),
            now: Arc::new(SystemTime::now),
            trust: Trust::default(),
            random: Arc::new(fastrand::f64),
        }
    }
}

impl fmt::Debug for StoreSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StoreSettings")
            .field("wait", &self.wait)
            .field("concurrency", &self.concurrency)
            .finish_non_exhaustive()
    }
}

/// Why a connection gets no certificate.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum IdentityError {
    /// No pod of this identity is enrolled here, so it may not be used.
    #[error("{0} is not the identity of an enrolled pod on this node")]
    NotEnrolled(SpiffeId),
    /// The CA has not given a certificate in time.
    #[error("no certificate for {id} within {} s: {}", .waited.as_secs_f32(), describe(.reason))]
    Unavailable {
        /// The identity.
        id: SpiffeId,
        /// How long the connection has waited.
        waited: Duration,
        /// Why the last attempt failed; none if the first is still in flight.
        reason: Option<Arc<IssueError>>,
    },
}

fn describe(reason: &Option<Arc<IssueError>>) -> String {
    reason
        .as_ref()
        .map_or_else(|| "the CA has not answered yet".into(), |error| error.to_string())
}

/// The certificates of this node, kept fresh on the runtime where the store was made and served to any thread.
#[derive(Clone)]
pub struct CertStore {
    entries: Arc<RwLock<HashMap<SpiffeId, Arc<Entry>>>>,
    shared: Arc<Shared>,
}

/// What the entries' tasks share.
pub(super) struct Shared {
    issuer: Arc<dyn Issuer>,
    pub(super) settings: StoreSettings,
    pub(super) runtime: Handle,
    pub(super) gate: Gate,
    /// Counts the steps of the wall clock.
    pub(super) steps: watch::Sender<u64>,
    clock: AbortHandle,
    counters: Counters,
    latency: Histogram,
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.clock.abort();
    }
}

impl Shared {
    pub(super) async fn call(&self, id: &SpiffeId) -> Result<Issued, IssueError> {
        let begin = Instant::now();
        let result = self.issuer.issue(id).await;
        self.latency.observe(begin.elapsed().as_secs_f64());
        // Its roots are trusted before it is shown to anybody.
        let result = result.and_then(|issued| self.trusting(issued));
        self.counters.count(
            result
                .as_ref()
                .map_or_else(IssueError::outcome, |_| CallOutcome::Issued),
        );
        result
    }

    fn trusting(&self, issued: Issued) -> Result<Issued, IssueError> {
        let Issued { certificate, changed } = issued;
        let certificate = certificate
            .trusting(&self.settings.trust)
            .map_err(|reason| IssueError::Answer {
                ca: self.issuer.describe(),
                reason,
            })?;
        Ok(Issued { certificate, changed })
    }

    pub(super) fn now(&self) -> SystemTime {
        (self.settings.now)()
    }
}

impl CertStore {
    /// Makes an empty store. Must be called within the tokio runtime that is to run the calls to the CA.
    pub fn new(issuer: Arc<dyn Issuer>, settings: StoreSettings) -> Self {
        let runtime = Handle::current();
        let steps = watch::Sender::new(0);
        let shared = Shared {
            issuer,
            gate: Gate::new(settings.concurrency, settings.random.clone(), &runtime),
            clock: runtime
                .spawn(watch_clock(settings.clone(), steps.clone()))
                .abort_handle(),
            steps,
            counters: Counters::default(),
            latency: Histogram::new(LATENCY_BUCKETS),
            runtime,
            settings,
        };
        Self {
            entries: Arc::default(),
            shared: Arc::new(shared),
        }
    }

    /// Enrols a pod of the identity. The first lease of an identity begins to fetch its certificate now.
    pub fn acquire(&self, id: &SpiffeId) -> IdentityLease {
        let mut entries = self.entries.write().unwrap_or_else(PoisonError::into_inner);
        match entries.entry(id.clone()) {
            hash_map::Entry::Occupied(entry) => {
                entry.get().leases.fetch_add(1, Ordering::AcqRel);
            }
            hash_map::Entry::Vacant(entry) => {
                entry.insert(Entry::start(id.clone(), self.shared.clone()));
            }
        }
        IdentityLease::new(self.clone(), id.clone())
    }

    /// The identity's certificate: at once if a valid one is there, else as soon as the CA, which is asked at
    /// once, has issued it, for up to `StoreSettings::wait`. Callable on any runtime; cancel-safe.
    pub async fn get(&self, id: &SpiffeId) -> Result<Arc<Certificate>, IdentityError> {
        self.wait_for(id, true).await
    }

    /// As [`Self::get`], for nobody in particular: the CA is asked when the identity's turn comes.
    pub async fn expect(&self, id: &SpiffeId) -> Result<Arc<Certificate>, IdentityError> {
        self.wait_for(id, false).await
    }

    async fn wait_for(&self, id: &SpiffeId, demand: bool) -> Result<Arc<Certificate>, IdentityError> {
        let entry = self.entry(id).ok_or_else(|| IdentityError::NotEnrolled(id.clone()))?;
        if let Some(certificate) = entry.valid_at(self.now()) {
            return Ok(certificate);
        }
        let started = Instant::now();
        let deadline = started + self.shared.settings.wait;
        let mut attempts = entry.attempts();
        let _waiter = demand.then(|| entry.wait());
        loop {
            // The entry's task may have stored a certificate between the first look and the subscription.
            if let Some(certificate) = entry.valid_at(self.now()) {
                return Ok(certificate);
            }
            if self.entry(id).is_none_or(|current| !Arc::ptr_eq(&current, &entry)) {
                return Err(IdentityError::NotEnrolled(id.clone()));
            }
            if tokio::time::timeout_at(deadline, attempts.changed()).await.is_err() {
                let reason = entry.last_error().or_else(|| self.away().map(|(_, reason)| reason));
                return Err(IdentityError::Unavailable {
                    id: id.clone(),
                    waited: started.elapsed(),
                    reason,
                });
            }
        }
    }

    /// The identity's certificate if a valid one is there; never waits.
    pub fn try_get(&self, id: &SpiffeId) -> Option<Arc<Certificate>> {
        self.entry(id)?.valid_at(self.now())
    }

    /// Every enrolled identity, sorted. No keys.
    pub fn snapshot(&self) -> Vec<IdentityStatus> {
        let now = self.now();
        let entries: Vec<_> = self
            .entries
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .values()
            .cloned()
            .collect();
        let mut all: Vec<_> = entries.iter().map(|entry| entry.status(now)).collect();
        all.sort_by(|a, b| a.id.cmp(&b.id));
        all
    }

    /// Counters for metrics.
    pub fn stats(&self) -> StoreStats {
        StoreStats {
            calls: self.shared.counters.read(),
            in_flight: self.shared.gate.in_flight(),
            away: self.away().map(|(since, _)| since.elapsed()),
            identities: self.entries.read().unwrap_or_else(PoisonError::into_inner).len(),
        }
    }

    /// Since when the CA is away, and how somebody who is left has found it: that holds up those, too, for whom it was
    /// not asked yet.
    fn away(&self) -> Option<(Instant, Arc<IssueError>)> {
        let since = self.shared.gate.away_since()?;
        let entries = self.entries.read().unwrap_or_else(PoisonError::into_inner);
        let met = |entry: &Arc<Entry>| entry.last_error().filter(|error| error.is_outage());
        Some((since, entries.values().find_map(met)?))
    }

    /// How long calls to the CA took, in seconds.
    pub fn call_latency(&self) -> &Histogram {
        &self.shared.latency
    }

    /// What peers are verified against.
    pub fn trust(&self) -> &Trust {
        &self.shared.settings.trust
    }

    /// Where certificates come from.
    pub fn issuer(&self) -> String {
        self.shared.issuer.describe()
    }

    pub(super) fn release(&self, id: &SpiffeId) {
        let mut entries = self.entries.write().unwrap_or_else(PoisonError::into_inner);
        let last = entries
            .get(id)
            .is_some_and(|entry| entry.leases.fetch_sub(1, Ordering::AcqRel) == 1);
        let forgotten = if last { entries.remove(id) } else { None };
        drop(entries);
        if let Some(entry) = forgotten {
            entry.stop();
        }
    }

    fn entry(&self, id: &SpiffeId) -> Option<Arc<Entry>> {
        self.entries
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .get(id)
            .cloned()
    }

    fn now(&self) -> SystemTime {
        self.shared.now()
    }
}

/// Tells of steps of the wall clock, which time that a suspended machine has slept is one of.
async fn watch_clock(settings: StoreSettings, steps: watch::Sender<u64>) {
    loop {
        let (wall, monotonic) = ((settings.now)(), Instant::now());
        tokio::time::sleep(settings.clock_check).await;
        let expected = wall + monotonic.elapsed();
        let now = (settings.now)();
        let (step, ahead) = match now.duration_since(expected) {
            Ok(step) => (step, true),
            Err(back) => (back.duration(), false),
        };
        if step > CLOCK_TOLERANCE {
            let seconds = step.as_secs_f32() * if ahead { 1.0 } else { -1.0 };
            tracing::info!(
                seconds,
                "the wall clock was stepped: what certificates are due is decided anew"
            );
            steps.send_modify(|count| *count += 1);
        }
    }
}

impl fmt::Debug for CertStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CertStore")
            .field("issuer", &self.issuer())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
