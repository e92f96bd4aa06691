//! The whole story on a real Kubernetes cluster: from pods as they are, over the installation, to pods as they were.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, ensure};
use serde_json::{Value, json};

use super::report::Report;
use crate::cluster::{Cluster, PodSpec, adit_name, owned_prefix, residue};
use crate::sys::check_interrupt;
use crate::tool::Calls;

/// Adit's own namespace.
const SYSTEM: &str = "adit-system";

/// The namespace that gets enrolled.
const SHOP: &str = "shop";

/// The server's port.
const PORT: u16 = 8080;

/// How long a change in the cluster may take to show.
const SOON: Duration = Duration::from_secs(60);

type Step = fn(&Cluster, &mut Report) -> anyhow::Result<()>;

const STEPS: &[(&str, Step)] = &[
    ("Pods on both nodes, without Adit", before),
    ("Adit is installed by Helm", install),
    ("The namespace is labelled", enrol),
    ("Traffic from one node to the other", traffic),
    ("An AuthorizationPolicy", policy),
    ("Adit is uninstalled", uninstall),
];

/// Shows all of it, and clears it away.
pub(super) fn show(report: &mut Report) -> anyhow::Result<()> {
    Cluster::sweep()?;
    let prefix = owned_prefix('d');
    let shown = show_on(&prefix, report);
    // Also when it did not come up.
    Cluster::down(&prefix)?;
    let left = residue(&prefix);
    let detail = if left.is_empty() {
        "no namespace, cgroup, mount, process or file of the cluster is left".to_owned()
    } else {
        left.join(", ")
    };
    report.heading("Clean-up");
    report.check("nothing is left behind", left.is_empty(), detail);
    shown
}

fn show_on(prefix: &str, report: &mut Report) -> anyhow::Result<()> {
    report.heading("A Kubernetes cluster of two nodes");
    let begin = std::time::Instant::now();
    let cluster = Cluster::up(prefix)?;
    let up = format!("up in {:.1} s", begin.elapsed().as_secs_f64());
    let columns = "custom-columns=NAME:.metadata.name,KUBELET:.status.nodeInfo.kubeletVersion,\
                   RUNTIME:.status.nodeInfo.containerRuntimeVersion,ZONE:.metadata.labels.topology\\.kubernetes\\.io/zone";
    report.quote(cluster.kubectl(["get", "nodes", "--output", columns])?);
    report.check("both nodes are ready", true, up);
    for (title, step) in STEPS {
        check_interrupt()?;
        report.heading(title);
        if let Err(error) = step(&cluster, report) {
            check_interrupt()?;
            report.check(
                &format!("{} can be shown", title.to_lowercase()),
                false,
                format!("{error:#}"),
            );
            // What comes after builds on this.
            break;
        }
    }
    Ok(())
}

fn pod(name: &str) -> PodSpec {
    PodSpec::new(name).namespace(SHOP).account(name)
}

fn before(cluster: &Cluster, report: &mut Report) -> anyhow::Result<()> {
    cluster.namespace(SHOP, &[])?;
    for name in ["cart", "billing", "web"] {
        cluster.apply_json(&json!({
            "apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name, "namespace": SHOP},
        }))?;
    }
    cluster.create(&pod("cart").node(1))?;
    cluster.create(&pod("billing").node(1))?;
    let probe = json!({"httpGet": {"path": "/", "port": PORT}, "periodSeconds": 1});
    cluster.create(
        &pod("web")
            .node(2)
            .args(["serve", "8080"])
            .container("readinessProbe", probe),
    )?;
    cluster.apply_json(&pod("web").service(80, PORT))?;
    for name in ["cart", "billing", "web"] {
        cluster.await_ready(SHOP, &format!("pod/{name}"))?;
    }
    let columns = "custom-columns=NAME:.metadata.name,NODE:.spec.nodeName,ADDRESS:.status.podIP";
    report.quote(cluster.kubectl(["get", "pods", "--namespace", SHOP, "--output", columns])?);
    let calls = call(cluster, "cart")?;
    report.check(
        "cart on n1 reaches the service web on n2",
        calls.failed == 0,
        told(&calls),
    );
    Ok(())
}

fn install(cluster: &Cluster, report: &mut Report) -> anyhow::Result<()> {
    let chart = chart()?;
    cluster.import_adit()?;
    let name = adit_name();
    let (repository, tag) = name.rsplit_once(':').context("an image's name without a tag")?;
    let (repository, tag) = (format!("image.repository={repository}"), format!("image.tag={tag}"));
    let chart = chart.display().to_string();
    let words = [
        "install",
        "adit",
        &chart,
        "--namespace",
        SYSTEM,
        "--create-namespace",
        "--wait",
        "--timeout",
        "2m",
        "--set",
        &repository,
        "--set",
        &tag,
    ];
    report.say(format!("helm {}", words.join(" ")));
    cluster.helm(words)?;
    let set = cluster.get(["daemonset", "--namespace", SYSTEM, "adit-node"])?;
    let ready = set["status"]["numberReady"].as_u64();
    report.check(
        "an agent is ready on each node",
        ready == Some(2),
        format!("{} of 2", ready.unwrap_or_default()),
    );
    let calls = call(cluster, "cart")?;
    report.check(
        "nothing has changed for pods that nobody enrolled",
        calls.failed == 0,
        told(&calls),
    );
    Ok(())
}

