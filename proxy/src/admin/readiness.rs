//! What the process still waits for before it is ready, by name.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;

/// The items that readiness waits for. Clones share them.
#[derive(Debug, Clone)]
pub struct Readiness(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    items: Mutex<Items>,
    ready: watch::Sender<bool>,
}

#[derive(Debug, Default)]
struct Items {
    next: u64,
    pending: BTreeMap<u64, String>,
}

impl Default for Readiness {
    fn default() -> Self {
        Self::new()
    }
}

impl Readiness {
    /// Ready, until something is pending. Take the first item before anything can ask.
    pub fn new() -> Self {
        Self(Arc::new(Inner {
            items: Mutex::default(),
            ready: watch::Sender::new(true),
        }))
    }

    /// Adds an item, such as `certificate of spiffe://…`; it is pending until the guard is done or dropped.
    #[must_use = "the item is pending only as long as the guard lives"]
    pub fn pending(&self, item: impl Into<String>) -> Pending {
        let mut items = self.0.lock();
        let key = items.next;
        items.next += 1;
        items.pending.insert(key, item.into());
        self.0.ready.send_replace(false);
        Pending {
            readiness: Arc::clone(&self.0),
            key,
        }
    }

    /// Whether nothing is pending.
    pub fn is_ready(&self) -> bool {
        self.0.lock().pending.is_empty()
    }

    /// What is pending, the oldest first.
    pub fn items(&self) -> Vec<String> {
        self.0.lock().pending.values().cloned().collect()
    }

    /// Waits until nothing is pending. May be dropped at any time.
    pub async fn ready(&self) {
        // The sender lives as long as `self`.
        let _ = self.0.ready.subscribe().wait_for(|ready| *ready).await;
    }
}

impl Inner {
    /// A panic elsewhere does not make the items wrong.
    fn lock(&self) -> MutexGuard<'_, Items> {
        self.items.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An item that is pending as long as this lives.
#[derive(Debug)]
pub struct Pending {
    readiness: Arc<Inner>,
    key: u64,
}

impl Pending {
    /// Says more of the item: what it waits for now, or why the last attempt failed.
    pub fn update(&self, item: impl Into<String>) {
        self.readiness.lock().pending.insert(self.key, item.into());
    }

    /// The item is no longer pending. The same as dropping it, in plain words.
    pub fn done(self) {}
}

impl Drop for Pending {
    fn drop(&mut self) {
        let mut items = self.readiness.lock();
        items.pending.remove(&self.key);
        if items.pending.is_empty() {
            self.readiness.ready.send_replace(true);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;

    #[tokio::test]
    async fn ready_is_when_nothing_is_pending() {
        let readiness = Readiness::new();
        let first = readiness.pending("first");
        let second = readiness.pending("second");
        let third = readiness.pending("second");
        second.update("second: no answer yet");
        assert_eq!(readiness.items(), ["first", "second: no answer yet", "second"]);
        first.done();
        drop(third);
        assert!(!readiness.is_ready());
        assert_eq!(readiness.ready().now_or_never(), None);
        drop(second);
        assert!(readiness.is_ready());
        readiness.ready().await;
        let _again = readiness.pending("again");
        assert_eq!(readiness.ready().now_or_never(), None);
    }
}
