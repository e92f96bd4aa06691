//! The right to an identity, held for each enrolled pod.

use std::fmt;

use super::{CertStore, SpiffeId};

/// Keeps an identity's certificate in the store. Dropping the last lease of an identity gives up a call in
/// flight and forgets certificate and key; connections made with it keep their own share until they end.
#[must_use = "dropping the lease forgets the certificate"]
pub struct IdentityLease {
    store: CertStore,
    id: SpiffeId,
}

impl IdentityLease {
    pub(super) fn new(store: CertStore, id: SpiffeId) -> Self {
        Self { store, id }
    }

    /// The identity held.
    pub fn id(&self) -> &SpiffeId {
        &self.id
    }
}

impl Drop for IdentityLease {
    fn drop(&mut self) {
        self.store.release(&self.id);
    }
}

impl fmt::Debug for IdentityLease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "IdentityLease({})", self.id)
    }
}
