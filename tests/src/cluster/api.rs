//! What a test asks of the API server, by kubectl.

use std::ffi::OsStr;
use std::io::Write;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, bail};
use serde_json::Value;

use super::manifest::PodSpec;
use super::node::output;
use super::{Cluster, Machine, PATIENCE, programs};
use crate::bed::wait_for;

impl Cluster {
    /// kubectl as the administrator, to be given arguments. It runs in the control plane's network.
    pub fn kubectl_command(&self) -> anyhow::Result<Command> {
        let mut command = Command::new("nsenter");
        command.arg(format!("--net={}", self.prefix.netns(Machine::ControlPlane).display()));
        command.arg(programs::kubernetes("kubectl")?);
        command.arg("--kubeconfig").arg(self.prefix.kubeconfig());
        Ok(command)
    }

    /// Helm as the administrator, to be given arguments.
    pub fn helm_command(&self) -> anyhow::Result<Command> {
        let mut command = Command::new("nsenter");
        command.arg(format!("--net={}", self.prefix.netns(Machine::ControlPlane).display()));
        command.arg(programs::kubernetes("helm")?);
        command.arg("--kubeconfig").arg(self.prefix.kubeconfig());
        // Nothing of the user's own, and nothing for the user.
        for kind in ["CACHE", "CONFIG", "DATA"] {
            command.env(format!("HELM_{kind}_HOME"), self.prefix.state().join("helm"));
        }
        Ok(command)
    }

    /// Runs kubectl and gives what it says on standard output; an error with what else it said if it fails.
    pub fn kubectl<I>(&self, arguments: I) -> anyhow::Result<String>
    where
        I: IntoIterator,
        I::Item: AsRef<OsStr>,
    {
        output(self.kubectl_command()?.args(arguments))
    }

    /// Runs Helm and gives what it says on standard output; an error with what else it said if it fails.
    pub fn helm<I>(&self, arguments: I) -> anyhow::Result<String>
    where
        I: IntoIterator,
        I::Item: AsRef<OsStr>,
    {
        output(self.helm_command()?.args(arguments))
    }

    /// Applies manifests: YAML documents, or JSON.
    pub fn apply(&self, manifests: &str) -> anyhow::Result<()> {
        self.feed(&["apply", "--filename", "-"], manifests).map(drop)
    }

    /// Applies a manifest.
    pub fn apply_json(&self, manifest: &Value) -> anyhow::Result<()> {
        self.apply(&manifest.to_string())
    }

    /// Creates a pod.
    pub fn create(&self, pod: &PodSpec) -> anyhow::Result<()> {
        self.feed(&["create", "--filename", "-"], &pod.manifest().to_string())
            .map(drop)
    }

    /// Runs kubectl with `input` to read.
    pub fn feed(&self, arguments: &[&str], input: &str) -> anyhow::Result<String> {
        let mut command = self.kubectl_command()?;
        command
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = command.spawn().context("start kubectl")?;
        let mut stdin = child.stdin.take().context("the standard input of kubectl")?;
        // It may have failed before it read anything: what it says tells more than the broken pipe.
        let _ = stdin.write_all(input.as_bytes());
        drop(stdin);
        let output = child.wait_with_output().context("wait for kubectl")?;
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr);
            bail!("kubectl {}: {}: {}", arguments.join(" "), output.status, said.trim());
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// An object, or a list of them: `get(["pods", "--namespace", "shop"])`.
    pub fn get<I>(&self, arguments: I) -> anyhow::Result<Value>
    where
        I: IntoIterator,
        I::Item: AsRef<OsStr>,
    {
        let mut command = self.kubectl_command()?;
        let text = output(command.arg("get").args(arguments).args(["--output", "json"]))?;
        serde_json::from_str(&text).context("read kubectl's answer")
    }

    /// Makes a namespace with labels, and waits until pods can be made in it.
    pub fn namespace(&self, name: &str, labels: &[(&str, &str)]) -> anyhow::Result<()> {
        let labels: serde_json::Map<_, _> = labels
            .iter()
            .map(|(key, value)| ((*key).to_owned(), Value::from(*value)))
            .collect();
        self.apply_json(&serde_json::json!({
            "apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels},
        }))?;
        self.await_account(name, "default")
    }

