//! Network namespaces by name, and what `ip` does in them.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use anyhow::{Context, bail};
use nix::sched::{CloneFlags, setns};

/// Where `ip netns` keeps names.
const NAMES: &str = "/run/netns";

/// The path of the namespace `name`.
pub(crate) fn path(name: &str) -> PathBuf {
    Path::new(NAMES).join(name)
}

/// The names of all named network namespaces.
pub(crate) fn list() -> Vec<String> {
    let Ok(entries) = fs::read_dir(NAMES) else {
        return Vec::new();
    };
    entries
        .flatten()
        .filter_map(|entry| entry.file_name().into_string().ok())
        .collect()
}

/// Namespaces that are deleted when this is dropped.
#[derive(Debug)]
pub(super) struct Namespaces {
    names: Vec<String>,
}

impl Namespaces {
    /// Makes all of `names`, with these sysctls (`net/…` paths) set before there is any link but `lo`. Those among them that
    /// are in `own_users` belong to a new user namespace each.
    pub(super) fn create<'a>(
        names: Vec<String>,
        own_users: impl Iterator<Item = &'a str>,
        sysctls: &[(&str, &str)],
    ) -> anyhow::Result<Self> {
        let makers = own_users.map(|name| Ok((name, UserNamespace::start()?)));
        let makers = makers.collect::<anyhow::Result<HashMap<_, _>>>()?;
        let line = |name: &String| match makers.get(name.as_str()) {
            Some(maker) => format!("netns attach {name} {}\n", maker.0.id()),
            None => format!("netns add {name}\n"),
        };
        let script: String = names.iter().map(line).collect();
        let made = Self { names };
        ip(None, &script)?;
        for name in &made.names {
            inside(&path(name), || set_sysctls(sysctls))??;
        }
        Ok(made)
    }
}

impl Drop for Namespaces {
    fn drop(&mut self) {
        delete(&self.names);
    }
}

/// A process in a user namespace and a network namespace of its own, until this is dropped.
struct UserNamespace(Child);

impl UserNamespace {
    fn start() -> anyhow::Result<Self> {
        let mut command = Command::new("unshare");
        command.args(["--user", "--map-root-user", "--net", "sleep", "60"]);
        let made = Self(command.spawn().context("start `unshare` (Debian package util-linux)")?);
        let namespace = |process: u32| fs::read_link(format!("/proc/{process}/ns/net"));
        super::wait_for("a network namespace of its own", Duration::from_secs(10), || {
            Ok(namespace(made.0.id())? != namespace(std::process::id())?)
        })?;
        Ok(made)
    }
}

impl Drop for UserNamespace {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Deletes the names; the namespaces go when no process or socket is left in them.
pub(crate) fn delete(names: &[String]) {
    let script: String = names
        .iter()
        .filter(|name| path(name).exists())
        .map(|name| format!("netns delete {name}\n"))
        .collect();
    if script.is_empty() {
        return;
    }
    if let Err(error) = ip(None, &script) {
        eprintln!("{error:#}");
    }
}

/// Runs a batch of `ip` commands, in the namespace `netns` or in the caller's, and stops at the first that fails.
pub(crate) fn ip(netns: Option<&str>, script: &str) -> anyhow::Result<()> {
    let mut command = Command::new("ip");
    if let Some(netns) = netns {
        command.args(["-netns", netns]);
    }
    let mut child = command
        .args(["-batch", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .context("start `ip` (Debian package iproute2)")?;
    let mut stdin = child.stdin.take().context("the standard input of `ip`")?;
    stdin.write_all(script.as_bytes()).context("write to `ip -batch -`")?;
    drop(stdin);
    let output = child.wait_with_output().context("wait for `ip`")?;
    if !output.status.success() {
        let place = netns.unwrap_or("the host's namespace");
        bail!(
            "`ip -batch -` in {place}: {}\nof the script\n{script}",
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    Ok(())
}

/// Runs `work` on a thread of its own in the network namespace at `netns`. Sockets that it makes belong there for
/// good; its cgroup stays the test's, so it is never a pod's traffic.
pub(crate) fn inside<T: Send>(netns: &Path, work: impl FnOnce() -> T + Send) -> anyhow::Result<T> {
    let file = File::open(netns).with_context(|| format!("open network namespace {}", netns.display()))?;
    thread::scope(|scope| {
        let thread = scope.spawn(|| -> anyhow::Result<T> {
            setns(&file, CloneFlags::CLONE_NEWNET).with_context(|| format!("enter {}", netns.display()))?;
            Ok(work())
        });
        match thread.join() {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })
}

/// Sets sysctls of the calling thread's network namespace. Those that this kernel lacks are left out.
pub(crate) fn set_sysctls(sysctls: &[(&str, &str)]) -> anyhow::Result<()> {
    for (name, value) in sysctls {
        // The kernel shows the values of the reading thread's namespace here.
        let path = Path::new("/proc/sys").join(name);
        if path.exists() {
            fs::write(&path, value).with_context(|| format!("set {} to {value}", path.display()))?;
        }
    }
    Ok(())
}
