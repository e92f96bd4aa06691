//! Pods of a labelled namespace speak as themselves, from their first instruction on.

use adit_tests::cluster::{Cluster, PodSpec, TOOL};
use adit_tests::tool::FirstConnect;
use serde_json::{Value, json};

use crate::stage::{
    SHOP, access, address, assert_all_ok, await_access, await_captured, await_that, call, identity, is_long,
    mesh_namespace, shop, strict_server,
};

#[test]
fn pods_speak_directly_within_a_node_and_by_a_tunnel_between_nodes_each_as_itself() {
    let cluster = shop();
    let (client, server) = (identity(SHOP, "client"), identity(SHOP, "server"));
    let both = |path, from: &'static str, to: &'static str| {
        [
            ("path", path),
            ("source.workload", from),
            ("destination.workload", to),
            ("how", "fin"),
        ]
    };
    for (from, to, node, path) in [
        ("client", "near", 1, "direct"),
        ("client", "far", 1, "hbone"),
        ("remote", "near", 2, "hbone"),
        ("remote", "far", 2, "direct"),
    ] {
        let calls = call(cluster, SHOP, from, &address(cluster, SHOP, to), &["--count", "3"]);
        assert_eq!((calls.ok, calls.failed), (3, 0), "{from} to {to}: {calls:?}");
        assert_eq!(calls.servers, [(to.to_owned(), 3)].into());
        let (from, to) = (&*format!("{SHOP}/{from}").leak(), &*format!("{SHOP}/{to}").leak());
        let mut ends = vec![(node, "source")];
        if path == "hbone" {
            ends.push((3 - node, "destination"));
        }
        for (node, reporter) in ends {
            let fields: Vec<_> = both(path, from, to)
                .into_iter()
                .chain([("reporter", reporter)])
                .collect();
            for line in await_access(cluster, node, 3, &fields) {
                assert_eq!(
                    (&line["source.identity"], &line["destination.identity"]),
                    (&client, &server),
                    "{line:?}"
                );
            }
        }
    }
}

/// A pod each of whose containers connects before it does anything else.
fn starters(namespace: &str, to: &str, node: u8) -> Vec<Value> {
    let words = ["first-connect", to];
    let stays = ["first-connect", to, "--stay"];
    let pod = |name: &str| {
        PodSpec::new(&format!("{name}-{node}"))
            .namespace(namespace)
            .node(node)
            .account("client")
    };
    let container =
        |name: &str, args: &[&str]| json!({"name": name, "image": TOOL, "imagePullPolicy": "Never", "args": args});
    let mut sidecar = container("sidecar", &stays);
    sidecar["restartPolicy"] = "Always".into();
    let hook = json!({"postStart": {"exec": {"command": ["/tool", "first-connect", to]}}});
    // Fails where one of its calls does.
    let slow = ["/tool", "call", to, "--seconds", "6", "--interval", "100"];
    let slow = json!({"postStart": {"exec": {"command": slow}}});
    let job = pod("brief").with("restartPolicy", "Never".into()).args(words);
    vec![
        pod("plain").args(stays).manifest(),
        pod("init")
            .with("initContainers", json!([container("init", &words)]))
            .args(stays)
            .manifest(),
        pod("sidecar")
            .with("initContainers", json!([sidecar]))
            .args(stays)
            .manifest(),
        pod("hook").container("lifecycle", hook).manifest(),
        pod("slow").container("lifecycle", slow).manifest(),
        json!({
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": format!("brief-{node}"), "namespace": namespace},
            "spec": {"backoffLimit": 0, "template": job.template()},
        }),
    ]
}

