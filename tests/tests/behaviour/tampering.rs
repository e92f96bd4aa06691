//! Somebody takes away or replaces what captures: it is noticed within seconds, and put right.

use std::path::{Path, PathBuf};
use std::time::Duration;

use adit_tests::bed::{Node, detach_pinned_link, wait_for};
use adit_tests::net;

use crate::world::{BY_ADDRESS, PORT, SOON, ask, assert_refused, echo, world};

/// The time within which it is noticed.
const NOTICED: Duration = Duration::from_secs(10);

fn remove_tree(path: &Path) {
    if path.is_dir() {
        for entry in std::fs::read_dir(path).unwrap() {
            remove_tree(&entry.unwrap().path());
        }
        std::fs::remove_dir(path).unwrap();
    } else {
        std::fs::remove_file(path).unwrap();
    }
}

/// Every file below the node's folder of pins.
fn pins(path: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(path).into_iter().flatten().flatten() {
        if entry.file_type().unwrap().is_dir() {
            found.extend(pins(&entry.path()));
        } else {
            found.push(entry.path());
        }
    }
    found.sort();
    found
}

/// Waits for so many more lines of repairs.
fn wait_for_repair(node: &Node, what: &str) {
    let line = node.wait_for_log(what, NOTICED).unwrap();
    assert!(line.contains("put right"), "{line}");
}

#[test]
fn pins_that_are_removed_are_made_again_and_serve_the_next_proxy() {
    let bed = world("pins removed").start().unwrap();
    let (client, server) = (bed.pod("client"), bed.pod("server"));
    let _server = echo(server, PORT);
    let node = bed.node("n1");
    let before = pins(node.bpf_dir());
    remove_tree(node.bpf_dir());
    // Nothing is open in between: the process holds what the pins held.
    ask(client, server.at(PORT));
    wait_for_repair(node, "adit_pods was not pinned");
    wait_for_repair(node, "adit_connect4 was not pinned");
    wait_for("all pins", SOON, || Ok(pins(node.bpf_dir()) == before)).unwrap();
    node.kill();
    assert_refused(client, server.at(PORT));
    node.start().unwrap();
    ask(client, server.at(PORT));
}

#[test]
fn programs_that_are_detached_are_attached_again() {
    let bed = world("detached").start().unwrap();
    let (client, server) = (bed.pod("client"), bed.pod("server"));
    let _servers = [echo(server, PORT), echo(client, PORT)];
    let node = bed.node("n1");
    for pin in pins(node.bpf_dir()) {
        if !pin.to_string_lossy().contains("/maps/") {
            detach_pinned_link(&pin).unwrap();
        }
    }
    wait_for_repair(node, "adit_connect4 was not attached");
    wait_for_repair(node, "adit_sock_ops was not attached");
    wait_for_repair(node, "pod shop/client was not captured");
    ask(client, server.at(PORT));
    wait_for("the way in", SOON, || {
        Ok(crate::world::is_answered(server, client.at(PORT)))
    })
    .unwrap();
    // Of each pod it is told, and each is tested again.
    for pod in ["client", "neighbour"] {
        let told = format!("pod shop/{pod}: CaptureLost: something in the pod or on its node took its capture away");
        node.wait_for_log(&told, SOON).unwrap();
    }
    let metrics = || {
        node.metrics().map(|metrics| {
            let captured = metrics.sum("adit_pods", &[("capture", "captured")]);
            (captured, metrics.sum("adit_repairs_total", &[]) >= 4.0)
        })
    };
    wait_for("the figures", SOON, || Ok(metrics()? == (2.0, true))).unwrap();
    let capture = bed.capture_link().unwrap();
    let seen = client
        .run(|| net::ask(server.at(PORT), "through-the-tunnel-1a2b"))
        .unwrap();
    assert_eq!(seen.text, "through-the-tunnel-1a2b");
    assert_eq!(capture.count("through-the-tunnel-1a2b"), 0);
}

#[test]
fn listeners_that_a_pod_closes_are_made_again_and_what_is_open_goes_on() {
    // So that what comes in from outside takes the proxy.
    let bed = world("listeners closed").policy(BY_ADDRESS).start().unwrap();
    let (client, outsider) = (bed.pod("client"), bed.pod("outsider"));
    let _server = echo(client, PORT);
    let to = client.at(PORT);
    let mut open = outsider
        .spawn_staged(move |stage| {
            let stream = net::connect(to)?;
            stage.reached(())?;
            stage.hold()?;
            Ok(net::ask_on(stream, "still here")?.text)
        })
        .unwrap();
    open.stage::<()>(SOON).unwrap();
    let node = bed.node("n1");
    let before = node.open_files().unwrap();
    let listeners = || {
        let listeners = client.output("ss", &["-Hltn", "src", "[::ffff:127.0.0.1]"])?;
        anyhow::Ok(listeners.lines().count())
    };
    let all = listeners().unwrap();
    for round in 1..=3 {
        // As root of the pod may.
        let some_closed = || {
            client.output("ss", &["-HK", "-ltn", "src", "[::ffff:127.0.0.1]"])?;
            Ok(listeners()? < all)
        };
        wait_for("a listener's end", SOON, some_closed).unwrap();
        let repaired = || Ok(node.log().text().matches("closed listeners of pod shop/client").count() >= round);
        wait_for("the pod's listeners to be made again", NOTICED, repaired).unwrap();
        wait_for("all of them", SOON, || Ok(listeners()? == all)).unwrap();
        (0..20).for_each(|_| drop(ask(outsider, to)));
    }
    open.proceed().unwrap();
    assert_eq!(open.join(SOON).unwrap(), "still here");
    let few = || Ok(node.open_files()? < before + 10);
    wait_for("the old listeners to be let go", SOON, few).unwrap();
}

#[test]
fn a_pods_cgroup_that_is_gone_makes_the_proxy_not_ready_until_it_is_back() {
    let bed = world("cgroup gone").build().unwrap();
    // A cgroup that holds nobody, so that it can be removed.
    let cgroup = bed.node("n1").pods_cgroup().with_file_name("none");
    std::fs::create_dir(&cgroup).unwrap();
    bed.start_ca().unwrap();
    bed.introduce_ca().unwrap();
    let node = bed.node("n1");
    node.launch_with(&[&format!("--pods-cgroup={}", cgroup.display())])
        .unwrap();
    node.wait_ready(SOON).unwrap();
    // The process of the proxy's own test may take a moment to be gone.
    wait_for("the cgroup to be empty", SOON, || {
        Ok(std::fs::remove_dir(&cgroup).is_ok())
    })
    .unwrap();
    let ready = || node.get("/healthz/ready").map(|answer| answer.status == 200);
    wait_for("the proxy to notice", NOTICED, || Ok(!ready()?)).unwrap();
    let page = node.get("/healthz/ready").unwrap().body;
    assert!(page.contains("programs and pins") && page.contains("none"), "{page}");
    std::fs::create_dir(&cgroup).unwrap();
    wait_for("the proxy to be ready again", NOTICED, ready).unwrap();
    wait_for_repair(node, "adit_connect6 was not attached");
}
