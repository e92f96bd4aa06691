use std::collections::HashSet;
use std::sync::Mutex;
use std::sync::atomic::{AtomicI64, AtomicUsize};

use super::*;
use crate::identity::testing::{LeafOptions, TestCa, id};
use crate::identity::{BoxFuture, IdentityState, Issued, PrivateKey};

const SECOND: Duration = Duration::from_secs(1);
const MINUTE: Duration = Duration::from_secs(60);
const HOUR: Duration = Duration::from_secs(3600);

/// How the CA is.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Mood {
    Well,
    Unreachable,
    /// Answers nothing; the caller gives up after 5 s.
    Hangs,
}

/// A CA that signs at once, or fails as it is told to, on the test's clock.
struct ScriptedCa {
    ca: TestCa,
    clock: Clock,
    /// That of who asks.
    node: Clock,
    mood: Mutex<Mood>,
    refused: Mutex<HashSet<SpiffeId>>,
    lifetime: Mutex<Duration>,
    /// Who asked when.
    calls: Mutex<Vec<(SpiffeId, Instant)>>,
    in_flight: AtomicUsize,
    most_in_flight: AtomicUsize,
}

/// A wall clock that goes with the runtime's, which the tests move, and can be stepped.
#[derive(Clone)]
struct Clock {
    base: SystemTime,
    start: Instant,
    step: Arc<AtomicI64>,
}

impl Clock {
    fn now(&self) -> SystemTime {
        let step = self.step.load(Ordering::Relaxed);
        let size = Duration::from_secs(step.unsigned_abs());
        let now = self.base + self.start.elapsed();
        if step < 0 { now - size } else { now + size }
    }

    fn step(&self, seconds: i64) {
        self.step.fetch_add(seconds, Ordering::Relaxed);
    }
}

struct World {
    ca: Arc<ScriptedCa>,
    store: CertStore,
    clock: Clock,
}

/// Counts a call while it is in flight, however it ends.
struct InFlight<'a>(&'a ScriptedCa);

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Issuer for ScriptedCa {
    fn issue<'a>(&'a self, id: &'a SpiffeId) -> BoxFuture<'a, Result<Issued, IssueError>> {
        Box::pin(async move {
            self.calls.lock().unwrap().push((id.clone(), Instant::now()));
            let now = self.in_flight.fetch_add(1, Ordering::Relaxed) + 1;
            self.most_in_flight.fetch_max(now, Ordering::Relaxed);
            let _in_flight = InFlight(self);
            let ca = self.describe();
            let mood = *self.mood.lock().unwrap();
            match mood {
                Mood::Unreachable => {
                    let reason = "connection refused".into();
                    return Err(IssueError::Unavailable { ca, reason });
                }
                Mood::Hangs => {
                    tokio::time::sleep(5 * SECOND).await;
                    return Err(IssueError::Deadline { ca, seconds: 5 });
                }
                Mood::Well => tokio::time::sleep(Duration::from_millis(4)).await,
            }
            if self.refused.lock().unwrap().contains(id) {
                let reason = "no pod of it".into();
                return Err(IssueError::PermissionDenied { ca, reason });
            }
            let now = self.clock.now();
            let key = PrivateKey::generate()?;
            let options = LeafOptions {
                not_before: now - MINUTE,
                not_after: now + *self.lifetime.lock().unwrap(),
                ..LeafOptions::default()
            };
            let chain = self.ca.sign(id, &key.public_key(), options);
            let certificate = Certificate::new_at(id, &chain, key, self.node.now());
            certificate
                .map(Issued::from)
                .map_err(|reason| IssueError::Answer { ca, reason })
        })
    }

    fn describe(&self) -> String {
        "the scripted CA".into()
    }
}

impl World {
    fn new() -> Self {
        let [clock, clock_of_ca] = [(); 2].map(|()| Clock {
            base: SystemTime::now(),
            start: Instant::now(),
            step: Arc::default(),
        });
        let ca = Arc::new(ScriptedCa {
            ca: TestCa::new(),
            clock: clock_of_ca,
            node: clock.clone(),
            mood: Mutex::new(Mood::Well),
            refused: Mutex::default(),
            lifetime: Mutex::new(HOUR),
            calls: Mutex::default(),
            in_flight: AtomicUsize::new(0),
            most_in_flight: AtomicUsize::new(0),
        });
        let random = Mutex::new(fastrand::Rng::with_seed(7));
        let now = clock.clone();
        let settings = StoreSettings {
            now: Arc::new(move || now.now()),
            random: Arc::new(move || random.lock().unwrap().f64()),
            ..StoreSettings::default()
        };
        let store = CertStore::new(ca.clone(), settings);
        Self { ca, store, clock }
    }

