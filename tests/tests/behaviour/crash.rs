//! While no proxy runs, whatever way it ended, enrolled pods are closed and nobody else is touched; the next one takes up
//! where it left.

use std::collections::BTreeSet;
use std::io::Write as _;
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::time::Duration;

use adit_tests::bed::{Bed, Capture, Node, Pod, PodSpec, Running, Stage, wait_for};
use adit_tests::net::{self, Ending};
use nix::sys::signal::Signal;

use crate::world::{LONG, PORT, SOON, ask, assert_refused, echo, is_answered, world};

const MARKER: &str = "never-while-closed-91c4";

/// The common world, and beside the client a pod that the mesh does not know. Every pod has an echo server.
fn served(name: &str) -> (Bed, Vec<Running<()>>) {
    let bed = world(name)
        .pod("n1", PodSpec::new("stranger").unknown())
        .start()
        .unwrap();
    let servers = bed.pods().iter().map(|pod| echo(pod, PORT)).collect();
    (bed, servers)
}

/// Every file below the node's folder of pins.
fn pins(node: &Node) -> BTreeSet<String> {
    fn walk(folder: &Path, found: &mut BTreeSet<String>) {
        for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
            if entry.file_type().unwrap().is_dir() {
                walk(&entry.path(), found);
            } else {
                found.insert(entry.path().display().to_string());
            }
        }
    }
    let mut found = BTreeSet::new();
    walk(node.bpf_dir(), &mut found);
    found
}

fn assert_all_is_well(bed: &Bed) {
    let pod = |name: &str| bed.pod(name);
    for (from, to) in [
        ("client", "server"),
        ("server", "client"),
        ("client", "neighbour"),
        ("client", "outsider"),
        ("outsider", "client"),
        ("stranger", "client"),
    ] {
        ask(pod(from), pod(to).at(PORT));
        ask(pod(from), pod(to).at6(PORT));
    }
}

/// The enrolled pods of n1, whose proxy is away, have nothing but what the kernel permits by itself.
fn assert_closed(bed: &Bed, capture: &Capture) {
    let (client, server) = (bed.pod("client"), bed.pod("server"));
    let (stranger, outsider) = (bed.pod("stranger"), bed.pod("outsider"));
    for to in [server.at(PORT), server.at6(PORT)] {
        assert_refused(client, to);
        let attempt = client.run(|| net::ask(to, MARKER));
        assert!(
            attempt.as_ref().map_or(true, |seen| seen.text.is_empty()),
            "{attempt:?}"
        );
    }
    for to in [client.at(PORT), client.at6(PORT)] {
        let attempt = server.run(|| net::attempt(to)).unwrap();
        assert!(attempt.was_refused(), "server to {to}: {attempt:?}");
    }
    assert_refused(outsider, client.at(15008));
    assert_eq!(capture.count(MARKER), 0, "an enrolled pod's bytes left in plaintext");
    // What has a verdict goes on.
    ask(client, bed.pod("neighbour").at(PORT));
    ask(client, outsider.at(PORT));
    ask(outsider, client.at(PORT));
    // Others do not notice. What stays in the pod is the pod's own business.
    ask(stranger, outsider.at(PORT));
    ask(outsider, stranger.at6(PORT));
    ask(client, client.at(PORT));
    ask(client, SocketAddr::from(([127, 0, 0, 1], PORT)));
}

#[test]
fn a_killed_proxy_leaves_its_pods_closed_and_the_next_one_opens_them() {
    let (bed, _servers) = served("killed");
    let node = bed.node("n1");
    assert_all_is_well(&bed);
    let before = pins(node);
    assert!(before.iter().any(|pin| pin.contains("/maps/adit_pods")), "{before:?}");
    let capture = bed.capture_link().unwrap();
    for _ in 0..2 {
        node.kill();
        assert_closed(&bed, &capture);
        assert_eq!(pins(node), before, "a crash changes nothing");
        node.start().unwrap();
        assert_eq!(pins(node), before, "the same pins serve the next proxy");
        let lets_in = || Ok(is_answered(bed.pod("server"), bed.pod("client").at(PORT)));
        // The other node may be slow to see that its tunnel has ended.
        wait_for("the way in", SOON, lets_in).unwrap();
        assert_all_is_well(&bed);
    }
    assert!(capture.is_complete());
}

