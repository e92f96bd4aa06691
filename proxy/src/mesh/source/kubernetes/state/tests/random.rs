//! Whatever comes, in whatever order, and whatever is missed until the next list: what is known is the truth.

use std::collections::BTreeMap;

use serde_json::json;

use super::*;
use crate::mesh::Changes;

/// A thousand pods and more of the rest; and how often the world changes between two comparisons.
const PODS: usize = 1000;
const SERVICES: usize = 300;
const POLICIES: usize = 200;
const CHANGES: usize = 400;
const ROUNDS: usize = 8;
/// Names as the API would never admit them, too: a name is a name.
const NAMES: [&str; 8] = ["a", "a.b", "a-b", "A_b", "ü ß", "%2Fx", "\"quoted\"\\", "a:b;c=d,e"];
const NAMESPACES: [&str; 5] = ["shop", "shop-a", "a", "bank", "adit-system"];

/// What there is, by kind, namespace and name.
type World = BTreeMap<(Kind, String, String), Object>;

fn named(rng: &mut fastrand::Rng, number: usize) -> String {
    format!("{}{number}", NAMES[rng.usize(..NAMES.len())])
}

fn one<'a>(rng: &mut fastrand::Rng, of: &[&'a str]) -> &'a str {
    of[rng.usize(..of.len())]
}

/// An object of a kind and a number, of which there may be one before: another in nearly everything, and perhaps in its uid.
fn random(rng: &mut fastrand::Rng, kind: Kind, number: usize) -> ((Kind, String, String), Object) {
    let own = &mut fastrand::Rng::with_seed(number as u64 * 8 + kind as u64);
    let (namespace, name) = match kind {
        Kind::Namespaces => ("", NAMESPACES[number % NAMESPACES.len()].to_owned()),
        Kind::Nodes | Kind::ServiceRanges => ("", format!("n{number}")),
        _ => (one(own, &NAMESPACES), named(own, number)),
    };
    let uid = format!("{}-{name}-{}", kind.name(), rng.u8(..3));
    let mode = one(rng, &["enabled", "enabled", "disabled", ""]);
    let app = one(rng, &["cart", "web", "db"]);
    let mut labels = vec![("app", app)];
    if !mode.is_empty() && (kind == Kind::Namespaces || rng.u8(..4) == 0) {
        labels.push(("mesh.adit/mode", mode));
    }
    let zone = one(rng, &["z1", "z2"]);
    if kind == Kind::Nodes {
        labels.push(("topology.kubernetes.io/zone", zone));
    }
    let of_service = named(own, number / 2);
    if kind == Kind::EndpointSlices {
        labels.push(("kubernetes.io/service-name", &of_service));
    }
    let mut metadata = meta(namespace, &name, &uid, &labels).unwrap();
    metadata.creation_timestamp = Some(wire::Time { seconds: rng.i64(1..5) });
    let text = |text: String| Bytes::from(text.into_bytes());
    let pod_address = |rng: &mut fastrand::Rng| format!("10.{}.0.{}", rng.u8(..4), rng.u8(1..200));
    let cidrs = |rng: &mut fastrand::Rng| match rng.u8(..4) {
        0 => vec!["10.96.0.0/12".into()],
        // Where not all addresses lie.
        1 => vec!["10.0.0.0/16".into()],
        _ => vec!["10.0.0.0/8".into(), "fd00::/8".into()],
    };
    let object = match kind {
        Kind::Namespaces => object(&wire::Namespace {
            metadata: Some(metadata),
        }),
        Kind::Nodes => object(&wire::Node {
            metadata: Some(metadata),
            spec: Some(wire::NodeSpec {
                pod_cidrs: cidrs(rng),
                ..Default::default()
            }),
            status: None,
        }),
        Kind::ServiceRanges => object(&wire::ServiceCidr {
            metadata: Some(metadata),
            spec: Some(wire::ServiceCidrSpec { cidrs: cidrs(rng) }),
        }),
        Kind::Pods => {
            metadata.deletion_timestamp = (rng.u8(..8) == 0).then_some(wire::Time { seconds: 1 });
            let addresses = [pod_address(rng), format!("fd00::{}", rng.u8(1..200))];
            let known = rng.usize(..=2);
            object(&wire::Pod {
                metadata: Some(metadata),
                spec: Some(wire::PodSpec {
                    service_account_name: app.as_bytes().to_vec().into(),
                    node_name: text(format!("n{}", rng.u8(..5))),
                    host_network: rng.u8(..10) == 0,
                    ..Default::default()
                }),
                status: Some(wire::PodStatus {
                    phase: one(rng, &["Pending", "Running", "Running", "Succeeded", "Failed"])
                        .as_bytes()
                        .to_vec()
                        .into(),
                    pod_ips: addresses
                        .into_iter()
                        .take(known)
                        .map(|ip| wire::PodIp { ip: text(ip) })
                        .collect(),
                    conditions: ["mesh.adit/Captured", "Ready"]
                        .map(|which| wire::PodCondition {
                            r#type: which.into(),
                            status: if rng.bool() { "True" } else { "False" }.into(),
                            ..Default::default()
                        })
                        .into(),
                    ..Default::default()
                }),
            })
        }
        Kind::Services => object(&wire::Service {
            metadata: Some(metadata),
            spec: Some(wire::ServiceSpec {
                // Its own, which no other service has.
                cluster_ip: match rng.u8(..8) {
                    0 => "None".into(),
                    _ => text(format!("10.9{}.{}.{}", 6 + rng.u8(..2), number / 200, number % 200 + 1)),
                },
                ports: vec![wire::ServicePort {
                    name: "http".into(),
                    port: i32::from(rng.u8(80..83)),
                    ..Default::default()
                }],
                ..Default::default()
            }),
        }),
        Kind::EndpointSlices => object(&wire::EndpointSlice {
            metadata: Some(metadata),
            address_type: "IPv4".into(),
            ports: vec![wire::EndpointPort {
                name: one(rng, &["http", "http", "other"]).as_bytes().to_vec().into(),
                protocol: "TCP".into(),
                port: Some(i32::from(rng.u8(1..4))),
            }],
            endpoints: (0..rng.usize(..4))
                .map(|_| wire::Endpoint {
                    addresses: vec![text(pod_address(rng))],
                    node_name: text(format!("n{}", rng.u8(..5))),
                    ..Default::default()
                })
                .collect(),
        }),
        Kind::AuthorizationPolicies | Kind::PeerAuthentications => {
            let mut spec = json!({});
            if rng.bool() {
                spec["selector"] = json!({"matchLabels": {"app": app}});
            }
            match kind {
                Kind::PeerAuthentications => {
                    spec["mtls"] = json!({"mode": one(rng, &["STRICT", "PERMISSIVE", "UNSET"])})
                }
                _ => {
                    spec["action"] = one(rng, &["ALLOW", "DENY", "AUDIT"]).into();
                    spec["rules"] = json!([{"to": [{"operation": {"ports": [rng.u8(1..4).to_string()]}}]}]);
                }
            }
            let created = format!("2026-01-0{}T00:00:00Z", rng.u8(1..5));
            let metadata = json!({"namespace": namespace, "name": name, "uid": uid, "creationTimestamp": created, "resourceVersion": "1"});
            Object::Json(Box::new(json!({"metadata": metadata, "spec": spec})))
        }
    };
    ((kind, namespace.to_owned(), name), object)
}

