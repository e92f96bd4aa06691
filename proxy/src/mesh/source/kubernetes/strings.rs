//! Texts that many objects have in common, kept once.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use crate::identity::{SpiffeError, SpiffeId, TrustDomain};

/// Shared texts and identities.
#[derive(Default)]
pub(super) struct Strings {
    texts: HashSet<Arc<str>>,
    identities: HashMap<Arc<str>, HashMap<String, SpiffeId>>,
}

impl Strings {
    pub(super) fn share(&mut self, text: &str) -> Arc<str> {
        if let Some(known) = self.texts.get(text) {
            return Arc::clone(known);
        }
        let shared: Arc<str> = text.into();
        self.texts.insert(Arc::clone(&shared));
        shared
    }

    pub(super) fn identity(
        &mut self,
        trust_domain: &TrustDomain,
        namespace: &Arc<str>,
        account: &str,
    ) -> Result<SpiffeId, SpiffeError> {
        if let Some(known) = self.identities.get(namespace).and_then(|of| of.get(account)) {
            return Ok(known.clone());
        }
        let identity = SpiffeId::new(trust_domain, namespace, account)?;
        let of_namespace = self.identities.entry(Arc::clone(namespace)).or_default();
        of_namespace.insert(account.to_owned(), identity.clone());
        Ok(identity)
    }

    /// Forgets what nobody has any more.
    pub(super) fn forget_unused(&mut self) {
        // An identity whose namespace is used by nothing else has gone with it.
        self.identities.retain(|namespace, _| Arc::strong_count(namespace) > 2);
        self.texts.retain(|text| Arc::strong_count(text) > 1);
    }
}
