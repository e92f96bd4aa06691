//! Labels decide which pods are in the mesh; a condition says which are captured, and who may say so.

use std::thread::sleep;
use std::time::Duration;

use adit_tests::cluster::{Calling, PodSpec, condition};
use serde_json::{Value, json};

use crate::stage::{
    SHOP, address, agent, assert_all_ok, await_access, await_captured, await_that, call, mesh_namespace, meshed, shop,
};

#[test]
fn a_pod_leaves_the_mesh_and_comes_back_by_its_label_and_what_is_open_goes_on() {
    let cluster = shop();
    let namespace = "labels";
    mesh_namespace(cluster, namespace);
    let gate = json!([{"conditionType": "mesh.adit/Captured"}]);
    let pod = PodSpec::new("gated").namespace(namespace).node(1).account("client");
    cluster.create(&pod.with("readinessGates", gate)).unwrap();
    cluster.await_ready(namespace, "pod/gated").unwrap();
    let args = ["pod", "--namespace", namespace, "gated"];
    let label = |label: &str| {
        cluster
            .kubectl(["label", "pod", "--namespace", namespace, "gated", label])
            .unwrap()
    };
    let ready = |wanted: &str| {
        let is_so = |pod: &Value| condition(pod, "Ready") == Some(wanted);
        cluster
            .await_object("the gate", crate::stage::PATIENCE, &args, is_so)
            .unwrap();
    };
    let (far, near) = (address(cluster, SHOP, "far"), address(cluster, SHOP, "near"));
    // One of each begins within the mesh, and one of each outside it.
    let open = |to: &str| {
        Calling::start(
            cluster,
            namespace,
            "gated",
            to,
            &["--one-connection", "--interval", "20", "--seconds", "12"],
        )
        .unwrap()
    };
    let within = [open(&far), open(&near)];
    sleep(Duration::from_secs(2));
    label("mesh.adit/mode=disabled");
    await_captured(cluster, namespace, "gated", false);
    ready("False");
    assert_all_ok(&call(cluster, namespace, "gated", &far, &["--count", "3"]));
    let source = cluster.pod_address(namespace, "gated").unwrap().to_string();
    await_that("calls without identity in the log", || {
        let lines = crate::stage::access(
            cluster,
            2,
            &[("destination.workload", "shop/far"), ("reporter", "destination")],
        );
        let from_here = lines
            .iter()
            .filter(|line| line["source.addr"].starts_with(&format!("{source}:")));
        from_here.filter(|line| !line.contains_key("source.identity")).count() >= 3
    });
    let outside = [open(&far), open(&near)];
    sleep(Duration::from_secs(1));
    label("mesh.adit/mode-");
    await_captured(cluster, namespace, "gated", true);
    ready("True");
    assert_all_ok(&call(cluster, namespace, "gated", &far, &["--count", "3"]));
    await_access(
        cluster,
        1,
        3,
        &[
            ("source.workload", "labels/gated"),
            ("path", "hbone"),
            ("reporter", "source"),
        ],
    );
    for calling in within.into_iter().chain(outside) {
        assert_all_ok(&calling.end().unwrap());
    }
}

#[test]
fn a_namespace_that_is_labelled_takes_its_running_pods_into_the_mesh() {
    let cluster = meshed();
    let namespace = "late";
    cluster.namespace(namespace, &[]).unwrap();
    for (name, value) in [
        ("follows", None),
        ("stays", Some("disabled")),
        ("ahead", Some("enabled")),
    ] {
        let pod = PodSpec::new(name).namespace(namespace).node(2);
        let pod = value.map_or(pod.clone(), |value| pod.label("mesh.adit/mode", value));
        cluster.create(&pod).unwrap();
    }
    for (name, captured) in [("follows", false), ("stays", false), ("ahead", true)] {
        cluster.await_ready(namespace, &format!("pod/{name}")).unwrap();
        await_captured(cluster, namespace, name, captured);
    }
    cluster
        .kubectl(["label", "namespace", namespace, "mesh.adit/mode=enabled"])
        .unwrap();
    for (name, captured) in [("follows", true), ("stays", false), ("ahead", true)] {
        await_captured(cluster, namespace, name, captured);
    }
    cluster
        .kubectl(["label", "namespace", namespace, "mesh.adit/mode-"])
        .unwrap();
    await_captured(cluster, namespace, "follows", false);
    await_captured(cluster, namespace, "ahead", true);
}

