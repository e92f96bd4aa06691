//! Which path a connection takes: the tunnel across nodes, none on one node.

use crate::world::{PORT, ask, destination_line, echo, source_line, world};

#[test]
fn across_nodes_a_connection_takes_the_tunnel() {
    let bed = world("tunnel").start().unwrap();
    let (client, server) = (bed.pod("client"), bed.pod("server"));
    let _server = echo(server, PORT);
    for address in [server.at(PORT), server.at6(PORT)] {
        let line = source_line(&bed, client, &ask(client, address));
        assert_eq!(line.get("path"), "hbone", "{line:?}");
        assert_eq!(line.get("destination.addr"), address.to_string(), "{line:?}");
        assert!(line.get("tunnel").ends_with(":15008"), "{line:?}");
    }
    assert_eq!(destination_line(&bed, client, server).get("path"), "hbone");
    // And back: the pods of both nodes are clients and servers alike.
    let _client = echo(client, PORT);
    let line = source_line(&bed, server, &ask(server, client.at(PORT)));
    assert_eq!(line.get("path"), "hbone", "{line:?}");
}

#[test]
fn on_one_node_a_connection_takes_no_tunnel_but_has_its_identities() {
    let bed = world("local").start().unwrap();
    let (client, neighbour) = (bed.pod("client"), bed.pod("neighbour"));
    let _server = echo(neighbour, PORT);
    for address in [neighbour.at(PORT), neighbour.at6(PORT)] {
        let line = source_line(&bed, client, &ask(client, address));
        assert_eq!((line.get("path"), line.get("how")), ("direct", "fin"), "{line:?}");
        assert_eq!(line.get("source.identity"), client.identity(), "{line:?}");
        assert_eq!(line.get("destination.identity"), neighbour.identity(), "{line:?}");
        assert_eq!(line.get("tunnel"), "", "{line:?}");
    }
}

#[test]
fn connections_to_one_peer_share_tunnels() {
    let bed = world("pool").start().unwrap();
    let (client, server) = (bed.pod("client"), bed.pod("server"));
    let _server = echo(server, PORT);
    for _ in 0..50 {
        ask(client, server.at(PORT));
    }
    let handshakes = bed
        .node("n1")
        .metrics()
        .unwrap()
        .sum("adit_handshake_seconds_count", &[("reporter", "source")]);
    assert!(
        (1.0..=8.0).contains(&handshakes),
        "{handshakes} handshakes for 50 connections"
    );
}
