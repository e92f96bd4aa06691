//! `adit-cluster`: what a developer does with a cluster, and the program that runs in its machines.

use std::ffi::OsString;
use std::io::Read;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Command, ExitCode, ExitStatus};

use anyhow::Context;
use clap::{Parser, Subcommand};

use super::layout::{Machine, Prefix};
use super::{Cluster, Service, machine, residue, teardown};

/// Prints a line. A reader that went away, such as `head`, is no reason to leave work half done.
macro_rules! say {
    ($($argument:tt)*) => {{
        use std::io::Write as _;
        let _ = writeln!(std::io::stdout(), $($argument)*);
    }};
}

/// What `cluster up` is called if nobody says.
const DEFAULT_PREFIX: &str = "dev";

/// A Kubernetes cluster on this machine: a control plane and two nodes, with the real programs.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask cluster", bin_name = "cargo xtask cluster")]
struct Cli {
    #[command(subcommand)]
    task: Task,
}

#[derive(Debug, Subcommand)]
enum Task {
    /// Bring the cluster up
    Up {
        #[command(flatten)]
        which: Which,
        /// Without kube-proxy
        #[arg(long)]
        without_kube_proxy: bool,
        /// Take Adit's image into the nodes too
        #[arg(long)]
        adit: bool,
        /// Another image for both nodes, a docker-archive
        #[arg(long, value_name = "FILE")]
        image: Vec<PathBuf>,
    },
    /// Take it down, or what is left of it
    Down {
        #[command(flatten)]
        which: Which,
        /// All clusters, of whatever prefix
        #[arg(long, conflicts_with = "prefix")]
        all: bool,
    },
    /// Say what clusters there are and how they are
    Status,
    /// Run kubectl on it
    #[command(disable_help_flag = true)]
    Kubectl(Passed),
    /// Run Helm on it
    #[command(disable_help_flag = true)]
    Helm(Passed),
    /// Run a command on a machine of it: `enter dev n1 -- ip route`
    Enter {
        prefix: Prefix,
        machine: Machine,
        #[arg(last = true, required = true)]
        command: Vec<OsString>,
    },
    /// Copy the logs of everything to a folder
    Logs {
        #[command(flatten)]
        which: Which,
        folder: PathBuf,
    },
    #[command(hide = true)]
    Keep { prefix: String },
    #[command(hide = true)]
    Boot { prefix: Prefix, machine: Machine },
    #[command(hide = true)]
    Init { prefix: Prefix, machine: Machine },
    #[command(hide = true)]
    Start {
        prefix: Prefix,
        machine: Machine,
        name: String,
        #[arg(last = true, required = true)]
        command: Vec<OsString>,
    },
}

#[derive(Debug, clap::Args)]
struct Which {
    /// Which cluster: several can be up side by side
    #[arg(long, env = "ADIT_CLUSTER", default_value = DEFAULT_PREFIX)]
    prefix: String,
}

#[derive(Debug, clap::Args)]
struct Passed {
    /// Its arguments. `ADIT_CLUSTER` names another cluster than `dev`
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGUMENTS")]
    arguments: Vec<OsString>,
}

