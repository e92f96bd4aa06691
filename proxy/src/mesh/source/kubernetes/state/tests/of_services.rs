//! Services and their endpoints, as they come and go.

use std::net::SocketAddr;

use super::*;
use crate::mesh::{EndpointError, Workload, test_workload};

fn service(name: &str, address: &'static str) -> Object {
    object(&wire::Service {
        metadata: meta("shop", name, &format!("svc-{name}"), &[]),
        spec: Some(wire::ServiceSpec {
            cluster_ip: address.into(),
            ports: [("http", 80), ("metrics", 9090)]
                .map(|(name, port)| wire::ServicePort {
                    name: name.into(),
                    port,
                    ..Default::default()
                })
                .into(),
            ..Default::default()
        }),
    })
}

type Conditions = (Option<bool>, Option<bool>, Option<bool>);
const READY: Conditions = (Some(true), Some(true), Some(false));
const DRAINING: Conditions = (Some(false), Some(true), Some(true));
const GONE: Conditions = (Some(false), Some(false), Some(true));

/// A slice of `cart`: its ports, and its endpoints by address, pod and conditions.
fn slice(
    name: &str,
    ports: &[(&'static str, i32)],
    endpoints: &[(&'static str, Option<&'static str>, Conditions)],
) -> Object {
    let endpoint =
        |(address, pod, (ready, serving, terminating)): &(&'static str, Option<&'static str>, Conditions)| {
            wire::Endpoint {
                addresses: vec![(*address).into()],
                conditions: Some(wire::EndpointConditions {
                    ready: *ready,
                    serving: *serving,
                    terminating: *terminating,
                }),
                target_ref: pod.map(|uid| wire::ObjectReference {
                    kind: "Pod".into(),
                    uid: uid.into(),
                }),
                ..Default::default()
            }
        };
    object(&wire::EndpointSlice {
        metadata: meta(
            "shop",
            name,
            &format!("slice-{name}"),
            &[("kubernetes.io/service-name", "cart")],
        ),
        address_type: "IPv4".into(),
        ports: ports
            .iter()
            .map(|(name, port)| wire::EndpointPort {
                name: (*name).into(),
                protocol: "TCP".into(),
                port: Some(*port),
            })
            .collect(),
        endpoints: endpoints.iter().map(endpoint).collect(),
    })
}

fn client() -> Workload {
    test_workload("shop", "client", "10.0.9.9")
}

/// Where connections to a port of `cart` go, sorted.
fn leads(mesh: &Mesh, port: u16) -> Vec<String> {
    let service = mesh.service_by_name("shop/cart").unwrap();
    let dialled = SocketAddr::new(ip("10.96.0.1"), port);
    match mesh.endpoints(service, dialled, &client(), &mut fastrand::Rng::new()) {
        Ok(endpoints) => {
            let mut all: Vec<String> = endpoints.iter().map(|(_, addr)| addr.to_string()).collect();
            all.sort_unstable();
            all
        }
        Err(EndpointError::NoEndpoints { .. }) => Vec::new(),
        Err(error) => panic!("{error}"),
    }
}

fn with_pods(pods: &[(&'static str, &'static str)]) -> State {
    let mut state = state();
    set(&mut state, Kind::Namespaces, namespace("shop", Some("enabled")));
    for (uid, address) in pods {
        set(&mut state, Kind::Pods, pod(&PodSpec { uid, address, ..POD }));
    }
    state
}

const HTTP: &[(&str, i32)] = &[("http", 8080)];

#[test]
fn endpoints_come_in_any_order_and_are_used_once_their_pod_is_known() {
    let mut state = with_pods(&[]);
    set(
        &mut state,
        Kind::EndpointSlices,
        slice("1", HTTP, &[("10.0.0.1", Some("a"), READY)]),
    );
    set(&mut state, Kind::Services, service("cart", "10.96.0.1"));
    assert_eq!(leads(&state.take_changed().unwrap(), 80), [] as [&str; 0]);
    set(&mut state, Kind::Pods, pod(&PodSpec { address: "", ..POD }));
    assert_eq!(leads(&state.take_changed().unwrap(), 80), [] as [&str; 0]);
    set(&mut state, Kind::Pods, pod(&POD));
    assert_eq!(leads(&state.take_changed().unwrap(), 80), ["10.0.0.1:8080"]);
    // Its address is another's by now.
    set(
        &mut state,
        Kind::Pods,
        pod(&PodSpec {
            uid: "b",
            created: 900,
            ..POD
        }),
    );
    assert_eq!(leads(&state.take_changed().unwrap(), 80), [] as [&str; 0]);
    state.apply(Event::Gone(Kind::Services, service("cart", "10.96.0.1")));
    assert!(state.take_changed().unwrap().service_by_addr(ip("10.96.0.1")).is_none());
}

#[test]
fn each_slice_has_its_own_ports() {
    let mut state = with_pods(&[("a", "10.0.0.1"), ("b", "10.0.0.2")]);
    set(&mut state, Kind::Services, service("cart", "10.96.0.1"));
    set(
        &mut state,
        Kind::EndpointSlices,
        slice("1", HTTP, &[("10.0.0.1", Some("a"), READY)]),
    );
    let both = [("http", 8081), ("metrics", 9091)];
    set(
        &mut state,
        Kind::EndpointSlices,
        slice("2", &both, &[("10.0.0.2", Some("b"), READY)]),
    );
    let mesh = state.take_changed().unwrap();
    assert_eq!(leads(&mesh, 80), ["10.0.0.1:8080", "10.0.0.2:8081"]);
    assert_eq!(leads(&mesh, 9090), ["10.0.0.2:9091"]);
    // A changed target port.
    set(
        &mut state,
        Kind::EndpointSlices,
        slice("1", &[("http", 8090)], &[("10.0.0.1", Some("a"), READY)]),
    );
    assert_eq!(
        leads(&state.take_changed().unwrap(), 80),
        ["10.0.0.1:8090", "10.0.0.2:8081"]
    );
    state.apply(Event::Gone(Kind::EndpointSlices, slice("2", &both, &[])));
    assert_eq!(leads(&state.take_changed().unwrap(), 80), ["10.0.0.1:8090"]);
    // As after a relist.
    list(&mut state, Kind::EndpointSlices, Vec::new());
    assert_eq!(leads(&state.take_changed().unwrap(), 80), [] as [&str; 0]);
}

#[test]
fn what_drains_is_used_only_where_nothing_is_ready() {
    let mut state = with_pods(&[("a", "10.0.0.1"), ("b", "10.0.0.2"), ("c", "10.0.0.3")]);
    set(&mut state, Kind::Services, service("cart", "10.96.0.1"));
    for (row, conditions, expected) in [
        (1, [READY, DRAINING, GONE], &["10.0.0.1:8080"][..]),
        (2, [GONE, DRAINING, DRAINING], &["10.0.0.2:8080", "10.0.0.3:8080"]),
        (3, [GONE, GONE, GONE], &[]),
    ] {
        let [a, b, c] = conditions;
        let endpoints = [
            ("10.0.0.1", Some("a"), a),
            ("10.0.0.2", Some("b"), b),
            ("10.0.0.3", Some("c"), c),
        ];
        set(&mut state, Kind::EndpointSlices, slice("1", HTTP, &endpoints));
        assert_eq!(leads(&state.take_changed().unwrap(), 80), expected, "row {row}");
    }
}

#[test]
fn an_endpoint_that_moves_between_slices_is_there_once_and_ready_where_one_says_so() {
    let mut state = with_pods(&[("a", "10.0.0.1")]);
    set(&mut state, Kind::Services, service("cart", "10.96.0.1"));
    set(
        &mut state,
        Kind::EndpointSlices,
        slice("1", HTTP, &[("10.0.0.1", Some("a"), GONE)]),
    );
    set(
        &mut state,
        Kind::EndpointSlices,
        slice("2", HTTP, &[("10.0.0.1", Some("a"), READY)]),
    );
    assert_eq!(leads(&state.take_changed().unwrap(), 80), ["10.0.0.1:8080"]);
}

#[test]
fn endpoints_that_are_no_pods_are_reached_as_they_are() {
    let mut state = with_pods(&[("a", "10.0.0.1")]);
    set(&mut state, Kind::Services, service("cart", "10.96.0.1"));
    let endpoints = [("192.0.2.1", None, READY), ("10.0.0.1", None, READY)];
    set(&mut state, Kind::EndpointSlices, slice("1", HTTP, &endpoints));
    let mesh = state.take_changed().unwrap();
    assert_eq!(leads(&mesh, 80), ["10.0.0.1:8080", "192.0.2.1:8080"]);
    // One that is a pod's address is that pod, whatever the slice says.
    let service = mesh.service_by_name("shop/cart").unwrap();
    let dialled = SocketAddr::new(ip("10.96.0.1"), 80);
    let endpoints = mesh
        .endpoints(service, dialled, &client(), &mut fastrand::Rng::new())
        .unwrap();
    for (workload, addr) in endpoints {
        let uid = workload.as_ref().map(|workload| &*workload.uid);
        assert_eq!(uid, (addr.ip() == ip("10.0.0.1")).then_some("a"));
    }
}

#[test]
fn a_pod_of_the_hosts_network_is_an_endpoint_at_its_nodes_address() {
    let mut state = with_pods(&[]);
    set(&mut state, Kind::Services, service("cart", "10.96.0.1"));
    set(
        &mut state,
        Kind::EndpointSlices,
        slice("1", HTTP, &[("192.0.2.7", Some("h"), READY)]),
    );
    assert_eq!(leads(&state.take_changed().unwrap(), 80), [] as [&str; 0]);
    let host = PodSpec {
        uid: "h",
        address: "192.0.2.7",
        host_network: true,
        ..POD
    };
    set(&mut state, Kind::Pods, pod(&host));
    let mesh = state.take_changed().unwrap();
    assert_eq!(leads(&mesh, 80), ["192.0.2.7:8080"]);
    assert!(mesh.workload_by_addr(ip("192.0.2.7")).is_none());
}
