//! Whether a policy matches a connection.

use std::sync::Arc;

use super::{Request, RuleName};
use crate::mesh::{Clause, Match, Policy, Rule};

/// The first rule of the policy that matches.
pub(super) fn first_rule(policy: &Policy, request: &Request<'_>) -> Option<RuleName> {
    let index = policy.rules.iter().position(|rule| rule_matches(rule, request))?;
    Some(RuleName::Rule {
        policy: Arc::clone(policy.key()),
        action: policy.action,
        index,
    })
}

fn rule_matches(rule: &Rule, request: &Request<'_>) -> bool {
    rule.clauses.iter().all(|clause| clause_matches(clause, request))
}

/// A clause without matches says nothing and holds; one whose matches all say nothing offers no alternative and fails.
fn clause_matches(clause: &Clause, request: &Request<'_>) -> bool {
    clause.matches.is_empty()
        || clause
            .matches
            .iter()
            .any(|conditions| !conditions.is_empty() && conditions_hold(conditions, request))
}

fn conditions_hold(conditions: &Match, request: &Request<'_>) -> bool {
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
    field_holds(destination_ports, not_destination_ports, |port| {
        *port == request.destination_port
    }) && field_holds(source_ips, not_source_ips, |block| block.contains(request.source_ip))
        && field_holds(destination_ips, not_destination_ips, |block| {
            block.contains(request.destination_ip)
        })
        && field_holds(service_accounts, not_service_accounts, |account| {
            request.source.is_some_and(|id| {
                id.namespace() == account.namespace && id.service_account() == account.service_account
            })
        })
        && field_holds(namespaces, not_namespaces, |value| {
            request.source.is_some_and(|id| value.matches(id.namespace()))
        })
        && field_holds(principals, not_principals, |value| {
            request.source.is_some_and(|id| value.matches(id.principal()))
        })
}

/// Any of the first list, if it has values, and none of the second.
fn field_holds<T>(any: &[T], none: &[T], matches: impl Fn(&T) -> bool) -> bool {
    (any.is_empty() || any.iter().any(&matches)) && !none.iter().any(&matches)
}
