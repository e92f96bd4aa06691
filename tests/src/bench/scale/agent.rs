//! Agents of simulated nodes: all run on one real node of the cluster, each with pins, sockets and a cgroup of its own.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::objects;
use crate::bed::process::{binary, cpu_seconds, resident_kib};
use crate::bed::{cgroup_mount_point, http_get, netns, wait_for};
use crate::cluster::{Cluster, Node};

/// With as many starting at once, on a machine of two cores.
const DEADLINE: Duration = Duration::from_secs(240);
const FIRST_ADMIN_PORT: u16 = 20_000;

/// An agent that runs.
pub(super) struct Agent {
    place: Node,
    service: String,
    admin: SocketAddr,
    pid: u32,
    started: Instant,
}

impl Agent {
    /// Starts the agent of a simulated node, without waiting for it.
    pub(super) fn start(cluster: &Cluster, index: u16) -> anyhow::Result<Self> {
        let (place, node) = (cluster.node(1), objects::node(index.into()));
        let pods = format!("pods-of-{node}");
        let folder = place.cgroup()?.join(&pods);
        std::fs::create_dir_all(&folder).with_context(|| format!("make the cgroup {}", folder.display()))?;
        let admin = SocketAddr::from((Ipv4Addr::LOCALHOST, FIRST_ADMIN_PORT + index));
        let kubeconfig = cluster.prefix().kubeconfig().display().to_string();
        let options = [
            ("--node-name", node.clone()),
            ("--source", "kubernetes".to_owned()),
            ("--kubeconfig", kubeconfig),
            // There is no authority: no certificate is asked for, as none of its pods are on this machine.
            ("--ca-address", "https://127.0.0.1:1".to_owned()),
            (
                "--ca-root",
                cluster.prefix().state().join("pki/ca.crt").display().to_string(),
            ),
            ("--pods-cgroup", cgroup_mount_point()?.join(&pods).display().to_string()),
            ("--bpf-dir", format!("/sys/fs/bpf/{node}")),
            ("--run-dir", format!("/run/{node}")),
            ("--startup", "permissive".to_owned()),
            ("--admin", admin.to_string()),
        ];
        let mut command = vec![binary()?.into_os_string(), "node".into()];
        command.extend(options.map(|(name, value)| format!("{name}={value}").into()));
        let (started, service) = (Instant::now(), format!("agent-of-{node}"));
        place.run_service(&service, command)?;
        let pid = *place
            .processes(&service)?
            .first()
            .context("the agent has ended at once")?;
        Ok(Self {
            place,
            service,
            admin,
            pid,
            started,
        })
    }

    /// Waits until it is ready, and says for how many milliseconds that has been since its start.
    pub(super) fn wait_ready(&self) -> anyhow::Result<f64> {
        loop {
            let answer = http_get(&self.place.netns(), self.admin, "/healthz/ready");
            if answer.is_ok_and(|answer| answer.status == 200) {
                return Ok(self.started.elapsed().as_secs_f64() * 1e3);
            }
            if self.started.elapsed() > DEADLINE || self.place.processes(&self.service)?.is_empty() {
                let log = self.place.folder().join(format!("{}.log", self.service));
                bail!(
                    "{} does not become ready; its log:\n{}",
                    self.service,
                    std::fs::read_to_string(log).unwrap_or_default()
                );
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    pub(super) fn cpu_seconds(&self) -> anyhow::Result<f64> {
        cpu_seconds(self.pid)
    }

    pub(super) fn resident_kib(&self) -> anyhow::Result<f64> {
        Ok(resident_kib(self.pid)? as f64)
    }

    /// Tells it to drain, and waits until it has ended.
    pub(super) fn stop(self) -> anyhow::Result<()> {
        kill(Pid::from_raw(i32::try_from(self.pid)?), Signal::SIGTERM).context("tell an agent to stop")?;
        let what = format!("{} to end", self.service);
        wait_for(&what, DEADLINE, || Ok(self.place.processes(&self.service)?.is_empty()))
    }
}

/// The bytes that a machine has received on its link to the others.
pub(super) fn received(place: &Node) -> anyhow::Result<f64> {
    let text = netns::inside(&place.netns(), || std::fs::read_to_string("/proc/thread-self/net/dev"))??;
    let line = text.lines().find_map(|line| line.trim_start().strip_prefix("eth0:"));
    let bytes = line
        .and_then(|line| line.split_whitespace().next())
        .context("no link eth0")?;
    Ok(bytes.parse()?)
}
