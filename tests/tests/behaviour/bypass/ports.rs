//! The proxy's listeners in a pod: nobody gets through by dialling them, and none of the pod's processes takes their
//! place.

use std::net::SocketAddr;
use std::time::Duration;

use adit_tests::bed::wait_for;
use adit_tests::net::{self, Ending};
use socket2::{Domain, SockRef, Socket, Type};

use super::{MARKER, STRICT, asked, assert_never_in_plaintext, line_in_own_name, listening_ports};
use crate::world::{PORT, SOON, assert_refused, echo, is_answered, world};

#[test]
fn the_listeners_in_another_pod_are_out_of_reach() {
    let bed = world("others' listeners").start().unwrap();
    let (client, outsider) = (bed.pod("client"), bed.pod("outsider"));
    for other in ["neighbour", "server"] {
        let other = bed.pod(other);
        for port in listening_ports(other) {
            assert_refused(client, other.at(port));
            // From outside the mesh it is a port like any other, where nobody listens.
            assert_refused(outsider, other.at(port));
        }
    }
}

/// Tries to listen beside Adit at one of its own ports.
fn listen_beside(address: SocketAddr) -> std::io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, None)?;
    socket.set_reuse_address(true)?;
    SockRef::from(&socket).set_reuse_port(true)?;
    if address.is_ipv6() {
        socket.set_only_v6(false)?;
    }
    socket.bind(&address.into())?;
    socket.listen(64)?;
    Ok(socket)
}

#[test]
fn a_process_of_the_pod_cannot_join_the_listeners() {
    let bed = world("joining").policy(STRICT).start().unwrap();
    let server = bed.pod("server");
    let ports = listening_ports(server);
    let mut joined = server
        .serve(|stage| {
            let mut joined = Vec::new();
            let mut addresses = Vec::new();
            for port in ports {
                for text in ["127.0.0.1", "::ffff:127.0.0.1", "::", "0.0.0.0"] {
                    let address = SocketAddr::new(text.parse()?, port);
                    if let Ok(socket) = listen_beside(address) {
                        joined.push(socket);
                        addresses.push(address);
                    }
                }
            }
            stage.reached(())?;
            // What comes to such a socket has passed no policy.
            for socket in joined {
                std::thread::spawn(move || {
                    while let Ok((stream, _)) = socket.accept() {
                        let _ = stream.send(b"stolen");
                    }
                });
            }
            stage.reached(&addresses)?;
            stage.hold()
        })
        .unwrap();
    let addresses: Vec<SocketAddr> = joined.stage(SOON).unwrap();
    for attempt in 0..32 {
        let attempt = (
            attempt,
            bed.pod("outsider").run(|| net::attempt(server.at(PORT))).unwrap(),
        );
        assert!(attempt.1.was_refused(), "{attempt:?}");
    }
    // Beside the group, at other addresses of its port, there is nothing to be had.
    assert!(
        addresses
            .iter()
            .all(|address| !address.ip().to_canonical().is_loopback()),
        "{addresses:?}"
    );
}

#[test]
fn a_pod_that_destroys_the_listeners_cuts_off_itself_only() {
    let bed = world("destroyed").policy(STRICT).start().unwrap();
    let (client, neighbour, server) = (bed.pod("client"), bed.pod("neighbour"), bed.pod("server"));
    let _servers = [echo(server, PORT), echo(client, PORT)];
    let capture = bed.capture_link().unwrap();
    // One call takes but one of those that share a port, and only those that the socket lookup gives a stranger.
    let count = || {
        client
            .output("ss", &["-Hltn"])
            .map(|listeners| listeners.lines().count())
    };
    let before = count().unwrap();
    wait_for("some listeners' end", SOON, || {
        client.output("ss", &["-HK", "-ltn", "src", "[::ffff:127.0.0.1]"])?;
        Ok(count()? < before)
    })
    .unwrap();
    let way = || {
        let stream = net::connect_prepared(server.at(PORT), |_| Ok(()))?;
        stream.set_read_timeout(Some(Duration::from_millis(500)))?;
        Ok(stream)
    };
    if let Some(seen) = asked(client, way) {
        line_in_own_name(&bed, client, &seen);
    }
    assert_never_in_plaintext(&capture);
    // Nor does anything get in past the policy.
    let outcome = bed
        .pod("outsider")
        .run(|| net::ask_on(net::connect_prepared(client.at(PORT), |_| Ok(()))?, MARKER));
    assert!(!outcome.is_ok_and(|seen| seen.ending == Ending::Fin || !seen.text.is_empty()));
    assert!(is_answered(neighbour, server.at(PORT)));
}
