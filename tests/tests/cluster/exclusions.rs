//! What a pod's annotations exclude, and what is said of one that is not as it should be.

use adit_tests::cluster::{Cluster, PodSpec};
use serde_json::Value;

use crate::stage::{
    SHOP, access, address, assert_all_ok, await_access, await_captured, await_that, call, identity, mesh_namespace,
    shop, strict,
};

const INBOUND: &str = "mesh.adit/exclude-inbound-ports";

fn annotate(cluster: &Cluster, namespace: &str, pod: &str, annotation: &str) {
    let words = [
        "annotate",
        "pod",
        "--overwrite",
        "--namespace",
        namespace,
        pod,
        annotation,
    ];
    cluster.kubectl(words).unwrap();
}

/// Whether each of some calls is answered; false where none is.
fn is_open(cluster: &Cluster, namespace: &str, from: &str, to: &str) -> bool {
    let calls = call(cluster, namespace, from, to, &["--count", "3"]);
    assert!(calls.ok == 0 || calls.failed == 0, "{calls:?}");
    calls.ok > 0
}

/// The notes of the events of that reason about the pod.
fn notes(cluster: &Cluster, namespace: &str, pod: &str, reason: &str) -> Vec<String> {
    let events = cluster.get(["events.events.k8s.io", "--namespace", namespace]).unwrap();
    let events = events["items"].as_array().unwrap().iter();
    let events = events.filter(|event| event["reason"] == reason && event["regarding"]["name"] == pod);
    let note = |event: &Value| event["note"].as_str().unwrap_or_default().to_owned();
    events.map(note).collect()
}

#[test]
fn annotations_open_ports_and_leave_connections_alone_and_a_bad_one_is_told_of_on_its_pod() {
    let cluster = shop();
    let (namespace, outside) = ("excludes", "excludes-outside");
    mesh_namespace(cluster, namespace);
    cluster.namespace(outside, &[]).unwrap();
    cluster.apply_json(&strict(namespace)).unwrap();
    let server = |name: &str, value: &str| {
        let pod = PodSpec::new(name).namespace(namespace).node(2).account("server");
        let pod = pod.args(["serve", "8080", "9090"]);
        cluster.create(&pod.annotation(INBOUND, value)).unwrap();
    };
    server("good", "9090");
    server("bad", "9090,metrics");
    let caller = PodSpec::new("caller").namespace(namespace).node(1).account("client");
    cluster.create(&caller).unwrap();
    cluster
        .create(&PodSpec::new("stranger").namespace(outside).node(1))
        .unwrap();
    for name in ["good", "bad", "caller"] {
        cluster.await_ready(namespace, &format!("pod/{name}")).unwrap();
        await_captured(cluster, namespace, name, true);
    }
    cluster.await_ready(outside, "pod/stranger").unwrap();
    let at = |name: &str, port: u16| {
        let address = cluster.pod_address(namespace, name).unwrap();
        format!("{address}:{port}")
    };
    for (name, port, open) in [
        ("good", 9090, true),
        ("good", 8080, false),
        ("bad", 9090, false),
        ("bad", 8080, false),
    ] {
        assert_eq!(
            is_open(cluster, outside, "stranger", &at(name, port)),
            open,
            "{name} {port}"
        );
    }
    // Pods of the mesh know of it: in plaintext there, in tunnels elsewhere.
    for (name, port, path) in [("good", 9090, "plain"), ("good", 8080, "hbone"), ("bad", 9090, "hbone")] {
        let to = at(name, port);
        assert_all_ok(&call(cluster, namespace, "caller", &to, &["--count", "3"]));
        let source = [
            ("source.workload", "excludes/caller"),
            ("destination.addr", &to),
            ("path", path),
        ];
        await_access(cluster, 1, 3, &source);
    }

    await_that("an event about the bad one", || {
        let notes = notes(cluster, namespace, "bad", "InvalidAnnotation");
        notes.iter().any(|note| {
            note.contains(INBOUND) && note.contains("\"metrics\" is neither a port") && note.contains("8000-8010")
        })
    });
    assert!(notes(cluster, namespace, "good", "InvalidAnnotation").is_empty());
    annotate(cluster, namespace, "bad", &format!("{INBOUND}=9090"));
    await_that("the mended one to be in force", || {
        call(cluster, outside, "stranger", &at("bad", 9090), &["--count", "1"]).ok == 1
    });
    assert!(!is_open(cluster, outside, "stranger", &at("bad", 8080)));

    // What is dialled, to a pod that asks nobody for an identity.
    let far = address(cluster, SHOP, "far");
    let (ip, _) = far.rsplit_once(':').unwrap();
    annotate(
        cluster,
        namespace,
        "caller",
        &format!("mesh.adit/exclude-outbound-cidrs={ip}/32"),
    );
    let source = cluster.pod_address(namespace, "caller").unwrap().to_string();
    await_that("a call without an identity", || {
        assert_all_ok(&call(cluster, namespace, "caller", &far, &["--count", "1"]));
        let lines = access(
            cluster,
            2,
            &[("reporter", "destination"), ("destination.workload", "shop/far")],
        );
        let mut from_here = lines
            .iter()
            .filter(|line| line["source.addr"].starts_with(&format!("{source}:")));
        from_here.any(|line| !line.contains_key("source.identity"))
    });
    let near = address(cluster, SHOP, "near");
    assert_all_ok(&call(cluster, namespace, "caller", &near, &["--count", "3"]));
    let own = identity(namespace, "client");
    let near_lines = [
        ("source.workload", "excludes/caller"),
        ("source.identity", own.as_str()),
        ("destination.workload", "shop/near"),
    ];
    await_access(cluster, 1, 3, &near_lines);
}
