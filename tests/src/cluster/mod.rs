//! A Kubernetes cluster on this machine: the real programs of one control plane and two nodes, each a machine of its
//! own by namespaces and cgroups, with containers in containerd.
//!
//! ```no_run
//! use adit_tests::cluster::{Cluster, PodSpec, TOOL};
//!
//! let cluster = Cluster::builder("story").up().unwrap();
//! cluster.create(&PodSpec::new("web").node(1).image(TOOL).args(["serve", "8080"])).unwrap();
//! cluster.await_ready("default", "pod/web").unwrap();
//! ```
//!
//! What a cluster has on the host is named `adit-PREFIX-cp`, `adit-PREFIX-n1` and so on: network namespaces and
//! cgroups; its state is in `/var/lib/adit-cluster/PREFIX`. Clusters of different prefixes may be up side by side.

mod adit;
mod api;
mod calls;
pub mod cli;
mod hierarchy;
mod images;
mod istiod;
mod layout;
mod logs;
mod machine;
mod manifest;
mod mounts;
mod network;
mod node;
mod pki;
pub(crate) mod programs;
mod services;
mod teardown;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, ensure};
use serde::{Deserialize, Serialize};
use serde_json::json;

pub use self::adit::{SYSTEM, helm_words};
pub use self::calls::{Calling, condition};
pub use self::images::{BUSYBOX, TOOL, adit_name};
pub use self::istiod::{Istiod, Signer, intermediates};
pub use self::layout::{API_SERVER, Machine, NODES, POD_RANGES, Prefix, SERVICE_RANGES};
pub use self::manifest::PodSpec;
pub use self::node::Node;
pub use self::services::Service;
pub use self::teardown::{owned_prefix, residue};

use self::teardown::Lock;

/// How long a part of the cluster may take to come up, on a machine that is busy.
const PATIENCE: Duration = Duration::from_secs(120);

/// How a cluster is to be.
#[derive(Debug, Clone)]
pub struct Builder {
    prefix: String,
    settings: Settings,
    progress: fn(&str),
}

/// What is remembered of how a cluster was made.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Settings {
    kube_proxy: bool,
    images: Vec<PathBuf>,
}

impl Builder {
    /// Without kube-proxy: services' addresses mean nothing to the nodes.
    pub fn without_kube_proxy(mut self) -> Self {
        self.settings.kube_proxy = false;
        self
    }

    /// With another image, a docker-archive, on both nodes. Pause, [`TOOL`] and [`BUSYBOX`] are always there.
    pub fn image(mut self, archive: impl Into<PathBuf>) -> Self {
        self.settings.images.push(archive.into());
        self
    }

    /// Tells somebody how it goes.
    fn progress(mut self, tell: fn(&str)) -> Self {
        self.progress = tell;
        self
    }

    /// Brings the cluster up, after clearing away what is there of one with the same prefix. It goes down when the
    /// result is dropped, or when the calling process ends, in whichever way.
    pub fn up(self) -> anyhow::Result<Cluster> {
        let keeper = Keeper::start(&self.prefix)?;
        let mut cluster = self.up_for_good()?;
        cluster.keeper = Some(keeper);
        Ok(cluster)
    }

    /// Brings the cluster up, to stay until [`Cluster::down`].
    fn up_for_good(self) -> anyhow::Result<Cluster> {
        let prefix: Prefix = self.prefix.parse()?;
        let lock = Lock::take(&prefix)?;
        teardown::remove(&prefix, &lock)?;
        let cluster = Cluster {
            prefix,
            settings: self.settings,
            keeper: None,
        };
        match cluster.bring_up(self.progress) {
            Ok(()) => Ok(cluster),
            Err(error) => {
                let place = logs::keep(&cluster, "up");
                teardown::remove(&cluster.prefix, &lock)?;
                Err(error.context(format!("cluster {} did not come up; its logs: {place}", cluster.prefix)))
            }
        }
    }
}

/// A cluster that is up.
#[derive(Debug)]
pub struct Cluster {
    prefix: Prefix,
    settings: Settings,
    /// Ends it if it is this process's.
    keeper: Option<Keeper>,
}

impl Cluster {
    /// A cluster to bring up. Its prefix is what [`owned_prefix`] gives, or a word of your own.
    pub fn builder(prefix: impl Into<String>) -> Builder {
        Builder {
            prefix: prefix.into(),
            settings: Settings {
                kube_proxy: true,
                images: Vec::new(),
            },
            progress: |_| (),
        }
    }

