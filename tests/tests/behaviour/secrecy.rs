//! What pods of the mesh say to each other is never readable between the nodes.

use std::time::Duration;

use adit_tests::bed::{ServiceSpec, wait_for};
use adit_tests::net;

use crate::world::{PORT, echo, world};

#[test]
fn a_marker_text_is_never_on_the_wire_between_pods_of_the_mesh() {
    const MARKER: &str = "never-on-the-wire-3f9a";
    let bed = world("secrecy")
        .service(ServiceSpec::new("shop/web").port(80, PORT).endpoint("server"))
        .start()
        .unwrap();
    let (client, server, outsider) = (bed.pod("client"), bed.pod("server"), bed.pod("outsider"));
    let _servers = [echo(server, PORT), echo(client, PORT), echo(outsider, PORT)];
    let capture = bed.capture_link().unwrap();
    let cases = [
        (client, server.at(PORT)),
        (client, server.at6(PORT)),
        (client, bed.service("shop/web").at(80)),
        (client, bed.service("shop/web").at6(80)),
        (server, client.at(PORT)),
        (server, client.at6(PORT)),
    ];
    for (from, to) in cases {
        let seen = from.run(|| net::ask(to, MARKER)).unwrap();
        assert_eq!(seen.text, MARKER, "{} to {to}", from.name());
    }
    assert!(capture.packets() > 20, "the connections went over the link");
    assert_eq!(capture.count(MARKER), 0, "plaintext between the nodes");
    assert!(capture.is_complete());

    // The same text to a peer outside the mesh is there: the capture would have seen it.
    client.run(|| net::ask(outsider.at(PORT), MARKER)).unwrap();
    wait_for("the marker", Duration::from_secs(5), || Ok(capture.count(MARKER) >= 2)).unwrap();
}

#[test]
fn a_marker_text_is_not_on_the_wire_while_a_proxy_starts_or_after_it_has_died() {
    const MARKER: &str = "not-even-then-6b20";
    let bed = world("starting").start().unwrap();
    let (client, server) = (bed.pod("client"), bed.pod("server"));
    let _server = echo(server, PORT);
    let capture = bed.capture_link().unwrap();
    // The far end's proxy dies: what is enrolled at this end stays in the tunnel or is refused.
    bed.node("n2").kill();
    let attempt = client.run(|| net::ask(server.at(PORT), MARKER));
    assert!(
        attempt.as_ref().map_or(true, |seen| seen.text.is_empty()),
        "{attempt:?}"
    );
    bed.node("n2").start().unwrap();
    let answered = || {
        Ok(client
            .run(|| net::ask(server.at(PORT), MARKER))
            .is_ok_and(|seen| seen.text == MARKER))
    };
    wait_for("the far end to be back", Duration::from_secs(8), answered).unwrap();
    assert_eq!(capture.count(MARKER), 0, "plaintext between the nodes");
    assert!(capture.is_complete());
}
