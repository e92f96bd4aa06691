//! Where the conversion of policies plugs in.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::Value;

use super::error::DecodeError;
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
}

/// The namespace and name of a policy's object.
pub(super) fn named(object: &Value) -> Result<(&str, &str), DecodeError> {
    let text = |field: &'static str| object["metadata"][field].as_str().ok_or(DecodeError::Lacks(field));
    Ok((text("namespace")?, text("name")?))
}
