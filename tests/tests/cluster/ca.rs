//! To whom the authority in the cluster gives certificates, with tokens of the API server's, and what it keeps there.

use std::time::Duration;

use adit_tests::ca_call::{CaAnswer, CaCall, CaTarget, PERMISSION_DENIED, UNAUTHENTICATED, csr};
use adit_tests::cluster::{Cluster, PodSpec};
use serde_json::Value;

use crate::stage::{await_that, identity, mesh_namespace, meshed};
use crate::world::World;

const SYSTEM: &str = "adit-system";
const OK: u32 = 0;
const UNAVAILABLE: u32 = 14;
const ROOT: [&str; 4] = ["configmap", "--namespace", SYSTEM, "adit-ca-root"];

/// A token as the kubelet would have it projected into the pod, or one that is bound to none.
pub(crate) fn token(cluster: &Cluster, namespace: &str, account: &str, pod: Option<&str>, audience: &str) -> String {
    let mut words = vec![
        "create",
        "token",
        "--namespace",
        namespace,
        account,
        "--audience",
        audience,
    ];
    let uid;
    if let Some(pod) = pod {
        let object = cluster.get(["pod", "--namespace", namespace, pod]).unwrap();
        uid = object["metadata"]["uid"].as_str().unwrap().to_owned();
        words.extend([
            "--bound-object-kind",
            "Pod",
            "--bound-object-name",
            pod,
            "--bound-object-uid",
            &uid,
        ]);
    }
    cluster.kubectl(words).unwrap().trim().to_owned()
}

/// A pod that is to the authority what an agent is: on the node's network, with a service account of Adit's.
fn stand_in(cluster: &Cluster, name: &str, node: u8, account: &str) {
    let pod = PodSpec::new(name).namespace(SYSTEM).node(node).account(account);
    cluster.create(&pod.host_network()).unwrap();
    cluster.await_ready(SYSTEM, &format!("pod/{name}")).unwrap();
}

fn ask(cluster: &Cluster, node: u8, token: &str, identity: &str) -> CaAnswer {
    let service = cluster.get(["service", "--namespace", SYSTEM, "adit-ca"]).unwrap();
    let address: std::net::IpAddr = service["spec"]["clusterIP"].as_str().unwrap().parse().unwrap();
    let target = CaTarget {
        name: format!("adit-ca.{SYSTEM}.svc"),
        address: (address, 15012).into(),
        root: cluster.get(ROOT).unwrap()["data"]["root-cert.pem"]
            .as_str()
            .unwrap()
            .to_owned(),
    };
    let call = CaCall {
        token: Some(token.to_owned()),
        csr: csr(identity).unwrap(),
        identity: Some(identity.to_owned()),
        seconds: 600,
    };
    call.send_from(&cluster.node(node).netns(), &target).unwrap()
}

#[test]
fn only_the_agent_of_a_pods_node_gets_its_certificate_and_only_from_there() {
    let (cluster, world) = (meshed(), World::new("ca"));
    let shop = format!("{}-shop", world.namespace);
    mesh_namespace(cluster, &shop);
    let pod = |name: &str, node: u8, account: &str| {
        let pod = PodSpec::new(name).namespace(&shop).node(node).account(account);
        cluster.create(&pod).unwrap();
        cluster.await_ready(&shop, &format!("pod/{name}")).unwrap();
    };
    pod("cart", 1, "client");
    pod("till", 2, "server");
    let names = ["one", "two", "other"].map(|name| format!("{}-{name}", world.namespace));
    let [one, two, other] = names.each_ref().map(String::as_str);
    stand_in(cluster, one, 1, "adit-node");
    stand_in(cluster, two, 2, "adit-node");
    stand_in(cluster, other, 1, "adit-ca");
    let (cart, till) = (identity(&shop, "client"), identity(&shop, "server"));
    let nobody = identity(&shop, "default");
    let foreign = format!("spiffe://elsewhere/ns/{shop}/sa/client");
    let node = |pod| (SYSTEM, "adit-node", Some(pod), "adit-ca");
    for (what, from, (namespace, account, pod, audience), wanted, expected) in [
        ("a pod of its node", 1, node(one), &cart, OK),
        ("a pod of its node, the second", 2, node(two), &till, OK),
        ("a pod of another node", 1, node(one), &till, PERMISSION_DENIED),
        ("the agent of another node", 2, node(two), &cart, PERMISSION_DENIED),
        ("an identity that no pod has", 1, node(one), &nobody, PERMISSION_DENIED),
        ("another trust domain", 1, node(one), &foreign, PERMISSION_DENIED),
        (
            "stolen, and used from another node",
            2,
            node(one),
            &cart,
            PERMISSION_DENIED,
        ),
        (
            "an account that is no agent's",
            1,
            (SYSTEM, "adit-ca", Some(other), "adit-ca"),
            &cart,
            PERMISSION_DENIED,
        ),
        (
            "the pod's own account",
            1,
            (&*shop, "client", Some("cart"), "adit-ca"),
            &cart,
            PERMISSION_DENIED,
        ),
        (
            "for somebody else",
            1,
            (SYSTEM, "adit-node", Some(one), "istio-ca"),
            &cart,
            UNAUTHENTICATED,
        ),
        (
            "bound to no pod",
            1,
            (SYSTEM, "adit-node", None, "adit-ca"),
            &cart,
            PERMISSION_DENIED,
        ),
    ] {
        let token = token(cluster, namespace, account, pod, audience);
        let answer = ask(cluster, from, &token, wanted);
        assert_eq!(answer.status, expected, "{what}: {answer:?}");
        assert_eq!(answer.chain.is_empty(), expected != OK, "{what}");
    }
    let good = token(cluster, SYSTEM, "adit-node", Some(one), "adit-ca");
    let broken = format!("{}AAAA", &good[..good.len() - 4]);
    for bad in [broken.as_str(), "garbage"] {
        assert_eq!(ask(cluster, 1, bad, &cart).status, UNAUTHENTICATED, "{bad}");
    }

    // The token is as good as before, and known to be so: only the pod is gone, or, for all that the authority knows, one
    // that it has yet to hear of.
    assert_eq!(ask(cluster, 1, &good, &cart).status, OK);
    cluster.delete(SYSTEM, &["pod", one]).unwrap();
    let answer = ask(cluster, 1, &good, &cart);
    assert!(
        [PERMISSION_DENIED, UNAUTHENTICATED, UNAVAILABLE].contains(&answer.status) && answer.chain.is_empty(),
        "{answer:?}"
    );
    cluster.delete(SYSTEM, &["pod", two, other]).unwrap();
    cluster.kubectl(["delete", "namespace", "--wait=false", &shop]).unwrap();
}

