//! How soon a change of the mesh file takes effect: a policy that forbids open connections, a pod that joins.

use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::ensure;

use super::{Bench, Row, load};
use crate::bed::{Bed, PodSpec, wait_for};
use crate::sys::check_interrupt;

pub(super) const NAMES: &[&str] = &["policy_change_ms", "enrol_ms"];

/// After this time without effect, a change has none.
const LIMIT: Duration = Duration::from_secs(10);
/// For the client to open all connections.
const OPENING: Duration = Duration::from_secs(60);
/// Rounds of either change: each waits for the bed to be as before.
const ROUNDS: usize = 5;
const ROUNDS_QUICK: usize = 3;

/// Forbids what `load::hold_until_ended` has open.
fn forbids_client() -> String {
    format!(
        "
        name: not-the-client
        namespace: shop
        scope: workload
        selector: {{app: near}}
        action: deny
        rules:
          - from:
              - serviceAccounts: [client]
            to:
              - ports: ['{}']
        ",
        load::HOLD
    )
}

/// Measures the rows on a bed of their own: nothing of it is left in the memory of the proxies of other rows.
pub(super) fn measure(bench: &mut Bench) -> anyhow::Result<()> {
    let bed = bench.with_arguments(
        Bed::builder("change")
            .node("n1")
            .pod("n1", PodSpec::new("client").account("shop/client"))
            .pod("n1", PodSpec::new("near").account("shop/near"))
            .pod("n1", PodSpec::new("guarded").account("shop/guarded"))
            .pod("n1", PodSpec::new("late").account("shop/late").unknown())
            .policy(
                "
                name: only-late
                namespace: shop
                scope: workload
                selector: {app: guarded}
                action: allow
                rules:
                  - from:
                      - serviceAccounts: [late]
                ",
            ),
    );
    let bed = bed.start()?;
    if bench.wants("policy_change_ms") {
        policy_change(bench, &bed)?;
    }
    if bench.wants("enrol_ms") {
        enrol(bench, &bed)?;
    }
    Ok(())
}

fn policy_change(bench: &mut Bench, bed: &Bed) -> anyhow::Result<()> {
    let name = "policy_change_ms";
    let connections = if bench.quick { 1_000 } else { 5_000 };
    let mut times = Vec::new();
    for round in 0..rounds(bench) {
        check_interrupt()?;
        match policy_change_once(bed, connections, phase(round)) {
            Ok(time) => times.push(time),
            Err(error) => {
                // The next round would find the bed in no better state, after another wait.
                bench.note(format!("{name}, round {}: {error:#}", round + 1));
                break;
            }
        }
    }
    bench.add(Row::of_adit(name, "ms", &times));
    Ok(())
}

/// Milliseconds from the change of the file until the client has seen all of its connections end.
fn policy_change_once(bed: &Bed, connections: usize, pause: Duration) -> anyhow::Result<f64> {
    let (client, near) = (bed.pod("client"), bed.pod("near"));
    // A new one in each round: it keeps the ends of connections that others have ended.
    let server = near.serve(load::serve)?;
    let address = near.v4().into();
    let mut held = client.spawn_staged(|stage| load::hold_until_ended(stage, address, connections, LIMIT))?;
    let opened: usize = held.stage(OPENING)?;
    sleep(pause);
    let begin = Instant::now();
    bed.update(|mesh| mesh.policies.push(forbids_client()))?;
    let open = held.join(LIMIT * 2);
    let time = begin.elapsed();
    bed.update(|mesh| drop(mesh.policies.pop()))?;
    let open = open?;
    ensure!(
        open == 0,
        "{open} of {opened} connections were still open {LIMIT:?} after the policy that forbids them"
    );
    wait_for("the client to be let in again", LIMIT, || {
        client.run(|| Ok(load::is_greeted(address)))
    })?;
    drop(server);
    Ok(time.as_secs_f64() * 1e3)
}

fn enrol(bench: &mut Bench, bed: &Bed) -> anyhow::Result<()> {
    let name = "enrol_ms";
    let _server = bed.pod("guarded").serve(load::serve)?;
    let mut times = Vec::new();
    for round in 0..rounds(bench) {
        check_interrupt()?;
        match enrol_once(bed, phase(round)) {
            Ok(time) => times.push(time),
            Err(error) => {
                bench.note(format!("{name}, round {}: {error:#}", round + 1));
                break;
            }
        }
    }
    bench.add(Row::of_adit(name, "ms", &times));
    Ok(())
}

/// Milliseconds from the change of the file until the pod that it adds has got an answer for which it needs its
/// identity.
fn enrol_once(bed: &Bed, pause: Duration) -> anyhow::Result<f64> {
    let (late, server) = (bed.pod("late"), bed.pod("guarded").v4().into());
    let mut tries = late.spawn_staged(|stage| load::until_answered(stage, server, LIMIT))?;
    let answered: bool = tries.stage(LIMIT)?;
    ensure!(!answered, "the pod was answered before it was in the mesh");
    sleep(pause);
    let entry = late.entry(true);
    let begin = Instant::now();
    bed.update(|mesh| mesh.workloads.push(entry))?;
    let outcome = tries.join(LIMIT * 2);
    let time = begin.elapsed();
    bed.update(|mesh| mesh.workloads.retain(|workload| workload.name != late.name()))?;
    outcome?;
    // An attempt may also fail for want of time, so the proxy's word is needed too.
    wait_for("the pod to be let go", LIMIT, || {
        let enrolled = bed.node("n1").state()?["pods"].to_string().contains(&late.workload());
        Ok(!enrolled && late.run(|| Ok(!load::is_answered(server)))?)
    })?;
    Ok(time.as_secs_f64() * 1e3)
}

fn rounds(bench: &Bench) -> usize {
    bench.rounds.min(if bench.quick { ROUNDS_QUICK } else { ROUNDS })
}

/// A pause before a change, another in each round: a proxy that looks at the file at times is met at all of them.
fn phase(round: usize) -> Duration {
    Duration::from_millis(100 + (round as u64 * 190) % 500)
}
