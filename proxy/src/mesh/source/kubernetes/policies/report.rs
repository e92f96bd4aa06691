//! What there is to say about a policy object: pure data, for the object's status and an event.

use std::fmt;

use serde_json::{Value, json};

use super::object::Metadata;
use crate::mesh::source::kubernetes::hook::PolicyKind;

/// The type of the condition on the object.
pub const CONDITION: &str = "mesh.adit/Accepted";

/// What became of an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum State {
    /// It is enforced as it is written.
    Accepted,
    /// It is enforced, but more strictly than written: what decides on requests rather than connections is not known here.
    PartlyApplied,
    /// It has no effect here.
    Ignored,
    /// Something in it is wrong. What is left of it restricts, and permits nothing on account of the fault.
    Invalid,
}

impl State {
    /// The condition's reason.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Accepted => "Accepted",
            Self::PartlyApplied => "PartlyApplied",
            Self::Ignored => "Ignored",
            Self::Invalid => "Invalid",
        }
    }

    /// The condition's status.
    pub fn is_accepted(self) -> bool {
        matches!(self, Self::Accepted | Self::PartlyApplied)
    }
}

/// One thing found in an object.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(missing_docs, reason = "the fields are named in the messages")]
pub enum Finding {
    /// A field or condition that is not about connections, or not known at all.
    Unsupported { rule: Option<usize>, field: String },
    /// A value that cannot be read.
    Value {
        rule: usize,
        field: &'static str,
        value: String,
        reason: String,
    },
    /// A part of a rule that says nothing.
    Empty { rule: usize, part: &'static str },
    /// An identity that no pod can have.
    NoIdentity {
        rule: usize,
        field: &'static str,
        value: String,
    },
    /// The specification has not the form that it should have.
    Shape(String),
    /// The selector cannot be read.
    Selector(String),
    /// An action that there is not.
    UnknownAction(String),
    /// The action `CUSTOM`.
    Custom,
    /// The action `AUDIT`.
    Audit,
    /// A policy that denies or delegates, without a rule.
    NoRules(&'static str),
    /// A policy for a waypoint, a gateway or a service.
    TargetRefs,
    /// An annotation that is neither true nor false.
    DryRun(String),
    /// A mode that there is not.
    Mode(String),
    /// A port of `portLevelMtls` that there is not.
    Port(String),
    /// Modes of ports without a selector.
    PortsWithoutSelector,
    /// The mode `DISABLE`.
    Disable,
    /// Another, older object decides.
    Superseded(String),
}

impl Finding {
    fn state(&self) -> State {
        match self {
            Self::Unsupported { .. } | Self::Custom | Self::Disable => State::PartlyApplied,
            Self::NoIdentity { .. } => State::Accepted,
            Self::Audit | Self::NoRules(_) | Self::TargetRefs | Self::Superseded(_) => State::Ignored,
            Self::Value { .. }
            | Self::Empty { .. }
            | Self::Shape(_)
            | Self::Selector(_)
            | Self::UnknownAction(_)
            | Self::DryRun(_)
            | Self::Mode(_)
            | Self::Port(_)
            | Self::PortsWithoutSelector => State::Invalid,
        }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unsupported { rule: Some(rule), field } => write!(f, "rule {rule}: {field} is not enforced on connections"),
            Self::Unsupported { rule: None, field } => write!(f, "{field} is not known"),
            Self::Value { rule, field, value, reason } => write!(f, "rule {rule}: {field} has {value:?}: {reason}"),
            Self::Empty { rule, part } => write!(f, "rule {rule}: {part} is empty"),
            Self::NoIdentity { rule, field, value } => write!(
                f,
                "rule {rule}: {field} has {value:?}, which no pod can be; identities are \
                 <trust domain>/ns/<namespace>/sa/<service account>"
            ),
            Self::Shape(reason) => write!(f, "the specification cannot be read: {reason}"),
            Self::Selector(reason) => write!(f, "the selector cannot be read: {reason}"),
            Self::UnknownAction(action) => write!(f, "there is no action {action:?}, only ALLOW and DENY"),
            Self::Custom => f.write_str("the action CUSTOM asks an external authorizer, which is not supported"),
            Self::Audit => f.write_str("the action AUDIT is not supported; it decides nothing"),
            Self::NoRules(action) => write!(f, "a {action} policy without rules matches nothing"),
            Self::TargetRefs => f.write_str(
                "it is for a waypoint, a gateway or a service (targetRef), none of which is enforced on the pod's connections",
            ),
            Self::DryRun(value) => write!(f, "the annotation istio.io/dry-run is {value:?}, not true or false"),
            Self::Mode(mode) => write!(f, "there is no mode {mode:?}, only STRICT, PERMISSIVE, DISABLE and UNSET"),
            Self::Port(port) => write!(f, "portLevelMtls has {port:?}, which is no port from 1 to 65535"),
            Self::PortsWithoutSelector => f.write_str("portLevelMtls needs a selector"),
            Self::Disable => f.write_str("the mode DISABLE counts as PERMISSIVE: what comes in a tunnel stays encrypted"),
            Self::Superseded(older) => write!(f, "the PeerAuthentication {older} is older and decides for the same pods"),
        }
    }
}

/// What there is to say about one object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Report {
    /// What kind it is of.
    pub kind: PolicyKind,
    /// What names it.
    pub metadata: Metadata,
    /// What was found in it, in order.
    pub findings: Vec<Finding>,
    /// What follows for connections, where not all is enforced as written.
    pub effect: Option<&'static str>,
}

