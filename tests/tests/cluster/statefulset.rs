//! A pod that is made anew under its old name.

use std::collections::BTreeSet;

use adit_tests::cluster::{Calling, Cluster, PodSpec, condition};
use serde_json::{Value, json};

use crate::stage::{
    Line, PATIENCE, SHOP, access, address, assert_all_ok, await_access, identity, mesh_namespace, seconds_of, shop,
};

const NAMESPACE: &str = "stateful";

/// Waits for the pod that comes after this one, and calls it at once from both nodes. Gives the new one.
fn await_next(cluster: &Cluster, before: &Value, account: &str) -> Value {
    let uid = &before["metadata"]["uid"];
    let is_next = |pod: &Value| pod["metadata"]["uid"] != *uid && condition(pod, "Ready") == Some("True");
    let args = ["pod", "--namespace", NAMESPACE, "web-0"];
    let next = cluster
        .await_object("web-0 to be there again", PATIENCE, &args, is_next)
        .unwrap();
    let to = address(cluster, NAMESPACE, "web-0");
    let more = ["--count", "5", "--interval", "20"];
    let calling = ["client", "remote"].map(|from| Calling::start(cluster, SHOP, from, &to, &more).unwrap());
    for calling in calling {
        let calls = calling.end().unwrap();
        assert_all_ok(&calls);
        assert_eq!(calls.servers, [("web-0".to_owned(), 5)].into(), "{to} {calls:?}");
    }
    for (from, node) in [("shop/client", 1), ("shop/remote", 2)] {
        let fields = [
            ("source.workload", from),
            ("reporter", "source"),
            ("destination.addr", &to),
            ("destination.identity", &identity(NAMESPACE, account)),
            ("how", "fin"),
        ];
        await_access(cluster, node, 5, &fields);
    }
    next
}

#[test]
fn a_pod_of_a_stateful_set_is_called_as_what_it_is_now_as_soon_as_it_is_ready_again() {
    let cluster = shop();
    mesh_namespace(cluster, NAMESPACE);
    let web = PodSpec::new("web").namespace(NAMESPACE).node(2).account("server");
    let gate = json!([{"conditionType": "mesh.adit/Captured"}]);
    let probe = json!({"tcpSocket": {"port": 8080}, "periodSeconds": 1});
    let web = web
        .args(["serve", "8080"])
        .with("readinessGates", gate)
        .container("readinessProbe", probe);
    let set = |web: &PodSpec| {
        json!({
            "apiVersion": "apps/v1",
            "kind": "StatefulSet",
            "metadata": {"name": "web", "namespace": NAMESPACE},
            "spec": {
                "serviceName": "web",
                "replicas": 1,
                "selector": {"matchLabels": {"app": "web"}},
                "template": web.template(),
            },
        })
    };
    cluster.apply_json(&web.service(8080, 8080)).unwrap();
    cluster.apply_json(&set(&web)).unwrap();
    let first = await_next(cluster, &Value::Null, "server");

    let service = cluster.get(["service", "--namespace", NAMESPACE, "web"]).unwrap();
    let by_service = format!("{}:8080", service["spec"]["clusterIP"].as_str().unwrap());
    let all_the_time = ["client", "remote"].map(|from| {
        let more = ["--interval", "25", "--seconds", "25", "--timeout", "1000"];
        Calling::start(cluster, SHOP, from, &by_service, &more).unwrap()
    });
    // On the same node, with another address.
    cluster.delete(NAMESPACE, &["pod", "web-0"]).unwrap();
    let second = await_next(cluster, &first, "server");
    assert_ne!(second["status"]["podIP"], first["status"]["podIP"]);
    // With the same address, as somebody else.
    let address = second["status"]["podIP"].as_str().unwrap().to_owned();
    let (range, last) = address.rsplit_once('.').unwrap();
    let before = format!("{range}.{}", last.parse::<u8>().unwrap() - 1);
    // Neighbours learn of another machine at an address that they know only after half a minute.
    let next = format!(
        "for last in /var/lib/cni/networks/*/last_reserved_ip.0; do echo -n {before} > $last; done; \
         ip neigh flush dev cni0; for netns in /run/netns/cni-*; do nsenter --net=$netns ip neigh flush dev eth0; done"
    );
    let other = web.clone().account("client");
    cluster
        .kubectl(["scale", "--namespace", NAMESPACE, "statefulset/web", "--replicas=0"])
        .unwrap();
    cluster
        .kubectl([
            "wait",
            "--namespace",
            NAMESPACE,
            "--for=delete",
            "pod/web-0",
            "--timeout=60s",
        ])
        .unwrap();
    cluster.node(2).run(["sh", "-c", &next]).unwrap();
    cluster.apply_json(&set(&other)).unwrap();
    let third = await_next(cluster, &second, "client");
    assert_eq!(third["status"]["podIP"], second["status"]["podIP"]);
    // On the other node.
    cluster.apply_json(&set(&web.clone().node(1))).unwrap();
    let fourth = await_next(cluster, &third, "server");
    assert_eq!(fourth["spec"]["nodeName"], "n1");
    for calling in all_the_time {
        let calls = calling.end().unwrap();
        assert!(calls.ok > 100 && calls.servers.len() == 1, "{calls:?}");
    }
    // Whoever was verified at the other end of a tunnel was who had the address then.
    let ends = |node, reporter| {
        let fields = [
            ("path", "hbone"),
            ("reporter", reporter),
            ("destination.workload", "stateful/web-0"),
        ];
        access(cluster, node, &fields)
    };
    // A port may come again, for another connection.
    let is_same = |one: &Line, other: &Line| {
        let apart = (seconds_of(one) - seconds_of(other)).abs();
        ["source.addr", "destination.addr"]
            .iter()
            .all(|field| one[*field] == other[*field])
            && apart < 1.0
    };
    let (sent, taken) = (ends(1, "source"), ends(2, "destination"));
    let mut seen = BTreeSet::new();
    for taken in taken {
        for sent in sent.iter().filter(|sent| is_same(sent, &taken)) {
            let (expected, was) = (&sent["destination.identity"], &taken["destination.identity"]);
            assert_eq!(expected, was, "{sent:?} {taken:?}");
            seen.insert(was.clone());
        }
    }
    let both = ["server", "client"].map(|account| identity(NAMESPACE, account));
    assert_eq!(seen, both.into());
    cluster
        .kubectl(["delete", "namespace", "--wait=false", NAMESPACE])
        .unwrap();
}
