//! Envoy serves tunnels that Adit opens for its pods.

use std::net::{Ipv4Addr, SocketAddr};

use adit_tests::bed::{AccessLine, Bed, Pod, PodSpec, Spawned};
use adit_tests::net;

use super::config;
use super::talk::Pair;
use super::{TUNNELS, add_envoy, start, svid};
use crate::world::SOON;

const PORT: u16 = 8080;
const CLOSED: u16 = 8081;

fn world(name: &str) -> (Bed, Spawned) {
    let bed = Bed::builder(name)
        .node("n1")
        .node("n2")
        .pod("n1", PodSpec::new("client").account("apps/client"))
        .pod("n1", PodSpec::new("banned").account("apps/banned"));
    let bed = add_envoy(bed, "n2").unwrap();
    let (envoy, banned) = (bed.pod("envoy"), bed.pod("banned").identity());
    let config = config::server(
        &svid(&bed, envoy).unwrap(),
        &envoy.addresses(),
        &[PORT, CLOSED],
        &banned,
    );
    let envoy = start(&bed, envoy, &config, &[TUNNELS]).unwrap();
    (bed, envoy)
}

/// From the client by its own means to Envoy's pod.
fn pair(bed: &Bed, to: SocketAddr) -> Pair<'_> {
    Pair {
        client: bed.pod("client"),
        to,
        server: bed.pod("envoy"),
        at: (Ipv4Addr::LOCALHOST, PORT).into(),
    }
}

/// What Adit wrote of the pod's connection to Envoy's.
fn line(bed: &Bed, from: &Pod, to: SocketAddr, how: &str) -> AccessLine {
    let (source, to) = (from.workload(), to.to_string());
    let wanted = |line: &AccessLine| {
        line.has(&[
            ("reporter", "source"),
            ("path", "hbone"),
            ("source.workload", &source),
            ("destination.addr", &to),
            ("how", how),
        ])
    };
    bed.node("n1")
        .wait_for_access(&format!("how={how} from {source} to {to}"), SOON, wanted)
        .unwrap()
}

#[test]
fn sixty_four_mebibytes_each_way_at_once_arrive_whole_from_and_behind_envoys_server() {
    const MUCH: u64 = 64 << 20;
    let (bed, envoy) = world("envoy server bulk");
    let (client, to) = (bed.pod("client"), bed.pod("envoy"));
    for to in [to.at(PORT), to.at6(PORT)] {
        pair(&bed, to).both_send(MUCH);
        let line = line(&bed, client, to, "fin");
        assert_eq!(
            (line.number("bytes_sent"), line.number("bytes_received")),
            (MUCH, MUCH),
            "{line:?}"
        );
        assert_eq!(
            line.get("destination.identity"),
            bed.pod("envoy").identity(),
            "{line:?}"
        );
        let seen = envoy.log().wait_for(&format!("authority={to} "), SOON).unwrap();
        assert!(
            seen.contains(&format!("peer={} asked=CONNECT/HTTP/2 ", client.identity())),
            "{seen}"
        );
        assert!(seen.contains(" answer=200 "), "{seen}");
        assert!(
            seen.contains(&line.get("source.addr").to_owned()),
            "the client's address in forwarded: {seen}"
        );
    }
}

#[test]
fn a_pod_may_end_its_side_before_envoys_server_answers() {
    let (bed, _envoy) = world("envoy server half-close");
    let to = bed.pod("envoy").at(PORT);
    pair(&bed, to).client_ends_first(1 << 20);
    assert_eq!(line(&bed, bed.pod("client"), to, "fin").number("bytes_sent"), 1 << 20);
}

/// A server's end is the stream's end for Envoy, which says both in one breath: END_STREAM, RST_STREAM. What came before
/// must arrive as a whole. It is little, because Envoy throws away what it has not sent at that moment, with or without
/// END_STREAM, and resets the stream with an internal error.
#[test]
fn a_server_behind_envoy_that_closes_after_its_answer_loses_nothing_to_a_slow_reader() {
    let (bed, _envoy) = world("envoy server closes");
    let to = bed.pod("envoy").at(PORT);
    for bytes in [0, 5, 16 << 10] {
        pair(&bed, to).server_closes_on_a_slow_reader(bytes);
    }
    pair(&bed, to).server_closes_on_a_talker();
}

#[test]
fn a_pod_is_told_of_a_closed_port_and_of_a_denial_behind_envoys_server() {
    let (bed, envoy) = world("envoy server refusal");
    let (client, banned, to) = (bed.pod("client"), bed.pod("banned"), bed.pod("envoy"));
    let refused = |pod: &Pod, to: SocketAddr| {
        let attempt = pod.run(|| net::attempt(to)).unwrap();
        assert!(attempt.was_refused(), "{} to {to}: {attempt:?}", pod.name());
        assert!(attempt.took_ms < 2_000, "{attempt:?}");
    };
    refused(client, to.at(CLOSED));
    let line_of_closed = line(&bed, client, to.at(CLOSED), "refused");
    assert_eq!(line_of_closed.get("phase"), "request", "{line_of_closed:?}");
    let seen = envoy
        .log()
        .wait_for(&format!("authority={} ", to.at(CLOSED)), SOON)
        .unwrap();
    assert!(seen.contains(" answer=503 "), "{seen}");

    refused(banned, to.at(PORT));
    line(&bed, banned, to.at(PORT), "policy");
    let seen = envoy
        .log()
        .wait_for(&format!("peer={} ", banned.identity()), SOON)
        .unwrap();
    assert!(seen.contains(" answer=403 "), "{seen}");

    // Nothing of it lingers: the pod that may goes on to be served.
    pair(&bed, to.at(PORT)).client_ends_first(1 << 10);
}
