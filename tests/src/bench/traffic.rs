//! The rows that are about traffic: throughput, latency, new connections, and what they cost.

use std::net::IpAddr;
use std::time::Duration;

use super::load::{self, Bulk};
use super::report::number;
use super::{Bench, Row, Samples, Side};
use crate::bed::{Bed, Pod, PodSpec, Running, ServiceSpec};

/// A round may last so much longer than its load.
pub(super) const GRACE: Duration = Duration::from_secs(15);

/// The bed of all rows but those about starting.
pub(super) struct World {
    // Before the bed, so that they end first.
    _servers: Vec<Running<()>>,
    bed: Bed,
}

/// The name of the service that leads to the server on the client's node.
const SERVICE: &str = "shop/near";

/// From where to where. The client is on node 1; for plain TCP, both ends are outside the mesh.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Route {
    /// To the other node, both ends enrolled.
    Cross,
    /// Within the node, both ends enrolled.
    Same,
    /// To the other node, the client enrolled.
    Egress,
    /// To the other node, the server enrolled.
    PlaintextIn,
    /// To a service's virtual address that leads to the server of `Same`.
    Service,
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
            .pod("n2", PodSpec::new("far").account("shop/far"))
            .service(
                ServiceSpec::new(SERVICE)
                    .port(load::CONNECT, load::CONNECT)
                    .selector("app", "near"),
            );
        let bed = bench.with_arguments(bed).start()?;
        serve_without_adit(&bed)?;
        let servers = ["plain-near", "plain-far", "near", "far"].map(|pod| bed.pod(pod).serve(load::serve));
        Ok(Self {
            _servers: servers.into_iter().collect::<anyhow::Result<_>>()?,
            bed,
        })
    }

    pub(super) fn bed(&self) -> &Bed {
        &self.bed
    }

    pub(super) fn pair(&self, side: Side, route: Route) -> (&Pod, IpAddr) {
        let (client, server) = match (side, route) {
            (Side::Plain, Route::Cross | Route::Egress | Route::PlaintextIn) => ("plain-client", Some("plain-far")),
            (Side::Plain, Route::Same) => ("plain-client", Some("plain-near")),
            (Side::Plain, Route::Service) => ("plain-client", None),
            (Side::Adit, Route::Cross) => ("client", Some("far")),
            (Side::Adit, Route::Same) => ("client", Some("near")),
            (Side::Adit, Route::Egress) => ("client", Some("plain-far")),
            (Side::Adit, Route::PlaintextIn) => ("plain-client", Some("far")),
            (Side::Adit, Route::Service) => ("client", None),
        };
        let server = match server {
            Some(pod) => self.bed.pod(pod).v4().into(),
            None => self.bed.service(SERVICE).at(load::CONNECT).ip(),
        };
        (self.bed.pod(client), server)
    }

    /// Adit's pair across nodes.
    pub(super) fn enrolled(&self) -> (&Pod, IpAddr) {
        self.pair(Side::Adit, Route::Cross)
    }

    fn bulk(&self, side: Side, route: Route, streams: usize, time: Duration) -> anyhow::Result<Bulk> {
        let (client, server) = self.pair(side, route);
        client.spawn(|| load::bulk(server, streams, time))?.join(time + GRACE)
    }
}

/// Makes the service's virtual address lead to the server outside the mesh, for the client outside the mesh: by a route
/// and an address of its own, which is the least that any load balancer could cost.
fn serve_without_adit(bed: &Bed) -> anyhow::Result<()> {
    let address = format!("{}/32", bed.service(SERVICE).at(load::CONNECT).ip());
    let near = bed.pod("plain-near");
    near.output("ip", &["address", "add", &address, "dev", "lo"])?;
    let via = near.v4().to_string();
    bed.pod("plain-client")
        .output("ip", &["route", "add", &address, "via", &via])?;
    Ok(())
}

/// Measures all rows about traffic.
pub(super) fn measure(bench: &mut Bench, world: &World) -> anyhow::Result<()> {
    cross_bulk(bench, world)?;
    latency(bench, world)?;
    connects(bench, world, "cross_connect_1", Route::Cross, 1)?;
    connects(bench, world, "cross_connect_16", Route::Cross, 16)?;
    bulk(bench, world, "same_bulk_1", Route::Same, 1)?;
    bulk(bench, world, "same_bulk_8", Route::Same, 8)?;
    transactions(bench, world, "same_pingpong_16_tps", Route::Same)?;
    connects(bench, world, "same_connect_1", Route::Same, 1)?;
    connects(bench, world, "same_connect_16", Route::Same, 16)?;
    bulk(bench, world, "egress_bulk_1", Route::Egress, 1)?;
    connects(bench, world, "egress_connect_16", Route::Egress, 16)?;
    bulk(bench, world, "plaintext_in_bulk_1", Route::PlaintextIn, 1)?;
    connects(bench, world, "service_connect_16", Route::Service, 16)
}

fn bulk(bench: &mut Bench, world: &World, name: &'static str, route: Route, streams: usize) -> anyhow::Result<()> {
    if bench.wants(name) {
        let time = bench.time;
        let sample = |side| Ok(world.bulk(side, route, streams, time)?.gbit_per_second());
        let samples = bench.in_turns(name, sample)?;
        bench.add(samples.row(name, "Gbit/s"));
    }
    Ok(())
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
            let before = [first.cpu_seconds()?, second.cpu_seconds()?];
            let bulk = world.bulk(side, Route::Cross, streams, time)?;
            let after = [first.cpu_seconds()?, second.cpu_seconds()?];
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
            let (client, server) = world.pair(side, Route::Cross);
            Ok(client.spawn(|| load::ping(server, 1, time))?.join(time + GRACE)?.p50_us)
        })?;
        bench.add(samples.row(name, "us"));
    }
    transactions(bench, world, "cross_pingpong_16_tps", Route::Cross)?;
    let name = "pingpong_beside_bulk_p50_us";
    if bench.wants(name) {
        let samples = bench.in_turns(name, |side| {
            let (client, server) = world.pair(side, Route::Cross);
            let pings = client.spawn(|| load::ping_beside_bulk(server, time))?;
            Ok(pings.join(time + GRACE)?.p50_us)
        })?;
        bench.add(samples.row(name, "us"));
    }
    Ok(())
}

fn transactions(bench: &mut Bench, world: &World, name: &'static str, route: Route) -> anyhow::Result<()> {
    if !bench.wants(name) {
        return Ok(());
    }
    let time = bench.time;
    let samples = bench.in_turns(name, |side| {
        let (client, server) = world.pair(side, route);
        Ok(client
            .spawn(|| load::ping(server, 16, time))?
            .join(time + GRACE)?
            .per_second)
    })?;
    bench.add(samples.row(name, "1/s"));
    Ok(())
}

fn connects(bench: &mut Bench, world: &World, name: &'static str, route: Route, threads: usize) -> anyhow::Result<()> {
    if !bench.wants(name) {
        return Ok(());
    }
    let time = bench.time;
    let mut failed = Vec::new();
    let samples: Samples = bench.in_turns(name, |side| {
        let (client, server) = world.pair(side, route);
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
