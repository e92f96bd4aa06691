use super::backlog::Taken;
use super::*;

fn event(name: &str, note: &str) -> Event {
    Event::warning(
        Regarding::pod("shop", name, "u1"),
        "CaptureFailed",
        "Enrol",
        note.into(),
    )
}

struct Clock {
    start: Instant,
    backlog: Backlog,
}

impl Clock {
    fn new() -> Self {
        let start = Instant::now();
        Self {
            start,
            backlog: Backlog::new(start),
        }
    }

    fn at(&self, seconds: u64) -> (Instant, Timestamp) {
        let wall = Timestamp::from_second(1_800_000_000 + seconds as i64).unwrap();
        (self.start + Duration::from_secs(seconds), wall)
    }

    fn take(&mut self, seconds: u64, event: Event) -> Taken {
        let (now, wall) = self.at(seconds);
        self.backlog.take(event, now, wall)
    }

    /// What is written at that time, with that outcome, as `create NOTE x COUNT` or `count N`.
    fn writes(&mut self, seconds: u64, outcome: Outcome) -> Vec<String> {
        let (now, _) = self.at(seconds);
        let mut said = Vec::new();
        while let Some((id, write)) = self.backlog.next(now) {
            said.push(match &write {
                Write::Create { event, count, .. } => format!("create {} x {count}", event.note),
                Write::Count { count, .. } => format!("count {count}"),
            });
            self.backlog.done(&id, &write, outcome, now);
            if outcome == Outcome::Unanswered {
                break;
            }
        }
        said
    }
}

#[test]
fn repeats_raise_the_count_at_most_once_a_minute() {
    let mut clock = Clock::new();
    assert_eq!(clock.take(0, event("a", "x")), Taken::New);
    assert_eq!(clock.writes(0, Outcome::Written), ["create x x 1"]);
    for second in 1..10 {
        assert_eq!(clock.take(second, event("a", "x")), Taken::Repeated);
    }
    assert_eq!(clock.writes(59, Outcome::Written), [""; 0]);
    assert_eq!(clock.writes(60, Outcome::Written), ["count 10"]);
    assert_eq!(clock.writes(200, Outcome::Written), [""; 0]);
}

#[test]
fn another_note_is_another_event_a_minute_later() {
    let mut clock = Clock::new();
    clock.take(0, event("a", "x"));
    assert_eq!(clock.writes(0, Outcome::Written), ["create x x 1"]);
    clock.take(1, event("a", "y"));
    clock.take(2, event("a", "z"));
    assert_eq!(clock.writes(59, Outcome::Written), [""; 0]);
    assert_eq!(clock.writes(60, Outcome::Written), ["create z x 1"]);
}

#[test]
fn objects_and_reasons_are_told_apart() {
    let mut clock = Clock::new();
    let mut other_reason = event("a", "x");
    other_reason.reason = "Excluded";
    let mut other_uid = event("a", "x");
    other_uid.regarding.uid = "u2".into();
    for event in [event("a", "x"), event("b", "x"), other_reason, other_uid] {
        assert_eq!(clock.take(0, event), Taken::New);
    }
    assert_eq!(clock.writes(0, Outcome::Written).len(), 4);
}

#[test]
fn in_all_a_burst_and_then_one_a_second() {
    let mut clock = Clock::new();
    for number in 0..70 {
        clock.take(0, event(&format!("p{number}"), "x"));
    }
    assert_eq!(clock.writes(0, Outcome::Written).len(), 50);
    let (now, _) = clock.at(0);
    assert_eq!(clock.backlog.next_at(now), Some(clock.at(1).0));
    assert_eq!(clock.writes(10, Outcome::Written).len(), 10);
    assert_eq!(clock.writes(60, Outcome::Written).len(), 10);
    assert_eq!(clock.backlog.next_at(clock.start), None);
}

#[test]
fn what_waits_is_bounded_and_what_is_quiet_makes_room() {
    let mut clock = Clock::new();
    for number in 0..1024 {
        assert_eq!(clock.take(0, event(&format!("p{number}"), "x")), Taken::New);
    }
    assert_eq!(clock.take(0, event("more", "x")), Taken::Full);
    assert_eq!(clock.writes(0, Outcome::Written).len(), 50);
    assert_eq!(clock.take(599, event("more", "x")), Taken::Full);
    assert_eq!(clock.take(601, event("more", "x")), Taken::New);
}

#[test]
fn without_an_answer_it_is_written_later_with_what_came_since() {
    let mut clock = Clock::new();
    clock.take(0, event("a", "x"));
    assert_eq!(clock.writes(0, Outcome::Unanswered), ["create x x 1"]);
    clock.take(1, event("a", "x"));
    assert_eq!(clock.writes(2, Outcome::Written), ["create x x 2"]);
}

#[test]
fn refused_it_is_given_up_and_the_next_is_made_anew() {
    let mut clock = Clock::new();
    clock.take(0, event("a", "x"));
    assert_eq!(clock.writes(0, Outcome::Refused), ["create x x 1"]);
    assert_eq!(clock.writes(100, Outcome::Written), [""; 0]);
    clock.take(101, event("a", "x"));
    assert_eq!(clock.writes(101, Outcome::Written), ["create x x 1"]);
    // An event that the API has let go of.
    clock.take(102, event("a", "x"));
    assert_eq!(clock.writes(170, Outcome::Refused), ["count 2"]);
    clock.take(171, event("a", "x"));
    assert_eq!(clock.writes(171, Outcome::Written), ["create x x 1"]);
}

#[test]
fn after_ten_quiet_minutes_the_next_is_an_event_of_its_own() {
    let mut clock = Clock::new();
    clock.take(0, event("a", "x"));
    clock.writes(0, Outcome::Written);
    assert_eq!(clock.take(600, event("a", "x")), Taken::New);
    assert_eq!(clock.writes(600, Outcome::Written), ["create x x 1"]);
}

#[test]
fn nothing_waits_for_a_queue_that_is_full_or_absent() {
    let silent = Events::silent();
    silent.emit(event("a", "x"));
    assert_eq!(silent.counts().dropped, 1);
    let (queue, _kept) = mpsc::channel(1);
    let events = Events {
        queue: Some(queue),
        counters: Arc::default(),
    };
    events.emit(event("a", "x"));
    events.emit(event("b", "x"));
    assert_eq!(events.counts().dropped, 1);
}

#[test]
fn long_texts_are_cut_between_characters() {
    assert_eq!(cut("abc", 5), "abc");
    assert_eq!(cut("aé", 2), "a");
}
