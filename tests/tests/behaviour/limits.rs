//! What has a limit: what happens at it, and afterwards.

use std::collections::BTreeSet;
use std::process::Command;
use std::time::Duration;

use adit_tests::bed::{Node, wait_for};
use adit_tests::net;
use nix::sys::signal::Signal;

use crate::world::{LONG, PORT, SOON, ask, echo, world};

/// Sets the proxy's own limit of open files.
fn limit_files(node: &Node, limit: usize) {
    let pid = node.pid().unwrap().to_string();
    let status = Command::new("prlimit")
        .args(["--pid", &pid, &format!("--nofile={limit}:")])
        .status()
        .unwrap();
    assert!(status.success());
}

/// The limit that leaves the proxy so many numbers for further files.
fn limit_with_spare(node: &Node, spare: usize) -> usize {
    let files = std::fs::read_dir(format!("/proc/{}/fd", node.pid().unwrap())).unwrap();
    let open: BTreeSet<usize> = files
        .flatten()
        .filter_map(|file| file.file_name().to_str()?.parse().ok())
        .collect();
    let last = (0..).filter(|number| !open.contains(number)).nth(spare - 1);
    last.unwrap() + 1
}

#[test]
fn without_descriptors_the_proxy_pauses_and_goes_on_once_there_are_some() {
    const COUNT: usize = 60;
    const SPARE: usize = 10;
    let bed = world("descriptors").start().unwrap();
    let (client, neighbour, server) = (bed.pod("client"), bed.pod("neighbour"), bed.pod("server"));
    let _servers = [echo(neighbour, PORT), echo(server, PORT)];
    let (node, to) = (bed.node("n1"), server.at(PORT));
    // So that each worker has its tunnel.
    (0..20).for_each(|_| drop(ask(client, to)));
    limit_files(node, limit_with_spare(node, SPARE));
    let mut open = client
        .spawn_staged(move |stage| {
            let open = net::connect_many(to, COUNT, 1)?;
            stage.reached(())?;
            stage.hold()?;
            let mut answered = 0;
            for stream in open {
                answered += usize::from(net::ask_on(stream, "hello")?.text.ends_with("hello"));
            }
            Ok(answered)
        })
        .unwrap();
    open.stage::<()>(SOON).unwrap();
    node.wait_for_log("pausing for", SOON).unwrap();
    std::thread::sleep(Duration::from_millis(700));
    let pauses = node.log().text().matches("pausing for").count();
    assert!(pauses < 40, "{pauses} lines of log");
    // What does not pass the proxy does not need it.
    ask(client, neighbour.at(PORT));

    limit_files(node, 4096);
    open.proceed().unwrap();
    assert_eq!(open.join(LONG).unwrap(), COUNT);
    ask(client, to);
}

/// Refuses whatever the neighbour is sent.
const CLOSED: &str = "{name: closed, namespace: shop, scope: workload, selector: {app: neighbour}, action: deny, \
    rules: [{from: [{namespaces: [shop]}]}]}";

#[test]
fn what_the_ring_of_events_has_no_room_for_is_counted() {
    // More than the ring holds.
    const COUNT: usize = 8_000;
    let bed = world("ring").policy(CLOSED).start().unwrap();
    let (client, to) = (bed.pod("client"), bed.pod("neighbour").at(PORT));
    let node = bed.node("n1");
    // A proxy that does not get to read.
    node.signal(Signal::SIGSTOP).unwrap();
    let refused = client.run(|| {
        let refused = |_: &usize| {
            let error = std::net::TcpStream::connect(to)
                .err()
                .and_then(|error| error.raw_os_error());
            error == Some(libc::EPERM)
        };
        Ok((0..COUNT).filter(refused).count())
    });
    node.signal(Signal::SIGCONT).unwrap();
    assert_eq!(refused.unwrap(), COUNT);
    let told = || {
        let metrics = node.metrics()?;
        let lost = metrics.sum("adit_direct_ends_lost_total", &[]);
        let denied = metrics.sum(
            "istio_tcp_connections_failed_total",
            &[("path", "direct"), ("response_flags", "DENY")],
        );
        Ok(lost > 0.0 && lost + denied == COUNT as f64)
    };
    wait_for("each refusal to be counted, or counted as lost", SOON, told).unwrap();
}
