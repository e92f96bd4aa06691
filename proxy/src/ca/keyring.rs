//! The roots of an authority, which of them signs, and the steps from one root to the next.
//!
//! A change of root has three steps, with time between them: the new root is *published* beside the old one until all know it,
//! then it *signs*, and when nothing signed below the old one can still be valid, that is *retired*. The steps are pure:
//! whoever keeps the keys writes the outcome down in one piece, so that every moment is either before a step or after it.

use std::fmt;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use aws_lc_rs::digest;
use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use zeroize::{Zeroize, Zeroizing};

use super::signer;
use crate::identity::{TrustDomain, hex};
use crate::telemetry::Rfc3339;

/// How many roots that were here are remembered.
const MAX_GONE: usize = 32;
/// For replicas and clients to follow what was changed a moment ago.
const SLACK: Duration = Duration::from_secs(60);

/// A step of a change of keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum Step {
    /// Make a new root and have everybody trust it beside the one that signs.
    Publish,
    /// Sign below the new root from now on.
    Sign,
    /// Trust the old root no longer, and forget its key.
    Retire,
    /// Forget a new root that does not sign yet.
    Cancel,
    /// Make new intermediates below the root that signs.
    Renew,
}

/// Where a change of roots stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// There is one root.
    Steady,
    /// There is a new root that does not sign yet.
    Published,
    /// The new root signs, the old one is still trusted.
    Signing,
}

/// What a step has led to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Answer {
    /// Whether what was asked for is so now.
    pub done: bool,
    /// What was done, or why not, and what follows.
    pub message: String,
}

/// What is told of a keyring: everything but its keys.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Standing {
    /// How often it was changed.
    pub revision: u64,
    /// Where a change of roots stands.
    pub phase: Phase,
    /// Since when, in seconds since 1970.
    pub since: u64,
    /// The next step, and from when on it is taken without --force.
    pub next: Step,
    /// See `next`; none where it may be taken now.
    pub not_before: Option<u64>,
    /// The roots, oldest first.
    pub roots: Vec<RootStanding>,
}

/// What is told of a root.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RootStanding {
    /// SHA-256 of the certificate, the beginning.
    pub fingerprint: String,
    /// Whether certificates are signed below it.
    pub signs: bool,
    /// When it was published, in seconds since 1970; 0 where it has been there from the beginning.
    pub published: u64,
    /// When it expires, in seconds since 1970.
    pub not_after: u64,
}

/// Roots with their keys.
#[derive(Clone, Serialize, Deserialize)]
pub(super) struct Keyring {
    pub(super) revision: u64,
    /// Raised to have replicas make new intermediates.
    pub(super) epoch: u64,
    /// The longest lifetime, in seconds, of a leaf that may have been signed.
    longest_s: u64,
    /// When the root that signs began to, in seconds since 1970.
    signing_since: u64,
    /// Which of the roots signs.
    signing: usize,
    roots: Vec<HeldRoot>,
    /// Fingerprints of roots that were here, so that a copy of before is known for what it is.
    #[serde(default)]
    gone: Vec<String>,
}

#[derive(Clone, Serialize, Deserialize)]
struct HeldRoot {
    key: String,
    certificate: String,
    published: u64,
}

impl Drop for HeldRoot {
    fn drop(&mut self) {
        self.key.zeroize();
    }
}

impl Keyring {
    /// A keyring of one root.
    pub(super) fn of_root(key: &[u8], certificate: &[u8]) -> Result<Self, String> {
        let text = |pem: &[u8]| String::from_utf8(pem.to_vec()).map_err(|_| "not text".to_owned());
        let mut certificate = text(certificate)?;
        // Another root's may follow it.
        if !certificate.ends_with('\n') {
            certificate.push('\n');
        }
        Ok(Self {
            revision: 0,
            epoch: 0,
            longest_s: 0,
            signing_since: 0,
            signing: 0,
            roots: vec![HeldRoot {
                key: text(key)?,
                certificate,
                published: 0,
            }],
            gone: Vec::new(),
        })
    }

    /// As [`Self::of_root`], of a text that has both.
    pub(super) fn of_both(pem: &[u8]) -> Result<Self, String> {
        let (key, certificate) = split(pem).ok_or("there is no certificate")?;
        let keyring = Self::of_root(key, certificate)?;
        let (key, certificate) = keyring.signing();
        signer::Signer::parse(key.as_bytes(), certificate.as_bytes(), None)?;
        Ok(keyring)
    }

    /// Key and certificate of the root that signs, one after the other.
    pub(super) fn both(&self) -> Zeroizing<Vec<u8>> {
        let (key, certificate) = self.signing();
        Zeroizing::new([key.as_bytes(), certificate.as_bytes()].concat())
    }

