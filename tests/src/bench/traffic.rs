//! The rows that are about traffic: throughput, latency, new connections, and what they cost.

use std::net::IpAddr;
use std::time::Duration;

use super::load::{self, Bulk};
use super::report::number;
use super::start::cpu_seconds;
use super::{Bench, Row, Samples, Side};
use crate::bed::{Bed, Pod, PodSpec, Running};

/// A round may last so much longer than its load.
const GRACE: Duration = Duration::from_secs(15);

/// The bed of all rows but those about starting.
pub(super) struct World {
    // Before the bed, so that they end first.
    _servers: Vec<Running<()>>,
    bed: Bed,
}

/// Where the server is, seen from the client's node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Distance {
    Cross,
    Same,
}

impl World {
    /// Two nodes, each with a pair of pods outside the mesh and a pair of enrolled ones on alike links; servers in all but
    /// the clients.
    pub(super) fn start(bench: &Bench) -> anyhow::Result<Self> {
        let bed = Bed::builder("bench")
            .node("n1")
            .node("n2")
            .pod("n1", PodSpec::new("plain-client").account("other/client").outside())
            .pod("n1", PodSpec::new("plain-near").account("other/near").outside())
            .pod("n2", PodSpec::new("plain-far").account("other/far").outside())
            .pod("n1", PodSpec::new("client").account("shop/client"))
            .pod("n1", PodSpec::new("near").account("shop/near"))
            .pod("n2", PodSpec::new("far").account("shop/far"));
        let bed = bench.with_arguments(bed).start()?;
        let servers = ["plain-near", "plain-far", "near", "far"].map(|pod| bed.pod(pod).serve(load::serve));
        Ok(Self {
            _servers: servers.into_iter().collect::<anyhow::Result<_>>()?,
            bed,
        })
    }

    pub(super) fn bed(&self) -> &Bed {
        &self.bed
    }

    fn pair(&self, side: Side, distance: Distance) -> (&Pod, IpAddr) {
        let (client, server) = match (side, distance) {
            (Side::Plain, Distance::Cross) => ("plain-client", "plain-far"),
            (Side::Plain, Distance::Same) => ("plain-client", "plain-near"),
            (Side::Adit, Distance::Cross) => ("client", "far"),
            (Side::Adit, Distance::Same) => ("client", "near"),
        };
        (self.bed.pod(client), self.bed.pod(server).v4().into())
    }

    /// Adit's pair across nodes.
    pub(super) fn enrolled(&self) -> (&Pod, IpAddr) {
        self.pair(Side::Adit, Distance::Cross)
    }

    fn bulk(&self, side: Side, distance: Distance, streams: usize, time: Duration) -> anyhow::Result<Bulk> {
        let (client, server) = self.pair(side, distance);
        client.spawn(|| load::bulk(server, streams, time))?.join(time + GRACE)
    }
}

/// Measures all rows about traffic.
pub(super) fn measure(bench: &mut Bench, world: &World) -> anyhow::Result<()> {
    cross_bulk(bench, world)?;
    latency(bench, world)?;
    connects(bench, world, "cross_connect_1", Distance::Cross, 1)?;
    connects(bench, world, "cross_connect_16", Distance::Cross, 16)?;
    for (name, streams) in [("same_bulk_1", 1), ("same_bulk_8", 8)] {
        if bench.wants(name) {
            let time = bench.time;
            let sample = |side| Ok(world.bulk(side, Distance::Same, streams, time)?.gbit_per_second());
            let samples = bench.in_turns(name, sample)?;
            bench.add(samples.row(name, "Gbit/s"));
        }
    }
    transactions(bench, world, "same_pingpong_16_tps", Distance::Same)?;
    connects(bench, world, "same_connect_1", Distance::Same, 1)?;
    connects(bench, world, "same_connect_16", Distance::Same, 16)
}

/// CPU seconds of each proxy over the bytes of one round.
struct Cost {
    nodes: [f64; 2],
    bytes: u64,
}

impl Cost {
    fn per_gigabyte(&self) -> f64 {
        (self.nodes[0] + self.nodes[1]) * 1e9 / self.bytes as f64
    }
}

