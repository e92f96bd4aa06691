//! Adit on the shared cluster, and pods in its mesh that several tests speak to.

use std::collections::BTreeMap;
use std::sync::{LazyLock, Mutex, PoisonError};
use std::time::{Duration, Instant};

use adit_tests::cluster::{Calling, Cluster, PodSpec, SYSTEM, condition};
use adit_tests::tool::Calls;
use serde_json::{Value, json};

use crate::world::shared;

/// How long what is to come may take, on a machine that is busy.
pub(crate) const PATIENCE: Duration = Duration::from_secs(90);
/// The namespace of the pods that tests share.
pub(crate) const SHOP: &str = "shop";

/// Whether what stands for something long, or for many, is to be as in life: with `ADIT_LONG` set, an API server stays away for
/// five minutes, and 200 pods start.
pub(crate) fn is_long() -> bool {
    std::env::var_os("ADIT_LONG").is_some()
}

/// The cluster with Adit on it, which publishes its roots in every way.
pub(crate) fn meshed() -> &'static Cluster {
    let cluster = shared();
    static INSTALLING: Mutex<()> = Mutex::new(());
    let _alone = INSTALLING.lock().unwrap_or_else(PoisonError::into_inner);
    if cluster.helm(["status", "adit", "--namespace", SYSTEM]).is_err() {
        cluster.install_adit(&["ca.clusterTrustBundle=true"]).unwrap();
    }
    cluster
}

/// The same with the pods of [`SHOP`]: `client` and `near` on the first node, `far` and `remote` on the second. Servers
/// are `near` and `far`, as service account `server`, on port 8080; the others call, as `client`.
pub(crate) fn shop() -> &'static Cluster {
    static OPEN: LazyLock<()> = LazyLock::new(|| {
        let cluster = meshed();
        mesh_namespace(cluster, SHOP);
        for (name, node, account) in [
            ("client", 1, "client"),
            ("near", 1, "server"),
            ("far", 2, "server"),
            ("remote", 2, "client"),
        ] {
            let pod = PodSpec::new(name).namespace(SHOP).node(node).account(account);
            let pod = if account == "server" {
                pod.args(["serve", "8080"])
            } else {
                pod
            };
            cluster.create(&pod).unwrap();
        }
        for name in ["client", "near", "far", "remote"] {
            cluster.await_ready(SHOP, &format!("pod/{name}")).unwrap();
        }
    });
    let cluster = meshed();
    LazyLock::force(&OPEN);
    for name in ["client", "near", "far", "remote"] {
        await_captured(cluster, SHOP, name, true);
    }
    cluster
}

/// A namespace in the mesh, with service accounts `client` and `server`.
pub(crate) fn mesh_namespace(cluster: &Cluster, name: &str) {
    cluster.namespace(name, &[("mesh.adit/mode", "enabled")]).unwrap();
    for account in ["client", "server"] {
        let metadata = json!({"name": account, "namespace": name});
        cluster
            .apply_json(&json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata}))
            .unwrap();
    }
}

/// Makes a namespace in the mesh, and in it, on the second node, a server that only those in the mesh may speak to. Where
/// that is called.
pub(crate) fn strict_server(cluster: &Cluster, namespace: &str) -> String {
    mesh_namespace(cluster, namespace);
    cluster.apply_json(&strict(namespace)).unwrap();
    let server = PodSpec::new("server").namespace(namespace).node(2).account("server");
    cluster.create(&server.args(["serve", "8080"])).unwrap();
    cluster.await_ready(namespace, "pod/server").unwrap();
    await_captured(cluster, namespace, "server", true);
    address(cluster, namespace, "server")
}

/// Where a pod of the namespace is called.
pub(crate) fn address(cluster: &Cluster, namespace: &str, pod: &str) -> String {
    format!("{}:8080", cluster.pod_address(namespace, pod).unwrap())
}

/// Waits until the pod's condition says that it is captured, or until there is no such condition.
pub(crate) fn await_captured(cluster: &Cluster, namespace: &str, pod: &str, captured: bool) {
    let what = format!(
        "{namespace}/{pod} to be {}captured",
        if captured { "" } else { "no longer " }
    );
    let wanted = captured.then_some("True");
    let is_so = |pod: &Value| pod["kind"] == "Pod" && condition(pod, "mesh.adit/Captured") == wanted;
    cluster
        .await_object(&what, PATIENCE, &["pod", "--namespace", namespace, pod], is_so)
        .unwrap();
}

