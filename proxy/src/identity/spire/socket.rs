//! The admin socket of a SPIRE agent, and what its refusals mean.

use std::fmt;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status};

use super::SpireSettingsError;
use super::proto::delegated_identity_client::DelegatedIdentityClient;
use crate::identity::IssueError;
use crate::identity::ca::describe_status;

/// One connection to the agent, which all calls share. It is made when it is needed, and anew when it has ended.
pub(super) struct AdminSocket {
    path: String,
    endpoint: Endpoint,
    deadline: Duration,
    channel: Mutex<Option<Channel>>,
}

impl AdminSocket {
    pub(super) fn new(path: &str, deadline: Duration) -> Result<Self, SpireSettingsError> {
        let unusable = || SpireSettingsError::Socket(path.to_owned());
        if !path.starts_with('/') {
            return Err(unusable());
        }
        let endpoint = Endpoint::from_shared(format!("unix://{path}")).map_err(|_| unusable())?;
        Ok(Self {
            path: path.to_owned(),
            endpoint,
            deadline,
            channel: Mutex::default(),
        })
    }

    pub(super) fn client(&self) -> DelegatedIdentityClient<Channel> {
        let mut channel = self.channel.lock().unwrap_or_else(PoisonError::into_inner);
        let channel = channel.get_or_insert_with(|| self.endpoint.connect_lazy());
        DelegatedIdentityClient::new(channel.clone())
    }

    /// Gives a call up that takes too long.
    pub(super) async fn in_time<T>(&self, call: impl Future<Output = Result<T, IssueError>>) -> Result<T, IssueError> {
        tokio::time::timeout(self.deadline, call).await.unwrap_or_else(|_| {
            // The agent may hang: what is asked next is asked on a new connection. Calls that are under way stay on theirs.
            *self.channel.lock().unwrap_or_else(PoisonError::into_inner) = None;
            Err(self.deadline_passed())
        })
    }

    fn deadline_passed(&self) -> IssueError {
        IssueError::Deadline {
            ca: self.to_string(),
            seconds: self.deadline.as_secs(),
        }
    }

    /// The agent has ended a call that it only ends when it ends itself.
    pub(super) fn ended(&self) -> IssueError {
        IssueError::Unavailable {
            ca: self.to_string(),
            reason: "it has ended the call".to_owned(),
        }
    }

    pub(super) fn failure(&self, status: &Status) -> IssueError {
        let (ca, reason) = (self.to_string(), describe_status(status));
        match status.code() {
            // It says so of the caller only: where there is nothing for the selectors, it answers, with nothing.
            Code::PermissionDenied | Code::Unauthenticated => IssueError::NotDelegate { ca, reason },
            Code::DeadlineExceeded | Code::Cancelled => self.deadline_passed(),
            Code::ResourceExhausted => IssueError::Busy { ca, reason },
            Code::OutOfRange => IssueError::Oversized { ca, reason },
            Code::Unimplemented => IssueError::Rejected {
                ca,
                reason: format!(
                    "{reason}; is this the agent's admin socket (admin_socket_path), and not that of its Workload API?"
                ),
            },
            Code::InvalidArgument | Code::FailedPrecondition | Code::NotFound => IssueError::Rejected { ca, reason },
            _ => IssueError::Unavailable {
                ca,
                reason: format!("{reason}; does the agent run on this node, and is this its admin_socket_path?"),
            },
        }
    }
}

impl fmt::Display for AdminSocket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the SPIRE agent at {}", self.path)
    }
}