fn cross_bulk(bench: &mut Bench, world: &World) -> anyhow::Result<()> {
    let time = bench.time;
    let mut all = Vec::new();
    for (name, streams) in [("cross_bulk_1", 1), ("cross_bulk_8", 8)] {
        if !bench.wants(name) && !bench.wants("cross_cpu_s_per_gb") {
            continue;
        }
        let mut costs = Vec::new();
        let samples = bench.in_turns(name, |side| {
            let [first, second] = [world.bed.node("n1"), world.bed.node("n2")];
            let before = [cpu_seconds(first)?, cpu_seconds(second)?];
            let bulk = world.bulk(side, Distance::Cross, streams, time)?;
            let after = [cpu_seconds(first)?, cpu_seconds(second)?];
            if side == Side::Adit {
                costs.push(Cost {
                    nodes: [after[0] - before[0], after[1] - before[1]],
                    bytes: bulk.bytes,
                });
            }
            Ok(bulk.gbit_per_second())
        })?;
        bench.add(samples.row(name, "Gbit/s"));
        let bytes: u64 = costs.iter().map(|cost| cost.bytes).sum();
        if bytes > 0 {
            let [sender, receiver] =
                [0, 1].map(|node| costs.iter().map(|cost| cost.nodes[node]).sum::<f64>() * 1e9 / bytes as f64);
            bench.note(format!(
                "{name}: {} CPU s/GB in the proxy of the client's node, {} in that of the server's",
                number(sender),
                number(receiver)
            ));
        }
        all.extend(costs.iter().map(Cost::per_gigabyte));
    }
    bench.add(Row::of_adit("cross_cpu_s_per_gb", "s/GB", &all));
    Ok(())
}

fn latency(bench: &mut Bench, world: &World) -> anyhow::Result<()> {
    let time = bench.time;
    let name = "cross_pingpong_1_p50_us";
    if bench.wants(name) {
        let samples = bench.in_turns(name, |side| {
            let (client, server) = world.pair(side, Distance::Cross);
            Ok(client.spawn(|| load::ping(server, 1, time))?.join(time + GRACE)?.p50_us)
        })?;
        bench.add(samples.row(name, "us"));
    }
    transactions(bench, world, "cross_pingpong_16_tps", Distance::Cross)?;
    let name = "pingpong_beside_bulk_p50_us";
    if bench.wants(name) {
        let samples = bench.in_turns(name, |side| {
            let (client, server) = world.pair(side, Distance::Cross);
            let pings = client.spawn(|| load::ping_beside_bulk(server, time))?;
            Ok(pings.join(time + GRACE)?.p50_us)
        })?;
        bench.add(samples.row(name, "us"));
    }
    Ok(())
}

fn transactions(bench: &mut Bench, world: &World, name: &'static str, distance: Distance) -> anyhow::Result<()> {
    if !bench.wants(name) {
        return Ok(());
    }
    let time = bench.time;
    let samples = bench.in_turns(name, |side| {
        let (client, server) = world.pair(side, distance);
        Ok(client
            .spawn(|| load::ping(server, 16, time))?
            .join(time + GRACE)?
            .per_second)
    })?;
    bench.add(samples.row(name, "1/s"));
    Ok(())
}

fn connects(
    bench: &mut Bench,
    world: &World,
    name: &'static str,
    distance: Distance,
    threads: usize,
) -> anyhow::Result<()> {
    if !bench.wants(name) {
        return Ok(());
    }
    let time = bench.time;
    let mut failed = Vec::new();
    let samples: Samples = bench.in_turns(name, |side| {
        let (client, server) = world.pair(side, distance);
        let connects = client
            .spawn(|| load::connects(server, threads, time))?
            .join(time + GRACE)?;
        if let Some(error) = connects.error {
            failed.push(format!(
                "{name}, {side:?}: {} connections failed: {error}",
                connects.errors
            ));
        }
        Ok(connects.per_second)
    })?;
    failed.into_iter().for_each(|note| bench.note(note));
    bench.add(samples.row(name, "1/s"));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cost_is_cpu_of_both_proxies_over_gigabytes() {
        let cost = Cost {
            nodes: [0.5, 1.0],
            bytes: 500_000_000,
        };
        assert_eq!(cost.per_gigabyte(), 3.0);
    }
}
