//! When to ask the CA again: pure functions of time and chance.

use std::time::{Duration, SystemTime};

/// The shortest and longest wait after a failure.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(150));
/// A refresh is due at this part of the lifetime, give or take the jitter.
const REFRESH_AT: f64 = 0.5;
/// How far the refresh moves either way, as a part of the lifetime, so that identities enrolled together drift apart.
const REFRESH_JITTER: f64 = 0.05;
/// Never sooner than this, however short the lifetimes that a CA grants.
const REFRESH_FLOOR: Duration = Duration::from_secs(1);

/// How long from `now` until a certificate is to be refreshed. `random` is uniform in 0..1.
pub fn refresh_after(not_before: SystemTime, not_after: SystemTime, now: SystemTime, random: f64) -> Duration {
    let lifetime = not_after.duration_since(not_before).unwrap_or_default();
    let part = REFRESH_AT + (random.clamp(0.0, 1.0) * 2.0 - 1.0) * REFRESH_JITTER;
    let due = not_before + lifetime.mul_f64(part);
    due.duration_since(now).unwrap_or_default().max(REFRESH_FLOOR)
}

/// How long to wait after the given number of failures in a row: doubling from 0.5 s to 150 s, less a random
/// part of up to a half. `random` is uniform in 0..1.
pub fn backoff(failures: u32, random: f64) -> Duration {
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
            // Past due, or a clock that jumped: soon, but never in a tight loop.
            (0, 1000, 600, 0.5, 1),
            (0, 1000, 5000, 0.5, 1),
            (0, 1, 0, 0.5, 1),
            (1000, 0, 0, 0.5, 1000),
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
