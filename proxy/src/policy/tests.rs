//! A table for each row of the semantics, and a comparison with a second, naive implementation.

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

/// The same semantics, written down with sets and no shortcut.
mod naive {
    use super::*;

    pub(super) fn allowed(all: &[Policy], to: &Workload, request: &Request<'_>) -> bool {
        let missing = to
            .policies
            .iter()
            .any(|key| all.iter().all(|policy| policy.key() != key));
        let mine: Vec<&Policy> = all
            .iter()
            .filter(|policy| !policy.dry_run)
            .filter(|policy| {
                policy.scope == Scope::Global
                    || policy.scope == Scope::Namespace && policy.namespace() == &*to.namespace
                    || to.policies.iter().any(|key| policy.key() == key)
            })
            .collect();
        let hit = |action| mine.iter().any(|p| p.action == action && policy_matches(p, request));
        let has_allow = mine.iter().any(|policy| policy.action == Action::Allow);
        !missing && !hit(Action::Deny) && (!has_allow || hit(Action::Allow))
    }

    fn policy_matches(policy: &Policy, request: &Request<'_>) -> bool {
        let mut result = false;
        for rule in &policy.rules {
            let mut all = true;
            for clause in &rule.clauses {
                let mut any = clause.matches.is_empty();
                for m in &clause.matches {
                    any = any || (*m != Match::default() && holds(m, request));
                }
                all = all && any;
            }
            result = result || all;
        }
        result
    }

    fn holds(m: &Match, request: &Request<'_>) -> bool {
        let uri = request.source.map(|id| id.as_str().replacen("spiffe://", "", 1));
        let parts: Option<Vec<&str>> = uri.as_deref().map(|uri| uri.split('/').collect());
        let text = |value: &crate::mesh::StringMatch, text: Option<&str>| {
            let Some(text) = text else { return false };
            let pattern = value.to_string();
            match (pattern.strip_prefix('*'), pattern.strip_suffix('*')) {
                (Some(""), _) => true,
                (Some(end), _) => text.len() >= end.len() && &text[text.len() - end.len()..] == end,
                (_, Some(start)) => text.len() >= start.len() && &text[..start.len()] == start,
                _ => text == pattern,
            }
        };
        let namespace = parts.as_ref().map(|parts| parts[2]);
        let mut verdicts = Vec::new();
        let mut field = |positive: Vec<bool>, negative: Vec<bool>| {
            verdicts.push(positive.is_empty() || positive.contains(&true));
            verdicts.push(!negative.contains(&true));
        };
        field(
            m.principals.iter().map(|v| text(v, uri.as_deref())).collect(),
            m.not_principals.iter().map(|v| text(v, uri.as_deref())).collect(),
        );
        field(
            m.namespaces.iter().map(|v| text(v, namespace)).collect(),
            m.not_namespaces.iter().map(|v| text(v, namespace)).collect(),
        );
        let account = |a: &ServiceAccountMatch| {
            parts
                .as_ref()
                .is_some_and(|parts| parts[2] == a.namespace && parts[4] == a.service_account)
        };
        field(
            m.service_accounts.iter().map(account).collect(),
            m.not_service_accounts.iter().map(account).collect(),
        );
        let port = |p: &u16| *p == request.destination_port;
        field(
            m.destination_ports.iter().map(port).collect(),
            m.not_destination_ports.iter().map(port).collect(),
        );
        let from = |b: &crate::mesh::IpBlock| b.contains(request.source_ip);
        let to = |b: &crate::mesh::IpBlock| b.contains(request.destination_ip);
        field(
            m.source_ips.iter().map(from).collect(),
            m.not_source_ips.iter().map(from).collect(),
        );
        field(
            m.destination_ips.iter().map(to).collect(),
            m.not_destination_ips.iter().map(to).collect(),
        );
        !verdicts.contains(&false)
    }
}

fn some<T>(rng: &mut fastrand::Rng, most: usize, mut make: impl FnMut(&mut fastrand::Rng) -> T) -> Vec<T> {
    (0..rng.usize(..=most)).map(|_| make(rng)).collect()
}

/// Empty as often as not, so that few conditions combine.
fn seldom<T>(rng: &mut fastrand::Rng, make: impl FnMut(&mut fastrand::Rng) -> T) -> Vec<T> {
    if rng.u8(..4) > 0 {
        Vec::new()
    } else {
        some(rng, 2, make)
    }
}

