//! Envoy, a peer that shares no code with Adit: as a client of its tunnels and as a server behind them. Its pod is not
//! enrolled; its certificate comes from the mesh's CA.

mod as_client;
mod as_server;
mod config;
mod talk;

use std::fs;
use std::path::{Path, PathBuf};

use adit_tests::bed::process::TokenSpec;
use adit_tests::bed::{Bed, BedBuilder, Pod, PodSpec, Spawned};
use adit_tests::ca_call::CaCall;
use anyhow::{Context, bail, ensure};

use crate::world::{LONG, text, tool};

/// The version that `cargo xtask test` fetches.
const VERSION: &str = "1.40.0";

/// The port of tunnels.
const TUNNELS: u16 = 15008;

/// Envoy's binary: `ADIT_ENVOY`, or what an earlier `cargo xtask test` has left in the cache.
fn binary() -> anyhow::Result<PathBuf> {
    if let Some(path) = std::env::var_os("ADIT_ENVOY") {
        let path = PathBuf::from(path);
        ensure!(path.is_file(), "ADIT_ENVOY names {}, which is no file", path.display());
        return Ok(path);
    }
    let from = |name: &str, below: &str| std::env::var_os(name).map(|folder| PathBuf::from(folder).join(below));
    let caches = [from("ADIT_CACHE", ""), from("HOME", ".cache/adit")];
    let cached = caches
        .into_iter()
        .flatten()
        .map(|cache| cache.join(format!("envoy-{VERSION}/envoy")));
    match cached.into_iter().find(|path| path.is_file()) {
        Some(path) => Ok(path),
        None => bail!(
            "no Envoy: run this test by `cargo xtask test`, which fetches Envoy {VERSION}, or name a binary by ADIT_ENVOY"
        ),
    }
}

/// A pod of the mesh, reached over tunnels, but with a proxy of its own instead of Adit's.
fn add_envoy(bed: BedBuilder, node: &str) -> anyhow::Result<Bed> {
    let bed = bed
        .pod(node, PodSpec::new("envoy").account("peers/envoy").outside())
        .build()?;
    bed.update(|mesh| {
        if let Some(envoy) = mesh.workload("envoy") {
            envoy.protocol = "hbone".to_owned();
        }
    })?;
    bed.start_all()?;
    Ok(bed)
}

/// A pod's certificate as files.
#[derive(Debug)]
struct Svid {
    /// The leaf and what lies between it and the root.
    chain: PathBuf,
    key: PathBuf,
    roots: PathBuf,
}

/// Gets the pod's certificate from the CA, with a token of its node.
fn svid(bed: &Bed, pod: &Pod) -> anyhow::Result<Svid> {
    let [chain, key, roots] =
        ["chain", "key", "roots"].map(|what| bed.dir().join(format!("{}.{what}.pem", pod.name())));
    let names = format!("subjectAltName=critical,URI:{}", pod.identity());
    let how = [
        "req",
        "-new",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-subj",
        "/",
    ];
    let csr = tool(
        "openssl",
        &[&how[..], &["-keyout", text(&key), "-addext", &names]].concat(),
    )?;
    let token = TokenSpec {
        node: pod.node().to_owned(),
        ..TokenSpec::default()
    };
    let call = CaCall {
        token: Some(bed.token(&token)?),
        csr,
        identity: Some(pod.identity()),
        seconds: 3600,
    };
    let answer = call.send(bed, bed.node(pod.node()))?;
    ensure!(
        answer.status == 0,
        "the CA refuses {}: {}",
        pod.identity(),
        answer.message
    );
    let (root, certificates) = answer.chain.split_last().context("an empty chain")?;
    fs::write(&chain, certificates.concat())?;
    fs::write(&roots, root)?;
    Ok(Svid { chain, key, roots })
}

/// Starts Envoy in the pod and waits for its ports.
fn start(bed: &Bed, pod: &Pod, config: &str, ports: &[u16]) -> anyhow::Result<Spawned> {
    let binary = binary()?;
    let file = write(&bed.dir().join("envoy.yaml"), config)?;
    let arguments = [
        "--config-path",
        text(&file),
        "--disable-hot-restart",
        "--file-flush-interval-msec",
        "50",
        "--concurrency",
        "2",
        "--log-level",
        "info",
    ];
    let envoy = pod.spawn_command(text(&binary), &arguments)?;
    for port in ports {
        pod.wait_for_listener(*port, LONG)
            .with_context(|| format!("Envoy's log:\n{}", envoy.log().tail()))?;
    }
    Ok(envoy)
}

fn write(path: &Path, content: &str) -> anyhow::Result<PathBuf> {
    fs::write(path, content).with_context(|| format!("write {}", path.display()))?;
    Ok(path.to_owned())
}
