//! How long a proxy takes to be ready, and a connection that finds no tunnel yet.

use std::time::{Duration, Instant};

use anyhow::{bail, ensure};
use nix::sys::signal::Signal;

use super::{Bench, Samples, Side, load};
use crate::bed::{Bed, Node, PodSpec};
use crate::sys::check_interrupt;

pub(super) const NAMES: &[&str] = &["ready_ms", "first_connection_ms"];

pub(super) const DEADLINE: Duration = Duration::from_secs(20);

/// Starts one node's proxy over and over; after each start the first connection has no tunnel to take.
pub(super) fn measure(bench: &mut Bench) -> anyhow::Result<()> {
    let bed = bench.with_arguments(
        Bed::builder("start")
            .node("n1")
            .node("n2")
            .pod("n1", PodSpec::new("plain-client").account("other/client").outside())
            .pod("n2", PodSpec::new("plain-server").account("other/server").outside())
            .pod("n1", PodSpec::new("client").account("shop/client"))
            .pod("n1", PodSpec::new("neighbour").account("shop/neighbour"))
            .pod("n2", PodSpec::new("server").account("shop/server")),
    );
    let bed = bed.start()?;
    let _servers = [
        bed.pod("plain-server").serve(load::serve)?,
        bed.pod("server").serve(load::serve)?,
    ];
    let node = bed.node("n1");
    let (mut ready, mut samples) = (Vec::new(), Samples::default());
    for round in 0..bench.rounds {
        check_interrupt()?;
        node.signal(Signal::SIGTERM)?;
        let status = node.wait_ended(DEADLINE)?;
        ensure!(
            status.success(),
            "the proxy of n1 was told to stop and ended with {status}"
        );
        ready.push(time_to_ready(node)?);
        for (side, client, server) in [
            (Side::Plain, "plain-client", "plain-server"),
            (Side::Adit, "client", "server"),
        ] {
            let server = bed.pod(server).v4().into();
            match bed.pod(client).run(|| load::first_answer(server)) {
                Ok(time) => samples.of(side).push(time),
                Err(error) => bench.note(format!("first_connection_ms, {side:?}, round {}: {error:#}", round + 1)),
            }
        }
    }
    bench.add(super::Row::of_adit("ready_ms", "ms", &ready));
    bench.add(samples.row("first_connection_ms", "ms"));
    Ok(())
}

/// Milliseconds from the start of the program to the first time it says that it is ready.
pub(super) fn time_to_ready(node: &Node) -> anyhow::Result<f64> {
    let begin = Instant::now();
    node.launch()?;
    loop {
        if node.get("/healthz/ready").is_ok_and(|answer| answer.status == 200) {
            return Ok(begin.elapsed().as_secs_f64() * 1e3);
        }
        if !node.is_running() || begin.elapsed() > DEADLINE {
            bail!(
                "the proxy of {} does not become ready; its log:\n{}",
                node.name(),
                node.log().tail()
            );
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}
