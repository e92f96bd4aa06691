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

pub(super) const NAMES: &[&str] = &[
    "scale_ready_ms",
    "scale_start_cpu_s",
    "scale_start_mib",
    "scale_rss_kib",
    "scale_idle_kib_per_min",
    "scale_idle_cpu_s_per_min",
    "scale_cpu_s_per_1000",
    "scale_mib_per_1000",
    "scale_cpu_s_per_1000_slow",
    "scale_cpu_s_per_1000_replaced",
    "scale_mib_per_1000_replaced",
    "scale_rss_after_kib",
    "scale_api_cpu_s_per_1000_0",
    "scale_api_start_cpu_s_1",
    "scale_api_rss_mib_1",
    "scale_api_cpu_s_per_1000_1",
    "scale_api_start_cpu_s_10",
    "scale_api_rss_mib_10",
    "scale_api_cpu_s_per_1000_10",
    "scale_api_start_cpu_s_40",
    "scale_api_rss_mib_40",
    "scale_api_cpu_s_per_1000_40",
];

/// How many agents there are at once, and the rows of what they cost the API server.
const AGENTS: [(u16, [&str; 3]); 4] = [
    (0, ["", "", "scale_api_cpu_s_per_1000_0"]),
    (
        1,
        [
            "scale_api_start_cpu_s_1",
            "scale_api_rss_mib_1",
            "scale_api_cpu_s_per_1000_1",
        ],
    ),
    (
        10,
        [
            "scale_api_start_cpu_s_10",
            "scale_api_rss_mib_10",
            "scale_api_cpu_s_per_1000_10",
        ],
    ),
    (
        40,
        [
            "scale_api_start_cpu_s_40",
            "scale_api_rss_mib_40",
            "scale_api_cpu_s_per_1000_40",
        ],
    ),
];

/// Changes in one batch, and services of which all pods are replaced, which are as many pods.
const CHANGES: usize = 1000;
const ROLLED: usize = 50;
/// Between changes where nothing is to come of it that several are taken account of at once.
const SLOW: Duration = Duration::from_millis(60);
/// Between changes that many agents watch: on a small machine they have to keep up.
const STEADY: Duration = Duration::from_millis(20);
const STARTS: usize = 3;
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
    world.one_agent(bench, empty)?;
    for (count, rows) in AGENTS {
        check_interrupt()?;
        world.agents(bench, count, rows)?;
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
    /// Whether the pods that change are ready.
    ready: bool,
}

impl World {
    fn load(cluster: Cluster) -> anyhow::Result<Self> {
        let send = |requests: Vec<_>| api::send(&cluster, &requests, Duration::ZERO);
        send(objects::places())?;
        let uids = send((0..objects::PODS).map(objects::created).collect())?;
        check_interrupt()?;
        send((0..objects::PODS).map(|pod| objects::status(pod, true)).collect())?;
        send(objects::services())?;
        send(objects::slices(&uids))?;
        let ready = true;
        Ok(Self { cluster, uids, ready })
    }

    /// A thousand pods become ready, or are no longer, one each `every`.
    fn change(&mut self, every: Duration) -> anyhow::Result<()> {
        check_interrupt()?;
        self.ready = !self.ready;
        let changes = objects::turned(CHANGES, self.ready);
        api::send(&self.cluster, &changes, every)?;
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
        send(pods.iter().map(|pod| objects::status(*pod, true)).collect())?;
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
        let mut cost = |during: &mut dyn FnMut() -> anyhow::Result<()>,
                        rows: [(&'static str, &'static str, f64); 2]| {
            let before = [received(&place)?, agent.cpu_seconds()?];
            during()?;
            let cost = [received(&place)? - before[0], agent.cpu_seconds()? - before[1]];
            for ((name, unit, of), cost) in rows.into_iter().zip(cost) {
                bench.add(Row::of_adit(name, unit, &[cost / of]));
            }
            anyhow::Ok(())
        };
        let idle = [
            ("scale_idle_kib_per_min", "KiB", 1024.0),
            ("scale_idle_cpu_s_per_min", "s", 1.0),
        ];
        cost(&mut || Ok(sleep(MINUTE)), idle)?;
        let burst = [("scale_mib_per_1000", "MiB", MIB), ("scale_cpu_s_per_1000", "s", 1.0)];
        cost(&mut || self.change(Duration::ZERO), burst)?;
        let slow = [("", "MiB", MIB), ("scale_cpu_s_per_1000_slow", "s", 1.0)];
        cost(&mut || self.change(SLOW), slow)?;
        let replaced = [
            ("scale_mib_per_1000_replaced", "MiB", MIB),
            ("scale_cpu_s_per_1000_replaced", "s", 1.0),
        ];
        cost(&mut || self.replace(), replaced)?;
        sleep(REST);
        bench.add(Row::of_adit(
            "scale_rss_after_kib",
            "KiB",
            &[agent.resident_kib()? - empty],
        ));
        agent.stop()
    }

    /// What so many agents cost the API server.
    fn agents(
        &mut self,
        bench: &mut Bench,
        count: u16,
        [start, resident, changes]: [&'static str; 3],
    ) -> anyhow::Result<()> {
        let pids = self.cluster.control_plane().pids(Service::ApiServer)?;
        let server = *pids.first().context("no API server runs")?;
        let before = cpu_seconds(server)?;
        let agents: Vec<_> = (0..count)
            .map(|index| Agent::start(&self.cluster, index))
            .collect::<Result<_, _>>()?;
        for agent in &agents {
            agent.wait_ready()?;
        }
        if count > 0 {
            bench.add(Row::of_adit(start, "s", &[cpu_seconds(server)? - before]));
            bench.add(Row::of_adit(resident, "MiB", &[resident_kib(server)? as f64 / 1024.0]));
        }
        sleep(REST);
        let before = cpu_seconds(server)?;
        self.change(STEADY)?;
        bench.add(Row::of_adit(changes, "s", &[cpu_seconds(server)? - before]));
        agents.into_iter().try_for_each(Agent::stop)
    }
}
