//! Connections that meet themselves, each other, or a record that is not theirs.

use std::net::SocketAddr;
use std::time::Duration;

use adit_tests::bed::{Pod, wait_for};
use adit_tests::net::{self, Ending};
use nix::sys::signal::Signal;
use socket2::{Domain, Socket, Type};

use super::{MARKER, assert_never_in_plaintext, lines_about, source_line_of};
use crate::world::{PORT, SOON, echo, world};

/// The port that the pod's connect from this source port was rewritten to.
fn rewritten_port(pod: &Pod, source: u16) -> Option<u16> {
    let table = pod.output("ss", &["-Htan", &format!("sport = :{source}")]).unwrap();
    table
        .lines()
        .filter(|line| !line.starts_with("LISTEN"))
        .find_map(|line| line.split_whitespace().nth(4)?.rsplit(':').next()?.parse().ok())
}

#[test]
fn a_guess_of_the_port_of_a_connection_in_flight_gains_nothing() {
    const SOURCE: u16 = 4_321;
    let bed = world("in flight").start().unwrap();
    let (client, server) = (bed.pod("client"), bed.pod("server"));
    let _server = echo(server, PORT);
    // The proxy does not accept for a while, so that the record stays.
    bed.node("n1").signal(Signal::SIGSTOP).unwrap();
    let first = client
        .spawn(|| net::ask_on(net::connect_from(client.at(SOURCE), server.at(PORT))?, MARKER))
        .unwrap();
    let mut port = None;
    wait_for("the connect", SOON, || {
        port = rewritten_port(client, SOURCE);
        Ok(port.is_some())
    })
    .unwrap();
    let port = port.unwrap();
    // From another port there is no record; from the same port to the same address there is no second connection.
    let other = client.run(|| net::attempt(client.at(port))).unwrap();
    assert_eq!(other.connect, Some(libc::ECONNREFUSED), "{other:?}");
    assert!(
        client
            .run(|| net::connect_from(client.at(SOURCE), client.at(port)).map(drop))
            .is_err()
    );
    // Over loopback it gets to the listener, under the same record.
    let guess = client
        .spawn(|| {
            net::ask_on(
                net::connect_from(client.at(SOURCE), ([127, 0, 0, 1], port).into())?,
                "a guess",
            )
        })
        .unwrap();
    wait_for("the guess", SOON, || {
        let table = client.output("ss", &["-Htan", &format!("dst 127.0.0.1:{port}")])?;
        Ok(!table.trim().is_empty())
    })
    .unwrap();
    bed.node("n1").signal(Signal::SIGCONT).unwrap();
    let outcomes = [first.join(SOON), guess.join(SOON)];
    let answered: Vec<_> = outcomes
        .iter()
        .flatten()
        .filter(|seen| seen.ending == Ending::Fin)
        .collect();
    // One record, one connection: to where it says, as the pod that it is.
    assert_eq!(answered.len(), 1, "{outcomes:?}");
    let line = source_line_of(&bed, "n1", client.at(SOURCE));
    assert_eq!(line.get("source.identity"), client.identity(), "{line:?}");
    let lines = lines_about(&bed, server);
    assert!(
        lines
            .iter()
            .all(|line| line.get("source.identity") == client.identity()),
        "{lines:?}"
    );
}

#[test]
fn a_connect_that_meets_its_own_rewritten_port_talks_to_itself_only() {
    const SOURCE: u16 = 4_322;
    let bed = world("self-connect").start().unwrap();
    let (client, server) = (bed.pod("client"), bed.pod("server"));
    let _server = echo(server, PORT);
    let capture = bed.capture_link().unwrap();
    let mut first = client
        .spawn_staged(|stage| {
            let stream = net::connect_from(client.at(SOURCE), server.at(PORT))?;
            stage.reached("open")?;
            stage.hold()?;
            drop(stream);
            Ok(())
        })
        .unwrap();
    first.stage::<String>(SOON).unwrap();
    let port = rewritten_port(client, SOURCE).unwrap();
    first.proceed().unwrap();
    first.join(SOON).unwrap();
    // The pod bends its range of ports, which Adit has read at enrolment, to this very port. A hash of the destination
    // chose it, so it comes again.
    client
        .run(|| {
            Ok(std::fs::write(
                "/proc/sys/net/ipv4/ip_local_port_range",
                format!("{port} {port}"),
            )?)
        })
        .unwrap();
    let seen = client.run(|| net::ask_on(net::connect(server.at(PORT))?, MARKER));
    if let Ok(seen) = &seen {
        assert_eq!(seen.local.port(), port, "{seen:?}");
        assert_eq!(
            (seen.text.as_str(), seen.ending),
            (MARKER, Ending::Fin),
            "its own words"
        );
    }
    assert_never_in_plaintext(&capture);
    std::thread::sleep(Duration::from_millis(100));
    let lines = lines_about(&bed, server);
    assert!(lines.iter().all(|line| line.number("bytes_sent") == 0), "{lines:?}");
}

#[test]
fn a_pods_own_address_and_port_connected_to_itself_stays_in_the_pod() {
    let bed = world("itself").start().unwrap();
    let client = bed.pod("client");
    let capture = bed.capture_link().unwrap();
    for own in [client.at(4_500), client.at6(4_500), ([127, 0, 0, 1], 4_500).into()] {
        let seen = client
            .run(|| net::ask_on(net::connect_from(own, own)?, MARKER))
            .unwrap();
        assert_eq!((seen.text.as_str(), seen.local, seen.peer), (MARKER, own, own));
    }
    assert_never_in_plaintext(&capture);
    assert!(
        bed.node("n1").access_log().is_empty(),
        "{:?}",
        bed.node("n1").access_log()
    );
}

/// Dials from its address to the other's, again and again, as long as it is refused.
fn dial_until_met(from: SocketAddr, to: SocketAddr) -> anyhow::Result<bool> {
    for _ in 0..200 {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
        socket.set_reuse_address(true)?;
        socket.bind(&from.into())?;
        if socket.connect(&to.into()).is_ok() {
            let met = net::ask_on(socket.into(), MARKER).is_ok_and(|seen| !seen.text.is_empty());
            if met {
                return Ok(true);
            }
        }
    }
    Ok(false)
}

#[test]
fn pods_that_dial_each_other_at_the_same_time_meet_only_where_the_kernel_lets_each_connect_to_the_other() {
    const PORTS: (u16, u16) = (4_601, 4_602);
    let bed = world("simultaneous").start().unwrap();
    let client = bed.pod("client");
    let capture = bed.capture_link().unwrap();
    for other in ["server", "neighbour"] {
        let other = bed.pod(other);
        let (here, there) = (client.at(PORTS.0), other.at(PORTS.1));
        let one = client.spawn(|| dial_until_met(here, there)).unwrap();
        let two = other.spawn(|| dial_until_met(there, here)).unwrap();
        let met = (one.join(net::STUCK).unwrap(), two.join(net::STUCK).unwrap());
        // Within the node each may connect to the other, directly: there they meet if the moment is right.
        if other.name() == "server" {
            assert_eq!(met, (false, false));
        }
    }
    assert_never_in_plaintext(&capture);
}
