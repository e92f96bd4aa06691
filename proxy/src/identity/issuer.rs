//! What the store asks for certificates, and how asking can fail.

use std::future::Future;
use std::pin::Pin;

use thiserror::Error;

use super::{Certificate, CertificateError, KeyError, SpiffeId};

/// A boxed future, as `dyn` traits need it.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// A source of certificates.
pub trait Issuer: Send + Sync {
    /// Gets a certificate for `id` with a key of its own. Dropping the future gives the call up.
    fn issue<'a>(&'a self, id: &'a SpiffeId) -> BoxFuture<'a, Result<Issued, IssueError>>;

    /// Where certificates come from, for logs and state dumps.
    fn describe(&self) -> String;
}

/// A certificate from its source.
pub struct Issued {
    /// The certificate.
    pub certificate: Certificate,
    /// Ready when the source has another one; never for one that is only asked.
    pub changed: BoxFuture<'static, ()>,
}

impl From<Certificate> for Issued {
    fn from(certificate: Certificate) -> Self {
        Self {
            certificate,
            changed: Box::pin(std::future::pending()),
        }
    }
}

/// Why no certificate was issued.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum IssueError {
    /// The CA does not accept who we are.
    #[error("{ca} refused our token: {reason}; is it fresh, from the right issuer and for the right audience?")]
    Unauthenticated {
        /// The CA.
        ca: String,
        /// What it said.
        reason: String,
    },
    /// The CA accepts who we are, but not that we ask for this identity.
    #[error("{ca} does not grant this identity to us: {reason}; does a pod of it run on this node, as the CA sees it?")]
    PermissionDenied {
        /// The CA.
        ca: String,
        /// What it said.
        reason: String,
    },
    /// The SPIRE agent does not take us for one who may have others' identities.
    #[error(
        "{ca} does not take us for a delegate: {reason}; is there an entry for this proxy (such as with the selector \
         unix:uid:0) whose parent is this node's agent, and does the agent's authorized_delegates name its SPIFFE ID?"
    )]
    NotDelegate {
        /// The agent.
        ca: String,
        /// What it said.
        reason: String,
    },
    /// The SPIRE agent knows of no such identity.
    #[error(
        "{ca} has no certificate of {id}: {reason}; is there an entry of it with no selectors but k8s:ns:{} and k8s:sa:{}, \
         whose parent is this node's agent?",
        .id.namespace(),
        .id.service_account()
    )]
    NoEntry {
        /// The agent.
        ca: String,
        /// The identity.
        id: SpiffeId,
        /// What it has instead.
        reason: String,
    },
    /// The SPIRE agent has no roots of the identity's trust domain.
    #[error("{ca} has no bundle of {domain}, but of {known}; is the mesh's trust domain that of the SPIRE server?")]
    NoBundle {
        /// The agent.
        ca: String,
        /// The identity's trust domain.
        domain: String,
        /// Those of which it has.
        known: String,
    },
    /// The CA cannot be reached, or says that it cannot serve.
    #[error("{ca} cannot be reached: {reason}")]
    Unavailable {
        /// The CA.
        ca: String,
        /// What the transport or the CA said.
        reason: String,
    },
    /// The CA did not answer in time.
    #[error("{ca} did not answer within {seconds} s")]
    Deadline {
        /// The CA.
        ca: String,
        /// The deadline.
        seconds: u64,
    },
    /// The CA has more to do than it will do for us.
    #[error("{ca} is asked too much: {reason}")]
    Busy {
        /// The CA.
        ca: String,
        /// What it said.
        reason: String,
    },
    /// The CA calls our request wrong.
    #[error("{ca} calls our request wrong: {reason}")]
    Rejected {
        /// The CA.
        ca: String,
        /// What it said.
        reason: String,
    },
    /// The CA's answer is too large to be read.
    #[error("the answer of {ca} is unusable: {reason}")]
    Oversized {
        /// The CA.
        ca: String,
        /// What the decoder said.
        reason: String,
    },
    /// The CA's answer is not what was asked for.
    #[error("the answer of {ca} is unusable: {reason}")]
    Answer {
        /// The CA.
        ca: String,
        /// What is wrong with it.
        reason: CertificateError,
    },
    /// A file that the call needs cannot be read or used.
    #[error("cannot use {what} {path}: {reason}")]
    File {
        /// What the file is.
        what: &'static str,
        /// Where it is.
        path: String,
        /// What the system or the parser said.
        reason: String,
    },
    /// A key or request could not be made.
    #[error(transparent)]
    Key(#[from] KeyError),
}

/// How a call ended, as counted in metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum CallOutcome {
    /// A certificate was issued.
    Issued,
    /// [`IssueError::Unauthenticated`] or [`IssueError::NotDelegate`].
    Unauthenticated,
    /// [`IssueError::PermissionDenied`] or [`IssueError::NoEntry`].
    PermissionDenied,
    /// [`IssueError::Unavailable`].
    Unavailable,
    /// [`IssueError::Deadline`].
    Deadline,
    /// [`IssueError::Busy`].
    Busy,
    /// [`IssueError::Rejected`].
    Rejected,
    /// [`IssueError::Answer`], [`IssueError::Oversized`] or [`IssueError::NoBundle`].
    BadAnswer,
    /// [`IssueError::File`] or [`IssueError::Key`]: the call was never made.
    Local,
}

impl CallOutcome {
    /// Every outcome, in a fixed order.
    pub const ALL: [Self; 9] = [
        Self::Issued,
        Self::Unauthenticated,
        Self::PermissionDenied,
        Self::Unavailable,
        Self::Deadline,
        Self::Busy,
        Self::Rejected,
        Self::BadAnswer,
        Self::Local,
    ];

    /// The name in metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Issued => "issued",
            Self::Unauthenticated => "unauthenticated",
            Self::PermissionDenied => "permission_denied",
            Self::Unavailable => "unavailable",
            Self::Deadline => "deadline",
            Self::Busy => "busy",
            Self::Rejected => "rejected",
            Self::BadAnswer => "bad_answer",
            Self::Local => "local",
        }
    }
}

impl IssueError {
    /// How metrics count it.
    pub fn outcome(&self) -> CallOutcome {
        match self {
            Self::Unauthenticated { .. } | Self::NotDelegate { .. } => CallOutcome::Unauthenticated,
            Self::PermissionDenied { .. } | Self::NoEntry { .. } => CallOutcome::PermissionDenied,
            Self::Unavailable { .. } => CallOutcome::Unavailable,
            Self::Deadline { .. } => CallOutcome::Deadline,
            Self::Busy { .. } => CallOutcome::Busy,
            Self::Rejected { .. } => CallOutcome::Rejected,
            Self::Answer { .. } | Self::Oversized { .. } | Self::NoBundle { .. } => CallOutcome::BadAnswer,
            Self::File { .. } | Self::Key(_) => CallOutcome::Local,
        }
    }

    /// Whether the CA as a whole was away, rather than unwilling to serve this identity.
    pub fn is_outage(&self) -> bool {
        matches!(self, Self::Unavailable { .. } | Self::Deadline { .. })
    }
}
