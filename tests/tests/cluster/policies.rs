//! Istio's policies, as objects of the cluster: what they allow and deny to connections that are really made.

use std::thread::sleep;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use adit_tests::cluster::{Calling, Cluster, PodSpec};
use serde_json::{Value, json};

use crate::stage::{
    PATIENCE, access, address, await_captured, await_that, call, mesh_namespace, meshed, seconds_of, strict,
};
use crate::world::World;

/// How soon a policy is to be seen by new connections, with seconds for what kubectl itself takes on a machine that is busy.
const SOON: Duration = Duration::from_secs(5);

/// A namespace in the mesh: `web` calls `near` and `far`, which serve 8080 and 9090, and so does `out`, which is outside.
struct Stage {
    cluster: &'static Cluster,
    shop: String,
    outside: World,
}

impl Stage {
    fn new(name: &str) -> Self {
        let (cluster, outside) = (meshed(), World::new(name));
        let shop = format!("{}-shop", outside.namespace);
        mesh_namespace(cluster, &shop);
        let server = |name: &str, node: u8| {
            let pod = PodSpec::new(name).namespace(&shop).node(node).account("server");
            pod.args(["serve", "8080", "9090"]).label("role", "server")
        };
        let web = PodSpec::new("web").namespace(&shop).node(1).account("client");
        let out = PodSpec::new("out").namespace(&outside.namespace).node(1);
        for pod in [server("near", 1), server("far", 2), web, out] {
            cluster.create(&pod).unwrap();
        }
        cluster.await_ready(&outside.namespace, "pod/out").unwrap();
        for pod in ["near", "far", "web"] {
            cluster.await_ready(&shop, &format!("pod/{pod}")).unwrap();
            await_captured(cluster, &shop, pod, true);
        }
        Self { cluster, shop, outside }
    }

    /// Whether a connection is answered.
    fn reaches(&self, from: &str, to: &str, port: u16) -> bool {
        let namespace = if from == "out" {
            &self.outside.namespace
        } else {
            &self.shop
        };
        let to = address(self.cluster, &self.shop, to).replace(":8080", &format!(":{port}"));
        call(
            self.cluster,
            namespace,
            from,
            &to,
            &["--count", "1", "--timeout", "3000"],
        )
        .ok == 1
    }

    /// Waits until exactly these are answered, of all pairs of a client, a server and a port.
    fn expect(&self, what: &str, answered: &[(&str, &str, u16)]) {
        let begin = Instant::now();
        let mut first = None;
        for from in ["web", "out"] {
            for to in ["near", "far"] {
                for port in [8080, 9090] {
                    let wanted = answered.contains(&(from, to, port));
                    let which = format!(
                        "{what}: {from} to {to}:{port} to be {}",
                        if wanted { "allowed" } else { "denied" }
                    );
                    await_that(&which, || self.reaches(from, to, port) == wanted);
                    first.get_or_insert_with(|| begin.elapsed());
                }
            }
        }
        let (first, all) = (first.unwrap(), begin.elapsed());
        assert!(first < SOON, "{what}: the first took {first:?}");
        println!("{what}: seen after {first:?}, all after {all:?}");
    }

    fn policy(&self, name: &str, namespace: &str, spec: &Value) {
        let metadata = json!({"name": name, "namespace": namespace});
        self.cluster
            .apply_json(&json!({"apiVersion": "security.istio.io/v1", "kind": "AuthorizationPolicy", "metadata": metadata, "spec": spec}))
            .unwrap();
    }

    fn remove(&self, what: &[&str]) {
        self.cluster.delete(&self.shop, what).unwrap();
    }

    /// What the authority says of an object.
    fn accepted(&self, kind: &str, name: &str, reason: &str) -> String {
        let is_so = |object: &Value| accepted(object).is_some_and(|condition| condition["reason"] == reason);
        let arguments = [kind, "--namespace", &self.shop, name];
        let object = self
            .cluster
            .await_object(&format!("{kind} {name} to be {reason}"), PATIENCE, &arguments, is_so)
            .unwrap();
        accepted(&object).unwrap()["message"].as_str().unwrap().to_owned()
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        let gone = self
            .cluster
            .kubectl(["delete", "namespace", "--wait=false", &self.shop]);
        if let Err(error) = gone {
            eprintln!("{error:#}");
        }
    }
}

