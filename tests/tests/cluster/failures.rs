//! What goes on, and what does not, while something is away.

use std::thread::sleep;
use std::time::Duration;

use adit_tests::cluster::{Cluster, PodSpec, SYSTEM, Service};
use adit_tests::tool::Calls;
use serde_json::Value;

use crate::stage::{
    SHOP, address, agent, agents, assert_all_ok, await_access, await_captured, await_that, call, is_long, is_ready,
    mesh_namespace, shop, strict,
};

/// Pods of the first node that call servers of both nodes all the time: by new connections, and by one that stays open.
struct Callers {
    cluster: &'static Cluster,
    namespace: &'static str,
}

const CALLERS: [(&str, &str, bool); 4] = [
    ("new-near", "near", false),
    ("open-near", "near", true),
    ("new-far", "far", false),
    ("open-far", "far", true),
];

impl Callers {
    fn start(namespace: &'static str) -> Self {
        let cluster = shop();
        cluster.apply_json(&strict(SHOP)).unwrap();
        mesh_namespace(cluster, namespace);
        for (name, to, open) in CALLERS {
            let to = address(cluster, SHOP, to);
            let mut args = vec!["call", &to, "--interval", "20", "--timeout", "3000"];
            args.extend(open.then_some("--one-connection"));
            let pod = PodSpec::new(name)
                .namespace(namespace)
                .node(1)
                .account("client")
                .args(args);
            cluster.create(&pod.with("restartPolicy", "Never".into())).unwrap();
        }
        let callers = Self { cluster, namespace };
        for (name, ..) in CALLERS {
            await_that("calls", || {
                let logs = cluster
                    .kubectl(["logs", "--namespace", namespace, name])
                    .unwrap_or_default();
                Calls::last(&logs).is_ok_and(|calls| calls.ok > 30)
            });
            assert_eq!(callers.calls(name).failed, 0, "{name}: {:?}", callers.calls(name));
        }
        callers
    }

    fn calls(&self, name: &str) -> Calls {
        let said = self.cluster.kubectl(["logs", "--namespace", self.namespace, name]);
        Calls::last(&said.unwrap()).unwrap()
    }

    /// That so many more calls of each are answered, and that none has failed so far.
    fn assert_undisturbed(&self, names: &[&str], more: u64) {
        for name in names {
            let before = self.calls(name).ok;
            await_that(&format!("{more} calls of {name}"), || {
                let calls = self.calls(name);
                assert_eq!(calls.failed, 0, "{name}: {calls:?}");
                calls.ok >= before + more
            });
        }
    }

    /// That calls are answered again, and fail no more. Gives how many had failed.
    fn await_recovery(&self, name: &str) -> Calls {
        let mut last = self.calls(name);
        await_that(&format!("calls of {name} to be answered again"), || {
            let now = self.calls(name);
            let recovered = now.failed == last.failed && now.ok >= last.ok + 50;
            if now.failed != last.failed {
                last = now;
            }
            recovered
        });
        last
    }
}

impl Drop for Callers {
    fn drop(&mut self) {
        let gone = [
            self.cluster
                .kubectl(["delete", "namespace", "--wait=false", self.namespace]),
            self.cluster
                .kubectl(["delete", "peerauthentication", "--namespace", SHOP, "strict"]),
        ];
        for error in gone.into_iter().filter_map(Result::err) {
            eprintln!("{error:#}");
        }
    }
}

const ALL: [&str; 4] = ["new-near", "open-near", "new-far", "open-far"];

#[test]
fn an_agent_that_is_killed_leaves_direct_connections_alone_and_its_successor_takes_the_rest_up() {
    let callers = Callers::start("killed");
    let cluster = callers.cluster;
    let restarts = || {
        let agent = cluster.get(["pod", "--namespace", SYSTEM, &agent(cluster, 1)]).unwrap();
        agent["status"]["containerStatuses"][0].clone()
    };
    let before = restarts()["restartCount"].as_u64().unwrap();
    let kill = "for process in /proc/[0-9]*; do \
                tr '\\0' ' ' < $process/cmdline | grep -q '^/adit node ' && kill -9 ${process#/proc/}; done; true";
    cluster.node(1).run(["sh", "-c", kill]).unwrap();
    await_that("the agent to be back", || {
        let status = restarts();
        status["ready"] == true && status["restartCount"].as_u64() > Some(before)
    });
    callers.assert_undisturbed(&["new-near", "open-near"], 50);
    let open = callers.calls("open-far");
    assert_eq!(open.failed, 1, "{open:?}");
    // Refused or reset, never sent past the proxy: its server takes nothing in plaintext.
    let calls = callers.await_recovery("new-far");
    println!("calls to the other node while the agent was away: {calls:?}");
    assert!(calls.failed > 0, "{calls:?}");
    for name in ["client", "near"] {
        await_captured(cluster, SHOP, name, true);
    }
}

