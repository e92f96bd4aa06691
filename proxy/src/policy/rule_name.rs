//! How a decision names what decided.

use std::fmt;
use std::sync::Arc;

use crate::mesh::Action;

/// What decided on a connection.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum RuleName {
    /// A rule of a policy matched.
    Rule {
        /// The policy's `namespace/name`.
        policy: Arc<str>,
        /// What the policy does.
        action: Action,
        /// Which of its rules, from 0 in the order written.
        index: usize,
    },
    /// Policies that allow apply, and none matched.
    NoAllowMatched {
        /// Their `namespace/name`.
        policies: Vec<Arc<str>>,
    },
    /// The destination lists a policy that is not there.
    Missing {
        /// What it is listed by.
        policy: Arc<str>,
    },
}

impl fmt::Display for RuleName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Rule { policy, action, index } => write!(f, "{}: {policy} rule {index}", action.as_str()),
            Self::NoAllowMatched { policies } => {
                write!(f, "default: no allow policy matched ({})", policies.join(", "))
            }
            Self::Missing { policy } => write!(f, "missing policy {policy}"),
        }
    }
}