#[test]
fn an_agent_may_say_what_is_captured_on_its_own_node_and_nothing_else() {
    let cluster = shop();
    // kubectl reads what it changes, which no agent may do: as the administrator lets it here, admission decides alone.
    let reader = json!({"apiVersion": "v1", "kind": "List", "items": [
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRole",
            "metadata": {"name": "test-reader"},
            "rules": [{"apiGroups": [""], "resources": ["pods", "pods/status"], "verbs": ["get"]}],
        },
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": "test-reader"},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "test-reader"},
            "subjects": [{"kind": "ServiceAccount", "name": "adit-node", "namespace": "adit-system"}],
        },
    ]});
    cluster.apply_json(&reader).unwrap();
    let token = |of: &[&str]| {
        let words = ["create", "token", "adit-node", "--namespace", "adit-system"];
        cluster.kubectl(words.iter().chain(of)).unwrap().trim().to_owned()
    };
    let of_first = agent(cluster, 1);
    let of_first = token(&["--bound-object-kind", "Pod", "--bound-object-name", &of_first]);
    let nobodys = token(&[]);
    // The administrator's certificate would go before the token.
    let config = cluster
        .kubectl(["config", "view", "--raw", "--output", "json"])
        .unwrap();
    let config: Value = serde_json::from_str(&config).unwrap();
    let place = &config["clusters"][0]["cluster"];
    let place = |key: &str| place[key].as_str().unwrap().to_owned();
    let (server, root) = (place("server"), place("certificate-authority"));
    let patch = |token: &str, pod: &str, status: &Value| {
        let patch = json!({ "status": status }).to_string();
        let words = [
            "--kubeconfig",
            "/dev/null",
            "--server",
            &server,
            "--certificate-authority",
            &root,
            "--token",
            token,
            "patch",
            "pod",
            "--namespace",
            SHOP,
            pod,
            "--subresource",
            "status",
            "--type",
            "strategic",
            "--patch",
            &patch,
        ];
        cluster.kubectl(words).map(drop).map_err(|error| format!("{error:#}"))
    };
    let captured = |message: &str| json!({"conditions": [{"type": "mesh.adit/Captured", "status": "True", "reason": "Captured", "message": message}]});
    await_that("the token to be good", || {
        patch(&of_first, "near", &captured("by a test")) == Ok(())
    });
    let ready = json!({"conditions": [{"type": "Ready", "status": "False"}]});
    for (token, pod, status, why) in [
        (&of_first, "far", captured("forged"), "on its own node only"),
        (&nobodys, "near", captured("forged"), "on its own node only"),
        (&of_first, "near", ready, "no condition but mesh.adit/Captured"),
        (
            &of_first,
            "near",
            json!({"podIP": "10.244.1.99"}),
            "nothing in a pod's status but",
        ),
        (
            &of_first,
            "near",
            json!({"phase": "Failed"}),
            "nothing in a pod's status but",
        ),
    ] {
        let refused = patch(token, pod, &status).unwrap_err();
        assert!(refused.contains(why), "{pod} {status}: {refused}");
    }
    for kind in ["clusterrolebinding", "clusterrole"] {
        cluster.kubectl(["delete", kind, "test-reader"]).unwrap();
    }
    let can = |verb: &str, what: &str| {
        let account = "--as=system:serviceaccount:adit-system:adit-node";
        cluster
            .kubectl(["auth", "can-i", verb, what, account, "--all-namespaces"])
            .is_ok()
    };
    assert!(can("list", "pods") && can("watch", "services"));
    for (verb, what) in [
        ("get", "secrets"),
        ("list", "secrets"),
        ("list", "configmaps"),
        ("delete", "pods"),
        ("create", "pods"),
        ("update", "pods"),
        ("patch", "pods"),
        ("create", "pods/exec"),
        ("update", "nodes"),
        ("create", "serviceaccounts/token"),
    ] {
        assert!(!can(verb, what), "{verb} {what}");
    }
}

#[test]
fn a_pod_of_the_nodes_network_is_never_taken_into_the_mesh_and_an_event_says_why() {
    let cluster = shop();
    let namespace = "hosted";
    mesh_namespace(cluster, namespace);
    let pod = PodSpec::new("host").namespace(namespace).node(1).host_network();
    cluster.create(&pod.args(["serve", "8088"])).unwrap();
    cluster.await_ready(namespace, "pod/host").unwrap();
    await_that("an event", || {
        let events = cluster.get(["events.events.k8s.io", "--namespace", namespace]).unwrap();
        let events = events["items"].as_array().unwrap();
        events
            .iter()
            .any(|event| event["reason"] == "HostNetwork" && event["regarding"]["name"] == "host")
    });
    await_captured(cluster, namespace, "host", false);
    // The node's own processes and their peers are none of its business.
    let to = format!("{}:8088", cluster.node(1).address());
    assert_all_ok(&call(cluster, SHOP, "remote", &to, &["--count", "3"]));
}
