//! A real SPIRE server and an agent on each node of a bed, as hosts' processes.

use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::time::Duration;

use anyhow::{Context, bail};
use serde_json::Value;

use super::log::Log;
use super::netns;
use super::process::Process;
use super::{Bed, Pod, TRUST_DOMAIN, lock, wait_for};
use crate::cluster::programs::built;
use crate::sys::Place;

const PORT: u16 = 8081;
/// The SPIFFE ID of proxies, by which agents know them for delegates.
const DELEGATE: &str = "adit-node";
/// How long server and agents may take to start.
const STARTING: Duration = Duration::from_secs(30);

/// A SPIRE server on the first node of a bed, and an agent on each. Killed when dropped.
#[derive(Debug)]
pub struct Spire {
    folder: PathBuf,
    netns: PathBuf,
    _server: Process,
    agents: Vec<Agent>,
}

#[derive(Debug)]
struct Agent {
    node: String,
    /// The SPIFFE ID that the server knows it by.
    id: String,
    folder: PathBuf,
    place: Place,
    log: Log,
    process: Mutex<Option<Process>>,
}

impl Spire {
    /// Starts all of it, and registers each node's proxy as its agent's delegate.
    pub fn start(bed: &Bed) -> anyhow::Result<Self> {
        let folder = bed.dir().join("spire");
        fs::create_dir_all(&folder).context("make a folder for SPIRE")?;
        let first = bed.nodes().first().context("a bed has a node")?;
        let address: SocketAddr = (first.v4(), PORT).into();
        let config = folder.join("server.conf");
        fs::write(&config, server_config(&folder, address)).context("write the server's configuration")?;
        let log = Log::new("spire-server", bed.dir());
        let arguments = vec!["run".into(), "-config".into(), config.into_os_string()];
        let server = Process::start_program(&program("spire-server")?, arguments, &first.host, &log)?;
        let mut spire = Self {
            netns: first.netns(),
            folder,
            _server: server,
            agents: Vec::new(),
        };
        let ready = wait_for("the SPIRE server", STARTING, || {
            Ok(spire.server(&["healthcheck"]).is_ok())
        });
        ready.with_context(|| format!("its log:\n{}", log.tail()))?;
        for node in bed.nodes() {
            let agent = spire.join(bed, node.name(), &node.host, address)?;
            spire.agents.push(agent);
            spire.start_agent(node.name())?;
        }
        Ok(spire)
    }

    /// Makes a node's agent known to the server, and its proxy to the agent.
    fn join(&self, bed: &Bed, node: &str, place: &Place, server: SocketAddr) -> anyhow::Result<Agent> {
        let folder = self.folder.join(node);
        fs::create_dir_all(&folder).context("make a folder for an agent")?;
        let token = self.server(&["token", "generate", "-output", "json"])?;
        let token: Value = serde_json::from_str(&token).context("read the server's token")?;
        let token = token["value"].as_str().context("the server's token has no value")?;
        fs::write(folder.join("agent.conf"), agent_config(&folder, server, token)).context("configure an agent")?;
        let agent = Agent {
            id: format!("spiffe://{TRUST_DOMAIN}/spire/agent/join_token/{token}"),
            log: Log::new(&format!("spire-agent-{node}"), bed.dir()),
            node: node.to_owned(),
            place: place.clone(),
            process: Mutex::default(),
            folder,
        };
        let delegate = format!("spiffe://{TRUST_DOMAIN}/{DELEGATE}");
        let entry = format!("{DELEGATE}-{node}");
        self.create_entry(&entry, &agent.id, &delegate, &["-selector", "unix:uid:0"])?;
        Ok(agent)
    }

    /// The flag by which a node's proxy takes certificates from its agent.
    pub fn flag(&self, node: &str) -> anyhow::Result<String> {
        Ok(format!("--spire-socket={}", self.agent(node)?.socket().display()))
    }

    /// Registers a pod's identity with its node's agent, for certificates that live so many seconds.
    pub fn register(&self, pod: &Pod, seconds: u32, more: &[&str]) -> anyhow::Result<()> {
        let identity = pod.identity();
        let path = identity.split('/').collect::<Vec<_>>();
        let [.., "ns", namespace, "sa", account] = path[..] else {
            bail!("{identity} is no identity of a pod");
        };
        let (namespace, account) = (format!("k8s:ns:{namespace}"), format!("k8s:sa:{account}"));
        let seconds = seconds.to_string();
        let selectors = ["-selector", &namespace, "-selector", &account, "-x509SVIDTTL", &seconds];
        let parent = &self.agent(pod.node())?.id;
        self.create_entry(pod.name(), parent, &identity, &[&selectors, more].concat())
    }

