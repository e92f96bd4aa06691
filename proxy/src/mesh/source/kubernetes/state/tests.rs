use bytes::Bytes;
use prost::Message as _;

use super::*;
use crate::identity::TrustDomain;
use crate::mesh::source::kubernetes::policies::Conversion;
use crate::mesh::source::kubernetes::wire;
use crate::mesh::{Policy, Protocol, Scope};
use serde_json::Value;

fn state_of(view: View, policies: Box<dyn PolicyConversion>) -> State {
    let settings = KubernetesSettings {
        kubeconfig: None,
        trust_domain: TrustDomain::parse("cluster.local").unwrap(),
        cluster_domain: "cluster.local".to_owned(),
        root_namespace: "adit-system".to_owned(),
        enrolment: "mesh.adit/mode=enabled".parse().unwrap(),
        cluster_ranges: Vec::new(),
    };
    State::new(settings, view, policies)
}

/// The agent's of `n1`, that has been told that there is nothing.
fn state() -> State {
    let mut state = state_of(View::Node("n1".to_owned()), Box::new(Conversion::new("adit-system")));
    for kind in Kind::ALL {
        list(&mut state, kind, Vec::new());
    }
    assert!(state.is_whole());
    state.take_changed();
    state
}

fn list(state: &mut State, kind: Kind, objects: Vec<Object>) {
    state.apply(Event::ListBegins(kind));
    state.apply(Event::Set(kind, objects));
    state.apply(Event::ListEnds(kind));
}

fn set(state: &mut State, kind: Kind, object: Object) {
    state.apply(Event::Set(kind, vec![object]));
}

fn entries(map: &[(&str, &str)]) -> Vec<Bytes> {
    let entry = |(key, value): &(&str, &str)| wire::Entry {
        key: Bytes::copy_from_slice(key.as_bytes()),
        value: Bytes::copy_from_slice(value.as_bytes()),
    };
    map.iter().map(|pair| entry(pair).encode_to_vec().into()).collect()
}

fn meta(namespace: &str, name: &str, uid: &str, labels: &[(&str, &str)]) -> Option<wire::ObjectMeta> {
    let bytes = |text: &str| Bytes::copy_from_slice(text.as_bytes());
    Some(wire::ObjectMeta {
        name: bytes(name),
        namespace: bytes(namespace),
        uid: bytes(uid),
        labels: entries(labels),
        ..Default::default()
    })
}

fn object(message: &impl prost::Message) -> Object {
    Object::Protobuf(message.encode_to_vec().into())
}

fn namespace(name: &str, mode: Option<&str>) -> Object {
    let labels: Vec<_> = mode.iter().map(|mode| ("mesh.adit/mode", *mode)).collect();
    object(&wire::Namespace {
        metadata: meta("", name, &format!("ns-{name}"), &labels),
    })
}

/// A pod, as a test tells of it.
#[derive(Clone)]
struct PodSpec {
    uid: &'static str,
    node: &'static str,
    address: &'static str,
    labels: &'static [(&'static str, &'static str)],
    captured: bool,
    ready: bool,
    host_network: bool,
    phase: &'static str,
    deleting: bool,
    created: i64,
    account: &'static str,
}

const POD: PodSpec = PodSpec {
    uid: "a",
    node: "n2",
    address: "10.0.0.1",
    labels: &[],
    captured: true,
    ready: true,
    host_network: false,
    phase: "Running",
    deleting: false,
    created: 100,
    account: "default",
};

fn pod(spec: &PodSpec) -> Object {
    let mut metadata = meta("shop", spec.uid, spec.uid, spec.labels).unwrap();
    metadata.creation_timestamp = Some(wire::Time { seconds: spec.created });
    metadata.deletion_timestamp = spec.deleting.then_some(wire::Time { seconds: 1 });
    let condition = |kind: &'static str, holds: bool| wire::PodCondition {
        r#type: kind.into(),
        status: if holds { "True" } else { "False" }.into(),
        ..Default::default()
    };
    object(&wire::Pod {
        metadata: Some(metadata),
        spec: Some(wire::PodSpec {
            node_name: spec.node.into(),
            host_network: spec.host_network,
            service_account_name: spec.account.into(),
            ..Default::default()
        }),
        status: Some(wire::PodStatus {
            phase: spec.phase.into(),
            pod_ip: spec.address.into(),
            conditions: vec![
                condition("mesh.adit/Captured", spec.captured),
                condition("Ready", spec.ready),
            ],
            ..Default::default()
        }),
    })
}

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

