//! The whole story on a real Kubernetes cluster: from pods as they are, over the installation, to pods as they were.

use std::time::Duration;

use anyhow::Context;
use serde_json::{Value, json};

use super::report::Report;
use crate::cluster::{Calling, Cluster, PodSpec, SYSTEM, condition, helm_words, owned_prefix, residue};
use crate::sys::check_interrupt;
use crate::tool::Calls;

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
    ("An upgrade under load", upgrade),
    ("An agent is killed", kill),
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
    cluster.create(&pod("neighbour").account("cart").node(2))?;
    for name in ["cart", "billing", "web", "neighbour"] {
        cluster.await_ready(SHOP, &format!("pod/{name}"))?;
    }
    let columns = "custom-columns=NAME:.metadata.name,NODE:.spec.nodeName,ADDRESS:.status.podIP";
    report.quote(cluster.kubectl(["get", "pods", "--namespace", SHOP, "--output", columns])?);
    // The nodes learn of a service's endpoints a moment after these are ready.
    let known = || Ok(call(cluster, "cart").is_ok_and(|calls| calls.failed == 0));
    crate::bed::wait_for("kube-proxy to know where the service leads", SOON, known)?;
    let calls = call(cluster, "cart")?;
    report.check(
        "cart on n1 reaches the service web on n2",
        calls.failed == 0,
        told(&calls),
    );
    Ok(())
}

fn install(cluster: &Cluster, report: &mut Report) -> anyhow::Result<()> {
    report.say(format!("helm {}", helm_words("install", &[])?.join(" ")));
    cluster.install_adit(&[])?;
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

fn enrol(cluster: &Cluster, report: &mut Report) -> anyhow::Result<()> {
    report.say(format!("kubectl label namespace {SHOP} mesh.adit/mode=enabled"));
    cluster.kubectl(["label", "namespace", SHOP, "mesh.adit/mode=enabled"])?;
    let pods = ["pods", "--namespace", SHOP];
    let captured = |list: &Value| {
        let pods = list["items"].as_array();
        pods.is_some_and(|pods| pods.len() == 4 && pods.iter().all(is_captured))
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
        "4 of 4",
    );
    report.check("they are the same pods as before, not restarted", same, "0 restarts");
    Ok(())
}

fn is_captured(pod: &Value) -> bool {
    condition(pod, "mesh.adit/Captured") == Some("True")
}

fn traffic(cluster: &Cluster, report: &mut Report) -> anyhow::Result<()> {
    let calls = call(cluster, "cart")?;
    report.check("cart reaches web as before", calls.failed == 0, told(&calls));
    let log = agents_log(cluster)?;
    let (from, to) = (
        "spiffe://cluster.local/ns/shop/sa/cart",
        "spiffe://cluster.local/ns/shop/sa/web",
    );
    let line = log
        .lines()
        .find(|line| line.contains(from) && line.contains(to) && line.contains("path=hbone"));
    report.quote(line.unwrap_or("(no line of the access log names both identities)"));
    report.check(
        "both ends were known by certificate",
        line.is_some(),
        "the access log names cart's identity and web's",
    );
    let near = call(cluster, "neighbour")?;
    report.check("a pod on web's node reaches it", near.failed == 0, told(&near));
    let mut line = None;
    let direct = || {
        let log = agents_log(cluster)?;
        let is_direct = |line: &&str| line.contains("source.workload=shop/neighbour") && line.contains("path=direct");
        line = log.lines().find(is_direct).map(str::to_owned);
        Ok(line.is_some())
    };
    crate::bed::wait_for("the line of a direct connection", SOON, direct)?;
    report.quote(line.as_deref().unwrap_or_default());
    report.check("the kernel connects it without a proxy", line.is_some(), "path=direct");
    Ok(())
}

fn agents_log(cluster: &Cluster) -> anyhow::Result<String> {
    cluster.kubectl([
        "logs",
        "--namespace",
        SYSTEM,
        "--selector",
        "app.kubernetes.io/component=node",
        "--tail=-1",
    ])
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

/// What becomes of calls, each by a pod and with options of the tool, that go on for `seconds` while the work is done.
fn during<const N: usize>(
    cluster: &Cluster,
    seconds: u32,
    callers: [(&str, &str); N],
    work: impl FnOnce() -> anyhow::Result<()>,
) -> anyhow::Result<[Calls; N]> {
    let seconds = seconds.to_string();
    let options = ["--seconds", &seconds, "--interval", "5", "--timeout", "2000"];
    let mut started = Vec::new();
    for (from, more) in callers {
        let options: Vec<&str> = options.into_iter().chain(more.split_whitespace()).collect();
        started.push(calling(cluster, from, &options)?);
    }
    // They are at it.
    std::thread::sleep(Duration::from_secs(1));
    let done = work();
    let all = started
        .into_iter()
        .map(Calling::end)
        .collect::<anyhow::Result<Vec<_>>>()?;
    done?;
    all.try_into().map_err(|_| anyhow::anyhow!("some calls told nothing"))
}

fn upgrade(cluster: &Cluster, report: &mut Report) -> anyhow::Result<()> {
    // The old agents leave as soon as what they carry has ended: the open connection outlives this.
    let words = helm_words("upgrade", &["logLevel=debug"])?;
    report.say(format!("helm {}", words.join(" ")));
    let callers = [("cart", ""), ("cart", "--one-connection"), ("neighbour", "")];
    let [new, open, near] = during(cluster, 25, callers, || cluster.helm(&words).map(drop))?;
    report.check("no new connection fails", new.failed == 0, told(&new));
    report.check("an open one goes on", open.failed == 0, told(&open));
    report.check("nor does one that the kernel decides on", near.failed == 0, told(&near));
    Ok(())
}

fn kill(cluster: &Cluster, report: &mut Report) -> anyhow::Result<()> {
    // The authority is a process of that name too.
    let script = "for p in /proc/[0-9]*; do case $(tr '\\0' ' ' <$p/cmdline 2>/dev/null) in '/adit node'*) \
                  kill -9 ${p#/proc/} && echo ${p#/proc/};; esac; done";
    let kill = || {
        for node in cluster.nodes() {
            let killed = node.run(["sh", "-c", script])?;
            anyhow::ensure!(!killed.trim().is_empty(), "no agent runs on {}", node.name());
        }
        Ok(())
    };
    let [near, billing] = during(cluster, 8, [("neighbour", ""), ("billing", "")], kill)?;
    report.say("kill -9 of the agents on both nodes");
    report.check("what the kernel decides goes on", near.failed == 0, told(&near));
    report.check("what policy refuses stays refused", billing.ok == 0, told(&billing));
    let back = || Ok(call(cluster, "cart").is_ok_and(|calls| calls.failed == 0));
    crate::bed::wait_for("cart to reach web again", SOON, back)?;
    report.check(
        "tunnels are back once the kubelet has started the agents anew",
        true,
        "cart reaches web",
    );
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
        // The kernel puts two iterators of its own there.
        let found = node.run(["find", "/sys/fs/bpf", "-mindepth", "1", "-not", "-name", "*.debug"])?;
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
    calling(
        cluster,
        from,
        &["--count", "20", "--interval", "1", "--timeout", "2000"],
    )?
    .end()
}

fn calling(cluster: &Cluster, from: &str, options: &[&str]) -> anyhow::Result<Calling> {
    let service = cluster.get(["service", "--namespace", SHOP, "web"])?;
    let address = service["spec"]["clusterIP"].as_str();
    let address = address.context("the service has no address")?;
    Calling::start(cluster, SHOP, from, &format!("{address}:80"), options)
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
