//! A table for each row of the semantics.

mod compiled;
mod equivalence;

use std::net::IpAddr;

use super::*;
use crate::mesh::{Clause, Match, Policy, Rule, Scope, ServiceAccountMatch};

const WEB: &str = "spiffe://cluster.local/ns/shop/sa/web";

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn destination(policies: &[&str]) -> Workload {
    let mut workload = crate::mesh::test_workload("shop", "cart", "10.0.0.1");
    workload.policies = policies.iter().map(|key| (*key).into()).collect();
    workload
}

fn ask(policies: &[Policy], listed: &[&str], source: Option<&str>) -> Decision {
    let id = source.map(|uri| SpiffeId::parse(uri).unwrap());
    let request = Request {
        source: id.as_ref(),
        source_ip: ip("10.0.0.9"),
        destination_ip: ip("10.0.0.1"),
        destination_port: 8080,
    };
    evaluate(
        &PolicySet::new(policies.iter().cloned()),
        &destination(listed),
        &request,
    )
}

fn says(decision: &Decision) -> String {
    match &decision.verdict {
        Verdict::Allow { rule: None } => "allow".into(),
        Verdict::Allow { rule: Some(rule) } => rule.to_string(),
        Verdict::Deny { rule } => match rule {
            RuleName::Rule { action, .. } => {
                assert_eq!(*action, Action::Deny);
                rule.to_string()
            }
            _ => rule.to_string(),
        },
    }
}

fn policy(key: &str, scope: Scope, action: Action, rules: Vec<Rule>) -> Policy {
    let (namespace, name) = key.split_once('/').unwrap_or(("", key));
    Policy::new(namespace, name, scope, action, rules)
}

/// A rule of clauses of matches.
fn rule(clauses: Vec<Vec<Match>>) -> Rule {
    Rule {
        clauses: clauses.into_iter().map(|matches| Clause { matches }).collect(),
    }
}

fn always() -> Vec<Rule> {
    vec![Rule::default()]
}

fn principal(values: &[&str]) -> Match {
    Match {
        principals: values.iter().map(|value| value.parse().unwrap()).collect(),
        ..Match::default()
    }
}

fn not_principal(values: &[&str]) -> Match {
    Match {
        not_principals: principal(values).principals,
        ..Match::default()
    }
}

fn port(ports: &[u16]) -> Match {
    Match {
        destination_ports: ports.to_vec(),
        ..Match::default()
    }
}

/// Whether a policy of these rules matches, told by a namespace-wide policy that denies.
fn matches(rules: Vec<Rule>, source: Option<&str>) -> bool {
    !ask(&[policy("shop/p", Scope::Namespace, Action::Deny, rules)], &[], source)
        .verdict
        .is_allow()
}

#[test]
fn order_deny_then_no_allow_then_allow_then_default() {
    let deny = |rules| policy("shop/d", Scope::Namespace, Action::Deny, rules);
    let allow = |key, rules| policy(key, Scope::Namespace, Action::Allow, rules);
    for (policies, expected) in [
        (vec![], "allow"),
        (vec![deny(vec![])], "allow"),
        (vec![deny(always())], "deny: shop/d rule 0"),
        (vec![deny(always()), allow("shop/a", always())], "deny: shop/d rule 0"),
        (vec![deny(vec![]), allow("shop/a", always())], "allow: shop/a rule 0"),
        (
            vec![allow("shop/a", vec![]), allow("shop/b", always())],
            "allow: shop/b rule 0",
        ),
        (
            vec![allow("shop/b", vec![]), allow("shop/a", vec![])],
            "default: no allow policy matched (shop/a, shop/b)",
        ),
        (
            vec![allow("shop/a", vec![]), deny(vec![])],
            "default: no allow policy matched (shop/a)",
        ),
    ] {
        assert_eq!(says(&ask(&policies, &[], Some(WEB))), expected);
    }
}