#[test]
fn an_agent_whose_pod_is_deleted_is_followed_by_another() {
    let callers = Callers::start("replaced");
    let cluster = callers.cluster;
    let before = agent(cluster, 1);
    cluster
        .kubectl(["delete", "pod", "--namespace", SYSTEM, "--wait=false", &before])
        .unwrap();
    await_that("another agent", || {
        let is_it =
            |pod: &Value| pod["metadata"]["name"] != *before && pod["spec"]["nodeName"] == "n1" && is_ready(pod);
        agents(cluster).iter().any(is_it)
    });
    // The one that leaves takes what is new until the other has taken over, and stays for what it carries.
    callers.assert_undisturbed(&ALL, 50);
}

#[test]
fn a_kubelet_and_a_containerd_that_are_started_anew_disturb_nobody_and_new_pods_are_captured() {
    let callers = Callers::start("restarted");
    let cluster = callers.cluster;
    for service in [Service::Kubelet, Service::Containerd] {
        cluster.node(1).restart(service).unwrap();
    }
    let probe = serde_json::json!({"tcpSocket": {"port": 8080}, "periodSeconds": 1});
    let pod = PodSpec::new("after")
        .namespace("restarted")
        .node(1)
        .account("server")
        .args(["serve", "8080"]);
    await_that("a pod to be made", || {
        cluster
            .create(&pod.clone().container("readinessProbe", probe.clone()))
            .is_ok()
    });
    cluster.apply_json(&strict("restarted")).unwrap();
    cluster.await_ready("restarted", "pod/after").unwrap();
    await_captured(cluster, "restarted", "after", true);
    callers.assert_undisturbed(&ALL, 50);
    let to = address(cluster, "restarted", "after");
    assert_all_ok(&call(cluster, SHOP, "remote", &to, &["--count", "3"]));
}

#[test]
fn without_an_api_server_all_goes_on_as_it_was_and_what_has_changed_is_followed_afterwards() {
    let callers = Callers::start("alone");
    let cluster = callers.cluster;
    let before = ALL.map(|name| callers.calls(name).ok);
    cluster.stop_api_server().unwrap();
    sleep(Duration::from_secs(if is_long() { 300 } else { 10 }));
    cluster.start_api_server().unwrap();
    for (name, before) in ALL.into_iter().zip(before) {
        let calls = callers.calls(name);
        assert!(
            calls.failed == 0 && calls.ok > before + 200,
            "{name}: {before} {calls:?}"
        );
    }
    let pod = PodSpec::new("after")
        .namespace("alone")
        .node(2)
        .account("server")
        .args(["serve", "8080"]);
    await_that("a pod to be made", || cluster.create(&pod).is_ok());
    cluster.await_ready("alone", "pod/after").unwrap();
    await_captured(cluster, "alone", "after", true);
    let to = address(cluster, "alone", "after");
    assert_all_ok(&call(cluster, SHOP, "client", &to, &["--count", "3"]));
    cluster
        .kubectl([
            "label",
            "pod",
            "--namespace",
            "alone",
            "after",
            "mesh.adit/mode=disabled",
        ])
        .unwrap();
    await_captured(cluster, "alone", "after", false);
    let pods = cluster.get(["pods", "--namespace", SYSTEM]).unwrap();
    assert!(pods["items"].as_array().unwrap().iter().any(is_ready));
    callers.assert_undisturbed(&ALL, 50);
}

#[test]
fn a_node_that_is_booted_anew_captures_its_pods_again() {
    let cluster = shop();
    let names = ["far", "remote"];
    let pod = |name: &str| cluster.get(["pod", "--namespace", SHOP, name]).unwrap();
    let state = |pod: &Value| {
        let status = &pod["status"]["containerStatuses"][0];
        let uid = pod["metadata"]["uid"].as_str().unwrap().to_owned();
        (uid, status["restartCount"].as_u64(), status["ready"] == true)
    };
    let before = names.map(|name| state(&pod(name)));
    cluster.apply_json(&strict(SHOP)).unwrap();
    cluster.node(2).crash().unwrap();
    cluster.revive(2).unwrap();
    for (name, (uid, restarts, _)) in names.iter().zip(&before) {
        await_that(&format!("{name} to be back"), || {
            let (now, count, ready) = state(&pod(name));
            assert_eq!(now, *uid, "{name} is the same pod");
            count > *restarts && ready
        });
    }
    await_that("the agent to be back", || {
        let agents = agents(cluster);
        let here = agents.iter().find(|agent| agent["spec"]["nodeName"] == "n2");
        here.is_some_and(is_ready)
    });
    // Its log has begun anew: what is in it is from after the boot.
    for (from, node, to, path) in [
        ("client", 1, "far", "hbone"),
        ("remote", 2, "near", "hbone"),
        ("remote", 2, "far", "direct"),
    ] {
        let address = address(cluster, SHOP, to);
        await_that(&format!("{to} to be reached by {from}"), || {
            call(cluster, SHOP, from, &address, &["--count", "1"]).failed == 0
        });
        assert_all_ok(&call(cluster, SHOP, from, &address, &["--count", "5"]));
        let (from, to) = (format!("{SHOP}/{from}"), format!("{SHOP}/{to}"));
        let fields = [
            ("source.workload", &*from),
            ("destination.workload", &*to),
            ("path", path),
            ("how", "fin"),
        ];
        await_access(cluster, node, 6, &fields);
    }
    for name in names {
        await_captured(cluster, SHOP, name, true);
    }
    cluster.delete(SHOP, &["peerauthentication", "strict"]).unwrap();
}
