//! Roots that the CA names at the end of its answers: when they come, and when they go.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use super::root::Root;

/// How many are kept. A CA that names ever new ones is not believed without end.
const MAX_LEARNT: usize = 64;
/// How far the clocks of those who hold certificates may be behind ours.
const SKEW: Duration = Duration::from_secs(60);

/// The roots that answers have named.
#[derive(Debug, Default)]
pub(super) struct Learnt {
    known: Vec<Known>,
}

#[derive(Debug)]
struct Known {
    root: Arc<Root>,
    /// The longest lifetime of a certificate that came with it.
    longest: Duration,
    /// Since when answers come without it.
    missed: Option<SystemTime>,
}

impl Known {
    /// From when on nothing that was signed under it can still be valid.
    fn done_at(&self) -> Option<SystemTime> {
        self.missed?.checked_add(self.longest)?.checked_add(SKEW)
    }
}

impl Learnt {
    /// An answer has come, with a certificate of this lifetime. Its roots are trusted from now on. Says whether one of
    /// them is new.
    pub(super) fn take_in(&mut self, answer: &[Root], lifetime: Duration, now: SystemTime) -> bool {
        let mut news = false;
        let named = |root: &Root| answer.iter().any(|other| other.fingerprint == root.fingerprint);
        for known in &mut self.known {
            if named(&known.root) {
                known.longest = known.longest.max(lifetime);
                known.missed = None;
            } else if known.missed.is_none_or(|missed| missed > now) {
                known.missed = Some(now);
            }
        }
        for root in answer {
            if !self
                .known
                .iter()
                .any(|known| known.root.fingerprint == root.fingerprint)
            {
                news = true;
                self.known.push(Known {
                    root: Arc::new(root.clone()),
                    longest: lifetime,
                    missed: None,
                });
            }
        }
        while self.known.len() > MAX_LEARNT {
            // Those that are still named have no end; the first to end goes first.
            let first = (0..self.known.len()).min_by_key(|&at| {
                let done = self.known[at].done_at();
                (done.is_none(), done)
            });
            self.known.remove(first.unwrap_or(0));
        }
        news
    }

    /// Lets go of those under which nothing can be valid any more, and gives them.
    pub(super) fn sweep(&mut self, now: SystemTime) -> Vec<Arc<Root>> {
        // One that has ended by a clock that is wrong is not trusted meanwhile, and is there when the clock is right again.
        let done = |known: &mut Known| known.done_at().is_some_and(|done| now >= done);
        self.known.extract_if(.., done).map(|known| known.root).collect()
    }

    /// Those that there are, and whether the latest answer has named them.
    pub(super) fn all(&self) -> impl Iterator<Item = (&Arc<Root>, bool)> {
        self.known.iter().map(|known| (&known.root, known.missed.is_none()))
    }
}

#[cfg(test)]
mod tests {
    use std::slice::from_ref;
    use std::time::UNIX_EPOCH;

    use super::*;
    use crate::identity::testing::TestCa;

    const HOUR: Duration = Duration::from_secs(3600);

    fn names(learnt: &Learnt) -> Vec<String> {
        learnt.all().map(|(root, _)| root.name()).collect()
    }

    #[test]
    fn a_root_that_answers_no_longer_name_stays_until_nothing_signed_by_it_can_be_valid() {
        let (old, new) = (TestCa::new().root(), TestCa::new().root());
        let at = |hours: u32| SystemTime::now() + HOUR * hours;
        let mut learnt = Learnt::default();
        learnt.take_in(from_ref(&old), 2 * HOUR, at(0));
        learnt.take_in(&[old.clone(), new.clone()], HOUR, at(1));
        // However long no answer comes.
        assert!(learnt.sweep(at(1000)).is_empty());
        learnt.take_in(from_ref(&new), HOUR, at(3));
        assert!(learnt.sweep(at(4)).is_empty());
        // One more answer without it does not put off its end.
        learnt.take_in(from_ref(&new), HOUR, at(4));
        assert!(learnt.sweep(at(5)).is_empty());
        assert_eq!(learnt.sweep(at(5) + SKEW + Duration::from_secs(9)).len(), 1);
        assert_eq!(names(&learnt), [new.name()]);
    }

    #[test]
    fn a_root_that_is_named_again_stays_and_a_clock_that_was_set_back_puts_off_no_end() {
        let (old, new) = (TestCa::new().root(), TestCa::new().root());
        let start = SystemTime::now();
        let mut learnt = Learnt::default();
        learnt.take_in(from_ref(&old), HOUR, start);
        learnt.take_in(from_ref(&new), HOUR, start);
        // Another replica of the CA that is not as far yet.
        learnt.take_in(&[old.clone(), new.clone()], HOUR, start + HOUR);
        assert!(learnt.sweep(start + 10 * HOUR).is_empty());
        learnt.take_in(from_ref(&new), HOUR, start + 10 * HOUR);
        learnt.take_in(from_ref(&new), HOUR, start);
        assert_eq!(learnt.sweep(start + 2 * HOUR).len(), 1);
        assert_eq!(names(&learnt), [new.name()]);
    }

    #[test]
    fn one_that_is_named_stays_whatever_the_clock_says_and_there_is_an_end_to_how_many_are_kept() {
        let old = TestCa::new().root();
        let mut learnt = Learnt::default();
        learnt.take_in(from_ref(&old), HOUR, UNIX_EPOCH);
        assert!(learnt.sweep(old.not_after).is_empty());
        for n in 0..100 {
            let mut root = old.clone();
            root.fingerprint = [n; 32];
            learnt.take_in(from_ref(&root), HOUR, UNIX_EPOCH);
        }
        assert_eq!(learnt.all().count(), MAX_LEARNT);
        assert_eq!(learnt.all().filter(|(_, named)| *named).count(), 1);
        assert_eq!(names(&learnt).last().unwrap(), &hex_of(99));
    }

    fn hex_of(byte: u8) -> String {
        crate::identity::chain::hex(&[byte; 32])
    }
}
