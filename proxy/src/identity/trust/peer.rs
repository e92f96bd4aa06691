//! What is kept of a peer's chain while connections rest on it.

use std::fmt;
use std::sync::{Arc, Mutex};

use rustls_pki_types::{CertificateDer, UnixTime};

use super::path::Role;
use super::root::Digest;
use super::store::Trust;
use crate::identity::{SpiffeId, TrustDomain};

/// A chain that a peer has shown and proven. All connections of one peer certificate share one.
pub struct PeerChain {
    /// Leaf first.
    pub(super) certificates: Box<[CertificateDer<'static>]>,
    pub(super) digest: Digest,
    pub(super) role: Role,
    /// Our own trust domain at that handshake.
    pub(super) home: TrustDomain,
    /// When it was first accepted.
    pub(super) at: UnixTime,
    pub(super) id: SpiffeId,
    pub(super) trust: Trust,
    pub(super) verdict: Mutex<Verdict>,
}

/// What is thought of a chain since which change of trust.
#[derive(Debug, Clone)]
pub(super) struct Verdict {
    pub(super) generation: u64,
    /// Why it is not acceptable any more.
    pub(super) fault: Option<Arc<str>>,
}

impl PeerChain {
    /// Whose it is, under our own trust domain's name where it bears an alias of it.
    pub fn id(&self) -> &SpiffeId {
        &self.id
    }

    /// Whether connections that rest on it may go on: nothing has become known against it. Cheap, unless there was a
    /// change since it was last asked for.
    pub fn recheck(&self) -> Result<(), Arc<str>> {
        self.trust.recheck(self)
    }

    /// Ready, with the reason, once connections that rest on it may not go on.
    pub async fn given_up(&self) -> Arc<str> {
        let mut changes = self.trust.changes();
        loop {
            if let Err(reason) = self.recheck() {
                return reason;
            }
            if changes.changed().await.is_err() {
                return std::future::pending().await;
            }
        }
    }
}

impl fmt::Debug for PeerChain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PeerChain({})", self.id)
    }
}
