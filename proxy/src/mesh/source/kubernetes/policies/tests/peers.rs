//! `PeerAuthentication`: where plaintext is admitted.

use serde_json::{Value, json};

use super::*;

const KIND: PolicyKind = PolicyKind::PeerAuthentication;

impl Case {
    fn peer(&mut self, namespace: &str, name: &str, created: &str, spec: Value) -> bool {
        let mut object = object(namespace, name, spec);
        object["metadata"]["creationTimestamp"] = json!(created);
        self.conversion.set(KIND, object)
    }

    /// Whether plaintext is admitted by the pod at the port. What has an identity always is.
    fn plaintext(&self, namespace: &str, labels: &[(&str, &str)], port: u16) -> bool {
        let to = self.destination(namespace, labels);
        assert!(self.admits(&to, WEB, "10.0.0.9", port));
        self.admits(&to, NONE, "10.0.0.9", port)
    }
}

fn mode(mode: &str) -> Value {
    json!({"mtls": {"mode": mode}})
}

fn selecting(mode: Option<&str>, ports: Value) -> Value {
    json!({"selector": {"matchLabels": {"app": "cart"}}, "mtls": mode.map(|mode| json!({"mode": mode})),
        "portLevelMtls": ports})
}

/// Of mesh, namespace and workload the narrowest that is set decides.
#[test]
fn the_narrowest_mode_that_is_set_decides() {
    let modes = [None, Some("UNSET"), Some("STRICT"), Some("PERMISSIVE"), Some("DISABLE")];
    for mesh in modes {
        for namespace in modes {
            for workload in modes {
                let mut case = Case::new();
                if let Some(set) = mesh {
                    case.peer(ROOT, "default", "2026-01-01T00:00:00Z", mode(set));
                }
                if let Some(set) = namespace {
                    case.peer("shop", "default", "2026-01-01T00:00:00Z", mode(set));
                }
                if let Some(set) = workload {
                    case.peer(
                        "shop",
                        "cart",
                        "2026-01-01T00:00:00Z",
                        selecting(Some(set), Value::Null),
                    );
                }
                let strict = |chain: &[Option<&str>]| {
                    let set = chain.iter().flatten().find(|mode| **mode != "UNSET");
                    set == Some(&"STRICT")
                };
                let said = format!("{mesh:?} {namespace:?} {workload:?}");
                let cart = &[("app", "cart")];
                assert_eq!(
                    case.plaintext("shop", cart, 80),
                    !strict(&[workload, namespace, mesh]),
                    "{said}"
                );
                assert_eq!(case.plaintext("shop", &[], 80), !strict(&[namespace, mesh]), "{said}");
                assert_eq!(case.plaintext("bank", cart, 80), !strict(&[mesh]), "{said}");
                assert_eq!(case.plaintext(ROOT, cart, 80), !strict(&[mesh]), "{said}");
            }
        }
    }
}

#[test]
fn ports_have_modes_of_their_own() {
    let ports = json!({"1": {"mode": "STRICT"}, "2": {"mode": "PERMISSIVE"}, "3": {"mode": "DISABLE"}, "4": {"mode": "UNSET"}, "5": null});
    // At ports 1 to 6.
    let (strict, permissive) = (
        [false, true, true, false, false, false],
        [false, true, true, true, true, true],
    );
    for (mesh, own, admitted) in [
        (None, None, permissive),
        (None, Some("PERMISSIVE"), permissive),
        (None, Some("DISABLE"), permissive),
        (None, Some("STRICT"), strict),
        (Some("STRICT"), None, strict),
        (Some("STRICT"), Some("UNSET"), strict),
        (Some("STRICT"), Some("PERMISSIVE"), permissive),
    ] {
        let mut case = Case::new();
        if let Some(set) = mesh {
            case.peer(ROOT, "default", "2026-01-01T00:00:00Z", mode(set));
        }
        case.peer("shop", "cart", "2026-01-01T00:00:00Z", selecting(own, ports.clone()));
        let found = [1, 2, 3, 4, 5, 6].map(|port| case.plaintext("shop", &[("app", "cart")], port));
        assert_eq!(found, admitted, "{mesh:?} {own:?}");
    }
}

#[test]
fn the_oldest_of_one_level_decides_and_the_other_is_told() {
    for (first, second, strict) in [
        ("2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z", true),
        ("2026-01-02T00:00:00Z", "2026-01-01T00:00:00Z", false),
    ] {
        for namespace in ["shop", ROOT] {
            let mut case = Case::new();
            case.peer(namespace, "b", first, mode("STRICT"));
            case.peer(namespace, "a", second, mode("PERMISSIVE"));
            assert_eq!(case.plaintext("shop", &[], 80), !strict);
            let reports = case.conversion.take_reports();
            let ignored: Vec<_> = reports
                .iter()
                .filter(|report| report.state() == State::Ignored)
                .collect();
            assert_eq!(ignored.len(), 1);
            assert_eq!(&*ignored[0].metadata.name, if strict { "a" } else { "b" });
            // When the older goes, the other decides and is told so.
            assert!(case.conversion.remove(KIND, namespace, if strict { "b" } else { "a" }));
            assert_eq!(case.plaintext("shop", &[], 80), strict);
            assert_eq!(case.state().0, State::Accepted);
        }
        let mut case = Case::new();
        case.peer("shop", "b", first, selecting(Some("STRICT"), Value::Null));
        case.peer("shop", "a", second, selecting(Some("PERMISSIVE"), Value::Null));
        assert_eq!(case.plaintext("shop", &[("app", "cart")], 80), !strict);
    }
}

