//! How many connections are carried for a pod at once: so many that it cannot take all descriptors for itself.
//!
//! A fixed share is either too small for one busy pod or too large for several. So a pod may have, where nothing else is
//! said, three times as many as are free still: alone it gets three quarters of all, two get three sevenths each, and
//! whatever the number there is something left for one that has none yet.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use super::Dataplane;
use super::record::{How, Party};
use super::track::Refusal;
use crate::node::LocalPod;

/// How often it is logged that there are no more places.
const LOG_EVERY: Duration = Duration::from_secs(10);

/// How many connections a pod may have carried at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PodLimit {
    /// So many, whatever others have.
    Fixed(u32),
    /// What the module's rule gives of so many that all pods have together.
    Of(u32),
}

impl PodLimit {
    /// How many those are while so many are carried for all pods together.
    fn most(self, all: u32) -> u32 {
        match self {
            Self::Fixed(most) => most,
            Self::Of(places) => places.saturating_sub(all).saturating_mul(3),
        }
    }
}

/// A place among the connections that are carried for a pod; free again when it is dropped.
pub(super) struct Place {
    pod: Arc<LocalPod>,
    all: Arc<AtomicU32>,
}

impl Place {
    /// Takes a place, if there is one.
    pub(super) fn take(plane: &Dataplane, pod: &Arc<LocalPod>) -> Result<Self, Refusal> {
        let (all, limit) = (&plane.carried, plane.settings.connections_per_pod);
        if take(pod.carried(), limit.most(all.load(Ordering::Relaxed))) {
            all.fetch_add(1, Ordering::Relaxed);
            return Ok(Self {
                pod: Arc::clone(pod),
                all: Arc::clone(all),
            });
        }
        let carried = pod.carried().load(Ordering::Relaxed);
        plane.observer.no_place();
        let mut logged = plane.no_place_logged.lock().unwrap_or_else(PoisonError::into_inner);
        if logged.as_ref().is_none_or(|at| at.elapsed() >= LOG_EVERY) {
            *logged = Some(Instant::now());
            tracing::warn!(
                "pod {}/{} has {carried} connections open that this proxy carries, as many as --max-connections-per-pod \
                 allows; further ones are refused",
                pod.workload().namespace,
                pod.workload().name
            );
        }
        let why = format!("{carried} connections of the pod are carried already, as many as it may have");
        Err((Party::Proxy, How::Refused(why)))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.pod.carried().fetch_sub(1, Ordering::Relaxed);
        self.all.fetch_sub(1, Ordering::Relaxed);
    }
}

fn take(carried: &AtomicU32, most: u32) -> bool {
    let one_more = |carried: u32| (carried < most).then_some(carried + 1);
    carried
        .fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more)
        .is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each of `busy` pods takes what it gets, in turns. Returns what each has then, and the most for one more.
    fn shared(places: u32, busy: usize) -> (Vec<u32>, u32) {
        let limit = PodLimit::Of(places);
        let pods: Vec<AtomicU32> = (0..busy).map(|_| AtomicU32::new(0)).collect();
        let (mut all, mut more) = (0, true);
        while more {
            more = false;
            for pod in &pods {
                if take(pod, limit.most(all)) {
                    (all, more) = (all + 1, true);
                }
            }
        }
        (pods.into_iter().map(AtomicU32::into_inner).collect(), limit.most(all))
    }

    #[test]
    fn busy_pods_share_and_leave_something_for_others() {
        assert_eq!(shared(10_000, 1), (vec![7_500], 7_500));
        for busy in [2, 3, 10, 100] {
            let (have, left) = shared(10_000, busy);
            let fair = 10_000 * 3 / (1 + 3 * busy as u32);
            assert!(have.iter().all(|have| have.abs_diff(fair) <= 4), "{busy}: {have:?}");
            assert!(left > 0, "{busy}");
        }
        assert_eq!(PodLimit::Of(u32::MAX).most(0), u32::MAX);
        assert_eq!(PodLimit::Of(5).most(6), 0);
        assert_eq!(PodLimit::Fixed(7).most(1_000), 7);
    }

    #[test]
    fn there_are_so_many_places_and_no_more() {
        let carried = AtomicU32::new(0);
        for _ in 0..3 {
            assert!(take(&carried, 3));
        }
        assert!(!take(&carried, 3));
        carried.fetch_sub(1, Ordering::Relaxed);
        assert!(take(&carried, 3));
        assert_eq!(carried.load(Ordering::Relaxed), 3);
    }
}
