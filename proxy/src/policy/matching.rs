//! Whether a policy matches a connection.

use std::net::IpAddr;
use std::sync::Arc;

use super::{Request, RuleName};
use crate::identity::SpiffeId;
use crate::mesh::{Clause, Match, Policy, Rule};

/// A fact of a connection that conditions are about.
#[derive(Debug, Clone, Copy)]
pub(super) enum Fact<T> {
    /// It is known.
    Is(T),
    /// It is not known: whatever is said about it is taken to hold, or not to. Every condition stands in a policy
    /// unnegated, so what a policy matches where none is taken to hold it always matches, and what it does not match
    /// where all are taken to hold it never does.
    Assumed(bool),
}

/// What is known of a connection.
#[derive(Debug, Clone, Copy)]
pub(super) struct Facts<'a> {
    pub(super) source: Fact<Option<&'a SpiffeId>>,
    pub(super) source_ip: Fact<IpAddr>,
    pub(super) destination_ip: Fact<IpAddr>,
    pub(super) destination_port: Fact<u16>,
}

impl<'a> From<&Request<'a>> for Facts<'a> {
    fn from(request: &Request<'a>) -> Self {
        Self {
            source: Fact::Is(request.source),
            source_ip: Fact::Is(request.source_ip),
            destination_ip: Fact::Is(request.destination_ip),
            destination_port: Fact::Is(request.destination_port),
        }
    }
}

/// The first rule of the policy that matches.
pub(super) fn first_rule(policy: &Policy, request: &Request<'_>) -> Option<RuleName> {
    let facts = Facts::from(request);
    let index = policy.rules.iter().position(|rule| rule_matches(rule, &facts))?;
    Some(RuleName::Rule {
        policy: Arc::clone(policy.key()),
        action: policy.action,
        index,
    })
}

/// Whether any rule of the policy matches.
pub(super) fn policy_matches(policy: &Policy, facts: &Facts<'_>) -> bool {
    policy.rules.iter().any(|rule| rule_matches(rule, facts))
}

fn rule_matches(rule: &Rule, facts: &Facts<'_>) -> bool {
    rule.clauses.iter().all(|clause| clause_matches(clause, facts))
}

/// A clause without matches says nothing and holds; one whose matches all say nothing offers no alternative and fails.
fn clause_matches(clause: &Clause, facts: &Facts<'_>) -> bool {
    clause.matches.is_empty()
        || clause
            .matches
            .iter()
            .any(|conditions| !conditions.is_empty() && conditions_hold(conditions, facts))
}

fn conditions_hold(conditions: &Match, facts: &Facts<'_>) -> bool {
    let Match {
        namespaces,
        not_namespaces,
        service_accounts,
        not_service_accounts,
        principals,
        not_principals,
        source_ips,
        not_source_ips,
        destination_ips,
        not_destination_ips,
        destination_ports,
        not_destination_ports,
    } = conditions;
    field_holds(
        destination_ports,
        not_destination_ports,
        facts.destination_port,
        |port, is| *port == is,
    ) && field_holds(source_ips, not_source_ips, facts.source_ip, |block, ip| {
        block.contains(ip)
    }) && field_holds(
        destination_ips,
        not_destination_ips,
        facts.destination_ip,
        |block, ip| block.contains(ip),
    ) && field_holds(
        service_accounts,
        not_service_accounts,
        facts.source,
        |account, source| {
            source.is_some_and(|id| {
                id.namespace() == account.namespace && id.service_account() == account.service_account
            })
        },
    ) && field_holds(namespaces, not_namespaces, facts.source, |value, source| {
        source.is_some_and(|id| value.matches(id.namespace()))
    }) && field_holds(principals, not_principals, facts.source, |value, source| {
        source.is_some_and(|id| value.matches(id.principal()))
    })
}

/// Any of the first list, if it has values, and none of the second.
fn field_holds<V, T: Copy>(any: &[V], none: &[V], fact: Fact<T>, matches: impl Fn(&V, T) -> bool) -> bool {
    match fact {
        Fact::Is(is) => {
            let matches = |value: &V| matches(value, is);
            (any.is_empty() || any.iter().any(matches)) && !none.iter().any(matches)
        }
        Fact::Assumed(holds) => holds || any.is_empty() && none.is_empty(),
    }
}
