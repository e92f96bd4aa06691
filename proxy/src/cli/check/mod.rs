//! `adit check`: whether this node and its cluster have what `adit node` needs, and what to do where they have not.
//!
//! Facts are gathered first, and findings made of them by pure functions: one for each thing that is looked at.

mod agent;
mod authority;
mod cluster;
mod finding;
mod gather;
mod host;
mod others;
mod spire;

use std::io::{self, Write as _};

use clap::{Arg, ArgAction, Args, Command};
use tokio::task::spawn_blocking;

use self::cluster::ClusterFacts;
use self::finding::{Finding, Level};
use super::args::{NodeArgs, UNUSED};
use super::settings::SettingsError;
use super::source::{SourceKind, SourceSettings};
use crate::identity::CaSettings;
use crate::mesh::source::kubernetes::{KubernetesSource, View};
use crate::steer::PinsStanding;

pub(super) const LONG_ABOUT: &str = "\
Looks at what `adit node` needs on this node and in its cluster, and says what to do where something is missing: the kernel's \
features, capabilities, cgroups, the bpffs, the certificate authority, the Kubernetes API and what may be done there, the agent \
that runs here and how each pod stands with it, and what others have put in the way. It changes nothing.

It takes the flags, variables and file of `adit node`, and is best given the same; in the agent's pod it has them already:
    kubectl exec -n adit-system ds/adit-node -- /adit check

The exit status is 1 where something has failed, and 0 where all is well or there are only warnings.";

/// The flags that matter here.
const SHOWN: [&str; 16] = [
    "json",
    "pods_cgroup",
    "bpf_dir",
    "ca_address",
    "ca_root",
    "ca_token",
    "ca_server_name",
    "cluster_id",
    "spire_socket",
    "admin",
    "source",
    "kubeconfig",
    "trust_domain",
    "config",
    "node_name",
    "help",
];

/// What `adit node` must be told and a check can do without: the argument, its flag, its variable and its
/// value.
const OPTIONAL: [(&str, &str, &str, &str); 3] = [
    ("node_name", "node-name", "ADIT_NODE_NAME", "NAME"),
    ("ca_address", "ca-address", "ADIT_CA_ADDRESS", "URL"),
    ("ca_root", "ca-root", "ADIT_CA_ROOT", "FILE"),
];

/// `adit check`.
#[derive(Debug, Clone, Args)]
pub struct CheckArgs {
    /// Prints JSON: `result`, and `findings` with `name`, `level`, `what` and `advice`
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    node: NodeArgs,
}

/// Makes of the flags of `adit node` those of a check: any may be given, as it is for the agent; fewer are needed, and those
/// that change nothing here are not shown.
pub(super) fn adapt(command: Command) -> Command {
    command.mut_args(|arg| {
        let id = arg.get_id().as_str();
        match OPTIONAL.iter().find(|(optional, ..)| *optional == id) {
            Some((optional, long, variable, value)) => {
                let help = arg.get_help().cloned().unwrap_or_default();
                Arg::new(*optional)
                    .long(*long)
                    .env(*variable)
                    .value_name(*value)
                    .help(help)
                    .action(ArgAction::Set)
                    .value_parser(arg.get_value_parser().clone())
                    .default_value(UNUSED)
                    .hide_default_value(true)
            }
            None if SHOWN.contains(&id) => arg,
            None => arg.hide(true),
        }
    })
}

/// Runs `adit check`. Whether nothing has failed.
pub async fn check(args: CheckArgs) -> anyhow::Result<bool> {
    let CheckArgs { json, node } = args;
    let findings = findings(node).await?;
    let text = if json {
        finding::as_json(&findings)
    } else {
        finding::as_text(&findings)
    };
    io::stdout().write_all(text.as_bytes())?;
    Ok(finding::worst(&findings) < Level::Failed)
}

