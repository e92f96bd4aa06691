//! What the kernel programs cost a connect: by the clock, against a process that they do not see, and by the kernel's
//! own count of their runs.

use std::fs::File;
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context;

use super::report::{median, number};
use super::traffic::{GRACE, Route, World};
use super::{Bench, Row, Side, load};
use crate::bed::Pod;
use crate::sys::{ProgramTime, attached_programs, check_interrupt, count_program_time, program_time};

const ENROLLED: &str = "connect_hook_ns";
const OUTSIDE: &str = "connect_hook_outside_ns";

/// `enum bpf_attach_type`: every kind that a cgroup's connections may meet: sock_create, sock_ops, bind4 and 6, connect4
/// and 6, getpeername4 and 6, getsockname4 and 6, sock_release.
const OF_CGROUPS: &[u32] = &[2, 3, 8, 9, 10, 11, 29, 30, 31, 32, 34];
/// `BPF_SK_LOOKUP`
const OF_NAMESPACES: &[u32] = &[36];
/// Short rounds, and many: the machine's own speed changes from second to second by more than what is measured.
const ROUND: Duration = Duration::from_millis(30);
const ROUNDS: usize = 41;

/// Measures both rows.
pub(super) fn measure(bench: &mut Bench, world: &World) -> anyhow::Result<()> {
    let node = world.bed().node("n1");
    if bench.wants(ENROLLED) {
        let (client, near) = world.pair(Side::Adit, Route::Same);
        let (_, plain_near) = world.pair(Side::Plain, Route::Same);
        row(bench, world, ENROLLED, plain_near, (client, near))?;
    }
    if bench.wants(OUTSIDE) {
        // In no pod's cgroup, so that the programs see the client's end only.
        let _host = node.serve(load::serve)?;
        let (client, _) = world.pair(Side::Plain, Route::Same);
        let host = IpAddr::V4(node.v4());
        row(bench, world, OUTSIDE, host, (client, host))?;
    }
    Ok(())
}

/// How much longer a refused connect takes by `adit`, a pod and its destination, than to the address `plain` by a
/// process in the network namespace of the pod outside the mesh, but in no pod's cgroup.
fn row(
    bench: &mut Bench,
    world: &World,
    name: &'static str,
    plain: IpAddr,
    adit: (&Pod, IpAddr),
) -> anyhow::Result<()> {
    let node = world.bed().node("n1");
    let (outside, _) = world.pair(Side::Plain, Route::Same);
    let (client, server) = adit;
    let (mut without, mut differences) = (Vec::new(), Vec::new());
    for round in 0..ROUNDS {
        check_interrupt()?;
        let plain = || node.spawn_in(outside, || load::refused(plain, ROUND))?.join(GRACE);
        let adit = || client.spawn(|| load::refused(server, ROUND))?.join(GRACE);
        let pair = if round % 2 == 0 {
            plain().and_then(|plain| Ok((plain, adit()?)))
        } else {
            adit().and_then(|adit| Ok((plain()?, adit)))
        };
        match pair {
            Ok((plain, adit)) => {
                without.push(plain);
                differences.push(adit - plain);
            }
            Err(error) => bench.note(format!("{name}, round {}: {error:#}", round + 1)),
        }
    }
    bench.add(Row::of_adit(name, "ns", &differences));
    if let Some(without) = median(&without) {
        bench.note(format!(
            "{name}: a refused connect takes {} ns where no program is attached",
            number(without)
        ));
    }
    match runs(bench, world, client, server) {
        Ok(runs) => bench.note(format!("{name}: one answered connection runs {runs}")),
        Err(error) => bench.note(format!("{name}, the programs' runs: {error:#}")),
    }
    Ok(())
}

/// What the kernel counts of its programs for one connection that is answered, program by program. The time is too long:
/// it has the reading of the clock in it, twice for each run.
fn runs(bench: &Bench, world: &World, client: &Pod, server: IpAddr) -> anyhow::Result<String> {
    let programs = programs(world)?;
    let _counting = count_program_time().context("make the kernel count the programs' run time")?;
    let before = times(&programs)?;
    let connects = client
        .spawn(|| load::connects(server, 1, bench.time))?
        .join(bench.time + GRACE)?;
    let after = times(&programs)?;
    let each = |count: u64| number(count as f64 / connects.done as f64);
    let shares = before
        .iter()
        .zip(&after)
        .filter(|(before, after)| after.runs > before.runs);
    let shares = shares.map(|(before, after)| {
        let (runs, time) = (after.runs - before.runs, after.nanoseconds - before.nanoseconds);
        format!("{} {} times, {} ns", after.name, each(runs), each(time))
    });
    Ok(shares.collect::<Vec<_>>().join("; "))
}

/// The programs that a connection of the first node's pods may meet: those of the pods' cgroup, of each pod's own, and
/// of each pod's network namespace.
fn programs(world: &World) -> anyhow::Result<Vec<u32>> {
    let node = world.bed().node("n1");
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
    for pod in world.bed().pods().iter().filter(|pod| pod.node() == node.name()) {
        add(pod.cgroup().to_owned(), OF_CGROUPS)?;
        add(pod.netns(), OF_NAMESPACES)?;
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