    /// Takes a pod's registration back.
    pub fn forget(&self, pod: &Pod) -> anyhow::Result<()> {
        self.server(&["entry", "delete", "-entryID", pod.name()]).map(drop)
    }

    fn create_entry(&self, entry: &str, parent: &str, id: &str, more: &[&str]) -> anyhow::Result<()> {
        let create = [
            "entry",
            "create",
            "-entryID",
            entry,
            "-parentID",
            parent,
            "-spiffeID",
            id,
        ];
        self.server(&[&create, more].concat()).map(drop)
    }

    /// Runs a command of the server's and gives what it prints.
    pub fn server(&self, words: &[&str]) -> anyhow::Result<String> {
        let mut command = Command::new(program("spire-server")?);
        command
            .args(words)
            .arg("-socketPath")
            .arg(self.folder.join("server.sock"))
            .stdin(Stdio::null());
        let output = netns::inside(&self.netns, || command.output())?.context("start spire-server")?;
        let said = String::from_utf8_lossy(&output.stdout);
        if !output.status.success() {
            let errors = String::from_utf8_lossy(&output.stderr);
            bail!("spire-server {}: {}: {said}{errors}", words.join(" "), output.status);
        }
        Ok(said.into_owned())
    }

    /// Starts a node's agent, and waits until it answers.
    pub fn start_agent(&self, node: &str) -> anyhow::Result<()> {
        let agent = self.agent(node)?;
        let mut process = lock(&agent.process);
        let arguments = vec!["run".into(), "-config".into(), agent.folder.join("agent.conf").into()];
        let running = Process::start_program(&program("spire-agent")?, arguments, &agent.place, &agent.log)?;
        let running = process.insert(running);
        let socket = agent.socket();
        let ready = wait_for("a SPIRE agent", STARTING, || {
            if let Some(status) = running.ended()? {
                bail!("it ended: {status}");
            }
            Ok(std::os::unix::net::UnixStream::connect(&socket).is_ok())
        });
        ready.with_context(|| format!("the log of the agent of {node}:\n{}", agent.log.tail()))
    }

    /// Ends a node's agent at once.
    pub fn kill_agent(&self, node: &str) -> anyhow::Result<()> {
        *lock(&self.agent(node)?.process) = None;
        Ok(())
    }

    /// Prints the last lines of the agents' logs.
    pub fn print_logs(&self) {
        self.agents.iter().for_each(|agent| agent.log.print_tail());
    }

    fn agent(&self, node: &str) -> anyhow::Result<&Agent> {
        let found = self.agents.iter().find(|agent| agent.node == node);
        found.with_context(|| format!("no agent on {node}"))
    }
}

impl Drop for Spire {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.print_logs();
        }
    }
}

impl Agent {
    fn socket(&self) -> PathBuf {
        self.folder.join("admin/admin.sock")
    }
}

fn program(name: &str) -> anyhow::Result<PathBuf> {
    built("ADIT_SPIRE_BIN", name, "cargo xtask spire")
}

fn server_config(folder: &Path, address: SocketAddr) -> String {
    let (ip, port, folder) = (address.ip(), address.port(), folder.display());
    format!(
        r#"
server {{
    bind_address = "{ip}"
    bind_port = "{port}"
    socket_path = "{folder}/server.sock"
    trust_domain = "{TRUST_DOMAIN}"
    data_dir = "{folder}"
    log_level = "INFO"
    experimental {{
        cache_reload_interval = "500ms"
    }}
}}
plugins {{
    DataStore "sql" {{
        plugin_data {{
            database_type = "sqlite3"
            connection_string = "{folder}/datastore.sqlite3"
        }}
    }}
    NodeAttestor "join_token" {{
        plugin_data {{}}
    }}
    KeyManager "memory" {{
        plugin_data {{}}
    }}
}}
"#
    )
}

fn agent_config(folder: &Path, server: SocketAddr, token: &str) -> String {
    let (ip, port, folder) = (server.ip(), server.port(), folder.display());
    format!(
        r#"
agent {{
    data_dir = "{folder}"
    log_level = "INFO"
    server_address = "{ip}"
    server_port = "{port}"
    trust_domain = "{TRUST_DOMAIN}"
    insecure_bootstrap = true
    join_token = "{token}"
    socket_path = "{folder}/public/api.sock"
    admin_socket_path = "{folder}/admin/admin.sock"
    authorized_delegates = ["spiffe://{TRUST_DOMAIN}/{DELEGATE}"]
    experimental {{
        sync_interval = "500ms"
    }}
}}
plugins {{
    NodeAttestor "join_token" {{
        plugin_data {{}}
    }}
    KeyManager "disk" {{
        plugin_data {{
            directory = "{folder}"
        }}
    }}
    WorkloadAttestor "unix" {{
        plugin_data {{}}
    }}
}}
"#
    )
}
