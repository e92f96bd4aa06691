//! Arguments, environment and configuration file to a running process.

mod admin_page;
mod alarm;
mod args;
mod ask;
mod ca;
mod certificates;
mod certs;
mod check;
mod drain;
mod file;
mod handover;
mod keep;
mod leave;
mod logging;
mod memory;
pub mod node;
mod probe;
mod process;
mod settings;
mod source;
mod trust;
mod uninstall;
mod values;

use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use thiserror::Error;

use crate::identity::causes_after;

pub use args::{LogArgs, NodeArgs};
pub use ca::CaCommand;
pub use certs::{CertsArgs, CertsError, certs};
pub use check::{CheckArgs, check};
pub use file::FileError;
pub use leave::LeaveArgs;
pub use logging::{LogSettings, init_logging};
pub use probe::{ProbeArgs, ProbeError, probe};
pub use process::{Hardening, prepare_process};
pub use settings::{CaClientSettings, CertificateSource, NodeSettings, SettingsError};
pub use source::{SourceArgs, SourceKind, SourceSettings};
pub use uninstall::{Uninstall, uninstall};
pub use values::{BpfLog, LogLevel, PodName, ValueError, parse_bytes, parse_duration};

/// What the command line asks for.
#[derive(Debug)]
pub enum Invocation {
    /// `adit node`.
    Node(Box<NodeSettings>),
    /// `adit node --uninstall`.
    Uninstall(Uninstall),
    /// `adit ca` and what stands below it.
    Ca(Box<CaCommand>),
    /// `adit probe`.
    Probe(ProbeArgs),
    /// `adit certs`.
    Certs(CertsArgs),
    /// `adit check`.
    Check(Box<CheckArgs>),
    /// `adit leave`.
    Leave(Box<LeaveArgs>),
    /// `adit version`.
    Version,
    /// The child's part of the self-test of `adit node`.
    SelfTestConnect,
    /// The child's part of the test whether a pod is captured.
    CaptureTest {
        /// The cgroup to go to.
        cgroup: PathBuf,
        /// Where to connect to.
        to: SocketAddr,
    },
}

/// Why a command line, its environment and configuration file are not a runnable command.
#[derive(Debug, Error)]
pub enum CliError {
    /// clap refuses the arguments, or was asked for help.
    #[error(transparent)]
    Usage(#[from] clap::Error),
    /// The configuration file cannot be used.
    #[error(transparent)]
    File(#[from] FileError),
    /// Every setting is well-formed, but they do not go together.
    #[error(transparent)]
    Settings(#[from] SettingsError),
}

impl CliError {
    /// The exit code that tells a script what went wrong: 0 where help was asked for, 2 for bad usage.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Usage(error) if !error.use_stderr() => 0,
            _ => 2,
        }
    }
}

/// Reads a command line: flags go before environment variables, these before the configuration file.
pub fn parse(args: impl IntoIterator<Item = OsString>) -> Result<Invocation, CliError> {
    let matches = file::matches(command(), args.into_iter().collect())?;
    match Adit::from_arg_matches(&matches)?.command {
        Command::Node(args) if args.uninstall => Ok(Invocation::Uninstall(Uninstall {
            log: args.log.into(),
            bpf_dir: args.bpf_dir,
            run_dir: args.run_dir,
            stay: args.stay,
        })),
        Command::Node(args) => Ok(Invocation::Node(Box::new((*args).try_into()?))),
        Command::Ca(args) => Ok(Invocation::Ca(args)),
        Command::Probe(args) => Ok(Invocation::Probe(args)),
        Command::Certs(args) => Ok(Invocation::Certs(args)),
        Command::Check(args) => Ok(Invocation::Check(args)),
        Command::Leave(args) => Ok(Invocation::Leave(args)),
        Command::Version => Ok(Invocation::Version),
        Command::SelfTestConnect => Ok(Invocation::SelfTestConnect),
        Command::CaptureTest { cgroup, to } => Ok(Invocation::CaptureTest { cgroup, to }),
    }
}

fn command() -> clap::Command {
    Adit::command().mut_subcommand("check", check::adapt)
}

/// What `adit version` prints.
pub fn version() -> String {
    format!(
        "adit {} ({} {})",
        env!("CARGO_PKG_VERSION"),
        std::env::consts::OS,
        std::env::consts::ARCH
    )
}

/// An error and its causes on one line. A cause that the line already tells is left out.
pub fn chain(error: &dyn std::error::Error) -> String {
    let text = causes_after(error, ": caused by: ");
    text.lines().map(str::trim).collect::<Vec<_>>().join(" ")
}

/// Runs `adit leave`.
pub async fn run_leave(args: LeaveArgs) -> anyhow::Result<()> {
    leave::run(args).await
}

/// Runs `adit ca` or a command below it.
pub async fn run_ca(args: CaCommand) -> anyhow::Result<()> {
    ca::run(args).await
}

const ABOUT: &str = "Each pod's TCP traffic under the pod's own identity";
const LONG_ABOUT: &str = "\
Adit gives the TCP traffic of every Kubernetes pod the pod's own cryptographic identity. \
Programs in the kernel steer the connections of a node's pods to one proxy per node, which carries \
them to their peers over mutual TLS (HBONE, as Istio's ambient mode speaks it).