fn accepted(object: &Value) -> Option<&Value> {
    let conditions = object["status"]["conditions"].as_array()?;
    conditions
        .iter()
        .find(|condition| condition["type"] == "mesh.adit/Accepted")
}

const ALL: [(&str, &str, u16); 8] = [
    ("web", "near", 8080),
    ("web", "near", 9090),
    ("web", "far", 8080),
    ("web", "far", 9090),
    ("out", "near", 8080),
    ("out", "near", 9090),
    ("out", "far", 8080),
    ("out", "far", 9090),
];

fn of(wanted: impl Fn(&(&str, &str, u16)) -> bool) -> Vec<(&'static str, &'static str, u16)> {
    ALL.into_iter().filter(|which| wanted(which)).collect()
}

#[test]
fn policies_hold_in_namespace_workload_and_mesh_soon_after_they_change() {
    let stage = Stage::new("policy");
    let client = format!("cluster.local/ns/{}/sa/client", stage.shop);
    stage.expect("no policy", &ALL);

    stage.cluster.apply_json(&strict(&stage.shop)).unwrap();
    stage.expect("strict", &of(|(from, ..)| *from == "web"));
    stage.remove(&["peerauthentication", "strict"]);
    stage.expect("no longer strict", &ALL);

    // The namespace's: only the client, and only one port.
    let one_port = json!({"rules": [{"from": [{"source": {"principals": [client]}}], "to": [{"operation": {"ports": ["8080"]}}]}]});
    stage.policy("all", &stage.shop, &one_port);
    stage.expect(
        "the namespace's",
        &of(|(from, _, port)| *from == "web" && *port == 8080),
    );
    stage.remove(&["authorizationpolicy", "all"]);

    // A workload's: nobody to `far`; labels decide, whenever they change.
    stage.policy(
        "far",
        &stage.shop,
        &json!({"selector": {"matchLabels": {"app": "far"}}}),
    );
    stage.expect("a workload's", &of(|(_, to, _)| *to == "near"));
    let label = |app: &str| {
        let words = ["label", "pod", "--namespace", &stage.shop, "far", "--overwrite", app];
        stage.cluster.kubectl(words).unwrap();
    };
    label("app=other");
    stage.expect("with another label", &ALL);
    label("app=far");
    stage.expect("with its label again", &of(|(_, to, _)| *to == "near"));
    stage.remove(&["authorizationpolicy", "far"]);

    // The root namespace's is for pods of all namespaces.
    let name = format!("deny-{}", stage.shop);
    let deny = json!({
        "action": "DENY",
        "selector": {"matchLabels": {"role": "server", "app": "near"}},
        "rules": [{"from": [{"source": {"notPrincipals": ["*"]}}]}],
    });
    stage.policy(&name, "adit-system", &deny);
    stage.expect("the mesh's", &of(|(from, to, _)| !(*from == "out" && *to == "near")));
    stage
        .cluster
        .delete("adit-system", &["authorizationpolicy", &name])
        .unwrap();
    stage.expect("none any more", &ALL);
}

#[test]
fn what_cannot_be_enforced_never_widens_access_and_is_told_on_the_object() {
    let stage = Stage::new("faulty");
    // An ALLOW rule with a field of layer 7 never matches: nobody is allowed.
    let rules = json!([{"to": [{"operation": {"methods": ["GET"]}}]}]);
    stage.policy("allow", &stage.shop, &json!({"rules": rules}));
    stage.expect("allow by method", &[]);
    let message = stage.accepted("authorizationpolicy", "allow", "PartlyApplied");
    assert!(message.contains("methods"), "{message}");
    stage.remove(&["authorizationpolicy", "allow"]);

    // A DENY rule matches without it.
    let rules = json!([{"to": [{"operation": {"ports": ["9090"], "paths": ["/admin"]}}]}]);
    stage.policy("deny", &stage.shop, &json!({"action": "DENY", "rules": rules}));
    stage.expect("deny by path", &of(|(.., port)| *port == 8080));
    stage.accepted("authorizationpolicy", "deny", "PartlyApplied");
    let event = |event: &Value| event["items"].as_array().is_some_and(|all| !all.is_empty());
    let fields = "--field-selector=regarding.name=deny,type=Warning";
    let events = ["events.events.k8s.io", "--namespace", &stage.shop, fields];
    stage
        .cluster
        .await_object("an event on the policy", PATIENCE, &events, event)
        .unwrap();
    stage.remove(&["authorizationpolicy", "deny"]);

    // A value that cannot be read allows nobody.
    let rules = json!([{"from": [{"source": {"ipBlocks": ["10.0.0.0/33"]}}]}]);
    stage.policy("broken", &stage.shop, &json!({"rules": rules}));
    stage.expect("a broken range", &[]);
    stage.accepted("authorizationpolicy", "broken", "Invalid");
    // It is told so again when it is mended.
    let rules = json!([{"from": [{"source": {"ipBlocks": ["10.244.0.0/16"]}}]}]);
    stage.policy("broken", &stage.shop, &json!({"rules": rules}));
    stage.expect("the range mended", &ALL);
    stage.accepted("authorizationpolicy", "broken", "Accepted");
}

