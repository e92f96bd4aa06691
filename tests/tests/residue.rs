//! Nothing is left on the host: no namespace, cgroup, link, BPF program or process. In a test program of its own, so
//! that no other bed is alive meanwhile.
#![expect(clippy::unwrap_used, reason = "a test panics where it fails, its helpers too")]

use std::collections::BTreeSet;
use std::time::Duration;

use adit_tests::bed::{Bed, PodSpec, residue, wait_for};
use adit_tests::net;
use nix::sys::signal::Signal;

const SOON: Duration = Duration::from_secs(5);

/// The ids of the loaded BPF programs whose names are Adit's.
fn programs() -> BTreeSet<u32> {
    let loaded = aya::programs::loaded_programs();
    loaded
        .filter_map(Result::ok)
        .filter(|program| program.name_as_str().is_some_and(|name| name.starts_with("adit_")))
        .map(|program| program.id())
        .collect()
}

fn links() -> BTreeSet<String> {
    let entries = std::fs::read_dir("/sys/class/net").unwrap();
    entries
        .flatten()
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect()
}

fn pins() -> usize {
    let Ok(entries) = std::fs::read_dir("/sys/fs/bpf") else {
        return 0;
    };
    entries
        .flatten()
        .filter(|entry| entry.file_name().to_string_lossy().contains("adit"))
        .count()
}

fn live_bed(name: &str) -> Bed {
    let bed = Bed::builder(name)
        .node("n1")
        .node("n2")
        .pod("n1", PodSpec::new("client").account("shop/client"))
        .pod("n2", PodSpec::new("server").account("shop/server"))
        .start()
        .unwrap();
    let server = bed.pod("server");
    let _server = server.serve(|stage| net::echo_forever(stage, ("::", 8080))).unwrap();
    let to = server.at(8080);
    assert_eq!(bed.pod("client").run(|| net::ask(to, "hello")).unwrap().text, "hello");
    bed
}

/// Both orders in one test, since what is loaded is the whole machine's.
#[test]
fn neither_a_proxy_that_is_stopped_and_uninstalled_nor_a_bed_whose_proxies_are_killed_leaves_anything_behind() {
    // The kernel may be yet to free what others had loaded: what is there now may go, but nothing may come.
    let (links_before, programs_before, pins_before) = (links(), programs(), pins());

    let bed = live_bed("stopped");
    assert!(
        !programs().is_subset(&programs_before),
        "the check finds the programs of a live proxy"
    );
    for node in bed.nodes() {
        node.signal(Signal::SIGTERM).unwrap();
        assert!(node.wait_ended(SOON).unwrap().success());
    }
    assert!(
        !programs().is_subset(&programs_before),
        "they stay, so that pods stay closed"
    );
    bed.nodes().iter().for_each(|node| node.uninstall().unwrap());
    let clean = || Ok(programs().is_subset(&programs_before) && pins() == pins_before);
    wait_for("the programs of stopped proxies to be gone", SOON, clean).unwrap();
    let prefix = bed.prefix().to_owned();
    drop(bed);
    assert_eq!(residue(&prefix), Vec::<String>::new());

    let bed = live_bed("killed");
    bed.nodes().iter().for_each(adit_tests::bed::Node::kill);
    let prefix = bed.prefix().to_owned();
    drop(bed);
    assert_eq!(residue(&prefix), Vec::<String>::new());
    wait_for("the programs of killed proxies to be gone", SOON, || {
        Ok(programs().is_subset(&programs_before) && pins() == pins_before)
    })
    .unwrap();
    assert_eq!(links(), links_before);
}
