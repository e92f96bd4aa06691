//! What is compiled for the kernel, against what is evaluated.

use super::equivalence::{random_policies, seldom};
use super::*;
use crate::policy::Cached::{Allow, Ask, Deny};
use crate::policy::{Cached, Compiled, compile};

const CART: &str = "spiffe://cluster.local/ns/shop/sa/cart";
const MAX_PORTS: usize = 64;

fn id(uri: &str) -> SpiffeId {
    SpiffeId::parse(uri).unwrap()
}

/// Compiles for nobody, WEB and CART.
fn compiled(policies: &[Policy], listed: &[&str], max_ports: usize) -> Compiled {
    let (web, cart) = (id(WEB), id(CART));
    let policies = PolicySet::new(policies.iter().cloned());
    compile(
        &policies,
        &destination(listed),
        &[None, Some(&web), Some(&cart)],
        max_ports,
    )
}

fn entries(compiled: &Compiled) -> Vec<(usize, Option<u16>, Cached)> {
    assert_eq!(compiled.default, Ask);
    compiled
        .entries
        .iter()
        .map(|entry| (entry.source, entry.port, entry.verdict))
        .collect()
}

fn deny(conditions: Match) -> Policy {
    policy(
        "shop/d",
        Scope::Namespace,
        Action::Deny,
        vec![rule(vec![vec![conditions]])],
    )
}

fn allow(conditions: Match) -> Policy {
    policy(
        "shop/a",
        Scope::Namespace,
        Action::Allow,
        vec![rule(vec![vec![conditions]])],
    )
}

fn from(block: &str) -> Match {
    Match {
        source_ips: vec![block.parse().unwrap()],
        ..Match::default()
    }
}

#[test]
fn what_holds_for_all_needs_no_entry() {
    let everything = |action| policy("shop/p", Scope::Namespace, action, always());
    let nothing = |action| policy("shop/p", Scope::Namespace, action, vec![]);
    for (policies, listed, expected) in [
        (vec![], vec![], Allow),
        (vec![everything(Action::Allow)], vec![], Allow),
        (vec![everything(Action::Deny)], vec![], Deny),
        (vec![nothing(Action::Deny)], vec![], Allow),
        (vec![nothing(Action::Allow)], vec![], Deny),
        (vec![], vec!["shop/gone"], Deny),
        (vec![deny(port(&[80]))], vec!["shop/gone"], Deny),
    ] {
        let compiled = compiled(&policies, &listed, MAX_PORTS);
        assert_eq!(
            (compiled.default, compiled.entries),
            (expected, vec![]),
            "{policies:#?}"
        );
    }
}

#[test]
fn identities_and_ports_are_told_apart() {
    assert_eq!(
        entries(&compiled(&[deny(not_principal(&["*"]))], &[], MAX_PORTS)),
        [(0, None, Deny), (1, None, Allow), (2, None, Allow)]
    );
    let web_at_80 = Match {
        destination_ports: vec![80],
        ..principal(&["cluster.local/ns/shop/sa/web"])
    };
    assert_eq!(
        entries(&compiled(&[allow(web_at_80)], &[], MAX_PORTS)),
        [(0, None, Deny), (1, None, Deny), (1, Some(80), Allow), (2, None, Deny)]
    );
    let not_80 = Match {
        not_destination_ports: vec![80],
        ..Match::default()
    };
    let each = |source| [(source, None, Allow), (source, Some(80), Deny)];
    assert_eq!(
        entries(&compiled(&[allow(not_80)], &[], MAX_PORTS)),
        [each(0), each(1), each(2)].concat()
    );
}

#[test]
fn a_port_is_not_listed_where_it_makes_no_difference() {
    let policies = [deny(port(&[80, 443])), allow(principal(&["*/sa/web"]))];
    assert_eq!(
        entries(&compiled(&policies, &[], MAX_PORTS)),
        [
            (0, None, Deny),
            (1, None, Allow),
            (1, Some(80), Deny),
            (1, Some(443), Deny),
            (2, None, Deny)
        ]
    );
}

#[test]
fn addresses_are_asked_about_only_where_they_decide() {
    let here_at_80 = Match {
        destination_ports: vec![80],
        ..from("10.0.0.0/8")
    };
    let each = |source| (source, Some(80), Ask);
    assert_eq!(
        entries(&compiled(&[deny(here_at_80)], &[], MAX_PORTS)),
        [
            (0, None, Allow),
            each(0),
            (1, None, Allow),
            each(1),
            (2, None, Allow),
            each(2)
        ]
    );
    let to = Match {
        not_destination_ips: vec!["10.0.0.1".parse().unwrap()],
        ..Match::default()
    };
    assert_eq!(entries(&compiled(&[allow(to)], &[], MAX_PORTS)), []);
    let web_from_here = Match {
        source_ips: from("10.0.0.0/8").source_ips,
        ..principal(&["*/sa/web"])
    };
    assert_eq!(
        entries(&compiled(&[allow(web_from_here)], &[], MAX_PORTS)),
        [(0, None, Deny), (2, None, Deny)]
    );
}

