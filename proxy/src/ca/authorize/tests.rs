use std::time::Instant;

use super::*;
use crate::mesh::source::SourceStatus;
use crate::mesh::test_workload as workload;
use crate::mesh::{MeshParts, Workload};

const CART: &str = "spiffe://cluster.local/ns/shop/sa/cart";
const TILL: &str = "spiffe://cluster.local/ns/shop/sa/till";

fn domain() -> TrustDomain {
    TrustDomain::parse("cluster.local").unwrap()
}

/// Two nodes with a proxy each; a cart on node one, a till on node two.
fn mesh() -> Mesh {
    let mut parts = MeshParts::new(domain(), "cluster.local");
    for (number, name, proxy, pod) in [(1, "one", "adit-x", "cart"), (2, "two", "adit-y", "till")] {
        parts.nodes.push(Node {
            name: name.into(),
            zone: "".into(),
            addresses: vec![IpAddr::from([10, 90, 0, number])],
            ranges: vec![format!("10.244.{number}.0/24").parse().unwrap()],
        });
        let mut proxy = Workload {
            node: name.into(),
            uid: format!("uid-{proxy}").into(),
            name: proxy.into(),
            identity: SpiffeId::new(&domain(), "adit-system", "adit-node").unwrap(),
            protocol: Protocol::Plain,
            ..workload("adit-system", proxy, "10.0.0.1")
        };
        proxy.addresses.clear();
        let mut pod = workload("shop", pod, &format!("10.244.{number}.9"));
        pod.node = name.into();
        parts.workloads.extend([proxy, pod]);
    }
    Mesh::build(parts).unwrap()
}

fn bound(name: &str) -> Bound {
    Bound {
        name: name.into(),
        uid: format!("uid-{name}"),
    }
}

fn caller(account: &str, pod: Option<&str>, node: Option<&str>) -> Caller {
    Caller {
        account: account.parse().unwrap(),
        pod: pod.map(bound),
        node: node.map(bound),
    }
}

fn rules(pods: Option<PodRules>) -> Rules {
    Rules {
        trust_domain: domain(),
        node_proxies: vec!["adit-system/adit-node".parse().unwrap()],
        pods,
    }
}

fn id(text: &str) -> SpiffeId {
    SpiffeId::parse(text).unwrap()
}

fn not_on(node: &str, identity: &str) -> Result<SpiffeId, Refusal> {
    Err(Refusal::NotOnNode {
        identity: id(identity),
        node: node.into(),
    })
}

#[test]
fn only_the_node_proxy_gets_only_what_runs_on_its_node() {
    let adit = || caller("adit-system/adit-node", Some("any"), Some("one"));
    let foreign = "spiffe://elsewhere/ns/shop/sa/cart";
    let no_proxy = |account: &str| Err(Refusal::NotNodeProxy(account.parse().unwrap()));
    for (caller, requested, expected) in [
        (adit(), Some(CART), Ok(id(CART))),
        (adit(), Some(TILL), not_on("one", TILL)),
        (
            caller("adit-system/adit-node", Some("any"), Some("two")),
            Some(CART),
            not_on("two", CART),
        ),
        (
            caller("shop/cart", Some("cart-x"), Some("one")),
            Some(CART),
            no_proxy("shop/cart"),
        ),
        (
            caller("adit-node/adit-system", Some("any"), Some("one")),
            Some(CART),
            no_proxy("adit-node/adit-system"),
        ),
        (
            caller("adit-system/adit-node", None, Some("one")),
            Some(CART),
            Err(Refusal::NotBoundToPod),
        ),
        (
            caller("adit-system/adit-node", Some("any"), None),
            Some(CART),
            Err(Refusal::NotBoundToNode),
        ),
        (adit(), None, Err(Refusal::NoIdentity)),
        (adit(), Some(""), Err(Refusal::BadIdentity(SpiffeError::Scheme))),
        (
            adit(),
            Some("spiffe://cluster.local/ns/shop"),
            Err(Refusal::BadIdentity(SpiffeError::Path)),
        ),
        (
            adit(),
            Some(foreign),
            Err(Refusal::ForeignTrustDomain {
                identity: id(foreign),
                trust_domain: domain(),
            }),
        ),
    ] {
        assert_eq!(
            authorize(&rules(None), &caller, None, requested, &mesh()).map(|grant| grant.identity),
            expected,
            "{caller:?} {requested:?}"
        );
    }
}

