//! Changes of keys that are kept in the cluster: asked for in a ConfigMap, made by the replica that leads, followed by all.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use k8s_openapi::api::core::v1::ConfigMap;
use kube::api::{ObjectMeta, PostParams};
use kube::{Api, Client};
use serde::{Deserialize, Serialize};

use super::authority::Authority;
use super::cluster::{ClusterError, api_error, is_conflict};
use super::keyring::{Answer, Keyring, Standing, Step, date, seconds};
use super::leader::Leadership;
use super::secret::{Kept, SecretPlace};
use crate::identity::TrustDomain;

/// How often it is looked what the keys are, and whether a change is asked for.
const LOOK_EVERY: Duration = Duration::from_secs(2);

/// How old a request may be.
const MAX_AGE: Duration = Duration::from_secs(3600);

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
    /// When, in seconds since 1970.
    #[serde(default)]
    at: u64,
}

impl Asked {
    pub(super) fn new(step: Step, force: bool) -> Self {
        Self {
            id: format!("{:016x}", fastrand::u64(..)),
            step,
            force,
            at: seconds(SystemTime::now()),
        }
    }

    /// The answer to a request that nobody has seen for so long that whoever asked has given up.
    pub(super) fn too_old(&self, now: SystemTime) -> Option<Answer> {
        let age = seconds(now).saturating_sub(self.at);
        (age > MAX_AGE.as_secs()).then(|| Answer {
            done: false,
            message: format!(
                "it was asked for at {}, which is too long ago: ask again",
                date(self.at)
            ),
        })
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
            let now = SystemTime::now();
            let mut answer = asked
                .too_old(now)
                .unwrap_or_else(|| next.take(asked.step, asked.force, &self.trust_domain, now));
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
mod tests;