/// Waits until something holds.
pub(crate) fn await_that(what: &str, mut holds: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !holds() {
        assert!(begin.elapsed() < PATIENCE, "waited in vain for {what}");
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// The agents' pods, those that leave too.
pub(crate) fn agents(cluster: &Cluster) -> Vec<Value> {
    let all = [
        "pods",
        "--namespace",
        SYSTEM,
        "--selector=app.kubernetes.io/component=node",
    ];
    cluster.get(all).unwrap()["items"].as_array().unwrap().clone()
}

/// The agent's pod on a node.
pub(crate) fn agent(cluster: &Cluster, node: u8) -> String {
    let node = format!("n{node}");
    let is_it =
        |pod: &&Value| pod["spec"]["nodeName"] == *node && pod["status"]["phase"] == "Running" && !is_leaving(pod);
    let agents = agents(cluster);
    let here = agents.iter().find(is_it);
    here.unwrap()["metadata"]["name"].as_str().unwrap().to_owned()
}

/// Whether a pod is told to go.
pub(crate) fn is_leaving(pod: &Value) -> bool {
    !pod["metadata"]["deletionTimestamp"].is_null()
}

/// Whether a pod's first container is ready.
pub(crate) fn is_ready(pod: &Value) -> bool {
    pod["status"]["containerStatuses"][0]["ready"] == true
}

/// What a node's agent has said of late.
pub(crate) fn agent_log(cluster: &Cluster, node: u8) -> String {
    cluster
        .kubectl(["logs", "--namespace", SYSTEM, "--since=3m", &agent(cluster, node)])
        .unwrap()
}

/// A line of the access log.
pub(crate) type Line = BTreeMap<String, String>;

/// The seconds between midnight and a line's time, which is as in `2026-11-30T08:07:43.943Z`.
pub(crate) fn seconds_of(line: &Line) -> f64 {
    let (_, clock) = line["time"].trim_end_matches('Z').split_once('T').unwrap();
    let parts = clock.split(':').map(|part| part.parse::<f64>().unwrap());
    parts.fold(0.0, |all, part| all * 60.0 + part)
}

/// The lines of a node's access log that have all these fields.
pub(crate) fn access(cluster: &Cluster, node: u8, fields: &[(&str, &str)]) -> Vec<Line> {
    let log = agent_log(cluster, node);
    let lines = log.lines().filter(|line| line.contains(" access "));
    let lines = lines.map(|line| {
        let words = line.split(' ').filter_map(|word| word.split_once('='));
        words
            .map(|(key, value)| (key.to_owned(), value.to_owned()))
            .collect::<Line>()
    });
    let has_all = |line: &Line| {
        let mut fields = fields.iter();
        fields.all(|(key, value)| line.get(*key).is_some_and(|is| is == value))
    };
    lines.filter(has_all).collect()
}

/// Waits for so many lines of a node's access log.
pub(crate) fn await_access(cluster: &Cluster, node: u8, count: usize, fields: &[(&str, &str)]) -> Vec<Line> {
    let mut lines = Vec::new();
    await_that(&format!("{count} lines of n{node} with {fields:?}"), || {
        lines = access(cluster, node, fields);
        lines.len() >= count
    });
    lines
}

/// The SPIFFE id of a service account.
pub(crate) fn identity(namespace: &str, account: &str) -> String {
    format!("spiffe://cluster.local/ns/{namespace}/sa/{account}")
}

/// Calls from a pod, and tells how they went.
pub(crate) fn call(cluster: &Cluster, namespace: &str, from: &str, to: &str, more: &[&str]) -> Calls {
    Calling::start(cluster, namespace, from, to, more)
        .and_then(Calling::end)
        .unwrap()
}

/// That all calls were answered.
pub(crate) fn assert_all_ok(calls: &Calls) {
    assert!(calls.failed == 0 && calls.ok > 0, "{calls:?}");
}

/// Only those that the mesh knows may speak to pods of the namespace.
pub(crate) fn strict(namespace: &str) -> Value {
    json!({
        "apiVersion": "security.istio.io/v1",
        "kind": "PeerAuthentication",
        "metadata": {"name": "strict", "namespace": namespace},
        "spec": {"mtls": {"mode": "STRICT"}},
    })
}
