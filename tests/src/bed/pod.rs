//! A pod of the bed.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, bail};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::log::Log;
use super::mesh::WorkloadDoc;
use super::netns;
use super::remote::{DEFAULT_DEADLINE, Running, Stage};
use super::spec::PodSpec;
use crate::sys::Place;

/// A pod: a network namespace and a cgroup on one of the bed's nodes.
#[derive(Debug)]
pub struct Pod {
    pub(super) spec: PodSpec,
    pub(super) node: String,
    pub(super) netns: String,
    pub(super) cgroup: PathBuf,
    pub(super) v4: Vec<Ipv4Addr>,
    pub(super) v6: Vec<Ipv6Addr>,
    pub(super) place: Place,
    pub(super) logs: PathBuf,
    pub(super) _sandbox: Option<Sandbox>,
}

/// The process that is in a pod from its birth on, as a container runtime has one.
#[derive(Debug)]
pub(super) struct Sandbox(Child);

impl Sandbox {
    pub(super) fn start(place: &Place) -> anyhow::Result<Self> {
        let mut command = Command::new("sleep");
        command.arg("infinity").stdin(Stdio::null());
        place.enter_on_exec(&mut command, false);
        Ok(Self(command.spawn().context("start a pod's first process")?))
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Pod {
    /// Its name.
    pub fn name(&self) -> &str {
        &self.spec.name
    }

    /// The node it is on.
    pub fn node(&self) -> &str {
        &self.node
    }

    /// Its workload's name as it appears in logs: `namespace/name`.
    pub fn workload(&self) -> String {
        format!("{}/{}", self.spec.namespace, self.spec.name)
    }

    /// Its workload's uid in the mesh file.
    pub fn uid(&self) -> String {
        if let Some(uid) = &self.spec.uid {
            return uid.clone();
        }
        format!("Kubernetes//Pod/{}/{}", self.spec.namespace, self.spec.name)
    }

    /// Its entry in the mesh file: enrolled and reached over HBONE, or outside the mesh.
    pub fn entry(&self, enrolled: bool) -> WorkloadDoc {
        WorkloadDoc {
            name: self.spec.name.clone(),
            namespace: self.spec.namespace.clone(),
            service_account: self.spec.account.clone(),
            uid: self.uid(),
            node: self.node.clone(),
            addresses: self.addresses(),
            protocol: if enrolled { "hbone" } else { "plain" }.to_owned(),
            labels: self.spec.labels.clone(),
            ports: self.spec.ports.clone(),
            policies: self.spec.policies.clone(),
            same_node: None,
            ready: None,
            exclude: None,
            netns: (enrolled && self.spec.uid.is_none()).then(|| self.netns()),
        }
    }

    /// The identity that its connections carry.
    pub fn identity(&self) -> String {
        format!(
            "spiffe://{}/ns/{}/sa/{}",
            super::TRUST_DOMAIN,
            self.spec.namespace,
            self.spec.account
        )
    }

    /// Its first IPv4 address.
    pub fn v4(&self) -> Ipv4Addr {
        self.v4[0]
    }

    /// Its first IPv6 address.
    pub fn v6(&self) -> Ipv6Addr {
        self.v6[0]
    }

    /// Its addresses, the first of each family first.
    pub fn addresses(&self) -> Vec<IpAddr> {
        let mut all: Vec<IpAddr> = Vec::new();
        for index in 0..self.v4.len().max(self.v6.len()) {
            all.extend(self.v4.get(index).map(|address| IpAddr::V4(*address)));
            all.extend(self.v6.get(index).map(|address| IpAddr::V6(*address)));
        }
        all
    }

    /// `port` at its first IPv4 address.
    pub fn at(&self, port: u16) -> SocketAddr {
        (self.v4(), port).into()
    }

    /// `port` at its first IPv6 address.
    pub fn at6(&self, port: u16) -> SocketAddr {
        (self.v6(), port).into()
    }

    /// The path of its network namespace.
    pub fn netns(&self) -> PathBuf {
        netns::path(&self.netns)
    }

    /// The folder of its cgroup.
    pub fn cgroup(&self) -> &Path {
        &self.cgroup
    }

    /// Runs `work` in the pod, in a process of its own, and gives its result; at most 20 s.
    pub fn run<T>(&self, work: impl FnOnce() -> anyhow::Result<T>) -> anyhow::Result<T>
    where
        T: Serialize + DeserializeOwned,
    {
        self.spawn(work)?.join(DEFAULT_DEADLINE)
    }

    /// Starts `work` in the pod, in a process of its own that dies with the calling thread.
    pub fn spawn<T>(&self, work: impl FnOnce() -> anyhow::Result<T>) -> anyhow::Result<Running<T>>
    where
        T: Serialize + DeserializeOwned,
    {
        Running::start(self.name(), &self.place, |_| work())
    }

    /// Starts `work` in the pod; it keeps step with the test by its [`Stage`].
    pub fn spawn_staged<T>(&self, work: impl FnOnce(&Stage) -> anyhow::Result<T>) -> anyhow::Result<Running<T>>
    where
        T: Serialize + DeserializeOwned,
    {
        Running::start(self.name(), &self.place, work)
    }

    /// Starts a server in the pod and waits until it has told its first stage, which means that it listens.
    pub fn serve<T>(&self, work: impl FnOnce(&Stage) -> anyhow::Result<T>) -> anyhow::Result<Running<T>>
    where
        T: Serialize + DeserializeOwned,
    {
        let mut running = self.spawn_staged(work)?;
        let _listening: serde_json::Value = running.stage(DEFAULT_DEADLINE)?;
        Ok(running)
    }

    /// A command that will run in the pod and die with the thread that starts it.
    pub fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        self.place.enter_on_exec(&mut command, false);
        command
    }

    /// Runs a command to its end and gives its standard output; an error if it fails.
    pub fn output(&self, program: &str, arguments: &[&str]) -> anyhow::Result<String> {
        let output = self
            .command(program)
            .args(arguments)
            .stdin(Stdio::null())
            .output()
            .with_context(|| format!("start {program} in pod {}", self.name()))?;
        if !output.status.success() {
            bail!(
                "{program} {arguments:?} in pod {}: {}\n{}{}",
                self.name(),
                output.status,
                String::from_utf8_lossy(&output.stdout),
                String::from_utf8_lossy(&output.stderr)
            );
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Starts a command in the pod in a process group of its own, its output in a log file; the group is killed when
    /// the result is dropped.
    pub fn spawn_command(&self, program: &str, arguments: &[&str]) -> anyhow::Result<Spawned> {
        let base = Path::new(program)
            .file_name()
            .map_or(program.into(), |name| name.to_string_lossy().into_owned());
        let log = Log::new(&format!("{base}@{}", self.name()), &self.logs);
        let mut command = Command::new(program);
        command.args(arguments).stdin(Stdio::null());
        log.take_output_of(&mut command)?;
        self.place.enter_on_exec(&mut command, true);
        let child = command
            .spawn()
            .with_context(|| format!("start {program} in pod {}", self.name()))?;
        Ok(Spawned { child, log })
    }

    /// Whether something in the pod listens on the TCP port, on any address of it.
    pub fn listens(&self, port: u16) -> anyhow::Result<bool> {
        // Any thread's view of its namespace; the main thread's would be the host's.
        let read = |name: &str| std::fs::read_to_string(format!("/proc/thread-self/net/{name}"));
        let (v4, v6) = netns::inside(&self.netns(), || (read("tcp"), read("tcp6")))?;
        let listening = |table: String| table.lines().skip(1).any(|line| is_listener(line, port));
        Ok(v4.is_ok_and(listening) || v6.is_ok_and(listening))
    }

    /// Waits until something in the pod listens on the TCP port.
    pub fn wait_for_listener(&self, port: u16, deadline: Duration) -> anyhow::Result<()> {
        super::wait_for(
            &format!("a listener on port {port} of pod {}", self.name()),
            deadline,
            || self.listens(port),
        )
    }
}

/// Whether a line of /proc/net/tcp is a listening socket (state 0A) on `port`.
fn is_listener(line: &str, port: u16) -> bool {
    let mut fields = line.split_whitespace().skip(1);
    let (Some(local), Some(_), Some(state)) = (fields.next(), fields.next(), fields.next()) else {
        return false;
    };
    state == "0A" && local.ends_with(&format!(":{port:04X}"))
}

/// A command running in a pod; killed with all it started when dropped.
#[derive(Debug)]
pub struct Spawned {
    child: Child,
    log: Log,
}

impl Spawned {
    /// The process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// What it has written so far, standard output and error together.
    pub fn log(&self) -> &Log {
        &self.log
    }

    /// Waits for the command to end, at most so long, and says whether it succeeded.
    pub fn wait(&mut self, deadline: Duration) -> anyhow::Result<bool> {
        let mut status = None;
        super::wait_for(&format!("{} to end", self.log.name()), deadline, || {
            status = self.child.try_wait()?;
            Ok(status.is_some())
        })?;
        Ok(status.is_some_and(|status| status.success()))
    }
}

impl Drop for Spawned {
    fn drop(&mut self) {
        if let Ok(pid) = i32::try_from(self.child.id()) {
            // The group's leader has not been waited for yet or its group is gone: the id is nobody else's.
            let _ = killpg(Pid::from_raw(pid), Signal::SIGKILL);
        }
        let _ = self.child.wait();
        if std::thread::panicking() {
            self.log.print_tail();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listener_is_told_from_a_connection() {
        let listener = "   0: 00000000:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000 0 0 1";
        let connection = "   1: 0100007F:1F90 0100007F:8000 01 00000000:00000000 00:00000000 00000000 0 0 1";
        assert!(is_listener(listener, 8080));
        assert!(!is_listener(listener, 8081));
        assert!(!is_listener(connection, 8080));
    }
}