#[test]
fn replicas_make_one_root_and_keep_it_published() {
    let cluster = meshed();
    let secret = || cluster.get(["secret", "--namespace", SYSTEM, "adit-ca-key"]).unwrap();
    let root = || {
        let found = cluster.get(ROOT).unwrap_or_default();
        found["data"]["root-cert.pem"].as_str().unwrap_or_default().to_owned()
    };
    let (key, published) = (secret(), root());
    assert!(published.contains("BEGIN CERTIFICATE"));
    cluster
        .kubectl([
            "patch",
            ROOT[0],
            ROOT[1],
            ROOT[2],
            ROOT[3],
            "--patch",
            r#"{"data":{"root-cert.pem":"x","more":"kept"}}"#,
        ])
        .unwrap();
    await_that("the changed root to be put right", || root() == published);
    assert_eq!(cluster.get(ROOT).unwrap()["data"]["more"], "kept");
    let bundle = cluster.get(["clustertrustbundle", "mesh.adit:ca:roots"]).unwrap();
    assert_eq!(bundle["spec"]["trustBundle"], *published);
    assert_eq!(bundle["spec"]["signerName"], "mesh.adit/ca");
    cluster.kubectl(["delete", ROOT[0], ROOT[1], ROOT[2], ROOT[3]]).unwrap();
    await_that("the deleted root to be there again", || root() == published);

    // A replica that starts anew takes the key that is there.
    cluster
        .kubectl(["rollout", "restart", "--namespace", SYSTEM, "deployment/adit-ca"])
        .unwrap();
    cluster
        .kubectl([
            "rollout",
            "status",
            "--namespace",
            SYSTEM,
            "deployment/adit-ca",
            "--timeout=60s",
        ])
        .unwrap();
    let same = |what: &Value| what["metadata"]["uid"].clone();
    assert_eq!((same(&secret()), root()), (same(&key), published.clone()));

    // And if somebody deletes it, so that nobody could start any more, it is there again with the same root.
    cluster
        .kubectl(["delete", "secret", "--namespace", SYSTEM, "adit-ca-key"])
        .unwrap();
    let again = ["secret", "--namespace", SYSTEM, "adit-ca-key"];
    let right = |found: &Value| found["data"]["root-cert.pem"] == key["data"]["root-cert.pem"];
    cluster
        .await_object("the key to be there again", Duration::from_secs(45), &again, right)
        .unwrap();
    assert_eq!(root(), published);
}

#[test]
fn the_replica_that_leads_publishes_a_new_root_on_request_and_another_does_after_it_has_gone() {
    let cluster = meshed();
    let root = || {
        let found = cluster.get(ROOT).unwrap_or_default();
        found["data"]["root-cert.pem"].as_str().unwrap_or_default().to_owned()
    };
    let leader = || {
        let lease = cluster
            .get(["lease", "--namespace", SYSTEM, "adit-ca"])
            .unwrap_or_default();
        let holder = lease["spec"]["holderIdentity"].as_str().unwrap_or_default();
        holder
            .rsplit_once('_')
            .map_or_else(String::new, |(pod, _)| pod.to_owned())
    };
    let ask = |step: &str| {
        let now = now();
        let request = serde_json::json!({
            "id": format!("{step}-{}", now.as_nanos()), "step": step, "at": now.as_secs(),
        })
        .to_string();
        let patch = serde_json::json!({"data": {"request": request}}).to_string();
        let desk = [
            "patch",
            "configmap",
            "--namespace",
            SYSTEM,
            "adit-ca-rotation",
            "--patch",
            &patch,
        ];
        cluster.kubectl(desk).unwrap();
    };
    let before = root();
    await_that("a leader", || !leader().is_empty());
    ask("publish");
    await_that("two roots", || root().matches("BEGIN CERTIFICATE").count() == 2);
    assert!(root().starts_with(&before));
    let first = leader();
    cluster.delete(SYSTEM, &["pod", &first]).unwrap();
    await_that("another leader", || !leader().is_empty() && leader() != first);
    ask("cancel");
    await_that("one root again", || root() == before);
}

/// Since 1970.
fn now() -> Duration {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.unwrap_or_default()
}
