use super::{
    namespace as read_namespace, node as read_node, pod as read_pod, service as read_service, slice as read_slice, *,
};
use crate::mesh::source::kubernetes::settings::EnrolmentLabel;

// As a real API server has sent them.
const PODS: &[u8] = include_bytes!("../testdata/pods.pb");
const NAMESPACES: &[u8] = include_bytes!("../testdata/namespaces.pb");
const NODES: &[u8] = include_bytes!("../testdata/nodes.pb");
const SERVICES: &[u8] = include_bytes!("../testdata/services.pb");
const SLICES: &[u8] = include_bytes!("../testdata/endpointslices.pb");

fn label() -> EnrolmentLabel {
    "mesh.adit/mode=enabled".parse().unwrap()
}

fn items(list: &'static [u8]) -> Vec<Bytes> {
    wire::List::decode(wire::open(Bytes::from_static(list)).unwrap())
        .unwrap()
        .items
}

fn ips(texts: &[&str]) -> Vec<IpAddr> {
    texts.iter().map(|text| text.parse().unwrap()).collect()
}

#[test]
fn a_recorded_pod_is_read_and_of_another_nodes_only_what_is_needed() {
    let label = label();
    let [agent, cart] = items(PODS).try_into().unwrap();
    let here = View {
        label: &label,
        node: Some("w0"),
    };
    let pod = read_pod(cart.clone(), here).unwrap();
    assert_eq!(
        (pod.name.as_str(), pod.namespace.as_str(), pod.node.as_str()),
        ("cart", "rec", "w0")
    );
    assert_eq!((pod.service_account.as_str(), pod.uid.len()), ("default", 36));
    assert_eq!(pod.addresses, ips(&["10.128.0.5", "fd00::5"]));
    assert!(pod.captured && pod.ready && !pod.host_network && !pod.finished && !pod.deleting);
    assert_eq!(pod.mode, None);
    assert!(pod.created > 1_700_000_000);
    assert_eq!(pod.labels["tier"], "backend");
    let details = pod.details.unwrap();
    assert_eq!(details.annotations.len(), 1);
    assert_eq!(details.annotations["mesh.adit/exclude-inbound-ports"], "9090");
    assert_eq!(
        details
            .captured
            .as_ref()
            .map(|captured| (captured.status, &*captured.message)),
        Some((true, "by its node"))
    );
    assert_eq!((details.runtime_class, details.static_uid), (None, None));
    let port: crate::mesh::PortRange = "9090".parse().unwrap();
    assert_eq!(pod.exclusions.inbound_ports, [port]);

    let elsewhere = View {
        label: &label,
        node: Some("w1"),
    };
    let pod = read_pod(cart, elsewhere).unwrap();
    assert_eq!(pod.details, None);
    // Whoever dials it is to know.
    assert_eq!(pod.exclusions.inbound_ports, [port]);
    assert_eq!(pod.labels.keys().collect::<Vec<_>>(), ["app", "version"]);

    let pod = read_pod(agent, elsewhere).unwrap();
    assert!(pod.host_network && !pod.captured && !pod.ready);
    assert_eq!(pod.addresses, ips(&[]));
    assert_eq!(pod.mode, Some(false));
    assert!(pod.details.unwrap().host_network);
}

#[test]
fn a_recorded_namespace_node_service_and_slice_are_read() {
    let label = label();
    let view = View {
        label: &label,
        node: None,
    };
    let namespace = read_namespace(items(NAMESPACES).remove(0), view).unwrap();
    assert_eq!((namespace.name.as_str(), namespace.mode), ("rec", Some(true)));

    let node = read_node(items(NODES).remove(0)).unwrap();
    assert_eq!((node.name.as_str(), node.zone.as_str()), ("w0", "z0"));
    assert_eq!(node.pod_ranges, ["10.128.0.0/24".parse().unwrap()]);

    let service = read_service(items(SERVICES).remove(0)).unwrap();
    assert_eq!(service.addresses, ips(&["10.96.7.7"]));
    // The port of UDP is nobody's business here.
    assert_eq!(service.ports, [("http".to_owned(), 80)]);
    assert_eq!(
        (service.distribution, service.affinity),
        (TrafficDistribution::SameNodeOnly, true)
    );

    let slice = read_slice(items(SLICES).remove(0)).unwrap();
    assert_eq!(
        (slice.service.as_str(), &slice.ports[..]),
        ("cart", &[("http".to_owned(), 8080)][..])
    );
    let [pod, raw] = &slice.endpoints[..] else {
        panic!("not two")
    };
    assert_eq!(pod.pod.as_deref(), Some("11111111-2222-3333-4444-555555555555"));
    assert_eq!(
        (pod.readiness, pod.node.as_str(), pod.zone.as_str()),
        (Readiness::Ready, "w0", "z0")
    );
    assert_eq!((raw.pod.as_deref(), raw.readiness), (None, Readiness::Draining));
}

