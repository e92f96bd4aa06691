//! Adit's life on a cluster by Helm: installed, upgraded, rolled back, changed and removed while pods speak.

use std::time::{Duration, Instant};

use adit_tests::cluster::{Calling, Cluster, PodSpec, SYSTEM, helm_words, owned_prefix};
use adit_tests::tool::Calls;
use serde_json::Value;

use crate::stage::{address, agents, await_captured, await_that, call, is_leaving, is_ready, mesh_namespace, strict};

const SHOP: &str = "shop";
/// Pods that call all the time, over one connection or over new ones, within the node and to the other one.
const CALLERS: [(&str, u8, &str, bool); 6] = [
    ("new-across", 1, "far", false),
    ("new-back", 2, "near", false),
    ("new-within", 1, "near", false),
    ("long-across", 1, "far", true),
    ("long-back", 2, "near", true),
    ("long-within", 1, "near", true),
];

fn calls(cluster: &Cluster, pod: &str) -> Calls {
    let said = cluster.kubectl(["logs", "--namespace", SHOP, "--tail=1", pod]).unwrap();
    Calls::last(&said).unwrap()
}

/// No call so far has failed, and calls go on.
fn assert_none_failed(cluster: &Cluster, when: &str) {
    let before = CALLERS.map(|(pod, ..)| calls(cluster, pod));
    for ((pod, ..), before) in CALLERS.iter().zip(before) {
        let mut now = before.clone();
        await_that(&format!("{pod} to go on {when}"), || {
            now = calls(cluster, pod);
            now.calls > before.calls || now.failed > 0
        });
        assert_eq!(now.failed, 0, "{pod} {when}: {now:?}");
        println!(
            "{when}: {pod}: {} calls, none failed, the slowest took {} ms",
            now.calls, now.slowest_ms
        );
    }
}

fn helm(cluster: &Cluster, words: &[&str]) {
    cluster
        .helm(words.iter().chain(&["--namespace", SYSTEM]).copied())
        .unwrap();
}

/// The level at which each agent logs that is to stay.
fn log_levels(cluster: &Cluster) -> Vec<String> {
    let level = |pod: &Value| {
        let settings = pod["spec"]["containers"][0]["env"].as_array().unwrap();
        let level = settings.iter().find(|setting| setting["name"] == "ADIT_LOG_LEVEL");
        level.unwrap()["value"].as_str().unwrap().to_owned()
    };
    agents(cluster)
        .iter()
        .filter(|pod| !is_leaving(pod))
        .map(level)
        .collect()
}

/// Runs what exchanges the agents, and waits until new ones are ready on both nodes and the old ones told to go.
fn exchange(cluster: &Cluster, change: impl FnOnce()) {
    let uid = |pod: &Value| pod["metadata"]["uid"].as_str().unwrap().to_owned();
    let before: Vec<String> = agents(cluster).iter().map(uid).collect();
    let begin = Instant::now();
    change();
    await_that("new agents on both nodes", || {
        let (old, new): (Vec<Value>, Vec<Value>) =
            agents(cluster).into_iter().partition(|pod| before.contains(&uid(pod)));
        new.iter().filter(|pod| is_ready(pod)).count() == 2 && old.iter().all(is_leaving)
    });
    println!("exchanged after {:?}", begin.elapsed());
}

