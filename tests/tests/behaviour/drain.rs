//! A proxy that is told to stop takes no new connections, lets the open ones end, and leaves.

use std::io::Write;

use adit_tests::bed::{Stage, wait_for};
use adit_tests::net;
use nix::sys::signal::Signal;

use crate::world::{LONG, PORT, SOON, assert_refused, echo, is_answered, world};

#[test]
fn an_open_connection_goes_on_while_the_proxy_drains_and_then_the_proxy_ends() {
    let bed = world("drain").start().unwrap();
    let (client, server) = (bed.pod("client"), bed.pod("server"));
    let _server = echo(server, PORT);
    let to = server.at(PORT);
    let talk = |stage: &Stage| {
        let mut stream = net::connect(to)?;
        stream.write_all(b"before")?;
        let before = net::read_text(&mut stream, 6)?;
        stage.reached(&before)?;
        stage.hold()?;
        stream.write_all(b"during")?;
        let during = net::read_text(&mut stream, 6)?;
        stage.reached(&during)?;
        stage.hold()
    };
    let mut open = client.serve(talk).unwrap();
    let node = bed.node("n1");
    node.signal(Signal::SIGTERM).unwrap();
    node.wait_for_log("draining", SOON).unwrap();
    assert!(node.is_running(), "an open connection keeps it");
    // What has reached a listener by then is still taken.
    wait_for("new connections to be refused", SOON, || Ok(!is_answered(client, to))).unwrap();
    assert_refused(client, to);
    open.proceed().unwrap();
    assert_eq!(open.stage::<String>(SOON).unwrap(), "during");
    open.proceed().unwrap();
    open.join(SOON).unwrap();
    let status = node.wait_ended(LONG).unwrap();
    assert!(status.success(), "{status}");
    let lines = node.access_log();
    assert!(
        lines
            .iter()
            .any(|line| line.has(&[("reporter", "source"), ("how", "fin")])),
        "{lines:?}"
    );
}

#[test]
fn a_proxy_that_waits_for_a_successor_takes_new_connections_until_it_is_told_again() {
    let bed = world("await successor")
        .node_argument("--await-successor=60s")
        .start()
        .unwrap();
    let (client, server) = (bed.pod("client"), bed.pod("server"));
    let _server = echo(server, PORT);
    let node = bed.node("n1");
    node.signal(Signal::SIGTERM).unwrap();
    node.wait_for_log("told to stop; taking new connections for 60000 ms more", SOON)
        .unwrap();
    for _ in 0..20 {
        assert!(is_answered(client, server.at(PORT)));
    }
    node.signal(Signal::SIGTERM).unwrap();
    assert!(node.wait_ended(SOON).unwrap().success());
    assert_refused(client, server.at(PORT));
}

#[test]
fn without_open_connections_the_proxy_ends_at_once_and_the_pods_are_closed() {
    let bed = world("idle drain").start().unwrap();
    let (client, server) = (bed.pod("client"), bed.pod("server"));
    let _server = echo(server, PORT);
    for node in bed.nodes() {
        node.signal(Signal::SIGTERM).unwrap();
        assert!(node.wait_ended(SOON).unwrap().success());
    }
    assert_refused(client, server.at(PORT));
}
