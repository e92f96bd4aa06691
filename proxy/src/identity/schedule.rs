//! When to ask the CA again: pure functions of time and chance.

use std::time::{Duration, SystemTime};

/// The shortest and longest wait after a failure.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(150));
/// How far apart calls for one identity are while the CA is away.
const AWAY_PAUSE: Duration = Duration::from_millis(500);
/// The shortest and longest time between two renewals, give or take the jitter.
const RENEWAL_PAUSE: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));
/// A refresh is due at this part of the lifetime, give or take the jitter.
const REFRESH_AT: f64 = 0.5;
/// How far the refresh moves either way, as a part of the lifetime, so that identities enrolled together drift apart.
const REFRESH_JITTER: f64 = 0.05;

/// How long from `now` until a certificate is to be refreshed; zero if that is overdue, or if it is not valid yet, as the
/// clock was set back. `random` is uniform in 0..1.
pub(super) fn refresh_after(not_before: SystemTime, not_after: SystemTime, now: SystemTime, random: f64) -> Duration {
    if now < not_before {
        return Duration::ZERO;
    }
    let lifetime = not_after.duration_since(not_before).unwrap_or_default();
    let part = REFRESH_AT + (random.clamp(0.0, 1.0) * 2.0 - 1.0) * REFRESH_JITTER;
    let due = not_before + lifetime.mul_f64(part);
    due.duration_since(now).unwrap_or_default()
}

/// How far apart two calls for one identity are at least, however soon a refresh is due: by this node's clock, a
/// certificate that was just issued may have little time `left`.
pub(super) fn apart(left: Duration) -> Duration {
    let (shortest, longest) = RENEWAL_PAUSE;
    (left / 4).clamp(shortest, longest)
}

/// How long to wait after a failure. `left` is how long the certificate in force is still valid, if there is one: as long
/// as there is time, once a minute is enough; then, or without one, it is urgent. While the CA is `away`, its own queue
/// tells when it is tried again, and this only keeps calls apart. `random` is uniform in 0..1.
pub(super) fn retry_after(failures: u32, away: bool, left: Option<Duration>, random: f64) -> Duration {
    let random = random.clamp(0.0, 1.0);
    if away {
        return AWAY_PAUSE.mul_f64(1.0 + random);
    }
    match left {
        None => backoff(failures, random),
        Some(left) => apart(left).mul_f64(1.0 + random / 2.0),
    }
}

/// How long to wait after the given number of failures in a row: doubling from 0.5 s to 150 s, less a random
/// part of up to a half. `random` is uniform in 0..1.
fn backoff(failures: u32, random: f64) -> Duration {
    let (shortest, longest) = BACKOFF;
    let doubled = shortest
        .saturating_mul(1 << failures.saturating_sub(1).min(16))
        .min(longest);
    doubled.mul_f64(1.0 - random.clamp(0.0, 1.0) / 2.0).max(shortest)
}

#[cfg(test)]
mod tests {
    use std::time::UNIX_EPOCH;

    use super::*;

    fn at(seconds: u64) -> SystemTime {
        UNIX_EPOCH + Duration::from_secs(seconds)
    }

    #[test]
    fn a_refresh_is_due_around_half_of_the_lifetime() {
        for (not_before, not_after, now, random, seconds) in [
            (0, 1000, 0, 0.5, 500),
            (0, 1000, 0, 0.0, 450),
            (0, 1000, 0, 1.0, 550),
            (0, 1000, 200, 0.5, 300),
            (0, 1000, 600, 0.5, 0),
            (0, 1000, 5000, 0.5, 0),
            (1000, 2000, 999, 0.5, 0),
            (1000, 0, 0, 0.5, 0),
            (1000, 0, 1001, 0.5, 0),
            (0, 1000, 0, 7.0, 550),
        ] {
            assert_eq!(
                refresh_after(at(not_before), at(not_after), at(now), random),
                Duration::from_secs(seconds),
                "{not_before}..{not_after} at {now}, {random}"
            );
        }
    }

    #[test]
    fn a_renewal_that_failed_is_tried_once_a_minute_and_more_often_the_less_time_is_left() {
        let secs = Duration::from_secs;
        for (left, random, pause) in [
            (secs(86_400), 0.0, secs(60)),
            (secs(86_400), 1.0, secs(90)),
            (secs(240), 0.0, secs(60)),
            (secs(100), 0.0, secs(25)),
            (secs(20), 0.5, Duration::from_millis(6250)),
            (secs(3), 0.0, secs(1)),
            (secs(0), 0.0, secs(1)),
        ] {
            for failures in [1, 2, 100] {
                assert_eq!(retry_after(failures, false, Some(left), random), pause, "{left:?}");
            }
        }
    }

    #[test]
    fn without_a_certificate_it_is_urgent_and_who_is_away_is_asked_again_by_the_queue() {
        for failures in [1, 5, 30] {
            assert_eq!(retry_after(failures, false, None, 0.3), backoff(failures, 0.3));
            for left in [None, Some(Duration::from_secs(86_400))] {
                assert_eq!(retry_after(failures, true, left, 0.0), Duration::from_millis(500));
                assert_eq!(retry_after(failures, true, left, 1.0), Duration::from_secs(1));
            }
        }
    }

    #[test]
    fn backoff_doubles_up_to_its_cap_and_never_below_its_floor() {
        for (failures, random, millis) in [
            (0, 0.0, 500),
            (1, 0.0, 500),
            (1, 1.0, 500),
            (2, 0.0, 1000),
            (3, 0.0, 2000),
            (3, 1.0, 1000),
            (9, 0.0, 128_000),
            (10, 0.0, 150_000),
            (10, 1.0, 75_000),
            (u32::MAX, 0.0, 150_000),
        ] {
            assert_eq!(
                backoff(failures, random),
                Duration::from_millis(millis),
                "{failures}, {random}"
            );
        }
    }
}
