//! Tables: objects as users write them, and what the policy engine then decides.

mod peers;
mod random;
mod reports;

use std::net::IpAddr;

use serde_json::{Value, json};

use super::*;
use crate::identity::SpiffeId;
use crate::mesh::{PolicySet, Workload, test_workload};
use crate::policy::{Request, evaluate};

pub(super) const ROOT: &str = "adit-system";
const WEB: Option<&str> = Some("cluster.local/ns/shop/sa/web");
const CART: Option<&str> = Some("cluster.local/ns/bank/sa/cart");
const OTHER: Option<&str> = Some("other.domain/ns/shop/sa/web");
const NONE: Option<&str> = None;

pub(super) fn object(namespace: &str, name: &str, spec: Value) -> Value {
    json!({
        "apiVersion": "security.istio.io/v1",
        "metadata": {"namespace": namespace, "name": name, "uid": format!("uid-{name}"), "generation": 3,
            "creationTimestamp": "2026-01-01T00:00:00Z", "resourceVersion": "17", "managedFields": []},
        "spec": spec,
    })
}

/// A mesh of objects, and a destination in namespace `shop` with the label `app: cart`.
pub(super) struct Case {
    pub(super) conversion: Conversion,
}

impl Case {
    pub(super) fn new() -> Self {
        Self {
            conversion: Conversion::reporting(ROOT),
        }
    }

    pub(super) fn with(specs: &[Value]) -> Self {
        let mut case = Self::new();
        for (index, spec) in specs.iter().enumerate() {
            case.add("shop", &format!("p{index}"), spec.clone());
        }
        case
    }

    pub(super) fn add(&mut self, namespace: &str, name: &str, spec: Value) -> bool {
        let object = object(namespace, name, spec);
        self.conversion.set(PolicyKind::AuthorizationPolicy, object)
    }

    pub(super) fn destination(&self, namespace: &str, labels: &[(&str, &str)]) -> Workload {
        let mut workload = test_workload(namespace, "cart", "10.0.0.1");
        workload.labels = labels
            .iter()
            .map(|(key, value)| ((*key).into(), (*value).into()))
            .collect();
        workload.policies = PolicyConversion::selecting(&self.conversion, namespace, &workload.labels);
        workload
    }

    pub(super) fn admits(&self, to: &Workload, source: Option<&str>, ip: &str, port: u16) -> bool {
        let id = source.map(|principal| SpiffeId::parse(&format!("spiffe://{principal}")).unwrap());
        let request = Request {
            source: id.as_ref(),
            source_ip: ip.parse::<IpAddr>().unwrap(),
            destination_ip: "10.0.0.1".parse().unwrap(),
            destination_port: port,
        };
        let policies = PolicySet::new(self.conversion.policies());
        evaluate(&policies, to, &request).verdict.is_allow()
    }

    fn cart_admits(&self, source: Option<&str>, port: u16) -> bool {
        self.admits(&self.destination("shop", &[("app", "cart")]), source, "10.0.0.9", port)
    }

    pub(super) fn state(&mut self) -> (State, String) {
        let reports = self.conversion.take_reports();
        let report = reports.first().expect("something is said");
        (report.state(), report.message())
    }
}

/// Whether connections from these are admitted, at port 8080, and at port 9090 from web.
fn outcome(spec: Value) -> [bool; 5] {
    let case = Case::with(&[spec]);
    let [web, cart, other, none] = [WEB, CART, OTHER, NONE].map(|source| case.cart_admits(source, 8080));
    [web, cart, other, none, case.cart_admits(WEB, 9090)]
}

fn rules(action: &str, rules: Value) -> Value {
    json!({"action": action, "rules": rules})
}

fn source(fields: Value) -> Value {
    json!([{"from": [{"source": fields}]}])
}

fn operation(fields: Value) -> Value {
    json!([{"to": [{"operation": fields}]}])
}

fn when(key: &str, values: Value, not_values: Value) -> Value {
    json!([{"when": [{"key": key, "values": values, "notValues": not_values}]}])
}

const ALL: [bool; 5] = [true; 5];
const NOBODY: [bool; 5] = [false; 5];

