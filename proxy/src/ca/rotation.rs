//! Changes of keys that are kept in the cluster: asked for in a ConfigMap, made by the replica that leads, followed by all.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use k8s_openapi::api::core::v1::ConfigMap;
use kube::api::{ObjectMeta, PostParams};
use kube::{Api, Client};
use serde::{Deserialize, Serialize};

use super::authority::Authority;
use super::cluster::{ClusterError, api_error, is_conflict};
use super::keyring::{Answer, Keyring, Standing, Step};
use super::leader::Leadership;
use super::secret::{Kept, SecretPlace};
use crate::identity::TrustDomain;

/// How often it is looked what the keys are, and whether a change is asked for.
const LOOK_EVERY: Duration = Duration::from_secs(2);

const REQUEST: &str = "request";
const ANSWER: &str = "answer";
const STATE: &str = "state";

/// A request for a step.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Asked {
    /// By which its answer is known.
    pub(super) id: String,
    pub(super) step: Step,
    #[serde(default)]
    pub(super) force: bool,
}

impl Asked {
    pub(super) fn new(step: Step, force: bool) -> Self {
        Self {
            id: format!("{:016x}", fastrand::u64(..)),
            step,
            force,
        }
    }
}

/// The answer to one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Answered {
    pub(super) id: String,
    #[serde(flatten)]
    pub(super) answer: Answer,
}

/// What is known of the keys in use, for whoever asks.
#[derive(Debug, Clone, Default)]
pub(super) struct Watched(Arc<Mutex<Option<Standing>>>);

impl Watched {
    pub(super) fn set(&self, keyring: &Keyring) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(keyring.standing());
    }

    pub(super) fn standing(&self) -> Option<Standing> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// The ConfigMap in which changes are asked for and answered.
pub(super) struct Desk {
    api: Api<ConfigMap>,
    name: String,
    place: String,
}

impl Desk {
    pub(super) fn new(client: Client, namespace: &str, name: &str) -> Self {
        Self {
            api: Api::namespaced(client, namespace),
            name: name.into(),
            place: format!("the ConfigMap {namespace}/{name}"),
        }
    }

    async fn read(&self) -> Result<Option<ConfigMap>, ClusterError> {
        self.api
            .get_opt(&self.name)
            .await
            .map_err(api_error("read", &self.place))
    }

    /// Writes these entries; says whether nobody else has changed it meanwhile.
    async fn write(&self, found: Option<ConfigMap>, entries: &[(&str, String)]) -> Result<bool, ClusterError> {
        let there = found.is_some();
        let mut next = found.unwrap_or_else(|| ConfigMap {
            metadata: ObjectMeta {
                name: Some(self.name.clone()),
                ..ObjectMeta::default()
            },
            ..ConfigMap::default()
        });
        let data = next.data.get_or_insert_default();
        data.extend(entries.iter().map(|(key, value)| ((*key).to_owned(), value.clone())));
        let parameters = PostParams::default();
        let written = match there {
            true => self.api.replace(&self.name, &parameters, &next).await,
            false => self.api.create(&parameters, &next).await,
        };
        match written {
            Ok(_) => Ok(true),
            Err(error) if is_conflict(&error) => Ok(false),
            Err(error) => Err(api_error("write", &self.place)(error)),
        }
    }

    /// Asks for a step.
    pub(super) async fn ask(&self, asked: &Asked) -> Result<(), ClusterError> {
        loop {
            let found = self.read().await?;
            if self.write(found, &[(REQUEST, json(asked))]).await? {
                return Ok(());
            }
        }
    }

    /// The answer, if there is one by now.
    pub(super) async fn answer(&self, id: &str) -> Result<Option<Answer>, ClusterError> {
        let found = self.read().await?;
        let answered: Option<Answered> = found.as_ref().and_then(|found| entry(found, ANSWER));
        Ok(answered
            .filter(|answered| answered.id == id)
            .map(|answered| answered.answer))
    }

    /// How the keys stand, as the leader has written last.
    pub(super) async fn standing(&self) -> Result<Option<Standing>, ClusterError> {
        Ok(self.read().await?.as_ref().and_then(|found| entry(found, STATE)))
    }
}

fn json(value: &impl Serialize) -> String {
    // Of plain structures it does not fail.
    serde_json::to_string(value).unwrap_or_default()
}

fn entry<T: serde::de::DeserializeOwned>(found: &ConfigMap, key: &str) -> Option<T> {
    serde_json::from_str(found.data.as_ref()?.get(key)?).ok()
}

/// Keeps an authority at what the Secret says, and, where this process leads, the Secret at what is asked for.
pub(super) struct Keeper {
    pub(super) place: SecretPlace,
    pub(super) desk: Desk,
    pub(super) leadership: Leadership,
    pub(super) trust_domain: TrustDomain,
    /// The longest lifetime of a leaf.
    pub(super) longest: Duration,
    pub(super) watched: Watched,
}

