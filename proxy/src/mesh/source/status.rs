//! How a source is doing.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Instant, SystemTime};

use tokio::sync::watch;

/// How a source is doing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SourceStatus {
    /// When the state in force was read.
    pub last_loaded: SystemTime,
    /// Its generation.
    pub generation: u64,
    /// Why what is there now could not be taken over; `None` while the state in force is the latest.
    pub last_error: Option<String>,
    /// When the API server was last heard of, of what it was heard of the longest ago; `None` for sources that are read and
    /// not followed.
    pub heard: Option<Instant>,
}

/// A view of a source's status that stays current. Clones are one.
#[derive(Debug, Clone)]
pub struct StatusHandle(Arc<Mutex<SourceStatus>>);

impl StatusHandle {
    pub(crate) fn new(status: SourceStatus) -> Self {
        Self(Arc::new(Mutex::new(status)))
    }

    /// The status now.
    pub fn load(&self) -> SourceStatus {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn update(&self, change: impl FnOnce(&mut SourceStatus)) {
        change(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner));
    }
}

/// Tells when a source has published a first whole state. Clones are one.
#[derive(Debug, Clone)]
pub struct Synced(watch::Receiver<bool>);

impl Synced {
    pub(super) fn new(whole: watch::Receiver<bool>) -> Self {
        Self(whole)
    }

    /// Of a source that has published already.
    pub fn already() -> Self {
        Self(watch::Sender::new(true).subscribe())
    }

    /// Waits for it. Where the source ends before, for good.
    pub async fn wait(mut self) {
        if self.0.wait_for(|whole| *whole).await.is_err() && !*self.0.borrow() {
            std::future::pending().await
        }
    }
}
