//! How following the API goes, told in the log once and in the status all the time.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::error::ApiError;
use super::kind::Kind;
use crate::mesh::source::StatusHandle;

/// How exactly it is known when a kind was heard of last.
const EXACT: Duration = Duration::from_secs(1);

/// What is wrong with each kind, and when it was heard of. Clones are one.
#[derive(Clone)]
pub(super) struct Health {
    wrong: Arc<Mutex<BTreeMap<Kind, String>>>,
    heard: Arc<Mutex<BTreeMap<Kind, Instant>>>,
    status: Option<StatusHandle>,
}

impl Health {
    /// Told in this status too, where there is one.
    pub(super) fn new(status: Option<StatusHandle>) -> Self {
        Self {
            wrong: Arc::default(),
            heard: Arc::default(),
            status,
        }
    }

    /// Following the kind has failed, and will be tried again.
    pub(super) fn failed(&self, kind: Kind, error: &ApiError) {
        let text = error.to_string();
        let mut wrong = self.wrong.lock().unwrap_or_else(PoisonError::into_inner);
        if wrong.insert(kind, text.clone()).as_ref() != Some(&text) {
            tracing::warn!("{text}; trying again, what is known of {} stays in force", kind.name());
        }
        self.publish(&wrong);
    }

    /// The kind is followed.
    pub(super) fn well(&self, kind: Kind) {
        let mut wrong = self.wrong.lock().unwrap_or_else(PoisonError::into_inner);
        if wrong.remove(&kind).is_some() {
            tracing::info!("{} are followed again", kind.name());
        }
        self.publish(&wrong);
    }

    /// The API server has told something of the kind, if only that nothing has happened; or is asked about it from now on.
    pub(super) fn heard(&self, kind: Kind) {
        let Some(status) = &self.status else { return };
        let now = Instant::now();
        let mut heard = self.heard.lock().unwrap_or_else(PoisonError::into_inner);
        if heard.get(&kind).is_some_and(|last| now.duration_since(*last) < EXACT) {
            return;
        }
        heard.insert(kind, now);
        let longest_ago = heard.values().min().copied();
        status.update(|status| status.heard = longest_ago);
    }

    fn publish(&self, wrong: &BTreeMap<Kind, String>) {
        let Some(status) = &self.status else { return };
        let all: Vec<&str> = wrong.values().map(String::as_str).collect();
        let error = (!all.is_empty()).then(|| all.join("; "));
        status.update(|status| status.last_error = error);
    }
}
