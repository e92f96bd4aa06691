//! Random policies and requests, decided alike by a second, naive implementation.

use super::*;

/// The same semantics, written down without shortcuts.
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
pub(super) fn seldom<T>(rng: &mut fastrand::Rng, make: impl FnMut(&mut fastrand::Rng) -> T) -> Vec<T> {
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

pub(super) fn random_policies(rng: &mut fastrand::Rng) -> Vec<Policy> {
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