#[test]
fn every_field_of_a_rule_that_allows() {
    let web = "cluster.local/ns/shop/sa/web";
    for (spec, admitted) in [
        (json!({}), NOBODY),
        (json!({"rules": []}), NOBODY),
        (json!({"rules": [{}]}), ALL),
        (
            rules("ALLOW", source(json!({"principals": [web]}))),
            [true, false, false, false, true],
        ),
        (
            rules("ALLOW", source(json!({"principals": ["cluster.local/*"]}))),
            [true, true, false, false, true],
        ),
        (
            rules("ALLOW", source(json!({"principals": ["*/ns/shop/sa/web"]}))),
            [true, false, true, false, true],
        ),
        (
            rules("ALLOW", source(json!({"principals": ["*"]}))),
            [true, true, true, false, true],
        ),
        (
            rules("ALLOW", source(json!({"notPrincipals": [web]}))),
            [false, true, true, true, false],
        ),
        (
            rules("ALLOW", source(json!({"notPrincipals": ["*"]}))),
            [false, false, false, true, false],
        ),
        (
            rules("ALLOW", source(json!({"namespaces": ["shop"]}))),
            [true, false, true, false, true],
        ),
        (
            rules("ALLOW", source(json!({"namespaces": ["b*"]}))),
            [false, true, false, false, false],
        ),
        (
            rules("ALLOW", source(json!({"notNamespaces": ["shop"]}))),
            [false, true, false, true, false],
        ),
        (
            rules("ALLOW", source(json!({"serviceAccounts": ["web"]}))),
            [true, false, true, false, true],
        ),
        (
            rules("ALLOW", source(json!({"serviceAccounts": ["bank/cart"]}))),
            [false, true, false, false, false],
        ),
        (
            rules("ALLOW", source(json!({"notServiceAccounts": ["web"]}))),
            [false, true, false, true, false],
        ),
        (
            rules("ALLOW", source(json!({"trustDomains": ["other.domain"]}))),
            [false, false, true, false, false],
        ),
        (
            rules("ALLOW", source(json!({"notTrustDomains": ["cluster.*"]}))),
            [false, false, true, true, false],
        ),
        (rules("ALLOW", source(json!({"ipBlocks": ["10.0.0.0/24"]}))), ALL),
        (rules("ALLOW", source(json!({"ipBlocks": ["10.0.0.8"]}))), NOBODY),
        (rules("ALLOW", source(json!({"notIpBlocks": ["10.0.0.9"]}))), NOBODY),
        (
            rules("ALLOW", source(json!({"principals": [], "namespaces": ["bank"]}))),
            [false, true, false, false, false],
        ),
        (
            rules("ALLOW", operation(json!({"ports": ["8080", "1"]}))),
            [true, true, true, true, false],
        ),
        (
            rules("ALLOW", operation(json!({"notPorts": ["8080"]}))),
            [false, false, false, false, true],
        ),
        (
            rules("ALLOW", when("source.principal", json!([web]), json!([]))),
            [true, false, false, false, true],
        ),
        (
            rules("ALLOW", when("source.principal", json!(["*"]), json!([web]))),
            [false, true, true, false, false],
        ),
        (
            rules("ALLOW", when("source.namespace", json!(["bank"]), Value::Null)),
            [false, true, false, false, false],
        ),
        (
            rules("ALLOW", when("source.serviceAccount", json!(["shop/web"]), Value::Null)),
            [true, false, true, false, true],
        ),
        (
            rules(
                "ALLOW",
                when("source.trustDomain", json!(["other.domain"]), Value::Null),
            ),
            [false, false, true, false, false],
        ),
        (rules("ALLOW", when("source.ip", json!(["10.0.0.9"]), Value::Null)), ALL),
        (
            rules("ALLOW", when("source.ip", Value::Null, json!(["10.0.0.0/8"]))),
            NOBODY,
        ),
        (
            rules("ALLOW", when("destination.ip", json!(["10.0.0.1"]), Value::Null)),
            ALL,
        ),
        (
            rules("ALLOW", when("destination.ip", json!(["10.0.0.2"]), Value::Null)),
            NOBODY,
        ),
        (
            rules("ALLOW", when("destination.port", json!(["9090"]), Value::Null)),
            [false, false, false, false, true],
        ),
        // All parts of a rule hold; of the parts of `from` and of the rules, any.
        (
            json!({"rules": [{"from": [{"source": {"namespaces": ["bank"]}}, {"source": {"principals": [web]}}],
                "to": [{"operation": {"ports": ["8080"]}}], "when": [{"key": "source.ip", "values": ["10.0.0.9"]}]}]}),
            [true, true, false, false, false],
        ),
        (
            json!({"rules": [{"to": [{"operation": {"ports": ["9090"]}}]}, {"from": [{"source": {"namespaces": ["bank"]}}]}]}),
            [false, true, false, false, true],
        ),
    ] {
        assert_eq!(outcome(spec.clone()), admitted, "{spec}");
        let mut case = Case::with(std::slice::from_ref(&spec));
        assert_eq!(
            case.state(),
            (State::Accepted, "enforced as written".to_owned()),
            "{spec}"
        );
    }
}