/// The seconds since midnight, as [`seconds_of`] gives those of a line.
fn now() -> f64 {
    let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    since_1970.as_secs_f64() % 86_400.0
}

#[test]
fn new_connections_see_a_change_of_policy_soon() {
    /// How long each policy is held, and how long at most it may take to be seen: far above what it takes, which is
    /// printed, because the machine runs other tests meanwhile.
    const HELD: Duration = Duration::from_secs(4);
    const LIMIT: Duration = Duration::from_secs(3);
    let (stage, limit) = (Stage::new("prompt"), LIMIT.as_secs_f64());
    let pairs = [
        ("web", "near", 1),
        ("web", "far", 2),
        ("out", "near", 1),
        ("out", "far", 2),
    ];
    let of = |from: &str| {
        if from == "out" {
            &*stage.outside.namespace
        } else {
            &*stage.shop
        }
    };
    let begin = |(from, to, _): (&str, &str, u8)| {
        let more = ["--interval", "10", "--seconds", "22", "--timeout", "1000"];
        let to = address(stage.cluster, &stage.shop, to);
        Calling::start(stage.cluster, of(from), from, &to, &more).unwrap()
    };
    let calling = pairs.map(begin);
    sleep(Duration::from_secs(1));
    let mut changes = Vec::new();
    for _ in 0..2 {
        // Without a rule it allows nobody.
        let applying = now();
        stage.policy("nobody", &stage.shop, &json!({}));
        let applied = now();
        sleep(HELD);
        let removing = now();
        stage.remove(&["authorizationpolicy", "nobody"]);
        let removed = now();
        sleep(HELD);
        changes.push((applying, applied, removing, removed));
    }
    for calling in calling {
        let calls = calling.end().unwrap();
        assert!(calls.ok > 100 && calls.failed > 100, "{calls:?}");
    }
    for (from, to, node) in pairs {
        let source = format!("{}:", stage.cluster.pod_address(of(from), from).unwrap());
        let to = format!("{}/{to}", stage.shop);
        let answered = || -> Vec<f64> {
            let lines = access(stage.cluster, node, &[("destination.workload", &to), ("how", "fin")]);
            let from_there = lines.iter().filter(|line| line["source.addr"].starts_with(&source));
            from_there.map(seconds_of).collect()
        };
        await_that("the last calls in the log", || {
            answered().iter().any(|at| *at > changes[1].3 + limit)
        });
        let answered = answered();
        for (applying, applied, removing, removed) in &changes {
            let before = answered.iter().copied().filter(|at| at < removing);
            let last = before.fold(f64::NEG_INFINITY, f64::max);
            let after = answered.iter().copied().filter(|at| at >= removing);
            let first = after.fold(f64::INFINITY, f64::min);
            println!(
                "{from} to {to}: denied {:.3} s and allowed {:.3} s after the change was sent",
                last - applying,
                first - removing
            );
            assert!(
                last < applied + limit,
                "{from} to {to}: answered {:.3} s after it was denied",
                last - applied
            );
            assert!(
                first < removed + limit,
                "{from} to {to}: {:.3} s after it was allowed",
                first - removed
            );
        }
    }
}
