//! What the authority counts.

use std::collections::BTreeMap;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Reason {
    reason: &'static str,
}

/// Counters of certificates issued and refused. Clones share them.
#[derive(Debug, Clone, Default)]
pub struct Counts {
    issued: Counter,
    refused: Family<Reason, Counter>,
    reviews: Counter,
    limited: Family<Reason, Counter>,
    audit_lost: Counter,
    by_reason: Arc<Mutex<BTreeMap<&'static str, u64>>>,
    signer_expiry: Gauge<u64, AtomicU64>,
}

impl Counts {
    pub(super) fn issued(&self, signer_not_after: SystemTime) {
        self.issued.inc();
        self.signer_expires(signer_not_after);
    }

    pub(super) fn refused(&self, reason: &'static str) {
        self.refused.get_or_create(&Reason { reason }).inc();
        let mut by_reason = self.by_reason.lock().unwrap_or_else(PoisonError::into_inner);
        *by_reason.entry(reason).or_default() += 1;
    }

    pub(super) fn limited(&self, limit: &'static str) {
        self.limited.get_or_create(&Reason { reason: limit }).inc();
    }

    pub(super) fn audit_lost(&self) {
        self.audit_lost.inc();
    }

    pub(super) fn granted(&self) -> u64 {
        self.issued.get()
    }

    /// How many were refused, by reason.
    pub(super) fn refusals(&self) -> BTreeMap<String, u64> {
        let by_reason = self.by_reason.lock().unwrap_or_else(PoisonError::into_inner);
        by_reason
            .iter()
            .map(|(reason, count)| ((*reason).to_owned(), *count))
            .collect()
    }

    pub(super) fn lost(&self) -> u64 {
        self.audit_lost.get()
    }

    pub(super) fn reviewed(&self) {
        self.reviews.inc();
    }

    pub(super) fn signer_expires(&self, at: SystemTime) {
        let seconds = at.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        self.signer_expiry.set(seconds);
    }

    /// A registry that shows them.
    pub fn registry(&self) -> Registry {
        let mut registry = Registry::with_prefix("adit_ca");
        registry.register(
            "certificates_issued",
            "Certificates issued to node proxies",
            self.issued.clone(),
        );
        registry.register(
            "certificates_refused",
            "Calls that got no certificate, by reason",
            self.refused.clone(),
        );
        registry.register(
            "token_reviews",
            "TokenReviews asked of the API server",
            self.reviews.clone(),
        );
        registry.register(
            "calls_limited",
            "Calls turned away because their caller, or all callers together, asked for too much at once, by limit",
            self.limited.clone(),
        );
        registry.register(
            "audit_lines_lost",
            "Lines of the audit log that could not be written",
            self.audit_lost.clone(),
        );
        registry.register(
            "signer_expiry_timestamp_seconds",
            "When the certificate that signs expires, in seconds since 1970",
            self.signer_expiry.clone(),
        );
        registry
    }
}