#[test]
fn adit_comes_changes_and_goes_under_load_and_leaves_nothing() {
    let prefix = owned_prefix('h');
    let cluster = Cluster::up(&prefix).unwrap();
    let cluster = &cluster;
    cluster.install_adit(&[]).unwrap();

    mesh_namespace(cluster, SHOP);
    let server = |name: &str, node| {
        PodSpec::new(name)
            .namespace(SHOP)
            .node(node)
            .account("server")
            .args(["serve", "8080"])
    };
    for (name, node) in [("near", 1), ("far", 2)] {
        cluster.create(&server(name, node)).unwrap();
        cluster.await_ready(SHOP, &format!("pod/{name}")).unwrap();
        await_captured(cluster, SHOP, name, true);
    }
    cluster.apply_json(&strict(SHOP)).unwrap();
    cluster.create(&PodSpec::new("out").node(1)).unwrap();
    cluster.await_ready("default", "pod/out").unwrap();
    let out = || {
        let to = address(cluster, SHOP, "far");
        call(cluster, "default", "out", &to, &["--count", "3", "--timeout", "2000"])
    };
    await_that("nobody to be let in from outside", || out().ok == 0);
    for (name, node, to, long) in CALLERS {
        let to = address(cluster, SHOP, to);
        let mut args = vec!["call", &to, "--interval", "20"];
        args.extend(long.then_some("--one-connection"));
        cluster
            .create(
                &PodSpec::new(name)
                    .namespace(SHOP)
                    .node(node)
                    .account("client")
                    .args(args),
            )
            .unwrap();
        cluster.await_ready(SHOP, &format!("pod/{name}")).unwrap();
    }
    std::thread::sleep(Duration::from_secs(2));
    assert_none_failed(cluster, "at first");

    // Other values are another version as far as pods are concerned.
    exchange(cluster, || {
        // Helm would wait for the old agents, too, which stay for what they carry.
        let words = helm_words("upgrade", &["logLevel=warn"]).unwrap();
        let at = words.iter().position(|word| word == "--wait").unwrap();
        let (before, waiting) = words.split_at(at);
        cluster
            .helm(
                before
                    .iter()
                    .chain(&waiting["--wait --timeout 2m".split(' ').count()..]),
            )
            .unwrap();
    });
    assert_none_failed(cluster, "after an upgrade");
    assert_eq!(log_levels(cluster), ["warn", "warn"]);
    exchange(cluster, || helm(cluster, &["rollback", "adit", "1"]));
    assert_none_failed(cluster, "after a rollback");
    assert_eq!(log_levels(cluster), ["info", "info"]);

    let begin = Instant::now();
    helm(cluster, &["uninstall", "adit"]);
    println!("uninstalled after {:?}", begin.elapsed());
    for (pod, _, _, long) in CALLERS {
        let calls = calls(cluster, pod);
        println!(
            "after uninstalling: {pod}: {} calls, {} failed",
            calls.calls, calls.failed
        );
        // New ones fail where one node is left and the other is not yet, and where none is there to take them in between.
        let most = if long { 0 } else { 500 };
        assert!(calls.failed <= most, "{pod}: {calls:?}");
    }
    // All agents stay for what they carry, and no longer.
    assert!(!agents(cluster).is_empty() && agents(cluster).iter().all(is_leaving));
    for (pod, _, _, long) in CALLERS {
        if long {
            cluster.delete(SHOP, &["pod", pod]).unwrap();
        }
    }
    await_that("the agents to be gone", || agents(cluster).is_empty());
    for node in cluster.nodes() {
        let left = node
            .run(["find", "/sys/fs/bpf", "-mindepth", "1", "-not", "-name", "*.debug"])
            .unwrap();
        assert_eq!(left, "", "pins on {}", node.name());
        let cgroups = node.cgroup().unwrap();
        let left = node
            .run(["find", "/sys/fs/cgroup", "-type", "d", "-name", "*adit*"])
            .unwrap();
        assert_eq!(left, "", "cgroups on {} ({})", node.name(), cgroups.display());
    }
    assert_eq!((out().ok, out().failed), (3, 0), "from outside: {:?}", out());
    // What was in the mesh speaks in plaintext, whatever policies say; and so does what is born now.
    for (name, node) in [("late", 1), ("later", 2)] {
        cluster.create(&server(name, node)).unwrap();
        cluster.await_ready(SHOP, &format!("pod/{name}")).unwrap();
    }
    let all = ["near", "far", "late", "later"];
    let addresses = all.map(|name| address(cluster, SHOP, name));
    let pairs = all
        .into_iter()
        .flat_map(|from| addresses.iter().map(move |to| (from, to)));
    let more = ["--count", "3", "--timeout", "2000"];
    let started: Vec<_> = pairs
        .map(|(from, to)| (from, to, Calling::start(cluster, SHOP, from, to, &more).unwrap()))
        .collect();
    for (from, to, calling) in started {
        let calls = calling.end().unwrap();
        assert_eq!((calls.ok, calls.failed), (3, 0), "{from} to {to}: {calls:?}");
    }
    let left = [
        "daemonset,deployment,job,service,serviceaccount,role,rolebinding",
        "--namespace",
        SYSTEM,
    ];
    let left = cluster.get(left).unwrap();
    let names = left["items"]
        .as_array()
        .unwrap()
        .iter()
        .map(|object| object["metadata"]["name"].as_str().unwrap());
    assert_eq!(names.filter(|name| name.contains("adit")).count(), 0, "{left}");
    let left = cluster
        .kubectl([
            "get",
            "clusterrole,clusterrolebinding,validatingadmissionpolicy",
            "--output=name",
        ])
        .unwrap();
    assert!(!left.contains("adit"), "{left}");
    // Installed anew, the mesh has the root that it had.
    let key = || cluster.get(["secret", "--namespace", SYSTEM, "adit-ca-key"]).unwrap()["data"].clone();
    let before = key();
    cluster.install_adit(&[]).unwrap();
    assert_eq!(key(), before);
    for name in ["near", "far", "late", "later"] {
        await_captured(cluster, SHOP, name, true);
    }
    assert_eq!(
        call(cluster, SHOP, "near", &address(cluster, SHOP, "far"), &["--count", "3"]).failed,
        0
    );
    await_that("nobody to be let in from outside again", || out().ok == 0);
}
