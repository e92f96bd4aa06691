//! Thousands of requests to a cluster's API server.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow};
use http::Method;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use serde_json::Value;

use crate::bed::netns;
use crate::cluster::Cluster;

/// How many are under way at once.
const AT_ONCE: usize = 8;

/// A request, and what it has to say.
pub(super) struct Request {
    method: Method,
    path: String,
    body: Value,
}

impl Request {
    pub(super) fn new(method: Method, path: impl Into<String>, body: Value) -> Self {
        Self {
            method,
            path: path.into(),
            body,
        }
    }

    fn http(&self) -> anyhow::Result<http::Request<Vec<u8>>> {
        let kind = match self.method {
            Method::PATCH => "application/merge-patch+json",
            _ => "application/json",
        };
        let request = http::Request::builder().method(&self.method).uri(&self.path);
        Ok(request
            .header(http::header::CONTENT_TYPE, kind)
            .body(serde_json::to_vec(&self.body)?)?)
    }
}

/// Sends them all, one each `every` or as fast as they are answered, and gives the uids of the objects, in order.
pub(super) fn send(cluster: &Cluster, requests: &[Request], every: Duration) -> anyhow::Result<Vec<String>> {
    let (next, begin) = (AtomicUsize::new(0), Instant::now());
    let uids = Mutex::new(vec![String::new(); requests.len()]);
    let work = || -> anyhow::Result<()> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(async {
            let client = client(cluster).await?;
            loop {
                let index = next.fetch_add(1, Ordering::Relaxed);
                let Some(request) = requests.get(index) else {
                    return Ok(());
                };
                let due = begin + every * u32::try_from(index)?;
                tokio::time::sleep_until(due.into()).await;
                let answer: Value = client
                    .request(request.http()?)
                    .await
                    .with_context(|| format!("{} {}", request.method, request.path))?;
                let uid = answer["metadata"]["uid"].as_str().unwrap_or_default().to_owned();
                uids.lock().map_err(|_| anyhow!("another of the threads failed"))?[index] = uid;
            }
        })
    };
    let place = cluster.control_plane().netns();
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..AT_ONCE)
            .map(|_| scope.spawn(|| netns::inside(&place, work)))
            .collect();
        threads
            .into_iter()
            .try_for_each(|thread| thread.join().map_err(|_| anyhow!("a thread panicked"))??)
    })?;
    uids.into_inner().map_err(|_| anyhow!("a thread panicked"))
}

async fn client(cluster: &Cluster) -> anyhow::Result<Client> {
    let kubeconfig = Kubeconfig::read_from(cluster.prefix().kubeconfig())?;
    let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?;
    Ok(Client::try_from(config)?)
}
