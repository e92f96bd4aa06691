//! Two hundred pods on one node, and what each of them costs.

use std::fs;
use std::time::Duration;

use adit_tests::bed::{Bed, Node, PodSpec};

use crate::world::{PORT, ask, echo, source_line};

const PODS: usize = 200;
/// Of a start with all pods; most of it on a loaded machine.
const READY: Duration = Duration::from_secs(10);
/// The most that one more pod may add to the proxy's resident memory.
const RESIDENT_KIB: u64 = 200;
/// The most that one more pod may add to the proxy's open files.
const FILES: usize = 16;

/// What a start came to.
#[derive(Debug, Clone, Copy)]
struct Cost {
    ready_ms: u64,
    resident_kib: u64,
    files: usize,
    /// Kernel memory of the programs and maps that the proxy holds open.
    locked_bytes: u64,
}

/// Starts the node's proxy anew and measures.
fn start(node: &Node) -> Cost {
    node.kill();
    let lines = |text: &str| text.matches("ready after ").count();
    let before = lines(&node.log().text());
    node.launch().unwrap();
    node.wait_ready(READY).unwrap();
    adit_tests::bed::wait_for("the line that tells the time", READY, || {
        Ok(lines(&node.log().text()) > before)
    })
    .unwrap();
    let text = node.log().text();
    let (_, last) = text.rsplit_once("ready after ").unwrap();
    Cost {
        ready_ms: last.split(' ').next().unwrap().parse().unwrap(),
        resident_kib: node.resident_kib().unwrap(),
        files: node.open_files().unwrap(),
        locked_bytes: locked_bytes(node),
    }
}

fn locked_bytes(node: &Node) -> u64 {
    let folder = format!("/proc/{}/fdinfo", node.pid().unwrap());
    let files = fs::read_dir(folder).unwrap().filter_map(Result::ok);
    let texts = files.filter_map(|file| fs::read_to_string(file.path()).ok());
    let of = |text: String| {
        let value = text.lines().find_map(|line| line.strip_prefix("memlock:"))?;
        value.trim().parse::<u64>().ok()
    };
    texts.filter_map(of).sum()
}

#[test]
fn two_hundred_pods_are_enrolled() {
    let pods = (0..PODS).fold(Bed::builder("many pods").node("n1").node("n2"), |bed, number| {
        // Ten pods share an account, as replicas do.
        let spec = PodSpec::new(&format!("p{number}")).account(&format!("shop/a{}", number / 10));
        bed.pod("n1", spec)
    });
    let bed = pods.build().unwrap();
    let node = bed.node("n1");
    let (first, last) = (bed.pod("p0"), bed.pod(&format!("p{}", PODS - 1)));
    let mut all = Vec::new();
    bed.update(|mesh| {
        all.clone_from(&mesh.workloads);
        mesh.workloads
            .retain(|workload| [first.name(), last.name()].contains(&workload.name.as_str()));
    })
    .unwrap();
    bed.start_ca().unwrap();
    bed.introduce_ca().unwrap();
    let few = start(node);

    bed.update(|mesh| mesh.workloads = all).unwrap();
    let many = start(node);
    let state = node.state().unwrap();
    assert_eq!(state["pods"].as_array().map(Vec::len), Some(PODS), "all are enrolled");
    let _server = echo(last, PORT);
    let line = source_line(&bed, first, &ask(first, last.at(PORT)));
    assert_eq!(line.get("path"), "local", "{line:?}");

    let more = PODS - 2;
    let per_pod = |growth: u64| growth as f64 / more as f64;
    let resident = many.resident_kib.saturating_sub(few.resident_kib);
    let files = many.files.saturating_sub(few.files);
    println!(
        "2 pods: {few:?}\n{PODS} pods: {many:?}\na pod: {:.2} ms, {:.1} KiB resident, {:.1} files, {:.1} KiB locked",
        per_pod(many.ready_ms.saturating_sub(few.ready_ms)),
        per_pod(resident),
        per_pod(files as u64),
        per_pod(many.locked_bytes.saturating_sub(few.locked_bytes)) / 1024.0,
    );
    assert!(resident <= RESIDENT_KIB * more as u64, "{few:?} {many:?}");
    assert!(files <= FILES * more, "{few:?} {many:?}");
}
