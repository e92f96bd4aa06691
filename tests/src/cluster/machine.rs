//! A machine of the cluster: processes that see a host of their own, by namespaces of every kind and a cgroup that is
//! the root of all they see. What is here runs in the program `adit-cluster`, whose single thread may change places.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};

use anyhow::{Context, bail, ensure};
use nix::errno::Errno;
use nix::sched::{CloneFlags, setns, unshare};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use serde::{Deserialize, Serialize};

use super::hierarchy;
use super::layout::{Machine, Prefix};
use super::mounts;

/// What a machine says when it is ready for programs.
const READY: &str = "ready";

/// `PATH` of all that runs in a machine.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// The namespaces of a machine beside the network's, with their names in `/proc/PID/ns`.
const NAMESPACES: [(&str, CloneFlags); 5] = [
    ("cgroup", CloneFlags::CLONE_NEWCGROUP),
    ("uts", CloneFlags::CLONE_NEWUTS),
    ("ipc", CloneFlags::CLONE_NEWIPC),
    ("pid", CloneFlags::CLONE_NEWPID),
    // Last: names of files mean something else from there on.
    ("mnt", CloneFlags::CLONE_NEWNS),
];

/// A machine that is up, as kept in its folder.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Booted {
    /// Its first process, by the host's count.
    pub(super) pid: u32,
    /// Its cgroups, one per hierarchy.
    pub(super) cgroups: Vec<PathBuf>,
}

impl Booted {
    fn file(prefix: &Prefix, machine: Machine) -> PathBuf {
        prefix.folder(machine).join("machine.json")
    }

    /// What is known of a machine that was booted.
    pub(super) fn read(prefix: &Prefix, machine: Machine) -> anyhow::Result<Booted> {
        let file = Self::file(prefix, machine);
        let text = fs::read(&file).with_context(|| {
            format!(
                "read {}: machine {machine} of cluster {prefix} is not up",
                file.display()
            )
        })?;
        serde_json::from_slice(&text).with_context(|| format!("read {}", file.display()))
    }

    /// Its cgroup in the unified hierarchy.
    pub(super) fn unified(&self) -> anyhow::Result<&Path> {
        let unified = self.cgroups.iter().find(|folder| folder.join("cgroup.kill").exists());
        Ok(unified.context("the machine has no cgroup in the unified hierarchy (Linux 5.14)")?)
    }
}

/// Boots a machine: makes its cgroups, enters its network namespace, and starts its first process in new namespaces
/// of the other kinds. Returns when the machine is ready for programs.
pub(super) fn boot(prefix: &Prefix, machine: Machine) -> anyhow::Result<()> {
    let own = std::env::current_exe().context("find this program's own file")?;
    let log = File::create(prefix.folder(machine).join("init.log")).context("make the log of the machine's start")?;
    let cgroups = hierarchy::make(&prefix.name(machine))?;
    let netns = File::open(prefix.netns(machine)).context("open the machine's network namespace")?;
    hierarchy::join(&cgroups, "")?;
    setns(&netns, CloneFlags::CLONE_NEWNET).context("enter the machine's network namespace")?;
    let all = NAMESPACES.iter().fold(CloneFlags::empty(), |all, (_, one)| all | *one);
    unshare(all).context("make the machine's namespaces")?;
    // Only after the cgroup namespace has been made is this below its root.
    hierarchy::join(&cgroups, hierarchy::INIT)?;
    nix::unistd::setsid().context("leave the terminal")?;
    let mut child = Command::new(own)
        .args(["init", &prefix.to_string(), &machine.to_string()])
        .env_clear()
        .env("PATH", PATH)
        .env("HOME", "/root")
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(log)
        .spawn()
        .context("start the machine's first process")?;
    let mut said = String::new();
    let stdout = child.stdout.take().context("the first process's output")?;
    BufReader::new(stdout)
        .read_line(&mut said)
        .context("wait for the machine")?;
    if said.trim_end() != READY {
        let status = child.wait().context("wait for the machine's first process")?;
        let log = fs::read_to_string(prefix.folder(machine).join("init.log")).unwrap_or_default();
        bail!(
            "machine {machine} of cluster {prefix} did not start: {status}: {}",
            log.trim()
        );
    }
    let booted = Booted {
        pid: child.id(),
        cgroups,
    };
    let file = Booted::file(prefix, machine);
    fs::write(&file, serde_json::to_vec(&booted)?).with_context(|| format!("write {}", file.display()))
}

