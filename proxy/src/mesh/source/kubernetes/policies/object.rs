//! The objects as the API server gives them, in JSON. Of the metadata only what is used is read.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::Deserialize;
use serde_json::{Map, Value};

use crate::mesh::source::kubernetes::hook::PolicyKind;

/// The group and version of both kinds.
pub(super) const API_VERSION: &str = "security.istio.io/v1";

impl PolicyKind {
    /// The kind's name.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::AuthorizationPolicy => "AuthorizationPolicy",
            Self::PeerAuthentication => "PeerAuthentication",
        }
    }

    /// The resource's name in paths.
    pub fn plural(self) -> &'static str {
        match self {
            Self::AuthorizationPolicy => "authorizationpolicies",
            Self::PeerAuthentication => "peerauthentications",
        }
    }
}

/// A policy object, its specification not yet understood: what is wrong with it must not lose the object.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct Object {
    pub(super) metadata: Metadata,
    #[serde(default)]
    pub(super) spec: Value,
}

/// An object's metadata, as far as used.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Metadata {
    /// Its name.
    pub name: Arc<str>,
    /// Its namespace.
    pub namespace: Arc<str>,
    /// Its uid.
    #[serde(default)]
    pub uid: Arc<str>,
    /// Counts the changes of its specification.
    #[serde(default)]
    pub generation: i64,
    /// In RFC 3339 and UTC with whole seconds, so that it sorts as a string.
    #[serde(default)]
    pub creation_timestamp: String,
    #[serde(default)]
    pub(super) annotations: BTreeMap<String, String>,
}

/// Which pods are meant: those that have all of these labels.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Selector(Vec<(String, String)>);

impl Selector {
    /// Whether a pod of these labels is meant.
    pub(super) fn selects<'l>(&self, label: impl Fn(&str) -> Option<&'l str>) -> bool {
        self.0.iter().all(|(key, value)| label(key) == Some(value.as_str()))
    }
}

/// What a specification says about the pods that it is for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Selection {
    /// All in its scope. A selector without labels selects them all.
    All,
    /// Those selected.
    Some(Selector),
    /// It cannot be told.
    Invalid(String),
}

impl Selection {
    /// Reads `selector`, whatever the rest of the specification is like.
    pub(super) fn of(spec: &Value) -> Self {
        #[derive(Deserialize, Default)]
        #[serde(rename_all = "camelCase", default)]
        struct Spec {
            match_labels: Option<BTreeMap<String, String>>,
            #[serde(flatten)]
            other: Map<String, Value>,
        }
        let read = match spec.get("selector") {
            None | Some(Value::Null) => return Self::All,
            Some(selector) => Spec::deserialize(selector),
        };
        let labels = match read {
            Err(error) => return Self::Invalid(error.to_string()),
            Ok(spec) => match present(&spec.other).next() {
                Some(field) => return Self::Invalid(format!("{field} is not known, only matchLabels")),
                None => spec.match_labels.unwrap_or_default(),
            },
        };
        match labels
            .iter()
            .find(|(key, value)| key.is_empty() || key.contains('*') || value.contains('*'))
        {
            Some((key, value)) => Self::Invalid(format!("{key:?}: {value:?} is no label; there are no wildcards here")),
            None if labels.is_empty() => Self::All,
            None => Self::Some(Selector(labels.into_iter().collect())),
        }
    }
}

/// The names of the fields that say something.
pub(super) fn present(fields: &Map<String, Value>) -> impl Iterator<Item = &str> {
    let says = |value: &Value| match value {
        Value::Null => false,
        Value::Array(values) => !values.is_empty(),
        Value::Object(fields) => !fields.is_empty(),
        Value::String(text) => !text.is_empty(),
        Value::Bool(_) | Value::Number(_) => true,
    };
    fields
        .iter()
        .filter(move |(_, value)| says(value))
        .map(|(name, _)| name.as_str())
}
