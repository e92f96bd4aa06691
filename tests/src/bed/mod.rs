//! A bed: nodes and pods of a small cluster on this machine, with Adit's real programs in them.
//!
//! ```no_run
//! use adit_tests::bed::{Bed, PodSpec};
//!
//! let bed = Bed::builder("story")
//!     .node("n1")
//!     .node("n2")
//!     .pod("n1", PodSpec::new("cart").account("shop/cart"))
//!     .pod("n2", PodSpec::new("db").account("shop/db"))
//!     .start()
//!     .unwrap();
//! let server = bed.pod("db").serve(|stage| adit_tests::net::echo_once(stage, "0.0.0.0:5432")).unwrap();
//! ```
//!
//! A node is a network namespace; nodes are joined by a link, `wan0` in each. A pod is a network namespace with `eth0`
//! on its node's bridge, and a cgroup. All are named `adit-<process id>-<n>…`, so that [`sweep`] can remove what a
//! killed test left. What a bed made goes when it is dropped; if the test is panicking, the logs are printed first.

mod admin;
mod builder;
mod capture;
mod cgroup;
mod check;
mod log;
mod mesh;
pub(crate) mod netns;
mod node;
mod pins;
mod pod;
pub mod process;
mod rebirth;
mod remote;
mod spec;
mod spire;
mod sweep;
mod topology;

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use nix::sys::signal::Signal;
use tempfile::TempDir;

pub(crate) use self::admin::http_get;
pub use self::admin::{Metrics, Response};
pub use self::builder::BedBuilder;
pub use self::capture::Capture;
pub use self::cgroup::mount_point as cgroup_mount_point;
pub use self::check::{CheckFinding, CheckReport};
pub use self::log::{AccessLine, Log};
pub use self::mesh::{ExcludeDoc, MeshDoc, NodeDoc, PortDoc, ServiceDoc, WorkloadDoc};
pub use self::node::Node;
pub use self::pod::{Pod, Spawned};
pub use self::rebirth::Newborn;
pub use self::remote::{RemoteError, Running, Stage, errno};
pub use self::spec::{PodSpec, ServiceSpec};
pub use self::spire::Spire;
pub use self::sweep::{residue, residue_of, sweep};

use self::process::{CaSettings, Process, TokenSpec};
pub use crate::sys::detach_pinned_link;

use crate::sys::Place;

/// The trust domain of every bed.
pub const TRUST_DOMAIN: &str = "cluster.local";

/// How long Adit's programs may take to become ready.
const READY_DEADLINE: Duration = Duration::from_secs(15);

/// A small cluster on this machine. Everything that it made goes with it.
#[derive(Debug)]
pub struct Bed {
    name: String,
    prefix: String,
    // Fields are dropped in this order: processes, then pins, cgroups, namespaces and files.
    ca: Ca,
    nodes: Vec<Node>,
    pods: Vec<Pod>,
    services: Vec<Service>,
    mesh: Mutex<MeshDoc>,
    mesh_path: PathBuf,
    _pins: pins::PinFolders,
    _cgroups: cgroup::Tree,
    _namespaces: netns::Namespaces,
    dir: Option<TempDir>,
}

/// A service's virtual addresses.
#[derive(Debug, Clone)]
pub struct Service {
    name: String,
    v4: Ipv4Addr,
    v6: Ipv6Addr,
}

impl Service {
    /// `namespace/name`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// `port` at its virtual IPv4 address.
    pub fn at(&self, port: u16) -> SocketAddr {
        (self.v4, port).into()
    }

    /// `port` at its virtual IPv6 address.
    pub fn at6(&self, port: u16) -> SocketAddr {
        (self.v6, port).into()
    }
}

#[derive(Debug)]
struct Ca {
    process: Mutex<Option<Process>>,
    settings: CaSettings,
    place: Place,
    netns: PathBuf,
    log: Log,
}

impl Bed {
    /// Begins to lay out a bed; `name` is for messages only.
    pub fn builder(name: &str) -> BedBuilder {
        BedBuilder::new(name)
    }

    /// The name it was built with.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What the names of its namespaces and its cgroup begin with: `adit-<process id>-<n>`.
    pub fn prefix(&self) -> &str {
        &self.prefix
    }

    /// The node of that name. Panics if there is none.
    pub fn node(&self, name: &str) -> &Node {
        self.nodes
            .iter()
            .find(|node| node.name() == name)
            .unwrap_or_else(|| panic!("no node {name} in the bed"))
    }

    /// All nodes.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// The pod of that name. Panics if there is none.
    pub fn pod(&self, name: &str) -> &Pod {
        self.pods
            .iter()
            .find(|pod| pod.name() == name)
            .unwrap_or_else(|| panic!("no pod {name} in the bed"))
    }

    /// All pods.
    pub fn pods(&self) -> &[Pod] {
        &self.pods
    }

    /// The service `namespace/name`. Panics if there is none.
    pub fn service(&self, name: &str) -> &Service {
        self.services
            .iter()
            .find(|service| service.name == name)
            .unwrap_or_else(|| panic!("no service {name}"))
    }

    /// The mesh file that CA and proxies read.
    pub fn mesh_file(&self) -> &Path {
        &self.mesh_path
    }

    /// Writes the mesh file from what the bed holds.
    pub fn write_mesh_file(&self) -> anyhow::Result<()> {
        lock(&self.mesh).write(&self.mesh_path)
    }

