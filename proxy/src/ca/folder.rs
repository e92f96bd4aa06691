//! The authority's roots in a folder, for use without a cluster.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use super::authority::{Authority, AuthorityError};
use super::files::{FileError, Folder, PRIVATE, PUBLIC};
use super::keyring::{Answer, Keyring};
use super::rotation::{Answered, Asked, Watched};
use crate::identity::TrustDomain;

/// The root's key and certificate, of an authority whose root was never changed.
const ROOT_FILE: &str = "root.key";
/// The certificates of all roots, for clients.
const ROOT_CERTIFICATE_FILE: &str = "root.pem";
/// All roots with their keys, since the first change.
const KEYRING_FILE: &str = "keyring.json";
/// Where earlier versions kept an intermediate.
const INTERMEDIATE_FILE: &str = "intermediate.key";

/// Where a change is asked for, and answered, while an authority holds the folder.
pub(super) const REQUEST_FILE: &str = "rotation-request.json";
/// See [`REQUEST_FILE`].
pub(super) const ANSWER_FILE: &str = "rotation-answer.json";
/// How often it is looked whether a change is asked for.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// A folder with the keys of an authority, held by this process.
pub(super) struct KeyFolder {
    folder: Folder,
}

impl KeyFolder {
    /// Opens the folder, making it if it is not there; fails if another process holds it.
    pub(super) fn open(dir: &Path) -> Result<Self, FileError> {
        let folder = Folder::open(dir)?;
        Ok(Self { folder })
    }

    /// To look at only, whoever holds it.
    pub(super) fn looked_at(dir: &Path) -> Self {
        Self {
            folder: Folder::looked_at(dir),
        }
    }

    /// The authority of what is in the folder, founded if it is empty, and its keys.
    pub(super) fn authority(self, trust_domain: &TrustDomain) -> Result<(Authority, Self, Keyring), AuthorityError> {
        let keyring = match self.load()? {
            Some(keyring) => keyring,
            None => self.found(trust_domain)?,
        };
        let place = self.folder.file(self.keys()?).display().to_string();
        let authority = Authority::of_keyring(&place, &keyring, trust_domain)?;
        self.tidy(&keyring)?;
        Ok((authority, self, keyring))
    }

