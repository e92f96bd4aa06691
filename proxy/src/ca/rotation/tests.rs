use serde_json::Value;

use super::super::fake_api::{FakeApi, Way};
use super::super::keyring::Phase;
use super::super::leader::{Candidate, Times};
use super::*;

const SECRET: &str = "/api/v1/namespaces/adit-system/secrets/adit-ca-key";
const LEASE: &str = "/apis/coordination.k8s.io/v1/namespaces/adit-system/leases/adit-ca";

fn domain() -> TrustDomain {
    TrustDomain::parse("cluster.local").unwrap()
}

fn keeper(way: &Way, leadership: Leadership) -> Keeper {
    Keeper {
        place: SecretPlace::new(way.client.clone(), "adit-system", "adit-ca-key"),
        desk: desk(way),
        leadership,
        trust_domain: domain(),
        longest: Duration::from_secs(3600),
        watched: Watched::default(),
    }
}

fn desk(way: &Way) -> Desk {
    Desk::new(way.client.clone(), "adit-system", "adit-ca-rotation")
}

fn keyring_of(secret: &Value) -> Keyring {
    let written: k8s_openapi::ByteString = serde_json::from_value(secret["data"]["keyring.json"].clone()).unwrap();
    Keyring::read(&written.0).unwrap()
}

/// The certificates that were ever in the Secret; each version has the one that signs.
fn roots_ever(api: &FakeApi) -> Vec<String> {
    let mut ever = Vec::new();
    for version in api.history(SECRET) {
        let keyring = keyring_of(&version);
        assert!(keyring.bundle().contains(keyring.signing().1));
        for root in keyring.standing().roots {
            if !ever.contains(&root.fingerprint) {
                ever.push(root.fingerprint);
            }
        }
    }
    ever
}

struct Replica {
    way: Way,
    keeper: Keeper,
    authority: Authority,
    held: Keyring,
}

/// A replica that believes to lead.
async fn replica(api: &FakeApi) -> Replica {
    let way = api.way().await;
    let keeper = keeper(&way, Leadership::certain());
    let (authority, held) = keeper.open().await.unwrap();
    Replica {
        way,
        keeper,
        authority,
        held,
    }
}

impl Replica {
    async fn look(&mut self) -> Result<(), ClusterError> {
        self.keeper.look(&self.authority, &mut self.held).await
    }
}

#[tokio::test]
async fn replicas_that_all_believe_to_lead_make_one_root_and_one_more_for_one_change() {
    let api = FakeApi::default();
    let mut opened = futures_util::future::join_all((0..4).map(|_| replica(&api))).await;
    assert_eq!(roots_ever(&api).len(), 1);
    let asked = Asked::new(Step::Publish, false);
    desk(&opened[0].way).ask(&asked).await.unwrap();
    for _ in 0..4 {
        let looks = opened.iter_mut().map(Replica::look);
        assert!(futures_util::future::join_all(looks).await.iter().all(Result::is_ok));
    }
    assert_eq!(roots_ever(&api).len(), 2);
    let answer = desk(&opened[0].way).answer(&asked.id).await.unwrap().unwrap();
    assert!(answer.done, "{answer:?}");
    for replica in &opened {
        assert_eq!(replica.held.phase(), Phase::Published);
        assert_eq!(*replica.authority.root_pem(), opened[0].held.bundle());
    }
}

#[tokio::test]
async fn a_leader_that_is_killed_at_any_point_of_a_change_loses_nothing_and_another_goes_on() {
    for step in [Step::Publish, Step::Sign, Step::Retire] {
        for requests in 0..7 {
            let api = FakeApi::default();
            let mut first = replica(&api).await;
            let mut second = replica(&api).await;
            for before in [Step::Publish, Step::Sign] {
                if before == step {
                    break;
                }
                desk(&first.way).ask(&Asked::new(before, true)).await.unwrap();
                first.look().await.unwrap();
            }
            first.look().await.unwrap();
            let known = keyring_of(&api.object(SECRET).unwrap());
            let asked = Asked::new(step, true);
            desk(&first.way).ask(&asked).await.unwrap();
            first.way.cut_after(requests);
            let _ = first.look().await;
            let between = keyring_of(&api.object(SECRET).unwrap());
            assert!(between.revision == known.revision || between.revision == known.revision + 1);
            for _ in 0..3 {
                second.look().await.unwrap();
            }
            let answer = desk(&second.way).answer(&asked.id).await.unwrap().unwrap();
            assert!(answer.done, "{step:?} after {requests}: {answer:?}");
            let now = keyring_of(&api.object(SECRET).unwrap());
            assert_eq!(now.revision, known.revision + 1, "{step:?} after {requests}");
            assert_eq!(roots_ever(&api).len(), 2, "{step:?} after {requests}");
            assert_eq!(*second.authority.root_pem(), now.bundle());
            // The killed one comes back, still believing to lead, and follows.
            first.way.cut(false);
            first.look().await.unwrap();
            assert_eq!(first.held.revision, now.revision);
            assert_eq!(roots_ever(&api).len(), 2);
        }
    }
}