#[test]
fn a_stopped_proxy_leaves_its_pods_closed_too() {
    let (bed, _servers) = served("stopped");
    let node = bed.node("n1");
    let before = pins(node);
    let capture = bed.capture_link().unwrap();
    node.signal(Signal::SIGTERM).unwrap();
    assert!(node.wait_ended(SOON).unwrap().success());
    assert_closed(&bed, &capture);
    assert_eq!(pins(node), before);
    node.start().unwrap();
    wait_for("the way in", SOON, || {
        Ok(is_answered(bed.pod("server"), bed.pod("client").at(PORT)))
    })
    .unwrap();
    assert_all_is_well(&bed);
}

#[test]
fn a_connection_that_was_open_when_the_proxy_died_ends() {
    let (bed, _servers) = served("open");
    let to = bed.pod("server").at(PORT);
    let open = bed
        .pod("client")
        .serve(|stage| {
            let mut stream = net::connect(to)?;
            std::io::Write::write_all(&mut stream, b"here")?;
            stage.reached(net::read_text(&mut stream, 4)?)?;
            Ok(net::read_to_end(&stream))
        })
        .unwrap();
    bed.node("n1").kill();
    let (text, ending) = open.join(LONG).unwrap();
    // By FIN or reset, as the kernel closes what a dead process had open.
    assert_eq!(text, "");
    assert_ne!(ending, Ending::Stuck);
}

#[test]
fn uninstall_leaves_nothing_and_pods_are_as_without_adit() {
    let (bed, _servers) = served("uninstall");
    let capture = bed.capture_link().unwrap();
    for node in bed.nodes() {
        node.kill();
        assert!(node.bpf_dir().exists());
        node.uninstall().unwrap();
        assert!(!node.bpf_dir().exists());
        node.uninstall().unwrap();
    }
    let (client, server) = (bed.pod("client"), bed.pod("server"));
    assert_eq!(client.run(|| net::ask(server.at(PORT), MARKER)).unwrap().text, MARKER);
    assert_eq!(server.run(|| net::ask(client.at6(PORT), MARKER)).unwrap().text, MARKER);
    assert!(capture.count(MARKER) > 0, "nothing encrypts any more");
    // And back.
    bed.nodes().iter().for_each(|node| node.start().unwrap());
    assert_all_is_well(&bed);
}

#[test]
fn a_pod_that_left_the_mesh_while_no_proxy_ran_is_let_go_by_the_next_one() {
    let (bed, _servers) = served("left meanwhile");
    let node = bed.node("n1");
    let client: &Pod = bed.pod("client");
    let before = pins(node);
    node.kill();
    bed.update(|mesh| mesh.workloads.retain(|workload| workload.name != "client"))
        .unwrap();
    assert_refused(client, bed.pod("server").at(PORT));
    node.start().unwrap();
    // In plaintext, as nobody's.
    let capture = bed.capture_link().unwrap();
    assert_eq!(
        client
            .run(|| net::ask(bed.pod("outsider").at(PORT), MARKER))
            .unwrap()
            .text,
        MARKER
    );
    assert!(capture.count(MARKER) > 0);
    let after = pins(node);
    assert_eq!(before.difference(&after).count(), 1, "{before:?} {after:?}");
    ask(bed.pod("neighbour"), bed.pod("server").at(PORT));
}

#[test]
fn pods_whose_namespace_cannot_be_looked_at_stay_closed() {
    let (bed, _servers) = served("unseen");
    let node = bed.node("n1");
    node.kill();
    bed.update(|mesh| {
        for workload in &mut mesh.workloads {
            if workload.name == "client" {
                workload.netns = Some("/nonexistent/netns".into());
            }
        }
    })
    .unwrap();
    node.launch().unwrap();
    node.wait_for_log("cannot be enrolled", SOON).unwrap();
    let (client, stranger) = (bed.pod("client"), bed.pod("stranger"));
    assert_refused(client, bed.pod("server").at(PORT));
    // What had a verdict has it until the proxy has taken over, which is a moment later.
    wait_for("the pod's verdicts to be taken back", SOON, || {
        Ok(!is_answered(stranger, client.at(PORT)))
    })
    .unwrap();
    assert_refused(stranger, client.at(PORT));
}

