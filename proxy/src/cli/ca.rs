//! `adit ca` and the commands below it.

use clap::{Args, Subcommand};

use super::args::LogArgs;
use super::drain::StopSignals;
use super::logging::LogSettings;
use super::source::{Source, SourceArgs, SourceKind};
use crate::ca;
use crate::mesh::source::kubernetes::View;
use crate::mesh::source::kubernetes::events::{Events, Reporter};
use crate::mesh::source::kubernetes::policies::report_policies;
use crate::telemetry::LogFormat;

/// `adit ca` and the command below it.
#[derive(Debug, Clone, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct CaCommand {
    #[command(subcommand)]
    below: Option<Below>,
    #[command(flatten)]
    source: SourceArgs,
    #[command(flatten)]
    serve: ca::CaArgs,
    #[command(flatten)]
    log: LogArgs,
}

#[derive(Debug, Clone, Subcommand)]
enum Below {
    Token(ca::TokenArgs),
    Rotate(Box<Rotate>),
    Status(ca::StatusArgs),
}

#[derive(Debug, Clone, Args)]
struct Rotate {
    #[command(flatten)]
    source: SourceArgs,
    // The last, because what a command is about is what the last of its parts says.
    #[command(flatten)]
    rotate: ca::RotateArgs,
}

impl CaCommand {
    /// Level and form of the log.
    pub fn log(&self) -> LogSettings {
        self.log.clone().into()
    }
}

/// Runs the authority, or the command below it.
pub(super) async fn run(command: CaCommand) -> anyhow::Result<()> {
    match command.below {
        Some(Below::Token(args)) => ca::run_token(args),
        Some(Below::Rotate(command)) => rotate(command.rotate, command.source).await,
        Some(Below::Status(args)) => ca::run_status(&args),
        None => serve(command.source, command.serve, command.log.log_format).await,
    }
}

async fn rotate(args: ca::RotateArgs, source: SourceArgs) -> anyhow::Result<()> {
    let trust_domain = source.trust_domain.clone();
    let client = match source.source {
        SourceKind::File => None,
        SourceKind::Kubernetes => Source::open(&source.try_into()?, View::Authority).await?.client(),
    };
    ca::run_rotate(args, client, &trust_domain).await
}

async fn serve(mut source: SourceArgs, args: ca::CaArgs, log_format: LogFormat) -> anyhow::Result<()> {
    let mut stop = StopSignals::install()?;
    if let Some(mesh) = &args.mesh {
        source.mesh_file.get_or_insert_with(|| mesh.clone());
    }
    let (trust_domain, cluster_domain) = (source.trust_domain.clone(), source.cluster_domain.clone());
    let root_namespace = source.root_namespace.clone();
    let source = Source::open(&source.try_into()?, View::Authority).await?;
    let surroundings = ca::Surroundings {
        mesh: source.mesh(),
        status: source.status(),
        synced: Box::pin(source.synced().wait()),
        client: source.client(),
        cluster_domain,
        trust_domain,
        host: host_name(),
        log_format,
    };
    if let Some(client) = source.client() {
        // The authority's, because a node's agent may change nothing but its own pods' condition, and there are many.
        let reporter = Reporter {
            controller: "mesh.adit/ca",
            instance: host_name().into(),
        };
        let events = Events::start(client.clone(), reporter);
        tokio::spawn(async move { report_policies(client, &root_namespace, events).await });
    }
    tokio::spawn(source.watch());
    ca::run(args, surroundings, async move { stop.wait().await }).await
}

/// A pod's is its name.
fn host_name() -> String {
    nix::unistd::gethostname().map_or_else(|_| "adit-ca".to_owned(), |name| name.to_string_lossy().into_owned())
}