/// Does what the command line says.
pub fn main() -> ExitCode {
    match run(Cli::parse().task) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(task: Task) -> anyhow::Result<ExitCode> {
    match task {
        Task::Up {
            which,
            without_kube_proxy,
            adit,
            image,
        } => up(&which.prefix, without_kube_proxy, adit, image)?,
        Task::Down { which, all } => {
            let prefixes = if all { teardown::names() } else { vec![which.prefix] };
            for prefix in prefixes {
                down(&prefix)?;
            }
        }
        Task::Status => status()?,
        Task::Kubectl(passed) => become_it(environment_cluster()?.kubectl_command()?, &passed)?,
        Task::Helm(passed) => become_it(environment_cluster()?.helm_command()?, &passed)?,
        Task::Enter {
            prefix,
            machine,
            command,
        } => return Ok(code(machine::run(&prefix, machine, &command)?)),
        Task::Logs { which, folder } => Cluster::attach(&which.prefix)?.collect_logs(&folder)?,
        Task::Keep { prefix } => {
            // Nothing comes: it ends when the owner has.
            let _ = std::io::stdin().read_to_end(&mut Vec::new());
            Cluster::down(&prefix)?;
        }
        Task::Boot { prefix, machine } => machine::boot(&prefix, machine)?,
        Task::Init { prefix, machine } => machine::init(&prefix, machine)?,
        Task::Start {
            prefix,
            machine,
            name,
            command,
        } => machine::start(&prefix, machine, &name, &command)?,
    }
    Ok(ExitCode::SUCCESS)
}

fn up(prefix: &str, without_kube_proxy: bool, adit: bool, images: Vec<PathBuf>) -> anyhow::Result<()> {
    let is_up = Cluster::attach(prefix).and_then(|cluster| cluster.kubectl(["get", "--raw", "/readyz"]));
    if is_up.is_ok() {
        say!("cluster {prefix} is up already; `cargo xtask cluster down` ends it");
    } else {
        Cluster::sweep()?;
        let mut builder = Cluster::builder(prefix).progress(|line| say!("{line}"));
        if without_kube_proxy {
            builder = builder.without_kube_proxy();
        }
        for image in images {
            builder = builder.image(std::path::absolute(&image).context("find the image")?);
        }
        builder.up_for_good()?;
    }
    let cluster = Cluster::attach(prefix)?;
    if adit {
        cluster.import_adit()?;
        say!("both nodes have the image {}", super::adit_name());
    }
    let mut kubectl = cluster.kubectl_command()?;
    say!("{}", cluster.kubectl(["get", "nodes", "--output", "wide"])?.trim_end());
    let other = if prefix == DEFAULT_PREFIX {
        String::new()
    } else {
        format!("ADIT_CLUSTER={prefix} ")
    };
    say!("\nUse it:   {other}cargo xtask cluster kubectl get pods --all-namespaces");
    say!("or:       {}", words(kubectl.args(["get", "pods"])));
    say!("Enter n1: cargo xtask cluster enter {prefix} n1 -- sh");
    say!("End it:   {other}cargo xtask cluster down");
    Ok(())
}

fn down(prefix: &str) -> anyhow::Result<()> {
    let was = Cluster::down(prefix)?;
    let left = residue(prefix);
    anyhow::ensure!(left.is_empty(), "of cluster {prefix} is left: {}", left.join(", "));
    if was {
        say!("cluster {prefix} is down; nothing of it is left");
    } else {
        say!("there is no cluster {prefix}");
    }
    Ok(())
}

fn status() -> anyhow::Result<()> {
    let names = teardown::names();
    if names.is_empty() {
        say!("no cluster is up");
    }
    for name in names {
        say!("cluster {name}");
        let cluster = match Cluster::attach(&name) {
            Ok(cluster) => cluster,
            Err(error) => {
                say!("  {error:#}");
                continue;
            }
        };
        for machine in std::iter::once(cluster.control_plane()).chain(cluster.nodes()) {
            let kind: Machine = machine.name().parse()?;
            for service in Service::of(kind, cluster.settings.kube_proxy) {
                let pids = machine.pids(service).unwrap_or_default();
                let state = if pids.is_empty() {
                    "does not run".to_owned()
                } else {
                    format!("runs, pid {pids:?}")
                };
                say!("  {:<3} {:<24} {state}", machine.name(), service.name());
            }
        }
        let nodes = cluster.kubectl(["get", "nodes", "--request-timeout=5s"]);
        say!("{}", nodes.unwrap_or_else(|error| format!("  {error:#}")).trim_end());
    }
    Ok(())
}

fn environment_cluster() -> anyhow::Result<Cluster> {
    let prefix = std::env::var("ADIT_CLUSTER").unwrap_or_else(|_| DEFAULT_PREFIX.to_owned());
    Cluster::attach(&prefix).context("bring it up: cargo xtask cluster up")
}

fn become_it(mut command: Command, passed: &Passed) -> anyhow::Result<()> {
    let error = command.args(&passed.arguments).exec();
    Err(error).with_context(|| format!("start {}", words(&command)))
}

fn words(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ")
}

/// A shell's way to tell how a command ended.
fn code(status: ExitStatus) -> ExitCode {
    let number = status
        .code()
        .or_else(|| status.signal().map(|signal| 128 + signal))
        .unwrap_or(1);
    ExitCode::from(u8::try_from(number).unwrap_or(1))
}
