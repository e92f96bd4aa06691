//! What the kernel cannot tell of direct connections at once is told later; nothing is lost on the way.

use std::time::Duration;

use adit_tests::bed::{AccessLine, PodSpec, detach_pinned_link, wait_for};
use adit_tests::net;
use nix::sys::signal::Signal;

use crate::world::{LONG, PORT, SOON, echo, world};

/// Refuses what the neighbour is sent from `shop`.
const CLOSED: &str = "{name: closed, namespace: shop, scope: workload, selector: {app: neighbour}, action: deny, \
    rules: [{from: [{namespaces: [shop]}]}]}";

#[test]
fn a_flood_of_refusals_of_one_pod_hides_no_end_of_anothers_connections() {
    // More than either ring holds.
    const REFUSED: usize = 8_000;
    const ASKED: usize = 2_500;
    let bed = world("flood")
        .pod("n1", PodSpec::new("friend").account("other/friend"))
        .policy(CLOSED)
        .start()
        .unwrap();
    let (client, friend, neighbour) = (bed.pod("client"), bed.pod("friend"), bed.pod("neighbour"));
    let _server = echo(neighbour, PORT);
    let (node, to) = (bed.node("n1"), neighbour.at(PORT));
    // A proxy that does not get to read.
    node.signal(Signal::SIGSTOP).unwrap();
    let refused = client.run(|| {
        let refused = |_: &usize| {
            let error = std::net::TcpStream::connect(to).err();
            error.and_then(|error| error.raw_os_error()) == Some(libc::EPERM)
        };
        Ok((0..REFUSED).filter(refused).count())
    });
    let asked = friend.spawn(move || {
        for _ in 0..ASKED {
            anyhow::ensure!(net::ask(to, "hello")?.text == "hello");
        }
        Ok(())
    });
    let asked = asked.unwrap().join(LONG);
    node.signal(Signal::SIGCONT).unwrap();
    assert_eq!(refused.unwrap(), REFUSED);
    asked.unwrap();
    let of_friend = [
        ("path", "direct"),
        ("reporter", "source"),
        ("source_workload", "friend"),
    ];
    let told = || {
        let metrics = node.metrics()?;
        Ok(metrics.sum("istio_tcp_connections_closed_total", &of_friend) == ASKED as f64)
    };
    wait_for("every end to be told", LONG, told).unwrap();
    let metrics = node.metrics().unwrap();
    let bytes = (5 * ASKED) as f64;
    assert_eq!(metrics.sum("istio_tcp_sent_bytes_total", &of_friend), bytes);
    assert_eq!(metrics.sum("istio_tcp_received_bytes_total", &of_friend), bytes);
    assert!(metrics.sum("adit_direct_ends_late_total", &[]) > 0.0);
    assert_eq!(metrics.sum("adit_direct_ends_lost_total", &[]), 0.0);
    assert_eq!(metrics.sum("adit_connections_open", &[("path", "direct")]), 0.0);
    // Each refusal is logged or counted.
    let denied = [("path", "direct"), ("response_flags", "DENY")];
    let all = || {
        let metrics = node.metrics()?;
        let logged = metrics.sum("istio_tcp_connections_failed_total", &denied);
        let unlogged = metrics.sum("adit_refusals_unlogged_total", &[]);
        Ok(logged >= 100.0 && logged + unlogged == REFUSED as f64)
    };
    wait_for("each refusal to be logged or counted", SOON, all).unwrap();
    node.wait_for_log("further connects of pod shop/client were refused", LONG)
        .unwrap();
}

#[test]
fn a_direct_connection_that_ends_unseen_is_closed_in_the_books() {
    let bed = world("unseen end").start().unwrap();
    let (client, neighbour) = (bed.pod("client"), bed.pod("neighbour"));
    let _server = echo(neighbour, PORT);
    let (node, to) = (bed.node("n1"), neighbour.at(PORT));
    let mut open = client
        .spawn_staged(move |stage| {
            let mut streams = net::connect_many(to, 2, 1)?;
            // What is closed with something unread is reset.
            for stream in &mut streams {
                net::read_text(stream, 1)?;
            }
            stage.reached(())?;
            stage.hold()?;
            let mut streams = streams.into_iter();
            drop(streams.next());
            stage.reached(())?;
            stage.hold()?;
            drop(streams);
            Ok(())
        })
        .unwrap();
    open.stage::<()>(SOON).unwrap();
    let opened = || {
        let direct = [("path", "direct")];
        Ok(node.metrics()?.sum("adit_connections_open", &direct) == 2.0)
    };
    wait_for("both to be told of", SOON, opened).unwrap();
    // Nobody sees the end of the first.
    detach_pinned_link(&node.pins_dir().unwrap().join("links/adit_sock_ops")).unwrap();
    open.proceed().unwrap();
    open.stage::<()>(SOON).unwrap();
    let unseen = |line: &AccessLine| line.has(&[("path", "direct"), ("how", "error"), ("closed_by", "unknown")]);
    node.wait_for_access("the unseen end", Duration::from_secs(30), unseen)
        .unwrap();
    assert_eq!(node.metrics().unwrap().sum("adit_direct_ends_lost_total", &[]), 1.0);
    // The other is open, and its end is seen.
    open.proceed().unwrap();
    open.join(SOON).unwrap();
    let seen = |line: &AccessLine| line.has(&[("path", "direct"), ("how", "fin")]);
    node.wait_for_access("the other's end", SOON, seen).unwrap();
    let none = || Ok(node.metrics()?.sum("adit_connections_open", &[("path", "direct")]) == 0.0);
    wait_for("none to be open", SOON, none).unwrap();
}
