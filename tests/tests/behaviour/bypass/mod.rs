//! No way around: what a pod with root, CAP_NET_ADMIN and CAP_NET_RAW in its own namespace may try, as
//! `docs/bypass.md` lists it. It never gets another's identity, and never past a policy that asks for one.

mod lifetime;
mod meetings;
mod namespaces;
mod ports;
mod programs;
mod raw;
mod sockets;
mod tunnel_port;

use std::collections::BTreeSet;
use std::net::{SocketAddr, TcpStream};

use adit_tests::bed::{AccessLine, Bed, Capture, Pod};
use adit_tests::net::{self, Ending, Seen};

use crate::world::{SOON, canonical};

/// What must not be readable between the nodes.
const MARKER: &str = "bypass-marker-5d07";

/// Only the accounts of `client` and `neighbour` may reach the pods of `shop`: who has no identity may not.
const STRICT: &str = "
    name: strict
    namespace: shop
    scope: namespace
    action: allow
    rules:
      - from:
          - principals: [cluster.local/ns/shop/sa/client, cluster.local/ns/shop/sa/neighbour]
";

/// The pod sends the marker to an echo server by a stream that it gets in this way. Gives what it saw if it was answered
/// in full, none if it was refused or cut off.
fn asked(pod: &Pod, way: impl FnOnce() -> anyhow::Result<TcpStream>) -> Option<Seen> {
    let seen = pod.run(|| net::ask_on(way()?, MARKER)).ok()?;
    (seen.ending == Ending::Fin && seen.text == MARKER).then_some(seen)
}

/// The line of the proxy of the pod's node on this connection, which must be in the pod's own name and in a tunnel.
fn line_in_own_name(bed: &Bed, pod: &Pod, seen: &Seen) -> AccessLine {
    let line = source_line_of(bed, pod.node(), seen.local);
    assert_eq!(line.get("source.identity"), pod.identity(), "{line:?}");
    assert_eq!(line.get("path"), "hbone", "{line:?}");
    line
}

/// The line that the proxy of that node wrote of a connection from this address.
fn source_line_of(bed: &Bed, node: &str, from: SocketAddr) -> AccessLine {
    let address = canonical(from).to_string();
    let wanted = |line: &AccessLine| line.has(&[("reporter", "source"), ("source.addr", &address)]);
    bed.node(node)
        .wait_for_access(&format!("reporter=source source.addr={address}"), SOON, wanted)
        .unwrap()
}

/// The lines of the destination's proxy on connections to that pod.
fn lines_about(bed: &Bed, server: &Pod) -> Vec<AccessLine> {
    let workload = server.workload();
    let lines = bed.node(server.node()).access_log().into_iter();
    lines
        .filter(|line| line.has(&[("reporter", "destination"), ("destination.workload", &workload)]))
        .collect()
}

fn assert_never_in_plaintext(capture: &Capture) {
    assert_eq!(capture.count(MARKER), 0, "plaintext between the nodes");
    assert!(capture.is_complete());
}

/// The ports at which something listens in the pod on a loopback address: in a pod that runs nothing, Adit's.
fn listening_ports(pod: &Pod) -> BTreeSet<u16> {
    let listeners = pod.output("ss", &["-Hltn"]).unwrap();
    let ports: BTreeSet<u16> = listeners
        .lines()
        .filter_map(|line| line.split_whitespace().nth(3)?.rsplit(':').next()?.parse().ok())
        .collect();
    assert!(!ports.is_empty(), "{listeners}");
    ports
}