#[test]
fn a_rule_that_denies_is_the_opposite_where_all_is_understood() {
    for rules_of in [
        source(json!({"principals": ["cluster.local/*"], "notNamespaces": ["bank"]})),
        source(json!({"notPrincipals": ["*"]})),
        operation(json!({"notPorts": ["8080"]})),
        when("source.namespace", json!(["shop"]), json!([])),
        json!([{}]),
    ] {
        let allowed = outcome(rules("ALLOW", rules_of.clone()));
        let denied = outcome(rules("DENY", rules_of.clone()));
        assert_eq!(allowed.map(|admitted| !admitted), denied, "{rules_of}");
    }
}

/// What is about requests: a rule that allows never matches with it, one that denies matches without.
#[test]
fn layer_7_never_allows_and_denies_without() {
    let source_field = |field: &str| source(json!({field: ["x"], "principals": ["cluster.local/ns/shop/sa/web"]}));
    let to_field = |field: &str| operation(json!({field: ["x"], "ports": ["8080"]}));
    let condition =
        |key: &str| json!([{"from": [{"source": {"namespaces": ["bank"]}}], "when": [{"key": key, "values": ["x"]}]}]);
    let only_web = [false, true, true, true, false];
    let only_8080 = [false, false, false, false, true];
    let only_bank = [true, false, true, true, true];
    let mut cases = Vec::new();
    for field in [
        "requestPrincipals",
        "notRequestPrincipals",
        "remoteIpBlocks",
        "notRemoteIpBlocks",
        "unheardOf",
    ] {
        cases.push((source_field(field), only_web, format!("from.source.{field}")));
    }
    for field in [
        "hosts",
        "notHosts",
        "methods",
        "notMethods",
        "paths",
        "notPaths",
        "unheardOf",
    ] {
        cases.push((to_field(field), only_8080, format!("to.operation.{field}")));
    }
    for key in [
        "request.headers[x]",
        "request.auth.principal",
        "request.auth.claims[iss]",
        "remote.ip",
        "destination.labels[v]",
        "connection.sni",
        "experimental.envoy.filters.a[b]",
        "unheard.of",
    ] {
        cases.push((condition(key), only_bank, format!("when {key:?}")));
    }
    cases.push((
        operation(json!({"paths": ["/admin"]})),
        NOBODY,
        "to.operation.paths".into(),
    ));
    cases.push((
        json!([{"to": [{"operation": {"ports": ["1"]}}, {"operation": {"hosts": ["h"]}}]}]),
        NOBODY,
        "to.operation.hosts".into(),
    ));
    for (rules_of, denied, field) in cases {
        assert_eq!(outcome(rules("ALLOW", rules_of.clone())), NOBODY, "{rules_of}");
        assert_eq!(outcome(rules("DENY", rules_of.clone())), denied, "{rules_of}");
        for (action, effect) in [("ALLOW", "less is allowed"), ("DENY", "more is denied")] {
            let (state, message) = Case::with(&[rules(action, rules_of.clone())]).state();
            assert_eq!(state, State::PartlyApplied, "{message}");
            assert!(
                message.contains(&field) && message.contains(effect),
                "{field}: {message}"
            );
        }
    }
    // The other rules of the policy stand.
    let mixed = rules(
        "ALLOW",
        json!([{"to": [{"operation": {"paths": ["/"]}}]}, {"to": [{"operation": {"ports": ["9090"]}}]}]),
    );
    assert_eq!(outcome(mixed), [false, false, false, false, true]);
}

