//! Each end proves its own identity.

use std::collections::BTreeSet;

use adit_tests::bed::{AccessLine, Bed, PodSpec};

use crate::world::{PORT, SOON, ask, destination_line, echo, source_line, world};

#[test]
fn both_ends_prove_their_identity_and_both_logs_say_so() {
    let bed = world("identity").start().unwrap();
    let (client, server) = (bed.pod("client"), bed.pod("server"));
    let _server = echo(server, PORT);
    let seen = ask(client, server.at(PORT));

    let source = source_line(&bed, client, &seen);
    let destination = destination_line(&bed, client, server);
    for line in [&source, &destination] {
        assert_eq!(line.get("path"), "hbone", "{line:?}");
        assert_eq!(line.get("source.workload"), client.workload(), "{line:?}");
        assert_eq!(line.get("source.identity"), client.identity(), "{line:?}");
        assert_eq!(line.get("destination.workload"), server.workload(), "{line:?}");
        assert_eq!(line.get("destination.identity"), server.identity(), "{line:?}");
        assert_eq!(line.number("bytes_sent"), seen.text.len() as u64, "{line:?}");
        assert_eq!(line.number("bytes_received"), seen.text.len() as u64, "{line:?}");
        assert_eq!(line.get("how"), "fin", "{line:?}");
        assert!(!line.get("certificate").is_empty(), "{line:?}");
    }
    assert_ne!(
        source.get("certificate"),
        destination.get("certificate"),
        "each end shows its own certificate"
    );
}

#[test]
fn on_a_node_with_three_accounts_each_pod_shows_its_own_certificate() {
    let bed = Bed::builder("three accounts")
        .node("n1")
        .node("n2")
        .pod("n1", PodSpec::new("one").account("a/one"))
        .pod("n1", PodSpec::new("two").account("b/two"))
        .pod("n1", PodSpec::new("three").account("b/three"))
        .pod("n1", PodSpec::new("three-again").account("b/three"))
        .pod("n2", PodSpec::new("server").account("shop/server"))
        .start()
        .unwrap();
    let server = bed.pod("server");
    let _server = echo(server, PORT);
    let mut serials = BTreeSet::new();
    for name in ["one", "two", "three", "three-again"] {
        let client = bed.pod(name);
        let seen = ask(client, server.at(PORT));
        let line = source_line(&bed, client, &seen);
        assert_eq!(line.get("source.identity"), client.identity());
        // What the far end verified, not what this end claims.
        assert_eq!(
            destination_line(&bed, client, server).get("source.identity"),
            client.identity()
        );
        serials.insert(line.get("certificate").to_owned());
    }
    assert_eq!(serials.len(), 3, "one certificate for each account: {serials:?}");

    let state = bed.node("n1").get("/debug/state").unwrap().body;
    for serial in &serials {
        assert!(
            state.contains(serial.as_str()),
            "certificate {serial} is in the state: {state}"
        );
    }
    let elsewhere = server.identity();
    assert!(!bed.ca_log().text().is_empty(), "the CA keeps an audit log");
    assert!(
        !bed.node("n1").state().unwrap()["certificates"]
            .to_string()
            .contains(&elsewhere),
        "n1 holds no certificate of a pod that is not its own: {state}"
    );
    for node in bed.nodes() {
        assert!(
            !node.get("/debug/state").unwrap().body.contains("PRIVATE"),
            "no key leaves the process"
        );
    }
}

#[test]
fn a_client_of_the_same_node_is_known_by_its_namespace_not_by_its_address() {
    let bed = world("by namespace").start().unwrap();
    let (client, neighbour) = (bed.pod("client"), bed.pod("neighbour"));
    let _server = echo(neighbour, PORT);
    // The client takes on the address that the mesh file gives to the server's pod, and talks from it.
    let claimed = bed.pod("server").v4();
    client
        .output("ip", &["address", "add", &format!("{claimed}/32"), "dev", "lo"])
        .unwrap();
    let to = neighbour.at(PORT);
    let attempt = client.run(|| {
        let stream = adit_tests::net::connect_from((claimed, 0).into(), to)?;
        adit_tests::net::ask_on(stream, "who am I?")
    });
    // Refused or carried, but never as somebody else.
    let wrong = |line: &AccessLine| line.get("source.identity") == bed.pod("server").identity();
    if attempt.is_ok() {
        let own = |line: &AccessLine| line.get("source.identity") == client.identity();
        bed.node("n1")
            .wait_for_access("with the client's identity", SOON, own)
            .unwrap();
    }
    assert!(
        !bed.node("n1").access_log().iter().any(wrong),
        "{:?}",
        bed.node("n1").access_log()
    );
}
