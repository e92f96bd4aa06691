//! What a pod excludes is left alone, in and out; everything else of it is captured as ever.

use std::net::SocketAddr;

use adit_tests::bed::{AccessLine, Bed, ExcludeDoc, Node, Pod, Running, ServiceSpec, wait_for};
use adit_tests::net;
use aya::maps::lpm_trie::LpmTrie;
use aya::maps::{Map, MapData};

use crate::world::{
    LONG, PORT, SOON, ask, assert_refused, destination_line, echo, is_answered, source_line, talks, world,
};

/// The port that is excluded.
const PLAIN: u16 = 8081;
const MARKER: &str = "marker-of-an-excluded-connection";

/// Admits whoever has proven an identity, and nobody else.
const STRICT: &str = "{name: strict, namespace: shop, scope: namespace, action: deny, \
    rules: [{from: [{notPrincipals: ['*']}]}]}";
/// Admits nobody.
const CLOSED: &str = "{name: closed, namespace: shop, scope: namespace, action: deny, rules: [{}]}";

fn texts(texts: &[&str]) -> Vec<String> {
    texts.iter().map(|text| (*text).to_owned()).collect()
}

fn inbound(ports: &[&str]) -> ExcludeDoc {
    ExcludeDoc {
        inbound_ports: texts(ports),
        ..ExcludeDoc::default()
    }
}

fn outbound(ports: &[&str], cidrs: &[String]) -> ExcludeDoc {
    ExcludeDoc {
        outbound_ports: texts(ports),
        outbound_cidrs: cidrs.to_vec(),
        ..ExcludeDoc::default()
    }
}

fn exclude(bed: &Bed, pod: &str, exclude: Option<ExcludeDoc>) {
    bed.update(|mesh| mesh.workload(pod).unwrap().exclude = exclude)
        .unwrap();
}

/// Whether any proxy has told of a connection to that address.
fn was_logged(bed: &Bed, to: SocketAddr) -> bool {
    let to = to.to_string();
    let lines = bed.nodes().iter().flat_map(Node::access_log);
    lines.into_iter().any(|line| line.get("destination.addr") == to)
}

/// How many entries the kernel has on the node.
fn entries(node: &Node) -> usize {
    let pin = node.pins_dir().unwrap().join("maps/adit_exclusions");
    let map = Map::LpmTrie(MapData::from_pin(pin).unwrap());
    let map: LpmTrie<MapData, [u8; 28], u32> = map.try_into().unwrap();
    map.keys().count()
}

#[test]
fn what_a_pod_dials_at_an_excluded_port_is_a_strangers_and_the_rest_is_captured() {
    let bed = world("excluded ports").policy(STRICT).build().unwrap();
    exclude(&bed, "client", Some(outbound(&["8081", "8090-8099"], &[])));
    bed.start_all().unwrap();
    let pod = |name: &str| bed.pod(name);
    let (client, neighbour, server, outsider) = (pod("client"), pod("neighbour"), pod("server"), pod("outsider"));
    let _servers: Vec<_> = [server, neighbour, outsider]
        .iter()
        .flat_map(|pod| [PORT, PLAIN, 8095].map(|port| echo(pod, port)))
        .collect();
    for to in [server, neighbour] {
        for port in [PLAIN, 8095] {
            assert_refused(client, to.at(port));
            assert_refused(client, to.at6(port));
        }
    }
    // Who asks for no identity is reached, and nobody tells of it.
    ask(client, outsider.at(PLAIN));
    ask(client, outsider.at6(8095));
    for to in [server.at(PORT), server.at6(PORT)] {
        let line = source_line(&bed, client, &ask(client, to));
        assert_eq!(line.get("path"), "hbone", "{line:?}");
    }
    for to in [neighbour.at(PORT), outsider.at(PORT)] {
        let line = source_line(&bed, client, &ask(client, to));
        assert_eq!(line.get("path"), "direct", "{line:?}");
    }
    let own = |line: &AccessLine| line.has(&[("reporter", "source"), ("source.workload", "shop/client")]);
    let lines = bed.node("n1").access_log();
    let ports = lines.iter().filter(|line| own(line)).map(|line| {
        let addr: SocketAddr = line.get("destination.addr").parse().unwrap();
        addr.port()
    });
    assert!(ports.into_iter().all(|port| port == PORT), "{lines:?}");
    // Its neighbour has not asked for it.
    let line = source_line(&bed, neighbour, &ask(neighbour, server.at(PLAIN)));
    assert_eq!(line.get("path"), "hbone", "{line:?}");
}

