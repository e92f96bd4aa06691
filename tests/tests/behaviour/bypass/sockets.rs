//! Options of sockets, and unusual ways to connect.

use std::io::Read;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

use adit_tests::bed::{Bed, Pod, PodSpec};
use adit_tests::net::{self, Ending, Seen};
use socket2::{Domain, Socket, Type};

use super::{MARKER, STRICT, asked, assert_never_in_plaintext, line_in_own_name, lines_about, source_line_of};
use crate::world::{PORT, echo, is_answered, world};

/// From `client` to `server`, over both families: each must be answered in the client's own name.
fn assert_captured(bed: &Bed, way: impl Fn(SocketAddr) -> anyhow::Result<TcpStream>) {
    let (client, server) = (bed.pod("client"), bed.pod("server"));
    let _server = echo(server, PORT);
    let capture = bed.capture_link().unwrap();
    for to in [server.at(PORT), server.at6(PORT)] {
        let seen = asked(client, || way(to)).unwrap_or_else(|| panic!("{to} does not answer"));
        line_in_own_name(bed, client, &seen);
    }
    assert_never_in_plaintext(&capture);
}

fn shell(pod: &Pod, script: &str) {
    pod.output("sh", &["-ec", script]).unwrap();
}

#[test]
fn a_mark_on_the_socket_changes_nothing() {
    let bed = world("mark").start().unwrap();
    // The last two are those by which proxies of other meshes know their own sockets.
    for mark in [1, 0x539, 0x53a] {
        assert_captured(&bed, |to| net::connect_prepared(to, |socket| socket.set_mark(mark)));
    }
}

#[test]
fn a_socket_bound_to_a_device_is_captured_or_refused() {
    let bed = world("device").start().unwrap();
    let (client, server) = (bed.pod("client"), bed.pod("server"));
    let _server = echo(server, PORT);
    let capture = bed.capture_link().unwrap();
    for device in ["eth0", "lo"] {
        let seen = asked(client, || {
            net::connect_prepared(server.at(PORT), |socket| socket.bind_device(Some(device.as_bytes())))
        });
        if let Some(seen) = seen {
            line_in_own_name(&bed, client, &seen);
        }
    }
    assert_never_in_plaintext(&capture);
}

#[test]
fn a_polled_io_uring_is_captured() {
    let bed = world("polled").start().unwrap();
    assert_captured(&bed, net::connect_uring_polled);
}

#[test]
fn a_mapped_address_is_captured() {
    let bed = world("mapped").start().unwrap();
    assert_captured(&bed, |to| {
        let SocketAddr::V4(v4) = to else {
            return net::connect(to);
        };
        let socket = Socket::new(Domain::IPV6, Type::STREAM, None)?;
        let mapped = SocketAddr::new(v4.ip().to_ipv6_mapped().into(), v4.port());
        net::connect_patiently(&socket, mapped)?;
        Ok(socket.into())
    });
}

/// How `client` takes the neighbour's address for its source.
fn as_neighbour(to: SocketAddr, neighbour: SocketAddr) -> anyhow::Result<TcpStream> {
    net::connect_prepared(to, |socket| {
        socket.set_ip_transparent_v4(true)?;
        socket.set_freebind_v4(true)?;
        socket.bind(&neighbour.into())
    })
}

#[test]
fn another_pods_address_as_the_source_gains_neither_its_identity_nor_what_its_address_may() {
    let bed = world("spoofed source")
        .pod("n1", PodSpec::new("nearby").account("shop/nearby"))
        .start()
        .unwrap();
    let (client, neighbour) = (bed.pod("client"), bed.pod("neighbour"));
    let (nearby, server) = (bed.pod("nearby"), bed.pod("server"));
    let _servers = [echo(nearby, PORT), echo(server, PORT)];
    let capture = bed.capture_link().unwrap();
    // First without a route for the answers, then with the address as the pod's own.
    for round in ["a foreign address", "an address taken over"] {
        for to in [server.at(PORT), nearby.at(PORT)] {
            let seen = asked(client, || as_neighbour(to, neighbour.at(0)));
            assert_eq!(seen, None, "{round}, to {to}");
        }
        shell(client, &format!("ip address replace {}/32 dev lo", neighbour.v4()));
    }
    assert_never_in_plaintext(&capture);
    let lines = bed.nodes().iter().flat_map(|node| node.access_log());
    for line in lines.filter(|line| line.get("source.addr").starts_with(&neighbour.v4().to_string())) {
        assert_ne!(line.get("source.identity"), neighbour.identity(), "{line:?}");
    }
    // The neighbour itself is not disturbed.
    assert!(is_answered(neighbour, server.at(PORT)));
}

#[test]
fn a_source_route_leads_nowhere() {
    let bed = world("source route").start().unwrap();
    let (client, server) = (bed.pod("client"), bed.pod("server"));
    let _servers = [echo(server, PORT), echo(client, PORT)];
    let capture = bed.capture_link().unwrap();
    // The hop gets the packets: directly, or in place of the pod's own addresses, which are left alone.
    let cases = [
        (server.at(PORT), server.v4()),
        (client.at(PORT), server.v4()),
        (([127, 0, 0, 1], PORT).into(), server.v4()),
        (server.at(PORT), bed.pod("neighbour").v4()),
    ];
    let outcomes = client
        .run(|| {
            let tries = cases.map(|(to, hop)| {
                std::thread::spawn(move || {
                    let prepare = |socket: &Socket| net::source_route(socket, hop);
                    net::connect_prepared(to, prepare)
                        .and_then(|stream| net::ask_on(stream, MARKER))
                        .ok()
                })
            });
            Ok(tries.map(|handle| handle.join().unwrap()).to_vec())
        })
        .unwrap();
    for (seen, (to, hop)) in outcomes.iter().zip(cases) {
        assert_eq!(*seen, None::<Seen>, "{to} by way of {hop}");
    }
    assert_never_in_plaintext(&capture);
    assert!(lines_about(&bed, server).is_empty(), "{:?}", lines_about(&bed, server));
}