#[test]
fn what_a_version_with_another_layout_has_left_keeps_pods_closed_until_it_is_replaced() {
    let (bed, _servers) = served("layouts");
    let node = bed.node("n1");
    let before = pins(node);
    node.kill();
    // As if it had been of layout 0; nothing in it is of use to others.
    std::fs::rename(node.pins_dir().unwrap(), node.bpf_dir().join("v0")).unwrap();
    assert_refused(bed.pod("client"), bed.pod("server").at(PORT));
    node.start().unwrap();
    assert_eq!(pins(node), before, "its own, and nothing of the other");
    wait_for("the way in", SOON, || {
        Ok(is_answered(bed.pod("server"), bed.pod("client").at(PORT)))
    })
    .unwrap();
    assert_all_is_well(&bed);
}

#[test]
fn pods_stay_closed_where_the_pins_of_maps_are_removed_while_no_proxy_runs() {
    for removed in ["", "adit_pods", "adit_verdicts"] {
        let (bed, _servers) = served(&format!("no maps {removed}"));
        let node = bed.node("n1");
        let before = pins(node);
        let capture = bed.capture_link().unwrap();
        let to = bed.pod("server").at(PORT);
        node.kill();
        for map in std::fs::read_dir(node.pins_dir().unwrap().join("maps"))
            .unwrap()
            .flatten()
        {
            if map.file_name().to_str().unwrap().starts_with(removed) {
                std::fs::remove_file(map.path()).unwrap();
            }
        }
        // Without a pause, from before the next proxy to when it serves.
        let busy = bed
            .pod("client")
            .serve(move |stage| {
                stage.reached(())?;
                let begin = std::time::Instant::now();
                let mut answered = 0;
                while begin.elapsed() < Duration::from_secs(15) && answered < 20 {
                    answered += u32::from(net::ask(to, MARKER).is_ok_and(|seen| seen.text == MARKER));
                }
                Ok(answered)
            })
            .unwrap();
        node.start().unwrap();
        assert_eq!(busy.join(LONG).unwrap(), 20, "{removed}");
        assert_eq!(capture.count(MARKER), 0, "the pod was open for a moment: {removed}");
        assert!(capture.is_complete());
        node.wait_for_log("are not pinned any more", SOON).unwrap();
        let whole = || Ok(pins(node) == before);
        wait_for("the pins to be whole, and nothing beside them", SOON, whole).unwrap();
        assert_all_is_well(&bed);
    }
}

#[test]
fn pods_that_are_born_again_while_no_proxy_runs_are_enrolled_anew() {
    // With what the last proxy had left, and, as after a reboot, without.
    for reboot in [false, true] {
        let bed = Bed::builder(&format!("born again {reboot}"))
            .node("n1")
            .node("n2")
            .pod("n1", PodSpec::new("client").account("shop/client").unborn())
            .pod("n2", PodSpec::new("server").account("shop/server"))
            .start()
            .unwrap();
        let _server = echo(bed.pod("server"), PORT);
        let (node, to) = (bed.node("n1"), bed.pod("server").at(PORT));
        let capture = bed.capture_link().unwrap();
        node.kill();
        if reboot {
            node.uninstall().unwrap();
        }
        let born = bed.rebirth("n1", 1).unwrap();
        let busy = || {
            born[0]
                .spawn(move || {
                    let begin = std::time::Instant::now();
                    let mut answered = 0;
                    while begin.elapsed() < Duration::from_secs(15) && answered < 10 {
                        answered += u32::from(net::ask(to, MARKER).is_ok_and(|seen| seen.text == MARKER));
                    }
                    Ok(answered)
                })
                .unwrap()
        };
        // Nothing keeps a pod closed that starts after a reboot and before the first proxy.
        let before = (!reboot).then(busy);
        node.start().unwrap();
        assert_eq!(before.unwrap_or_else(busy).join(LONG).unwrap(), 10, "{reboot}");
        assert_eq!(capture.count(MARKER), 0, "{reboot}");
        assert!(capture.is_complete());
    }
}

