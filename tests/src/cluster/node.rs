//! One machine of a cluster that is up, seen from the host.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::net::{Ipv4Addr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::layout::{Machine, Prefix};
use super::machine::{Booted, service_cgroup};
use super::programs;
use super::services::Service;
use super::{PATIENCE, hierarchy};
use crate::bed::{netns, wait_for};

/// How long a killed process may take to be gone.
const GONE: Duration = Duration::from_secs(10);
/// Where a kubelet says that it is well.
const KUBELET_HEALTH: u16 = 10_248;
/// How much of a service's log is shown where it fails.
const LAST_LINES: usize = 20;

/// A machine of a cluster: a node, or the control plane.
#[derive(Debug, Clone)]
pub struct Node {
    prefix: Prefix,
    machine: Machine,
}

impl Node {
    pub(super) fn new(prefix: &Prefix, machine: Machine) -> Node {
        Node {
            prefix: prefix.clone(),
            machine,
        }
    }

    /// Its name, which is the Node object's: `n1`.
    pub fn name(&self) -> String {
        self.machine.to_string()
    }

    /// Its address.
    pub fn address(&self) -> Ipv4Addr {
        self.machine.v4()
    }

    /// Where what it keeps is: logs of its services, and below `root` its kubelet's and containerd's folders.
    pub fn folder(&self) -> PathBuf {
        self.prefix.folder(self.machine)
    }

    /// The host's path of its network namespace.
    pub fn netns(&self) -> PathBuf {
        self.prefix.netns(self.machine)
    }

    /// Runs `work` on a thread of its own in its network namespace.
    pub fn inside<T: Send>(&self, work: impl FnOnce() -> T + Send) -> anyhow::Result<T> {
        netns::inside(&self.netns(), work)
    }

    /// Its first process, by the host's count; `/proc/PID/root` is its file system.
    pub fn pid(&self) -> anyhow::Result<u32> {
        Ok(Booted::read(&self.prefix, self.machine)?.pid)
    }

    /// The host's path of the root of its unified cgroup hierarchy.
    pub fn cgroup(&self) -> anyhow::Result<PathBuf> {
        Ok(Booted::read(&self.prefix, self.machine)?.unified()?.to_path_buf())
    }

    /// A command that runs in it: in its namespaces of all kinds and its cgroup.
    pub fn command<I>(&self, words: I) -> anyhow::Result<Command>
    where
        I: IntoIterator,
        I::Item: AsRef<OsStr>,
    {
        let mut command = Command::new(programs::own("adit-cluster")?);
        command
            .args(["enter", &self.prefix.to_string(), &self.name(), "--"])
            .args(words);
        Ok(command)
    }

    /// Runs a command in it and gives what it says on standard output; an error if it fails.
    pub fn run<I>(&self, words: I) -> anyhow::Result<String>
    where
        I: IntoIterator,
        I::Item: AsRef<OsStr>,
    {
        output(&mut self.command(words)?)
    }

    /// Takes a docker-archive into its containerd.
    pub fn import(&self, archive: &Path) -> anyhow::Result<()> {
        let words = ["ctr", "--namespace", "k8s.io", "images", "import"].map(OsString::from);
        self.run(words.into_iter().chain([archive.as_os_str().to_owned()]))
            .with_context(|| format!("import {} on {}", archive.display(), self.name()))?;
        Ok(())
    }

    /// The processes of a service, by the host's count.
    pub fn pids(&self, service: Service) -> anyhow::Result<Vec<u32>> {
        // What containerd starts for containers is in its cgroup too.
        let mut pids = self.processes(service.name())?;
        pids.retain(|pid| program_of(*pid).as_deref() == Some(service.name()));
        Ok(pids)
    }

    /// All processes in the cgroup of the service of this name, by the host's count.
    pub fn processes(&self, service: &str) -> anyhow::Result<Vec<u32>> {
        let cgroup = self.cgroup()?.join(service_cgroup(service));
        Ok(hierarchy::processes(&cgroup))
    }

    /// Sends a signal to a service.
    pub fn signal(&self, service: Service, signal: Signal) -> anyhow::Result<()> {
        let pids = self.pids(service)?;
        ensure!(!pids.is_empty(), "{service} does not run on {}", self.name());
        for pid in pids {
            let pid = Pid::from_raw(i32::try_from(pid)?);
            kill(pid, signal).with_context(|| format!("send {signal} to {service} on {}", self.name()))?;
        }
        Ok(())
    }

    /// Kills a service and waits until it is gone. It stays away until [`Node::start`].
    pub fn kill(&self, service: Service) -> anyhow::Result<()> {
        self.signal(service, Signal::SIGKILL)?;
        wait_for(&format!("{service} to be gone"), GONE, || {
            Ok(self.pids(service)?.is_empty())
        })
    }

