//! `adit leave`: takes Adit off all nodes of a cluster, for `helm uninstall`.
//!
//! Helm deletes objects and is done; what the agents have put into the kernels of the nodes stays, as it must when an agent
//! is merely replaced. So before Helm deletes anything, the agents are told to stop for good (`adit leave agents`), and then
//! a DaemonSet of the chart lets the pods of each node go, on which `adit leave nodes` waits. What an agent carries goes on
//! meanwhile, and after that.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::{Context as _, bail};
use clap::{Args, ValueEnum};
use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::api::{DeleteParams, ListParams};
use kube::{Api, Client};
use tokio::time::{Instant, sleep};

use super::args::LogArgs;
use super::logging::LogSettings;
use super::values::parse_positive_duration;

const POLL: Duration = Duration::from_millis(500);

/// `adit leave`.
#[derive(Debug, Clone, Args)]
pub struct LeaveArgs {
    /// What is done: the agents are told to stop for good; or it is waited until the nodes are free of Adit
    step: Step,

    /// The namespace that Adit is installed in
    #[arg(long, value_name = "NAME")]
    namespace: String,

    /// The DaemonSet that is deleted, or waited for
    #[arg(long, value_name = "NAME")]
    daemon_set: String,

    /// How long that may take
    #[arg(long, value_name = "DURATION", default_value = "3m", value_parser = parse_positive_duration)]
    deadline: Duration,

    #[command(flatten)]
    log: LogArgs,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Step {
    Agents,
    Nodes,
}

impl LeaveArgs {
    /// Level and form of the log.
    pub fn log(&self) -> LogSettings {
        self.log.clone().into()
    }
}

/// Runs `adit leave`.
pub(super) async fn run(args: LeaveArgs) -> anyhow::Result<()> {
    let client = Client::try_default().await.context("finding the Kubernetes API")?;
    let leave = Leave {
        daemon_sets: Api::namespaced(client.clone(), &args.namespace),
        pods: Api::namespaced(client.clone(), &args.namespace),
        nodes: Api::all(client),
        name: args.daemon_set,
    };
    match args.step {
        Step::Agents => leave.stop_agents(Instant::now() + args.deadline).await,
        Step::Nodes => leave.await_nodes(Instant::now() + args.deadline).await,
    }
}

struct Leave {
    daemon_sets: Api<DaemonSet>,
    pods: Api<Pod>,
    nodes: Api<Node>,
    name: String,
}

impl Leave {
    /// Deletes the agents' DaemonSet, and waits until its pods are told to stop.
    async fn stop_agents(&self, deadline: Instant) -> anyhow::Result<()> {
        let Some(set) = self
            .daemon_sets
            .get_opt(&self.name)
            .await
            .context("reading the agents' DaemonSet")?
        else {
            tracing::info!("there is no DaemonSet {}", self.name);
            return Ok(());
        };
        let selector = ListParams::default().labels(&selector(&set));
        // Its pods are deleted with it, with the time that they have for what they carry.
        match self.daemon_sets.delete(&self.name, &DeleteParams::background()).await {
            Err(kube::Error::Api(status)) if status.code == 404 => {}
            deleted => drop(deleted.with_context(|| format!("deleting the DaemonSet {}", self.name))?),
        }
        loop {
            let pods = self.pods.list(&selector).await.context("listing the agents")?.items;
            let untold = pods.iter().filter(|pod| pod.metadata.deletion_timestamp.is_none());
            let names: Vec<_> = untold.filter_map(|pod| pod.metadata.name.as_deref()).collect();
            if names.is_empty() {
                tracing::info!("all agents are told to stop");
                return Ok(());
            }
            if Instant::now() > deadline {
                bail!("these agents are not told to stop: {}", names.join(", "));
            }
            sleep(POLL).await;
        }
    }

    /// Waits until the pods of each node are let go.
    async fn await_nodes(&self, deadline: Instant) -> anyhow::Result<()> {
        loop {
            let set = self.daemon_sets.get(&self.name).await;
            let set = set.with_context(|| format!("reading the DaemonSet {}", self.name))?;
            let pods = self.pods.list(&ListParams::default().labels(&selector(&set))).await;
            let pods = pods.context("listing what lets the nodes' pods go")?.items;
            let away = self.nodes_away().await?;
            let left = still_to_leave(&set, &pods, &away);
            if left.is_empty() {
                warn_of(&away);
                tracing::info!(
                    "Adit has left {} nodes",
                    pods.iter().filter(|pod| is_ready(pod)).count()
                );
                return Ok(());
            }
            if Instant::now() > deadline {
                bail!(
                    "Adit has not left all nodes: {}. Run `adit node --uninstall` there, and uninstall with --no-hooks",
                    left.join("; ")
                );
            }
            sleep(POLL).await;
        }
    }