/// What the containers of the namespace's pods that are labelled so have found when they first connected.
fn first_connects(cluster: &Cluster, namespace: &str, selector: &str) -> Vec<FirstConnect> {
    let words = [
        "logs",
        "--namespace",
        namespace,
        "--all-containers",
        "--tail=-1",
        "--max-log-requests=200",
        "--selector",
        selector,
    ];
    let said = cluster.kubectl(words).unwrap();
    let lines = said.lines().filter(|line| line.starts_with('{'));
    lines.map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// That the pod was never called but by pods that said who they are. How often it was.
fn assert_no_stranger(cluster: &Cluster, node: u8, destination: &str) -> usize {
    let lines = access(cluster, node, &[("destination.workload", destination)]);
    for line in &lines {
        assert!(line.contains_key("source.identity"), "{line:?}");
        assert!(
            matches!(line["path"].as_str(), "direct" | "local" | "hbone"),
            "{line:?}"
        );
    }
    lines.len()
}

#[test]
fn the_first_instruction_of_whatever_runs_in_a_pod_connects_as_the_pod() {
    let cluster = shop();
    let namespace = "first";
    let to = strict_server(cluster, namespace);
    let items: Vec<Value> = [1, 2].iter().flat_map(|node| starters(namespace, &to, *node)).collect();
    cluster
        .apply_json(&json!({"apiVersion": "v1", "kind": "List", "items": items}))
        .unwrap();
    // Until its hook has ended, a pod has no address as far as the API knows: what it sends is its own all the same.
    for node in [1, 2] {
        let workload = format!("{namespace}/slow-{node}");
        let fields = [("source.workload", &*workload), ("reporter", "source"), ("how", "fin")];
        await_access(cluster, node, 2, &fields);
        let pod = ["pod", "--namespace", namespace, &format!("slow-{node}")];
        let status = cluster.get(pod).unwrap()["status"].clone();
        assert_eq!(
            (&status["podIP"], &status["phase"]),
            (&Value::Null, &json!("Pending")),
            "{status}"
        );
    }
    let pods = ["pod", "--namespace", namespace, "--selector=app!=server"];
    await_that("all to have started", || {
        let pods = cluster.get(pods).unwrap();
        let pods = pods["items"].as_array().unwrap();
        let phase = |pod: &&Value| {
            matches!(
                pod["status"]["phase"].as_str(),
                Some("Running" | "Succeeded" | "Failed")
            )
        };
        pods.len() == 12 && pods.iter().filter(phase).count() == 12
    });
    // One of plain, two of those with an init container or a sidecar, one of the Job; and the hook's, which says nothing.
    await_that("all to have connected", || {
        first_connects(cluster, namespace, "app!=server").len() == 12
    });
    for found in first_connects(cluster, namespace, "app!=server") {
        assert!(found.ok, "{found:?}");
    }
    for pod in cluster.get(pods).unwrap()["items"].as_array().unwrap() {
        let status = &pod["status"]["containerStatuses"][0];
        assert_eq!(
            (&status["restartCount"], &pod["status"]["reason"]),
            (&json!(0), &Value::Null),
            "{pod}"
        );
    }
    await_that("14 calls in the log", || {
        assert_no_stranger(cluster, 2, "first/server") >= 14
    });
}

#[test]
fn pods_that_start_at_once_connect_as_themselves_or_not_at_all() {
    let cluster = shop();
    let namespace = "burst";
    let to = strict_server(cluster, namespace);
    let count = if is_long() { 200 } else { 40 };
    let pod = PodSpec::new("many")
        .account("client")
        .with("restartPolicy", "OnFailure".into());
    let job = json!({
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "many", "namespace": namespace},
        "spec": {
            "completions": count,
            "parallelism": count.min(60),
            "template": pod.args(["first-connect", &to]).template(),
        },
    });
    cluster.apply_json(&job).unwrap();
    await_that("all to have ended", || {
        cluster.get(["job", "--namespace", namespace, "many"]).unwrap()["status"]["succeeded"] == count
    });
    let found = first_connects(cluster, namespace, "app=many");
    // Where the agent is late, the kernel refuses.
    let late: Vec<_> = found.iter().filter(|found| !found.ok).collect();
    let refused = |found: &&FirstConnect| found.detail.contains("not permitted");
    assert!(
        late.iter().all(refused) && found.len() >= count,
        "{} of {count}: {late:?}",
        found.len()
    );
    println!("{} of {count} were refused at first", late.len());
    await_that("all calls in the log", || {
        assert_no_stranger(cluster, 2, "burst/server") >= count - late.len()
    });
    cluster.delete(namespace, &["job", "many"]).unwrap();
}

#[test]
fn a_pod_whose_sandbox_is_made_anew_is_captured_in_its_new_network_namespace() {
    let cluster = shop();
    let namespace = "sandbox";
    mesh_namespace(cluster, namespace);
    let pod = PodSpec::new("web").namespace(namespace).node(1).account("server");
    cluster.create(&pod.args(["serve", "8080"])).unwrap();
    await_captured(cluster, namespace, "web", true);
    let args = ["pod", "--namespace", namespace, "web"];
    let uid = cluster.get(args).unwrap()["metadata"]["uid"]
        .as_str()
        .unwrap()
        .to_owned();
    let find = format!(
        "for procs in $(find /sys/fs/cgroup/unified/kubepods -path '*pod{uid}*' -name cgroup.procs); do \
         for pid in $(cat $procs); do tr '\\0' ' ' < /proc/$pid/cmdline | grep -q pause && kill -9 $pid; done; done; true"
    );
    cluster.node(1).run(["sh", "-c", &find]).unwrap();
    let restarted = |pod: &Value| {
        let status = &pod["status"]["containerStatuses"][0];
        status["ready"] == true && status["restartCount"].as_u64() > Some(0)
    };
    cluster
        .await_object("the pod to be back", crate::stage::PATIENCE, &args, restarted)
        .unwrap();
    await_captured(cluster, namespace, "web", true);
    assert_eq!(cluster.get(args).unwrap()["metadata"]["uid"], uid);
    let to = address(cluster, namespace, "web");
    await_that("calls to be answered", || {
        call(cluster, SHOP, "remote", &to, &["--count", "1"]).failed == 0
    });
    for (from, node, path) in [("client", 1, "direct"), ("remote", 2, "hbone")] {
        assert_all_ok(&call(cluster, SHOP, from, &to, &["--count", "3"]));
        let fields = [
            ("path", path),
            ("destination.workload", "sandbox/web"),
            ("reporter", "source"),
        ];
        await_access(cluster, node, 3, &fields);
    }
    let to = address(cluster, SHOP, "far");
    assert_all_ok(&call(cluster, namespace, "web", &to, &["--count", "3"]));
    let fields = [
        ("path", "hbone"),
        ("source.workload", "sandbox/web"),
        ("reporter", "source"),
    ];
    await_access(cluster, 1, 3, &fields);
}