#[test]
fn scopes_global_namespace_and_listed() {
    let deny = |key, scope| policy(key, scope, Action::Deny, always());
    for (policy, listed, expected) in [
        (deny("all", Scope::Global), vec![], "deny: all rule 0"),
        (deny("other/all", Scope::Global), vec![], "deny: other/all rule 0"),
        (deny("shop/p", Scope::Namespace), vec![], "deny: shop/p rule 0"),
        (deny("other/p", Scope::Namespace), vec![], "allow"),
        (deny("shop/p", Scope::Workload), vec![], "allow"),
        (deny("shop/p", Scope::Workload), vec!["shop/p"], "deny: shop/p rule 0"),
        (
            deny("other/p", Scope::Workload),
            vec!["other/p"],
            "deny: other/p rule 0",
        ),
    ] {
        assert_eq!(says(&ask(&[policy], &listed, Some(WEB))), expected);
    }
}

#[test]
fn a_listed_policy_that_is_missing_denies() {
    let allow = policy("shop/a", Scope::Namespace, Action::Allow, always());
    let decision = ask(std::slice::from_ref(&allow), &["shop/gone"], Some(WEB));
    assert_eq!(says(&decision), "missing policy shop/gone");
    let dry = policy("shop/d", Scope::Namespace, Action::Deny, vec![]).dry_run();
    assert_eq!(
        says(&ask(&[allow, dry], &["shop/gone"], Some(WEB))),
        "missing policy shop/gone"
    );
    assert_eq!(says(&ask(&[], &["shop/gone"], None)), "missing policy shop/gone");
}

#[test]
fn rules_or_clauses_and_matches_or() {
    let yes = || port(&[8080]);
    let no = || port(&[1]);
    for (rules, expected) in [
        (vec![rule(vec![vec![no()]]), rule(vec![vec![yes()]])], true),
        (vec![rule(vec![vec![no()]]), rule(vec![vec![no()]])], false),
        (vec![rule(vec![vec![yes()], vec![yes()]])], true),
        (vec![rule(vec![vec![yes()], vec![no()]])], false),
        (vec![rule(vec![vec![no(), yes()]])], true),
        (vec![rule(vec![vec![no(), no()]])], false),
    ] {
        assert_eq!(matches(rules.clone(), Some(WEB)), expected, "{rules:?}");
    }
    let second = vec![rule(vec![vec![no()]]), rule(vec![vec![yes()]])];
    let decision = ask(&[policy("shop/p", Scope::Namespace, Action::Deny, second)], &[], None);
    assert_eq!(says(&decision), "deny: shop/p rule 1");
}

#[test]
fn fields_and_values_or_and_negative_lists() {
    let web = "cluster.local/ns/shop/sa/web";
    let field = |change: &dyn Fn(&mut Match)| {
        let mut conditions = principal(&["nobody", web]);
        change(&mut conditions);
        matches(vec![rule(vec![vec![conditions]])], Some(WEB))
    };
    assert!(field(&|_| {}));
    assert!(field(&|m| m.destination_ports = vec![1, 8080]));
    assert!(!field(&|m| m.destination_ports = vec![1, 2]));
    assert!(field(&|m| m.not_destination_ports = vec![1, 2]));
    assert!(!field(&|m| m.not_destination_ports = vec![1, 8080]));
    assert!(!field(&|m| {
        m.destination_ports = vec![8080];
        m.not_destination_ports = vec![8080];
    }));
    assert!(!field(&|m| m.not_principals = vec![web.parse().unwrap()]));
    assert!(field(&|m| m.not_principals = vec!["nobody".parse().unwrap()]));
    assert!(field(&|m| m.namespaces = vec!["shop".parse().unwrap()]));
    assert!(!field(&|m| m.namespaces = vec!["bank".parse().unwrap()]));
    assert!(!field(
        &|m| m.not_namespaces = vec!["bank".parse().unwrap(), "sh*".parse().unwrap()]
    ));
}

#[test]
fn empty_policies_rules_clauses_and_matches() {
    let empty = Match::default;
    for (rules, expected) in [
        (vec![], false),
        (vec![Rule::default()], true),
        (vec![rule(vec![vec![]])], true),
        (vec![rule(vec![vec![], vec![port(&[1])]])], false),
        (vec![rule(vec![vec![empty()]])], false),
        (vec![rule(vec![vec![empty(), port(&[8080])]])], true),
        (vec![rule(vec![vec![empty(), port(&[1])]])], false),
    ] {
        assert_eq!(matches(rules.clone(), Some(WEB)), expected, "{rules:?}");
    }
}

