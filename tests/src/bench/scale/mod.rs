//! A large cluster: what it costs an agent, and what agents cost its API server. Its pods are objects on nodes that do
//! not exist, in a real API server; the agents are real, and have no pod of theirs on this machine.

mod agent;
mod api;
mod objects;

use std::thread::sleep;
use std::time::Duration;

use anyhow::Context;

use self::agent::{Agent, received};
use super::{Bench, Row};
use crate::bed::process::{cpu_seconds, resident_kib};
use crate::cluster::{Cluster, Service, owned_prefix};
use crate::sys::check_interrupt;

/// The rows of what a large cluster costs one agent.
const OF_AGENT: &[&str] = &[
    "scale_ready_ms",
    "scale_start_cpu_s",
    "scale_start_mib",
    "scale_rss_kib",
    "scale_idle_kib_per_min",
    "scale_idle_cpu_s_per_min",
    "scale_mib_per_1000",
    "scale_cpu_s_per_1000",
    "scale_cpu_s_per_1000_slow",
    "scale_cpu_s_per_1000_ready",
    "scale_mib_per_1000_replaced",
    "scale_cpu_s_per_1000_replaced",
    "scale_rss_after_kib",
];

/// How many agents there are at once, and the rows of what they cost the API server: changes, start, memory.
const AGENTS: [(u16, &[&str]); 4] = [
    (0, &["scale_api_cpu_s_per_1000_0"]),
    (
        1,
        &[
            "scale_api_cpu_s_per_1000_1",
            "scale_api_start_cpu_s_1",
            "scale_api_rss_mib_1",
        ],
    ),
    (
        10,
        &[
            "scale_api_cpu_s_per_1000_10",
            "scale_api_start_cpu_s_10",
            "scale_api_rss_mib_10",
        ],
    ),
    (
        40,
        &[
            "scale_api_cpu_s_per_1000_40",
            "scale_api_start_cpu_s_40",
            "scale_api_rss_mib_40",
        ],
    ),
];

/// All of these rows.
pub(super) fn names() -> Vec<&'static str> {
    let of_server = AGENTS.iter().flat_map(|(_, rows)| *rows);
    OF_AGENT.iter().chain(of_server).copied().collect()
}

/// Changes in one batch, and services of which all pods are replaced, which are as many pods.
const CHANGES: usize = 1000;
const ROLLED: usize = 50;
/// Between changes where nothing is to come of it that several are taken account of at once.
const SLOW: Duration = Duration::from_millis(60);
/// Between changes that many agents watch: on a small machine they have to keep up.
const STEADY: Duration = Duration::from_millis(20);
const STARTS: usize = 3;
/// Of changes, where what they cost by themselves is most of it.
const BATCHES: usize = 3;
/// Until what starting took has been given back.
const REST: Duration = Duration::from_secs(8);
/// Until the last of many changes has been taken account of.
const SETTLE: Duration = Duration::from_secs(3);
const MINUTE: Duration = Duration::from_secs(60);
const MIB: f64 = 1_048_576.0;

/// Brings a cluster up, loads it, and lets agents watch it.
pub(super) fn measure(bench: &mut Bench) -> anyhow::Result<()> {
    eprintln!(
        "a cluster of {} pods on {} nodes: some two minutes to make it",
        objects::PODS,
        objects::NODES
    );
    let cluster = Cluster::builder(owned_prefix('s')).without_kube_proxy().up()?;
    hush(&cluster)?;
    let agent = Agent::start(&cluster, 0)?;
    agent.wait_ready()?;
    sleep(REST);
    let empty = agent.resident_kib()?;
    agent.stop()?;
    let mut world = World::load(cluster)?;
    if bench.wants_any(OF_AGENT) {
        world.one_agent(bench, empty)?;
    }
    for (count, rows) in AGENTS {
        check_interrupt()?;
        if bench.wants_any(rows) {
            world.agents(bench, count, rows)?;
        }
    }
    Ok(())
}

/// Ends whatever would take the nodes for dead and remove their pods, or talk on the link that the agents are on.
fn hush(cluster: &Cluster) -> anyhow::Result<()> {
    let center = cluster.control_plane();
    center.kill(Service::ControllerManager)?;
    center.kill(Service::Scheduler)?;
    for node in cluster.nodes() {
        node.kill(Service::Kubelet)?;
        node.kill(Service::Containerd)?;
    }
    Ok(())
}

/// A cluster that is full.
struct World {
    cluster: Cluster,
    /// Of its pods.
    uids: Vec<String>,
    /// How the pods that change are now.
    well: bool,
}

impl World {
    fn load(cluster: Cluster) -> anyhow::Result<Self> {
        let send = |requests: Vec<_>| api::send(&cluster, &requests, Duration::ZERO);
        send(objects::places())?;
        let uids = send((0..objects::PODS).map(objects::created).collect())?;
        check_interrupt()?;
        send((0..objects::PODS).map(|pod| objects::status(pod, true, true)).collect())?;
        send(objects::services())?;
        send(objects::slices(&uids))?;
        let well = true;
        Ok(Self { cluster, uids, well })
    }

