//! Whose call to the CA comes next: a state machine of time and chance, without a clock of its own.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use tokio::time::Instant;

/// While the CA is away, probes begin so far apart: the first, doubling up to the longest.
const PROBE_PAUSE: (Duration, Duration) = (Duration::from_millis(500), Duration::from_millis(2500));
/// When it is back, the calls that have waited are spread: this far apart, but all within this time.
const SPREAD: (Duration, Duration) = (Duration::from_millis(8), Duration::from_secs(4));

/// Why an identity needs a call; the more urgent first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Priority {
    /// A connection waits for it.
    Waiting,
    /// A pod is enrolled, and there is no valid certificate.
    Enrolled,
    /// There is a valid certificate.
    Renewal,
}

/// How a call ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ended {
    /// The CA has answered, if only to refuse.
    Answered,
    /// The CA was away or silent.
    Away,
    /// Nobody waits for the answer any more.
    Abandoned,
}

/// A place in the queue; earlier ones are smaller.
pub(super) type Ticket = u64;

/// Who waits for a call, who is calling, and whether the CA is known to be away.
///
/// While it is away, only a probe is made now and then, so that a CA that hangs costs its deadline once and not once for
/// each identity. Two probes at a time if the second is of an identity not tried yet: one whose calls hang by
/// themselves then does not stand for all.
#[derive(Debug)]
pub(super) struct Queue {
    limit: usize,
    /// Of the limit, kept for [`Priority::Waiting`].
    reserved: usize,
    waiting: BTreeMap<Ticket, Place>,
    /// Since when.
    calling: HashMap<Ticket, Instant>,
    next_ticket: Ticket,
    last_answer: Option<Instant>,
    outage: Option<Outage>,
}

#[derive(Debug)]
struct Place {
    priority: Priority,
    /// When its last call found the CA away, if it did.
    tried: Option<Instant>,
    not_before: Option<Instant>,
}

#[derive(Debug)]
struct Outage {
    since: Instant,
    probes: u32,
    next_probe: Instant,
}

impl Queue {
    /// At most `limit` calls at once, two or more, of which a quarter is kept for connections that wait.
    pub(super) fn new(limit: usize) -> Self {
        let limit = limit.max(2);
        Self {
            limit,
            reserved: (limit / 4).max(1),
            waiting: BTreeMap::new(),
            calling: HashMap::new(),
            next_ticket: 0,
            last_answer: None,
            outage: None,
        }
    }

    /// Takes a place. `tried` is when its last call found the CA away, if that was its last.
    pub(super) fn push(&mut self, priority: Priority, tried: Option<Instant>) -> Ticket {
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        let place = Place {
            priority,
            tried,
            not_before: None,
        };
        self.waiting.insert(ticket, place);
        ticket
    }

    /// A connection waits for it now.
    pub(super) fn raise(&mut self, ticket: Ticket) {
        if let Some(place) = self.waiting.get_mut(&ticket) {
            place.priority = Priority::Waiting;
            place.not_before = None;
        }
    }

    /// Gives the next that may call now, and counts it as calling.
    pub(super) fn next(&mut self, now: Instant) -> Option<Ticket> {
        let ticket = match &self.outage {
            Some(outage) if now < outage.next_probe => None,
            Some(_) => self.next_probe(),
            None => self.next_call(now),
        }?;
        self.waiting.remove(&ticket);
        self.calling.insert(ticket, now);
        Some(ticket)
    }

    fn next_probe(&self) -> Option<Ticket> {
        let (ticket, place) = self
            .waiting
            .iter()
            .min_by_key(|(ticket, place)| (place.tried, place.priority, **ticket))?;
        let most = if place.tried.is_none() { 2 } else { 1 };
        (self.calling.len() < most).then_some(*ticket)
    }

    fn next_call(&self, now: Instant) -> Option<Ticket> {
        let free = self.limit.saturating_sub(self.calling.len());
        let (ticket, _) = self
            .waiting
            .iter()
            .filter(|(_, place)| place.not_before.is_none_or(|at| at <= now))
            .filter(|(_, place)| free > self.kept_from(place.priority))
            .min_by_key(|(ticket, place)| (place.priority, **ticket))?;
        Some(*ticket)
    }

    fn kept_from(&self, priority: Priority) -> usize {
        if priority == Priority::Waiting {
            0
        } else {
            self.reserved
        }
    }

    /// When to ask for the next again if nothing else happens; later than `now`, when it was asked for last.
    pub(super) fn wake_after(&self, now: Instant) -> Option<Instant> {
        let times = self.waiting.values().filter_map(|place| match &self.outage {
            Some(outage) => Some(outage.next_probe),
            None => place.not_before,
        });
        times.filter(|at| *at > now).min()
    }