#[test]
fn what_dry_run_would_report_is_asked_about() {
    let web = || principal(&["*/sa/web"]);
    assert_eq!(
        entries(&compiled(&[deny(web()).dry_run()], &[], MAX_PORTS)),
        [(0, None, Allow), (2, None, Allow)]
    );
    assert_eq!(
        entries(&compiled(&[allow(web()).dry_run()], &[], MAX_PORTS)),
        [(1, None, Allow)]
    );
    // Another policy that allows takes nothing away from those that are enforced.
    let enforced = policy("shop/b", Scope::Namespace, Action::Allow, always());
    assert_eq!(
        compiled(&[allow(web()).dry_run(), enforced], &[], MAX_PORTS).default,
        Allow
    );
    // Refused, and still reported.
    let refused = policy("shop/e", Scope::Namespace, Action::Deny, always());
    assert_eq!(
        entries(&compiled(&[deny(web()).dry_run(), refused], &[], MAX_PORTS)),
        [(0, None, Deny), (2, None, Deny)]
    );
}

#[test]
fn too_many_ports_leave_what_holds_at_every_port() {
    let web_at_some = Match {
        destination_ports: (1..=65).collect(),
        ..principal(&["*/sa/web"])
    };
    assert_eq!(
        entries(&compiled(&[allow(web_at_some.clone())], &[], 64)),
        [(0, None, Deny), (2, None, Deny)]
    );
    assert_eq!(entries(&compiled(&[allow(web_at_some)], &[], 65)).len(), 3 + 65);
}

/// The generator's sources.
fn sources() -> Vec<Option<SpiffeId>> {
    let known = [
        WEB,
        "spiffe://cluster.local/ns/bank/sa/cart",
        "spiffe://other.domain/ns/shop/sa/web",
    ];
    [None].into_iter().chain(known.map(|uri| Some(id(uri)))).collect()
}

/// Compiles random policies, and calls `check` with what was compiled and what is evaluated, over all addresses, for
/// each source and port.
fn over_random_policies(
    seed: u64,
    max_ports: &[usize],
    adapt: impl Fn(&mut Policy),
    mut check: impl FnMut(&Compiled, usize, u16, &[Decision], &dyn Fn() -> String),
) {
    let sources = sources();
    let given: Vec<_> = sources.iter().map(Option::as_ref).collect();
    let addresses = [
        "10.0.0.9",
        "::ffff:10.0.0.9",
        "10.0.1.1",
        "192.0.2.1",
        "fd00::9",
        "2001:db8::1",
    ];
    let mut rng = fastrand::Rng::with_seed(seed);
    for round in 0..3_000 {
        let mut policies = random_policies(&mut rng);
        policies.iter_mut().for_each(&adapt);
        let listed = seldom(&mut rng, |rng| {
            *rng.choice(&["shop/a", "bank/a", "root/a", "shop/gone"]).unwrap()
        });
        let (set, to) = (PolicySet::new(policies.clone()), destination(&listed));
        let max_ports = *rng.choice(max_ports).unwrap();
        let compiled = compile(&set, &to, &given, max_ports);
        for (index, source) in given.iter().enumerate() {
            // The generator mentions 1 to 3.
            for destination_port in [1, 2, 3, 4, 5, 65535] {
                let decisions: Vec<_> = addresses
                    .iter()
                    .flat_map(|from| addresses.iter().map(move |to| (ip(from), ip(to))))
                    .map(|(source_ip, destination_ip)| {
                        let request = Request {
                            source: *source,
                            source_ip,
                            destination_ip,
                            destination_port,
                        };
                        evaluate(&set, &to, &request)
                    })
                    .collect();
                let what =
                    || format!("round {round}, source {index}, port {destination_port}, {listed:?}, {policies:#?}");
                check(&compiled, index, destination_port, &decisions, &what);
            }
        }
    }
}

#[test]
fn what_is_not_asked_about_is_what_is_evaluated_for_every_address() {
    let mut met = [0; 3];
    let check = |compiled: &Compiled, source, port, decisions: &[Decision], what: &dyn Fn() -> String| {
        let cached = compiled.lookup(source, port);
        met[cached as usize] += 1;
        // It holds for sources that were not given too.
        assert!(compiled.default == Ask || compiled.default == cached, "{}", what());
        if cached != Ask {
            for decision in decisions {
                assert_eq!(cached == Allow, decision.verdict.is_allow(), "{decision:?}: {}", what());
                assert!(decision.dry_run_denials.is_empty(), "{decision:?}: {}", what());
            }
        }
    };
    over_random_policies(0xad17, &[0, 1, 2, MAX_PORTS, MAX_PORTS], |_| {}, check);
    let all: usize = met.iter().sum();
    assert!(
        met.iter().all(|count| *count > all / 20),
        "each is met: {met:?} of {all}"
    );
}

#[test]
fn enforced_policies_on_identities_and_ports_are_never_asked_about() {
    let adapt = |policy: &mut Policy| {
        policy.dry_run = false;
        let matches = policy.rules.iter_mut().flat_map(|rule| &mut rule.clauses);
        for conditions in matches.flat_map(|clause| &mut clause.matches) {
            conditions.source_ips.clear();
            conditions.not_source_ips.clear();
            conditions.destination_ips.clear();
            conditions.not_destination_ips.clear();
        }
    };
    let mut allowed = 0;
    over_random_policies(
        0xad18,
        &[MAX_PORTS],
        adapt,
        |compiled, source, port, decisions, what| {
            let cached = compiled.lookup(source, port);
            let expected = if decisions[0].verdict.is_allow() { Allow } else { Deny };
            assert_eq!(cached, expected, "{}", what());
            allowed += usize::from(cached == Allow);
        },
    );
    assert!(allowed > 5_000, "{allowed}");
}
