//! The capture is no ceiling: a pod's source ports serve as many connections as without Adit.

use std::io::Write;
use std::net::{SocketAddr, TcpStream};

use adit_tests::bed::{Pod, Stage};
use adit_tests::net::{self, read_text};

use crate::world::{LONG, PORT, world};

/// Echoes on every port of the range by one thread that holds all connections: each is answered with its first word.
fn answer_each(stage: &Stage, ports: std::ops::Range<u16>) -> anyhow::Result<()> {
    net::raise_open_files()?;
    let listeners = ports
        .map(|port| net::listen(("::", port)))
        .collect::<anyhow::Result<Vec<_>>>()?;
    stage.reached("listening")?;
    let threads: Vec<_> = listeners
        .into_iter()
        .map(|listener| {
            std::thread::spawn(move || -> anyhow::Result<()> {
                let mut open = Vec::new();
                loop {
                    let (mut stream, _) = listener.accept()?;
                    net::with_deadlines(&stream)?;
                    // The client writes as soon as it is connected.
                    let word = read_text(&mut stream, 6)?;
                    stream.write_all(word.as_bytes())?;
                    open.push(stream);
                }
            })
        })
        .collect();
    for thread in threads {
        thread
            .join()
            .map_err(|_| anyhow::anyhow!("a listener's thread panicked"))??;
    }
    Ok(())
}

fn narrow_ports(pod: &Pod, from: u16, to: u16) {
    let range = format!("{from} {to}");
    pod.run(|| Ok(std::fs::write("/proc/sys/net/ipv4/ip_local_port_range", &range)?))
        .unwrap();
}

fn holds_five_thousand(name: &str, server: &str) {
    const TOTAL: usize = 5_000;
    const FIRST: u16 = 7_000;
    let bed = world(name).start().unwrap();
    let (client, server) = (bed.pod("client"), bed.pod(server));
    narrow_ports(client, 40_000, 40_999);
    let _server = server.serve(|stage| answer_each(stage, FIRST..FIRST + 6)).unwrap();
    let destinations: Vec<SocketAddr> = (FIRST..FIRST + 6).map(|port| server.at(port)).collect();
    let held = client
        .spawn(|| {
            net::raise_open_files()?;
            let mut open: Vec<TcpStream> = Vec::with_capacity(TOTAL);
            for number in 0..TOTAL {
                let mut stream = net::connect(destinations[number % destinations.len()])?;
                write!(stream, "{number:06}")?;
                let word = read_text(&mut stream, 6)?;
                anyhow::ensure!(
                    word == format!("{number:06}"),
                    "connection {number} was answered {word}"
                );
                open.push(stream);
            }
            Ok(open.len())
        })
        .unwrap();
    assert_eq!(held.join(LONG).unwrap(), TOTAL);
}

#[test]
fn with_a_thousand_ports_a_pod_holds_five_thousand_connections_to_six_destinations_across_nodes() {
    holds_five_thousand("five thousand across", "server");
}

#[test]
fn with_a_thousand_ports_a_pod_holds_five_thousand_connections_to_six_destinations_on_one_node() {
    holds_five_thousand("five thousand on one", "neighbour");
}

#[test]
fn one_source_port_serves_sixty_four_destinations_at_once() {
    const FIRST: u16 = 7_100;
    const SOURCE: u16 = 4_567;
    let bed = world("one port").start().unwrap();
    let (client, server) = (bed.pod("client"), bed.pod("server"));
    let _server = server.serve(|stage| answer_each(stage, FIRST..FIRST + 64)).unwrap();
    let destinations: Vec<SocketAddr> = (FIRST..FIRST + 64).map(|port| server.at(port)).collect();
    let source = client.at(SOURCE);
    let ports = client
        .run(|| {
            let mut open = Vec::new();
            let mut ports = Vec::new();
            for (number, to) in destinations.iter().enumerate() {
                let mut stream = net::connect_from(source, *to)?;
                write!(stream, "{number:06}")?;
                anyhow::ensure!(
                    read_text(&mut stream, 6)? == format!("{number:06}"),
                    "connection {number}"
                );
                ports.push(stream.local_addr()?.port());
                open.push(stream);
            }
            Ok(ports)
        })
        .unwrap();
    assert_eq!(ports, vec![SOURCE; 64]);
}

#[test]
fn connections_that_ended_a_moment_ago_do_not_use_up_the_ports() {
    let bed = world("time wait").start().unwrap();
    let (client, server) = (bed.pod("client"), bed.pod("server"));
    narrow_ports(client, 40_000, 40_099);
    narrow_ports(server, 40_000, 40_099);
    let _server = server
        .serve(|stage| net::name_forever(stage, ("::", PORT), "server"))
        .unwrap();
    let to = server.at(PORT);
    // The server closes first, so the client's port is free at once; the proxies' legs must not keep theirs either.
    let done = client
        .spawn(|| {
            for number in 0..1_000 {
                let attempt = net::attempt(to)?;
                anyhow::ensure!(attempt.text == "server", "connection {number}: {attempt:?}");
            }
            Ok(())
        })
        .unwrap();
    done.join(LONG).unwrap();
}
