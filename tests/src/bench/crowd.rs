//! A node full of pods: how long its proxy takes to enrol them all and to get their certificates, and its memory.

use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::ensure;
use nix::sys::signal::Signal;

use super::start::{DEADLINE, time_to_ready};
use super::{Bench, Row};
use crate::bed::process::CaSettings;
use crate::bed::{Bed, Node, PodSpec};
use crate::sys::check_interrupt;

pub(super) const NAMES: &[&str] = &[
    "enrol_200_pods_ms",
    "rss_200_pods_kib",
    "identity_fetch_200_ms",
    "rss_per_identity_kib",
];

const PODS: usize = 200;
/// The service account that they share at first.
const ALL: &str = "all";
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
    start_ca(&bed)?;
    let node = bed.node("n1");
    let (mut ready, mut resident) = (Vec::new(), Vec::new());
    for round in 0..bench.rounds.min(if bench.quick { ROUNDS_QUICK } else { ROUNDS }) {
        check_interrupt()?;
        if round > 0 {
            stop(node)?;
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
    identities(bench, &bed)
}

/// Gives the pods one identity for all and then each its own, over and over: what differs is the identities'.
fn identities(bench: &mut Bench, bed: &Bed) -> anyhow::Result<()> {
    let node = bed.node("n1");
    let (mut fetch, mut resident) = (Vec::new(), Vec::new());
    for _ in 0..bench.rounds.min(if bench.quick { ROUNDS_QUICK } else { ROUNDS }) {
        check_interrupt()?;
        change_identities(bed, |_| ALL.to_owned())?;
        // Anew, so that nothing is left of identities it has had before.
        stop(node)?;
        time_to_ready(node)?;
        await_certificates(node, 1)?;
        sleep(SETTLE);
        let shared = node.resident_kib()? as f64;
        change_identities(bed, str::to_owned)?;
        // That the file has changed is seen some time later.
        let begin = await_that(node, "the first of the new identities", |all, _| all > 1.0)?;
        await_certificates(node, PODS)?;
        fetch.push(begin.elapsed().as_secs_f64() * 1e3);
        sleep(SETTLE);
        resident.push((node.resident_kib()? as f64 - shared) / (PODS - 1) as f64);
    }
    bench.add(Row::of_adit("identity_fetch_200_ms", "ms", &fetch));
    bench.add(Row::of_adit("rss_per_identity_kib", "KiB", &resident));
    Ok(())
}

fn stop(node: &Node) -> anyhow::Result<()> {
    node.signal(Signal::SIGTERM)?;
    let status = node.wait_ended(DEADLINE)?;
    ensure!(
        status.success(),
        "the proxy of n1 was told to stop and ended with {status}"
    );
    Ok(())
}

/// Starts a CA that grants the node each identity that its pods have at any time: how soon it sees a change does not count.
fn start_ca(bed: &Bed) -> anyhow::Result<()> {
    let mesh = bed.dir().join("of-the-ca.yaml");
    let mut written = Ok(());
    bed.update(|whole| {
        let mut all = whole.clone();
        let mut shared = all.workloads[0].clone();
        ALL.clone_into(&mut shared.name);
        ALL.clone_into(&mut shared.service_account);
        ALL.clone_into(&mut shared.uid);
        shared.addresses = vec![std::net::Ipv4Addr::new(10, 255, 255, 1).into()];
        all.workloads.push(shared);
        written = all.to_yaml().and_then(|text| Ok(std::fs::write(&mesh, text)?));
    })?;
    written?;
    bed.start_ca_with(&CaSettings {
        mesh,
        ..bed.ca_settings().clone()
    })?;
    bed.introduce_ca()
}

fn change_identities(bed: &Bed, account: impl Fn(&str) -> String) -> anyhow::Result<()> {
    bed.update(|mesh| {
        for workload in &mut mesh.workloads {
            workload.service_account = account(&workload.name);
        }
    })
}

/// Waits until so many identities have a valid certificate, and all that there are: one that was just given up may be
/// among them.
fn await_certificates(node: &Node, count: usize) -> anyhow::Result<Instant> {
    let count = count as f64;
    let what = format!("certificates of {count} identities");
    await_that(node, &what, |all, valid| valid >= count && valid == all)
}

/// Waits until the numbers of all identities and of those that have a valid certificate are as wanted, and says when
/// that was.
fn await_that(node: &Node, what: &str, wanted: impl Fn(f64, f64) -> bool) -> anyhow::Result<Instant> {
    let begin = Instant::now();
    loop {
        let metrics = node.metrics()?;
        let all = metrics.sum("adit_certificates", &[]);
        let valid = metrics.sum("adit_certificates", &[("state", "valid")]);
        if wanted(all, valid) {
            return Ok(Instant::now());
        }
        ensure!(
            begin.elapsed() < DEADLINE,
            "waited for {what} in vain: {valid} of {all} are valid; the proxy's log:\n{}",
            node.log().tail()
        );
        sleep(Duration::from_millis(5));
    }
}