impl Keeper {
    /// The authority of the roots in the Secret. Where there is none the leader makes it, with a new root.
    pub(super) async fn open(&self) -> Result<(Authority, Keyring), ClusterError> {
        loop {
            let keyring = match self.place.load().await? {
                Some(kept) => kept.keyring.clone(),
                None if self.leadership.is_mine() => {
                    let new = Keyring::found(&self.trust_domain, SystemTime::now());
                    let new = new.map_err(|reason| self.place.unsound(reason))?;
                    if self.place.create(&new).await? {
                        tracing::info!("made a new root and put it into {}", self.place.place());
                    }
                    // What is there counts, whoever made it.
                    continue;
                }
                None => return Err(ClusterError::NoLeader(self.place.place().to_owned())),
            };
            let authority = Authority::of_keyring(self.place.place(), &keyring, &self.trust_domain)?;
            self.watched.set(&keyring);
            return Ok((authority, keyring));
        }
    }

    /// Runs for as long as the authority does; ends, with the reason, if the Secret has the roots of another one.
    pub(super) async fn keep(self, authority: Arc<Authority>, mut held: Keyring) -> ClusterError {
        loop {
            tokio::time::sleep(LOOK_EVERY).await;
            match self.look(&authority, &mut held).await {
                Ok(()) => {}
                Err(error @ ClusterError::Replaced(_)) => return error,
                // What is in use stays in use, whatever is wrong with what is there.
                Err(error) => tracing::warn!(%error, "cannot look after the keys"),
            }
        }
    }

    /// One look at what is kept and what is asked for.
    pub(super) async fn look(&self, authority: &Authority, held: &mut Keyring) -> Result<(), ClusterError> {
        let Some(kept) = self.place.load().await? else {
            if self.leadership.is_mine() && self.place.create(held).await? {
                tracing::warn!("{} was gone; it has the roots in use again", self.place.place());
            }
            return Ok(());
        };
        let kept = match kept.keyring.revision.cmp(&held.revision) {
            std::cmp::Ordering::Equal if kept.keyring.bundle() == held.bundle() => kept,
            std::cmp::Ordering::Greater => {
                self.follow(authority, held, &kept.keyring)?;
                kept
            }
            _ if kept.keyring.is_earlier_than(held) => {
                // A copy of before, perhaps of a replica that had fallen behind: it lacks keys that are in use.
                if self.leadership.is_mine() && self.place.replace(held, kept).await? {
                    tracing::warn!("{} had earlier roots; it has those in use again", self.place.place());
                }
                return Ok(());
            }
            _ => {
                return Err(ClusterError::Replaced(self.place.place().to_owned()));
            }
        };
        if self.leadership.is_mine() {
            self.lead(authority, held, kept).await?;
        }
        Ok(())
    }

    fn follow(&self, authority: &Authority, held: &mut Keyring, next: &Keyring) -> Result<(), ClusterError> {
        authority.adopt(next)?;
        *held = next.clone();
        self.watched.set(held);
        Ok(())
    }

    /// Does what is asked for. Killed at any point, it is done again by whoever leads next: a step that was taken already
    /// is not taken twice.
    async fn lead(&self, authority: &Authority, held: &mut Keyring, kept: Kept) -> Result<(), ClusterError> {
        let desk = self.desk.read().await?;
        let asked: Option<Asked> = desk.as_ref().and_then(|found| entry(found, REQUEST));
        let answered: Option<Answered> = desk.as_ref().and_then(|found| entry(found, ANSWER));
        let open = asked.filter(|asked| answered.is_none_or(|answered| answered.id != asked.id));
        let mut next = kept.keyring.clone();
        next.note_lifetime(self.longest);
        let mut entries = Vec::new();
        if let Some(asked) = open {
            let mut answer = next.take(asked.step, asked.force, &self.trust_domain, SystemTime::now());
            tracing::info!(step = ?asked.step, force = asked.force, done = answer.done, "{}", answer.message);
            if next.revision != kept.keyring.revision && kept.is_immutable() {
                answer = Answer {
                    done: false,
                    message: ClusterError::Immutable(self.place.place().to_owned()).to_string(),
                };
                next = kept.keyring.clone();
            }
            entries.push((ANSWER, json(&Answered { id: asked.id, answer })));
        }
        if next.revision != kept.keyring.revision && !kept.is_immutable() {
            // Not ours any more: whoever leads now does it.
            if !self.leadership.is_mine() || !self.place.replace(&next, kept).await? {
                return Ok(());
            }
            self.follow(authority, held, &next)?;
        }
        let state = json(&held.standing());
        let told = desk.as_ref().and_then(|found| found.data.as_ref()?.get(STATE)) == Some(&state);
        if !told {
            entries.push((STATE, state));
        }
        if !entries.is_empty() {
            self.desk.write(desk, &entries).await?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
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
}
