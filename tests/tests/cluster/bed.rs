//! The cluster itself: what every other test relies on.

use adit_tests::cluster::{BUSYBOX, Cluster, PodSpec, Service, owned_prefix, residue};
use adit_tests::tool::Calls;
use serde_json::json;

use crate::world::World;

#[test]
fn pods_call_each_other_within_a_node_and_across_directly_and_by_service() {
    let world = World::new("traffic");
    let (cluster, namespace) = (world.cluster, world.namespace.as_str());
    let pod = |name: &str| PodSpec::new(name).namespace(namespace);
    for pod in [
        pod("near").node(1).args(["serve", "8080"]),
        pod("far").node(2).args(["serve", "8080"]),
        pod("client").node(1),
    ] {
        cluster.create(&pod).unwrap();
    }
    for name in ["near", "far"] {
        cluster.apply_json(&pod(name).service(80, 8080)).unwrap();
    }
    for name in ["near", "far", "client"] {
        cluster.await_ready(namespace, &format!("pod/{name}")).unwrap();
    }
    let calls = |to: &str| {
        let words = ["/tool", "call", to, "--count", "5"];
        Calls::last(&cluster.exec(namespace, "client", words).unwrap()).unwrap()
    };
    for name in ["near", "far"] {
        let pod = cluster.get(["pod", "--namespace", namespace, name]).unwrap();
        for address in pod["status"]["podIPs"].as_array().unwrap() {
            let address: std::net::IpAddr = address["ip"].as_str().unwrap().parse().unwrap();
            let to = std::net::SocketAddr::new(address, 8080).to_string();
            assert_eq!(calls(&to).servers, [(name.to_owned(), 5)].into(), "{to}");
        }
        let service = cluster.get(["service", "--namespace", namespace, name]).unwrap();
        let to = format!("{}:80", service["spec"]["clusterIP"].as_str().unwrap());
        assert_eq!(calls(&to).servers, [(name.to_owned(), 5)].into(), "{to}");
    }
}

#[test]
fn a_pods_token_is_the_audiences_and_names_pod_and_node() {
    let world = World::new("token");
    let (cluster, namespace) = (world.cluster, world.namespace.as_str());
    let pod = PodSpec::new("holder")
        .namespace(namespace)
        .node(2)
        .image(BUSYBOX)
        .args(["-c", "sleep 3600"]);
    let sources = json!([{"serviceAccountToken": {"audience": "adit-ca", "expirationSeconds": 3600, "path": "token"}}]);
    let pod = pod
        .with("volumes", json!([{"name": "token", "projected": {"sources": sources}}]))
        .container("volumeMounts", json!([{"name": "token", "mountPath": "/token"}]));
    cluster.create(&pod).unwrap();
    cluster.await_ready(namespace, "pod/holder").unwrap();
    let token = cluster.exec(namespace, "holder", ["cat", "/token/token"]).unwrap();
    let review = |audience: &str| -> serde_json::Value {
        let review = json!({"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview",
                            "spec": {"token": token.trim(), "audiences": [audience]}});
        let answer = cluster.feed(&["create", "--output", "json", "--filename", "-"], &review.to_string());
        serde_json::from_str(&answer.unwrap()).unwrap()
    };
    let status = &review("adit-ca")["status"];
    assert_eq!(status["authenticated"], true, "{status}");
    assert_eq!(
        status["user"]["username"],
        format!("system:serviceaccount:{namespace}:default")
    );
    let extra = &status["user"]["extra"];
    assert_eq!(extra["authentication.kubernetes.io/pod-name"], json!(["holder"]));
    assert_eq!(extra["authentication.kubernetes.io/node-name"], json!(["n2"]));
    assert_ne!(review("somebody-else")["status"]["authenticated"], true);
}

#[test]
fn nodes_have_zones_and_the_ranges_of_their_pods() {
    let world = World::new("nodes");
    for (number, v4) in [(1, "10.244.1.0/24"), (2, "10.244.2.0/24")] {
        let node = world.cluster.get(["node", &format!("n{number}")]).unwrap();
        assert_eq!(
            node["metadata"]["labels"]["topology.kubernetes.io/zone"],
            format!("zone-n{number}")
        );
        assert_eq!(
            node["spec"]["podCIDRs"],
            json!([v4, format!("fd00:244:0:{number}::/64")])
        );
    }
}

#[test]
fn a_cluster_survives_its_programs_and_leaves_nothing_beside_another() {
    let world = World::new("beside");
    let prefix = owned_prefix('u');
    let cluster = Cluster::up(&prefix).unwrap();
    assert!(!residue(&prefix).is_empty());
    cluster
        .create(&PodSpec::new("web").node(1).args(["serve", "8080"]))
        .unwrap();
    cluster.await_ready("default", "pod/web").unwrap();
    let pid = cluster.node(1).pids(Service::Kubelet).unwrap();
    cluster.node(1).restart(Service::Kubelet).unwrap();
    assert_ne!(cluster.node(1).pids(Service::Kubelet).unwrap(), pid);
    cluster.stop_api_server().unwrap();
    assert!(cluster.kubectl(["get", "nodes", "--request-timeout=2s"]).is_err());
    cluster.start_api_server().unwrap();
    cluster.node(1).crash().unwrap();
    cluster.revive(1).unwrap();
    let restarted = |pod: &serde_json::Value| {
        let status = &pod["status"]["containerStatuses"][0];
        status["ready"] == true && status["restartCount"].as_u64() > Some(0)
    };
    let patience = std::time::Duration::from_secs(60);
    cluster
        .await_object("the pod to be back", patience, &["pod", "web"], restarted)
        .unwrap();
    drop(cluster);
    assert_eq!(residue(&prefix), Vec::<String>::new());
    world.cluster.await_nodes_ready().unwrap();
}