fn random_match(rng: &mut fastrand::Rng) -> Match {
    let pick = |rng: &mut fastrand::Rng, values: &[&str]| rng.choice(values).copied().unwrap().to_owned();
    let string = |values: &'static [&'static str]| move |rng: &mut fastrand::Rng| pick(rng, values).parse().unwrap();
    let principals = string(&[
        "*",
        "cluster.local/ns/shop/sa/web",
        "cluster.local/ns/b*",
        "*/sa/web",
        "x*",
        "other*",
    ]);
    let namespaces = string(&["*", "shop", "bank", "s*", "*k"]);
    let account = |rng: &mut fastrand::Rng| ServiceAccountMatch {
        namespace: pick(rng, &["shop", "bank"]),
        service_account: pick(rng, &["web", "cart"]),
    };
    let block = |rng: &mut fastrand::Rng| {
        pick(
            rng,
            &[
                "10.0.0.0/24",
                "::ffff:10.0.0.0/112",
                "fd00::/8",
                "0.0.0.0/0",
                "10.0.0.9",
            ],
        )
        .parse()
        .unwrap()
    };
    let port = |rng: &mut fastrand::Rng| rng.u16(1..4);
    Match {
        namespaces: seldom(rng, namespaces),
        not_namespaces: seldom(rng, namespaces),
        service_accounts: seldom(rng, account),
        not_service_accounts: seldom(rng, account),
        principals: seldom(rng, principals),
        not_principals: seldom(rng, principals),
        source_ips: seldom(rng, block),
        not_source_ips: seldom(rng, block),
        destination_ips: seldom(rng, block),
        not_destination_ips: seldom(rng, block),
        destination_ports: seldom(rng, port),
        not_destination_ports: seldom(rng, port),
    }
}

fn random_policies(rng: &mut fastrand::Rng) -> Vec<Policy> {
    let keys = ["shop/a", "shop/b", "bank/a", "root/a", "shop/c"];
    let count = rng.usize(..=keys.len());
    keys[..count]
        .iter()
        .map(|key| {
            let scope = *rng.choice(&[Scope::Global, Scope::Namespace, Scope::Workload]).unwrap();
            let action = *rng.choice(&[Action::Allow, Action::Deny]).unwrap();
            let rules = some(rng, 3, |rng| rule(some(rng, 2, |rng| some(rng, 2, random_match))));
            let policy = policy(key, scope, action, rules);
            if rng.u8(..6) == 0 { policy.dry_run() } else { policy }
        })
        .collect()
}

#[test]
fn a_naive_implementation_decides_alike() {
    let sources = [
        None,
        Some("spiffe://cluster.local/ns/shop/sa/web"),
        Some("spiffe://cluster.local/ns/bank/sa/cart"),
        Some("spiffe://other.domain/ns/shop/sa/web"),
    ];
    let mut rng = fastrand::Rng::with_seed(0xad17);
    let (mut allowed, mut denied) = (0, 0);
    for round in 0..20_000 {
        let policies = random_policies(&mut rng);
        let listed = seldom(&mut rng, |rng| {
            *rng.choice(&["shop/a", "bank/a", "root/a", "shop/gone"]).unwrap()
        });
        let to = destination(&listed);
        let id = rng.choice(&sources).unwrap().map(|uri| SpiffeId::parse(uri).unwrap());
        let addresses = ["10.0.0.9", "::ffff:10.0.0.9", "10.0.1.1", "fd00::9"];
        let request = Request {
            source: id.as_ref(),
            source_ip: ip(rng.choice(&addresses).unwrap()),
            destination_ip: ip(rng.choice(&addresses).unwrap()),
            destination_port: rng.u16(1..4),
        };
        let decision = evaluate(&PolicySet::new(policies.clone()), &to, &request);
        let expected = naive::allowed(&policies, &to, &request);
        assert_eq!(
            decision.verdict.is_allow(),
            expected,
            "round {round}: {policies:#?} {request:?} {listed:?}"
        );
        // What is reported for dry run is what enforcing it would add.
        if expected {
            allowed += 1;
            let mut enforced = policies.clone();
            enforced.iter_mut().for_each(|policy| policy.dry_run = false);
            if !naive::allowed(&enforced, &to, &request) {
                assert!(
                    !decision.dry_run_denials.is_empty(),
                    "round {round}: {policies:#?} {request:?}"
                );
            }
        } else {
            denied += 1;
        }
    }
    assert!(
        allowed > 2_000 && denied > 2_000,
        "both outcomes are met: {allowed} and {denied}"
    );
}