    /// Waits until the pods that `what` names are ready: `pod/web`, or options of `kubectl wait`.
    pub fn await_ready(&self, namespace: &str, what: &str) -> anyhow::Result<()> {
        let timeout = format!("--timeout={}s", PATIENCE.as_secs());
        let ready = self.kubectl([
            "wait",
            "--namespace",
            namespace,
            "--for=condition=Ready",
            &timeout,
            what,
        ]);
        ready.map(drop).with_context(|| {
            let state = self.kubectl(["describe", "--namespace", namespace, what]);
            format!(
                "{what} in {namespace} is not ready:\n{}",
                state.unwrap_or_else(|error| format!("{error:#}"))
            )
        })
    }

    /// Waits until `condition` holds for an object, at most so long.
    pub fn await_object(
        &self,
        what: &str,
        deadline: Duration,
        arguments: &[&str],
        condition: impl Fn(&Value) -> bool,
    ) -> anyhow::Result<Value> {
        let mut last = Value::Null;
        wait_for(what, deadline, || {
            // It may not be there yet.
            last = self.get(arguments).unwrap_or_default();
            Ok(condition(&last))
        })
        .with_context(|| format!("it was last {last}"))?;
        Ok(last)
    }

    /// The address of a pod.
    pub fn pod_address(&self, namespace: &str, pod: &str) -> anyhow::Result<std::net::IpAddr> {
        let pod = self.get(["pod", "--namespace", namespace, pod])?;
        let address = pod["status"]["podIP"].as_str().context("the pod has no address yet")?;
        address.parse().with_context(|| format!("read the address {address:?}"))
    }

    /// Runs a command in a pod and gives what it says on standard output.
    pub fn exec<I>(&self, namespace: &str, pod: &str, words: I) -> anyhow::Result<String>
    where
        I: IntoIterator,
        I::Item: AsRef<OsStr>,
    {
        let mut command = self.kubectl_command()?;
        output(command.args(["exec", "--namespace", namespace, pod, "--"]).args(words))
    }

    /// Deletes objects now, without grace, and waits until they are gone.
    pub fn delete(&self, namespace: &str, what: &[&str]) -> anyhow::Result<()> {
        let mut arguments = vec![
            "delete",
            "--namespace",
            namespace,
            "--now",
            "--wait",
            "--ignore-not-found",
        ];
        arguments.extend(what);
        self.kubectl(arguments).map(drop)
    }

    /// Waits until the API server is ready.
    pub(super) fn await_api_server(&self) -> anyhow::Result<()> {
        wait_for("the API server", PATIENCE, || {
            Ok(self.kubectl(["get", "--raw", "/readyz"]).is_ok())
        })
    }

    /// Waits until both nodes are ready and take pods.
    pub fn await_nodes_ready(&self) -> anyhow::Result<()> {
        let ready = |node: &Value| {
            let conditions = node["status"]["conditions"].as_array();
            let is_ready = |condition: &Value| condition["type"] == "Ready" && condition["status"] == "True";
            conditions.is_some_and(|all| all.iter().any(is_ready)) && node["spec"]["taints"].is_null()
        };
        self.await_object("both nodes to be ready", PATIENCE, &["nodes"], |nodes| {
            let nodes = nodes["items"].as_array();
            nodes.is_some_and(|nodes| nodes.len() >= usize::from(super::NODES) && nodes.iter().all(ready))
        })
        .map(drop)
    }

    /// Waits until a service account is there, without which no pod can be made.
    pub(super) fn await_account(&self, namespace: &str, account: &str) -> anyhow::Result<()> {
        let what = format!("service account {namespace}/{account}");
        let arguments = ["serviceaccount", "--namespace", namespace, account];
        self.await_object(&what, PATIENCE, &arguments, |found| {
            found["metadata"]["uid"].is_string()
        })
        .map(drop)
    }
}