    fn enrol(&self, count: usize) -> Vec<IdentityLease> {
        (0..count)
            .map(|number| self.store.acquire(&id("shop", &format!("app-{number}"))))
            .collect()
    }

    fn set(&self, mood: Mood) {
        *self.ca.mood.lock().unwrap() = mood;
    }

    fn states(&self) -> Vec<IdentityState> {
        self.store.snapshot().into_iter().map(|status| status.state).collect()
    }

    fn count(&self, state: IdentityState) -> usize {
        self.states().into_iter().filter(|found| *found == state).count()
    }

    /// Takes the calls noted so far.
    fn take_calls(&self) -> Vec<(SpiffeId, Instant)> {
        std::mem::take(&mut self.ca.calls.lock().unwrap())
    }
}

async fn pass(time: Duration) {
    tokio::time::sleep(time).await;
}

#[tokio::test(start_paused = true)]
async fn after_an_outage_of_any_length_all_are_healthy_within_10_s_without_a_spike() {
    for (mood, outage) in [
        (Mood::Unreachable, 40 * MINUTE),
        (Mood::Hangs, 40 * MINUTE),
        (Mood::Unreachable, 48 * HOUR),
        (Mood::Hangs, 3 * HOUR),
    ] {
        let world = World::new();
        let leases = world.enrol(500);
        pass(10 * SECOND).await;
        assert_eq!(world.count(IdentityState::Valid), 500);
        world.set(mood);
        pass(outage).await;
        let expired = world.count(IdentityState::Expired);
        assert_eq!(expired, if outage > HOUR { 500 } else { 0 });
        world.take_calls();
        world.set(Mood::Well);
        let back = Instant::now();
        pass(10 * SECOND).await;
        let now = world.clock.now();
        let healthy = world
            .store
            .snapshot()
            .iter()
            .all(|status| status.state == IdentityState::Valid && status.not_before.unwrap() + 20 * MINUTE > now);
        assert!(healthy, "{mood:?} for {outage:?}");
        // The first that found it back is a probe; from then on they are spread.
        let times: Vec<_> = world.take_calls().into_iter().map(|(_, at)| at - back).collect();
        let (first, last) = (times[0], *times.last().unwrap());
        let mut bins = [0; 10];
        for time in &times {
            bins[((*time - first).div_duration_f64(last - first) * 9.99) as usize] += 1;
        }
        let mean = times.len() / bins.len();
        println!("{mood:?} for {outage:?}: {first:?} to {last:?}, {bins:?}");
        assert!(bins.iter().all(|bin| *bin <= 2 * mean), "{bins:?}");
        drop(leases);
    }
}

#[tokio::test(start_paused = true)]
async fn a_ca_that_hangs_costs_its_deadline_once_and_not_for_each_identity() {
    let world = World::new();
    world.set(Mood::Hangs);
    let _leases = world.enrol(100);
    pass(Duration::from_millis(4900)).await;
    assert_eq!(world.take_calls().len(), 6, "what may be in flight at once");
    pass(15 * SECOND).await;
    let probes = world.take_calls().len();
    assert!((4..=6).contains(&probes), "{probes} probes");
    // Who waits is told why, though the CA was never asked for it.
    let unlucky = id("shop", "app-99");
    let Err(IdentityError::Unavailable {
        reason: Some(reason), ..
    }) = world.store.get(&unlucky).await
    else {
        panic!("it has a certificate");
    };
    assert!(reason.to_string().contains("did not answer within 5 s"), "{reason}");
}