#[test]
fn a_pod_is_never_open_while_it_changes_its_identity() {
    let (bed, _servers) = served("changes");
    let capture = bed.capture_link().unwrap();
    let to = bed.pod("server").at(PORT);
    let busy = bed
        .pod("client")
        .serve(|stage| {
            stage.reached(())?;
            let begin = std::time::Instant::now();
            let (mut answered, mut refused) = (0, 0);
            while begin.elapsed() < Duration::from_secs(4) {
                match net::ask(to, MARKER) {
                    Ok(seen) if seen.text == MARKER => answered += 1,
                    _ => refused += 1,
                }
            }
            Ok((answered, refused))
        })
        .unwrap();
    for round in 0..12 {
        bed.update(|mesh| {
            for workload in &mut mesh.workloads {
                if workload.name == "client" {
                    workload.service_account = format!("client-{}", round % 2);
                }
            }
        })
        .unwrap();
        let line = format!("enrolled as spiffe://cluster.local/ns/shop/sa/client-{}", round % 2);
        bed.node("n1").wait_for_log(&line, SOON).unwrap();
        std::thread::sleep(Duration::from_millis(200));
    }
    let (answered, refused): (u32, u32) = busy.join(LONG).unwrap();
    assert!(answered > 100, "{answered} answered, {refused} refused");
    assert_eq!(capture.count(MARKER), 0, "the pod was open for a moment");
    assert!(capture.is_complete());
}

#[test]
fn a_pinned_map_that_is_not_what_it_should_be_is_a_clear_error_and_leaves_pods_closed() {
    let (bed, _servers) = served("mismatch");
    let node = bed.node("n1");
    node.kill();
    let maps = node.pins_dir().unwrap().join("maps");
    std::fs::remove_file(maps.join("adit_flows")).unwrap();
    std::fs::hard_link(maps.join("adit_clients"), maps.join("adit_flows")).unwrap();
    node.launch().unwrap();
    assert!(!node.wait_ended(SOON).unwrap().success());
    let log = node.log().tail();
    assert!(
        log.contains("the pinned map") && log.contains("adit_flows") && log.contains("--uninstall"),
        "{log}"
    );
    assert_refused(bed.pod("client"), bed.pod("server").at(PORT));
    node.uninstall().unwrap();
    node.start().unwrap();
    ask(bed.pod("client"), bed.pod("server").at(PORT));
}

#[test]
fn a_connection_that_a_crash_breaks_off_is_reset_at_both_ends_and_not_taken_for_ended() {
    for crashed in ["n1", "n2"] {
        let bed = world(&format!("broken off by {crashed}")).start().unwrap();
        let (client, server) = (bed.pod("client"), bed.pod("server"));
        let ending = |mut stream: TcpStream, stage: &Stage| {
            net::with_deadlines(&stream)?;
            stream.write_all(b"half an answer")?;
            net::read_text(&mut stream, 14)?;
            stage.reached(())?;
            Ok(net::read_to_end(&stream).1)
        };
        let mut serving = server
            .serve(|stage| net::serve_one(stage, ("::", PORT), |stream, _| ending(stream, stage)))
            .unwrap();
        let to = server.at(PORT);
        let mut asking = client
            .spawn_staged(move |stage| ending(net::connect(to)?, stage))
            .unwrap();
        asking.stage::<()>(SOON).unwrap();
        serving.stage::<()>(SOON).unwrap();
        bed.node(crashed).kill();
        assert_eq!(asking.join(LONG).unwrap(), Ending::RESET, "client, {crashed}");
        assert_eq!(serving.join(LONG).unwrap(), Ending::RESET, "server, {crashed}");
    }
}

#[test]
fn a_proxy_that_dies_at_any_moment_of_enrolment_does_not_hinder_the_next() {
    let pods = 12;
    let bed = (0..pods).fold(world("dies early"), |bed, number| {
        bed.pod("n1", PodSpec::new(&format!("p{number}")).account("shop/p"))
    });
    let bed = bed.build().unwrap();
    let server = bed.pod("server");
    let _server = echo(server, PORT);
    let capture = bed.capture_link().unwrap();
    bed.start_ca().unwrap();
    bed.introduce_ca().unwrap();
    bed.node("n2").start().unwrap();
    let node = bed.node("n1");
    for round in 0..10 {
        let enrolled = || node.log().text().matches("is enrolled as").count();
        let before = enrolled();
        node.launch().unwrap();
        wait_for("so many pods to be enrolled", SOON, || Ok(enrolled() > before + round)).unwrap();
        node.kill();
    }
    node.start().unwrap();
    for number in 0..pods {
        let to = server.at(PORT);
        let seen = bed.pod(&format!("p{number}")).run(|| net::ask(to, MARKER)).unwrap();
        assert_eq!(seen.text, MARKER, "p{number}");
    }
    assert_eq!(capture.count(MARKER), 0);
    let enrolled = std::fs::read_dir(node.pins_dir().unwrap().join("pods")).unwrap();
    assert_eq!(enrolled.count(), pods + 2, "each pod has what it needs once");
}