#[test]
fn principals_are_compared_without_scheme() {
    for (value, expected) in [
        ("cluster.local/ns/shop/sa/web", true),
        ("cluster.local/ns/shop/sa/webb", false),
        ("spiffe://cluster.local/ns/shop/sa/web", false),
        ("cluster.local/ns/shop/*", true),
        ("cluster.local/ns/bank/*", false),
        ("spiffe*", false),
        ("*/sa/web", true),
        ("*/sa/cart", false),
        ("*", true),
    ] {
        assert_eq!(
            matches(vec![rule(vec![vec![principal(&[value])]])], Some(WEB)),
            expected,
            "{value}"
        );
        assert!(!matches(vec![rule(vec![vec![principal(&[value])]])], None), "{value}");
    }
}

#[test]
fn service_accounts_match_in_any_trust_domain() {
    let account = Match {
        service_accounts: vec![ServiceAccountMatch {
            namespace: "shop".into(),
            service_account: "web".into(),
        }],
        ..Match::default()
    };
    for (source, expected) in [
        (Some(WEB), true),
        (Some("spiffe://other.domain/ns/shop/sa/web"), true),
        (Some("spiffe://cluster.local/ns/bank/sa/web"), false),
        (Some("spiffe://cluster.local/ns/shop/sa/cart"), false),
        (None, false),
    ] {
        assert_eq!(
            matches(vec![rule(vec![vec![account.clone()]])], source),
            expected,
            "{source:?}"
        );
        let not = Match {
            not_service_accounts: account.service_accounts.clone(),
            ..Match::default()
        };
        assert_eq!(matches(vec![rule(vec![vec![not]])], source), !expected, "{source:?}");
    }
}

#[test]
fn without_an_identity_what_is_asked_of_it_fails_and_what_is_excluded_holds() {
    let strict = vec![rule(vec![vec![not_principal(&["*"])]])];
    assert!(
        matches(strict.clone(), None),
        "plaintext is denied where mutual TLS is strict"
    );
    assert!(!matches(strict, Some(WEB)));
    let exempt = Match {
        not_destination_ports: vec![8080],
        ..not_principal(&["*"])
    };
    assert!(!matches(vec![rule(vec![vec![exempt]])], None), "an exempt port");
    let namespace = |value: &str| vec![value.parse().unwrap()];
    for value in ["*", "shop", "s*", "*p"] {
        let positive = Match {
            namespaces: namespace(value),
            ..Match::default()
        };
        let negative = Match {
            not_namespaces: namespace(value),
            ..Match::default()
        };
        assert!(!matches(vec![rule(vec![vec![positive]])], None), "{value}");
        assert!(matches(vec![rule(vec![vec![negative]])], None), "{value}");
    }
}

#[test]
fn ip_blocks_see_through_mapped_addresses() {
    let deny = |conditions| {
        let rules = vec![rule(vec![vec![conditions]])];
        PolicySet::new([policy("shop/p", Scope::Namespace, Action::Deny, rules)])
    };
    let blocks = |text: &str| vec![text.parse().unwrap()];
    for (block, address, inside) in [
        ("10.0.0.0/24", "10.0.0.9", true),
        ("10.0.0.0/24", "::ffff:10.0.0.9", true),
        ("::ffff:10.0.0.0/120", "10.0.0.9", true),
        ("10.0.1.0/24", "10.0.0.9", false),
        ("fd00::/16", "fd00::1", true),
        ("fd00::/16", "10.0.0.9", false),
    ] {
        let cases = [
            (
                Match {
                    source_ips: blocks(block),
                    ..Match::default()
                },
                true,
                inside,
            ),
            (
                Match {
                    not_source_ips: blocks(block),
                    ..Match::default()
                },
                true,
                !inside,
            ),
            (
                Match {
                    destination_ips: blocks(block),
                    ..Match::default()
                },
                false,
                inside,
            ),
            (
                Match {
                    not_destination_ips: blocks(block),
                    ..Match::default()
                },
                false,
                !inside,
            ),
        ];
        for (conditions, source, denied) in cases {
            let other = ip("192.0.2.1");
            let (source_ip, destination_ip) = if source {
                (ip(address), other)
            } else {
                (other, ip(address))
            };
            let request = Request {
                source: None,
                source_ip,
                destination_ip,
                destination_port: 1,
            };
            let decision = evaluate(&deny(conditions.clone()), &destination(&[]), &request);
            assert_eq!(!decision.verdict.is_allow(), denied, "{address} in {conditions:?}");
        }
    }
}

