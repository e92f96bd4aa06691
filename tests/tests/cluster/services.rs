//! Services of every kind, called from a pod in the mesh; and one whose pods are exchanged while it is called.

use std::collections::BTreeSet;

use adit_tests::cluster::{Calling, Cluster, Node, PodSpec, Service, owned_prefix};
use serde_json::{Value, json};

use crate::stage::{PATIENCE, assert_all_ok, await_access, await_captured, await_that, call, mesh_namespace, meshed};

/// A namespace in the mesh with `web`, which calls.
fn namespace(name: &str) -> &'static Cluster {
    let cluster = meshed();
    mesh_namespace(cluster, name);
    create(cluster, name, &PodSpec::new("web").node(1).account("client"), "web");
    cluster
}

fn create(cluster: &Cluster, namespace: &str, pod: &PodSpec, name: &str) {
    cluster.create(&pod.clone().namespace(namespace)).unwrap();
    cluster.await_ready(namespace, &format!("pod/{name}")).unwrap();
    await_captured(cluster, namespace, name, true);
}

fn server(name: &str, node: u8) -> PodSpec {
    PodSpec::new(name)
        .node(node)
        .account("server")
        .args(["serve", "8080"])
        .label("role", "server")
        .container("ports", json!([{"name": "web", "containerPort": 8080}]))
}

