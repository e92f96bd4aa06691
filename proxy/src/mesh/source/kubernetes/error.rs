//! What can go wrong between the API server and the mesh.

use std::path::PathBuf;

use thiserror::Error;

/// Why the Kubernetes API cannot be asked at all.
#[derive(Debug, Error)]
pub enum KubernetesError {
    /// The kubeconfig file cannot be used.
    #[error("cannot use the kubeconfig file {}: {reason}", file.display())]
    Kubeconfig {
        /// The file.
        file: PathBuf,
        /// Why.
        reason: String,
    },
    /// There is no service account of a pod.
    #[error("not in a pod of the cluster, and no --kubeconfig: {0}")]
    NotInCluster(String),
    /// No client can be made of the configuration.
    #[error("cannot make a client of the Kubernetes API: {0}")]
    Client(String),
}

/// Why bytes of the API server are no object.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub(super) enum DecodeError {
    #[error("not in the API's protobuf encoding")]
    NoEnvelope,
    #[error("a text is not UTF-8")]
    NotUtf8,
    #[error("malformed protobuf: {0}")]
    Protobuf(#[from] prost::DecodeError),
    #[error("malformed JSON: {0}")]
    Json(String),
    #[error("an object has no {0}")]
    Lacks(&'static str),
    #[error("a message of {0} bytes")]
    TooLarge(usize),
    #[error("{0}")]
    Identity(String),
    #[error("an event of the type {0:?}")]
    EventType(String),
}

/// Why a request to the API server has not brought what it was for.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub(super) enum ApiError {
    #[error("{what}: {reason}")]
    Unreachable { what: String, reason: String },
    #[error("{what}: no answer within {seconds} s")]
    Timeout { what: String, seconds: u64 },
    #[error("{what}: the API server answers {code}{message}")]
    Refused { what: String, code: u16, message: String },
    #[error("{what}: the answer broke off: {reason}")]
    Broken { what: String, reason: String },
    #[error("{what}: nothing heard for {seconds} s")]
    Silent { what: String, seconds: u64 },
    #[error("{what}: {reason}")]
    Malformed { what: String, reason: DecodeError },
}

impl ApiError {
    /// Whether the API server does not have such a resource.
    pub(super) fn is_absent(&self) -> bool {
        matches!(self, Self::Refused { code: 404, .. })
    }

    /// Whether what was asked for is too old to be had.
    pub(super) fn is_expired(&self) -> bool {
        matches!(self, Self::Refused { code: 410, .. })
    }
}