/// The machine's first process: makes its file systems, and reaps what others leave. Ends by a signal, and everything
/// in the machine with it.
pub(super) fn init(prefix: &Prefix, machine: Machine) -> anyhow::Result<()> {
    ensure!(
        nix::unistd::getpid().as_raw() == 1,
        "only a machine's first process does this"
    );
    let mut signals = SigSet::empty();
    signals.add(Signal::SIGCHLD);
    signals.add(Signal::SIGTERM);
    signals.thread_block().context("block signals")?;
    fs::write("/proc/sys/kernel/hostname", machine.to_string()).context("name the machine")?;
    mounts::make(&prefix.folder(machine), machine)?;
    let mut out = std::io::stdout().lock();
    writeln!(out, "{READY}")
        .and_then(|()| out.flush())
        .context("say that the machine is ready")?;
    drop(out);
    loop {
        match signals.wait() {
            Ok(Signal::SIGTERM) => return Ok(()),
            Ok(_) | Err(Errno::EINTR) => reap(),
            Err(error) => return Err(error).context("wait for signals"),
        }
    }
}

fn reap() {
    while let Ok(status) = waitpid(None, Some(WaitPidFlag::WNOHANG)) {
        if status == WaitStatus::StillAlive {
            return;
        }
    }
}

/// Moves the calling process into a machine, into the cgroup `cgroup` there, and gives what starts `command`. The
/// calling process itself stays in the process namespace it was in.
fn enter(prefix: &Prefix, machine: Machine, cgroup: &str, command: &[OsString]) -> anyhow::Result<Command> {
    let (program, arguments) = command.split_first().context("no command to run")?;
    let booted = Booted::read(prefix, machine)?;
    let kinds = NAMESPACES.iter().copied();
    let opened: Vec<(File, CloneFlags)> = std::iter::once(("net", CloneFlags::CLONE_NEWNET))
        .chain(kinds)
        .map(|(name, kind)| {
            let path = format!("/proc/{}/ns/{name}", booted.pid);
            let file = File::open(&path).with_context(|| format!("open {path}: machine {machine} is not up"))?;
            Ok((file, kind))
        })
        .collect::<anyhow::Result<_>>()?;
    hierarchy::join(&booted.cgroups, cgroup)?;
    for (file, kind) in opened {
        setns(&file, kind).with_context(|| format!("enter a namespace of machine {machine}"))?;
    }
    let mut child = Command::new(program);
    child
        .args(arguments)
        .current_dir("/")
        .env("PATH", PATH)
        .env("HOME", "/root");
    Ok(child)
}

/// Runs a command in a machine to its end.
pub(super) fn run(prefix: &Prefix, machine: Machine, command: &[OsString]) -> anyhow::Result<ExitStatus> {
    let mut child = enter(prefix, machine, hierarchy::INIT, command)?;
    child
        .status()
        .with_context(|| format!("start {} on {machine}", child.get_program().display()))
}

/// Starts a service in a machine, in a cgroup of its own, and leaves it running.
pub(super) fn start(prefix: &Prefix, machine: Machine, name: &str, command: &[OsString]) -> anyhow::Result<()> {
    let path = prefix.folder(machine).join(format!("{name}.log"));
    let log = File::options()
        .create(true)
        .append(true)
        .open(&path)
        .with_context(|| format!("open {}", path.display()))?;
    let errors = log.try_clone().context("share the log")?;
    let mut child = enter(prefix, machine, &service_cgroup(name), command)?;
    nix::unistd::setsid().context("leave the terminal")?;
    child.stdin(Stdio::null()).stdout(log).stderr(errors);
    child
        .spawn()
        .with_context(|| format!("start {name} on machine {machine}"))?;
    Ok(())
}

/// Where a service is, as systemd would put it.
pub(super) fn service_cgroup(name: &str) -> String {
    format!("system.slice/{name}.service")
}
