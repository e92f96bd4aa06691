//! What the kernel programs cost a connection, by the kernel's own count of their run time.

use std::fs::File;
use std::net::IpAddr;
use std::path::PathBuf;

use anyhow::{Context, ensure};

use super::report::{median, number};
use super::traffic::{GRACE, Route, World};
use super::{Bench, Row, Side, load};
use crate::bed::Pod;
use crate::sys::{ProgramTime, attached_programs, check_interrupt, count_program_time, program_time};

/// `enum bpf_attach_type`: every kind that a cgroup's connections pass: sock_create, sock_ops, bind4 and 6, connect4
/// and 6, getpeername4 and 6, getsockname4 and 6, sock_release.
const OF_CGROUPS: &[u32] = &[2, 3, 8, 9, 10, 11, 29, 30, 31, 32, 34];
/// `BPF_SK_LOOKUP`
const OF_NAMESPACES: u32 = 36;
/// A program that runs for nanoseconds needs no long rounds.
const SHORTER: u32 = 3;

/// Runs and run time of one program in one connection.
struct Share {
    name: String,
    runs: f64,
    nanoseconds: f64,
}

/// Measures both rows.
pub(super) fn measure(bench: &mut Bench, world: &World) -> anyhow::Result<()> {
    const ENROLLED: &str = "connect_hook_ns";
    const OUTSIDE: &str = "connect_hook_outside_ns";
    if !bench.wants(ENROLLED) && !bench.wants(OUTSIDE) {
        return Ok(());
    }
    let node = world.bed().node("n1");
    // Outside the pods' cgroup, so that only the client's side is counted.
    let _host = node.serve(load::serve)?;
    let host = IpAddr::V4(node.v4());
    if bench.wants(ENROLLED) {
        let (client, near) = world.pair(Side::Adit, Route::Same);
        row(bench, world, ENROLLED, client, near)?;
        let per_connection = samples(bench, world, client, host)?;
        note(bench, "connect_hook_ns, to the node itself instead", &per_connection);
    }
    if bench.wants(OUTSIDE) {
        let (client, _) = world.pair(Side::Plain, Route::Same);
        row(bench, world, OUTSIDE, client, host)?;
    }
    Ok(())
}

fn row(bench: &mut Bench, world: &World, name: &'static str, client: &Pod, server: IpAddr) -> anyhow::Result<()> {
    let rounds = samples(bench, world, client, server)?;
    note(bench, name, &rounds);
    let totals: Vec<f64> = rounds.iter().map(|shares| total(shares)).collect();
    bench.add(Row::of_adit(name, "ns", &totals));
    Ok(())
}

/// For each round, what each program that ran took of one connection.
fn samples(bench: &Bench, world: &World, client: &Pod, server: IpAddr) -> anyhow::Result<Vec<Vec<Share>>> {
    let programs = programs(world)?;
    let time = bench.time / SHORTER;
    let _counting = count_program_time().context("make the kernel count the programs' run time")?;
    let rounds = (0..bench.rounds).map(|_| {
        check_interrupt()?;
        let before = times(&programs)?;
        let connects = client.spawn(|| load::connects(server, 1, time))?.join(time + GRACE)?;
        let after = times(&programs)?;
        ensure!(
            connects.errors == 0,
            "{} connections failed: {}",
            connects.errors,
            connects.error.unwrap_or_default()
        );
        let shares = before.into_iter().zip(after).map(|(before, after)| Share {
            runs: (after.runs - before.runs) as f64 / connects.done as f64,
            nanoseconds: (after.nanoseconds - before.nanoseconds) as f64 / connects.done as f64,
            name: after.name,
        });
        Ok(shares.filter(|share| share.runs > 0.0).collect())
    });
    rounds.collect()
}

/// The programs that a connection of the first node's pods may meet: those of the pods' cgroup, of each pod's own, and
/// of each pod's network namespace.
fn programs(world: &World) -> anyhow::Result<Vec<u32>> {
    let node = world.bed().node("n1");
    let pods: Vec<&Pod> = world
        .bed()
        .pods()
        .iter()
        .filter(|pod| pod.node() == node.name())
        .collect();
    let mut programs = Vec::new();
    let mut add = |path: PathBuf, kinds: &[u32]| -> anyhow::Result<()> {
        let target = File::open(&path).with_context(|| format!("open {}", path.display()))?;
        for kind in kinds {
            let found = attached_programs(&target, *kind)
                .with_context(|| format!("ask for the programs attached to {}", path.display()))?;
            programs.extend(found);
        }
        Ok(())
    };
    add(node.pods_cgroup().to_owned(), OF_CGROUPS)?;
    for pod in pods {
        add(pod.cgroup().to_owned(), OF_CGROUPS)?;
        add(pod.netns(), &[OF_NAMESPACES])?;
    }
    programs.sort_unstable();
    programs.dedup();
    Ok(programs)
}

fn times(programs: &[u32]) -> anyhow::Result<Vec<ProgramTime>> {
    let times = programs.iter().map(|id| program_time(*id));
    times
        .collect::<std::io::Result<_>>()
        .context("read the counters of the attached programs")
}

fn total(shares: &[Share]) -> f64 {
    shares.iter().map(|share| share.nanoseconds).sum()
}

/// Notes the round in the middle, program by program.
fn note(bench: &mut Bench, what: &str, rounds: &[Vec<Share>]) {
    let totals: Vec<f64> = rounds.iter().map(|shares| total(shares)).collect();
    let Some(middle) = median(&totals) else { return };
    let nearest = rounds
        .iter()
        .min_by(|one, other| (total(one) - middle).abs().total_cmp(&(total(other) - middle).abs()));
    let shares = nearest.into_iter().flatten().map(|share| {
        format!(
            "{} {} ns in {} runs",
            share.name,
            number(share.nanoseconds),
            number(share.runs)
        )
    });
    let shares: Vec<String> = shares.collect();
    bench.note(format!(
        "{what}: {} ns a connection: {}",
        number(middle),
        shares.join(", ")
    ));
}