#[test]
fn in_a_cluster_the_callers_pod_must_be_the_one_that_the_ca_knows_on_that_node() {
    let adit = |pod, node| caller("adit-system/adit-node", Some(pod), node);
    let mut other_uid = adit("adit-x", Some("one"));
    other_uid.pod = Some(Bound {
        name: "adit-x".into(),
        uid: "uid-of-before".into(),
    });
    let mut other_name = adit("adit-x", Some("one"));
    other_name.pod = Some(Bound {
        name: "adit-z".into(),
        uid: "uid-adit-x".into(),
    });
    let unchecked = PodRules {
        check_address: false,
        caller_ranges: Vec::new(),
        heard: None,
    };
    let rules = rules(Some(unchecked));
    let ask = |caller: &Caller, requested| {
        authorize(&rules, caller, None, Some(requested), &mesh()).map(|grant| grant.identity)
    };
    for (caller, requested, expected) in [
        (adit("adit-x", Some("one")), CART, Ok(id(CART))),
        // An API server that does not name the node.
        (adit("adit-x", None), CART, Ok(id(CART))),
        (adit("adit-x", None), TILL, not_on("one", TILL)),
        (adit("adit-y", Some("two")), CART, not_on("two", CART)),
        (
            adit("adit-x", Some("two")),
            TILL,
            Err(Refusal::OtherNode {
                said: "two".into(),
                found: "one".into(),
            }),
        ),
        (
            adit("nobody", Some("one")),
            CART,
            Err(Refusal::PodUnknown("adit-system/nobody".into())),
        ),
        (other_uid, CART, Err(Refusal::PodUnknown("adit-system/adit-x".into()))),
    ] {
        assert_eq!(ask(&caller, requested), expected, "{caller:?} {requested:?}");
    }
    assert!(matches!(ask(&other_name, CART), Err(Refusal::OtherPod { .. })));
}

#[test]
fn a_call_must_come_from_the_node_of_the_callers_pod() {
    let caller = caller("adit-system/adit-node", Some("adit-x"), Some("one"));
    let ask = |check_address, ranges: &[&str], peer: Option<&str>| {
        let pods = PodRules {
            check_address,
            caller_ranges: ranges.iter().map(|range| range.parse().unwrap()).collect(),
            heard: None,
        };
        let peer = peer.map(|peer| peer.parse().unwrap());
        authorize(&rules(Some(pods)), &caller, peer, Some(CART), &mesh()).is_ok()
    };
    for (peer, allowed) in [
        // The node itself, and in the form that a listener for both families sees.
        ("10.90.0.1", true),
        ("::ffff:10.90.0.1", true),
        // Its bridge and its overlay.
        ("10.244.1.1", true),
        ("10.244.1.0", true),
        // A pod of the node.
        ("10.244.1.9", false),
        // The other node, its bridge, and a pod there.
        ("10.90.0.2", false),
        ("10.244.2.1", false),
        ("10.244.2.9", false),
        // Whoever else.
        ("192.0.2.1", false),
        ("127.0.0.1", false),
        ("fd00::1", false),
    ] {
        assert_eq!(ask(true, &[], Some(peer)), allowed, "{peer}");
        assert!(ask(false, &[], Some(peer)), "{peer}, unchecked");
    }
    assert!(!ask(true, &[], None));
    assert!(ask(true, &["192.0.2.0/24"], Some("192.0.2.1")));
    assert!(!ask(true, &["192.0.2.0/24"], Some("10.90.0.2")));
}

#[test]
fn what_the_ca_may_not_have_heard_of_yet_is_told_from_what_is_wrong() {
    for (refusal, may_pass, ignorance) in [
        (Refusal::PodUnknown("p".into()), true, true),
        (Refusal::NodeUnknown("n".into()), true, true),
        (not_on("one", CART).unwrap_err(), true, false),
        (Refusal::PodGone("p".into()), false, false),
        (Refusal::NotBoundToPod, false, false),
        (Refusal::NoIdentity, false, false),
    ] {
        assert_eq!(refusal.may_pass(), may_pass, "{refusal}");
        assert_eq!(refusal.is_ignorance(), ignorance, "{refusal}");
    }
}

#[test]
fn malformed_service_accounts_are_refused() {
    for text in ["", "a", "/", "a/", "/b", "a/b/c"] {
        assert!(text.parse::<ServiceAccount>().is_err(), "{text}");
    }
}

#[test]
fn nothing_is_granted_by_a_view_of_the_cluster_that_is_too_old() {
    let rules = |age: Option<u64>| Rules {
        trust_domain: TrustDomain::parse("cluster.local").unwrap(),
        node_proxies: Vec::new(),
        pods: Some(PodRules {
            check_address: false,
            caller_ranges: Vec::new(),
            heard: Some(StatusHandle::new(SourceStatus {
                last_loaded: std::time::SystemTime::now(),
                generation: 1,
                last_error: None,
                heard: age.and_then(|age| Instant::now().checked_sub(Duration::from_secs(age))),
            })),
        }),
    };
    for age in [None, Some(0), Some(200)] {
        assert_eq!(rules(age).check_view(), Ok(()));
    }
    let refusal = rules(Some(400)).check_view().unwrap_err();
    assert_eq!(refusal, Refusal::Stale(400));
    assert!(refusal.is_ignorance() && !refusal.may_pass());
}
