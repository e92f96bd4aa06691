//! Which of several replicas may change keys: the holder of a Lease.
//!
//! By the API's own rules: the holder renews; who finds a Lease that did not change for as long as it says takes it over. How
//! long something did not change is measured here, by a clock that nobody sets; times in the Lease are never compared with
//! ours. A holder that cannot renew gives up well before others may take over. That is no proof against a process that
//! was stopped in between: what it writes is conditional on what it has read, and so fails.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::jiff::Timestamp;
use kube::api::{ObjectMeta, PostParams};
use kube::{Api, Client};
use tokio::time::{Instant, sleep, timeout};

use super::cluster::{ClusterError, api_error, is_conflict};

/// How the Lease is kept.
#[derive(Debug, Clone, Copy)]
pub(super) struct Times {
    /// For how long a Lease is respected that does not change, in seconds.
    pub(super) lease_s: i32,
    /// For how long who has renewed it relies on it; less.
    pub(super) rely: Duration,
    /// Between attempts.
    pub(super) retry: Duration,
}

impl Default for Times {
    fn default() -> Self {
        Self {
            lease_s: 15,
            rely: Duration::from_secs(10),
            retry: Duration::from_secs(2),
        }
    }
}

/// What is known of who leads.
#[derive(Debug, Clone, Default)]
pub(super) struct Leadership(Arc<Mutex<Known>>);

#[derive(Debug, Default)]
struct Known {
    /// Until when this process relies on being the leader.
    until: Option<Instant>,
    holder: String,
    transitions: i32,
}

impl Leadership {
    /// Whether this process may change keys now.
    pub(super) fn is_mine(&self) -> bool {
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        known.until.is_some_and(|until| Instant::now() < until)
    }

    /// Who leads, as far as is known, and how often that has changed.
    pub(super) fn holder(&self) -> (String, i32) {
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        (known.holder.clone(), known.transitions)
    }

    fn set(&self, until: Option<Instant>, spec: &LeaseSpec) {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        known.until = until;
        known.holder = spec.holder_identity.clone().unwrap_or_default();
        known.transitions = spec.lease_transitions.unwrap_or_default();
    }

    #[cfg(test)]
    pub(super) fn certain() -> Self {
        let known = Known {
            until: Some(Instant::now() + Duration::from_secs(3600)),
            ..Known::default()
        };
        Self(Arc::new(Mutex::new(known)))
    }
}

/// Stands for election.
pub(super) struct Candidate {
    api: Api<Lease>,
    name: String,
    place: String,
    /// This process, and no other ever.
    me: String,
    times: Times,
    leadership: Leadership,
    seen: Option<Seen>,
    last_written: Timestamp,
}

/// The Lease as it was last found changed.
struct Seen {
    lease: Lease,
    at: Instant,
}

/// What is to be done about a Lease.
#[derive(Debug, PartialEq, Eq)]
enum Move {
    /// It is ours.
    Renew,
    /// It is nobody's, or its holder is gone.
    Take,
    /// It is somebody's.
    Wait,
}

impl Candidate {
    pub(super) fn new(client: Client, namespace: &str, name: &str, host: &str, times: Times) -> Self {
        Self {
            api: Api::namespaced(client, namespace),
            name: name.into(),
            place: format!("the Lease {namespace}/{name}"),
            me: format!("{host}_{:016x}", fastrand::u64(..)),
            times,
            leadership: Leadership::default(),
            seen: None,
            last_written: Timestamp::UNIX_EPOCH,
        }
    }

    pub(super) fn leadership(&self) -> Leadership {
        self.leadership.clone()
    }

    /// Stands for election until `stop` completes, and then lets go of what it has.
    pub(super) async fn run(mut self, stop: impl Future<Output = ()>) {
        let mut stop = std::pin::pin!(stop);
        loop {
            let was = self.leadership.is_mine();
            let began = Instant::now();
            match timeout(self.times.rely / 2, self.attempt()).await {
                Ok(Ok(spec)) => {
                    let mine = spec.holder_identity.as_deref() == Some(&*self.me);
                    self.leadership.set(mine.then(|| began + self.times.rely), &spec);
                    if mine != was {
                        tracing::info!(leader = mine, place = self.place, "leadership over keys has changed");
                    }
                }
                Ok(Err(error)) => tracing::warn!(%error, leader = was, "cannot keep the Lease"),
                Err(_) => tracing::warn!(place = self.place, leader = was, "no answer about the Lease"),
            }
            tokio::select! {
                () = sleep(self.times.retry) => {}
                () = &mut stop => break,
            }
        }
        if self.leadership.is_mine() {
            self.release().await;
        }
    }

