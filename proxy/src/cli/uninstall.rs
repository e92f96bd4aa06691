//! `adit node --uninstall`: lets the pods of this node go.

use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::drain::StopSignals;
use super::handover::{Predecessor, Turn};
use super::logging::LogSettings;
use crate::steer;

/// How long it may take until the word to stop has reached a proxy that runs.
const TOLD: Duration = Duration::from_secs(5);
const POLL: Duration = Duration::from_millis(100);

/// What `adit node --uninstall` must know.
#[derive(Debug)]
pub struct Uninstall {
    /// Level and form of the log.
    pub log: LogSettings,
    /// The folder of a bpffs in which maps and programs are pinned.
    pub bpf_dir: PathBuf,
    /// The folder of the socket at which a running proxy is heard.
    pub run_dir: PathBuf,
    /// Whether the command ends only when it is told to.
    pub stay: bool,
}

/// Runs `adit node --uninstall`.
pub async fn uninstall(what: Uninstall) -> anyhow::Result<()> {
    let Uninstall {
        bpf_dir, run_dir, stay, ..
    } = what;
    let mut stop = StopSignals::install()?;
    // Whoever is starting would put everything in its place after this.
    let turn = Turn::wait(&run_dir).await?;
    // One that has been told to stop carries on what it has, and changes nothing any more: all of it is taken away as a
    // successor would take it over.
    let mut running = find_leaving(&run_dir).await?;
    if let Some(running) = &mut running {
        running.freeze().await?;
    }
    if steer::uninstall(&bpf_dir)? {
        tracing::info!("removed all of Adit below {}", bpf_dir.display());
    } else {
        tracing::info!("there is nothing of Adit at {}", bpf_dir.display());
    }
    if let Some(running) = running {
        tracing::info!("{} carries on what it has open", running.name);
        // All is done: one that has just ended changes nothing.
        if let Err(error) = running.drain().await {
            tracing::debug!("{error:#}");
        }
    }
    drop(turn);
    if stay {
        stop.wait().await;
    }
    Ok(())
}

/// Looks for a proxy that runs and has been told to stop; that may have to reach it first. There must be no other.
async fn find_leaving(run_dir: &Path) -> anyhow::Result<Option<Predecessor>> {
    let deadline = Instant::now() + TOLD;
    loop {
        match Predecessor::find(run_dir).await? {
            Some(running) if !running.leaving && Instant::now() > deadline => {
                anyhow::bail!("{} would put everything back in its place; stop it first", running.name)
            }
            Some(running) if !running.leaving => sleep(POLL).await,
            found => return Ok(found),
        }
    }
}