    /// A keyring with a new root.
    pub(super) fn found(trust_domain: &TrustDomain, now: SystemTime) -> Result<Self, String> {
        let (key, certificate) = new_root(trust_domain, now)?;
        Self::of_root(key.as_bytes(), certificate.as_bytes())
    }

    /// Reads what [`Self::write`] has written.
    pub(super) fn read(content: &[u8]) -> Result<Self, String> {
        let keyring: Self = serde_json::from_slice(content).map_err(|error| format!("it does not parse: {error}"))?;
        if keyring.roots.is_empty() || keyring.roots.len() > 2 || keyring.signing >= keyring.roots.len() {
            return Err("it has not one root or two of which one signs".into());
        }
        Ok(keyring)
    }

    pub(super) fn write(&self) -> Result<Zeroizing<Vec<u8>>, String> {
        // Room enough never to be moved, as what is left behind would not be wiped.
        let mut content = Zeroizing::new(Vec::with_capacity(64 * 1024));
        serde_json::to_writer(&mut *content, self).map_err(|error| error.to_string())?;
        Ok(content)
    }

    /// Key and certificate of the root that signs.
    pub(super) fn signing(&self) -> (&str, &str) {
        self.roots
            .get(self.signing)
            .map_or(("", ""), |root| (&root.key, &root.certificate))
    }

    /// All roots, PEM, one after the other.
    pub(super) fn bundle(&self) -> String {
        self.roots.iter().map(|root| root.certificate.as_str()).collect()
    }

    /// Whether it is what `other` was before: of a lower revision, with roots that all are the other's, or were.
    pub(super) fn is_earlier_than(&self, other: &Self) -> bool {
        let bundle = other.bundle();
        let known = |root: &HeldRoot| bundle.contains(&root.certificate) || other.gone.contains(&root.fingerprint());
        self.revision < other.revision && self.roots.iter().all(known)
    }

    /// Lets go of a root and its key.
    fn forget(&mut self, at: usize) {
        self.gone.push(self.roots.remove(at).fingerprint());
        let surplus = self.gone.len().saturating_sub(MAX_GONE);
        self.gone.drain(..surplus);
    }

    pub(super) fn phase(&self) -> Phase {
        match (self.roots.len(), self.signing) {
            (1, _) => Phase::Steady,
            (_, 0) => Phase::Published,
            _ => Phase::Signing,
        }
    }

    /// Notes that leaves may live for so long. Says whether that is news.
    pub(super) fn note_lifetime(&mut self, longest: Duration) -> bool {
        let news = longest.as_secs() > self.longest_s;
        if news {
            self.longest_s = longest.as_secs();
            self.revision += 1;
        }
        news
    }

    /// Takes a step. What follows is in force only once it has been written down; where it says that it is not done, or the
    /// revision is as it was, there is nothing to write.
    pub(super) fn take(&mut self, step: Step, force: bool, trust_domain: &TrustDomain, now: SystemTime) -> Answer {
        let at = seconds(now);
        let answer = |done, message: String| Answer { done, message };
        let early = self.not_before().filter(|earliest| at < *earliest && !force);
        match (step, self.phase()) {
            (Step::Publish, Phase::Steady) => match new_root(trust_domain, now) {
                Ok((key, certificate)) => {
                    self.roots.push(HeldRoot {
                        key: key.to_string(),
                        certificate,
                        published: at,
                    });
                    self.revision += 1;
                    let name = self.roots.last().map(HeldRoot::fingerprint).unwrap_or_default();
                    answer(
                        true,
                        format!("the new root {name} is published; next: sign, {}", self.when()),
                    )
                }
                Err(reason) => answer(false, format!("no new root was made: {reason}")),
            },
            (Step::Publish, Phase::Published) => answer(
                true,
                format!("a new root is published already; next: sign, {}", self.when()),
            ),
            (Step::Publish, Phase::Signing) => answer(
                false,
                format!(
                    "the last change is not done: retire the old root first, {}",
                    self.when()
                ),
            ),
            (Step::Sign, Phase::Steady) => answer(false, "there is no new root: publish one first".into()),
            (Step::Sign, Phase::Published) => match early {
                Some(earliest) => answer(
                    false,
                    format!(
                        "not before {}: until then some may not know the new root, and would refuse what it signs; --force \
                         does it nevertheless",
                        date(earliest)
                    ),
                ),
                None => {
                    (self.signing, self.signing_since) = (1, at);
                    self.revision += 1;
                    answer(true, format!("the new root signs; next: retire, {}", self.when()))
                }
            },
            (Step::Sign, Phase::Signing) => answer(
                true,
                format!("the new root signs already; next: retire, {}", self.when()),
            ),
            (Step::Retire, Phase::Steady) => answer(true, "there is no old root: nothing is to be retired".into()),
            (Step::Retire, Phase::Published) => answer(
                false,
                "the old root signs: sign by the new one first, or cancel the change".into(),
            ),
            (Step::Retire, Phase::Signing) => match early {
                Some(earliest) => answer(
                    false,
                    format!(
                        "not before {}: until then certificates below the old root may be valid; --force retires it \
                         nevertheless. Proxies trust what they have learnt for as long as these may live: a root that is \
                         compromised has to be named in their list of what is distrusted",
                        date(earliest)
                    ),
                ),
                None => {
                    self.forget(0);
                    self.signing = 0;
                    self.revision += 1;
                    answer(
                        true,
                        "the old root is retired and its key forgotten; the change is done".into(),
                    )
                }
            },
            (Step::Cancel, Phase::Published) => {
                self.forget(1);
                self.revision += 1;
                answer(true, "the new root, by which nothing was signed, is forgotten".into())
            }
            (Step::Cancel, Phase::Steady) => answer(true, "no change is under way".into()),
            (Step::Cancel, Phase::Signing) => answer(
                false,
                "the new root signs already: go on, and retire the old one".into(),
            ),
            (Step::Renew, _) => {
                self.epoch += 1;
                self.revision += 1;
                answer(true, "each authority makes itself a new intermediate".into())
            }
        }
    }

