//! A node of the bed and the proxy that runs on it.

use std::ffi::CStr;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::sync::Mutex;
use std::time::Duration;

use anyhow::{Context, bail};
use nix::sys::signal::Signal;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::admin::{Metrics, Response, http_get};
use super::log::{AccessLine, Log};
use super::netns;
use super::pod::Pod;
use super::process::{self, ADMIN, NodeSettings, Process, write_token};
use super::remote::{DEFAULT_DEADLINE, Running, Stage};
use super::{READY_DEADLINE, lock, wait_for};
use crate::sys::Place;

/// How long a proxy may take to take over.
const LONG_START: Duration = Duration::from_secs(30);

/// A node: a network namespace, and Adit's proxy in it and in its own cgroup.
#[derive(Debug)]
pub struct Node {
    pub(super) settings: NodeSettings,
    pub(super) netns: String,
    pub(super) v4: Ipv4Addr,
    pub(super) v6: Ipv6Addr,
    pub(super) place: Place,
    /// Where the host's other processes are: in no pod's cgroup and not in the proxy's.
    pub(super) host: Place,
    /// The cgroup of its kubelet.
    pub(super) kubelet: PathBuf,
    pub(super) process: Mutex<Option<Process>>,
    /// Proxies that have handed over.
    pub(super) leaving: Mutex<Vec<Process>>,
    pub(super) log: Log,
}

impl Node {
    /// Its name.
    pub fn name(&self) -> &str {
        &self.settings.name
    }

    /// Its IPv4 address on the link between the nodes.
    pub fn v4(&self) -> Ipv4Addr {
        self.v4
    }

    /// Its IPv6 address on the link between the nodes.
    pub fn v6(&self) -> Ipv6Addr {
        self.v6
    }

    /// The path of its network namespace.
    pub fn netns(&self) -> PathBuf {
        netns::path(&self.netns)
    }

    /// The cgroup that holds its pods.
    pub fn pods_cgroup(&self) -> &Path {
        &self.settings.pods_cgroup
    }

    /// The folder in which its proxy pins maps and programs.
    pub fn bpf_dir(&self) -> &Path {
        &self.settings.bpf_dir
    }

    /// The folder in it of the layout that is in use: the lowest version there is.
    pub fn pins_dir(&self) -> anyhow::Result<PathBuf> {
        let folder = std::fs::read_dir(self.bpf_dir()).context("read the folder of pins")?;
        let version = |path: &PathBuf| path.file_name()?.to_str()?.strip_prefix('v')?.parse::<u32>().ok();
        let versions = folder.flatten().map(|entry| entry.path());
        versions
            .filter_map(|path| Some((version(&path)?, path)))
            .min()
            .map(|(_, path)| path)
            .context("no version has pins")
    }

    /// The folder of the socket by which its proxy hands over to the next.
    pub fn run_dir(&self) -> &Path {
        &self.settings.run_dir
    }

    /// Runs `adit node --uninstall`.
    pub fn uninstall(&self) -> anyhow::Result<()> {
        self.settings.uninstall()
    }

    /// The file with its proxy's token.
    pub fn token_file(&self) -> &Path {
        &self.settings.ca_token
    }

    /// Runs `work` on a thread in the node's network namespace, as a host process of the node would.
    pub fn inside<T: Send>(&self, work: impl FnOnce() -> T + Send) -> anyhow::Result<T> {
        netns::inside(&self.netns(), work)
    }

    /// Starts a server as a host process of the node, outside the cgroups of pods and proxy, and waits until it has told
    /// its first stage, which means that it listens.
    pub fn serve<T>(&self, work: impl FnOnce(&Stage) -> anyhow::Result<T>) -> anyhow::Result<Running<T>>
    where
        T: Serialize + DeserializeOwned,
    {
        let mut running = Running::start(self.name(), &self.host, work)?;
        let _listening: serde_json::Value = running.stage(DEFAULT_DEADLINE)?;
        Ok(running)
    }

    /// Starts `work` in the pod's network namespace, but in the host's cgroup: as a privileged process of the host that
    /// enters the namespace.
    pub fn spawn_in<T>(&self, pod: &Pod, work: impl FnOnce() -> anyhow::Result<T>) -> anyhow::Result<Running<T>>
    where
        T: Serialize + DeserializeOwned,
    {
        let place = self.host.with_netns(&pod.netns())?;
        Running::start(pod.name(), &place, |_| work())
    }