impl Report {
    /// What became of the object: the worst of what was found.
    pub fn state(&self) -> State {
        let severity = |state: &State| match state {
            State::Accepted => 0,
            State::PartlyApplied => 1,
            State::Ignored => 2,
            State::Invalid => 3,
        };
        self.findings
            .iter()
            .map(Finding::state)
            .max_by_key(severity)
            .unwrap_or(State::Accepted)
    }

    /// The text for the reader.
    pub fn message(&self) -> String {
        if self.findings.is_empty() {
            return self.effect.unwrap_or("enforced as written").to_owned();
        }
        let mut text = String::new();
        for (index, finding) in self.findings.iter().enumerate() {
            if index > 0 {
                text.push_str("; ");
            }
            text.push_str(&finding.to_string());
        }
        if let Some(effect) = self.effect {
            text.push_str(". ");
            text.push_str(effect);
        }
        text
    }

    /// The object's conditions with this report among them, where that changes anything; `now` is in RFC 3339. The
    /// conditions of others stay: in Istio's definition the list has no keys by which they could be written singly.
    pub fn conditions(&self, existing: &[Value], now: &str) -> Option<Vec<Value>> {
        let status = if self.state().is_accepted() { "True" } else { "False" };
        let ours = |condition: &&Value| condition["type"] == CONDITION;
        let before = existing.iter().find(ours);
        let since = before
            .filter(|condition| condition["status"] == status)
            .and_then(|condition| condition["lastTransitionTime"].as_str())
            .unwrap_or(now);
        let condition = json!({
            "type": CONDITION,
            "status": status,
            "reason": self.state().as_str(),
            "message": self.message(),
            "lastTransitionTime": since,
            "observedGeneration": self.metadata.generation,
        });
        if before.is_some_and(|before| same(before, &condition)) {
            return None;
        }
        let others = existing.iter().filter(|condition| !ours(condition)).cloned();
        Some(others.chain([condition]).collect())
    }
}

/// Whether two conditions say the same. Istio writes generations as strings too.
fn same(a: &Value, b: &Value) -> bool {
    let number = |value: &Value| value.as_i64().or_else(|| value.as_str()?.parse().ok());
    ["status", "reason", "message"].iter().all(|field| a[field] == b[field])
        && number(&a["observedGeneration"]) == number(&b["observedGeneration"])
}