fn how_many(kind: Kind) -> usize {
    match kind {
        Kind::Namespaces | Kind::Nodes => 5,
        Kind::ServiceRanges => 2,
        Kind::Pods => PODS,
        Kind::Services => SERVICES,
        Kind::EndpointSlices => SERVICES * 2,
        Kind::AuthorizationPolicies | Kind::PeerAuthentications => POLICIES,
    }
}

fn of_kind(world: &World, kind: Kind) -> Vec<Object> {
    let objects = world.iter().filter(|((known, ..), _)| *known == kind);
    objects.map(|(_, object)| object.clone()).collect()
}

/// What a state knows that has been told of the world as it is, once.
fn told_once(world: &World) -> Mesh {
    let mut state = state_of(View::Node("n1".to_owned()), Box::new(Conversion::new("adit-system")));
    for kind in Kind::ALL {
        list(&mut state, kind, of_kind(world, kind));
    }
    state.take_changed().unwrap()
}

/// That both say the same.
fn assert_same(known: &Mesh, truth: &Mesh, when: &str) {
    let mut changes = known.changes_since(truth);
    // These are compared one by one.
    changes.policies = false;
    assert_eq!(changes, Changes::default(), "{when}");
    let policies = |mesh: &Mesh| -> BTreeMap<_, _> {
        let all = mesh.policies().iter();
        all.map(|policy| (Arc::clone(policy.key()), Arc::clone(policy)))
            .collect()
    };
    assert_eq!(policies(known), policies(truth), "{when}");
    let nodes = |mesh: &Mesh| -> BTreeMap<_, _> {
        mesh.nodes()
            .map(|node| (Arc::clone(&node.name), Arc::clone(node)))
            .collect()
    };
    assert_eq!(nodes(known), nodes(truth), "{when}");
    for node in ["n0", "n1", "n2", "n3", "n4"] {
        let on = |mesh: &Mesh| -> BTreeMap<_, _> {
            let on = mesh.local_workloads(node);
            on.map(|workload| (Arc::clone(&workload.uid), Arc::clone(workload)))
                .collect()
        };
        assert_eq!(on(known), on(truth), "{when}, on {node}");
    }
}