fn entry(key: &'static str, value: &'static str) -> Bytes {
    let (key, value) = (Bytes::from_static(key.as_bytes()), Bytes::from_static(value.as_bytes()));
    wire::Entry { key, value }.encode_to_vec().into()
}

/// A running pod on `n2`, changed.
fn changed(change: impl FnOnce(&mut wire::ObjectMeta, &mut wire::PodSpec, &mut wire::PodStatus)) -> Pod {
    let mut meta = wire::ObjectMeta {
        name: "cart".into(),
        namespace: "shop".into(),
        uid: "u".into(),
        ..Default::default()
    };
    let mut spec = wire::PodSpec {
        node_name: "n2".into(),
        service_account_name: "default".into(),
        ..Default::default()
    };
    let mut status = wire::PodStatus {
        phase: "Running".into(),
        pod_ip: "10.0.0.1".into(),
        ..Default::default()
    };
    change(&mut meta, &mut spec, &mut status);
    let pod = wire::Pod {
        metadata: Some(meta),
        spec: Some(spec),
        status: Some(status),
    };
    let label = label();
    let view = View {
        label: &label,
        node: Some("n1"),
    };
    read_pod(pod.encode_to_vec().into(), view).unwrap()
}

fn condition(name: &'static str, status: &'static str) -> wire::PodCondition {
    wire::PodCondition {
        r#type: name.into(),
        status: status.into(),
        ..Default::default()
    }
}

#[test]
fn an_address_is_a_pods_own_while_it_runs_in_its_own_namespace() {
    let addresses = |change: &dyn Fn(&mut wire::ObjectMeta, &mut wire::PodSpec, &mut wire::PodStatus)| {
        changed(|meta, spec, status| change(meta, spec, status)).addresses
    };
    assert_eq!(addresses(&|_, _, _| {}), ips(&["10.0.0.1"]));
    assert_eq!(addresses(&|_, spec, _| spec.host_network = true), ips(&[]));
    for phase in ["Succeeded", "Failed"] {
        assert_eq!(addresses(&|_, _, status| status.phase = phase.into()), ips(&[]));
    }
    for phase in ["Pending", "Running", "Unknown", ""] {
        assert_eq!(
            addresses(&|_, _, status| status.phase = phase.into()),
            ips(&["10.0.0.1"])
        );
    }
    let several = |texts: &'static [&'static str]| {
        addresses(&|_, _, status| {
            status.pod_ips = texts.iter().map(|ip| wire::PodIp { ip: (*ip).into() }).collect();
        })
    };
    assert_eq!(several(&["10.0.0.2", "fd00::2"]), ips(&["10.0.0.2", "fd00::2"]));
    // What is no address of anybody is none.
    assert_eq!(
        several(&["", "nonsense", "127.0.0.1", "::", "224.0.0.1", "::ffff:10.0.0.3"]),
        ips(&["10.0.0.3"])
    );
}

#[test]
fn captured_is_what_an_agent_has_said() {
    let captured = |conditions: &'static [(&'static str, &'static str)],
                    annotation: Option<(&'static str, &'static str)>| {
        changed(|meta, _, status| {
            status.conditions = conditions
                .iter()
                .map(|(name, status)| condition(name, status))
                .collect();
            meta.annotations
                .extend(annotation.map(|(key, value)| entry(key, value)));
        })
        .captured
    };
    assert!(captured(&[("Ready", "True"), (CAPTURED, "True")], None));
    assert!(captured(&[], Some((REDIRECTION, "enabled"))));
    assert!(!captured(&[], None));
    assert!(!captured(&[(CAPTURED, "False")], None));
    assert!(!captured(&[(CAPTURED, "Unknown")], None));
    assert!(!captured(&[], Some((REDIRECTION, "disabled"))));
}

#[test]
fn of_annotations_that_are_not_as_they_should_be_nothing_is_taken_and_the_pods_own_node_knows_why() {
    let read = |value: &'static str| {
        changed(|meta, spec, _| {
            spec.node_name = "n1".into();
            meta.annotations.push(entry("mesh.adit/exclude-outbound-ports", "5432"));
            meta.annotations.push(entry("mesh.adit/exclude-inbound-ports", value));
        })
    };
    let good = read("9090");
    assert!(!good.exclusions.inbound_ports.is_empty() && good.exclusions.has_outbound());
    let bad = read("9090,");
    assert!(bad.exclusions.inbound_ports.is_empty() && bad.exclusions.has_outbound());
    for (pod, faults) in [(good, 0), (bad, 1)] {
        assert_eq!(pod.details.unwrap().faults.len(), faults);
    }
}