#[test]
fn no_verdict_on_its_identity_refuses_what_a_pod_excludes() {
    let policy = "{name: not-client, namespace: shop, scope: namespace, action: deny, \
        rules: [{from: [{serviceAccounts: [client]}]}]}";
    let bed = world("excluded verdicts").policy(policy).build().unwrap();
    exclude(&bed, "client", Some(outbound(&["8081"], &[])));
    bed.start_all().unwrap();
    let (client, neighbour, server) = (bed.pod("client"), bed.pod("neighbour"), bed.pod("server"));
    let _servers = [neighbour, server].map(|pod| [PORT, PLAIN].map(|port| echo(pod, port)));
    for to in [neighbour, server] {
        assert_refused(client, to.at(PORT));
        ask(client, to.at(PLAIN));
        let line = destination_line_at(&bed, client, to, PLAIN);
        assert_eq!(line.get("source.identity"), "", "{line:?}");
    }
}

/// The line of the server's node of what came from the client to that port.
fn destination_line_at(bed: &Bed, client: &Pod, server: &Pod, port: u16) -> AccessLine {
    let (from, to) = (format!("{}:", client.v4()), server.at(port).to_string());
    let wanted = |line: &AccessLine| {
        line.has(&[("reporter", "destination"), ("destination.addr", &to)])
            && line.get("source.addr").starts_with(&from)
    };
    let node = bed.node(server.node());
    node.wait_for_access("of a stranger", SOON, wanted).unwrap()
}

#[test]
fn what_a_pod_dials_within_an_excluded_range_is_left_alone_in_both_families() {
    let bed = world("excluded ranges").build().unwrap();
    let server = bed.pod("server");
    let ranges = [format!("{}/32", server.v4()), format!("{}/128", server.v6())];
    exclude(&bed, "client", Some(outbound(&[], &ranges)));
    bed.start_all().unwrap();
    let (client, neighbour) = (bed.pod("client"), bed.pod("neighbour"));
    let _servers = [server, neighbour].map(|pod| echo(pod, PORT));
    let capture = bed.capture_link().unwrap();
    for to in [server.at(PORT), server.at6(PORT)] {
        let seen = client.run(|| net::ask(to, MARKER)).unwrap();
        assert_eq!(seen.text, MARKER);
    }
    let line = destination_line(&bed, client, server);
    assert_eq!(
        (line.get("path"), line.get("source.identity")),
        ("direct", ""),
        "{line:?}"
    );
    assert_eq!(capture.count(MARKER), 4, "twice in plaintext, there and back");
    let line = source_line(&bed, client, &ask(client, neighbour.at(PORT)));
    assert_eq!(line.get("destination.identity"), neighbour.identity(), "{line:?}");
    let line = source_line(&bed, neighbour, &ask(neighbour, server.at(PORT)));
    assert_eq!(line.get("path"), "hbone", "{line:?}");
}

#[test]
fn a_pod_that_excludes_all_it_dials_is_still_captured_for_what_comes_in() {
    let bed = world("excluded all").policy(STRICT).build().unwrap();
    let all = outbound(&["1-65535"], &texts(&["0.0.0.0/0", "::/0"]));
    exclude(&bed, "client", Some(all));
    bed.start_all().unwrap();
    let (client, neighbour, outsider) = (bed.pod("client"), bed.pod("neighbour"), bed.pod("outsider"));
    let _servers = [client, neighbour, outsider].map(|pod| echo(pod, PORT));
    let node = bed.node("n1");
    // Whether a pod is captured is tested by a connection of its own.
    let captured = || {
        let capture = node.state()?["capture"].clone();
        let is_so = |pod: &serde_json::Value| pod["name"] == "client" && pod["capture"] == "captured";
        Ok(capture.as_array().is_some_and(|pods| pods.iter().any(is_so)))
    };
    wait_for("the pod's test", SOON, captured).unwrap();
    ask(client, outsider.at(PORT));
    assert_refused(client, neighbour.at(PORT));
    // Within the pod all is as ever.
    ask(client, client.at(PORT));
    ask(client, client.at6(PORT));
    ask(neighbour, client.at(PORT));
    assert_refused(outsider, client.at(PORT));
}

