//! Istio's control plane beside a cluster's API server, as the authority that certifies the cluster's pods: the program
//! alone, without its charts, webhooks or definitions.

use std::ffi::OsString;
use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair, KeyUsagePurpose};
use serde_json::Value;

use super::{Cluster, Machine, PATIENCE, Prefix, programs};
use crate::bed::{http_get, wait_for};

/// Its cgroup and its log.
const SERVICE: &str = "istiod";
/// Its own namespace.
const NAMESPACE: &str = "istio-system";
/// Where it serves certificates, and where it says that it is ready.
const PORT: u16 = 15_012;
const READY: u16 = 8080;
/// How long it may take to end.
const GONE: Duration = Duration::from_secs(10);

/// An istiod on the machine of a cluster's API server. It ends when this is dropped.
pub struct Istiod<'a> {
    cluster: &'a Cluster,
    trusted: String,
}

/// What it signs with.
#[derive(Debug, Clone, Copy)]
pub enum Signer<'a> {
    /// A root that it makes itself, and keeps in a Secret.
    Own,
    /// The files of a folder, as [`intermediates`] makes them.
    Folder(&'a Path),
}

impl<'a> Istiod<'a> {
    /// The name in its server certificate.
    pub const NAME: &'static str = "istiod.istio-system.svc";
    /// What it wants to see in the header `clusterid`.
    pub const CLUSTER_ID: &'static str = "Kubernetes";

    /// Starts it, and waits until it is ready. The service account `trusted`, `NAMESPACE/NAME`, is that of nodes' agents.
    pub fn start(cluster: &'a Cluster, trusted: &str, signer: Signer<'_>) -> anyhow::Result<Self> {
        cluster.namespace(NAMESPACE, &[])?;
        let istiod = Self {
            cluster,
            trusted: trusted.to_owned(),
        };
        istiod.run(signer)?;
        Ok(istiod)
    }

    /// Where it is, as `https://host:port`.
    pub fn address(&self) -> String {
        format!("https://{}:{PORT}", Machine::ControlPlane.v4())
    }

    /// Starts it after [`Istiod::stop`], and waits until it is ready.
    pub fn run(&self, signer: Signer<'_>) -> anyhow::Result<()> {
        let center = self.cluster.control_plane();
        center.run_service(SERVICE, self.command(signer)?)?;
        let ready = SocketAddr::from(([127, 0, 0, 1], READY));
        let what = format!("istiod to be ready; its log is {}", self.log().display());
        wait_for(&what, PATIENCE, || {
            Ok(http_get(&center.netns(), ready, "/ready").is_ok_and(|answer| answer.status == 200))
        })
    }

    /// Tells it to end, and waits until it has.
    pub fn stop(&self) -> anyhow::Result<()> {
        let center = self.cluster.control_plane();
        for pid in center.processes(SERVICE)? {
            // It may have ended by itself.
            let _ = kill(Pid::from_raw(i32::try_from(pid)?), Signal::SIGTERM);
        }
        wait_for("istiod to be gone", GONE, || Ok(center.processes(SERVICE)?.is_empty()))
    }

    /// Waits until the roots that it publishes in a namespace are these, or, where none are given, any.
    pub fn await_roots(&self, namespace: &str, roots: Option<&str>) -> anyhow::Result<String> {
        let what = format!("istiod's roots in the namespace {namespace}");
        let words = ["configmap", "--namespace", namespace, "istio-ca-root-cert"];
        let published = |found: &Value| found["data"]["root-cert.pem"].as_str().map(str::to_owned);
        let found = self.cluster.await_object(&what, PATIENCE, &words, |found| {
            published(found).is_some_and(|are| roots.is_none_or(|roots| are == roots))
        })?;
        published(&found).context("the roots that were there just now")
    }

    fn command(&self, signer: Signer<'_>) -> anyhow::Result<Vec<OsString>> {
        let prefix = self.cluster.prefix();
        let (empty, none) = (folder(prefix).join("empty"), folder(prefix).join("none"));
        // It looks for more of its settings in the folder that it is started in.
        fs::create_dir_all(&empty).with_context(|| format!("make {}", empty.display()))?;
        let mut words = vec![programs::host("env")?.into_os_string()];
        words.push(format!("--chdir={}", empty.display()).into());
        let mut set = |name: &str, value: &str| words.push(format!("{name}={value}").into());
        set("PILOT_ENABLE_AMBIENT", "true");
        set("CA_TRUSTED_NODE_ACCOUNTS", &self.trusted);
        set("POD_NAMESPACE", NAMESPACE);
        set("POD_NAME", "istiod-0");
        set("CLUSTER_ID", Self::CLUSTER_ID);
        let given = match signer {
            Signer::Own => none.as_path(),
            Signer::Folder(folder) => folder,
        };
        set("ROOT_CA_DIR", &given.display().to_string());
        words.push(programs::istiod()?.into_os_string());
        words.extend(["discovery", "--kubeconfig"].map(OsString::from));
        words.push(prefix.kubeconfig().into_os_string());
        words.extend(["--ctrlz_port", "0"].map(OsString::from));
        // Each certificate costs it a review of a token.
        words.extend(["--kubernetesApiQPS", "1000", "--kubernetesApiBurst", "1000"].map(OsString::from));
        Ok(words)
    }

    fn log(&self) -> PathBuf {
        let center = self.cluster.control_plane();
        center.folder().join(format!("{SERVICE}.log"))
    }
}

impl Drop for Istiod<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.stop() {
            eprintln!("{error:#}");
        }
    }
}

/// Makes what an istiod can sign with, twice: an intermediate below each of two roots, both of which come with either. The
/// folders are gone with the cluster.
pub fn intermediates(cluster: &Cluster) -> anyhow::Result<[PathBuf; 2]> {
    let roots = [1, 2].map(|number| authority(&format!("Adit test root {number}"), None));
    let [one, two] = roots;
    let (one, two) = (one?, two?);
    let bundle = format!("{}{}", one.pem(), two.pem());
    let make = |number: usize, root: &CertifiedIssuer<'static, KeyPair>| {
        let folder = folder(cluster.prefix()).join(format!("cacerts-{number}"));
        fs::create_dir_all(&folder).with_context(|| format!("make {}", folder.display()))?;
        let signer = authority(&format!("Adit test intermediate {number}"), Some(root))?;
        for (name, text) in [
            ("ca-cert.pem", signer.pem()),
            ("ca-key.pem", signer.key().serialize_pem()),
            ("cert-chain.pem", signer.pem()),
            ("root-cert.pem", bundle.clone()),
        ] {
            fs::write(folder.join(name), text).with_context(|| format!("write {name} in {}", folder.display()))?;
        }
        anyhow::Ok(folder)
    };
    Ok([make(1, &one)?, make(2, &two)?])
}

fn authority(
    name: &str,
    root: Option<&CertifiedIssuer<'static, KeyPair>>,
) -> anyhow::Result<CertifiedIssuer<'static, KeyPair>> {
    let mut params = CertificateParams::default();
    params.distinguished_name = rcgen::DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, name);
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    let key = KeyPair::generate()?;
    let made = match root {
        Some(root) => CertifiedIssuer::signed_by(params, key, root),
        None => CertifiedIssuer::self_signed(params, key),
    };
    made.with_context(|| format!("make the authority {name}"))
}

fn folder(prefix: &Prefix) -> PathBuf {
    prefix.folder(Machine::ControlPlane).join(SERVICE)
}