async fn findings(node: NodeArgs) -> anyhow::Result<Vec<Finding>> {
    let (pods_cgroup, bpf_dir, admin) = (node.pods_cgroup.clone(), node.bpf_dir.clone(), node.admin);
    let (host, agent) = spawn_blocking(move || {
        let (cgroups, pins) = (gather::cgroups(&pods_cgroup), gather::pins(&bpf_dir));
        let in_force = matches!(pins.standing, Ok(PinsStanding::Bpffs { in_force: true }));
        let host = vec![
            host::kernel(&gather::kernel()),
            host::capabilities(gather::capabilities()),
            host::cgroups(&cgroups),
            host::bpffs(&pins),
        ];
        let others = [
            others::programs(&gather::programs(&cgroups)),
            others::listeners(&gather::listeners(&cgroups)),
            others::cni(gather::cni().as_ref()),
        ];
        let host: Vec<_> = host.into_iter().chain(others.into_iter().flatten()).collect();
        (host, agent::ask(admin, in_force))
    })
    .await?;
    let mut findings = host;
    if node.source.source == SourceKind::Kubernetes {
        findings.extend(cluster::cluster(&ask_cluster(&node).await));
    }
    let identity = agent.pods.iter().flatten().find_map(|pod| pod.identity.as_deref());
    let trust_domain = &node.source.trust_domain;
    findings.push(match (&node.spire_socket, ca_settings(&node)) {
        (Some(socket), _) => spire::ask(socket, identity, trust_domain).await,
        (None, Some(settings)) => authority::authority(Some(&authority::ask(settings, identity, trust_domain).await)),
        (None, None) => authority::authority(None),
    });
    findings.push(agent::agent(&agent));
    findings.extend(agent::pods(&agent));
    Ok(findings)
}

/// None where the authority is not known.
fn ca_settings(node: &NodeArgs) -> Option<CaSettings> {
    if node.ca_address == UNUSED || node.ca_root.as_os_str() == UNUSED {
        return None;
    }
    Some(CaSettings {
        address: node.ca_address.clone(),
        root: node.ca_root.clone(),
        server_name: node.ca_server_name.clone(),
        token: node.ca_token.clone(),
        cluster_id: node.cluster_id.clone(),
        ttl: node.certificate_ttl,
        ..CaSettings::default()
    })
}

async fn ask_cluster(node: &NodeArgs) -> Result<ClusterFacts, String> {
    let settings = SourceSettings::try_from(node.source.clone()).map_err(|error: SettingsError| error.to_string())?;
    let SourceSettings::Kubernetes(settings) = settings else {
        return Err("the source is a file".to_owned());
    };
    let server = match &settings.kubeconfig {
        Some(file) => format!("the API server of {}", file.display()),
        None => "the cluster's API server".to_owned(),
    };
    let source = KubernetesSource::open(settings, View::Node(node.node_name.clone())).await;
    let client = source.map_err(|error| super::chain(&error))?.client();
    Ok(cluster::ask(client, server).await)
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;

    use crate::cli::{CliError, Invocation, parse};

    fn command_line(args: &[&str]) -> Vec<OsString> {
        args.iter().map(OsString::from).collect()
    }

    #[test]
    fn a_check_needs_no_flags_and_takes_all_of_the_agents() {
        for args in [
            &["adit", "check"][..],
            &["adit", "check", "--json"],
            &[
                "adit",
                "check",
                "--node-name=n1",
                "--mesh-file=/m.yaml",
                "--ca-address=https://ca:15012",
                "--ca-root=/root.pem",
                "--workers=3",
                "--access-log=off",
            ],
        ] {
            assert!(
                matches!(parse(command_line(args)), Ok(Invocation::Check(_))),
                "{args:?}"
            );
        }
        assert!(parse(command_line(&["adit", "check", "--nonsense"])).is_err());
    }

    #[test]
    fn the_help_shows_what_matters_to_a_check() {
        let Err(CliError::Usage(help)) = parse(command_line(&["adit", "check", "--help"])) else {
            panic!("no help")
        };
        let help = help.to_string();
        for flag in ["--json", "--ca-address", "--bpf-dir", "--admin", "--source"] {
            assert!(help.contains(flag), "{flag} is missing: {help}");
        }
        for flag in ["--workers", "--uninstall", "--stream-window"] {
            assert!(!help.contains(flag), "{flag} is there");
        }
    }
}