#[test]
fn an_excluded_port_is_open_to_everybody_and_no_other_is() {
    let service = ServiceSpec::new("shop/web").port(80, PLAIN);
    let bed = world("excluded inbound")
        .policy(STRICT)
        .service(service.endpoint("neighbour").endpoint("server"))
        .build()
        .unwrap();
    for name in ["neighbour", "server"] {
        exclude(&bed, name, Some(inbound(&["8081"])));
    }
    bed.start_all().unwrap();
    let pod = |name: &str| bed.pod(name);
    let (client, neighbour, server, outsider) = (pod("client"), pod("neighbour"), pod("server"), pod("outsider"));
    let _servers = [neighbour, server].map(|pod| [PORT, PLAIN].map(|port| echo(pod, port)));
    for to in [neighbour, server] {
        ask(outsider, to.at(PLAIN));
        ask(outsider, to.at6(PLAIN));
        assert_refused(outsider, to.at(PORT));
    }
    // From a pod of the mesh on another node: in plaintext.
    for to in [server.at(PLAIN), server.at6(PLAIN)] {
        let line = source_line(&bed, client, &ask(client, to));
        assert_eq!((line.get("path"), line.get("tunnel")), ("plain", ""), "{line:?}");
        assert_eq!(line.get("source.identity"), client.identity(), "{line:?}");
        assert_eq!(line.get("destination.identity"), "", "nothing was proven: {line:?}");
    }
    let line = source_line(&bed, client, &ask(client, server.at(PORT)));
    assert_eq!(line.get("path"), "hbone", "{line:?}");
    // From one of the same node: left alone.
    for to in [neighbour.at(PLAIN), neighbour.at6(PLAIN)] {
        ask(client, to);
    }
    let line = source_line(&bed, client, &ask(client, neighbour.at(PORT)));
    assert_eq!(line.get("path"), "direct", "{line:?}");
    assert!(!was_logged(&bed, neighbour.at(PLAIN)) && !was_logged(&bed, neighbour.at6(PLAIN)));
    // By a service: to the endpoint that is chosen, in plaintext.
    for _ in 0..8 {
        let line = source_line(&bed, client, &ask(client, bed.service("shop/web").at(80)));
        assert_eq!(
            (line.get("path"), line.get("service")),
            ("plain", "shop/web"),
            "{line:?}"
        );
    }

    // Nobody is asked for leave, and what more ports there are changes nothing but who looks.
    bed.update(|mesh| mesh.policies.push(CLOSED.to_owned())).unwrap();
    exclude(&bed, "neighbour", Some(inbound(&["8081", "20000-20100"])));
    let closed = || Ok(!is_answered(client, server.at(PORT)) && !is_answered(client, neighbour.at(PORT)));
    wait_for("the policy", SOON, closed).unwrap();
    let looked_at = || {
        let seen = ask(client, neighbour.at(PLAIN));
        let lines = bed.node("n1").access_log();
        let local = seen.local.to_string();
        Ok(lines
            .iter()
            .any(|line| line.has(&[("source.addr", &local), ("path", "plain")])))
    };
    wait_for("the proxy to look", SOON, looked_at).unwrap();
    for from in [client, outsider] {
        for to in [neighbour, server] {
            ask(from, to.at(PLAIN));
            assert_refused(from, to.at(PORT));
        }
    }
}

#[test]
fn what_is_excluded_later_or_no_more_concerns_new_connections_only() {
    let bed = world("excluded later").policy(STRICT).start().unwrap();
    let pod = |name: &str| bed.pod(name);
    let (client, neighbour, server, outsider) = (pod("client"), pod("neighbour"), pod("server"), pod("outsider"));
    let _servers = [neighbour, server, outsider].map(|pod| echo(pod, PLAIN));
    assert_refused(outsider, server.at(PLAIN));
    let path = |to: SocketAddr| source_line(&bed, client, &ask(client, to)).get("path").to_owned();
    assert_eq!(path(server.at(PLAIN)), "hbone");
    let go_on = |open: &mut Vec<Running<()>>| {
        for running in open {
            running.proceed().unwrap();
            running.stage::<()>(SOON).unwrap();
        }
    };
    let mut open = vec![
        talks(client, server.at(PLAIN), 4),
        talks(client, neighbour.at(PLAIN), 4),
    ];
    for name in ["neighbour", "server"] {
        exclude(&bed, name, Some(inbound(&["8081"])));
    }
    for to in [neighbour, server] {
        wait_for("the port to be open", SOON, || Ok(is_answered(outsider, to.at(PLAIN)))).unwrap();
    }
    wait_for("plaintext", SOON, || Ok(path(server.at(PLAIN)) == "plain")).unwrap();
    go_on(&mut open);
    let mut later = vec![
        talks(outsider, server.at(PLAIN), 3),
        talks(outsider, neighbour.at(PLAIN), 3),
        talks(client, server.at(PLAIN), 3),
        talks(client, neighbour.at(PLAIN), 3),
    ];

    for name in ["neighbour", "server"] {
        exclude(&bed, name, None);
    }
    for to in [neighbour, server] {
        wait_for("the port to be closed", SOON, || {
            Ok(!is_answered(outsider, to.at(PLAIN)))
        })
        .unwrap();
        assert_refused(outsider, to.at(PLAIN));
    }
    wait_for("the tunnel", SOON, || Ok(path(server.at(PLAIN)) == "hbone")).unwrap();
    go_on(&mut open);
    go_on(&mut later);

    // The same of what is dialled.
    exclude(&bed, "client", Some(outbound(&["8081"], &[])));
    wait_for("a stranger", SOON, || Ok(!is_answered(client, server.at(PLAIN)))).unwrap();
    go_on(&mut open);
    go_on(&mut later);
    exclude(&bed, "client", None);
    wait_for("the tunnel again", SOON, || Ok(is_answered(client, server.at(PLAIN)))).unwrap();
    for running in open.into_iter().chain(later) {
        running.proceed().unwrap();
        running.join(LONG).unwrap();
    }
    for node in bed.nodes() {
        assert_eq!(entries(node), 0, "{}", node.name());
    }
}

