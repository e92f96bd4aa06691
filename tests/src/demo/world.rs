//! The two nodes of the demo and their pods.

use std::time::{Duration, Instant};

use anyhow::Context;

use super::report::Report;
use crate::bed::{AccessLine, Bed, Node, Pod, PodSpec, ServiceSpec, wait_for};

/// How long to wait for what should happen at once.
pub(super) const SOON: Duration = Duration::from_secs(5);

/// The port of the server in pod `web`.
pub(super) const PORT: u16 = 8080;

/// The port of pod `web` that a policy closes.
pub(super) const CLOSED_PORT: u16 = 9000;

const ALLOW: &str = "
    name: web-clients
    namespace: shop
    scope: workload
    selector: {app: web}
    action: allow
    rules:
      - from:
          - principals: [cluster.local/ns/shop/sa/cart]
";

const DENY: &str = "
    name: no-admin-port
    namespace: shop
    scope: namespace
    action: deny
    rules:
      - to:
          - ports: ['9000']
";

/// The bed of the demo.
pub(super) struct World {
    pub(super) bed: Bed,
}

impl World {
    /// Lays it out, starts Adit in it and tells what there is. The prefix of all names is told as soon as there is one.
    pub(super) fn start(report: &mut Report, prefix: &mut Option<String>) -> anyhow::Result<Self> {
        report.heading("Two nodes, pods of three service accounts, and one outside the mesh");
        let begin = Instant::now();
        let bed = Bed::builder("demo")
            .node("n1")
            .node("n2")
            .pod("n1", PodSpec::new("cart").account("shop/cart"))
            .pod("n1", PodSpec::new("billing").account("shop/billing"))
            .pod("n1", PodSpec::new("bare").account("other/bare").outside())
            .pod("n1", PodSpec::new("bare-2").account("other/bare-2").outside())
            .pod("n2", PodSpec::new("web").account("shop/web"))
            .pod("n2", PodSpec::new("cart-2").account("shop/cart"))
            .pod("n2", PodSpec::new("legacy").account("other/legacy").outside())
            .service(
                ServiceSpec::new("shop/web")
                    .port(80, PORT)
                    .port(81, 8081)
                    .selector("app", "web"),
            )
            .policy(ALLOW)
            .policy(DENY)
            .build()?;
        *prefix = Some(bed.prefix().to_owned());
        let world = Self { bed };
        world.bed.start_all()?;
        let took = begin.elapsed();
        report.say("pod       node  address        identity, or what it is");
        for pod in world.bed.pods() {
            let what = match pod.name() {
                "legacy" => "outside the mesh".to_owned(),
                "bare" | "bare-2" => "outside the mesh: only for the measure of plain TCP".to_owned(),
                _ => pod.identity(),
            };
            report.say(format!(
                "{:<9} {:<5} {:<14} {what}",
                pod.name(),
                pod.node(),
                pod.v4().to_string()
            ));
        }
        report.say(format!(
            "service shop/web: {} -> pod web",
            world.bed.service("shop/web").at(80)
        ));
        let mut ready = Vec::new();
        for node in world.bed.nodes() {
            let answer = node.get("/healthz/ready")?;
            ready.push((node.name().to_owned(), answer.status));
        }
        report.check(
            "the certificate authority and both proxies run",
            ready.iter().all(|(_, status)| *status == 200),
            format!("laid out and ready after {:.1} s", took.as_secs_f64()),
        );
        Ok(world)
    }

    pub(super) fn pod(&self, name: &str) -> &Pod {
        self.bed.pod(name)
    }

    pub(super) fn node_of(&self, pod: &str) -> &Node {
        self.bed.node(self.pod(pod).node())
    }

    /// Waits for a line in the access log of `node`; gives it as it stands and as it reads.
    pub(super) fn access(
        &self,
        node: &Node,
        what: &str,
        wanted: impl Fn(&AccessLine) -> bool,
    ) -> anyhow::Result<(String, AccessLine)> {
        let mut found = None;
        wait_for(&format!("an access line of {}: {what}", node.name()), SOON, || {
            found = node
                .log()
                .text()
                .lines()
                .filter(|line| line.contains(" access "))
                .filter_map(|line| Some((line.to_owned(), AccessLine::parse(line)?)))
                .find(|(_, line)| wanted(line));
            Ok(found.is_some())
        })?;
        found.context("the line that was just found")
    }
}