    /// The name of the file with the keys.
    fn keys(&self) -> Result<&'static str, FileError> {
        Ok(match self.folder.file(KEYRING_FILE).exists() {
            true => KEYRING_FILE,
            false => ROOT_FILE,
        })
    }

    /// What is in the folder; none where it is empty.
    pub(super) fn load(&self) -> Result<Option<Keyring>, FileError> {
        if let Some(content) = self.folder.read_private(KEYRING_FILE)? {
            let keyring = Keyring::read(&content);
            return Ok(Some(keyring.map_err(|reason| self.damaged(KEYRING_FILE, &reason))?));
        }
        let Some(content) = self.folder.read_private(ROOT_FILE)? else {
            if self.folder.read(ROOT_CERTIFICATE_FILE)?.is_some() {
                let reason = format!("it is missing, but {ROOT_CERTIFICATE_FILE} is there");
                return Err(self.damaged(ROOT_FILE, &reason));
            }
            return Ok(None);
        };
        let keyring = Keyring::of_both(&content).map_err(|reason| self.damaged(ROOT_FILE, &reason))?;
        match self.folder.read(ROOT_CERTIFICATE_FILE)? {
            Some(published) if published != keyring.bundle().as_bytes() => {
                let reason = format!("it is not the certificate of {ROOT_FILE}");
                Err(self.damaged(ROOT_CERTIFICATE_FILE, &reason))
            }
            _ => Ok(Some(keyring)),
        }
    }

    fn found(&self, trust_domain: &TrustDomain) -> Result<Keyring, AuthorityError> {
        let keyring = Keyring::found(trust_domain, SystemTime::now()).map_err(AuthorityError::Sign)?;
        self.folder.create(ROOT_FILE, &keyring.both(), PRIVATE)?;
        Ok(keyring)
    }

    /// Keeps these keys from now on, in one step: whenever the process is killed, the folder has what it had or all of this.
    pub(super) fn store(&self, keyring: &Keyring) -> Result<(), AuthorityError> {
        let content = keyring.write().map_err(AuthorityError::Sign)?;
        self.folder.replace(KEYRING_FILE, &content, PRIVATE)?;
        Ok(self.tidy(keyring)?)
    }

    /// Takes a step, and writes down what follows from it.
    pub(super) fn take(
        &self,
        asked: &Asked,
        longest: Duration,
        trust_domain: &TrustDomain,
        now: SystemTime,
    ) -> Result<(Answer, Keyring), AuthorityError> {
        let place = self.folder.file(self.keys()?).display().to_string();
        let Some(mut keyring) = self.load()? else {
            let reason = "there are no keys; is this the folder of an authority?".into();
            return Err(AuthorityError::Unsound { place, reason });
        };
        // Of another trust domain, a new root would be one that this authority refuses.
        Authority::of_keyring(&place, &keyring, trust_domain)?;
        let before = keyring.revision;
        keyring.note_lifetime(longest);
        let answer = keyring.take(asked.step, asked.force, trust_domain, now);
        match keyring.revision == before {
            // Whoever took the step may have been killed before what follows from it.
            true => self.tidy(&keyring)?,
            false => self.store(&keyring)?,
        }
        Ok((answer, keyring))
    }

    /// Does what is asked for in the folder, for as long as the authority runs.
    pub(super) async fn keep(self, authority: Arc<Authority>, longest: Duration, watched: Watched) {
        loop {
            tokio::time::sleep(LOOK_EVERY).await;
            if let Err(error) = self.serve(&authority, longest, &watched) {
                tracing::error!(%error, "a change of keys that was asked for was not made");
            }
        }
    }

    /// Killed at any point, it is done again by the next process: a step that was taken already is not taken twice.
    fn serve(&self, authority: &Authority, longest: Duration, watched: &Watched) -> Result<(), AuthorityError> {
        let Some(content) = self.folder.read_private(REQUEST_FILE)? else {
            return Ok(());
        };
        let Ok(asked) = serde_json::from_slice::<Asked>(&content) else {
            tracing::warn!("{} is no request", self.folder.file(REQUEST_FILE).display());
            return Ok(self.folder.remove(REQUEST_FILE)?);
        };
        let now = SystemTime::now();
        let answer = match asked.too_old(now) {
            Some(answer) => answer,
            None => {
                let (answer, keyring) = self.take(&asked, longest, authority.trust_domain(), now)?;
                authority.adopt(&keyring)?;
                watched.set(&keyring);
                answer
            }
        };
        tracing::info!(step = ?asked.step, force = asked.force, done = answer.done, "{}", answer.message);
        let answered = Answered { id: asked.id, answer };
        let content = serde_json::to_vec(&answered).map_err(|error| AuthorityError::Sign(error.to_string()))?;
        self.folder.replace(ANSWER_FILE, &content, PRIVATE)?;
        Ok(self.folder.remove(REQUEST_FILE)?)
    }

    /// What follows from the keys and may be missing yet: the roots for clients, and no key that is not needed.
    fn tidy(&self, keyring: &Keyring) -> Result<(), FileError> {
        let bundle = keyring.bundle();
        if self.folder.read(ROOT_CERTIFICATE_FILE)?.as_deref() != Some(bundle.as_bytes()) {
            self.folder.replace(ROOT_CERTIFICATE_FILE, bundle.as_bytes(), PUBLIC)?;
        }
        if self.folder.file(KEYRING_FILE).exists() {
            self.folder.remove(ROOT_FILE)?;
        }
        self.folder.remove(INTERMEDIATE_FILE)
    }

    fn damaged(&self, name: &str, reason: &str) -> FileError {
        FileError::damaged(&self.folder.file(name), reason)
    }
}

#[cfg(test)]
mod tests {
    use super::super::keyring::Step;
    use super::*;

    fn domain(name: &str) -> TrustDomain {
        TrustDomain::parse(name).unwrap()
    }

    #[test]
    fn no_step_is_taken_in_the_folder_of_nobody_or_of_another_trust_domain() {
        let folder = tempfile::tempdir().unwrap();
        let take = |domain: &TrustDomain| {
            let keys = KeyFolder::open(folder.path()).unwrap();
            let asked = Asked::new(Step::Publish, true);
            keys.take(&asked, Duration::from_secs(60), domain, SystemTime::now())
        };
        let error = take(&domain("corp.example")).unwrap_err().to_string();
        assert!(error.contains("there are no keys"), "{error}");
        let founded = KeyFolder::open(folder.path())
            .unwrap()
            .authority(&domain("corp.example"));
        let before = founded.unwrap().2.bundle();
        let error = take(&domain("cluster.local")).unwrap_err().to_string();
        assert!(error.contains("corp.example"), "{error}");
        let (answer, keyring) = take(&domain("corp.example")).unwrap();
        assert!(answer.done && keyring.bundle().starts_with(&before), "{answer:?}");
    }

    #[test]
    fn a_request_of_long_ago_is_answered_and_not_done() {
        let now = SystemTime::now();
        let asked = Asked::new(Step::Retire, true);
        assert_eq!(asked.too_old(now), None);
        let answer = asked.too_old(now + Duration::from_secs(2 * 3600)).unwrap();
        assert!(!answer.done && answer.message.contains("ask again"), "{answer:?}");
    }
}
