//! A certificate authority that is away, and one whose root is changed.

use std::process::Command;
use std::time::Duration;

use anyhow::{Context, ensure};

use super::outage::{LOAD, echo_in};
use super::report::Report;
use super::world::{PORT, SOON, World};
use crate::bed::Running;
use crate::bed::process::binary;
use crate::net::Outcome;

/// For how long it is away.
const AWAY: Duration = Duration::from_secs(2);

/// Connections across the nodes, both ways, while something happens.
struct Traffic(Vec<Running<Outcome>>);

impl Traffic {
    fn begin(world: &World) -> anyhow::Result<Self> {
        let run = |from: &str, to: &str| {
            let servers = vec![world.pod(to).at(PORT)];
            world.pod(from).serve(move |stage| LOAD.run(stage, &servers))
        };
        Ok(Self(vec![run("cart", "web")?, run("web", "cart")?]))
    }

    /// Ends it and checks that none was lost.
    fn end(self, report: &mut Report, check: &str, meanwhile: &str) -> anyhow::Result<()> {
        let (mut made, mut exchanges, mut losses) = (0, 0, Vec::new());
        for running in self.0 {
            running.proceed()?;
            let outcome = running.join(2 * SOON)?;
            made += outcome.made;
            exchanges += outcome.exchanges;
            losses.extend(outcome.losses);
        }
        losses.iter().take(3).for_each(|loss| report.quote(loss));
        report.check(
            check,
            losses.is_empty() && made > 0 && exchanges > 0,
            format!(
                "{meanwhile}: {made} new connections, {exchanges} exchanges on open ones, {} failed",
                losses.len()
            ),
        );
        Ok(())
    }
}

pub(super) fn away(world: &World, report: &mut Report) -> anyhow::Result<()> {
    let _servers = echo_in(world, &["cart", "web"])?;
    let traffic = Traffic::begin(world)?;
    world.bed.kill_ca();
    std::thread::sleep(AWAY);
    // Its agents serve what they have, and say so.
    let node = world.node_of("cart");
    let valid = node.metrics()?.sum("adit_certificates", &[("state", "valid")]);
    world.bed.start_ca()?;
    let meanwhile = format!(
        "killed for {} s, {valid} certificates of {} in force",
        AWAY.as_secs(),
        node.name()
    );
    traffic.end(report, "nothing fails while the authority is away", &meanwhile)
}

/// Takes a step of the change, by the command that an operator uses.
fn rotate(world: &World, words: &[&str], report: &mut Report) -> anyhow::Result<()> {
    let mut command = Command::new(binary()?);
    command.args(["ca", "rotate"]).args(words).arg("--dir");
    let output = command
        .arg(&world.bed.ca_settings().dir)
        .output()
        .context("start adit ca rotate")?;
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8_lossy(&said);
    report.say(format!("adit ca rotate {}: {}", words.join(" "), said.trim()));
    ensure!(
        output.status.success(),
        "adit ca rotate {} failed: {said}",
        words.join(" ")
    );
    // As a ConfigMap does for the agents of a cluster.
    world.bed.introduce_ca()
}

pub(super) fn rotation(world: &World, report: &mut Report) -> anyhow::Result<()> {
    let _servers = echo_in(world, &["cart", "web"])?;
    let traffic = Traffic::begin(world)?;
    // An operator leaves time between them, for certificates to be renewed; here new agents get new ones at once, and make
    // new tunnels.
    for words in [&["publish"][..], &["sign", "--force"], &["retire", "--force"]] {
        rotate(world, words, report)?;
        for node in world.bed.nodes() {
            node.upgrade(&[])?;
        }
    }
    traffic.end(
        report,
        "a change of the root loses nothing",
        "a second root published, signed with, and the first retired",
    )?;
    for node in world.bed.nodes() {
        node.wait_left(2 * SOON)?;
    }
    Ok(())
}
