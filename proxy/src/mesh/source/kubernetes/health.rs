//! How following the API goes, told in the log once and in the status all the time.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use super::error::ApiError;
use super::kind::Kind;
use crate::mesh::source::StatusHandle;

/// What is wrong with each kind. Clones are one.
#[derive(Clone)]
pub(super) struct Health {
    wrong: Arc<Mutex<BTreeMap<Kind, String>>>,
    status: Option<StatusHandle>,
}

impl Health {
    /// Told in this status too, where there is one.
    pub(super) fn new(status: Option<StatusHandle>) -> Self {
        Self {
            wrong: Arc::default(),
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

    fn publish(&self, wrong: &BTreeMap<Kind, String>) {
        let Some(status) = &self.status else { return };
        let all: Vec<&str> = wrong.values().map(String::as_str).collect();
        let error = (!all.is_empty()).then(|| all.join("; "));
        status.update(|status| status.last_error = error);
    }
}