fn chart() -> anyhow::Result<PathBuf> {
    let path = std::env::var_os("ADIT_CHART").map(PathBuf::from);
    let path = path.unwrap_or_else(|| PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy/chart/adit")));
    ensure!(
        path.join("Chart.yaml").is_file(),
        "there is no chart in {}",
        path.display()
    );
    Ok(path)
}

fn enrol(cluster: &Cluster, report: &mut Report) -> anyhow::Result<()> {
    report.say(format!("kubectl label namespace {SHOP} mesh.adit/mode=enabled"));
    cluster.kubectl(["label", "namespace", SHOP, "mesh.adit/mode=enabled"])?;
    let pods = ["pods", "--namespace", SHOP];
    let captured = |list: &Value| {
        let pods = list["items"].as_array();
        pods.is_some_and(|pods| pods.len() == 3 && pods.iter().all(is_captured))
    };
    cluster.await_object("all pods to be captured", SOON, &pods, captured)?;
    let list = cluster.get(pods)?;
    let restarts = |pod: &Value| pod["status"]["containerStatuses"][0]["restartCount"].as_u64();
    let same = list["items"]
        .as_array()
        .is_some_and(|pods| pods.iter().all(|pod| restarts(pod) == Some(0)));
    report.check(
        "the pods' condition mesh.adit/Captured is true",
        captured(&list),
        "3 of 3",
    );
    report.check("they are the same pods as before, not restarted", same, "0 restarts");
    Ok(())
}

fn is_captured(pod: &Value) -> bool {
    let conditions = pod["status"]["conditions"].as_array();
    let is = |condition: &Value| condition["type"] == "mesh.adit/Captured" && condition["status"] == "True";
    conditions.is_some_and(|all| all.iter().any(is))
}

fn traffic(cluster: &Cluster, report: &mut Report) -> anyhow::Result<()> {
    let calls = call(cluster, "cart")?;
    report.check("cart reaches web as before", calls.failed == 0, told(&calls));
    let log = cluster.kubectl([
        "logs",
        "--namespace",
        SYSTEM,
        "--selector",
        "app.kubernetes.io/name=adit-node",
        "--tail=-1",
    ])?;
    let (from, to) = (
        "spiffe://cluster.local/ns/shop/sa/cart",
        "spiffe://cluster.local/ns/shop/sa/web",
    );
    let line = log.lines().find(|line| line.contains(from) && line.contains(to));
    report.quote(line.unwrap_or("(no line of the access log names both identities)"));
    report.check(
        "both ends were known by certificate",
        line.is_some(),
        "the access log names cart's identity and web's",
    );
    Ok(())
}

fn policy(cluster: &Cluster, report: &mut Report) -> anyhow::Result<()> {
    let policy = json!({
        "apiVersion": "security.istio.io/v1",
        "kind": "AuthorizationPolicy",
        "metadata": {"name": "web-clients", "namespace": SHOP},
        "spec": {
            "selector": {"matchLabels": {"app": "web"}},
            "action": "ALLOW",
            "rules": [{"from": [{"source": {"principals": ["cluster.local/ns/shop/sa/cart"]}}]}],
        },
    });
    report.quote(serde_json::to_string(&policy["spec"])?);
    cluster.apply_json(&policy)?;
    let refused = || Ok(call(cluster, "billing").is_ok_and(|calls| calls.ok == 0));
    crate::bed::wait_for("billing to be refused", SOON, refused)?;
    let (billing, cart) = (call(cluster, "billing")?, call(cluster, "cart")?);
    report.check("billing is refused", billing.ok == 0, told(&billing));
    report.check("cart is let in", cart.failed == 0, told(&cart));
    let web = cluster.get(["pod", "--namespace", SHOP, "web"])?;
    let ready = web["status"]["containerStatuses"][0]["ready"] == true;
    report.check("the kubelet's probe still passes", ready, "web is ready");
    Ok(())
}

fn uninstall(cluster: &Cluster, report: &mut Report) -> anyhow::Result<()> {
    report.say(format!("helm uninstall adit --namespace {SYSTEM} --wait"));
    cluster.helm(["uninstall", "adit", "--namespace", SYSTEM, "--wait", "--timeout", "2m"])?;
    let calls = call(cluster, "billing")?;
    report.check(
        "pods call each other as if Adit had never been",
        calls.failed == 0,
        told(&calls),
    );
    let mut pins = Vec::new();
    for node in cluster.nodes() {
        let found = node.run(["find", "/sys/fs/bpf", "-mindepth", "1"])?;
        pins.extend(found.lines().map(|line| format!("{}:{line}", node.name())));
    }
    let detail = if pins.is_empty() {
        "no pinned program on either node".to_owned()
    } else {
        pins.join(", ")
    };
    report.check("nothing of Adit is left in the kernel", pins.is_empty(), detail);
    Ok(())
}

/// Some calls from a pod to the service `web`.
fn call(cluster: &Cluster, from: &str) -> anyhow::Result<Calls> {
    let service = cluster.get(["service", "--namespace", SHOP, "web"])?;
    let address = service["spec"]["clusterIP"]
        .as_str()
        .context("the service has no address")?;
    // A refusal is an answer too, so the tool's own verdict is not asked for.
    let tool = format!("/tool call {address}:80 --count 20 --interval 1 --timeout 2000");
    let mut command = cluster.kubectl_command()?;
    command
        .args(["exec", "--namespace", SHOP, from, "--"])
        .args(tool.split(' '));
    let output = command.output().context("start kubectl")?;
    Calls::last(&String::from_utf8_lossy(&output.stdout))
        .with_context(|| String::from_utf8_lossy(&output.stderr).trim().to_owned())
}

fn told(calls: &Calls) -> String {
    let errors: Vec<String> = calls
        .errors
        .iter()
        .map(|(error, count)| format!("{count} x {error}"))
        .collect();
    format!("{} of {} calls answered {}", calls.ok, calls.calls, errors.join(", "))
        .trim_end()
        .to_owned()
}