#[test]
fn a_pod_that_leaves_is_not_ready_whatever_its_condition_says() {
    let ready = |deleting: bool, phase: &'static str, status_of: &'static str| {
        changed(|meta, _, status| {
            meta.deletion_timestamp = deleting.then_some(wire::Time { seconds: 1 });
            status.phase = phase.into();
            status.conditions = vec![condition("Ready", status_of)];
        })
        .ready
    };
    assert!(ready(false, "Running", "True"));
    assert!(!ready(false, "Running", "False"));
    assert!(!ready(true, "Running", "True"));
    assert!(!ready(false, "Failed", "True"));
}

#[test]
fn a_label_wants_a_pod_does_not_or_says_nothing() {
    let mode = |labels: &'static [(&'static str, &'static str)]| {
        changed(|meta, _, _| meta.labels = labels.iter().map(|(key, value)| entry(key, value)).collect()).mode
    };
    assert_eq!(mode(&[("mesh.adit/mode", "enabled")]), Some(true));
    assert_eq!(mode(&[("mesh.adit/mode", "disabled")]), Some(false));
    assert_eq!(mode(&[("mesh.adit/mode", "")]), Some(false));
    assert_eq!(mode(&[("istio.io/dataplane-mode", "ambient")]), None);
}

#[test]
fn endpoints_are_ready_drain_or_are_neither() {
    let of = |ready, serving, terminating| {
        readiness(wire::EndpointConditions {
            ready,
            serving,
            terminating,
        })
    };
    use Readiness::{Draining, NotReady, Ready};
    for (ready, serving, terminating, expected) in [
        (None, None, None, Ready),
        (Some(true), Some(true), Some(false), Ready),
        // A service that publishes what is not ready.
        (Some(true), Some(false), Some(true), Ready),
        (Some(false), Some(true), Some(true), Draining),
        (Some(false), Some(false), Some(true), NotReady),
        (Some(false), None, Some(true), NotReady),
        (Some(false), Some(true), Some(false), NotReady),
        (Some(false), None, None, NotReady),
    ] {
        assert_eq!(
            of(ready, serving, terminating),
            expected,
            "{ready:?} {serving:?} {terminating:?}"
        );
    }
}

#[test]
fn services_without_addresses_of_their_own_have_none() {
    let addresses = |spec: wire::ServiceSpec| {
        let metadata = wire::ObjectMeta {
            name: "s".into(),
            namespace: "shop".into(),
            uid: "u".into(),
            ..Default::default()
        };
        let service = wire::Service {
            metadata: Some(metadata),
            spec: Some(spec),
        };
        read_service(service.encode_to_vec().into()).unwrap().addresses
    };
    let ip = |ip: &'static str| wire::ServiceSpec {
        cluster_ip: ip.into(),
        ..Default::default()
    };
    assert_eq!(addresses(ip("10.96.0.1")), ips(&["10.96.0.1"]));
    assert_eq!(addresses(ip("None")), ips(&[]));
    assert_eq!(addresses(ip("")), ips(&[]));
    assert_eq!(
        addresses(wire::ServiceSpec {
            cluster_ips: vec!["10.96.0.1".into(), "fd96::1".into()],
            ..ip("10.96.0.1")
        }),
        ips(&["10.96.0.1", "fd96::1"])
    );
    assert_eq!(
        addresses(wire::ServiceSpec {
            r#type: "ExternalName".into(),
            ..ip("10.96.0.1")
        }),
        ips(&[])
    );
}

#[test]
fn what_is_malformed_is_refused_and_not_read_as_something_else() {
    assert_eq!(
        wire::open(Bytes::from_static(b"{\"kind\":\"PodList\"}")),
        Err(DecodeError::NoEnvelope)
    );
    let label = label();
    let view = View {
        label: &label,
        node: None,
    };
    assert!(matches!(
        read_pod(Bytes::from_static(b"\xff\xff\xff"), view),
        Err(DecodeError::Protobuf(_))
    ));
    assert_eq!(read_pod(Bytes::new(), view), Err(DecodeError::Lacks("uid")));
    let whole = items(PODS).remove(0);
    for length in 0..whole.len() {
        let _ = read_pod(whole.slice(..length), view);
    }
}