    /// A thousand pods change, one each `every`: for the worse, or back.
    fn change(&mut self, how: fn(usize, bool) -> Vec<api::Request>, every: Duration) -> anyhow::Result<()> {
        check_interrupt()?;
        self.well = !self.well;
        api::send(&self.cluster, &how(CHANGES, self.well), every)?;
        sleep(SETTLE);
        Ok(())
    }

    /// A thousand pods are deleted, made anew and run, and the slices of their services follow.
    fn replace(&mut self) -> anyhow::Result<()> {
        check_interrupt()?;
        let pods = objects::rolled(ROLLED);
        let send = |requests: Vec<_>| api::send(&self.cluster, &requests, Duration::ZERO);
        send(pods.iter().map(|pod| objects::deleted(*pod)).collect())?;
        let uids = send(pods.iter().map(|pod| objects::created(*pod)).collect())?;
        send(pods.iter().map(|pod| objects::status(*pod, true, true)).collect())?;
        let replaced = pods.iter().zip(&uids);
        let slices = replaced.map(|(pod, uid)| objects::endpoint_replaced(*pod, uid, &mut self.uids));
        api::send(&self.cluster, &slices.collect::<Vec<_>>(), Duration::ZERO)?;
        sleep(SETTLE);
        Ok(())
    }

    /// What one agent costs its node, and what it hears.
    fn one_agent(&mut self, bench: &mut Bench, empty: f64) -> anyhow::Result<()> {
        let place = self.cluster.node(1);
        let (mut ready, mut cpu, mut heard, mut resident) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let agent = loop {
            check_interrupt()?;
            let before = received(&place)?;
            let agent = Agent::start(&self.cluster, 0)?;
            ready.push(agent.wait_ready()?);
            sleep(REST);
            cpu.push(agent.cpu_seconds()?);
            heard.push((received(&place)? - before) / MIB);
            resident.push(agent.resident_kib()? - empty);
            if ready.len() == STARTS {
                break agent;
            }
            agent.stop()?;
        };
        bench.add(Row::of_adit("scale_ready_ms", "ms", &ready));
        bench.add(Row::of_adit("scale_start_cpu_s", "s", &cpu));
        bench.add(Row::of_adit("scale_start_mib", "MiB", &heard));
        bench.add(Row::of_adit("scale_rss_kib", "KiB", &resident));
        let cost = |during: &mut dyn FnMut() -> anyhow::Result<()>| {
            let before = [received(&place)?, agent.cpu_seconds()?];
            during()?;
            anyhow::Ok([received(&place)? - before[0], agent.cpu_seconds()? - before[1]])
        };
        let [heard, cpu] = cost(&mut || {
            sleep(MINUTE);
            Ok(())
        })?;
        bench.add(Row::of_adit("scale_idle_kib_per_min", "KiB", &[heard / 1024.0]));
        bench.add(Row::of_adit("scale_idle_cpu_s_per_min", "s", &[cpu]));
        let [heard, cpu] = cost(&mut || self.change(objects::captured, Duration::ZERO))?;
        bench.add(Row::of_adit("scale_mib_per_1000", "MiB", &[heard / MIB]));
        bench.add(Row::of_adit("scale_cpu_s_per_1000", "s", &[cpu]));
        let [_, cpu] = cost(&mut || self.change(objects::captured, SLOW))?;
        bench.add(Row::of_adit("scale_cpu_s_per_1000_slow", "s", &[cpu]));
        let [_, cpu] = cost(&mut || self.change(objects::turned, STEADY))?;
        bench.add(Row::of_adit("scale_cpu_s_per_1000_ready", "s", &[cpu]));
        let [heard, cpu] = cost(&mut || self.replace())?;
        bench.add(Row::of_adit("scale_mib_per_1000_replaced", "MiB", &[heard / MIB]));
        bench.add(Row::of_adit("scale_cpu_s_per_1000_replaced", "s", &[cpu]));
        sleep(REST);
        bench.add(Row::of_adit(
            "scale_rss_after_kib",
            "KiB",
            &[agent.resident_kib()? - empty],
        ));
        agent.stop()
    }

    /// What so many agents cost the API server.
    fn agents(&mut self, bench: &mut Bench, count: u16, rows: &[&'static str]) -> anyhow::Result<()> {
        let pids = self.cluster.control_plane().pids(Service::ApiServer)?;
        let server = *pids.first().context("no API server runs")?;
        let before = cpu_seconds(server)?;
        let agents = (0..count).map(|index| Agent::start(&self.cluster, index));
        let agents = agents.collect::<Result<Vec<_>, _>>()?;
        agents.iter().try_for_each(|agent| agent.wait_ready().map(drop))?;
        if let [_, start, resident] = *rows {
            bench.add(Row::of_adit(start, "s", &[cpu_seconds(server)? - before]));
            bench.add(Row::of_adit(resident, "MiB", &[resident_kib(server)? as f64 / 1024.0]));
        }
        sleep(REST);
        let mut costs = Vec::new();
        for _ in 0..BATCHES {
            let before = cpu_seconds(server)?;
            self.change(objects::captured, STEADY)?;
            costs.push(cpu_seconds(server)? - before);
        }
        bench.add(Row::of_adit(rows[0], "s", &costs));
        agents.into_iter().try_for_each(Agent::stop)
    }
}
