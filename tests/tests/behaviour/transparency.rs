//! Both ends see the addresses that they would see without Adit.

use std::net::{Ipv4Addr, SocketAddr};

use adit_tests::bed::{Bed, Pod, ServiceSpec};
use adit_tests::net::{self, Seen};

use crate::world::{PORT, SOON, canonical, world};

/// One connection; gives what the client and what the server saw.
fn talk(client: &Pod, server: &Pod, listen: SocketAddr, dial: SocketAddr) -> (Seen, Seen) {
    let running = server.serve(|stage| net::echo_once(stage, listen)).unwrap();
    let at_client = client.run(|| net::ask(dial, "which addresses?")).unwrap();
    (at_client, running.join(SOON).unwrap())
}

fn assert_transparent(client: &Pod, server: &Pod, listen: SocketAddr, dial: SocketAddr) {
    let what = format!(
        "{} dials {dial} of {}, which listens on {listen}",
        client.name(),
        server.name()
    );
    let (at_client, at_server) = talk(client, server, listen, dial);
    assert_eq!(at_client.peer, dial, "the client's getpeername: {what}");
    assert!(
        client.addresses().contains(&at_client.local.ip().to_canonical()),
        "the client's getsockname: {what}"
    );
    assert_eq!(
        at_client.local.is_ipv4(),
        dial.is_ipv4(),
        "the family of the client's getsockname: {what}"
    );
    assert_eq!(
        canonical(at_server.peer),
        canonical(at_client.local),
        "what accept showed: {what}"
    );
    assert_eq!(
        canonical(at_server.local).ip(),
        canonical(dial).ip(),
        "the server's getsockname: {what}"
    );
    assert_eq!(
        at_server.local.port(),
        dial.port(),
        "the port of the server's getsockname: {what}"
    );
    assert_eq!(
        at_server.local.is_ipv4(),
        listen.is_ipv4(),
        "the family of the server's socket: {what}"
    );
}

fn assert_transparent_in_all_families(bed: &Bed, client: &str, server: &str) {
    let (client, server) = (bed.pod(client), bed.pod(server));
    let v4_any: SocketAddr = (Ipv4Addr::UNSPECIFIED, PORT).into();
    let any: SocketAddr = "[::]:8080".parse().unwrap();
    let mapped = SocketAddr::new(server.v4().to_ipv6_mapped().into(), PORT);
    assert_transparent(client, server, v4_any, server.at(PORT));
    assert_transparent(client, server, any, server.at(PORT));
    assert_transparent(client, server, any, server.at6(PORT));
    assert_transparent(client, server, v4_any, mapped);
    assert_transparent(client, server, server.at(PORT), server.at(PORT));
    assert_transparent(client, server, server.at6(PORT), server.at6(PORT));
}

#[test]
fn across_nodes_both_ends_see_the_true_addresses() {
    let bed = world("across").start().unwrap();
    assert_transparent_in_all_families(&bed, "client", "server");
}

#[test]
fn on_one_node_both_ends_see_the_true_addresses() {
    let bed = world("one node").start().unwrap();
    assert_transparent_in_all_families(&bed, "client", "neighbour");
}

#[test]
fn with_a_peer_outside_the_mesh_both_ends_see_the_true_addresses() {
    let bed = world("outside").start().unwrap();
    assert_transparent_in_all_families(&bed, "outsider", "server");
    assert_transparent_in_all_families(&bed, "outsider", "client");
    // Where the client is in the mesh, the server outside sees at least its address.
    let (client, outsider) = (bed.pod("client"), bed.pod("outsider"));
    for (dial, own) in [
        (outsider.at(PORT), client.at(0).ip()),
        (outsider.at6(PORT), client.at6(0).ip()),
    ] {
        let (at_client, at_server) = talk(client, outsider, "[::]:8080".parse().unwrap(), dial);
        assert_eq!((at_client.peer, at_client.local.ip()), (dial, own));
        assert_eq!(canonical(at_server.peer).ip(), own);
    }
}

#[test]
fn the_client_of_a_service_sees_the_address_that_it_dialled() {
    let bed = world("service")
        .service(ServiceSpec::new("shop/web").port(80, PORT).endpoint("server"))
        .start()
        .unwrap();
    let (client, server, service) = (bed.pod("client"), bed.pod("server"), bed.service("shop/web"));
    for dial in [service.at(80), service.at6(80)] {
        let (at_client, at_server) = talk(client, server, "[::]:8080".parse().unwrap(), dial);
        assert_eq!(at_client.peer, dial);
        assert_eq!(canonical(at_server.peer), canonical(at_client.local));
        assert!(
            server.addresses().contains(&canonical(at_server.local).ip()),
            "{at_server:?}"
        );
    }
}
