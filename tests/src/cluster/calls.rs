//! Calls by pods of a cluster, and what a pod's conditions say.

use std::process::{Child, Stdio};

use anyhow::Context;
use serde_json::Value;

use super::Cluster;
use crate::tool::Calls;

/// Calls from a pod, by the test tool, that are under way.
pub struct Calling(Child);

impl Calling {
    /// Begins to call `to` from the pod, with more options of `tool call`.
    pub fn start(cluster: &Cluster, namespace: &str, from: &str, to: &str, more: &[&str]) -> anyhow::Result<Self> {
        let mut command = cluster.kubectl_command()?;
        command.args(["exec", "--namespace", namespace, from, "--", "/tool", "call", to]);
        command.args(more).stdout(Stdio::piped()).stderr(Stdio::piped());
        Ok(Self(command.spawn().context("start kubectl")?))
    }

    /// Waits for their end, and tells how they went. Calls that failed are no failure of this.
    pub fn end(self) -> anyhow::Result<Calls> {
        let output = self.0.wait_with_output().context("wait for kubectl")?;
        Calls::last(&String::from_utf8_lossy(&output.stdout))
            .with_context(|| String::from_utf8_lossy(&output.stderr).trim().to_owned())
    }
}

/// The status of an object's condition.
pub fn condition<'a>(object: &'a Value, kind: &str) -> Option<&'a str> {
    let conditions = object["status"]["conditions"].as_array()?;
    let condition = conditions.iter().find(|condition| condition["type"] == kind)?;
    condition["status"].as_str()
}