#[test]
fn a_pod_that_routes_its_own_address_away_reaches_nobody() {
    let bed = world("routed away").start().unwrap();
    let (client, neighbour, server) = (bed.pod("client"), bed.pod("neighbour"), bed.pod("server"));
    let _servers = [echo(server, PORT), echo(neighbour, PORT)];
    let capture = bed.capture_link().unwrap();
    // Captured connects go to the pod's own address: off to a neighbour with them.
    let (own, hop) = (client.v4(), neighbour.v4());
    let route = format!(
        "ip rule add pref 100 lookup local; ip rule delete pref 0
         ip rule add pref 0 to {own} lookup 100; ip route add {own} via {hop} table 100"
    );
    shell(client, &route);
    for to in [server.at(PORT), neighbour.at(PORT)] {
        assert_eq!(asked(client, || net::connect_prepared(to, |_| Ok(()))), None, "{to}");
    }
    assert_never_in_plaintext(&capture);
    let reached = [lines_about(&bed, server), lines_about(&bed, neighbour)].concat();
    assert!(reached.is_empty(), "{reached:?}");
}

#[test]
fn each_connect_of_a_socket_that_is_disconnected_between_is_decided_anew() {
    let bed = world("anew").start().unwrap();
    let (client, server) = (bed.pod("client"), bed.pod("server"));
    let _servers = [echo(server, PORT), echo(client, PORT)];
    let capture = bed.capture_link().unwrap();
    let inside: SocketAddr = ([127, 0, 0, 1], PORT).into();
    let (locals, peers) = client
        .run(|| {
            let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
            socket.set_read_timeout(Some(net::STUCK))?;
            let (mut locals, mut peers) = (Vec::new(), Vec::new());
            for to in [server.at(PORT), inside, server.at(PORT)] {
                net::connect_patiently(&socket, to)?;
                let mut stream: TcpStream = socket.try_clone()?.into();
                std::io::Write::write_all(&mut stream, MARKER.as_bytes())?;
                let text = net::read_text(&mut stream, MARKER.len())?;
                anyhow::ensure!(text == MARKER, "{to} answers {text}");
                locals.push(stream.local_addr()?);
                peers.push(stream.peer_addr()?);
                net::disconnect(&socket)?;
            }
            Ok((locals, peers))
        })
        .unwrap();
    assert_eq!(peers, [server.at(PORT), inside, server.at(PORT)]);
    for local in [locals[0], locals[2]] {
        let line = source_line_of(&bed, "n1", local);
        assert!(
            line.has(&[("path", "hbone"), ("source.identity", &client.identity())]),
            "{line:?}"
        );
    }
    assert_never_in_plaintext(&capture);
}

#[test]
fn a_connection_set_up_by_repair_reaches_nobody() {
    let bed = world("repair").start().unwrap();
    let (client, server) = (bed.pod("client"), bed.pod("server"));
    let _server = echo(server, PORT);
    let capture = bed.capture_link().unwrap();
    let seen = asked(client, || {
        let stream = net::connect_prepared(server.at(PORT), |socket| {
            net::repair(socket, true)?;
            socket.bind(&client.at(4_800).into())
        })?;
        net::repair(&stream, false)?;
        Ok(stream)
    });
    assert_eq!(seen, None);
    assert_never_in_plaintext(&capture);
    assert!(lines_about(&bed, server).is_empty());
}

#[test]
fn data_in_the_first_syn_does_not_get_past_the_policy_of_a_server_with_fast_open() {
    let bed = world("fast open server").policy(STRICT).build().unwrap();
    // Client and server without cookies, and every listener of the pod, the proxy's too.
    for pod in ["server", "outsider"] {
        shell(bed.pod(pod), "echo 1543 > /proc/sys/net/ipv4/tcp_fastopen");
    }
    bed.start_all().unwrap();
    let server = bed.pod("server");
    let heard = server
        .serve(|stage| {
            let listener = TcpListener::bind(("0.0.0.0", PORT))?;
            net::fastopen_listen(&listener)?;
            stage.reached("listening")?;
            let (mut stream, _) = listener.accept()?;
            stream.set_read_timeout(Some(Duration::from_secs(1)))?;
            let mut text = String::new();
            stream.read_to_string(&mut text)?;
            Ok(text)
        })
        .unwrap();
    for _ in 0..2 {
        let ending = bed.pod("outsider").run(|| {
            let stream = net::connect_fastopen(server.at(PORT), MARKER.as_bytes())?;
            Ok(net::read_to_end(&stream))
        });
        assert!(!matches!(ending, Ok((_, Ending::Fin))), "{ending:?}");
    }
    // The first that the server hears is from one who may.
    bed.pod("client")
        .run(|| net::ask(server.at(PORT), "from the client"))
        .unwrap();
    assert_eq!(heard.join(net::STUCK).unwrap(), "from the client");
}
