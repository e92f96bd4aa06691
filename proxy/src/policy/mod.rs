//! Whether a connection is permitted, and by which rule: a pure function of the policies, the destination and what is
//! known of the source.
//!
//! A destination's policies are the global ones, its namespace's, and those it lists. Any that denies and matches denies;
//! else, where none allows at all, everything is allowed; else one that allows must match. A policy that is listed but
//! missing denies: it might have.

mod compile;
mod matching;
mod rule_name;
#[cfg(test)]
mod tests;

use std::net::IpAddr;
use std::sync::Arc;

use crate::identity::SpiffeId;
use crate::mesh::{Action, Listed, PolicySet, Workload};

pub use compile::{Cached, Compiled, Entry, compile};
pub use rule_name::RuleName;

/// What is known of a connection that asks for leave.
#[derive(Debug, Clone, Copy)]
pub struct Request<'a> {
    /// The source's proven identity; `None` where nothing was proven.
    pub source: Option<&'a SpiffeId>,
    /// The source's address.
    pub source_ip: IpAddr,
    /// The pod's address that it comes to.
    pub destination_ip: IpAddr,
    /// The pod's port that it comes to, not the service's.
    pub destination_port: u16,
}

/// The decision.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// Permitted.
    Allow {
        /// The rule that permits it; `None` where no policy that allows applies, so that all is permitted.
        rule: Option<RuleName>,
    },
    /// Refused.
    Deny {
        /// By what.
        rule: RuleName,
    },
}

impl Verdict {
    /// Whether the connection is permitted.
    pub fn is_allow(&self) -> bool {
        matches!(self, Self::Allow { .. })
    }
}

/// The decision, and what policies in dry-run mode would have made of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Decision {
    /// What holds.
    pub verdict: Verdict,
    /// The refusals that the policies in dry-run mode would add if they were enforced, whatever the verdict.
    pub dry_run_denials: Vec<RuleName>,
}

/// Decides on a connection to the destination. Allocates only to name refusals.
pub fn evaluate(policies: &PolicySet, destination: &Workload, request: &Request<'_>) -> Decision {
    let applying = policies.applying(destination);
    let mut denied = None;
    let mut missing = None;
    let mut enforced = Allows::default();
    let mut dry_run = Allows::default();
    let mut dry_run_denials = Vec::new();

    for listed in applying.clone() {
        let policy = match listed {
            Listed::Known(policy) => policy,
            Listed::Missing(key) => {
                missing.get_or_insert(key);
                continue;
            }
        };
        match (policy.action, policy.dry_run) {
            (Action::Deny, true) => dry_run_denials.extend(matching::first_rule(policy, request)),
            (Action::Deny, false) => denied = denied.or_else(|| matching::first_rule(policy, request)),
            (Action::Allow, true) => dry_run.consider(|| matching::first_rule(policy, request)),
            (Action::Allow, false) => enforced.consider(|| matching::first_rule(policy, request)),
        }
    }

    let none_matched = |dry_run: bool| RuleName::NoAllowMatched {
        policies: applying
            .clone()
            .filter_map(|listed| match listed {
                Listed::Known(policy) if policy.action == Action::Allow && policy.dry_run == dry_run => {
                    Some(Arc::clone(policy.key()))
                }
                _ => None,
            })
            .collect(),
    };
    // Where policies that allow are enforced already, one more takes nothing away.
    if !enforced.any && dry_run.any && dry_run.matched.is_none() {
        dry_run_denials.push(none_matched(true));
    }
    let verdict = if let Some(rule) = denied {
        Verdict::Deny { rule }
    } else if let Some(key) = missing {
        Verdict::Deny {
            rule: RuleName::Missing {
                policy: Arc::clone(key),
            },
        }
    } else if enforced.any && enforced.matched.is_none() {
        Verdict::Deny {
            rule: none_matched(false),
        }
    } else {
        Verdict::Allow { rule: enforced.matched }
    };
    Decision {
        verdict,
        dry_run_denials,
    }
}

/// The policies that allow, so far: whether there are any, and the first rule that matched.
#[derive(Default)]
struct Allows {
    any: bool,
    matched: Option<RuleName>,
}

impl Allows {
    fn consider(&mut self, first_rule: impl FnOnce() -> Option<RuleName>) {
        self.any = true;
        if self.matched.is_none() {
            self.matched = first_rule();
        }
    }
}
