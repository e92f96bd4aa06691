//! How many certificates the authority signs.

use std::fmt::Write as _;
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use adit::ca::token::{TokenRequest, make};
use adit::identity::{CaClient, CaSettings, Issuer, SpiffeId};
use anyhow::{Context, anyhow, ensure};

use super::{Bench, Row};
use crate::bed::process::{binary, cpu_seconds};
use crate::bed::wait_for;
use crate::sys::check_interrupt;

pub(super) const NAMES: &[&str] = &["ca_issue_per_s", "ca_cpu_us_per_certificate"];

/// Nodes that ask, each with a token and a connection of its own: together they may ask for more than is measured, with the
/// limits that the authority has by default.
const NODES: usize = 32;
/// Requests that each has under way.
const AT_ONCE: usize = 2;
const IDENTITIES: usize = 20;
const DEADLINE: Duration = Duration::from_secs(10);

/// An authority, and where it listens.
struct Authority {
    child: Child,
    address: String,
    folder: tempfile::TempDir,
}

/// Node proxies' own clients ask an `adit ca` over loopback: gRPC, TLS, a new key and a verified answer each time.
pub(super) fn measure(bench: &mut Bench) -> anyhow::Result<()> {
    let authority = Authority::start()?;
    let clients = (0..NODES)
        .map(|node| authority.client(node))
        .collect::<anyhow::Result<Vec<_>>>()?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let (mut rates, mut cpu) = (Vec::new(), Vec::new());
    // The first calls make the connections.
    runtime.block_on(issue(&clients, Duration::from_millis(200)))?;
    for _ in 0..bench.rounds {
        check_interrupt()?;
        let (before, begin) = (authority.cpu_seconds()?, Instant::now());
        let issued = runtime.block_on(issue(&clients, bench.time))?;
        rates.push(issued / begin.elapsed().as_secs_f64());
        cpu.push((authority.cpu_seconds()? - before) * 1e6 / issued);
    }
    bench.add(Row::of_adit("ca_issue_per_s", "1/s", &rates));
    bench.add(Row::of_adit("ca_cpu_us_per_certificate", "us", &cpu));
    Ok(())
}

/// Asks for certificates for some time; gives how many there were.
async fn issue(clients: &[Arc<CaClient>], time: Duration) -> anyhow::Result<f64> {
    let end = Instant::now() + time;
    let mut tasks = tokio::task::JoinSet::new();
    for (node, client) in clients.iter().enumerate() {
        for offset in 0..AT_ONCE {
            let client = Arc::clone(client);
            tasks.spawn(async move {
                let mut issued = 0;
                while Instant::now() < end {
                    let id = SpiffeId::parse(&identity(node, (issued + offset) % IDENTITIES))?;
                    client.issue(&id).await?;
                    issued += 1;
                }
                anyhow::Ok(issued)
            });
        }
    }
    let mut all = 0;
    while let Some(issued) = tasks.join_next().await {
        all += issued??;
    }
    ensure!(all > 0, "no certificate was issued");
    Ok(all as f64)
}

fn identity(node: usize, number: usize) -> String {
    format!("spiffe://cluster.local/ns/shop/sa/app-{node}-{number}")
}

impl Authority {
    fn start() -> anyhow::Result<Self> {
        let folder = tempfile::tempdir().context("make a folder for the authority")?;
        let mesh = folder.path().join("mesh.yaml");
        std::fs::write(&mesh, mesh_file()?)?;
        // A port that nobody has: the next to ask for one gets another.
        let address = TcpListener::bind("127.0.0.1:0")?.local_addr()?.to_string();
        let log = std::fs::File::create(folder.path().join("log"))?;
        let mut command = Command::new(binary()?);
        command
            .args(["ca", "--listen", &address, "--name", "127.0.0.1", "--dir"])
            .arg(folder.path().join("ca"))
            .arg("--jwks")
            .arg(issuer(folder.path()).join("jwks.json"))
            .arg("--mesh-file")
            .arg(&mesh)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log);
        let authority = Self {
            child: command.spawn().context("start `adit ca`")?,
            address,
            folder,
        };
        let root = authority.folder.path().join("ca/root.pem");
        wait_for("the authority to listen", DEADLINE, || {
            Ok(root.exists() && std::net::TcpStream::connect(&authority.address).is_ok())
        })
        .map_err(|error| anyhow!("{error:#}; its log:\n{}", authority.log()))?;
        Ok(authority)
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }

    fn client(&self, node: usize) -> anyhow::Result<Arc<CaClient>> {
        let folder = self.folder.path();
        let token = make(&TokenRequest {
            dir: issuer(folder),
            issuer: "https://kubernetes.default.svc.cluster.local".into(),
            audience: "adit-ca".into(),
            account: "adit-system/adit-node"
                .parse()
                .map_err(|error: String| anyhow!(error))?,
            pod: format!("adit-{node}"),
            node: format!("n{node}"),
            ttl: Duration::from_secs(3600),
        })?;
        let file = folder.join(format!("token-{node}"));
        std::fs::write(&file, token)?;
        Ok(Arc::new(CaClient::new(CaSettings {
            address: format!("https://{}", self.address),
            root: folder.join("ca/root.pem"),
            token: file,
            ..CaSettings::default()
        })?))
    }

    /// Its user and system time.
    fn cpu_seconds(&self) -> anyhow::Result<f64> {
        cpu_seconds(self.child.id())
    }
}

impl Drop for Authority {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn issuer(folder: &Path) -> std::path::PathBuf {
    folder.join("issuer")
}

fn mesh_file() -> anyhow::Result<String> {
    let mut text = String::from("trustDomain: cluster.local\nclusterRanges: [10.0.0.0/8]\nworkloads:\n");
    for node in 0..NODES {
        for number in 0..IDENTITIES {
            writeln!(
                text,
                "  - {{name: app-{node}-{number}, namespace: shop, serviceAccount: app-{node}-{number}, node: n{node}, \
                 addresses: [10.0.{node}.{number}]}}"
            )?;
        }
    }
    Ok(text)
}