    /// The nodes whose kubelet does not answer.
    async fn nodes_away(&self) -> anyhow::Result<BTreeSet<String>> {
        let nodes = self.nodes.list(&ListParams::default()).await.context("listing nodes")?;
        let away = nodes.items.into_iter().filter(|node| {
            let conditions = node.status.iter().flat_map(|status| status.conditions.iter().flatten());
            !conditions
                .into_iter()
                .any(|condition| condition.type_ == "Ready" && condition.status == "True")
        });
        Ok(away.filter_map(|node| node.metadata.name).collect())
    }
}

fn warn_of(nodes: &BTreeSet<String>) {
    if !nodes.is_empty() {
        tracing::warn!(
            "these nodes do not answer; if they have not been restarted when they are back, run `adit node --uninstall` there: {}",
            Vec::from_iter(nodes.iter().map(String::as_str)).join(", ")
        );
    }
}

/// What is still to be waited for, and why; nothing where all is done.
fn still_to_leave(set: &DaemonSet, pods: &[Pod], away: &BTreeSet<String>) -> Vec<String> {
    let status = set.status.clone().unwrap_or_default();
    if status.observed_generation < set.metadata.generation {
        return vec!["the DaemonSet has not been looked at yet".to_owned()];
    }
    let wanted = usize::try_from(status.desired_number_scheduled).unwrap_or_default();
    let mut left: Vec<String> = pods
        .iter()
        .filter(|pod| !is_ready(pod) && !node_of(pod).is_some_and(|node| away.contains(node)))
        .map(|pod| format!("{}: {}", node_of(pod).unwrap_or("no node yet"), reason(pod)))
        .collect();
    if pods.len() < wanted {
        left.push(format!("{} of {wanted} pods are not made yet", wanted - pods.len()));
    }
    left
}

fn selector(set: &DaemonSet) -> String {
    let labels = set.spec.as_ref().and_then(|spec| spec.selector.match_labels.as_ref());
    let pairs: Vec<String> = labels
        .into_iter()
        .flatten()
        .map(|(key, value)| format!("{key}={value}"))
        .collect();
    pairs.join(",")
}

fn node_of(pod: &Pod) -> Option<&str> {
    pod.spec.as_ref()?.node_name.as_deref()
}

fn is_ready(pod: &Pod) -> bool {
    let conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
    conditions
        .into_iter()
        .any(|condition| condition.type_ == "Ready" && condition.status == "True")
}

/// Why a pod is not ready, as far as its containers tell.
fn reason(pod: &Pod) -> String {
    let Some(status) = &pod.status else {
        return "not started".to_owned();
    };
    let containers = status
        .init_container_statuses
        .iter()
        .flatten()
        .chain(status.container_statuses.iter().flatten());
    let told = containers.filter(|container| !container.ready).find_map(|container| {
        let state = container.state.as_ref()?;
        let last = container
            .last_state
            .as_ref()
            .and_then(|state| state.terminated.as_ref());
        let ended = state.terminated.as_ref().or(last).map(|ended| {
            let message = ended.message.clone().unwrap_or_default();
            format!("ended with exit code {} {message}", ended.exit_code)
                .trim()
                .to_owned()
        });
        ended.or_else(|| state.waiting.as_ref()?.reason.clone())
    });
    told.or_else(|| status.phase.clone())
        .unwrap_or_else(|| "not started".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn set(desired: i32, observed: i64) -> DaemonSet {
        serde_json::from_value(json!({
            "metadata": { "generation": 2 },
            "spec": { "selector": { "matchLabels": { "a": "1", "b": "2" } }, "template": {} },
            "status": {
                "observedGeneration": observed, "desiredNumberScheduled": desired,
                "currentNumberScheduled": 0, "numberMisscheduled": 0, "numberReady": 0
            },
        }))
        .unwrap()
    }

    fn pod(node: &str, status: Value) -> Pod {
        serde_json::from_value(json!({ "spec": { "nodeName": node, "containers": [] }, "status": status })).unwrap()
    }

    fn ready(node: &str) -> Pod {
        pod(node, json!({ "conditions": [{ "type": "Ready", "status": "True" }] }))
    }

    fn failing(node: &str) -> Pod {
        pod(
            node,
            json!({ "phase": "Pending", "initContainerStatuses": [{
                "name": "leave", "ready": false, "restartCount": 1, "image": "", "imageID": "",
                "state": { "waiting": { "reason": "CrashLoopBackOff" } },
                "lastState": { "terminated": { "exitCode": 1, "message": "a proxy runs" } },
            }] }),
        )
    }

    #[test]
    fn all_nodes_have_to_be_left_but_those_that_do_not_answer() {
        for (set, pods, away, expected) in [
            (set(2, 2), vec![ready("n1"), ready("n2")], "", vec![]),
            (set(2, 1), vec![], "", vec!["the DaemonSet has not been looked at yet"]),
            (set(2, 2), vec![ready("n1")], "", vec!["1 of 2 pods are not made yet"]),
            (
                set(2, 2),
                vec![ready("n1"), failing("n2")],
                "",
                vec!["n2: ended with exit code 1 a proxy runs"],
            ),
            (set(2, 2), vec![ready("n1"), failing("n2")], "n2", vec![]),
            (set(0, 2), vec![], "", vec![]),
            (
                set(1, 2),
                vec![pod("n1", json!({ "phase": "Pending" }))],
                "",
                vec!["n1: Pending"],
            ),
        ] {
            let away = BTreeSet::from([away.to_owned()]);
            assert_eq!(still_to_leave(&set, &pods, &away), expected);
        }
    }

    #[test]
    fn the_pods_of_a_set_are_told_by_all_its_labels() {
        assert_eq!(selector(&set(1, 1)), "a=1,b=2");
    }
}
