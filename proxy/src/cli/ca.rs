//! `adit ca`: where the authority's own flags are mounted.

use clap::Args;

use super::args::LogArgs;
use super::logging::LogSettings;

// MOUNT POINT: the authority's flags and its `token` subcommand (`crate::ca::args`) go into this struct by
// `#[command(flatten)]` or `#[command(subcommand)]`, and `run` below hands them on. The configuration file works for
// them as for `adit node`, with no more to be done: it goes by the names of the flags.
/// The flags of `adit ca`.
#[derive(Debug, Clone, Args)]
pub struct CaArgs {
    #[command(flatten)]
    log: LogArgs,
}

impl CaArgs {
    /// Level and form of the log.
    pub fn log(&self) -> LogSettings {
        self.log.clone().into()
    }
}

/// Runs the authority, or the command below it.
pub(super) async fn run(_args: CaArgs) -> anyhow::Result<()> {
    anyhow::bail!("the certificate authority is not wired yet")
}