#[test]
fn which_pods_are_in_the_mesh() {
    const ON: &[(&str, &str)] = &[("mesh.adit/mode", "enabled")];
    const OFF: &[(&str, &str)] = &[("mesh.adit/mode", "disabled")];
    let here = PodSpec {
        node: "n1",
        captured: false,
        ..POD
    };
    let there = POD;
    let uncaptured = PodSpec { captured: false, ..POD };
    let labelled = |spec: &PodSpec, labels| PodSpec { labels, ..spec.clone() };
    for (row, mode, spec, in_mesh) in [
        (1, Some("enabled"), here.clone(), true),
        (2, Some("disabled"), here.clone(), false),
        (3, None, here.clone(), false),
        (4, None, labelled(&here, ON), true),
        (5, Some("enabled"), labelled(&here, OFF), false),
        (6, Some("disabled"), labelled(&here, ON), true),
        (7, Some("enabled"), there.clone(), true),
        (8, Some("enabled"), uncaptured.clone(), false),
        (9, Some("enabled"), labelled(&there, OFF), false),
        (10, None, there.clone(), false),
        (
            11,
            Some("enabled"),
            PodSpec {
                host_network: true,
                ..here.clone()
            },
            false,
        ),
        (
            12,
            Some("enabled"),
            PodSpec {
                host_network: true,
                ..there.clone()
            },
            false,
        ),
        (
            13,
            Some("enabled"),
            PodSpec {
                phase: "Succeeded",
                ..here.clone()
            },
            false,
        ),
        (
            14,
            Some("enabled"),
            PodSpec {
                phase: "Pending",
                address: "",
                ..here.clone()
            },
            true,
        ),
        (
            15,
            Some("enabled"),
            PodSpec {
                deleting: true,
                ..here.clone()
            },
            true,
        ),
        (
            16,
            Some("enabled"),
            PodSpec {
                deleting: true,
                ..there.clone()
            },
            true,
        ),
        // A mirror pod, of a static pod or of whatever a node makes up.
        (
            17,
            Some("enabled"),
            PodSpec {
                account: "",
                ..here.clone()
            },
            false,
        ),
        (
            18,
            None,
            PodSpec {
                account: "",
                labels: &[("mesh.adit/mode", "enabled")],
                ..here.clone()
            },
            false,
        ),
    ] {
        let mut state = state();
        set(&mut state, Kind::Namespaces, namespace("shop", mode));
        set(&mut state, Kind::Pods, pod(&spec));
        let mesh = state.take_changed().unwrap();
        let workload = mesh.workload_by_uid("a").unwrap();
        assert_eq!(workload.protocol == Protocol::Hbone, in_mesh, "row {row}");
        // The authority grants before a pod is captured.
        let mut state = state_of(View::Authority, Box::new(Conversion::new("adit-system")));
        list(
            &mut state,
            Kind::Pods,
            vec![pod(&PodSpec {
                captured: false,
                ..spec.clone()
            })],
        );
        list(&mut state, Kind::Namespaces, vec![namespace("shop", mode)]);
        list(&mut state, Kind::Nodes, Vec::new());
        let mesh = state.take_changed().unwrap();
        let id = workload.identity.clone();
        assert_eq!(mesh.runs_on(&id, spec.node), in_mesh || row == 8, "row {row}");
    }
}

#[test]
fn a_pod_waits_for_its_namespace_and_goes_with_it() {
    let mut state = state();
    set(&mut state, Kind::Pods, pod(&POD));
    assert!(
        state
            .take_changed()
            .is_none_or(|mesh| mesh.workload_by_uid("a").is_none())
    );
    set(&mut state, Kind::Namespaces, namespace("shop", Some("enabled")));
    let mesh = state.take_changed().unwrap();
    assert_eq!(mesh.workload_by_addr(ip("10.0.0.1")).unwrap().protocol, Protocol::Hbone);
    set(&mut state, Kind::Namespaces, namespace("shop", None));
    let mesh = state.take_changed().unwrap();
    assert_eq!(mesh.workload_by_addr(ip("10.0.0.1")).unwrap().protocol, Protocol::Plain);
    state.apply(Event::Gone(Kind::Namespaces, namespace("shop", None)));
    let mesh = state.take_changed().unwrap();
    assert!(mesh.workload_by_uid("a").is_none() && mesh.workload_by_addr(ip("10.0.0.1")).is_none());
}