#[test]
fn a_bad_value_excludes_nothing_and_the_log_says_what_to_write() {
    let bed = world("excluded badly").policy(STRICT).start().unwrap();
    let (outsider, server) = (bed.pod("outsider"), bed.pod("server"));
    let _servers = [PORT, PLAIN].map(|port| echo(server, port));
    for (bad, reason) in [
        (
            inbound(&["8081", "http"]),
            r#"inboundPorts: \"http\" is neither a port from 1 to 65535 nor a range of ports; write them like 9090 or 8000-8010"#,
        ),
        (
            inbound(&["8081", "15008"]),
            "inboundPorts: port 15008 is where tunnels come in",
        ),
        (
            outbound(&[], &texts(&["10.1.2.3/8"])),
            r#"outboundCidrs: \"10.1.2.3/8\" has bits set beyond its prefix; write 10.0.0.0/8"#,
        ),
    ] {
        exclude(&bed, "server", Some(bad));
        bed.node("n2").wait_for_log(reason, SOON).unwrap();
        assert_refused(outsider, server.at(PLAIN));
    }
    exclude(&bed, "server", Some(inbound(&["8081"])));
    wait_for("the port to be open", SOON, || {
        Ok(is_answered(outsider, server.at(PLAIN)))
    })
    .unwrap();
    assert_refused(outsider, server.at(PORT));
}

#[test]
fn what_is_excluded_outlives_the_proxy_and_goes_with_the_pod() {
    let bed = world("excluded alone").policy(STRICT).build().unwrap();
    exclude(&bed, "client", Some(outbound(&["8081"], &[])));
    exclude(&bed, "server", Some(inbound(&["8081"])));
    bed.start_all().unwrap();
    let (client, server, outsider) = (bed.pod("client"), bed.pod("server"), bed.pod("outsider"));
    let _servers = [server, outsider].map(|pod| [PORT, PLAIN].map(|port| echo(pod, port)));
    let (near, far) = (bed.node("n1"), bed.node("n2"));
    let holds = || {
        ask(client, outsider.at(PLAIN));
        ask(outsider, server.at(PLAIN));
        assert_refused(outsider, server.at(PORT));
    };
    holds();
    for node in [near, far] {
        node.kill();
    }
    holds();
    assert_refused(client, server.at(PORT));
    // The one and the two addresses of the test; and the port alone.
    assert_eq!((entries(near), entries(far)), (3, 1));
    // The next ones take it over, and what is no longer wanted goes.
    exclude(&bed, "client", None);
    for node in [near, far] {
        node.start().unwrap();
    }
    ask(outsider, server.at(PLAIN));
    assert_refused(outsider, server.at(PORT));
    let line = source_line(&bed, client, &ask(client, outsider.at(PLAIN)));
    assert_eq!(line.get("path"), "direct", "{line:?}");
    assert_eq!((entries(near), entries(far)), (0, 1));
    bed.update(|mesh| mesh.workloads.retain(|workload| workload.name != "server"))
        .unwrap();
    far.wait_for_log("pod shop/server has left", SOON).unwrap();
    assert_eq!(entries(far), 0);
}