    /// Runs `work` as a process of this command name in the kubelet's cgroup, in the node's network namespace.
    pub fn as_kubelet<T>(&self, command: &CStr, work: impl FnOnce() -> anyhow::Result<T>) -> anyhow::Result<T>
    where
        T: Serialize + DeserializeOwned,
    {
        self.as_process_of(&self.kubelet, command, work)
    }

    /// Runs `work` as a process of this command name in a cgroup, in the node's network namespace.
    pub fn as_process_of<T>(
        &self,
        cgroup: &Path,
        command: &CStr,
        work: impl FnOnce() -> anyhow::Result<T>,
    ) -> anyhow::Result<T>
    where
        T: Serialize + DeserializeOwned,
    {
        let place = Place::open(&self.netns(), cgroup)?;
        self.as_command(&place, command, work)
    }

    /// The same in the cgroup of the host's other processes.
    pub fn as_host_process<T>(&self, command: &CStr, work: impl FnOnce() -> anyhow::Result<T>) -> anyhow::Result<T>
    where
        T: Serialize + DeserializeOwned,
    {
        self.as_command(&self.host, command, work)
    }

    fn as_command<T>(
        &self,
        place: &Place,
        command: &CStr,
        work: impl FnOnce() -> anyhow::Result<T>,
    ) -> anyhow::Result<T>
    where
        T: Serialize + DeserializeOwned,
    {
        let named = |_: &Stage| {
            nix::sys::prctl::set_name(command)?;
            work()
        };
        Running::start(self.name(), place, named)?.join(DEFAULT_DEADLINE)
    }

    /// The cgroup of its kubelet.
    pub fn kubelet_cgroup(&self) -> &Path {
        &self.kubelet
    }

    /// Starts `work` as a pod of the host's network does: in a cgroup of its own among the pods', in the node's network
    /// namespace.
    pub fn spawn_host_network_pod<T>(
        &self,
        name: &str,
        work: impl FnOnce() -> anyhow::Result<T>,
    ) -> anyhow::Result<Running<T>>
    where
        T: Serialize + DeserializeOwned,
    {
        let cgroup = self.pods_cgroup().join(name);
        std::fs::create_dir(&cgroup).with_context(|| format!("make cgroup {}", cgroup.display()))?;
        Running::start(name, &Place::open(&self.netns(), &cgroup)?, |_| work())
    }

    /// Puts a token where the proxy reads it.
    pub fn write_token(&self, token: &str) -> anyhow::Result<()> {
        write_token(&self.settings.ca_token, token)
    }

    /// Starts the proxy without waiting for it.
    pub fn launch(&self) -> anyhow::Result<()> {
        self.launch_with(&[])
    }

    /// The same, with more arguments, each `--flag=value`.
    pub fn launch_with(&self, more: &[&str]) -> anyhow::Result<()> {
        *lock(&self.process) = Some(Process::start_node(&self.with(more), &self.place, &self.log)?);
        Ok(())
    }

    pub(super) fn with(&self, more: &[&str]) -> NodeSettings {
        let mut settings = self.settings.clone();
        settings.more.extend(more.iter().map(|&argument| argument.to_owned()));
        settings
    }

    /// Starts the proxy and waits until it is ready.
    pub fn start(&self) -> anyhow::Result<()> {
        self.launch()?;
        self.wait_ready(READY_DEADLINE)
    }

    /// Starts another proxy beside the one that runs, with more arguments, and waits until it has taken over and is
    /// ready. Where it ends instead, the one that runs stays the node's.
    pub fn upgrade(&self, more: &[&str]) -> anyhow::Result<()> {
        let handed_over = || self.log.text().matches("a successor has taken over").count();
        let before = handed_over();
        let mut next = Process::start_node(&self.with(more), &self.place, &self.log)?;
        let taken = wait_for(
            &format!("another proxy to take over {}", self.name()),
            LONG_START,
            || {
                if let Some(status) = next.ended()? {
                    bail!("the other proxy of {} ended: {status}", self.name());
                }
                Ok(handed_over() > before)
            },
        );
        taken.with_context(|| format!("its log:\n{}", self.log.tail()))?;
        let old = lock(&self.process).replace(next);
        lock(&self.leaving).extend(old);
        self.wait_ready(READY_DEADLINE)
    }

    /// Waits until all proxies have ended that have handed over.
    pub fn wait_left(&self, deadline: Duration) -> anyhow::Result<()> {
        let mut leaving = lock(&self.leaving);
        while let Some(process) = leaving.first_mut() {
            let status = process.wait(deadline)?;
            leaving.remove(0);
            if !status.success() {
                bail!("a proxy of {} that had handed over ended: {status}", self.name());
            }
        }
        Ok(())
    }

