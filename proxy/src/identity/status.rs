//! What operators see of the store: states and counters, never keys.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use serde::Serialize;

use super::{CallOutcome, SpiffeId};

/// Where an identity stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum IdentityState {
    /// Never had a certificate, and the first answer is still to come.
    Pending,
    /// Never had a certificate, and the last attempt failed.
    Failed,
    /// A certificate is being served.
    Valid,
    /// A certificate is being served, and the last attempt to replace it failed.
    Stale,
    /// The certificate has expired (or is not valid by this node's clock) and could not be replaced.
    Expired,
}

impl IdentityState {
    /// The name in state dumps.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Pending => "pending",
            Self::Failed => "failed",
            Self::Valid => "valid",
            Self::Stale => "stale",
            Self::Expired => "expired",
        }
    }
}

/// One identity of this node.
#[derive(Debug, Clone, Serialize)]
pub struct IdentityStatus {
    /// The identity.
    pub id: SpiffeId,
    /// Where it stands.
    pub state: IdentityState,
    /// The served certificate's serial number, lower-case hexadecimal.
    pub serial: Option<Arc<str>>,
    /// The name of who signed it.
    pub issuer: Option<Arc<str>>,
    /// The name of the root that it leads to.
    pub root: Option<Arc<str>>,
    /// Since when it is valid.
    pub not_before: Option<SystemTime>,
    /// When it expires.
    pub not_after: Option<SystemTime>,
    /// When the CA is asked next; none while a call is in flight or waits for its turn.
    pub next_attempt: Option<SystemTime>,
    /// Failures in a row.
    pub failures: u32,
    /// Why the last attempt failed, if it did.
    pub last_error: Option<String>,
    /// How many pods hold it enrolled.
    pub pods: usize,
}

/// Counters over the store's whole life.
#[derive(Debug, Clone, Serialize)]
pub struct StoreStats {
    /// Calls to the CA by outcome; every outcome is listed.
    pub calls: Vec<(CallOutcome, u64)>,
    /// Calls in flight now.
    pub in_flight: usize,
    /// For how long the CA has been away, if it is.
    pub away: Option<Duration>,
    /// Enrolled identities now.
    pub identities: usize,
}

/// The counters behind [`StoreStats`].
#[derive(Default)]
pub(super) struct Counters {
    calls: [AtomicU64; CallOutcome::ALL.len()],
}

impl Counters {
    pub(super) fn count(&self, outcome: CallOutcome) {
        self.calls[outcome as usize].fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn read(&self) -> Vec<(CallOutcome, u64)> {
        CallOutcome::ALL
            .iter()
            .map(|&outcome| (outcome, self.calls[outcome as usize].load(Ordering::Relaxed)))
            .collect()
    }
}
