//! What waits to be written, and when it may be: a pure state with the time passed in.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use k8s_openapi::jiff::Timestamp;
use tokio::time::Instant;

use super::{Event, Regarding, cut};

/// How many pairs of object and reason are known at a time.
const MAX_SERIES: usize = 1024;
/// How often one pair may be written.
const PAIR_INTERVAL: Duration = Duration::from_secs(60);
/// How long after its last occurrence a pair is forgotten, so that the next is an event of its own.
const FORGET: Duration = Duration::from_secs(600);
/// How many writes may come at once, and how often one more may.
const BURST: f64 = 50.0;
const PER_SECOND: f64 = 1.0;

/// What is counted together: an object and a reason.
pub(super) type Id = (Regarding, &'static str);

/// What became of an occurrence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Taken {
    /// It waits to become an event.
    New,
    /// It is one more of an event.
    Repeated,
    /// There is no room for it.
    Full,
}

/// A request to the API.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Write {
    /// Make an event.
    Create {
        event: Event,
        name: String,
        count: i32,
        first: Timestamp,
        last: Timestamp,
    },
    /// Raise an event's count.
    Count {
        regarding: Regarding,
        name: String,
        count: i32,
        last: Timestamp,
    },
}

/// What became of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Outcome {
    /// Done.
    Written,
    /// The API refuses it, and would again.
    Refused,
    /// The API did not answer, or not now.
    Unanswered,
}

pub(super) struct Backlog {
    series: HashMap<Id, Series>,
    /// Those that have something to write, in the order in which they came.
    waiting: VecDeque<Id>,
    tokens: f64,
    filled: Instant,
}

struct Series {
    event: Event,
    /// The event in the API that stands for it, and its note.
    written: Option<(String, String)>,
    /// Occurrences under this event.
    count: i32,
    first: Timestamp,
    last: Timestamp,
    seen: Instant,
    /// Not to be written before.
    not_before: Instant,
    /// Whether something about it is not yet in the API; then it is in `waiting`.
    dirty: bool,
}

impl Backlog {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            series: HashMap::new(),
            waiting: VecDeque::new(),
            tokens: BURST,
            filled: now,
        }
    }

    pub(super) fn take(&mut self, event: Event, now: Instant, wall: Timestamp) -> Taken {
        let id = (event.regarding.clone(), event.reason);
        if let Some(series) = self.series.get_mut(&id) {
            // A pair that was quiet for long enough begins anew, as after an event's end of life.
            if !series.dirty && now.duration_since(series.seen) >= FORGET {
                self.series.remove(&id);
            } else {
                let another = series.event.note != event.note;
                series.seen = now;
                series.last = wall;
                series.count = series.count.saturating_add(1);
                if another {
                    series.event = event;
                }
                if !std::mem::replace(&mut series.dirty, true) {
                    self.waiting.push_back(id);
                }
                return Taken::Repeated;
            }
        }
        if self.series.len() >= MAX_SERIES {
            self.series
                .retain(|_, series| series.dirty || now.duration_since(series.seen) < FORGET);
            if self.series.len() >= MAX_SERIES {
                return Taken::Full;
            }
        }
        self.waiting.push_back(id.clone());
        let series = Series {
            event,
            written: None,
            count: 1,
            first: wall,
            last: wall,
            seen: now,
            not_before: now,
            dirty: true,
        };
        self.series.insert(id, series);
        Taken::New
    }

    /// When the next write may be made; `None` where nothing waits.
    pub(super) fn next_at(&mut self, now: Instant) -> Option<Instant> {
        let due = self.waiting.iter().map(|id| self.series[id].not_before).min()?;
        self.fill(now);
        let token = match self.tokens >= 1.0 {
            true => now,
            false => now + Duration::from_secs_f64((1.0 - self.tokens) / PER_SECOND),
        };
        Some(due.max(token))
    }

    /// The next write, if one may be made now. The caller tells its outcome by [`Self::done`].
    pub(super) fn next(&mut self, now: Instant) -> Option<(Id, Write)> {
        self.fill(now);
        if self.tokens < 1.0 {
            return None;
        }
        let position = self.waiting.iter().position(|id| self.series[id].not_before <= now)?;
        let id = self.waiting.remove(position)?;
        let series = self.series.get_mut(&id)?;
        self.tokens -= 1.0;
        series.dirty = false;
        let write = match &series.written {
            Some((name, note)) if *note == series.event.note => Write::Count {
                regarding: id.0.clone(),
                name: name.clone(),
                count: series.count,
                last: series.last,
            },
            // An event's note cannot be changed: another note is another event, which begins to count anew.
            written => {
                if written.is_some() {
                    series.count = 1;
                    series.first = series.last;
                }
                Write::Create {
                    name: event_name(&id.0.name, series.first),
                    event: series.event.clone(),
                    count: series.count,
                    first: series.first,
                    last: series.last,
                }
            }
        };
        Some((id, write))
    }

    /// Takes note of what became of a write.
    pub(super) fn done(&mut self, id: &Id, write: &Write, outcome: Outcome, now: Instant) {
        let Some(series) = self.series.get_mut(id) else {
            return;
        };
        match (outcome, write) {
            (Outcome::Written, Write::Create { name, event, .. }) => {
                series.written = Some((name.clone(), event.note.clone()));
                series.not_before = now + PAIR_INTERVAL;
            }
            (Outcome::Written, Write::Count { .. }) => series.not_before = now + PAIR_INTERVAL,
            // The event is gone: the occurrences after this one make another.
            (Outcome::Refused, _) => {
                series.written = None;
                series.count = 0;
                series.not_before = now + PAIR_INTERVAL;
                if !series.dirty {
                    self.series.remove(id);
                }
            }
            (Outcome::Unanswered, _) => {
                if !std::mem::replace(&mut series.dirty, true) {
                    self.waiting.push_front(id.clone());
                }
            }
        }
    }

    fn fill(&mut self, now: Instant) {
        let passed = now.saturating_duration_since(self.filled).as_secs_f64();
        self.tokens = (self.tokens + passed * PER_SECOND).min(BURST);
        self.filled = self.filled.max(now);
    }
}

/// As other reporters name theirs: the object's name and a number that no other event of this process has.
fn event_name(object: &str, first: Timestamp) -> String {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    // A name has 253 characters at most, and what follows needs 33.
    format!(
        "{}.{:x}.{number:x}",
        cut(object, 220).trim_end_matches(['.', '-']),
        first.as_nanosecond() as u64
    )
}
