//! A pod that calls itself.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};

use adit_tests::bed::ServiceSpec;

use crate::world::{PORT, ask, echo, world};

#[test]
fn a_pod_reaches_itself_by_loopback_by_its_addresses_and_by_its_service() {
    let bed = world("hairpin")
        .service(ServiceSpec::new("shop/self").port(80, PORT).endpoint("server"))
        .start()
        .unwrap();
    let server = bed.pod("server");
    let _server = echo(server, PORT);
    let loopback4: SocketAddr = (Ipv4Addr::LOCALHOST, PORT).into();
    let loopback6: SocketAddr = (Ipv6Addr::LOCALHOST, PORT).into();
    for address in [loopback4, loopback6, server.at(PORT), server.at6(PORT)] {
        let seen = ask(server, address);
        assert_eq!(seen.peer, address);
    }
    // No proxy is needed for that, and none has carried it.
    let lines = bed.node("n2").access_log();
    assert!(lines.is_empty(), "{lines:?}");

    for address in [bed.service("shop/self").at(80), bed.service("shop/self").at6(80)] {
        let seen = ask(server, address);
        assert_eq!(seen.peer, address);
    }
}

#[test]
fn a_pod_that_policy_closes_to_all_still_reaches_itself() {
    let bed = world("closed hairpin")
        .policy("{name: closed, namespace: shop, scope: namespace, action: deny, rules: [{to: [{ports: ['8080']}]}]}")
        .start()
        .unwrap();
    let server = bed.pod("server");
    let _server = echo(server, PORT);
    ask(server, (Ipv4Addr::LOCALHOST, PORT).into());
    ask(server, server.at(PORT));
    ask(server, server.at6(PORT));
}