#[test]
fn an_address_in_flux_is_the_live_pods_in_whatever_order_it_is_heard_of() {
    let b = PodSpec { uid: "b", ..POD };
    let newer = |spec: &PodSpec| PodSpec {
        created: 200,
        ..spec.clone()
    };
    let leaving = |spec: &PodSpec| PodSpec {
        deleting: true,
        ..spec.clone()
    };
    let ended = |spec: &PodSpec| PodSpec {
        phase: "Failed",
        ..spec.clone()
    };
    let of_host = |spec: &PodSpec| PodSpec {
        host_network: true,
        ..spec.clone()
    };
    let elsewhere = |spec: &PodSpec| PodSpec {
        address: "10.0.0.2",
        ..spec.clone()
    };
    for (row, first, second, owner) in [
        (1, POD, newer(&b), Some("b")),
        (2, newer(&POD), b.clone(), Some("a")),
        (3, leaving(&newer(&POD)), b.clone(), Some("b")),
        (4, leaving(&POD), leaving(&newer(&b)), Some("b")),
        (5, POD, b.clone(), Some("b")),
        (6, ended(&newer(&POD)), b.clone(), Some("b")),
        (7, of_host(&newer(&POD)), b.clone(), Some("b")),
        (8, of_host(&POD), ended(&b), None),
        (9, elsewhere(&newer(&POD)), b.clone(), Some("b")),
        (10, of_host(&POD), of_host(&newer(&b)), None),
        (11, ended(&leaving(&POD)), leaving(&b), Some("b")),
    ] {
        for order in [[&first, &second], [&second, &first]] {
            let mut state = state();
            set(&mut state, Kind::Namespaces, namespace("shop", None));
            order.iter().for_each(|spec| set(&mut state, Kind::Pods, pod(spec)));
            let mesh = state.take_changed().unwrap();
            let found = mesh.workload_by_addr(ip("10.0.0.1")).map(|workload| &*workload.uid);
            assert_eq!(found, owner, "row {row}");
            // The other has it once the owner is gone, if it claims it.
            let (Some(owner), loser) = (owner, if owner == Some("a") { &second } else { &first }) else {
                continue;
            };
            state.apply(Event::Gone(
                Kind::Pods,
                pod(if owner == "a" { &first } else { &second }),
            ));
            let mesh = state.take_changed().unwrap();
            let found = mesh.workload_by_addr(ip("10.0.0.1")).map(|workload| &*workload.uid);
            let claims = !loser.host_network && loser.phase == "Running" && loser.address == "10.0.0.1";
            assert_eq!(found, claims.then_some(loser.uid), "row {row}");
        }
    }
}

#[test]
fn what_a_list_lacks_is_gone_and_what_has_come_again_is_another() {
    let mut state = state();
    set(&mut state, Kind::Namespaces, namespace("shop", Some("enabled")));
    for (uid, address) in [("a", "10.0.0.1"), ("b", "10.0.0.2")] {
        set(&mut state, Kind::Pods, pod(&PodSpec { uid, address, ..POD }));
    }
    assert_eq!(state.take_changed().unwrap().workloads().count(), 2);
    let kept = PodSpec {
        uid: "c",
        address: "10.0.0.1",
        ..POD
    };
    state.apply(Event::ListBegins(Kind::Pods));
    state.apply(Event::Set(Kind::Pods, vec![pod(&kept)]));
    // A list that breaks off removes nothing.
    state.apply(Event::ListBegins(Kind::Pods));
    assert_eq!(state.take_changed().unwrap().workloads().count(), 3);
    list(&mut state, Kind::Pods, vec![pod(&kept)]);
    let mesh = state.take_changed().unwrap();
    assert_eq!(
        mesh.workloads().map(|workload| &*workload.uid).collect::<Vec<_>>(),
        ["c"]
    );
    assert_eq!(&*mesh.workload_by_addr(ip("10.0.0.1")).unwrap().uid, "c");
    assert!(mesh.workload_by_addr(ip("10.0.0.2")).is_none());
}

#[test]
fn what_changes_nothing_is_no_change() {
    let mut state = state();
    set(&mut state, Kind::Namespaces, namespace("shop", Some("enabled")));
    set(&mut state, Kind::Pods, pod(&POD));
    let before = state.take_changed().unwrap();
    set(&mut state, Kind::Pods, pod(&POD));
    set(&mut state, Kind::Namespaces, namespace("shop", Some("enabled")));
    list(&mut state, Kind::Pods, vec![pod(&POD)]);
    assert!(state.take_changed().is_none());
    set(
        &mut state,
        Kind::Pods,
        pod(&PodSpec {
            address: "10.0.0.9",
            ..POD
        }),
    );
    let changes = state.take_changed().unwrap().changes_since(&before);
    assert_eq!((changes.workloads.len(), changes.addresses.len()), (1, 2));
}

#[test]
fn whether_a_pod_is_ready_is_followed_on_this_node_only() {
    for (node, followed) in [("n1", true), ("n2", false)] {
        let mut state = state();
        set(&mut state, Kind::Namespaces, namespace("shop", Some("enabled")));
        set(&mut state, Kind::Pods, pod(&PodSpec { node, ..POD }));
        let mesh = state.take_changed().unwrap();
        assert!(mesh.workload_by_uid("a").unwrap().ready, "{node}");
        let not_ready = PodSpec {
            node,
            ready: false,
            ..POD
        };
        set(&mut state, Kind::Pods, pod(&not_ready));
        let changed = state.take_changed();
        assert_eq!(
            changed.is_some_and(|mesh| !mesh.workload_by_uid("a").unwrap().ready),
            followed,
            "{node}"
        );
    }
}