    /// A cluster as most tests want it.
    pub fn up(prefix: impl Into<String>) -> anyhow::Result<Cluster> {
        Self::builder(prefix).up()
    }

    /// The cluster of this prefix that somebody else brought up. It stays up when the result is dropped.
    pub fn attach(prefix: &str) -> anyhow::Result<Cluster> {
        let prefix: Prefix = prefix.parse()?;
        let file = prefix.state().join("cluster.json");
        let text = fs::read(&file).with_context(|| format!("read {}: cluster {prefix} is not up", file.display()))?;
        Ok(Cluster {
            settings: serde_json::from_slice(&text).with_context(|| format!("read {}", file.display()))?,
            prefix,
            keeper: None,
        })
    }

    /// Ends the cluster of this prefix, or what is left of it. Says whether there was anything.
    pub fn down(prefix: &str) -> anyhow::Result<bool> {
        let prefix: Prefix = prefix.parse()?;
        teardown::remove(&prefix, &Lock::take(&prefix)?)
    }

    /// Ends clusters whose owners have died.
    pub fn sweep() -> anyhow::Result<()> {
        teardown::sweep()
    }

    /// Its prefix.
    pub fn prefix(&self) -> &Prefix {
        &self.prefix
    }

    /// A node, counted from 1.
    pub fn node(&self, number: u8) -> Node {
        assert!((1..=NODES).contains(&number), "a cluster has nodes 1 to {NODES}");
        Node::new(&self.prefix, Machine::Node(number))
    }

    /// All nodes.
    pub fn nodes(&self) -> Vec<Node> {
        Machine::nodes()
            .map(|machine| Node::new(&self.prefix, machine))
            .collect()
    }

    /// The machine of etcd, the API server, the controllers and the scheduler.
    pub fn control_plane(&self) -> Node {
        Node::new(&self.prefix, Machine::ControlPlane)
    }

    /// Takes a docker-archive into both nodes.
    pub fn import(&self, archive: &Path) -> anyhow::Result<()> {
        on_all(self.nodes(), |node| node.import(archive))
    }

    /// Takes Adit's image into both nodes: the archive that `ADIT_IMAGE` names, else one of the program under test.
    /// Its name is [`adit_name`].
    pub fn import_adit(&self) -> anyhow::Result<()> {
        self.import(&images::adit(&self.prefix.state().join("images"))?)
    }

    /// Starts a node that has crashed, with what was on its disk, and waits until the API server calls it ready.
    pub fn revive(&self, number: u8) -> anyhow::Result<()> {
        let node = self.node(number);
        let name = node.name();
        let lease = ["lease", "--namespace", "kube-node-lease", &name];
        let before = self.get(lease)?["spec"]["renewTime"].clone();
        node.boot()?;
        for service in Service::of(Machine::Node(number), self.settings.kube_proxy) {
            node.start_answering(service)?;
        }
        // What the API server says of it may still be from before.
        let what = format!("{name} to report to the API server");
        self.await_object(&what, PATIENCE, &lease, |lease| lease["spec"]["renewTime"] != before)
            .with_context(|| format!("its kubelet said last:\n{}", node.last_words(Service::Kubelet)))?;
        self.await_nodes_ready()
    }

    /// Kills the API server. What it has stored stays.
    pub fn stop_api_server(&self) -> anyhow::Result<()> {
        self.control_plane().kill(Service::ApiServer)
    }

    /// Starts the API server again and waits until it is ready. Controllers that gave up meanwhile are started too.
    pub fn start_api_server(&self) -> anyhow::Result<()> {
        let center = self.control_plane();
        center.start(Service::ApiServer)?;
        self.await_api_server()?;
        for service in [Service::ControllerManager, Service::Scheduler] {
            if center.pids(service)?.is_empty() {
                center.start(service)?;
            }
        }
        Ok(())
    }

    /// Copies what all programs and pods have said, and what the API server knows, into a folder.
    pub fn collect_logs(&self, folder: &Path) -> anyhow::Result<()> {
        logs::collect(self, folder)
    }