/// What cannot be read: in a rule that allows it never matches; in one that denies the condition goes, or, in a
/// list of which nothing may match, the value.
#[test]
fn faults_never_widen_access() {
    let web = "cluster.local/ns/shop/sa/web";
    for (rules_of, denied, part) in [
        (
            source(json!({"principals": [web, "a*b"]})),
            NOBODY,
            "from.source.principals has \"a*b\"",
        ),
        (
            source(json!({"principals": ["spiffe://cluster.local/ns/a/sa/b"]})),
            NOBODY,
            "without spiffe://",
        ),
        (source(json!({"principals": [""]})), NOBODY, "empty"),
        (
            source(json!({"notPrincipals": [web, "**"]})),
            [true, false, false, false, true],
            "from.source.notPrincipals",
        ),
        (source(json!({"namespaces": ["*a*"]})), NOBODY, "from.source.namespaces"),
        (
            source(json!({"notNamespaces": ["shop", ""]})),
            [true, false, true, false, true],
            "from.source.notNamespaces",
        ),
        (
            source(json!({"serviceAccounts": ["a/b/c"]})),
            NOBODY,
            "from.source.serviceAccounts",
        ),
        (
            source(json!({"serviceAccounts": ["shop/*"]})),
            NOBODY,
            "from.source.serviceAccounts",
        ),
        (
            source(json!({"trustDomains": ["*.local"]})),
            NOBODY,
            "from.source.trustDomains",
        ),
        (
            source(json!({"ipBlocks": ["10.0.0.0/33"]})),
            NOBODY,
            "from.source.ipBlocks",
        ),
        (
            source(json!({"ipBlocks": ["host"], "namespaces": ["bank"]})),
            [true, false, true, true, true],
            "\"host\"",
        ),
        (
            source(json!({"notIpBlocks": ["10.0.0.9", "x"]})),
            ALL,
            "from.source.notIpBlocks",
        ),
        (
            operation(json!({"ports": ["80800"]})),
            NOBODY,
            "to.operation.ports has \"80800\"",
        ),
        (operation(json!({"ports": ["+80"]})), NOBODY, "\"+80\""),
        (operation(json!({"ports": ["http", "8080"]})), NOBODY, "\"http\""),
        (
            operation(json!({"notPorts": ["8080", "x"]})),
            [true, true, true, true, false],
            "to.operation.notPorts",
        ),
        (
            when("destination.port", json!(["x"]), json!(["8080"])),
            [true, true, true, true, false],
            "destination.port",
        ),
        (
            when("source.principal", Value::Null, Value::Null),
            NOBODY,
            "when (no values) is empty",
        ),
        (source(json!({})), NOBODY, "from.source is empty"),
        (json!([{"from": [{}]}]), NOBODY, "from.source is empty"),
        (json!([{"from": []}]), NOBODY, "from is empty"),
        (json!([{"to": []}]), NOBODY, "to is empty"),
        (operation(json!({})), NOBODY, "to.operation is empty"),
        (json!([null]), NOBODY, "null"),
    ] {
        assert_eq!(outcome(rules("ALLOW", rules_of.clone())), NOBODY, "{rules_of}");
        assert_eq!(outcome(rules("DENY", rules_of.clone())), denied, "{rules_of}");
        for action in ["ALLOW", "DENY"] {
            let (state, message) = Case::with(&[rules(action, rules_of.clone())]).state();
            assert_eq!(state, State::Invalid, "{message}");
            assert!(message.contains(part), "{part}: {message}");
        }
    }
}

#[test]
fn specifications_of_another_shape_deny_their_scope() {
    for spec in [
        json!("text"),
        json!({"rules": "all"}),
        json!({"action": 1}),
        json!({"rules": [{"to": [{"operation": {"ports": [8080]}}]}]}),
        json!({"rules": [{"from": [null]}]}),
        json!({"action": "", "rules": [{}]}),
        json!({"action": "REJECT", "rules": [{}]}),
        json!({"action": "allow", "rules": [{}]}),
    ] {
        let allow_all = json!({"rules": [{}]});
        let mut case = Case::with(&[allow_all, spec.clone()]);
        assert!(!case.cart_admits(WEB, 8080), "{spec}");
        assert!(
            case.conversion
                .take_reports()
                .iter()
                .any(|report| report.state() == State::Invalid),
            "{spec}"
        );
    }
    // The selector bounds it still.
    let case = Case::with(&[json!({"selector": {"matchLabels": {"app": "web"}}, "rules": 1})]);
    assert!(case.cart_admits(WEB, 8080));
    assert!(!case.admits(&case.destination("shop", &[("app", "web")]), WEB, "10.0.0.9", 8080));
    // A field of the policy that is not known might restrict.
    assert_eq!(outcome(json!({"rules": [{}], "unheardOf": {"x": 1}})), NOBODY);
    assert_eq!(outcome(json!({"rules": [{}], "unheardOf": []})), ALL);
}