    /// Waits until the proxy says that it is ready.
    pub fn wait_ready(&self, deadline: Duration) -> anyhow::Result<()> {
        let mut last = "no answer".to_owned();
        let ready = wait_for(&format!("the proxy of {} to be ready", self.name()), deadline, || {
            if let Some(process) = lock(&self.process).as_mut()
                && let Some(status) = process.ended()?
            {
                bail!("the proxy of {} ended: {status}", self.name());
            }
            match self.get("/healthz/ready") {
                Ok(answer) if answer.status == 200 => return Ok(true),
                Ok(answer) => last = format!("{} {}", answer.status, answer.body.trim()),
                Err(error) => last = format!("{error:#}"),
            }
            Ok(false)
        });
        ready.with_context(|| format!("it last said: {last}; its log:\n{}", self.log.tail()))
    }

    /// The proxy's process id, while it runs.
    pub fn pid(&self) -> Option<u32> {
        lock(&self.process).as_ref().map(Process::pid)
    }

    /// Whether the proxy is running.
    pub fn is_running(&self) -> bool {
        lock(&self.process)
            .as_mut()
            .is_some_and(|process| process.ended().is_ok_and(|status| status.is_none()))
    }

    /// Sends the proxy a signal.
    pub fn signal(&self, signal: Signal) -> anyhow::Result<()> {
        lock(&self.process)
            .as_ref()
            .with_context(|| format!("no proxy runs on {}", self.name()))?
            .signal(signal)
    }

    /// Waits until the proxy has ended by itself.
    pub fn wait_ended(&self, deadline: Duration) -> anyhow::Result<ExitStatus> {
        lock(&self.process)
            .as_mut()
            .with_context(|| format!("no proxy runs on {}", self.name()))?
            .wait(deadline)
    }

    /// Ends the proxy at once, as a crash would.
    pub fn kill(&self) {
        *lock(&self.process) = None;
    }

    /// The proxy's log.
    pub fn log(&self) -> &Log {
        &self.log
    }

    /// The access log so far.
    pub fn access_log(&self) -> Vec<AccessLine> {
        self.log.access()
    }

    /// Waits for an access line of which `wanted` is true, and gives the first.
    pub fn wait_for_access(
        &self,
        what: &str,
        deadline: Duration,
        wanted: impl Fn(&AccessLine) -> bool,
    ) -> anyhow::Result<AccessLine> {
        let mut found = None;
        wait_for(&format!("an access line of {}: {what}", self.name()), deadline, || {
            found = self.access_log().into_iter().find(|line| wanted(line));
            Ok(found.is_some())
        })?;
        found.context("the line that was just found")
    }

    /// Waits for a line of the log with `pattern` in it.
    pub fn wait_for_log(&self, pattern: &str, deadline: Duration) -> anyhow::Result<String> {
        self.log.wait_for(pattern, deadline)
    }

    /// `GET path` from the admin pages.
    pub fn get(&self, path: &str) -> anyhow::Result<Response> {
        let admin: SocketAddr = ADMIN.parse().context("the admin address")?;
        http_get(&self.netns(), admin, path)
    }

    /// The proxy's metrics now.
    pub fn metrics(&self) -> anyhow::Result<Metrics> {
        Ok(Metrics::parse(&self.get("/metrics")?.body))
    }

    /// The proxy's state now, from `/debug/state`.
    pub fn state(&self) -> anyhow::Result<serde_json::Value> {
        let answer = self.get("/debug/state")?;
        serde_json::from_str(&answer.body).with_context(|| format!("the state of {}: {}", self.name(), answer.body))
    }

    /// How many file descriptors the proxy has open.
    pub fn open_files(&self) -> anyhow::Result<usize> {
        let pid = self.pid().context("no proxy runs")?;
        Ok(std::fs::read_dir(format!("/proc/{pid}/fd"))
            .context("read the proxy's descriptors")?
            .count())
    }

    /// The proxy's resident memory in KiB.
    pub fn resident_kib(&self) -> anyhow::Result<u64> {
        process::resident_kib(self.pid().context("no proxy runs")?)
    }

    /// The part of it that is no file's: heap and stacks.
    pub fn anonymous_kib(&self) -> anyhow::Result<u64> {
        process::status_kib(self.pid().context("no proxy runs")?, "RssAnon")
    }

    /// CPU seconds, of user and system, that the proxy has used.
    pub fn cpu_seconds(&self) -> anyhow::Result<f64> {
        process::cpu_seconds(
            self.pid()
                .with_context(|| format!("no proxy runs on {}", self.name()))?,
        )
    }
}