    /// Leaves the queue, or ends the call. `random` is uniform in 0..1.
    pub(super) fn leave(&mut self, ticket: Ticket, ended: Ended, now: Instant, random: &mut dyn FnMut() -> f64) {
        self.waiting.remove(&ticket);
        let Some(started) = self.calling.remove(&ticket) else {
            return;
        };
        match ended {
            Ended::Abandoned => {}
            Ended::Answered => {
                self.last_answer = Some(now);
                if self.outage.take().is_some() {
                    self.spread(now, random);
                }
            }
            // It has answered others meanwhile.
            Ended::Away if self.last_answer.is_some_and(|answered| answered >= started) => {}
            Ended::Away => {
                let outage = self.outage.get_or_insert(Outage {
                    since: now,
                    probes: 0,
                    next_probe: now,
                });
                // Those in flight when it began are one.
                if started >= outage.since {
                    outage.probes = outage.probes.saturating_add(1);
                }
                let (first, longest) = PROBE_PAUSE;
                let pause = first.saturating_mul(1 << outage.probes.min(8)).min(longest);
                // One that has hung for long was a pause in itself.
                outage.next_probe = started + pause.mul_f64(1.0 - random() / 4.0);
            }
        }
    }

    /// Those who have waited for the CA come one after the other, so that its return is not its next fall.
    fn spread(&mut self, now: Instant, random: &mut dyn FnMut() -> f64) {
        let mut waiting: Vec<_> = self
            .waiting
            .iter_mut()
            .filter(|(_, place)| place.priority != Priority::Waiting)
            .collect();
        waiting.sort_by_key(|(ticket, place)| (place.priority, **ticket));
        let (apart, all) = SPREAD;
        let step = apart.min(all.div_f64(waiting.len().max(1) as f64));
        for (order, (_, place)) in waiting.into_iter().enumerate() {
            place.not_before = Some(now + step.mul_f64(order as f64 + random()));
        }
    }

    /// Since when the CA is away, if it is.
    pub(super) fn away_since(&self) -> Option<Instant> {
        self.outage.as_ref().map(|outage| outage.since)
    }