    /// From when on the next step needs no force.
    fn not_before(&self) -> Option<u64> {
        let wait = self.longest_s.saturating_add(SLACK.as_secs());
        match self.phase() {
            Phase::Steady => None,
            Phase::Published => Some(self.roots.get(1)?.published.saturating_add(wait)),
            Phase::Signing => Some(self.signing_since.saturating_add(wait)),
        }
    }

    fn when(&self) -> String {
        self.not_before()
            .map_or_else(String::new, |earliest| format!("from {} on", date(earliest)))
    }

    pub(super) fn standing(&self) -> Standing {
        let phase = self.phase();
        Standing {
            revision: self.revision,
            phase,
            since: match phase {
                Phase::Published => self.roots.last().map_or(0, |root| root.published),
                Phase::Steady | Phase::Signing => self.signing_since,
            },
            next: match phase {
                Phase::Steady => Step::Publish,
                Phase::Published => Step::Sign,
                Phase::Signing => Step::Retire,
            },
            not_before: self.not_before(),
            roots: self
                .roots
                .iter()
                .enumerate()
                .map(|(index, root)| RootStanding {
                    fingerprint: root.fingerprint(),
                    signs: index == self.signing,
                    published: root.published,
                    not_after: root.not_after(),
                })
                .collect(),
        }
    }
}

impl fmt::Debug for Keyring {
    /// Without keys.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Keyring({:?})", self.standing())
    }
}

impl HeldRoot {
    fn fingerprint(&self) -> String {
        fingerprint(&self.certificate)
    }

    fn not_after(&self) -> u64 {
        let parsed = signer::certificates(self.certificate.as_bytes()).ok();
        let der = parsed.and_then(|found| found.into_iter().next());
        let not_after = der.and_then(|(der, _)| Some(signer::x509(&der).ok()?.1.validity().not_after.timestamp()));
        not_after.and_then(|at| u64::try_from(at).ok()).unwrap_or_default()
    }
}

/// The beginning of SHA-256 of a certificate, PEM.
pub(super) fn fingerprint(pem: &str) -> String {
    let Some((der, _)) = signer::certificates(pem.as_bytes())
        .ok()
        .and_then(|found| found.into_iter().next())
    else {
        return "none".into();
    };
    hex(&digest::digest(&digest::SHA256, &der).as_ref()[..8])
}

pub(super) fn date(seconds: u64) -> String {
    Rfc3339(UNIX_EPOCH + Duration::from_secs(seconds)).to_string()
}

pub(super) fn seconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

/// A new root's key and certificate, PEM.
fn new_root(trust_domain: &TrustDomain, now: SystemTime) -> Result<(Zeroizing<String>, String), String> {
    let both = signer::make_root(trust_domain, now).map_err(|error| error.to_string())?;
    let (key, certificate) = split(&both).ok_or("it was made without a certificate")?;
    let text = |pem: &[u8]| String::from_utf8(pem.to_vec()).map_err(|_| "not text".to_owned());
    Ok((Zeroizing::new(text(key)?), text(certificate)?))
}

/// Key and certificate of a text that has one after the other.
fn split(pem: &[u8]) -> Option<(&[u8], &[u8])> {
    const BEGIN: &[u8] = b"-----BEGIN CERTIFICATE-----";
    let at = pem.windows(BEGIN.len()).position(|window| window == BEGIN)?;
    Some(pem.split_at(at))
}

#[cfg(test)]
mod tests;