  adit node    the proxy, one for each node
  adit ca      a certificate authority that gives each node the certificates of its own pods, and no others

Every flag of a command is also an environment variable (--node-name is ADIT_NODE_NAME) and a key of \
its configuration file (node-name), given with --config. A flag goes before a variable, a variable \
before the file, the file before the default.";
const EXAMPLES: &str = "\
Examples:
  adit ca --help
  adit node --node-name worker-1 --mesh-file /etc/adit/mesh.yaml \\
      --ca-address https://ca.example:15012 --ca-root /etc/adit/ca-root.pem
  adit node --config /etc/adit/node.yaml --log-level debug";

#[derive(Debug, Parser)]
#[command(
    name = "adit",
    version,
    about = ABOUT,
    long_about = LONG_ABOUT,
    after_help = EXAMPLES,
    arg_required_else_help = true,
    max_term_width = 110
)]
struct Adit {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run the proxy of this node
    #[command(long_about = args::LONG_ABOUT, after_long_help = args::EXAMPLES)]
    Node(Box<NodeArgs>),
    /// Run the embedded certificate authority, change its keys, ask how it is, or make a node's token
    Ca(Box<CaCommand>),
    /// Ask the proxy of this container whether it is ready; fails where it is not
    Probe(ProbeArgs),
    /// Show the identities of this node and their certificates, the most urgent first
    Certs(CertsArgs),
    /// Look at this node and its cluster: what is missing, what is in the way, and what to do
    #[command(long_about = check::LONG_ABOUT)]
    Check(Box<CheckArgs>),
    /// Take Adit off all nodes of a cluster: what `helm uninstall` runs
    Leave(Box<LeaveArgs>),
    /// Print the version
    Version,
    /// The child's part of the self-test of `adit node`
    #[command(hide = true)]
    SelfTestConnect,
    /// The child's part of the test whether a pod is captured
    #[command(hide = true)]
    CaptureTest { cgroup: PathBuf, to: SocketAddr },
}

#[cfg(test)]
mod tests {
    use super::*;

    fn command_line(args: &[&str]) -> Vec<OsString> {
        args.iter().map(OsString::from).collect()
    }

    const NODE: &[&str] = &[
        "adit",
        "node",
        "--node-name=n1",
        "--mesh-file=/m.yaml",
        "--ca-address=https://ca:15012",
        "--ca-root=/root.pem",
        "--pods-cgroup=/sys/fs/cgroup/kubepods",
    ];

    #[test]
    fn the_command_tree_is_sound() {
        command().debug_assert();
    }

    #[test]
    fn a_node_needs_a_name_a_mesh_and_an_authority_only() {
        let Ok(Invocation::Node(settings)) = parse(command_line(NODE)) else {
            panic!("not a node")
        };
        assert_eq!(settings.node_name, "n1");
        assert_eq!(settings.admin.to_string(), "127.0.0.1:15000");
        assert_eq!(settings.drain_deadline, std::time::Duration::from_secs(600));
        assert!(settings.workers >= 1);
        let Err(CliError::Usage(error)) = parse(command_line(&NODE[..2])) else {
            panic!("accepted")
        };
        for flag in ["--node-name", "--ca-address", "--ca-root"] {
            assert!(error.to_string().contains(flag), "{flag} is not named in: {error}");
        }
    }

    #[test]
    fn the_pods_cgroup_is_found_out_where_it_is_not_given() {
        let Ok(Invocation::Node(settings)) = parse(command_line(&NODE[..NODE.len() - 1])) else {
            panic!("not a node")
        };
        assert_eq!(settings.pods_cgroup.to_str(), Some("auto"));
    }

    #[test]
    fn staying_is_for_uninstalling() {
        let parsed = parse(command_line(&["adit", "node", "--uninstall", "--stay"]));
        assert!(matches!(
            parsed,
            Ok(Invocation::Uninstall(Uninstall { stay: true, .. }))
        ));
        let mut args = command_line(NODE);
        args.push("--stay".into());
        assert!(parse(args).is_err());
    }

    #[test]
    fn a_mesh_file_is_needed_unless_the_cluster_is_asked() {
        let with = |source: &[&str]| {
            let mut args: Vec<&str> = NODE
                .iter()
                .copied()
                .filter(|arg| !arg.starts_with("--mesh-file"))
                .collect();
            args.extend(source);
            parse(command_line(&args))
        };
        let Err(CliError::Settings(SettingsError::NoMeshFile)) = with(&[]) else {
            panic!("accepted")
        };
        let args = [
            "--source=kubernetes",
            "--enrolment-label=istio.io/dataplane-mode=ambient",
            "--cluster-ranges=10.0.0.0/8,fd00::/8",
        ];
        let Ok(Invocation::Node(settings)) = with(&args) else {
            panic!("not a node")
        };
        let SourceSettings::Kubernetes(source) = settings.source else {
            panic!("of a file")
        };
        assert_eq!(source.enrolment.to_string(), "istio.io/dataplane-mode=ambient");
        assert_eq!(source.cluster_ranges.len(), 2);
        assert_eq!(source.root_namespace, "adit-system");
    }