#[test]
fn actions_that_are_not_supported() {
    let web = source(json!({"principals": ["cluster.local/ns/shop/sa/web"]}));
    let custom = json!({"action": "CUSTOM", "provider": {"name": "x"}, "rules": web});
    assert_eq!(outcome(custom.clone()), [false, true, true, true, false]);
    let (state, message) = Case::with(&[custom]).state();
    assert_eq!(state, State::PartlyApplied);
    assert!(
        message.ends_with("What it would ask the authorizer about is denied"),
        "{message}"
    );
    assert_eq!(outcome(rules("CUSTOM", operation(json!({"paths": ["/"]})))), NOBODY);

    for (spec, text) in [
        (rules("AUDIT", json!([{}])), "AUDIT"),
        (json!({"action": "DENY"}), "a DENY policy without rules"),
        (json!({"action": "CUSTOM"}), "a CUSTOM policy without rules"),
        (
            json!({"targetRefs": [{"kind": "Service", "name": "cart"}], "rules": []}),
            "targetRef",
        ),
        (
            json!({"targetRef": {"kind": "Gateway", "name": "w"}, "action": "DENY", "rules": [{}]}),
            "targetRef",
        ),
    ] {
        assert_eq!(outcome(spec.clone()), ALL, "{spec}");
        let (state, message) = Case::with(&[spec]).state();
        assert_eq!(state, State::Ignored);
        assert!(message.contains(text), "{message}");
    }
}

#[test]
fn scopes_are_the_namespace_the_selected_and_the_mesh() {
    let deny = json!({"action": "DENY", "rules": [{}]});
    let selecting = json!({"action": "DENY", "rules": [{}], "selector": {"matchLabels": {"app": "cart", "v": "1"}}});
    let empty = json!({"action": "DENY", "rules": [{}], "selector": {"matchLabels": {}}});
    let (one, two) = (&[("app", "cart"), ("v", "1")][..], &[("app", "cart")][..]);
    // Admitted to shop's pods of both kinds and bank's.
    for (namespace, spec, admitted) in [
        ("shop", &deny, [false, false, true, true]),
        ("shop", &empty, [false, false, true, true]),
        ("shop", &selecting, [false, true, true, true]),
        (ROOT, &deny, [false; 4]),
        (ROOT, &empty, [false; 4]),
        (ROOT, &selecting, [false, true, false, true]),
        ("bank", &selecting, [true, true, false, true]),
    ] {
        let mut case = Case::new();
        case.add(namespace, "p", spec.clone());
        let to = [("shop", one), ("shop", two), ("bank", one), ("bank", two)];
        let found = to.map(|(ns, labels)| case.admits(&case.destination(ns, labels), WEB, "10.0.0.9", 8080));
        assert_eq!(found, admitted, "{namespace} {spec}");
    }
}

/// A selector that cannot be read may mean any pod: what denies does so for all, and what allows allows nothing.
#[test]
fn an_unreadable_selector_means_all_and_allows_nothing() {
    for selector in [
        json!({"matchLabels": {"app": "*"}}),
        json!({"matchLabels": {"": "x"}}),
        json!({"matchExpressions": [{"key": "app", "operator": "Exists"}]}),
        json!("app=cart"),
    ] {
        let of = |action: &str| json!({"action": action, "rules": [{}], "selector": selector});
        assert_eq!(outcome(of("ALLOW")), NOBODY, "{selector}");
        assert_eq!(outcome(of("DENY")), NOBODY, "{selector}");
        assert_eq!(Case::with(&[of("ALLOW")]).state().0, State::Invalid);
    }
}
