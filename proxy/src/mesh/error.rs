//! Why parts do not make a mesh.

use std::net::IpAddr;
use std::sync::Arc;

use thiserror::Error;

/// What of the parts an error is about; a source finds its place in the text by it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Subject {
    /// The node of that name.
    Node(Arc<str>),
    /// The workload of that uid.
    Workload(Arc<str>),
    /// The service of that `namespace/name`.
    Service(Arc<str>),
    /// The policy of that key.
    Policy(Arc<str>),
}

/// Why parts do not make a mesh. Where two are in each other's way, `second` is the one that came later.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[expect(missing_docs, reason = "the fields are named in the messages")]
pub enum MeshError {
    /// Two nodes of one name.
    #[error("two nodes are named {name}")]
    DuplicateNode { name: Arc<str> },
    /// A workload without uid.
    #[error("a workload of namespace {namespace} has an empty uid or name")]
    UnnamedWorkload { uid: Arc<str>, namespace: Arc<str> },
    /// Two workloads with one uid.
    #[error("two workloads have the uid {uid}")]
    DuplicateUid { uid: Arc<str> },
    /// Two workloads with one address, both ready or neither: which one a connection belongs to cannot be told.
    #[error("workloads {first} and {second} both have the address {address}")]
    DuplicateAddress {
        address: IpAddr,
        first: Arc<str>,
        second: Arc<str>,
    },
    /// An address that no pod or service can have.
    #[error("{owner} has the address {address}, which is loopback, multicast or unspecified")]
    ImpossibleAddress {
        address: IpAddr,
        owner: Arc<str>,
        subject: Subject,
    },
    /// Port 0.
    #[error("{owner} has a port 0; ports are 1 to 65535")]
    PortZero { owner: Arc<str>, subject: Subject },
    /// A service without a name.
    #[error("a service has an empty name or namespace: {name:?}")]
    UnnamedService { name: Arc<str> },
    /// Two services of one name.
    #[error("two services are named {name}")]
    DuplicateService { name: Arc<str> },
    /// Two services with one virtual address.
    #[error("services {first} and {second} both have the address {address}")]
    DuplicateServiceAddress {
        address: IpAddr,
        first: Arc<str>,
        second: Arc<str>,
    },
    /// A service that has one port twice.
    #[error("service {service} has port {port} twice")]
    DuplicateServicePort { service: Arc<str>, port: u16 },
    /// A policy's name or namespace is empty or has a slash.
    #[error(
        "policy {key:?}: name and namespace may not be empty or have a `/`; only a global policy may be without namespace"
    )]
    PolicyName { key: Arc<str> },
    /// Two policies of one name.
    #[error("two policies are named {key}")]
    DuplicatePolicy { key: Arc<str> },
    /// A workload lists a policy by something other than `namespace/name`.
    #[error("workload {workload} lists the policy {policy:?}; a policy is listed as namespace/name")]
    ListedPolicyName { workload: Arc<str>, policy: Arc<str> },
}

impl MeshError {
    /// What the error is about; of two in each other's way, the later.
    pub fn subject(&self) -> Subject {
        match self {
            Self::DuplicateNode { name } => Subject::Node(Arc::clone(name)),
            Self::UnnamedWorkload { uid, .. } | Self::DuplicateUid { uid } => Subject::Workload(Arc::clone(uid)),
            Self::DuplicateAddress { second, .. } => Subject::Workload(Arc::clone(second)),
            Self::ListedPolicyName { workload, .. } => Subject::Workload(Arc::clone(workload)),
            Self::ImpossibleAddress { subject, .. } | Self::PortZero { subject, .. } => subject.clone(),
            Self::UnnamedService { name } | Self::DuplicateService { name } => Subject::Service(Arc::clone(name)),
            Self::DuplicateServiceAddress { second, .. } => Subject::Service(Arc::clone(second)),
            Self::DuplicateServicePort { service, .. } => Subject::Service(Arc::clone(service)),
            Self::PolicyName { key } | Self::DuplicatePolicy { key } => Subject::Policy(Arc::clone(key)),
        }
    }
}