#[test]
fn a_service_of_any_kind_reaches_the_pods_that_it_is_for() {
    let shop = "services";
    let cluster = namespace(shop);
    create(cluster, shop, &server("near", 1), "near");
    create(cluster, shop, &server("far", 2), "far");
    let never = json!({"tcpSocket": {"port": 1}, "periodSeconds": 1});
    let unready = PodSpec::new("unready")
        .namespace(shop)
        .node(2)
        .account("server")
        .args(["serve", "8080"]);
    cluster.create(&unready.container("readinessProbe", never)).unwrap();
    let far = cluster.pod_address(shop, "far").unwrap();

    let port = |target: Value| json!([{"port": 80, "targetPort": target}]);
    let servers = json!({"role": "server"});
    let of = |more: Value| {
        let mut spec = json!({"selector": servers, "ports": port(8080.into())});
        spec.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        spec
    };
    let (both, near, only_far) = (&["far", "near"][..], &["near"][..], &["far"][..]);
    let kinds = [
        ("plain", of(json!({})), both),
        ("named", of(json!({"ports": port("web".into())})), both),
        ("node-port", of(json!({"type": "NodePort"})), both),
        ("local", of(json!({"internalTrafficPolicy": "Local"})), near),
        ("same-zone", of(json!({"trafficDistribution": "PreferSameZone"})), near),
        ("no-selector", json!({"ports": port(8080.into())}), only_far),
        (
            "not-ready",
            of(json!({"selector": {"app": "unready"}, "publishNotReadyAddresses": true})),
            &["unready"],
        ),
    ];
    let service = |name: &str, spec: &Value| {
        let metadata = json!({"name": name, "namespace": shop});
        cluster
            .apply_json(&json!({"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec}))
            .unwrap();
    };
    for (name, spec, _) in &kinds {
        service(name, spec);
    }
    service("sticky", &of(json!({"sessionAffinity": "ClientIP"})));
    service("headless", &of(json!({"clusterIP": "None"})));
    let slice = json!({
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": "by-hand", "namespace": shop, "labels": {"kubernetes.io/service-name": "no-selector"}},
        "addressType": "IPv4",
        "ports": [{"port": 8080, "protocol": "TCP"}],
        "endpoints": [{"addresses": [far]}],
    });
    cluster.apply_json(&slice).unwrap();
    await_captured(cluster, shop, "unready", true);

    let servers_of = |to: &str| {
        let calls = call(cluster, shop, "web", to, &["--count", "40", "--interval", "1"]);
        (calls.failed, calls.servers.into_keys().collect::<BTreeSet<_>>())
    };
    for (name, _, expected) in &kinds {
        let to = format!("{}:80", cluster_ip(cluster, shop, name));
        let expected = expected.iter().map(|name| (*name).to_owned()).collect();
        let mut last = (0, BTreeSet::new());
        // What has just been made may not have reached the node yet.
        let begin = std::time::Instant::now();
        while last != (0, BTreeSet::clone(&expected)) {
            assert!(
                begin.elapsed() < PATIENCE / 4,
                "{name} at {to}: {last:?} instead of {expected:?}"
            );
            last = servers_of(&to);
        }
    }
    let sticky = format!("{}:80", cluster_ip(cluster, shop, "sticky"));
    let (failed, one) = servers_of(&sticky);
    assert_eq!((failed, one.len()), (0, 1), "{one:?}");
    assert_eq!(servers_of(&sticky), (0, one), "another one the second time");

    // The names of a headless service are addresses of pods.
    let all = [
        "endpointslices",
        "--namespace",
        shop,
        "--selector=kubernetes.io/service-name=headless",
    ];
    let slices = cluster.get(all).unwrap();
    let endpoints = slices["items"].as_array().unwrap().iter();
    let endpoints = endpoints
        .filter(|slice| slice["addressType"] == "IPv4")
        .flat_map(|slice| slice["endpoints"].as_array().unwrap());
    let addresses: Vec<&str> = endpoints
        .map(|endpoint| endpoint["addresses"][0].as_str().unwrap())
        .collect();
    assert_eq!(addresses.len(), 2, "{slices}");
    for address in addresses {
        assert_all_ok(&call(
            cluster,
            shop,
            "web",
            &format!("{address}:8080"),
            &["--count", "5"],
        ));
    }

    // From outside the cluster, by either node.
    let node_port = cluster.get(["service", "--namespace", shop, "node-port"]).unwrap()["spec"]["ports"][0]["nodePort"]
        .as_u64()
        .unwrap();
    for node in cluster.nodes() {
        let mut answered = BTreeSet::new();
        for _ in 0..20 {
            let page = format!("http://{}:{node_port}/", node.address());
            let answer = cluster
                .control_plane()
                .run(["curl", "--silent", "--show-error", "--fail", "--max-time", "5", &page])
                .unwrap();
            answered.insert(answer.split(' ').next().unwrap_or_default().to_owned());
        }
        assert_eq!(
            answered,
            ["far".to_owned(), "near".to_owned()].into(),
            "by {}",
            node.name()
        );
    }
    cluster.kubectl(["delete", "namespace", "--wait=false", shop]).unwrap();
}

#[test]
fn a_rolling_update_fails_none_of_200_new_connections_a_second() {
    let shop = "rolling";
    let cluster = namespace(shop);
    create(
        cluster,
        shop,
        &PodSpec::new("remote").node(2).account("client"),
        "remote",
    );
    let pod = |version: &str| {
        PodSpec::new("server")
            .namespace(shop)
            .account("server")
            .args(["serve", "8080"])
            .label("version", version)
            .container(
                "readinessProbe",
                json!({"tcpSocket": {"port": 8080}, "periodSeconds": 1}),
            )
            // As applications do that are to be exchanged unnoticed: nodes hear of it that they are leaving first.
            .container("lifecycle", json!({"preStop": {"sleep": {"seconds": 2}}}))
            .with("terminationGracePeriodSeconds", 10.into())
    };
    let deploy = |version: &str| {
        let mut deployment = pod(version).deployment(4);
        deployment["spec"]["strategy"] = json!({"rollingUpdate": {"maxSurge": 2, "maxUnavailable": 0}});
        cluster.apply_json(&deployment).unwrap();
        let status = [
            "rollout",
            "status",
            "--namespace",
            shop,
            "deployment/server",
            "--timeout=90s",
        ];
        cluster.kubectl(status).unwrap();
    };
    deploy("one");
    cluster.apply_json(&pod("one").service(80, 8080)).unwrap();
    let to = format!("{}:80", cluster_ip(cluster, shop, "server"));
    await_that("the service to answer", || {
        call(cluster, shop, "web", &to, &["--count", "5"]).failed == 0
    });
    // 100 a second from each node.
    let calling = ["web", "remote"]
        .map(|from| Calling::start(cluster, shop, from, &to, &["--seconds", "18", "--interval", "10"]).unwrap());
    std::thread::sleep(std::time::Duration::from_secs(1));
    deploy("two");
    for calling in calling {
        let calls = calling.end().unwrap();
        println!("{calls:?}");
        assert_all_ok(&calls);
        assert!(calls.servers.len() >= 6, "{calls:?}");
    }
    cluster.kubectl(["delete", "namespace", "--wait=false", shop]).unwrap();
}

/// Whether a process of the node is answered.
fn answers(node: &Node, to: &str) -> bool {
    let dial = format!(
        "exec 3<>/dev/tcp/{} && echo hello >&3 && head -n 1 <&3 | sed 's/^/answer: /'",
        to.replace(':', "/")
    );
    let dial = format!("timeout 2 bash -c {dial:?} 2>&1; true");
    node.run(["bash", "-c", &dial]).unwrap().contains("answer: ")
}

#[test]
fn a_services_address_leads_to_its_pods_on_a_node_without_kube_proxy() {
    // A cluster of its own: with the last rule that translates, connections that are translated end without a word, such as
    // those of agents and the authority to the API server, and that is noticed after minutes only.
    let cluster = &Cluster::up(owned_prefix('k')).unwrap();
    cluster.install_adit(&[]).unwrap();
    let shop = "alone-services";
    mesh_namespace(cluster, shop);
    create(cluster, shop, &PodSpec::new("web").node(1).account("client"), "web");
    for (name, number) in [("near", 1), ("far", 2)] {
        create(cluster, shop, &server(name, number), name);
        let service = PodSpec::new(name).namespace(shop).service(80, 8080);
        cluster.apply_json(&service).unwrap();
    }
    let to = ["near", "far"].map(|name| (name, format!("{}:80", cluster_ip(cluster, shop, name))));
    let node = cluster.node(1);
    for (name, to) in &to {
        await_that(&format!("kube-proxy to know {name}"), || answers(&node, to));
    }
    node.kill(Service::KubeProxy).unwrap();
    for family in ["ip", "ip6"] {
        node.run(["nft", "delete", "table", family, "kube-proxy"]).unwrap();
    }
    for (name, to) in &to {
        assert!(!answers(&node, to), "something else knows where {to} leads");
        let calls = call(cluster, shop, "web", to, &["--count", "20", "--interval", "5"]);
        assert_all_ok(&calls);
        assert_eq!(calls.servers, [((*name).to_owned(), 20)].into(), "{calls:?}");
    }
    let workload = format!("{shop}/web");
    for (name, path) in [("near", "direct"), ("far", "hbone")] {
        let service = format!("{shop}/{name}");
        let fields = [
            ("source.workload", &*workload),
            ("service", &*service),
            ("path", path),
            ("how", "fin"),
        ];
        await_access(cluster, 1, 20, &fields);
    }
}

fn cluster_ip(cluster: &Cluster, namespace: &str, service: &str) -> String {
    let service = cluster.get(["service", "--namespace", namespace, service]).unwrap();
    service["spec"]["clusterIP"].as_str().unwrap().to_owned()
}
