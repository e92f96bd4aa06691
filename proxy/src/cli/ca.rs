//! `adit ca` and `adit ca token`.

use clap::{Args, Subcommand};

use super::args::LogArgs;
use super::logging::LogSettings;
use super::node::StopSignals;
use crate::ca;
use crate::mesh::source::FileSource;

/// `adit ca` and the command below it.
#[derive(Debug, Clone, Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub struct CaCommand {
    #[command(subcommand)]
    below: Option<Below>,
    #[command(flatten)]
    serve: Option<ca::CaArgs>,
    #[command(flatten)]
    log: LogArgs,
}

#[derive(Debug, Clone, Subcommand)]
enum Below {
    Token(ca::TokenArgs),
}

impl CaCommand {
    /// Level and form of the log.
    pub fn log(&self) -> LogSettings {
        self.log.clone().into()
    }
}

/// Runs the authority, or the command below it.
pub(super) async fn run(command: CaCommand) -> anyhow::Result<()> {
    match (command.below, command.serve) {
        (Some(Below::Token(args)), _) => ca::run_token(args),
        (None, Some(args)) => serve(args).await,
        (None, None) => anyhow::bail!("adit ca needs --mesh; see adit ca --help"),
    }
}

async fn serve(args: ca::CaArgs) -> anyhow::Result<()> {
    let mut stop = StopSignals::install()?;
    let source = FileSource::open(&args.mesh)?;
    let surroundings = ca::Surroundings {
        mesh: source.mesh(),
        synced: Box::pin(async {}),
        client: None,
        cluster_domain: "cluster.local".into(),
        trust_domain: args.trust_domain.clone(),
    };
    tokio::spawn(source.watch());
    ca::run(args, surroundings, async move { stop.wait().await }).await
}