    /// Changes the mesh file, at once, by a rename.
    pub fn update(&self, change: impl FnOnce(&mut MeshDoc)) -> anyhow::Result<()> {
        let mut mesh = lock(&self.mesh);
        change(&mut mesh);
        mesh.write(&self.mesh_path)
    }

    /// Puts other text in the mesh file's place, at once; what the bed holds stays as it was.
    pub fn replace_mesh_file(&self, text: &str) -> anyhow::Result<()> {
        mesh::replace(&self.mesh_path, text)
    }

    /// A folder for files of the test, removed with the bed.
    pub fn dir(&self) -> &Path {
        self.dir.as_ref().map_or(Path::new("/nonexistent"), TempDir::path)
    }

    /// Captures the packets on the links between the nodes from now on.
    pub fn capture_link(&self) -> anyhow::Result<Capture> {
        Capture::start(self.nodes.iter().map(Node::netns).collect(), topology::LINK)
    }

    /// The log of the CA.
    pub fn ca_log(&self) -> &Log {
        &self.ca.log
    }

    /// What the CA is told at its next start.
    pub fn ca_settings(&self) -> &CaSettings {
        &self.ca.settings
    }

    /// Starts the CA and waits until it accepts connections.
    pub fn start_ca(&self) -> anyhow::Result<()> {
        self.start_ca_with(&self.ca.settings)
    }

    /// The same with other settings, such as another mesh file than the proxies'.
    pub fn start_ca_with(&self, settings: &CaSettings) -> anyhow::Result<()> {
        if !self.ca.settings.issuer_dir.exists() {
            // The first token makes the issuer's key, without which the CA has nothing to check tokens with.
            self.token(&TokenSpec {
                node: self.nodes[0].name().to_owned(),
                ..TokenSpec::default()
            })?;
        }
        let mut process = lock(&self.ca.process);
        let ca = process.insert(Process::start_ca(settings, &self.ca.place, &self.ca.log)?);
        let address = settings.listen;
        let ready = wait_for("the CA to listen", READY_DEADLINE, || {
            if let Some(status) = ca.ended()? {
                bail!("the CA ended: {status}");
            }
            let dial = || std::net::TcpStream::connect_timeout(&address, Duration::from_millis(500)).is_ok();
            netns::inside(&self.ca.netns, dial)
        });
        ready.with_context(|| format!("the CA's log:\n{}", self.ca.log.tail()))
    }

    /// Ends the CA at once.
    pub fn kill_ca(&self) {
        *lock(&self.ca.process) = None;
    }

    /// Sends the CA a signal; SIGSTOP makes it hang.
    pub fn signal_ca(&self, signal: Signal) -> anyhow::Result<()> {
        lock(&self.ca.process)
            .as_ref()
            .context("the CA is not running")?
            .signal(signal)
    }

    /// Makes a token by the CA's key.
    pub fn token(&self, token: &TokenSpec) -> anyhow::Result<String> {
        self.ca.settings.token(token)
    }

    /// The file with the roots that the proxies trust when they call the CA.
    pub fn trust_file(&self) -> &Path {
        &self.nodes[0].settings.ca_root
    }

    /// Gives every proxy what it needs to call the CA: the CA's root, which must have been made, and a token each.
    pub fn introduce_ca(&self) -> anyhow::Result<()> {
        let root = self.ca.settings.root();
        let text = std::fs::read_to_string(&root).with_context(|| format!("read the CA's root {}", root.display()))?;
        mesh::replace(self.trust_file(), &text)?;
        for node in &self.nodes {
            let token = self.token(&TokenSpec {
                node: node.name().to_owned(),
                ..TokenSpec::default()
            })?;
            node.write_token(&token)?;
        }
        Ok(())
    }

    /// Starts the CA, then all proxies, and waits until all are ready.
    pub fn start_all(&self) -> anyhow::Result<()> {
        self.start_ca()?;
        self.introduce_ca()?;
        self.nodes.iter().try_for_each(Node::launch)?;
        self.nodes.iter().try_for_each(|node| node.wait_ready(READY_DEADLINE))
    }

    /// Prints the last lines of every log.
    pub fn print_logs(&self) {
        eprintln!("==== logs of bed {} ({})", self.name, self.prefix);
        self.ca.log.print_tail();
        self.nodes.iter().for_each(|node| node.log().print_tail());
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.print_logs();
        }
        if std::env::var_os("ADIT_KEEP_LOGS").is_some()
            && let Some(dir) = self.dir.take()
        {
            // Under a name that `sweep` does not take for a leftover.
            let (dir, kept) = (dir.keep(), std::env::temp_dir().join(format!("kept-{}", self.prefix)));
            let place = if std::fs::rename(&dir, &kept).is_ok() {
                kept
            } else {
                dir
            };
            eprintln!("logs of bed {} are kept in {}", self.name, place.display());
        }
    }
}

/// Waits until `condition` holds, at most so long; an error of the condition ends the wait.
pub fn wait_for(
    what: &str,
    deadline: Duration,
    mut condition: impl FnMut() -> anyhow::Result<bool>,
) -> anyhow::Result<()> {
    let end = Instant::now() + deadline;
    let mut pause = Duration::from_millis(1);
    loop {
        if condition()? {
            return Ok(());
        }
        if Instant::now() >= end {
            bail!("waited {deadline:?} for {what} in vain");
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(20));
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
