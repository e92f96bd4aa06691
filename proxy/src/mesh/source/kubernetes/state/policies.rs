//! Policies, as far as this source has to do with them.

use serde_json::Value;

use super::State;
use crate::mesh::source::kubernetes::error::DecodeError;
use crate::mesh::source::kubernetes::hook::{PolicyKind, named};
use crate::mesh::source::kubernetes::kind::Kind;

impl State {
    pub(super) fn set_policy(&mut self, kind: Kind, object: Value, list: u32) -> Result<(), DecodeError> {
        let Some(kind) = kind.policy() else { return Ok(()) };
        let (namespace, name) = named(&object)?;
        self.policy_objects
            .insert((kind, namespace.to_owned(), name.to_owned()), list);
        let changed = self.policies.set(kind, object);
        self.stale.policies |= changed;
        self.stale.any |= changed;
        Ok(())
    }

    pub(super) fn remove_policy(&mut self, kind: PolicyKind, namespace: &str, name: &str) {
        self.policy_objects
            .remove(&(kind, namespace.to_owned(), name.to_owned()));
        let changed = self.policies.remove(kind, namespace, name);
        self.stale.policies |= changed;
        self.stale.any |= changed;
    }

    pub(super) fn remake_policies(&mut self) {
        if let Err(error) = self.mesh.set_policies(self.policies.policies()) {
            tracing::error!("{error}; the policies stay as they were");
        }
        self.remake_pods(|pod| pod.workload.pod.is_some());
    }
}
