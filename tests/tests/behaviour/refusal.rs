//! What cannot be reached is refused plainly and at once, not accepted and then closed as if all had been said.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::time::Duration;

use adit_tests::bed::{Bed, ServiceSpec};
use adit_tests::net::{self, Ending};

use crate::world::{PORT, SOON, assert_refused, world};

/// Nobody listens here.
const CLOSED: u16 = 9;

fn refused_line(bed: &Bed, node: &str, destination: SocketAddr) {
    let destination = destination.to_string();
    let wanted = |line: &adit_tests::bed::AccessLine| {
        line.get("destination.addr") == destination && !["fin", "policy", ""].contains(&line.get("how"))
    };
    let line = bed
        .node(node)
        .wait_for_access(&format!("of the refusal of {destination}"), SOON, wanted)
        .unwrap();
    assert_eq!(line.number("bytes_sent") + line.number("bytes_received"), 0, "{line:?}");
}

#[test]
fn a_closed_port_refuses_the_client_at_once() {
    let bed = world("closed port").start().unwrap();
    let client = bed.pod("client");
    for name in ["server", "neighbour", "outsider"] {
        let pod = bed.pod(name);
        assert_refused(client, pod.at(CLOSED));
        assert_refused(client, pod.at6(CLOSED));
        refused_line(&bed, "n1", pod.at(CLOSED));
    }
    // Into the mesh from outside as well.
    assert_refused(bed.pod("outsider"), bed.pod("server").at(CLOSED));
    assert_refused(bed.pod("outsider"), bed.pod("client").at6(CLOSED));
}

#[test]
fn a_service_without_endpoints_or_with_another_port_refuses_the_client_at_once() {
    let bed = world("no endpoints")
        .service(ServiceSpec::new("shop/empty").port(80, PORT).selector("app", "nobody"))
        .service(ServiceSpec::new("shop/web").port(80, PORT).endpoint("server"))
        .start()
        .unwrap();
    let client = bed.pod("client");
    let capture = bed.capture_link().unwrap();
    for address in [
        bed.service("shop/empty").at(80),
        bed.service("shop/empty").at6(80),
        bed.service("shop/web").at(81),
    ] {
        assert_refused(client, address);
        refused_line(&bed, "n1", address);
    }
    assert!(capture.is_complete());
}

#[test]
fn an_address_where_nobody_is_fails_for_the_client_and_never_ends_in_order() {
    let bed = world("nobody there").start().unwrap();
    let client = bed.pod("client");
    // In n2's range of pods, but no pod's: the node answers only when it has looked for it in vain.
    let [a, b, c, _] = bed.pod("server").v4().octets();
    let nobody: SocketAddr = ([a, b, c, 250], PORT).into();
    let attempt = client.run(|| net::attempt(nobody)).unwrap();
    assert!(
        attempt.was_refused() || attempt.connect.is_some() || matches!(attempt.ending, Some(Ending::Errno(_))),
        "{attempt:?}"
    );
    assert!(attempt.text.is_empty() && attempt.took_ms < 8_000, "{attempt:?}");
}

#[test]
fn a_dial_of_the_proxys_own_listeners_gets_no_answer() {
    let bed = world("own listener").start().unwrap();
    let client = bed.pod("client");
    // Whatever listens in the pod is Adit's: the pod runs nothing.
    let listeners = client.output("ss", &["-Hltn"]).unwrap();
    let ports: BTreeSet<u16> = listeners
        .lines()
        .filter_map(|line| line.split_whitespace().nth(3)?.rsplit(':').next()?.parse().ok())
        .collect();
    assert!(!ports.is_empty(), "{listeners}");
    let dial = |address: SocketAddr| {
        let stream = net::connect(address)?;
        // The tunnels' listener waits for a handshake; the others have nothing to wait for.
        stream.set_read_timeout(Some(Duration::from_millis(700)))?;
        Ok(net::read_to_end(&stream))
    };
    let mut waiting = 0;
    for port in &ports {
        let outcome = client.run(|| dial(([127, 0, 0, 1], *port).into()));
        match outcome {
            Ok((text, Ending::Stuck)) if text.is_empty() => waiting += 1,
            Ok((text, ending)) => assert_eq!((text.as_str(), ending), ("", Ending::RESET), "port {port}"),
            Err(_refused) => {}
        }
    }
    assert!(
        waiting <= 1,
        "{waiting} of the listeners {ports:?} neither answer nor refuse"
    );
    // At the pod's own address there is nothing at all.
    for port in &ports {
        assert_refused(client, client.at(*port));
    }
}
