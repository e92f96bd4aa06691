//! What reading a large cluster costs, in this encoding and as typed JSON. Not a test of behaviour: run by hand, with
//! `ADIT_MEASURE_KUBECONFIG` naming a cluster's kubeconfig.
#![expect(unsafe_code, reason = "an allocator that counts")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use kube::api::{Api, ListParams};
use nix::sys::resource::{UsageWho, getrusage};

use super::*;
use crate::identity::TrustDomain;

struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);
static BYTES: AtomicU64 = AtomicU64::new(0);
static LIVE: AtomicU64 = AtomicU64::new(0);

// SAFETY: all is left to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        BYTES.fetch_add(layout.size() as u64, Ordering::Relaxed);
        LIVE.fetch_add(layout.size() as u64, Ordering::Relaxed);
        // SAFETY: as the caller's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size() as u64, Ordering::Relaxed);
        // SAFETY: as the caller's.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

struct Mark(Instant, Duration, u64, u64, u64);

fn cpu() -> Duration {
    let usage = getrusage(UsageWho::RUSAGE_THREAD).unwrap();
    let of = |time: nix::sys::time::TimeVal| Duration::new(time.tv_sec() as u64, time.tv_usec() as u32 * 1000);
    of(usage.user_time()) + of(usage.system_time())
}

impl Mark {
    fn now() -> Self {
        Self(
            Instant::now(),
            cpu(),
            ALLOCATIONS.load(Ordering::Relaxed),
            BYTES.load(Ordering::Relaxed),
            LIVE.load(Ordering::Relaxed),
        )
    }

    fn tell(&self, what: &str) {
        let live = LIVE.load(Ordering::Relaxed) as i64 - self.4 as i64;
        println!(
            "{what}: {:?}, CPU {:?}, {} allocations, {} MB allocated, {} KiB kept",
            self.0.elapsed(),
            cpu() - self.1,
            ALLOCATIONS.load(Ordering::Relaxed) - self.2,
            (BYTES.load(Ordering::Relaxed) - self.3) / 1_000_000,
            live / 1024
        );
    }
}

#[tokio::test]
#[ignore = "needs a cluster of many pods"]
async fn protobuf_against_typed_json() {
    let file = std::env::var_os("ADIT_MEASURE_KUBECONFIG").unwrap();
    let settings = KubernetesSettings {
        kubeconfig: Some(file.into()),
        trust_domain: TrustDomain::parse("cluster.local").unwrap(),
        cluster_domain: "cluster.local".to_owned(),
        root_namespace: "adit-system".to_owned(),
        enrolment: "mesh.adit/mode=enabled".parse().unwrap(),
        cluster_ranges: Vec::new(),
    };
    let client = client(&settings).await.unwrap();
    for _ in 0..2 {
        let start = Mark::now();
        let (mut rest, mut pages, mut bytes) = (None, Vec::new(), 0);
        loop {
            let page = api::list(&client, Kind::Pods, rest.as_deref()).await.unwrap();
            for item in &page.items {
                if let api::Object::Protobuf(item) = item {
                    bytes += item.len();
                }
            }
            pages.push(page.items);
            rest = page.rest;
            if rest.is_none() {
                break;
            }
        }
        start.tell(&format!("protobuf, received and cut into objects, {bytes} bytes"));
        let start = Mark::now();
        let label = settings.enrolment.clone();
        let view = objects::View {
            label: &label,
            node: Some("w0"),
        };
        let items = pages.iter().flatten().map(|item| match item {
            api::Object::Protobuf(bytes) => objects::pod(bytes.clone(), view).unwrap(),
            api::Object::Json(_) => panic!(),
        });
        println!("{} addresses", items.map(|pod| pod.addresses.len()).sum::<usize>());
        start.tell("protobuf, decoded and dropped");
        drop(pages);

        let start = Mark::now();
        let api: Api<k8s_openapi::api::core::v1::Pod> = Api::all(client.clone());
        let (mut rest, mut all) = (None, Vec::new());
        loop {
            let mut params = ListParams::default().limit(500);
            params.continue_token = rest;
            let page = api.list(&params).await.unwrap();
            rest = page.metadata.continue_.clone().filter(|rest| !rest.is_empty());
            all.extend(page.items);
            if rest.is_none() {
                break;
            }
        }
        start.tell(&format!("typed JSON, received and decoded, {} pods", all.len()));
    }
    let start = Mark::now();
    let source = KubernetesSource::open(settings, View::Node("w0".to_owned()))
        .await
        .unwrap();
    let (synced, mesh) = (source.synced(), source.mesh());
    let watching = tokio::spawn(source.watch());
    synced.wait().await;
    start.tell(&format!(
        "the whole source, {} workloads",
        mesh.load().workloads().count()
    ));
    tokio::time::sleep(Duration::from_secs(2)).await;
    start.tell("the whole source, a while later");
    if std::env::var_os("ADIT_MEASURE_CHANGES").is_some() {
        let (start, generation) = (Mark::now(), mesh.generation());
        tokio::time::sleep(Duration::from_secs(20)).await;
        start.tell(&format!(
            "20 s of changes, {} publications",
            mesh.generation() - generation
        ));
    }
    watching.abort();
}
