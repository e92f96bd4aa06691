//! Peers outside the mesh are reached and reach in as before, in plaintext, unless policy says otherwise.

use adit_tests::bed::{AccessLine, PodSpec};

use crate::world::{PORT, SOON, ask, echo, source_line, world};

#[test]
fn a_pod_of_the_mesh_reaches_one_outside_in_plaintext() {
    let bed = world("out")
        .pod("n2", PodSpec::new("stranger").unknown())
        .start()
        .unwrap();
    let client = bed.pod("client");
    for name in ["outsider", "stranger"] {
        let outside = bed.pod(name);
        let _server = echo(outside, PORT);
        for address in [outside.at(PORT), outside.at6(PORT)] {
            let line = source_line(&bed, client, &ask(client, address));
            // Whether a stranger within the cluster's ranges is outside the mesh is for the proxy to say.
            let path = if name == "outsider" { "direct" } else { "plain" };
            assert_eq!((line.get("path"), line.get("how")), (path, "fin"), "{line:?}");
            assert_eq!(line.get("source.identity"), client.identity(), "{line:?}");
            assert_eq!(line.get("destination.identity"), "", "nothing was proven: {line:?}");
            assert_eq!(line.get("destination.addr"), address.to_string(), "{line:?}");
        }
    }
}

#[test]
fn a_peer_outside_the_mesh_reaches_a_pod_in_it_without_an_identity() {
    let bed = world("in")
        .pod("n2", PodSpec::new("stranger").unknown())
        .start()
        .unwrap();
    for name in ["server", "client"] {
        let server = bed.pod(name);
        let _server = echo(server, PORT);
        for outside in [bed.pod("outsider"), bed.pod("stranger")] {
            let seen = ask(outside, server.at(PORT));
            ask(outside, server.at6(PORT));
            let source = seen.local.to_string();
            let wanted = |line: &AccessLine| line.has(&[("reporter", "destination"), ("source.addr", &source)]);
            let line = bed
                .node(server.node())
                .wait_for_access("of the peer outside", SOON, wanted)
                .unwrap();
            assert_eq!((line.get("path"), line.get("how")), ("direct", "fin"), "{line:?}");
            assert_eq!(line.get("source.identity"), "", "nothing was proven: {line:?}");
            assert_eq!(line.get("destination.workload"), server.workload(), "{line:?}");
        }
    }
}

#[test]
fn the_node_itself_reaches_a_pod_in_the_mesh() {
    let bed = world("node").start().unwrap();
    let server = bed.pod("server");
    let _server = echo(server, PORT);
    let to = server.at(PORT);
    for node in bed.nodes() {
        let seen = node
            .inside(|| adit_tests::net::ask(to, "from the node"))
            .unwrap()
            .unwrap();
        assert_eq!(seen.text, "from the node");
    }
}

#[test]
fn peers_outside_the_mesh_do_not_notice_adit_among_themselves() {
    let bed = world("among themselves")
        .pod("n1", PodSpec::new("stranger").unknown())
        .start()
        .unwrap();
    let (stranger, outsider) = (bed.pod("stranger"), bed.pod("outsider"));
    let _servers = [echo(stranger, PORT), echo(outsider, PORT)];
    ask(stranger, outsider.at(PORT));
    ask(outsider, stranger.at6(PORT));
    for node in bed.nodes() {
        let foreign = |line: &AccessLine| line.get("source.addr").starts_with(&stranger.v4().to_string());
        assert!(!node.access_log().iter().any(foreign), "{:?}", node.access_log());
    }
}

#[test]
fn udp_is_left_alone() {
    let bed = world("udp").start().unwrap();
    let (client, server) = (bed.pod("client"), bed.pod("server"));
    let running = server
        .serve(|stage| {
            let socket = std::net::UdpSocket::bind(("::", 5353))?;
            socket.set_read_timeout(Some(SOON))?;
            stage.reached("bound")?;
            let mut buffer = [0; 64];
            let (count, peer) = socket.recv_from(&mut buffer)?;
            socket.send_to(&buffer[..count], peer)?;
            Ok(peer.ip().to_canonical())
        })
        .unwrap();
    let to = server.at(5353);
    let answer = client
        .run(|| {
            let socket = std::net::UdpSocket::bind("0.0.0.0:0")?;
            socket.set_read_timeout(Some(SOON))?;
            socket.connect(to)?;
            socket.send(b"over UDP")?;
            let mut buffer = [0; 64];
            let count = socket.recv(&mut buffer)?;
            Ok(String::from_utf8_lossy(&buffer[..count]).into_owned())
        })
        .unwrap();
    assert_eq!(answer, "over UDP");
    assert_eq!(running.join(SOON).unwrap(), client.v4());
}