#[tokio::test]
async fn keys_that_are_deleted_or_put_back_to_earlier_ones_are_there_again_and_foreign_ones_are_not_touched() {
    let api = FakeApi::default();
    let mut replica = replica(&api).await;
    replica.look().await.unwrap();
    let mut behind = Replica {
        way: api.way().await,
        keeper: keeper(&replica.way, Leadership::certain()),
        authority: Authority::of_keyring("it", &replica.held, &domain()).unwrap(),
        held: replica.held.clone(),
    };
    desk(&replica.way).ask(&Asked::new(Step::Publish, false)).await.unwrap();
    replica.look().await.unwrap();
    // Deleted, and restored by one that has not heard of the new root.
    api.remove(SECRET);
    behind.look().await.unwrap();
    assert_eq!(keyring_of(&api.object(SECRET).unwrap()).phase(), Phase::Steady);
    replica.look().await.unwrap();
    assert_eq!(keyring_of(&api.object(SECRET).unwrap()).phase(), Phase::Published);
    behind.look().await.unwrap();
    assert_eq!(behind.held.revision, replica.held.revision);

    api.remove(SECRET);
    let foreign = Keyring::found(&domain(), SystemTime::now()).unwrap();
    assert!(replica.keeper.place.create(&foreign).await.unwrap());
    assert!(matches!(replica.look().await, Err(ClusterError::Replaced(_))));
    assert_eq!(keyring_of(&api.object(SECRET).unwrap()).bundle(), foreign.bundle());
}

#[tokio::test]
async fn who_does_not_lead_changes_nothing() {
    let api = FakeApi::default();
    let way = api.way().await;
    let idle = keeper(&way, Leadership::default());
    assert!(matches!(idle.open().await, Err(ClusterError::NoLeader(_))));
    let _leader = replica(&api).await;
    let (authority, mut held) = idle.open().await.unwrap();
    desk(&way).ask(&Asked::new(Step::Publish, false)).await.unwrap();
    idle.look(&authority, &mut held).await.unwrap();
    assert_eq!(roots_ever(&api).len(), 1);
    api.remove(SECRET);
    idle.look(&authority, &mut held).await.unwrap();
    assert!(api.object(SECRET).is_none());
}

#[tokio::test]
async fn a_leader_that_is_cut_off_gives_up_before_another_takes_over_and_clocks_do_not_matter() {
    let api = FakeApi::default();
    let times = Times {
        lease_s: 1,
        rely: Duration::from_millis(600),
        retry: Duration::from_millis(50),
    };
    let (one, two) = (api.way().await, api.way().await);
    let stand = |way: &Way, host: &str| {
        let candidate = Candidate::new(way.client.clone(), "adit-system", "adit-ca", host, times);
        let leadership = candidate.leadership();
        (leadership, tokio::spawn(candidate.run(std::future::pending())))
    };
    let (first, _running) = stand(&one, "one");
    wait_until(|| first.is_mine()).await;
    let (second, _also) = stand(&two, "two");
    tokio::time::sleep(Duration::from_millis(1500)).await;
    assert!(first.is_mine() && !second.is_mine());

    one.cut(true);
    let mut both = 0;
    let deadline = tokio::time::Instant::now() + Duration::from_secs(5);
    while !second.is_mine() {
        both += u32::from(first.is_mine() && second.is_mine());
        assert!(tokio::time::Instant::now() < deadline, "nobody takes over");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert!(both == 0 && !first.is_mine());
    // It comes back, and follows.
    one.cut(false);
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert!(!first.is_mine() && second.is_mine());
    assert_eq!(first.holder().1, 1);
    assert!(first.holder().0.starts_with("two_"));

    // A holder whose clock stands decades off is left alone for as long as it writes, and no longer.
    let lease = api.object(LEASE).unwrap();
    assert_eq!(lease["spec"]["leaseTransitions"], 1);
    two.cut(true);
    let mut foreign = lease;
    for number in 0..20 {
        foreign["spec"]["holderIdentity"] = "other".into();
        foreign["spec"]["renewTime"] = format!("1999-01-01T00:00:{number:02}.000000Z").into();
        api.put(LEASE, foreign.clone());
        tokio::time::sleep(Duration::from_millis(100)).await;
        assert!(!first.is_mine(), "after {number}");
    }
    wait_until(|| first.is_mine()).await;
}

#[tokio::test]
async fn a_leader_that_ends_lets_go_at_once() {
    let api = FakeApi::default();
    let way = api.way().await;
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let candidate = Candidate::new(way.client.clone(), "adit-system", "adit-ca", "one", Times::default());
    let leadership = candidate.leadership();
    let running = tokio::spawn(candidate.run(async move { drop(stopped.await) }));
    wait_until(|| leadership.is_mine()).await;
    drop(stop);
    running.await.unwrap();
    assert!(!leadership.is_mine());
    assert!(api.object(LEASE).unwrap()["spec"]["holderIdentity"].is_null());
    let next = Candidate::new(way.client.clone(), "adit-system", "adit-ca", "two", Times::default());
    let leadership = next.leadership();
    tokio::spawn(next.run(std::future::pending()));
    wait_until(|| leadership.is_mine()).await;
}

async fn wait_until(mut holds: impl FnMut() -> bool) {
    let deadline = tokio::time::Instant::now() + Duration::from_secs(5);
    while !holds() {
        assert!(tokio::time::Instant::now() < deadline, "it does not come about");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}