    fn bring_up(&self, progress: fn(&str)) -> anyhow::Result<()> {
        let begin = Instant::now();
        let tell = |what: &str| progress(&format!("{:6.2} s  {what}", begin.elapsed().as_secs_f64()));
        for machine in Machine::all() {
            let folder = self.prefix.folder(machine);
            fs::create_dir_all(&folder).with_context(|| format!("make {}", folder.display()))?;
        }
        let settings = serde_json::to_vec(&self.settings)?;
        fs::write(self.prefix.state().join("cluster.json"), settings).context("remember the cluster's settings")?;
        pki::make(&self.prefix)?;
        network::make(&self.prefix)?;
        tell("certificates and network");
        let center = self.control_plane();
        std::thread::scope(|scope| {
            let with_nodes = scope.spawn(|| self.prepare_nodes());
            center.boot()?;
            center.start(Service::Etcd)?;
            // An API server that finds nobody there tries again after a second at the earliest.
            center.await_port(2379)?;
            center.start(Service::ApiServer)?;
            self.await_api_server()?;
            tell("the API server is ready");
            center.start(Service::ControllerManager)?;
            center.start(Service::Scheduler)?;
            // Made for them, so that their addresses are those that routes lead to.
            let nodes: Vec<_> = Machine::nodes().map(node_object).collect();
            self.apply_json(&json!({"apiVersion": "v1", "kind": "List", "items": nodes}))?;
            with_nodes
                .join()
                .map_err(|_| anyhow!("preparing the nodes panicked"))??;
            tell("images are on the nodes");
            anyhow::Ok(())
        })?;
        for node in Machine::nodes() {
            for service in Service::of(node, self.settings.kube_proxy) {
                if service != Service::Containerd {
                    Node::new(&self.prefix, node).start(service)?;
                }
            }
        }
        self.await_nodes_ready()?;
        self.await_account("default", "default")?;
        tell("both nodes are ready");
        Ok(())
    }

    /// Machines, containerd and images, for which no API server is needed.
    fn prepare_nodes(&self) -> anyhow::Result<()> {
        let mut archives = images::make(&self.prefix.state().join("images"))?;
        archives.extend(self.settings.images.iter().cloned());
        let missing = archives.iter().find(|archive| !archive.is_file());
        ensure!(
            missing.is_none(),
            "there is no image {}",
            missing.map_or("", |path| path.to_str().unwrap_or(""))
        );
        on_all(Machine::nodes().collect(), |machine| {
            services::configure(&self.prefix, *machine)?;
            let node = Node::new(&self.prefix, *machine);
            node.boot()?;
            node.start(Service::Containerd)?;
            node.await_containerd()?;
            archives.iter().try_for_each(|archive| node.import(archive))
        })
    }
}

fn on_all<T: Sync>(all: Vec<T>, work: impl Fn(&T) -> anyhow::Result<()> + Sync) -> anyhow::Result<()> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = all.iter().map(|one| scope.spawn(|| work(one))).collect();
        threads
            .into_iter()
            .try_for_each(|thread| thread.join().map_err(|_| anyhow!("work on a node panicked"))?)
    })
}

/// A node as a cloud's controllers would lay it out: a zone of its own, and the ranges of its pods.
fn node_object(machine: Machine) -> serde_json::Value {
    let [v4, v6] = machine.pod_ranges();
    json!({
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": machine.to_string(), "labels": {
            "kubernetes.io/hostname": machine.to_string(),
            "kubernetes.io/os": "linux",
            "topology.kubernetes.io/region": "bed",
            "topology.kubernetes.io/zone": format!("zone-{machine}"),
        }},
        "spec": {"podCIDR": v4, "podCIDRs": [v4, v6]},
    })
}

/// A process that outlives this one by a moment, and ends the cluster when this one has ended.
#[derive(Debug)]
struct Keeper {
    child: Child,
}

impl Keeper {
    fn start(prefix: &str) -> anyhow::Result<Keeper> {
        use std::os::unix::process::CommandExt as _;
        let mut command = Command::new(programs::own("adit-cluster")?);
        command
            .args(["keep", prefix])
            .stdin(Stdio::piped())
            .stdout(Stdio::null());
        // Ctrl-C is for the others of this process's group.
        let child = command.process_group(0).spawn().context("start the cluster's keeper")?;
        Ok(Keeper { child })
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        // It waits for the other end of this.
        drop(self.child.stdin.take());
        match self.child.wait() {
            Ok(status) if status.success() => {}
            outcome => eprintln!("the cluster may not be gone: {outcome:?}"),
        }
    }
}
