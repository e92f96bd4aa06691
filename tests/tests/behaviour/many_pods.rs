//! Two hundred pods on one node, and what each of them costs.

use std::collections::HashSet;
use std::fs;
use std::time::Duration;

use adit_tests::bed::{Bed, Node, PodSpec};

use crate::world::{PORT, ask, echo, source_line};

const PODS: usize = 200;
/// The longest that a start with all pods may take, on a machine with other work to do.
const READY: Duration = Duration::from_secs(5);
/// The most that one more pod may add to the proxy's resident memory, and in the kernel to its programs'.
const RESIDENT_KIB: u64 = 40;
const PROGRAM_KIB: u64 = 40;
/// The most that a pod that came and went may leave of the proxy's own memory, in the first rounds, when the heap still grows
/// into its shape: over hundreds of rounds it becomes less and less.
const LEFT_KIB: u64 = 6;
/// The most that one more pod may add to the proxy's open files.
const FILES: u64 = 12;

/// What a start came to.
#[derive(Debug, Clone, Copy)]
struct Cost {
    ready_ms: u64,
    resident_kib: u64,
    files: usize,
    /// Kernel memory of the programs that the proxy has attached.
    program_bytes: u64,
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
        program_bytes: program_bytes(node),
    }
}

/// What the kernel tells of each of the proxy's open files.
fn fdinfo(node: &Node) -> impl Iterator<Item = String> {
    let folder = format!("/proc/{}/fdinfo", node.pid().unwrap());
    let files = fs::read_dir(folder).unwrap().filter_map(Result::ok);
    files.filter_map(|file| fs::read_to_string(file.path()).ok())
}

fn program_bytes(node: &Node) -> u64 {
    // What the kernel tells of a link.
    let attached: HashSet<u32> = fdinfo(node)
        .filter_map(|text| {
            let value = text.lines().find_map(|line| line.strip_prefix("prog_id:"))?;
            value.trim().parse().ok()
        })
        .collect();
    let programs = aya::programs::loaded_programs().filter_map(Result::ok);
    let of_node = programs.filter(|program| attached.contains(&program.id()));
    of_node
        .filter_map(|program| program.memory_locked().ok().map(u64::from))
        .sum()
}

/// How many files the proxy watches, its pods' cgroups among them.
fn inotify_watches(node: &Node) -> usize {
    fdinfo(node).map(|text| text.matches("inotify wd:").count()).sum()
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
    assert_eq!(line.get("path"), "direct", "{line:?}");

    let more = (PODS - 2) as u64;
    let per_pod = |growth: u64| growth as f64 / more as f64;
    let resident = many.resident_kib.saturating_sub(few.resident_kib);
    let programs = many.program_bytes.saturating_sub(few.program_bytes) >> 10;
    let files = many.files.saturating_sub(few.files) as u64;
    println!(
        "2 pods: {few:?}\n{PODS} pods: {many:?}\na pod: {:.2} ms, {:.1} KiB resident, {:.1} KiB of programs, {:.1} files",
        per_pod(many.ready_ms.saturating_sub(few.ready_ms)),
        per_pod(resident),
        per_pod(programs),
        per_pod(files),
    );
    assert!(resident <= RESIDENT_KIB * more, "{few:?} {many:?}");
    assert!((more..=PROGRAM_KIB * more).contains(&programs), "{few:?} {many:?}");
    assert!(files <= FILES * more, "{few:?} {many:?}");
}

#[test]
fn pods_that_come_and_go_leave_nothing_in_the_proxy() {
    const COMING: usize = 60;
    const STAYING: usize = 2;
    const ROUNDS: u64 = 10;
    let pods = (0..COMING).fold(Bed::builder("churn").node("n1").node("n2"), |bed, number| {
        bed.pod(
            "n1",
            PodSpec::new(&format!("p{number}")).account(&format!("shop/a{number}")),
        )
    });
    let bed = pods.start().unwrap();
    let node = bed.node("n1");
    let mut all = Vec::new();
    bed.update(|mesh| all.clone_from(&mesh.workloads)).unwrap();
    let enrolled = |count: usize| {
        adit_tests::bed::wait_for(&format!("{count} pods to be enrolled"), READY * 2, || {
            let state = node.state()?;
            let certificates = state["certificates"].as_array().map(Vec::len);
            Ok(state["pods"].as_array().map(Vec::len) == Some(count) && certificates == Some(count))
        })
        .unwrap();
    };
    enrolled(COMING);
    let threads = || {
        fs::read_dir(format!("/proc/{}/task", node.pid().unwrap()))
            .unwrap()
            .count()
    };
    let mut bases = Vec::new();
    for _ in 0..ROUNDS {
        bed.update(|mesh| mesh.workloads.truncate(STAYING)).unwrap();
        enrolled(STAYING);
        bases.push((
            node.open_files().unwrap(),
            threads(),
            inotify_watches(node),
            node.anonymous_kib().unwrap(),
        ));
        bed.update(|mesh| mesh.workloads.clone_from(&all)).unwrap();
        enrolled(COMING);
    }
    bed.update(|mesh| mesh.workloads.truncate(STAYING)).unwrap();
    enrolled(STAYING);
    // What the first round makes (threads for work that blocks, room in tables) may stay.
    let (files, tasks, watches, _) = bases[0];
    let kib: Vec<u64> = bases.iter().map(|(.., kib)| *kib).collect();
    let went = (COMING - STAYING) as u64 * (ROUNDS - 2);
    println!("anonymous memory by rounds, in KiB: {kib:?}");
    assert!(node.anonymous_kib().unwrap() <= kib[1] + LEFT_KIB * went, "{kib:?}");
    let rest = || {
        let watched = inotify_watches(node) <= watches;
        Ok(node.open_files()? <= files + 4 && threads() <= tasks + 4 && watched)
    };
    // Cgroups that are gone are looked for every half a minute.
    adit_tests::bed::wait_for("files, threads and watches to be let go", READY * 9, rest).unwrap();
}