/// A fault makes an object strict on every port of its scope.
#[test]
fn faults_are_strict() {
    let selector = json!({"matchLabels": {"app": "cart"}});
    for (spec, others_too) in [
        (json!({"selector": selector, "mtls": {"mode": "permissive"}}), false),
        (
            json!({"selector": selector, "mtls": {"mode": "PERMISSIVE"}, "portLevelMtls": {"http": {"mode": "PERMISSIVE"}}}),
            false,
        ),
        (
            json!({"selector": selector, "portLevelMtls": {"0": {"mode": "PERMISSIVE"}}}),
            false,
        ),
        (
            json!({"selector": selector, "portLevelMtls": {"80": {"mode": "SOMETIMES"}}}),
            false,
        ),
        (json!({"selector": selector, "portLevelMtls": "80"}), false),
        (
            json!({"selector": selector, "mtls": {"mode": "PERMISSIVE", "unheardOf": 1}}),
            false,
        ),
        (json!({"selector": selector, "unheardOf": 1}), false),
        (
            json!({"mtls": {"mode": "PERMISSIVE"}, "portLevelMtls": {"80": {"mode": "PERMISSIVE"}}}),
            true,
        ),
        (
            json!({"selector": {"matchLabels": {"app": "c*"}}, "mtls": {"mode": "PERMISSIVE"}}),
            true,
        ),
        (json!("strict"), true),
    ] {
        let mut case = Case::new();
        case.peer("shop", "p", "2026-01-01T00:00:00Z", spec.clone());
        assert_eq!(case.state().0, State::Invalid, "{spec}");
        assert!(!case.plaintext("shop", &[("app", "cart")], 80), "{spec}");
        assert_eq!(case.plaintext("shop", &[("app", "web")], 80), !others_too, "{spec}");
        assert!(case.plaintext("bank", &[("app", "cart")], 80), "{spec}");
    }
    let mut case = Case::new();
    case.peer(
        "shop",
        "good",
        "2025-01-01T00:00:00Z",
        selecting(Some("PERMISSIVE"), Value::Null),
    );
    case.peer(
        "shop",
        "bad",
        "2026-01-01T00:00:00Z",
        json!({"selector": {"matchLabels": {"*": "x"}}}),
    );
    assert!(
        !case.plaintext("shop", &[("app", "cart")], 80),
        "whom it means cannot be told"
    );
}

#[test]
fn disable_is_permissive_and_says_so() {
    let mut case = Case::new();
    case.peer("shop", "p", "2026-01-01T00:00:00Z", mode("DISABLE"));
    let (state, message) = case.state();
    assert_eq!(state, State::PartlyApplied);
    assert!(message.contains("DISABLE counts as PERMISSIVE"), "{message}");
}

#[test]
fn a_policy_of_the_same_name_is_another() {
    let mut case = Case::new();
    case.add("shop", "default", json!({"rules": [{}]}));
    case.peer("shop", "default", "2026-01-01T00:00:00Z", mode("STRICT"));
    let policies = case.conversion.policies();
    let mut keys: Vec<_> = policies.iter().map(|policy| policy.key().to_string()).collect();
    keys.sort();
    assert_eq!(keys, ["shop/default", "shop/peerauthentication_default"]);
    assert!(!case.plaintext("shop", &[], 80));
}

/// Every policy that a workload lists is there: one that is missing would deny.
#[test]
fn what_is_listed_is_there() {
    let mut case = Case::new();
    case.peer(ROOT, "default", "2026-01-01T00:00:00Z", mode("STRICT"));
    case.peer("shop", "default", "2026-01-01T00:00:00Z", mode("UNSET"));
    case.peer(
        "shop",
        "cart",
        "2026-01-01T00:00:00Z",
        selecting(None, json!({"80": {"mode": "PERMISSIVE"}})),
    );
    case.add(ROOT, "all", json!({"selector": {"matchLabels": {"app": "cart"}}}));
    case.add("shop", "some", json!({"selector": {"matchLabels": {"app": "cart"}}}));
    let keys: Vec<_> = case
        .conversion
        .policies()
        .iter()
        .map(|policy| policy.key().clone())
        .collect();
    for (namespace, labels) in [
        ("shop", &[("app", "cart")][..]),
        ("shop", &[]),
        ("bank", &[("app", "cart")]),
        (ROOT, &[]),
    ] {
        let listed = case.destination(namespace, labels).policies;
        assert!(!listed.is_empty());
        assert!(listed.iter().all(|key| keys.contains(key)), "{listed:?}");
    }
}
