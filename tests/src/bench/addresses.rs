//! What a hundred thousand known addresses cost: in the hook, in the proxy's memory and in the kernel's maps.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use anyhow::{Context, ensure};

use super::{Bench, Row, load};
use crate::bed::{Bed, Node, PodSpec, wait_for};
use crate::sys::check_interrupt;

const HOOK: &str = "connect_hook_100k_ns";
const RESIDENT: &str = "rss_100k_kib";
const MAPS: &str = "maps_100k_kib";
pub(super) const NAMES: &[&str] = &[HOOK, RESIDENT, MAPS];

const ADDRESSES: u32 = 100_000;
/// The first of them; nobody has any of them.
const FIRST: Ipv4Addr = Ipv4Addr::new(100, 64, 0, 1);
/// As in the rows on hooks.
const ROUND: Duration = Duration::from_millis(30);
const ROUNDS: usize = 41;
const GRACE: Duration = Duration::from_secs(30);
/// For the file to be read, by the authority and the proxy, and the maps to be filled.
const TOLD: Duration = Duration::from_secs(120);

/// Compares two beds, of which one knows so many addresses.
pub(super) fn measure(bench: &mut Bench) -> anyhow::Result<()> {
    let few = bed(bench, "few")?;
    let many = bed(bench, "many")?;
    many.update(|mesh| {
        let Some(outside) = mesh.workload("outside").cloned() else {
            return;
        };
        mesh.workloads.extend((0..ADDRESSES).map(|index| {
            let mut workload = outside.clone();
            workload.name = format!("w{index}");
            workload.uid = format!("w{index}");
            workload.netns = None;
            workload.addresses = vec![IpAddr::V4(Ipv4Addr::from(FIRST.to_bits() + index))];
            workload
        }));
    })?;
    let (few, many) = (started(few)?, started(many)?);
    let mut differences = Vec::new();
    for round in 0..ROUNDS {
        check_interrupt()?;
        let connect = |bed: &Bed| {
            let near = IpAddr::V4(bed.pod("near").v4());
            bed.pod("client").spawn(move || load::refused(near, ROUND))?.join(GRACE)
        };
        let (few, many) = if round % 2 == 0 {
            let few = connect(&few)?;
            (few, connect(&many)?)
        } else {
            let many = connect(&many)?;
            (connect(&few)?, many)
        };
        differences.push(many - few);
    }
    bench.add(Row::of_adit(HOOK, "ns", &differences));
    let growth = |of: fn(&Node) -> anyhow::Result<u64>| -> anyhow::Result<f64> {
        Ok(of(many.node("n1"))? as f64 - of(few.node("n1"))? as f64)
    };
    bench.add(Row::of_adit(RESIDENT, "KiB", &[growth(Node::resident_kib)?]));
    bench.add(Row::of_adit(MAPS, "KiB", &[growth(maps_kib)?]));
    Ok(())
}

fn bed(bench: &Bench, name: &str) -> anyhow::Result<Bed> {
    let bed = Bed::builder(name)
        .node("n1")
        .pod("n1", PodSpec::new("client").account("shop/client"))
        .pod("n1", PodSpec::new("near").account("shop/near"))
        .pod("n1", PodSpec::new("outside").account("other/outside").outside());
    bench.with_arguments(bed).build()
}

/// Starts the bed, and waits until the kernel has been told all.
fn started(bed: Bed) -> anyhow::Result<Bed> {
    bed.start_ca()?;
    bed.introduce_ca()?;
    let node = bed.node("n1");
    node.launch()?;
    node.wait_ready(TOLD)?;
    let unplaced = || Ok(node.metrics()?.sum("adit_unplaced", &[]) == 0.0);
    wait_for("all to have a place", GRACE, unplaced)?;
    // What starting took is given back a moment after.
    std::thread::sleep(Duration::from_secs(2));
    Ok(bed)
}

/// The memory of all BPF maps that the proxy holds, as the kernel accounts it, in KiB.
fn maps_kib(node: &Node) -> anyhow::Result<u64> {
    let pid = node.pid().context("no proxy runs")?;
    let mut maps: HashMap<u64, u64> = HashMap::new();
    for file in std::fs::read_dir(format!("/proc/{pid}/fdinfo")).context("read the proxy's descriptors")? {
        let Ok(info) = std::fs::read_to_string(file?.path()) else {
            continue;
        };
        let field = |name: &str| -> Option<u64> {
            let line = info.lines().find_map(|line| line.strip_prefix(name))?;
            line.trim().parse().ok()
        };
        if let (Some(id), Some(bytes)) = (field("map_id:"), field("memlock:")) {
            maps.insert(id, bytes);
        }
    }
    ensure!(!maps.is_empty(), "the proxy holds no maps");
    Ok(maps.values().sum::<u64>() / 1024)
}