#[test]
fn a_nodes_zone_is_its_pods_and_its_range_the_clusters() {
    let node = |zone: &str, cidr: &'static str| {
        object(&wire::Node {
            metadata: meta("", "n2", "node", &[("topology.kubernetes.io/zone", zone)]),
            spec: Some(wire::NodeSpec {
                pod_cidrs: vec![cidr.into()],
                ..Default::default()
            }),
            status: None,
        })
    };
    let mut state = state();
    set(&mut state, Kind::Namespaces, namespace("shop", None));
    set(&mut state, Kind::Pods, pod(&POD));
    for (zone, cidr) in [("z1", "10.0.0.0/24"), ("z2", "10.0.0.0/23")] {
        set(&mut state, Kind::Nodes, node(zone, cidr));
        let mesh = state.take_changed().unwrap();
        assert_eq!(&*mesh.workload_by_uid("a").unwrap().zone, zone);
        assert_eq!(mesh.cluster_ranges(), [cidr.parse().unwrap()]);
    }
    // Where an address is known that lies elsewhere, ranges do not tell all.
    set(
        &mut state,
        Kind::Pods,
        pod(&PodSpec {
            uid: "stray",
            address: "10.9.0.1",
            ..POD
        }),
    );
    assert_eq!(state.take_changed().unwrap().cluster_ranges(), []);
    state.apply(Event::Gone(
        Kind::Pods,
        pod(&PodSpec {
            uid: "stray",
            address: "10.9.0.1",
            ..POD
        }),
    ));
    assert_eq!(
        state.take_changed().unwrap().cluster_ranges(),
        ["10.0.0.0/23".parse().unwrap()]
    );
    state.apply(Event::Gone(Kind::Nodes, node("z2", "10.0.1.0/24")));
    let mesh = state.take_changed().unwrap();
    assert_eq!(
        (&*mesh.workload_by_uid("a").unwrap().zone, mesh.cluster_ranges().len()),
        ("", 0)
    );
}

/// One policy, that selects what has the label `app: cart`.
struct OnePolicy(bool);

impl PolicyConversion for OnePolicy {
    fn set(&mut self, _: PolicyKind, _: Value) -> bool {
        !std::mem::replace(&mut self.0, true)
    }

    fn remove(&mut self, _: PolicyKind, _: &str, _: &str) -> bool {
        std::mem::take(&mut self.0)
    }

    fn policies(&self) -> Vec<Policy> {
        let policy = Policy::new("shop", "closed", Scope::Workload, mesh::Action::Allow, Vec::new());
        self.0.then_some(policy).into_iter().collect()
    }

    fn selecting(&self, _: &str, labels: &BTreeMap<String, String>) -> Vec<Arc<str>> {
        let selects = self.0 && labels.get("app").is_some_and(|app| app == "cart");
        selects.then(|| "shop/closed".into()).into_iter().collect()
    }
}

#[test]
fn policies_select_pods_of_this_node_by_their_labels_as_they_are_now() {
    let mut state = state_of(View::Node("n1".to_owned()), Box::new(OnePolicy(false)));
    for kind in Kind::ALL {
        list(&mut state, kind, Vec::new());
    }
    set(&mut state, Kind::Namespaces, namespace("shop", Some("enabled")));
    let cart = PodSpec {
        node: "n1",
        labels: &[("app", "cart")],
        ..POD
    };
    let other = PodSpec {
        labels: &[("app", "web")],
        ..cart.clone()
    };
    let policy = || {
        let text = r#"{"metadata":{"namespace":"shop","name":"closed","resourceVersion":"1"}}"#;
        Object::Json(Box::new(serde_json::from_str(text).unwrap()))
    };
    let listed = |state: &mut State| {
        let mesh = state.take_changed().unwrap();
        (mesh.policies().len(), mesh.workload_by_uid("a").unwrap().policies.len())
    };
    set(&mut state, Kind::Pods, pod(&cart));
    assert_eq!(listed(&mut state), (0, 0));
    set(&mut state, Kind::AuthorizationPolicies, policy());
    assert_eq!(listed(&mut state), (1, 1));
    set(&mut state, Kind::Pods, pod(&other));
    assert_eq!(listed(&mut state), (1, 0));
    set(&mut state, Kind::Pods, pod(&cart));
    assert_eq!(listed(&mut state), (1, 1));
    list(&mut state, Kind::AuthorizationPolicies, Vec::new());
    assert_eq!(listed(&mut state), (0, 0));
}

mod of_services;
mod random;
