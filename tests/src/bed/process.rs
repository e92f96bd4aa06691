//! The real programs in the bed: which binary, which arguments. All that depends on Adit's command line is here.

use std::ffi::OsString;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::Duration;

use anyhow::{Context, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::log::Log;
use crate::sys::Place;

/// The port on which the CA listens.
pub const CA_PORT: u16 = 15012;

/// Where each node's proxy has its admin pages, in the node's network namespace.
pub const ADMIN: &str = "127.0.0.1:15000";

/// The binary under test: `ADIT_BIN`, or `adit` beside the test binary's folder.
pub fn binary() -> anyhow::Result<PathBuf> {
    if let Some(path) = std::env::var_os("ADIT_BIN") {
        return Ok(PathBuf::from(path));
    }
    let own = std::env::current_exe().context("find the test binary")?;
    // target/release/deps/behaviour-… or target/release/xtask
    let candidates = own.ancestors().skip(1).take(2).map(|folder| folder.join("adit"));
    match candidates.into_iter().find(|path| path.is_file()) {
        Some(path) => Ok(path),
        None => bail!(
            "no binary `adit` near {}; build it, or name it by ADIT_BIN",
            own.display()
        ),
    }
}

/// What the CA is told.
#[derive(Debug, Clone)]
pub struct CaSettings {
    /// Where keys and root are kept.
    pub dir: PathBuf,
    /// Where the key of the issuer of tokens is kept, and the key set that the CA checks them with.
    pub issuer_dir: PathBuf,
    /// Where it listens.
    pub listen: SocketAddr,
    /// The mesh file.
    pub mesh: PathBuf,
    /// The addresses in its serving certificate.
    pub names: Vec<IpAddr>,
    /// The lifetime of the certificates it signs, in seconds; its own default if none.
    pub lifetime: Option<u32>,
}

impl CaSettings {
    fn arguments(&self) -> Vec<OsString> {
        let names: Vec<String> = self.names.iter().map(ToString::to_string).collect();
        let mut arguments = vec![
            "ca".into(),
            "--dir".into(),
            self.dir.clone().into(),
            "--listen".into(),
            self.listen.to_string().into(),
            "--mesh".into(),
            self.mesh.clone().into(),
            "--jwks".into(),
            self.issuer_dir.join("jwks.json").into(),
            "--name".into(),
            names.join(",").into(),
            "--trust-domain".into(),
            super::TRUST_DOMAIN.into(),
        ];
        if let Some(seconds) = self.lifetime {
            let lifetime = OsString::from(format!("{seconds}s"));
            arguments.extend(["--max-ttl".into(), lifetime.clone(), "--default-ttl".into(), lifetime]);
        }
        arguments
    }

    /// The root that clients of the CA trust.
    pub fn root(&self) -> PathBuf {
        self.dir.join("root.pem")
    }

    /// What a node's token says; the defaults are what the node's proxy gets.
    pub fn token(&self, token: &TokenSpec) -> anyhow::Result<String> {
        let mut command = Command::new(binary()?);
        command
            .args(["ca", "token", "--node", &token.node, "--issuer-dir"])
            .arg(&self.issuer_dir);
        if let Some(account) = &token.account {
            command.args(["--account", account]);
        }
        if let Some(audience) = &token.audience {
            command.args(["--audience", audience]);
        }
        if let Some(seconds) = token.lifetime {
            command.args(["--ttl", &format!("{seconds}s")]);
        }
        let output = command.stdin(Stdio::null()).output().context("start `adit ca token`")?;
        if !output.status.success() {
            bail!(
                "`adit ca token`: {}: {}",
                output.status,
                String::from_utf8_lossy(&output.stderr).trim()
            );
        }
        Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    }
}

/// A token to be made by `adit ca token`.
#[derive(Debug, Clone, Default)]
pub struct TokenSpec {
    /// The node it is bound to.
    pub node: String,
    /// The service account, `namespace/name`, if not the node proxy's.
    pub account: Option<String>,
    /// The audience, if not the CA's.
    pub audience: Option<String>,
    /// How many seconds it holds.
    pub lifetime: Option<u32>,
}

/// What a node's proxy is told.
#[derive(Debug, Clone)]
pub struct NodeSettings {
    /// The node's name.
    pub name: String,
    /// The mesh file.
    pub mesh: PathBuf,
    /// Where the CA is.
    pub ca: SocketAddr,
    /// The root that the CA's serving certificate chains to.
    pub ca_root: PathBuf,
    /// The file with its token.
    pub ca_token: PathBuf,
    /// The cgroup that holds the node's pods.
    pub pods_cgroup: PathBuf,
    /// The folder in which its maps and programs are pinned.
    pub bpf_dir: PathBuf,
    /// The folder of the socket by which it hands over to the next.
    pub run_dir: PathBuf,
    /// More arguments, each `--flag=value`, in the place of those above where it is the same flag.
    pub more: Vec<String>,
}

impl NodeSettings {
    /// Runs `adit node --uninstall` for this node.
    pub fn uninstall(&self) -> anyhow::Result<()> {
        let mut command = Command::new(binary()?);
        command.args(["node", "--uninstall", "--bpf-dir"]).arg(&self.bpf_dir);
        command.arg("--run-dir").arg(&self.run_dir);
        let output = command
            .stdin(Stdio::null())
            .output()
            .context("start `adit node --uninstall`")?;
        if !output.status.success() {
            bail!(
                "`adit node --uninstall`: {}: {}",
                output.status,
                String::from_utf8_lossy(&output.stderr).trim()
            );
        }
        Ok(())
    }

    /// Runs `adit check` with what the proxy is told, in its place, and gives its output, and whether it succeeded.
    pub(super) fn check(&self, place: &Place, more: &[&str]) -> anyhow::Result<(String, bool)> {
        let mut command = Command::new(binary()?);
        command
            .arg("check")
            .args(self.arguments().into_iter().skip(1))
            .args(more);
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        place.enter_on_exec(&mut command, false);
        let child = on_keeper(move || command.spawn())?.context("start `adit check`")?;
        let output = child.wait_with_output().context("wait for `adit check`")?;
        if !output.stderr.is_empty() {
            bail!("`adit check`: {}", String::from_utf8_lossy(&output.stderr).trim());
        }
        Ok((String::from_utf8(output.stdout)?, output.status.success()))
    }

    fn arguments(&self) -> Vec<OsString> {
        let mut arguments: Vec<OsString> = vec![
            "node".into(),
            "--node-name".into(),
            self.name.clone().into(),
            "--mesh-file".into(),
            self.mesh.clone().into(),
            "--pods-cgroup".into(),
            self.pods_cgroup.clone().into(),
            "--bpf-dir".into(),
            self.bpf_dir.clone().into(),
            "--run-dir".into(),
            self.run_dir.clone().into(),
            "--admin".into(),
            ADMIN.into(),
            "--log-format".into(),
            "logfmt".into(),
        ];
        // There is no CA where there is SPIRE.
        if !self.more.iter().any(|more| more.starts_with("--spire-socket=")) {
            arguments.extend([
                "--ca-address".into(),
                format!("https://{}", self.ca).into(),
                "--ca-root".into(),
                self.ca_root.clone().into(),
                "--ca-token".into(),
                self.ca_token.clone().into(),
            ]);
        }
        for more in &self.more {
            // A flag given once more replaces what the bed says.
            let flag = more.split('=').next().unwrap_or_default();
            if let Some(at) = arguments.iter().position(|argument| argument == flag) {
                arguments.drain(at..at + 2);
            }
            arguments.push(more.into());
        }
        arguments
    }
}

/// A program in the bed; killed when dropped.
#[derive(Debug)]
pub(super) struct Process {
    child: Child,
    log: Log,
}

impl Process {
    pub(super) fn start_ca(settings: &CaSettings, place: &Place, log: &Log) -> anyhow::Result<Self> {
        Self::start(settings.arguments(), place, log)
    }

    pub(super) fn start_node(settings: &NodeSettings, place: &Place, log: &Log) -> anyhow::Result<Self> {
        Self::start(settings.arguments(), place, log)
    }

    fn start(arguments: Vec<OsString>, place: &Place, log: &Log) -> anyhow::Result<Self> {
        Self::start_program(&binary()?, arguments, place, log)
    }

    pub(super) fn start_program(
        program: &Path,
        arguments: Vec<OsString>,
        place: &Place,
        log: &Log,
    ) -> anyhow::Result<Self> {
        let mut command = Command::new(program);
        command.args(arguments).stdin(Stdio::null());
        command.env("NO_COLOR", "1");
        log.take_output_of(&mut command)?;
        place.enter_on_exec(&mut command, false);
        let child = on_keeper(move || command.spawn())?.with_context(|| format!("start {}", log.name()))?;
        Ok(Self {
            child,
            log: log.clone(),
        })
    }

    pub(super) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(super) fn signal(&self, signal: Signal) -> anyhow::Result<()> {
        let pid = Pid::from_raw(i32::try_from(self.child.id()).context("a process id")?);
        kill(pid, signal).with_context(|| format!("send {signal} to {}", self.log.name()))
    }

    /// The status, if it has ended.
    pub(super) fn ended(&mut self) -> anyhow::Result<Option<ExitStatus>> {
        Ok(self.child.try_wait()?)
    }

    pub(super) fn wait(&mut self, deadline: Duration) -> anyhow::Result<ExitStatus> {
        let mut status = None;
        super::wait_for(&format!("{} to end", self.log.name()), deadline, || {
            status = self.child.try_wait()?;
            Ok(status.is_some())
        })?;
        status.context("the status that was just there")
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Runs `work` on a thread that lives as long as the test program: what it starts there must not die with the
/// thread of the test that happened to start it.
fn on_keeper<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> anyhow::Result<T> {
    type Job = Box<dyn FnOnce() + Send>;
    static KEEPER: OnceLock<Mutex<Sender<Job>>> = OnceLock::new();
    let keeper = KEEPER.get_or_init(|| {
        let (sender, receiver) = channel::<Job>();
        std::thread::spawn(move || receiver.into_iter().for_each(|job| job()));
        Mutex::new(sender)
    });
    let (sender, receiver) = channel();
    let job: Job = Box::new(move || {
        let _ = sender.send(work());
    });
    keeper
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .send(job)
        .ok()
        .context("the thread that starts processes")?;
    receiver.recv().context("the thread that starts processes")
}

/// Writes a token where a proxy reads it.
pub(super) fn write_token(path: &Path, token: &str) -> anyhow::Result<()> {
    super::mesh::replace(path, token)
}

/// A process's resident memory in KiB.
pub fn resident_kib(pid: u32) -> anyhow::Result<u64> {
    status_kib(pid, "VmRSS")
}

/// A figure in KiB of a process's status, such as `VmRSS`.
pub fn status_kib(pid: u32, field: &str) -> anyhow::Result<u64> {
    let path = format!("/proc/{pid}/status");
    let status = std::fs::read_to_string(&path).with_context(|| format!("read {path}"))?;
    let value = status
        .lines()
        .find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
    let value = value.with_context(|| format!("no {field} in {path}"))?;
    let value = value.trim().trim_end_matches(" kB").parse();
    value.with_context(|| format!("the value of {field} in {path}"))
}

/// CPU seconds, of user and system, that a process has used.
pub fn cpu_seconds(pid: u32) -> anyhow::Result<f64> {
    let path = format!("/proc/{pid}/stat");
    let stat = std::fs::read_to_string(&path).with_context(|| format!("read {path}"))?;
    // The command's name is in parentheses and may hold anything; utime and stime are fields 14 and 15.
    let (_, fields) = stat.rsplit_once(')').context("a stat without a name")?;
    let ticks: u64 = fields
        .split_whitespace()
        .skip(11)
        .take(2)
        .map(|field| field.parse().unwrap_or(0_u64))
        .sum();
    let per_second = nix::unistd::sysconf(nix::unistd::SysconfVar::CLK_TCK)?.context("the clock's rate")?;
    Ok(ticks as f64 / per_second as f64)
}