#[test]
fn dry_run_is_only_reported() {
    let dry = |key, action, rules| policy(key, Scope::Namespace, action, rules).dry_run();
    let allow = || policy("shop/a", Scope::Namespace, Action::Allow, always());
    for (policies, verdict, reported) in [
        (
            vec![dry("shop/d", Action::Deny, always()), allow()],
            "allow: shop/a rule 0",
            vec!["deny: shop/d rule 0"],
        ),
        (vec![dry("shop/d", Action::Deny, vec![])], "allow", vec![]),
        (
            vec![dry("shop/x", Action::Allow, vec![])],
            "allow",
            vec!["default: no allow policy matched (shop/x)"],
        ),
        (vec![dry("shop/x", Action::Allow, always())], "allow", vec![]),
        (
            vec![dry("shop/x", Action::Allow, vec![]), allow()],
            "allow: shop/a rule 0",
            vec![],
        ),
        (
            vec![
                dry("shop/d", Action::Deny, always()),
                policy("shop/e", Scope::Namespace, Action::Deny, always()),
            ],
            "deny: shop/e rule 0",
            vec!["deny: shop/d rule 0"],
        ),
    ] {
        let decision = ask(&policies, &[], Some(WEB));
        assert_eq!(says(&decision), verdict);
        let denials: Vec<_> = decision.dry_run_denials.iter().map(ToString::to_string).collect();
        assert_eq!(denials, reported);
    }
}

#[test]
fn a_policy_that_applies_twice_counts_once() {
    let dry = policy("shop/d", Scope::Namespace, Action::Deny, always()).dry_run();
    assert_eq!(ask(&[dry], &["shop/d"], Some(WEB)).dry_run_denials.len(), 1);
}

#[test]
fn the_example_file_decides_as_its_comments_say() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy/mesh.example.yaml");
    let mesh = crate::mesh::source::FileSource::load(path.as_ref()).unwrap();
    let decide = |source: Option<&str>, source_ip: &str, to: &str, destination_port: u16| {
        let id = source.map(|account| SpiffeId::parse(&format!("spiffe://cluster.local/ns/{account}")).unwrap());
        let destination = mesh.workload_by_uid(to).unwrap();
        let request = Request {
            source: id.as_ref(),
            source_ip: ip(source_ip),
            destination_ip: destination.addresses[0],
            destination_port,
        };
        says(&evaluate(mesh.policies(), destination, &request))
    };
    for (source, from, to, port, expected) in [
        (
            Some("shop/sa/web"),
            "10.0.1.10",
            "shop/cart-1",
            8080,
            "allow: shop/cart-clients rule 0",
        ),
        (
            Some("shop/sa/db"),
            "10.0.2.12",
            "shop/cart-1",
            8080,
            "default: no allow policy matched (shop/cart-clients)",
        ),
        (None, "10.0.1.10", "shop/cart-1", 8080, "deny: shop/strict rule 0"),
        (
            None,
            "192.0.2.1",
            "shop/cart-1",
            9090,
            "allow: shop/cart-clients rule 1",
        ),
        (
            None,
            "198.51.100.1",
            "shop/cart-1",
            9090,
            "default: no allow policy matched (shop/cart-clients)",
        ),
        (
            Some("monitoring/sa/p"),
            "10.0.9.9",
            "shop/cart-2",
            9090,
            "allow: shop/cart-clients rule 1",
        ),
        (
            Some("shop/sa/cart"),
            "10.0.1.11",
            "6b1f2f0e-db-0",
            5432,
            "allow: shop/db-clients rule 0",
        ),
        (
            Some("shop/sa/web"),
            "10.0.1.10",
            "6b1f2f0e-db-0",
            5432,
            "default: no allow policy matched (shop/db-clients)",
        ),
        (None, "10.0.1.10", "legacy/legacy-1", 8080, "allow"),
    ] {
        assert_eq!(
            decide(source, from, to, port),
            expected,
            "{source:?} from {from} to {to}:{port}"
        );
    }
}
