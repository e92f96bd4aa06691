//! The proxies' memory: idle, with many connections, and after the load.

use std::thread::sleep;
use std::time::Duration;

use super::traffic::World;
use super::{Bench, Row, load};
use crate::bed::Bed;
use crate::sys::check_interrupt;

/// Connections that are open at once.
const CONNECTIONS: usize = 5_000;
/// For work to end that goes on after the last byte.
const SETTLE: Duration = Duration::from_millis(700);
/// From the last of the load to the last look.
const REST: Duration = Duration::from_secs(15);
const DEADLINE: Duration = Duration::from_secs(60);

/// The larger of the two proxies' resident memory, before any traffic.
pub(super) fn idle(bench: &mut Bench, world: &World) -> anyhow::Result<f64> {
    sleep(SETTLE);
    let idle = largest(world.bed())?;
    bench.add(Row::of_adit("rss_idle_kib", "KiB", &[idle]));
    Ok(idle)
}

/// The growth of resident memory by idle connections across nodes, mean of the two proxies.
pub(super) fn per_connection(bench: &mut Bench, world: &World) -> anyhow::Result<()> {
    let name = "rss_per_connection_kib";
    if !bench.wants(name) && !bench.wants("rss_after_load_ratio") {
        return Ok(());
    }
    let (client, server) = world.enrolled();
    // What the first connections bring into memory (code, tunnel, tables) is no connection's own.
    let mut warm = client.spawn_staged(|stage| load::hold(stage, server, 64))?;
    let _opened: usize = warm.stage(DEADLINE)?;
    warm.proceed()?;
    warm.join(DEADLINE)?;
    sleep(SETTLE);
    let before = total(world.bed())?;
    let mut held = client.spawn_staged(|stage| load::hold(stage, server, CONNECTIONS))?;
    match held.stage::<usize>(DEADLINE) {
        Ok(opened) => {
            sleep(SETTLE);
            let growth = (total(world.bed())? - before) / world.bed().nodes().len() as f64 / opened as f64;
            bench.add(Row::of_adit(name, "KiB", &[growth]));
            held.proceed()?;
            held.join(DEADLINE)?;
        }
        Err(error) => {
            bench.note(format!("{name}: {error:#}"));
            bench.add(Row::of_adit(name, "KiB", &[]));
        }
    }
    Ok(())
}

/// Resident memory some time after the load, over that of the idle proxy.
pub(super) fn after_load(bench: &mut Bench, world: &World, idle: f64) -> anyhow::Result<()> {
    let name = "rss_after_load_ratio";
    if !bench.wants(name) {
        return Ok(());
    }
    if !bench.wants("cross_bulk_8") {
        let (client, server) = world.enrolled();
        client
            .spawn(|| load::bulk(server, 8, Duration::from_secs(2)))?
            .join(DEADLINE)?;
    }
    for _ in 0..REST.as_secs() {
        check_interrupt()?;
        sleep(Duration::from_secs(1));
    }
    bench.add(Row::of_adit(name, "ratio", &[largest(world.bed())? / idle]));
    Ok(())
}

fn resident(bed: &Bed) -> anyhow::Result<Vec<f64>> {
    bed.nodes().iter().map(|node| Ok(node.resident_kib()? as f64)).collect()
}

fn total(bed: &Bed) -> anyhow::Result<f64> {
    Ok(resident(bed)?.into_iter().sum())
}

fn largest(bed: &Bed) -> anyhow::Result<f64> {
    Ok(resident(bed)?.into_iter().fold(0.0, f64::max))
}