#[test]
fn what_has_come_and_gone_in_any_order_and_across_lists_is_known_as_if_told_once() {
    let seed = fastrand::u64(..);
    let rng = &mut fastrand::Rng::with_seed(seed);
    let mut world = World::new();
    for kind in Kind::ALL {
        world.extend((0..how_many(kind)).map(|number| random(rng, kind, number)));
    }
    let mut state = state_of(View::Node("n1".to_owned()), Box::new(Conversion::new("adit-system")));
    let mut kinds = Kind::ALL;
    rng.shuffle(&mut kinds);
    for kind in kinds {
        list(&mut state, kind, of_kind(&world, kind));
    }
    assert_same(
        &state.take_changed().unwrap(),
        &told_once(&world),
        &format!("at first, seed {seed}"),
    );

    for round in 0..=ROUNDS {
        // In the last round everything goes, one by one.
        let all: Vec<_> = world.keys().cloned().collect();
        let mut order: Vec<usize> = (0..all.len()).collect();
        rng.shuffle(&mut order);
        let count = if round == ROUNDS { order.len() } else { CHANGES };
        for index in order.into_iter().take(count) {
            // A watch that is cut for a while misses things; a list tells.
            let missed = rng.u8(..4) == 0;
            let (kind, ..) = all[index];
            if round == ROUNDS || rng.bool() {
                let gone = world.remove(&all[index]).unwrap();
                if !missed {
                    state.apply(Event::Gone(kind, gone));
                }
            } else {
                let number = rng.usize(..how_many(kind));
                let (key, now) = random(rng, kind, number);
                // One that comes again under its name is another: its deletion is told first, where it is told.
                let before = world.insert(key, now.clone());
                let uid = |object: &Object| match object {
                    Object::Protobuf(bytes) => objects::named(bytes.clone()).unwrap().uid,
                    Object::Json(object) => object["metadata"]["uid"].to_string(),
                };
                if !missed {
                    if let Some(before) = before.filter(|before| uid(before) != uid(&now)) {
                        state.apply(Event::Gone(kind, before));
                    }
                    set(&mut state, kind, now);
                }
            }
            // What is published in between must not matter.
            if rng.u8(..16) == 0 {
                state.take_changed();
            }
        }
        let mut kinds = Kind::ALL;
        rng.shuffle(&mut kinds);
        for kind in kinds {
            list(&mut state, kind, of_kind(&world, kind));
        }
        // Where nothing has changed since, what was published last stands.
        let known = state.take_changed().unwrap_or_else(|| state.mesh.clone());
        assert_same(&known, &told_once(&world), &format!("round {round}, seed {seed}"));
    }
    assert!(world.is_empty());
    assert_eq!(
        (state.mesh.workload_count(), state.mesh.policies().len()),
        (0, 0),
        "seed {seed}"
    );
}

#[test]
fn what_is_told_to_be_gone_and_was_never_known_or_waits_changes_nothing_else() {
    let mut state = state();
    set(&mut state, Kind::Namespaces, namespace("shop", Some("enabled")));
    set(&mut state, Kind::Pods, pod(&POD));
    state.take_changed().unwrap();
    // Of the same name and address, and yet another.
    let unknown = PodSpec { uid: "b", ..POD };
    let other_namespace = object(&wire::Namespace {
        metadata: meta("", "shop", "another", &[]),
    });
    state.apply(Event::Gone(Kind::Pods, pod(&unknown)));
    state.apply(Event::Gone(Kind::Namespaces, other_namespace));
    state.apply(Event::Gone(Kind::Nodes, namespace("n7", None)));
    assert!(state.take_changed().is_none());
    // A pod that waits for its namespace goes before that comes.
    let waits = |uid| {
        let mut metadata = meta("later", uid, uid, &[]).unwrap();
        metadata.creation_timestamp = Some(wire::Time { seconds: 1 });
        object(&wire::Pod {
            metadata: Some(metadata),
            spec: Some(wire::PodSpec {
                node_name: "n1".into(),
                ..Default::default()
            }),
            status: None,
        })
    };
    for uid in ["goes", "stays"] {
        set(&mut state, Kind::Pods, waits(uid));
    }
    state.apply(Event::Gone(Kind::Pods, waits("goes")));
    set(&mut state, Kind::Namespaces, namespace("later", Some("enabled")));
    let mesh = state.take_changed().unwrap();
    let mut uids: Vec<_> = mesh.workloads().map(|workload| &*workload.uid).collect();
    uids.sort_unstable();
    assert_eq!(uids, ["a", "stays"]);
}
