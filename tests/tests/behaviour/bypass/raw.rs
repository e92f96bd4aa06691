//! Packets that no socket of the kernel's sends: not captured, and so without identity where they arrive.

use std::net::{SocketAddr, SocketAddrV4, SocketAddrV6};
use std::time::Duration;

use adit_tests::bed::{AccessLine, Bed, Pod};
use adit_tests::net::{self, Ending, Handmade, Wire};
use socket2::{Domain, Protocol, Socket, Type};

use super::STRICT;
use crate::world::{PORT, SOON, echo, world};

const PATIENCE: Duration = Duration::from_millis(800);

/// The client shakes hands by hand and says something; none if that fails.
fn ask_by_hand(client: &Pod, wire: Wire, source: u16, to: &Pod, text: &str) -> Option<(String, Ending)> {
    // The kernel resets what it has no socket for. A route to nowhere for such packets keeps it quiet.
    let quiet = format!(
        "echo 0 > /proc/sys/net/ipv4/conf/all/rp_filter
         echo 0 > /proc/sys/net/ipv4/conf/eth0/rp_filter
         ip rule add pref 0 ipproto tcp sport {source} blackhole"
    );
    client.output("sh", &["-ec", &quiet]).unwrap();
    let from = SocketAddrV4::new(client.v4(), source);
    let to = SocketAddrV4::new(to.v4(), PORT);
    client
        .run(|| {
            let mut connection = Handmade::new(wire, from, to)?;
            connection.shake_hands(PATIENCE)?;
            connection.ask(text, PATIENCE)
        })
        .inspect_err(|error| eprintln!("{error:#}"))
        .ok()
}

fn strangers_line(bed: &Bed, server: &Pod, source: SocketAddr) -> AccessLine {
    let (workload, source) = (server.workload(), source.to_string());
    let wanted = |line: &AccessLine| line.has(&[("destination.workload", &workload), ("source.addr", &source)]);
    let line = bed
        .node(server.node())
        .wait_for_access(&format!("of {source}"), SOON, wanted)
        .unwrap();
    assert_eq!(
        (line.get("path"), line.get("source.identity")),
        ("direct", ""),
        "{line:?}"
    );
    line
}

fn ways(client: &Pod, to: &Pod) -> [Wire; 2] {
    let [a, b, c, _] = client.v4().octets();
    let next_hop = if to.node() == client.node() {
        to.v4()
    } else {
        [a, b, c, 1].into()
    };
    [Wire::Raw, Wire::Packet(next_hop)]
}

#[test]
fn handmade_packets_are_refused_where_an_identity_is_asked_for() {
    let bed = world("by hand, strict").policy(STRICT).start().unwrap();
    let client = bed.pod("client");
    let mut source = 5_550;
    for server in ["server", "neighbour"] {
        let server = bed.pod(server);
        let _server = echo(server, PORT);
        for wire in ways(client, server) {
            source += 1;
            let heard = ask_by_hand(client, wire, source, server, "by hand");
            assert_eq!(heard, None, "{wire:?} to {}: hands were shaken", server.name());
            let line = strangers_line(&bed, server, client.at(source));
            assert_eq!(line.get("how"), "policy", "{line:?}");
        }
    }
}

#[test]
fn handmade_packets_to_a_pod_open_to_all_arrive_in_plaintext_and_without_identity() {
    let bed = world("by hand, open").start().unwrap();
    let client = bed.pod("client");
    let server = bed.pod("server");
    let _server = echo(server, PORT);
    let capture = bed.capture_link().unwrap();
    let heard = ask_by_hand(client, Wire::Raw, 5_561, server, "by hand, in plaintext").unwrap();
    assert_eq!(heard, ("by hand, in plaintext".to_owned(), Ending::Fin));
    strangers_line(&bed, server, client.at(5_561));
    // What the kernel leaves no choice about.
    assert!(capture.contains("by hand, in plaintext"));
}

#[test]
fn a_handmade_syn_under_another_pods_address_is_answered_to_that_pod() {
    let bed = world("by hand, spoofed").start().unwrap();
    let (client, neighbour, server) = (bed.pod("client"), bed.pod("neighbour"), bed.pod("server"));
    let _server = echo(server, PORT);
    let from = SocketAddrV4::new(neighbour.v4(), 5_571);
    let to = SocketAddrV4::new(server.v4(), PORT);
    let shaken = client.run(|| Handmade::new(Wire::Raw, from, to)?.shake_hands(PATIENCE));
    assert!(shaken.is_err(), "{shaken:?}");
    let lines = bed.node("n2").access_log();
    assert!(
        lines.iter().all(|line| line.get("source.identity").is_empty()),
        "{lines:?}"
    );
}

/// What a server that takes data with the SYN hears first when `outsider` sends it such a SYN under the server's own
/// address: the kernel has no martian sources in IPv6. Then one who may connect says something.
fn heard_first(name: &str, fast_open: &str) -> String {
    let bed = world(name).policy(STRICT).build().unwrap();
    let (client, outsider) = (bed.pod("client"), bed.pod("outsider"));
    let server = bed.pod("server");
    server
        .run(|| Ok(std::fs::write("/proc/sys/net/ipv4/tcp_fastopen", fast_open)?))
        .unwrap();
    bed.start_all().unwrap();
    let heard = server
        .serve(|stage| {
            let listener = net::listen(("::", PORT))?;
            net::fastopen_listen(&listener)?;
            stage.reached("listening")?;
            let (stream, _) = listener.accept()?;
            net::with_deadlines(&stream)?;
            Ok(net::read_to_end(&stream).0)
        })
        .unwrap();
    let at = |port| SocketAddrV6::new(server.v6(), port, 0, 0);
    outsider
        .run(|| net::syn_with_data(at(5_581), at(PORT), b"blind"))
        .unwrap();
    // Whoever comes first has the server's only accept.
    std::thread::sleep(Duration::from_millis(200));
    let _ = client.run(|| net::ask(server.at(PORT), "from the client").map(drop));
    heard.join(SOON).unwrap()
}

#[test]
fn a_blind_syn_under_the_pods_own_address_gets_nowhere() {
    // Client and server, with cookies; and the same without.
    for (name, fast_open) in [("own address, cookies", "3"), ("own address, no cookies", "515")] {
        assert_eq!(heard_first(name, fast_open), "from the client", "{name}");
    }
}

#[test]
fn sctp_cannot_be_had_or_is_left_alone_as_udp_is() {
    let bed = world("sctp").start().unwrap();
    let made = bed.pod("client").run(|| {
        let sctp = Protocol::from(libc::IPPROTO_SCTP);
        Ok(Socket::new(Domain::IPV4, Type::STREAM, Some(sctp))
            .map_err(|error| error.raw_os_error())
            .err())
    });
    let refused = made.unwrap();
    if let Some(errno) = refused {
        assert_eq!(errno, Some(libc::EPROTONOSUPPORT));
    }
}
