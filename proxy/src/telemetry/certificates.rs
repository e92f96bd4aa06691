//! What telemetry shows of the certificate store, which it knows by this view alone.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use prometheus_client::metrics::histogram::Histogram;
use serde_json::{Value, json};

use super::line::Rfc3339;
use crate::identity::{CertStore, IdentityState, SpiffeId, TrustStatus};

/// How an identity stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CertificateState {
    /// The first certificate is being fetched.
    Pending,
    /// A valid certificate is there.
    Valid,
    /// A valid certificate is there, but the last attempt to renew it failed.
    Failing,
    /// There is no valid certificate, and the last attempt to get one failed.
    Unavailable,
}

impl CertificateState {
    /// Every state.
    pub const ALL: [Self; 4] = [Self::Pending, Self::Valid, Self::Failing, Self::Unavailable];

    /// The word used in metrics and state.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Pending => "pending",
            Self::Valid => "valid",
            Self::Failing => "failing",
            Self::Unavailable => "unavailable",
        }
    }
}

/// One identity of this node and its certificate.
#[derive(Debug, Clone)]
pub struct CertificateStatus {
    /// The identity.
    pub identity: SpiffeId,
    /// How it stands.
    pub state: CertificateState,
    /// The certificate's serial number.
    pub serial: Option<Arc<str>>,
    /// The name of who signed it.
    pub issuer: Option<Arc<str>>,
    /// The name of the root that it leads to.
    pub root: Option<Arc<str>>,
    /// The beginning of its validity.
    pub not_before: Option<SystemTime>,
    /// The end of its validity.
    pub not_after: Option<SystemTime>,
    /// When the next fetch is due.
    pub next_refresh: Option<SystemTime>,
    /// Why the last fetch failed, if it did.
    pub last_error: Option<String>,
    /// How many enrolled pods have the identity.
    pub pods: usize,
}

impl CertificateStatus {
    pub(super) fn to_json(&self) -> Value {
        let time = |time: Option<SystemTime>| time.map(|time| Rfc3339(time).to_string());
        json!({
            "identity": self.identity,
            "state": self.state.as_str(),
            "serial": self.serial,
            "issuer": self.issuer,
            "root": self.root,
            "not_before": time(self.not_before),
            "not_after": time(self.not_after),
            "next_refresh": time(self.next_refresh),
            "last_error": self.last_error,
            "pods": self.pods,
        })
    }
}

/// What can be seen of a certificate store.
pub trait CertificateView: Send + Sync {
    /// Each identity of this node.
    fn statuses(&self) -> Vec<CertificateStatus>;
    /// Calls to the authority since the start, by result. The results are few and fixed words, such as `success`.
    fn ca_calls(&self) -> Vec<(&'static str, u64)>;
    /// How long these took, in seconds; none where none are made.
    fn ca_latency(&self) -> Option<Histogram>;
    /// For how long the authority has been away, if it is.
    fn ca_away(&self) -> Option<Duration>;
    /// What peers are verified against.
    fn trust(&self) -> Option<TrustStatus> {
        None
    }
}

impl CertificateView for CertStore {
    fn statuses(&self) -> Vec<CertificateStatus> {
        let state = |state| match state {
            IdentityState::Pending => CertificateState::Pending,
            IdentityState::Valid => CertificateState::Valid,
            IdentityState::Stale => CertificateState::Failing,
            IdentityState::Failed | IdentityState::Expired => CertificateState::Unavailable,
        };
        self.snapshot()
            .into_iter()
            .map(|status| CertificateStatus {
                identity: status.id,
                state: state(status.state),
                serial: status.serial,
                issuer: status.issuer,
                root: status.root,
                not_before: status.not_before,
                not_after: status.not_after,
                next_refresh: status.next_attempt,
                last_error: status.last_error,
                pods: status.pods,
            })
            .collect()
    }

    fn ca_calls(&self) -> Vec<(&'static str, u64)> {
        self.stats()
            .calls
            .into_iter()
            .map(|(outcome, count)| (outcome.as_str(), count))
            .collect()
    }

    fn ca_latency(&self) -> Option<Histogram> {
        Some(self.call_latency().clone())
    }

    fn ca_away(&self) -> Option<Duration> {
        self.stats().away
    }

    fn trust(&self) -> Option<TrustStatus> {
        Some(CertStore::trust(self).status())
    }
}

/// A store without certificates.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoCertificates;

impl CertificateView for NoCertificates {
    fn statuses(&self) -> Vec<CertificateStatus> {
        Vec::new()
    }

    fn ca_calls(&self) -> Vec<(&'static str, u64)> {
        Vec::new()
    }

    fn ca_latency(&self) -> Option<Histogram> {
        None
    }

    fn ca_away(&self) -> Option<Duration> {
        None
    }
}