    /// One look at the Lease, and what follows from it; gives the Lease as it is then.
    async fn attempt(&mut self) -> Result<LeaseSpec, ClusterError> {
        let found = self
            .api
            .get_opt(&self.name)
            .await
            .map_err(api_error("read", &self.place))?;
        let Some(found) = found else {
            return self.write(None).await;
        };
        let now = Instant::now();
        if self.seen.as_ref().is_none_or(|seen| seen.lease != found) {
            self.seen = Some(Seen {
                lease: found.clone(),
                at: now,
            });
        }
        let unchanged_for = self.seen.as_ref().map_or(Duration::ZERO, |seen| now - seen.at);
        match decide(&self.me, found.spec.as_ref(), unchanged_for) {
            Move::Wait => Ok(found.spec.unwrap_or_default()),
            Move::Renew | Move::Take => self.write(Some(found)).await,
        }
    }

    async fn write(&mut self, found: Option<Lease>) -> Result<LeaseSpec, ClusterError> {
        // Never the same twice, whatever the clock does: others judge by the change.
        let clock = Timestamp::try_from(SystemTime::now()).unwrap_or(Timestamp::UNIX_EPOCH);
        let next = self.last_written + Duration::from_micros(1);
        let now = MicroTime(clock.max(next));
        self.last_written = now.0;
        let was = found.as_ref().and_then(|lease| lease.spec.clone()).unwrap_or_default();
        let renewed = was.holder_identity.as_deref() == Some(&*self.me);
        let spec = LeaseSpec {
            holder_identity: Some(self.me.clone()),
            lease_duration_seconds: Some(self.times.lease_s),
            acquire_time: if renewed { was.acquire_time } else { Some(now.clone()) },
            renew_time: Some(now),
            lease_transitions: Some(match (&found, renewed) {
                (None, _) => 0,
                (Some(_), true) => was.lease_transitions.unwrap_or_default(),
                (Some(_), false) => was.lease_transitions.unwrap_or_default().saturating_add(1),
            }),
            ..LeaseSpec::default()
        };
        let lease = Lease {
            metadata: match &found {
                Some(lease) => lease.metadata.clone(),
                None => ObjectMeta {
                    name: Some(self.name.clone()),
                    ..ObjectMeta::default()
                },
            },
            spec: Some(spec),
        };
        let parameters = PostParams::default();
        let written = match found {
            Some(_) => self.api.replace(&self.name, &parameters, &lease).await,
            None => self.api.create(&parameters, &lease).await,
        };
        match written {
            Ok(written) => {
                self.seen = Some(Seen {
                    lease: written.clone(),
                    at: Instant::now(),
                });
                Ok(written.spec.unwrap_or_default())
            }
            // Somebody was faster: who it is, is looked at next time.
            Err(error) if is_conflict(&error) => Ok(LeaseSpec::default()),
            Err(error) => Err(api_error("write", &self.place)(error)),
        }
    }

    /// Lets go, so that another need not wait.
    async fn release(&mut self) {
        let Some(Seen { mut lease, .. }) = self.seen.take() else {
            return;
        };
        self.leadership.set(None, &LeaseSpec::default());
        if let Some(spec) = &mut lease.spec {
            spec.holder_identity = None;
            spec.lease_duration_seconds = Some(1);
        }
        let parameters = PostParams::default();
        let released = self.api.replace(&self.name, &parameters, &lease);
        if !matches!(timeout(self.times.rely / 2, released).await, Ok(Ok(_))) {
            tracing::debug!(place = self.place, "the Lease was not released, and lapses");
        }
    }
}

/// By the Lease and for how long it did not change.
fn decide(me: &str, spec: Option<&LeaseSpec>, unchanged_for: Duration) -> Move {
    let holder = spec
        .and_then(|spec| spec.holder_identity.as_deref())
        .unwrap_or_default();
    if holder == me {
        return Move::Renew;
    }
    let respected = spec.and_then(|spec| spec.lease_duration_seconds).unwrap_or_default();
    let respected = Duration::from_secs(u64::try_from(respected).unwrap_or_default());
    match holder.is_empty() || unchanged_for >= respected {
        true => Move::Take,
        false => Move::Wait,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_is_taken_over_only_after_it_did_not_change_for_as_long_as_it_says_whatever_times_it_names() {
        let spec = |holder: &str, renewed: i64| LeaseSpec {
            holder_identity: Some(holder.into()),
            lease_duration_seconds: Some(15),
            renew_time: Some(MicroTime(Timestamp::from_second(renewed).unwrap())),
            ..LeaseSpec::default()
        };
        // A holder whose clock is right, decades behind, and decades ahead.
        for renewed in [1_700_000_000, 0, 4_000_000_000] {
            for (holder, seconds, expected) in [
                ("me", 0, Move::Renew),
                ("me", 100, Move::Renew),
                ("other", 0, Move::Wait),
                ("other", 14, Move::Wait),
                ("other", 15, Move::Take),
                ("", 0, Move::Take),
            ] {
                let unchanged = Duration::from_secs(seconds);
                assert_eq!(
                    decide("me", Some(&spec(holder, renewed)), unchanged),
                    expected,
                    "{holder} {seconds}"
                );
            }
        }
        assert_eq!(decide("me", None, Duration::ZERO), Move::Take);
    }
}