    #[test]
    fn help_is_no_failure_and_bad_usage_is_2() {
        for (args, code) in [
            (&["adit", "--help"][..], 0),
            (&["adit", "node", "--help"], 0),
            (&["adit", "--version"], 0),
            (&["adit", "node"], 2),
            (&["adit", "nonsense"], 2),
            (&["adit", "node", "--config", "/nonexistent/adit.yaml"], 2),
        ] {
            assert_eq!(parse(command_line(args)).unwrap_err().exit_code(), code, "{args:?}");
        }
    }

    #[test]
    fn a_configuration_file_stands_in_for_flags() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("node.yaml");
        let text = "node-name: from-file\nmesh-file: /m.yaml\nca-address: https://ca:1\nca-root: /r.pem\npods-cgroup: /c\n\
                    access-log: off\nworkers: 3\ndrain-deadline: 2m\n";
        std::fs::write(&file, text).unwrap();
        let mut args = command_line(&["adit", "node", "--workers", "2", "--config"]);
        args.push(file.into());
        let Invocation::Node(settings) = parse(args).unwrap() else {
            panic!("not a node")
        };
        assert_eq!((settings.node_name.as_str(), settings.workers), ("from-file", 2));
        assert_eq!(settings.drain_deadline, std::time::Duration::from_secs(120));
        assert_eq!(settings.access_log, None);
    }

    #[test]
    fn an_error_and_its_causes_are_one_line() {
        let error = parse(command_line(&["adit", "node", "--config", "/nonexistent/adit.yaml"])).unwrap_err();
        let line = chain(&error);
        assert!(
            line.starts_with("cannot read the configuration file /nonexistent/adit.yaml: caused by: No such"),
            "{line}"
        );
    }

    #[test]
    fn each_command_says_what_it_does() {
        let mut commands = vec![command()];
        let mut abouts = Vec::new();
        while let Some(command) = commands.pop() {
            abouts.push(command.get_about().map(ToString::to_string).unwrap_or_default());
            commands.extend(command.get_subcommands().cloned());
        }
        // Not what a part of its flags is.
        assert!(
            abouts
                .iter()
                .all(|about| !about.is_empty() && !about.starts_with("The flags")),
            "{abouts:?}"
        );
        assert!(
            abouts
                .iter()
                .any(|about| about.starts_with("Change the authority's keys")),
            "{abouts:?}"
        );
    }

    /// The documentation names every flag of every command, and no flag that does not exist.
    #[test]
    fn the_documentation_names_every_flag() {
        const DOC: &str = include_str!("../../../docs/configuration.md");
        let mut known = vec!["--help".to_owned(), "--version".to_owned()];
        let command = Adit::command();
        let node = command.find_subcommand("node").unwrap();
        for arg in node.get_arguments().filter(|arg| !arg.is_hide_set()) {
            let Some(long) = arg.get_long() else { continue };
            // What is to be done, rather than how, is said on the command line only.
            if arg.get_action().takes_values() {
                let env = arg
                    .get_env()
                    .unwrap_or_else(|| panic!("--{long} has no environment variable"));
                assert_eq!(
                    env.to_str().unwrap(),
                    format!("ADIT_{}", long.to_uppercase().replace('-', "_"))
                );
            }
            assert!(arg.get_help_heading().is_some(), "--{long} stands under no heading");
            assert!(
                DOC.contains(&format!("| `--{long}` |")),
                "docs/configuration.md lacks --{long}"
            );
            let defaults = arg
                .get_default_values()
                .iter()
                .filter(|_| arg.get_action().takes_values());
            for default in defaults {
                let row = DOC
                    .lines()
                    .find(|line| line.starts_with(&format!("| `--{long}` |")))
                    .unwrap();
                let default = default.to_str().unwrap();
                assert!(
                    row.contains(&format!("| `{default}` |")),
                    "the default of --{long} is {default}: {row}"
                );
            }
            known.push(format!("--{long}"));
        }
        let ca = command.find_subcommand("ca").unwrap();
        let below = ["token", "rotate", "status"].map(|name| ca.find_subcommand(name).unwrap());
        for command in [ca].into_iter().chain(below) {
            for long in command.get_arguments().filter_map(|arg| arg.get_long()) {
                assert!(
                    DOC.contains(&format!("`--{long}`")),
                    "docs/configuration.md lacks --{long}"
                );
                known.push(format!("--{long}"));
            }
        }
        for row in DOC.lines().filter(|line| line.starts_with("| `--")) {
            let flag = row.split('`').nth(1).unwrap();
            assert!(
                known.iter().any(|known| known == flag),
                "docs/configuration.md has {flag}, which does not exist"
            );
        }
    }
}
