//! How many connections are carried for a pod at once: so many that it cannot take all descriptors for itself.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use super::Dataplane;
use super::record::{How, Party};
use super::track::Refusal;
use crate::node::LocalPod;

/// How often it is logged that there are no more places.
const LOG_EVERY: Duration = Duration::from_secs(10);

/// A place among the connections that are carried for a pod; free again when it is dropped.
pub(super) struct Place(Arc<LocalPod>);

impl Place {
    /// Takes a place, if there is one.
    pub(super) fn take(plane: &Dataplane, pod: &Arc<LocalPod>) -> Result<Self, Refusal> {
        let most = plane.settings.connections_per_pod;
        if take(pod.carried(), most) {
            return Ok(Self(Arc::clone(pod)));
        }
        plane.observer.no_place();
        let mut logged = plane.no_place_logged.lock().unwrap_or_else(PoisonError::into_inner);
        if logged.as_ref().is_none_or(|at| at.elapsed() >= LOG_EVERY) {
            *logged = Some(Instant::now());
            tracing::warn!(
                "pod {}/{} has {most} connections open that this proxy carries, as many as --max-connections-per-pod \
                 allows; further ones are refused",
                pod.workload().namespace,
                pod.workload().name
            );
        }
        let why = format!("{most} connections of the pod are carried already, as many as it may have");
        Err((Party::Proxy, How::Refused(why)))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.carried().fetch_sub(1, Ordering::Relaxed);
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
