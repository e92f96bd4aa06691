//! Envoy opens tunnels to pods behind Adit.

use std::net::Ipv4Addr;
use std::time::Duration;

use adit_tests::bed::{AccessLine, Bed, Pod, PodSpec, Spawned};
use adit_tests::net::{self, Ending};

use super::config::{self, Way};
use super::talk::Pair;
use super::{add_envoy, start, svid};
use crate::world::SOON;

const PORT: u16 = 8080;
const CLOSED: u16 = 8081;

/// Envoy's ports: to the server; the same over IPv6; to a port of it on which nobody listens; to a pod whose policy
/// denies; to the server, of which another identity is expected.
const OPEN_WAY: u16 = 7001;
const OPEN_WAY6: u16 = 7002;
const CLOSED_WAY: u16 = 7003;
const DENIED_WAY: u16 = 7004;
const STRANGE_WAY: u16 = 7005;

fn world(name: &str) -> (Bed, Spawned) {
    let bed = Bed::builder(name)
        .node("n1")
        .node("n2")
        .pod("n2", PodSpec::new("server").account("apps/server"))
        .pod("n2", PodSpec::new("guarded").account("apps/guarded"))
        .policy(
            "
            name: no-envoy
            namespace: apps
            scope: workload
            selector: {app: guarded}
            action: deny
            rules:
              - from:
                  - principals: [cluster.local/ns/peers/sa/envoy]
            ",
        );
    let bed = add_envoy(bed, "n1").unwrap();
    let (envoy, server, guarded) = (bed.pod("envoy"), bed.pod("server"), bed.pod("guarded"));
    let (server_is, guarded_is) = (server.identity(), guarded.identity());
    let ways = [
        (OPEN_WAY, server.at(PORT), &server_is),
        (OPEN_WAY6, server.at6(PORT), &server_is),
        (CLOSED_WAY, server.at(CLOSED), &server_is),
        (DENIED_WAY, guarded.at(PORT), &guarded_is),
        (STRANGE_WAY, server.at(PORT), &guarded_is),
    ];
    let ports = ways.map(|(listen, ..)| listen);
    let ways = ways.map(|(listen, to, identity)| Way { listen, to, identity });
    let config = config::client(&svid(&bed, envoy).unwrap(), &ways);
    let envoy = start(&bed, envoy, &config, &ports).unwrap();
    (bed, envoy)
}

/// Through Envoy to the server.
fn pair(bed: &Bed, way: u16) -> Pair<'_> {
    Pair {
        client: bed.pod("envoy"),
        to: (Ipv4Addr::LOCALHOST, way).into(),
        server: bed.pod("server"),
        at: (std::net::Ipv6Addr::UNSPECIFIED, PORT).into(),
    }
}

/// What Adit wrote of Envoy's connection to the pod.
fn line(bed: &Bed, to: &Pod, how: &str) -> AccessLine {
    let (peer, workload) = (bed.pod("envoy").identity(), to.workload());
    let wanted = |line: &AccessLine| {
        line.has(&[
            ("reporter", "destination"),
            ("path", "hbone"),
            ("source.identity", &peer),
            ("destination.workload", &workload),
            ("how", how),
        ])
    };
    bed.node("n2")
        .wait_for_access(&format!("how={how} from Envoy to {workload}"), SOON, wanted)
        .unwrap()
}

/// Envoy's client gets nothing from this way; gives Envoy's line of it.
fn assert_no_way(bed: &Bed, envoy: &Spawned, way: u16) -> String {
    let to = (Ipv4Addr::LOCALHOST, way).into();
    let attempt = bed.pod("envoy").run(|| net::attempt(to)).unwrap();
    assert_eq!((attempt.connect, attempt.text.as_str()), (None, ""), "{attempt:?}");
    assert_ne!(attempt.ending, Some(Ending::Stuck), "{attempt:?}");
    assert!(attempt.took_ms < 2_000, "{attempt:?}");
    envoy
        .log()
        .wait_for(&format!("way={way} "), SOON + Duration::from_secs(10))
        .unwrap()
}

#[test]
fn sixty_four_mebibytes_each_way_at_once_arrive_whole_from_and_at_envoys_client() {
    const MUCH: u64 = 64 << 20;
    let (bed, _envoy) = world("envoy client bulk");
    for way in [OPEN_WAY, OPEN_WAY6] {
        pair(&bed, way).both_send(MUCH);
    }
    let line = line(&bed, bed.pod("server"), "fin");
    assert_eq!(
        (line.number("bytes_sent"), line.number("bytes_received")),
        (MUCH, MUCH),
        "{line:?}"
    );
}

#[test]
fn either_side_may_end_first_when_envoys_client_talks_to_a_pod() {
    let (bed, _envoy) = world("envoy client half-close");
    pair(&bed, OPEN_WAY).client_ends_first(1 << 20);
    pair(&bed, OPEN_WAY).server_ends_first(1 << 20);
    assert_eq!(line(&bed, bed.pod("server"), "fin").number("bytes_sent"), 1 << 20);
}

#[test]
fn envoys_client_is_told_of_a_closed_port_and_of_a_policys_denial() {
    let (bed, envoy) = world("envoy client refusal");
    let closed = assert_no_way(&bed, &envoy, CLOSED_WAY);
    assert!(closed.contains("503"), "{closed}");
    line(&bed, bed.pod("server"), "refused");

    let denied = assert_no_way(&bed, &envoy, DENIED_WAY);
    assert!(denied.contains("401"), "{denied}");
    let line = line(&bed, bed.pod("guarded"), "policy");
    assert!(line.get("detail").contains("apps/no-envoy"), "{line:?}");

    let strange = assert_no_way(&bed, &envoy, STRANGE_WAY);
    assert!(
        strange.contains("CERTIFICATE_VERIFY_FAILED"),
        "Envoy checks whom it has reached: {strange}"
    );
}