    /// Calls in flight.
    pub(super) fn in_flight(&self) -> usize {
        self.calling.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn half() -> f64 {
        0.5
    }

    fn take(queue: &mut Queue, now: Instant) -> Vec<Ticket> {
        std::iter::from_fn(|| queue.next(now)).collect()
    }

    /// Lets time pass until somebody may call.
    fn take_next(queue: &mut Queue, now: &mut Instant) -> Vec<Ticket> {
        let mut taken = take(queue, *now);
        while taken.is_empty() {
            let Some(wake) = queue.wake_after(*now) else { break };
            *now = wake;
            taken = take(queue, *now);
        }
        taken
    }

    #[test]
    fn who_waits_comes_first_then_the_enrolled_then_renewals_each_in_their_order() {
        let now = Instant::now();
        let mut queue = Queue::new(100);
        let renewal = queue.push(Priority::Renewal, None);
        let enrolled = [(); 2].map(|()| queue.push(Priority::Enrolled, None));
        let raised = queue.push(Priority::Renewal, None);
        let waiting = queue.push(Priority::Waiting, None);
        queue.raise(raised);
        let order = take(&mut queue, now);
        assert_eq!(order, [raised, waiting, enrolled[0], enrolled[1], renewal]);
    }

    #[test]
    fn some_calls_are_kept_for_those_who_wait() {
        let now = Instant::now();
        for (limit, without_waiting) in [(0, 1), (2, 1), (4, 3), (8, 6), (100, 75)] {
            let mut queue = Queue::new(limit);
            for _ in 0..200 {
                queue.push(Priority::Renewal, None);
            }
            assert_eq!(take(&mut queue, now).len(), without_waiting, "of {limit}");
            for _ in 0..200 {
                queue.push(Priority::Waiting, None);
            }
            take(&mut queue, now);
            assert_eq!(queue.in_flight(), limit.max(2), "of {limit}");
        }
    }

    #[test]
    fn a_ca_that_hangs_is_met_once_by_each_call_in_flight_and_then_probed() {
        let mut now = Instant::now();
        let mut queue = Queue::new(8);
        for _ in 0..100 {
            queue.push(Priority::Enrolled, None);
        }
        let first = take(&mut queue, now);
        assert_eq!(first.len(), 6);
        now += 5000 * MS;
        for ticket in first {
            queue.leave(ticket, Ended::Away, now, &mut half);
        }
        assert_eq!(queue.away_since(), Some(now));
        for (probe, longest) in [0, 1000, 2000, 2500, 2500, 2500, 2500].into_iter().enumerate() {
            let before = now;
            let probes = take_next(&mut queue, &mut now);
            assert_eq!(probes.len(), 2, "two that were not tried yet");
            let pause = now - before;
            assert!(pause <= longest * MS && pause >= longest * MS / 2, "{probe}: {pause:?}");
            queue.leave(probes[0], Ended::Away, now, &mut half);
            queue.leave(probes[1], Ended::Abandoned, now, &mut half);
        }
    }

    #[test]
    fn probes_go_round_those_not_tried_first() {
        let mut now = Instant::now();
        let mut queue = Queue::new(8);
        let only = queue.push(Priority::Waiting, None);
        assert_eq!(queue.next(now), Some(only));
        queue.leave(only, Ended::Away, now, &mut half);
        let late = queue.push(Priority::Waiting, Some(now + 2 * MS));
        let early = queue.push(Priority::Renewal, Some(now + MS));
        let fresh = queue.push(Priority::Renewal, None);
        for expected in [fresh, early, late] {
            assert_eq!(take_next(&mut queue, &mut now), [expected]);
            queue.leave(expected, Ended::Away, now, &mut half);
        }
        assert!(take_next(&mut queue, &mut now).is_empty());
    }

    #[test]
    fn a_call_that_hangs_while_others_are_answered_is_no_outage() {
        let now = Instant::now();
        let mut queue = Queue::new(8);
        let [hangs, answered] = [(); 2].map(|()| queue.push(Priority::Enrolled, None));
        assert_eq!(take(&mut queue, now).len(), 2);
        queue.leave(answered, Ended::Answered, now + MS, &mut half);
        queue.leave(hangs, Ended::Away, now + 5000 * MS, &mut half);
        assert_eq!(queue.away_since(), None);
    }

    #[test]
    fn after_an_outage_of_any_number_the_calls_are_spread_without_a_spike() {
        for (seed, count) in [(1, 0), (2, 1), (3, 10), (4, 500), (5, 3000)] {
            let mut random = fastrand::Rng::with_seed(seed);
            let mut chance = || random.f64();
            let mut now = Instant::now();
            let mut queue = Queue::new(8);
            let first = queue.push(Priority::Renewal, None);
            assert_eq!(queue.next(now), Some(first));
            queue.leave(first, Ended::Away, now, &mut chance);
            let tried = Some(now);
            let mut expected: Vec<_> = (0..=count).map(|_| queue.push(Priority::Renewal, tried)).collect();
            let probe = take_next(&mut queue, &mut now)[0];
            queue.leave(probe, Ended::Answered, now, &mut chance);
            let back = now;
            let mut served = vec![probe];
            let mut times = Vec::new();
            loop {
                let taken = take_next(&mut queue, &mut now);
                if taken.is_empty() {
                    break;
                }
                for ticket in taken {
                    served.push(ticket);
                    times.push(now - back);
                    queue.leave(ticket, Ended::Answered, now, &mut chance);
                }
            }
            served.sort_unstable();
            expected.sort_unstable();
            assert_eq!(served, expected);
            assert!(times.iter().all(|time| *time <= SPREAD.1), "{times:?}");
            if count >= 500 {
                let mut bins = [0; 10];
                for time in &times {
                    bins[(time.div_duration_f64(SPREAD.1) * 9.99) as usize] += 1;
                }
                let mean = times.len() / bins.len();
                assert!(bins.iter().all(|bin| *bin < 2 * mean), "{bins:?}");
            }
        }
    }

    #[test]
    fn whatever_happens_nobody_is_lost_and_the_limit_holds() {
        for seed in 0..200 {
            let mut random = fastrand::Rng::with_seed(seed);
            let mut now = Instant::now();
            let limit = random.usize(2..10);
            let mut queue = Queue::new(limit);
            let (mut waiting, mut calling) = (Vec::new(), Vec::new());
            for _ in 0..300 {
                now += Duration::from_millis(random.u64(0..700));
                match random.u8(0..4) {
                    0 => {
                        let priority = [Priority::Waiting, Priority::Enrolled, Priority::Renewal][random.usize(0..3)];
                        let tried = random.bool().then_some(now);
                        waiting.push(queue.push(priority, tried));
                    }
                    1 if !waiting.is_empty() => queue.raise(waiting[random.usize(0..waiting.len())]),
                    2 if !calling.is_empty() => {
                        let ticket = calling.swap_remove(random.usize(0..calling.len()));
                        let how = [Ended::Answered, Ended::Away, Ended::Abandoned][random.usize(0..3)];
                        queue.leave(ticket, how, now, &mut half);
                    }
                    _ => {
                        for ticket in take(&mut queue, now) {
                            waiting.retain(|other| *other != ticket);
                            calling.push(ticket);
                        }
                    }
                }
                assert_eq!(queue.in_flight(), calling.len());
                assert!(calling.len() <= limit);
            }
            // A CA that answers gets everybody served.
            for ticket in calling.drain(..) {
                queue.leave(ticket, Ended::Answered, now, &mut half);
            }
            loop {
                let taken = take_next(&mut queue, &mut now);
                if taken.is_empty() {
                    break;
                }
                for ticket in taken {
                    waiting.retain(|other| *other != ticket);
                    queue.leave(ticket, Ended::Answered, now, &mut half);
                }
            }
            assert!(waiting.is_empty(), "seed {seed}: {queue:?}");
        }
    }
}
