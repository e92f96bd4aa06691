//! What is said of a policy on the object itself.

use super::*;

#[test]
fn a_policy_in_dry_run_is_only_told_of() {
    for (value, enforced) in [("true", false), ("1", false), ("false", true), ("perhaps", true)] {
        let mut policy = object("shop", "p", json!({"action": "DENY", "rules": [{}]}));
        policy["metadata"]["annotations"] = json!({"istio.io/dry-run": value});
        let mut case = Case::new();
        case.conversion.set(PolicyKind::AuthorizationPolicy, policy);
        assert_eq!(case.cart_admits(WEB, 8080), !enforced, "{value}");
        let expected = if value == "perhaps" {
            State::Invalid
        } else {
            State::Accepted
        };
        let (state, message) = case.state();
        assert_eq!(state, expected);
        assert_eq!(
            message.contains("In dry run it refuses nothing"),
            !enforced,
            "{message}"
        );
        assert_eq!(message.contains("enforced as written"), value == "false", "{message}");
    }
}

#[test]
fn a_policy_in_dry_run_that_is_written_badly_refuses_nothing_either() {
    for spec in [
        json!("nonsense"),
        json!({"action": "PERHAPS", "rules": [{}]}),
        rules("ALLOW", source(json!({"principals": ["a*b"]}))),
        rules("DENY", operation(json!({"paths": ["/admin"]}))),
        json!({"action": "CUSTOM", "rules": [{}]}),
    ] {
        let mut policy = object("shop", "p", spec.clone());
        policy["metadata"]["annotations"] = json!({"istio.io/dry-run": "true"});
        let mut case = Case::new();
        case.conversion.set(PolicyKind::AuthorizationPolicy, policy);
        assert!(case.cart_admits(WEB, 8080) && case.cart_admits(NONE, 9090), "{spec}");
        let (state, message) = case.state();
        assert_ne!(state, State::Accepted, "{spec}");
        assert!(
            message.ends_with("what it would refuse is logged and counted"),
            "{message}"
        );
    }
}

#[test]
fn an_identity_that_no_pod_has_is_pointed_out() {
    let (state, message) =
        Case::with(&[rules("DENY", source(json!({"principals": ["cluster.local/shop/web"]})))]).state();
    assert_eq!(state, State::Accepted);
    assert!(
        message.contains("\"cluster.local/shop/web\", which no pod can be"),
        "{message}"
    );
}

#[test]
fn only_changes_of_the_outcome_are_told() {
    let mut case = Case::new();
    let deny = json!({"action": "DENY", "rules": [{}]});
    assert!(case.add("shop", "p", deny.clone()));
    assert!(!case.add("shop", "p", deny.clone()));
    assert_eq!(case.conversion.take_reports().len(), 1);
    assert!(!case.add("shop", "p", deny.clone()));
    assert!(
        case.conversion.take_reports().is_empty(),
        "its own status comes back as a change"
    );
    assert!(case.add(
        "shop",
        "p",
        json!({"action": "DENY", "rules": [{}], "selector": {"matchLabels": {"a": "b"}}})
    ));
    assert!(!case.add("shop", "audit", json!({"action": "AUDIT", "rules": [{}]})));
    let kind = PolicyKind::AuthorizationPolicy;
    assert!(!case.conversion.remove(kind, "shop", "audit"));
    assert!(case.conversion.remove(kind, "shop", "p"));
    assert!(!case.conversion.remove(kind, "shop", "p"));
    assert!(case.conversion.policies().is_empty());
}

#[test]
fn conditions_of_others_stay_and_the_same_is_not_written_again() {
    let mut case = Case::with(&[rules("ALLOW", operation(json!({"paths": ["/"]})))]);
    let report = case.conversion.take_reports().remove(0);
    let other = json!({"type": "ZtunnelAccepted", "status": "True"});
    let written = report
        .conditions(std::slice::from_ref(&other), "2026-01-02T00:00:00Z")
        .unwrap();
    assert_eq!(written[0], other);
    assert_eq!(written[1]["status"], "True");
    assert_eq!(written[1]["reason"], "PartlyApplied");
    assert_eq!(written[1]["observedGeneration"], 3);
    assert_eq!(written[1]["lastTransitionTime"], "2026-01-02T00:00:00Z");
    assert_eq!(report.conditions(&written, "2026-01-03T00:00:00Z"), None);
    // Another message under the same status keeps the time; another status has its own.
    case.add("shop", "p0", json!({"rules": [{}]}));
    let accepted = case.conversion.take_reports().remove(0);
    let again = accepted.conditions(&written, "2026-01-04T00:00:00Z").unwrap();
    assert_eq!(again[1]["lastTransitionTime"], "2026-01-02T00:00:00Z");
    case.add("shop", "p0", json!({"action": "NO"}));
    let invalid = case.conversion.take_reports().remove(0);
    let changed = invalid.conditions(&again, "2026-01-05T00:00:00Z").unwrap();
    assert_eq!(
        (&changed[1]["status"], &changed[1]["lastTransitionTime"]),
        (&json!("False"), &json!("2026-01-05T00:00:00Z"))
    );
}
