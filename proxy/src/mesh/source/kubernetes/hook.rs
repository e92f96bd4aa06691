//! Where the conversion of policies plugs in.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::Value;

use crate::mesh::Policy;

/// A kind of policies' objects.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PolicyKind {
    /// `AuthorizationPolicy` of `security.istio.io`.
    AuthorizationPolicy,
    /// `PeerAuthentication` of `security.istio.io`.
    PeerAuthentication,
}

/// From the policies' objects to the mesh's policies. All calls come from one task, in the objects' order.
pub trait PolicyConversion: Send {
    /// An object has been added or changed. True where what follows may differ.
    fn set(&mut self, kind: PolicyKind, object: Value) -> bool;

    /// An object is gone. True where what follows may differ.
    fn remove(&mut self, kind: PolicyKind, namespace: &str, name: &str) -> bool;

    /// All policies as they follow from the objects now.
    fn policies(&self) -> Vec<Policy>;

    /// The keys of the policies of workload scope that select a pod of these labels.
    fn selecting(&self, namespace: &str, labels: &BTreeMap<String, String>) -> Vec<Arc<str>>;

    /// The first whole list of a kind has been handed over.
    fn synced(&mut self, kind: PolicyKind) {
        let _ = kind;
    }
}

/// No policies.
pub(super) struct Unconverted;

impl PolicyConversion for Unconverted {
    fn set(&mut self, kind: PolicyKind, _object: Value) -> bool {
        tracing::error!("a {kind:?} is there, and this build does not read it");
        false
    }

    fn remove(&mut self, _kind: PolicyKind, _namespace: &str, _name: &str) -> bool {
        false
    }

    fn policies(&self) -> Vec<Policy> {
        Vec::new()
    }

    fn selecting(&self, _namespace: &str, _labels: &BTreeMap<String, String>) -> Vec<Arc<str>> {
        Vec::new()
    }
}
