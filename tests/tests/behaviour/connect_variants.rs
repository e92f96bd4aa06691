//! However a program connects, it is captured or refused: never does it talk in plaintext.

use std::net::{SocketAddr, TcpStream};

use adit_tests::bed::{AccessLine, Bed};
use adit_tests::net::{self, Ending};

use crate::world::{PORT, SOON, ask, canonical, echo, source_line, world};

const MARKER: &str = "variant-marker-81c4";

/// Connects in a way that sends `first` along or not, and talks; the marker must not be on the wire. Gives whether it
/// was carried; if not, it was refused.
fn carried(bed: &Bed, way: impl Fn(SocketAddr, &[u8]) -> anyhow::Result<(TcpStream, bool)>) -> Vec<bool> {
    let (client, server) = (bed.pod("client"), bed.pod("server"));
    let _server = echo(server, PORT);
    let capture = bed.capture_link().unwrap();
    let outcomes = [server.at(PORT), server.at6(PORT)].map(|to| {
        let seen = client.run(|| {
            let (stream, sent) = way(to, MARKER.as_bytes())?;
            net::ask_on(stream, if sent { "" } else { MARKER })
        });
        let Ok(seen) = seen else { return false };
        if seen.ending != Ending::Fin {
            return false;
        }
        assert_eq!(seen.text, MARKER, "it was carried, so it must be answered");
        let address = canonical(seen.local).to_string();
        let wanted = |line: &AccessLine| line.has(&[("source.addr", &address), ("path", "hbone")]);
        bed.node("n1")
            .wait_for_access(&format!("of {address} with path=hbone"), SOON, wanted)
            .unwrap();
        true
    });
    assert!(!capture.contains(MARKER), "plaintext between the nodes");
    assert!(capture.is_complete());
    outcomes.to_vec()
}

#[test]
fn a_non_blocking_connect_is_captured() {
    let bed = world("non-blocking").start().unwrap();
    assert_eq!(
        carried(&bed, |to, _| Ok((net::connect_nonblocking(to)?, false))),
        [true, true]
    );
}

#[test]
fn a_connect_by_io_uring_is_captured() {
    let bed = world("io_uring").start().unwrap();
    assert_eq!(
        carried(&bed, |to, _| Ok((net::connect_uring(to)?, false))),
        [true, true]
    );
}

#[test]
fn a_connect_from_a_bound_socket_is_captured() {
    let bed = world("bound").start().unwrap();
    let client = bed.pod("client");
    let (v4, v6) = (client.at(0), client.at6(0));
    let from = |to: SocketAddr, port| SocketAddr::new(if to.is_ipv4() { v4.ip() } else { v6.ip() }, port);
    assert_eq!(
        carried(&bed, |to, _| Ok((net::connect_from(from(to, 0), to)?, false))),
        [true, true]
    );
    assert_eq!(
        carried(&bed, |to, _| Ok((net::connect_from(from(to, 4711), to)?, false))),
        [true, true]
    );
}

#[test]
fn a_fast_open_connect_is_captured_or_refused() {
    let bed = world("fast open").start().unwrap();
    carried(&bed, |to, first| Ok((net::connect_fastopen(to, first)?, true)));
}

#[test]
fn a_sendto_with_fast_open_is_captured_or_refused() {
    let bed = world("sendto").start().unwrap();
    carried(&bed, |to, first| Ok((net::send_fastopen(to, first)?, true)));
}

#[test]
fn multipath_tcp_is_captured_or_refused() {
    let bed = world("mptcp").start().unwrap();
    carried(&bed, |to, _| Ok((net::connect_mptcp(to)?, false)));
}

#[test]
fn a_fast_open_connect_in_a_pod_that_asks_for_it_by_sysctl_is_captured_or_refused() {
    let bed = world("fast open everywhere").start().unwrap();
    for pod in ["client", "server"] {
        bed.pod(pod)
            .run(|| Ok(std::fs::write("/proc/sys/net/ipv4/tcp_fastopen", "1543")?))
            .unwrap();
    }
    // 0x607: client and server without cookies, so that data travels in the very first SYN.
    carried(&bed, |to, first| Ok((net::connect_fastopen(to, first)?, true)));
}

#[test]
fn a_pod_whose_own_peers_are_asked_about_connects_as_any_other() {
    // Who connects to the client under which address is for the proxy to decide. What the client dials is not.
    let by_address = "{name: by-address, namespace: shop, scope: workload, selector: {app: client}, action: deny, \
        rules: [{from: [{ipBlocks: [203.0.113.0/24, '2001:db8::/32']}]}]}";
    let bed = world("asked about").policy(by_address).start().unwrap();
    let (client, server) = (bed.pod("client"), bed.pod("server"));
    let _server = echo(server, PORT);
    for to in [server.at(PORT), server.at6(PORT)] {
        let line = source_line(&bed, client, &ask(client, to));
        assert_eq!(line.get("path"), "hbone", "{line:?}");
        // Its end is the pod's own address and the port that it was bound to, as a search for a free port has it too.
        let from = match to {
            SocketAddr::V4(_) => client.at(4_567),
            SocketAddr::V6(_) => client.at6(4_567),
        };
        let seen = client.run(|| net::ask_on(net::connect_from(from, to)?, "bound"));
        assert_eq!(seen.unwrap().text, "bound");
    }
}