#[tokio::test(start_paused = true)]
async fn identities_that_are_refused_slow_nobody_and_are_asked_for_ever_more_rarely() {
    let world = World::new();
    for number in 0..50 {
        world
            .ca
            .refused
            .lock()
            .unwrap()
            .insert(id("shop", &format!("app-{number}")));
    }
    let _leases = world.enrol(100);
    pass(SECOND).await;
    assert_eq!(world.count(IdentityState::Valid), 50);
    assert_eq!(world.count(IdentityState::Failed), 50);
    pass(10 * MINUTE).await;
    world.take_calls();
    pass(10 * MINUTE).await;
    let calls = world.take_calls().len();
    assert!((50 * 4..=50 * 9).contains(&calls), "{calls} calls in 10 minutes for 50");
    // A pod whose turn it is now is served at once.
    let late = world.store.acquire(&id("shop", "late"));
    let asked = Instant::now();
    world.store.get(late.id()).await.unwrap();
    assert!(asked.elapsed() < Duration::from_millis(50), "{:?}", asked.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_ca_that_refuses_a_while_serves_who_waits_within_a_second_and_the_rest_soon() {
    let world = World::new();
    let [waits, rests] = ["app-0", "app-1"].map(|name| id("shop", name));
    *world.ca.refused.lock().unwrap() = [waits.clone(), rests.clone()].into();
    let _leases = world.enrol(2);
    let demand = tokio::spawn({
        let (store, waits) = (world.store.clone(), waits.clone());
        async move { while store.get(&waits).await.is_err() {} }
    });
    pass(20 * SECOND).await;
    let calls = world.take_calls();
    let demanded = calls.iter().filter(|(id, _)| *id == waits).count();
    assert!((18..=24).contains(&demanded), "{demanded} calls in 20 s");
    world.ca.refused.lock().unwrap().clear();
    pass(SECOND).await;
    assert!(demand.is_finished());
    pass(20 * SECOND).await;
    assert_eq!(world.states(), [IdentityState::Valid; 2]);
}

#[tokio::test(start_paused = true)]
async fn a_valid_certificate_is_served_until_it_expires_and_renewals_that_fail_are_once_a_minute() {
    let world = World::new();
    let _lease = world.enrol(1);
    let app = id("shop", "app-0");
    let first = world.store.get(&app).await.unwrap();
    world.ca.refused.lock().unwrap().insert(app.clone());
    pass(40 * MINUTE).await;
    world.take_calls();
    pass(10 * MINUTE).await;
    let calls = world.take_calls().len();
    assert!((5..=10).contains(&calls), "{calls} in 10 minutes");
    assert_eq!(world.store.try_get(&app).unwrap().serial(), first.serial());
    assert_eq!(world.states(), [IdentityState::Stale]);
    pass(first.not_after().duration_since(world.clock.now()).unwrap()).await;
    assert_eq!(world.states(), [IdentityState::Expired]);
    assert!(world.store.try_get(&app).is_none());
    let error = world.store.get(&app).await.unwrap_err();
    assert!(error.to_string().contains("no pod of it"), "{error}");
    world.ca.refused.lock().unwrap().clear();
    assert_ne!(world.store.get(&app).await.unwrap().serial(), first.serial());
}

#[tokio::test(start_paused = true)]
async fn a_clock_that_is_stepped_is_followed_either_way() {
    const DAY: i64 = 86_400;
    for (node, authority, wrong) in [
        (45 * 60, 0, None),
        (45 * 60, 45 * 60, None),
        (400 * DAY, 400 * DAY, None),
        (-3600, -3600, None),
        (-400 * DAY, -400 * DAY, None),
        // The node's clock is wrong: nothing helps until it is right.
        (3 * 3600, 0, Some("has expired")),
        (-3600, 0, Some("not valid yet; compare the clocks")),
        (-400 * DAY, 0, Some("not valid yet; compare the clocks")),
    ] {
        let world = World::new();
        let _leases = world.enrol(20);
        pass(5 * SECOND).await;
        assert_eq!(world.take_calls().len(), 20);
        pass(MINUTE).await;
        assert_eq!(world.take_calls().len(), 0);
        world.ca.clock.step(authority);
        world.clock.step(node);
        pass(15 * SECOND).await;
        let case = format!("{node} s, the CA {authority} s");
        let calls = world.take_calls().len();
        match wrong {
            None => assert_eq!(calls, 20, "{case}"),
            Some(reason) => {
                assert!((20..=120).contains(&calls), "{case}: {calls}");
                let status = &world.store.snapshot()[0];
                assert_eq!(status.state, IdentityState::Expired);
                let error = status.last_error.as_deref().unwrap();
                assert!(error.contains(reason), "{case}: {error}");
                world.clock.step(-node);
                pass(12 * SECOND).await;
            }
        }
        assert_eq!(
            world.count(IdentityState::Valid),
            20,
            "{case}: {:?}",
            world.store.snapshot()[0]
        );
        let unserved = |status: &IdentityStatus| world.store.try_get(&status.id).is_none();
        assert!(!world.store.snapshot().iter().any(unserved), "{case}");
        world.take_calls();
        pass(10 * MINUTE).await;
        let calls = world.take_calls().len();
        assert!(calls <= 10 * 20, "{case}: {calls} in 10 minutes");
    }
}

#[tokio::test(start_paused = true)]
async fn a_node_whose_clock_is_wrong_at_boot_waits_for_it_with_a_clear_error() {
    let world = World::new();
    world.clock.step(-400 * 86_400);
    let _leases = world.enrol(10);
    pass(10 * MINUTE).await;
    let calls = world.take_calls().len();
    assert!(calls <= 10 * 15, "{calls} in 10 minutes");
    let error = world.store.snapshot()[0].last_error.clone().unwrap();
    assert!(error.contains("not valid yet; compare the clocks"), "{error}");
    world.clock.step(400 * 86_400);
    pass(12 * SECOND).await;
    assert_eq!(world.count(IdentityState::Valid), 10);
}

#[tokio::test(start_paused = true)]
async fn nothing_is_asked_for_without_need() {
    let world = World::new();
    *world.ca.lifetime.lock().unwrap() = 24 * HOUR;
    let leases = world.enrol(100);
    pass(SECOND).await;
    assert_eq!(world.take_calls().len(), 100);
    assert!(world.ca.most_in_flight.load(Ordering::Relaxed) <= 8);
    pass(10 * HOUR).await;
    assert_eq!(world.take_calls().len(), 0);
    pass(4 * HOUR).await;
    let renewed = world.take_calls();
    assert_eq!(renewed.len(), 100, "each once, around half of its life");
    drop(leases);
    pass(24 * HOUR).await;
    assert_eq!(world.take_calls().len(), 0);
    assert_eq!(world.store.stats().identities, 0);
}

#[tokio::test(start_paused = true)]
async fn who_only_expects_a_certificate_makes_no_call_more_urgent() {
    let world = World::new();
    world.ca.refused.lock().unwrap().insert(id("shop", "app-0"));
    let _leases = world.enrol(1);
    let expecting = tokio::spawn({
        let store = world.store.clone();
        async move { while store.expect(&id("shop", "app-0")).await.is_err() {} }
    });
    pass(MINUTE).await;
    let calls = world.take_calls().len();
    assert!(calls <= 8, "{calls} in a minute");
    world.ca.refused.lock().unwrap().clear();
    pass(MINUTE).await;
    assert!(expecting.is_finished());
}

#[tokio::test(start_paused = true)]
async fn an_outage_that_nobody_is_left_to_have_met_is_not_told_of() {
    let world = World::new();
    let _others = world.enrol(3);
    pass(SECOND).await;
    world.set(Mood::Unreachable);
    let late = world.store.acquire(&id("shop", "late"));
    pass(MINUTE).await;
    assert!(world.store.stats().away.is_some_and(|away| away > 50 * SECOND));
    drop(late);
    assert_eq!(world.store.stats().away, None);
}

#[tokio::test(start_paused = true)]
async fn whoever_leaves_while_the_ca_hangs_leaves_nothing_behind() {
    let world = World::new();
    world.set(Mood::Hangs);
    let leases = world.enrol(30);
    pass(SECOND).await;
    assert_eq!(world.store.stats().in_flight, 6);
    drop(leases);
    pass(Duration::from_millis(1)).await;
    assert_eq!(world.store.stats().in_flight, 0);
    assert_eq!(world.ca.in_flight.load(Ordering::Relaxed), 0);
    world.set(Mood::Well);
    let _leases = world.enrol(30);
    pass(SECOND).await;
    assert_eq!(world.count(IdentityState::Valid), 30);
}
