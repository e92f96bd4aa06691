//! A node full of pods: how long its proxy takes to enrol them all, and its memory.

use std::thread::sleep;
use std::time::Duration;

use anyhow::ensure;
use nix::sys::signal::Signal;

use super::start::{DEADLINE, time_to_ready};
use super::{Bench, Row};
use crate::bed::{Bed, PodSpec};
use crate::sys::check_interrupt;

pub(super) const NAMES: &[&str] = &["enrol_200_pods_ms", "rss_200_pods_kib"];

const PODS: usize = 200;
/// For work to end that goes on after readiness.
const SETTLE: Duration = Duration::from_millis(500);
const ROUNDS: usize = 5;
const ROUNDS_QUICK: usize = 3;

/// Starts the proxy of a node of 200 pods over and over.
pub(super) fn measure(bench: &mut Bench) -> anyhow::Result<()> {
    let bed = (0..PODS).fold(Bed::builder("crowd").node("n1"), |bed, index| {
        let name = format!("p{index}");
        // An identity each: the most that so many pods can ask for.
        bed.pod("n1", PodSpec::new(&name).account(&format!("shop/{name}")))
    });
    let bed = bench.with_arguments(bed).build()?;
    bed.start_ca()?;
    bed.introduce_ca()?;
    let node = bed.node("n1");
    let (mut ready, mut resident) = (Vec::new(), Vec::new());
    for round in 0..bench.rounds.min(if bench.quick { ROUNDS_QUICK } else { ROUNDS }) {
        check_interrupt()?;
        if round > 0 {
            node.signal(Signal::SIGTERM)?;
            let status = node.wait_ended(DEADLINE)?;
            ensure!(
                status.success(),
                "the proxy of n1 was told to stop and ended with {status}"
            );
        }
        ready.push(time_to_ready(node)?);
        let pods = node.state()?["pods"].as_array().map_or(0, Vec::len);
        ensure!(
            pods == PODS,
            "the proxy says that it is ready and has enrolled {pods} of {PODS} pods"
        );
        sleep(SETTLE);
        resident.push(node.resident_kib()? as f64);
    }
    bench.add(Row::of_adit("enrol_200_pods_ms", "ms", &ready));
    bench.add(Row::of_adit("rss_200_pods_kib", "KiB", &resident));
    Ok(())
}
