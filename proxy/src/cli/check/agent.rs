//! What is found of the agent that runs on this node, and what it says of the pods.

use std::io;
use std::net::SocketAddr;

use serde::Deserialize;

use super::super::ask;
use super::finding::{Finding, Level};

/// A pod, as the agent says that it stands.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct Pod {
    #[serde(default)]
    pub(super) uid: String,
    pub(super) namespace: String,
    pub(super) name: String,
    pub(super) capture: String,
    pub(super) reason: Option<String>,
    pub(super) identity: Option<String>,
}

/// What was asked of the admin page.
#[derive(Debug)]
pub(super) struct AgentFacts {
    pub(super) address: SocketAddr,
    /// What it said about being ready: nothing, or what is pending.
    pub(super) ready: io::Result<Result<(), String>>,
    pub(super) pods: io::Result<Vec<Pod>>,
    /// Whether an agent has run here: its programs are in force.
    pub(super) in_force: bool,
}

/// Asks the agent. Blocks for a few seconds at most.
pub(super) fn ask(address: SocketAddr, in_force: bool) -> AgentFacts {
    let ready = ask::get(address, "/healthz/ready").map(|(code, body)| match code {
        200 => Ok(()),
        _ => Err(body.lines().collect::<Vec<_>>().join("; ")),
    });
    let pods = ask::section(address, "capture");
    AgentFacts {
        address,
        ready,
        pods,
        in_force,
    }
}

pub(super) fn agent(facts: &AgentFacts) -> Finding {
    const NAME: &str = "agent";
    let address = facts.address;
    match &facts.ready {
        Ok(Ok(())) => Finding::ok(NAME, format!("ready, at {address}")),
        Ok(Err(pending)) => Finding::failed(
            NAME,
            format!("not ready, at {address}: {pending}"),
            "its log says more; what else is found here may be the reason",
        ),
        Err(error) if facts.in_force => Finding::failed(
            NAME,
            format!("its programs are in force, and none answers at {address}: {error}"),
            "pods in the mesh connect to nobody until it runs: start it, or let the pods go by `adit node --uninstall`",
        ),
        Err(error) => Finding::warning(
            NAME,
            format!("none answers at {address}: {error}"),
            "start `adit node`; where it runs, give its --admin",
        ),
    }
}

/// How each pod stands that is to be in the mesh, and how many there are.
pub(super) fn pods(facts: &AgentFacts) -> Vec<Finding> {
    let pods = match &facts.pods {
        Ok(pods) => pods,
        // That it does not answer is told.
        Err(_) if facts.ready.is_err() => return Vec::new(),
        Err(error) => {
            let advice = "an agent of another version? Use the `adit` of its own image";
            return vec![Finding::warning(
                "pods",
                format!("the agent does not tell: {error}"),
                advice,
            )];
        }
    };
    let (outside, listed): (Vec<_>, Vec<_>) = pods.iter().partition(|pod| pod.capture == "outside");
    let captured = listed.iter().filter(|pod| pod.capture == "captured").count();
    let summary = format!(
        "{captured} of {} in the mesh are captured; {} are not in it",
        listed.len(),
        outside.len()
    );
    let summary = Finding::ok("pods", summary);
    let each = listed.into_iter().map(pod);
    std::iter::once(summary).chain(each).collect()
}

fn pod(pod: &Pod) -> Finding {
    let name = format!("pod {}/{}", pod.namespace, pod.name);
    let uid = &pod.uid;
    let reason = pod.reason.as_deref().unwrap_or("no reason is given");
    let identity = pod.identity.as_deref().unwrap_or("-");
    let (level, what, advice) = match pod.capture.as_str() {
        "captured" => {
            let what = format!("captured, by a test from within it; speaks as {identity} (uid {uid})");
            return Finding::ok(name, what);
        }
        "enrolled" => (
            Level::Warning,
            "enrolled, and not tested yet".to_owned(),
            "ask again in a moment",
        ),
        "waiting" => (
            Level::Warning,
            "has no process or no address yet".to_owned(),
            "kubectl describe it: what keeps it from starting?",
        ),
        "barred" => (
            Level::Warning,
            reason.to_owned(),
            "see docs/install.md on pods that are never enrolled",
        ),
        "failed" => (
            Level::Failed,
            reason.to_owned(),
            "it connects to nobody until this is put right; the agent tries again by itself",
        ),
        other => (
            Level::Warning,
            format!("is {other}"),
            "an agent of another version? Use its own `adit`",
        ),
    };
    Finding::bad(level, name, format!("{what} (uid {uid})"), advice)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(ready: io::Result<Result<(), String>>, in_force: bool) -> AgentFacts {
        AgentFacts {
            address: "127.0.0.1:15000".parse().unwrap(),
            ready,
            pods: Err(io::ErrorKind::ConnectionRefused.into()),
            in_force,
        }
    }

    #[test]
    fn a_silent_agent_is_a_failure_only_where_its_programs_are_in_force() {
        let silent = || Err(io::ErrorKind::ConnectionRefused.into());
        for (ready, in_force, level) in [
            (Ok(Ok(())), true, Level::Ok),
            (Ok(Err("certificate of x".to_owned())), true, Level::Failed),
            (silent(), true, Level::Failed),
            (silent(), false, Level::Warning),
        ] {
            assert_eq!(agent(&facts(ready, in_force)).level, level);
        }
        assert!(pods(&facts(silent(), false)).is_empty());
        assert_eq!(pods(&facts(Ok(Ok(())), true))[0].level, Level::Warning);
    }

    #[test]
    fn each_pod_of_the_mesh_has_a_line_and_those_outside_are_counted() {
        let text = r#"[
            {"uid":"1","namespace":"shop","name":"a","capture":"captured","reason":null,"identity":"spiffe://x/ns/shop/sa/a"},
            {"uid":"2","namespace":"shop","name":"b","capture":"failed","reason":"no hooks","identity":null},
            {"uid":"3","namespace":"shop","name":"c","capture":"barred","reason":"hostNetwork","identity":null},
            {"uid":"4","namespace":"shop","name":"d","capture":"outside","reason":null,"identity":null},
            {"uid":"5","namespace":"shop","name":"e","capture":"waiting","reason":null,"identity":null}
        ]"#;
        let found = pods(&AgentFacts {
            pods: Ok(serde_json::from_str(text).unwrap()),
            ..facts(Ok(Ok(())), true)
        });
        assert_eq!(found[0].what, "1 of 4 in the mesh are captured; 1 are not in it");
        let levels: Vec<_> = found[1..]
            .iter()
            .map(|finding| (finding.name.as_str(), finding.level))
            .collect();
        assert_eq!(
            levels,
            [
                ("pod shop/a", Level::Ok),
                ("pod shop/b", Level::Failed),
                ("pod shop/c", Level::Warning),
                ("pod shop/e", Level::Warning),
            ]
        );
        assert!(found[2].what.contains("no hooks (uid 2)"));
    }
}
