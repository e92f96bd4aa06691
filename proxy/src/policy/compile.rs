//! What [`evaluate`](super::evaluate) says, as a table that the kernel can hold.
//!
//! The kernel knows a connection's source by number, its destination and its port. Whatever depends on more than that
//! (addresses), or must be told of (the refusals of policies in dry-run mode), it is to leave to this process.

use std::collections::BTreeSet;

use super::matching::{Fact, Facts, policy_matches};
use crate::identity::SpiffeId;
use crate::mesh::{Action, Listed, Match, Policy, PolicySet, Workload};

/// What the kernel is told of one source, destination and port.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Cached {
    /// Permitted, whatever the addresses.
    Allow,
    /// Refused, whatever the addresses.
    Deny,
    /// To be evaluated for each connection.
    Ask,
}

/// The verdicts of one destination.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Compiled {
    /// What holds where no entry does. Another answer than [`Cached::Ask`] is true of every source at every port, and of
    /// sources that were not given too; there are no entries then.
    pub default: Cached,
    /// By source; of each, first the one for every port.
    pub entries: Vec<Entry>,
}

/// The verdict of one source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    /// Which of the sources given.
    pub source: usize,
    /// The port; `None` stands for every port without an entry of its own.
    pub port: Option<u16>,
    /// What holds.
    pub verdict: Cached,
}

impl Compiled {
    /// What the kernel finds: the entry of the source and port, else the source's for every port, else the default.
    pub fn lookup(&self, source: usize, port: u16) -> Cached {
        let entry = |port| {
            self.entries
                .iter()
                .find(|entry| entry.source == source && entry.port == port)
        };
        entry(Some(port))
            .or_else(|| entry(None))
            .map_or(self.default, |entry| entry.verdict)
    }
}

/// Compiles the policies that apply to the destination, for sources of these identities; `None` is a source that has
/// proven none. Where the policies mention more than `max_ports` ports, only what holds at every port is told.
pub fn compile(
    policies: &PolicySet,
    destination: &Workload,
    sources: &[Option<&SpiffeId>],
    max_ports: usize,
) -> Compiled {
    let applying = Applying::to(destination, policies);
    let default = applying.verdict(None, None);
    let mut entries = Vec::new();
    if default == Cached::Ask {
        let ports = applying.ports();
        let split = ports.len() <= max_ports;
        let other = (1..=u16::MAX).find(|port| !ports.contains(port)).filter(|_| split);
        for (index, source) in sources.iter().enumerate() {
            let entry = |port, verdict| Entry {
                source: index,
                port,
                verdict,
            };
            let elsewhere = applying.verdict(Some(*source), other);
            if elsewhere != default {
                entries.push(entry(None, elsewhere));
            }
            for port in ports.iter().filter(|_| split) {
                let verdict = applying.verdict(Some(*source), Some(*port));
                if verdict != elsewhere {
                    entries.push(entry(Some(*port), verdict));
                }
            }
        }
    }
    Compiled { default, entries }
}

/// The policies of one destination.
struct Applying<'a> {
    known: Vec<&'a Policy>,
    missing: bool,
}

impl<'a> Applying<'a> {
    fn to(destination: &'a Workload, policies: &'a PolicySet) -> Self {
        let mut missing = false;
        let known = policies
            .applying(destination)
            .filter_map(|listed| match listed {
                Listed::Known(policy) => Some(&**policy),
                Listed::Missing(_) => {
                    missing = true;
                    None
                }
            })
            .collect();
        Self { known, missing }
    }

    /// The ports that any policy mentions, but for 0, to which nothing connects.
    fn ports(&self) -> BTreeSet<u16> {
        let of = |conditions: &'a Match| {
            conditions
                .destination_ports
                .iter()
                .chain(&conditions.not_destination_ports)
        };
        self.known
            .iter()
            .flat_map(|policy| &policy.rules)
            .flat_map(|rule| &rule.clauses)
            .flat_map(|clause| &clause.matches)
            .flat_map(of)
            .copied()
            .filter(|port| *port != 0)
            .collect()
    }

    /// What holds for the source at the port, whatever the addresses; of any source, or at any port, where `None`.
    fn verdict(&self, source: Option<Option<&SpiffeId>>, port: Option<u16>) -> Cached {
        let facts = |unknown| Facts {
            source: source.map_or(Fact::Assumed(unknown), Fact::Is),
            source_ip: Fact::Assumed(unknown),
            destination_ip: Fact::Assumed(unknown),
            destination_port: port.map_or(Fact::Assumed(unknown), Fact::Is),
        };
        let of = |action, dry_run| {
            let (certainly, possibly) = (facts(false), facts(true));
            let mut found = Found::default();
            for policy in &self.known {
                if (policy.action, policy.dry_run) == (action, dry_run) {
                    found.any = true;
                    found.certain = found.certain || policy_matches(policy, &certainly);
                    found.possible = found.possible || policy_matches(policy, &possibly);
                }
            }
            found
        };
        let (deny, allow) = (of(Action::Deny, false), of(Action::Allow, false));
        let (dry_deny, dry_allow) = (of(Action::Deny, true), of(Action::Allow, true));

        // Whoever decides must report these.
        let reported = dry_deny.possible || !allow.any && dry_allow.any && !dry_allow.certain;
        if reported {
            Cached::Ask
        } else if self.missing || deny.certain || allow.any && !allow.possible {
            Cached::Deny
        } else if !deny.possible && (!allow.any || allow.certain) {
            Cached::Allow
        } else {
            Cached::Ask
        }
    }
}

/// Policies of one kind: whether there are any, whether one matches for certain, and whether one may match.
#[derive(Default)]
struct Found {
    any: bool,
    certain: bool,
    possible: bool,
}