    /// Starts a service.
    pub fn start(&self, service: Service) -> anyhow::Result<()> {
        self.run_service(service.name(), service.command(&self.prefix, self.machine)?)
    }

    /// Starts a program as a service of this name, by which its cgroup and its log are known, and leaves it running.
    pub fn run_service(&self, name: &str, words: Vec<OsString>) -> anyhow::Result<()> {
        let mut command = Command::new(programs::own("adit-cluster")?);
        command.args(["start", &self.prefix.to_string(), &self.name(), name, "--"]);
        output(command.args(words)).map(drop)
    }

    /// Kills a service and starts it again. A kubelet and a containerd answer when this returns.
    pub fn restart(&self, service: Service) -> anyhow::Result<()> {
        self.kill(service)?;
        self.start_answering(service)
    }

    /// Starts a service. A kubelet and a containerd answer when this returns.
    pub(super) fn start_answering(&self, service: Service) -> anyhow::Result<()> {
        match service {
            Service::Kubelet => self
                .start_kubelet()
                .with_context(|| format!("it said last:\n{}", self.last_words(service))),
            Service::Containerd => {
                self.start(service)?;
                self.await_containerd()
            }
            _ => self.start(service),
        }
    }

    /// A kubelet ends if its containerd does not answer yet or if its port is still taken. It is started again, as
    /// systemd would.
    fn start_kubelet(&self) -> anyhow::Result<()> {
        // A process that is killed is gone from its cgroup before its sockets are closed.
        let what = format!("the port of the kubelet of {} to be free", self.name());
        wait_for(&what, GONE, || Ok(!self.listens(KUBELET_HEALTH)?))?;
        wait_for(&format!("the kubelet of {} to answer", self.name()), PATIENCE, || {
            if self.processes(Service::Kubelet.name())?.is_empty() {
                self.start(Service::Kubelet)?;
            }
            self.listens(KUBELET_HEALTH)
        })
    }

    /// What a service has said.
    pub fn log(&self, service: Service) -> String {
        fs::read_to_string(self.folder().join(format!("{service}.log"))).unwrap_or_default()
    }

    /// The last lines of what a service has said.
    pub(super) fn last_words(&self, service: Service) -> String {
        let log = self.log(service);
        let lines: Vec<_> = log.lines().collect();
        lines[lines.len().saturating_sub(LAST_LINES)..].join("\n")
    }

    /// Pulls the plug: everything on it is killed at once and its cgroups go. Its folders stay, as a disk would.
    pub fn crash(&self) -> anyhow::Result<()> {
        let own = self.prefix.name(self.machine);
        hierarchy::remove(&hierarchy::find(|name| name == own))
    }

    /// Makes it a machine that is up, with no service yet.
    pub fn boot(&self) -> anyhow::Result<()> {
        let mut command = Command::new(programs::own("adit-cluster")?);
        command.args(["boot", &self.prefix.to_string(), &self.name()]);
        output(&mut command).map(drop)
    }

    /// Waits until somebody listens on a port of its loopback.
    pub(super) fn await_port(&self, port: u16) -> anyhow::Result<()> {
        wait_for(&format!("a listener on port {port} of {}", self.name()), GONE, || {
            self.listens(port)
        })
    }

    /// Whether somebody listens on a port of its loopback.
    fn listens(&self, port: u16) -> anyhow::Result<bool> {
        netns::inside(&self.netns(), || {
            TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_ok()
        })
    }

    /// Waits until its containerd answers.
    pub(super) fn await_containerd(&self) -> anyhow::Result<()> {
        let socket = Path::new("/proc")
            .join(self.pid()?.to_string())
            .join("root/run/containerd/containerd.sock");
        wait_for(&format!("containerd's socket on {}", self.name()), GONE, || {
            Ok(socket.exists())
        })?;
        let mut last = String::new();
        let answers = wait_for(&format!("containerd on {}", self.name()), GONE, || {
            match self.run(["ctr", "version"]) {
                Ok(_) => Ok(true),
                Err(error) => {
                    last = format!("{error:#}");
                    Ok(false)
                }
            }
        });
        answers.with_context(|| last)
    }
}

/// The name under which a process was started.
fn program_of(pid: u32) -> Option<String> {
    let line = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
    let first = line.split(|byte| *byte == 0).next()?;
    let name = Path::new(std::str::from_utf8(first).ok()?).file_name()?;
    Some(name.to_str()?.to_owned())
}

/// Runs a command to its end and gives what it says on standard output; an error with what else it said if it fails.
pub(super) fn output(command: &mut Command) -> anyhow::Result<String> {
    let line = || {
        let words: Vec<_> = std::iter::once(command.get_program())
            .chain(command.get_args())
            .collect();
        words.join(OsStr::new(" ")).display().to_string()
    };
    let line = line();
    let output = command.output().with_context(|| format!("start `{line}`"))?;
    if !output.status.success() {
        bail!(
            "`{line}`: {}: {}",
            output.status,
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
