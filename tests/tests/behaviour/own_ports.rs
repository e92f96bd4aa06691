//! An application may use any port, also those that Istio's and Adit's proxies are known for.

use std::net::{Ipv4Addr, SocketAddr};

use adit_tests::bed::{Pod, Running};
use adit_tests::net::{self, Ending};

use crate::world::{ask_name, name, world};

const PORTS: [u16; 9] = [15_000, 15_001, 15_006, 15_008, 15_012, 15_020, 15_021, 15_053, 15_090];

fn listen_on_all(pod: &Pod) -> Vec<Running<()>> {
    PORTS.iter().map(|port| name(pod, *port)).collect()
}

fn assert_reached_within_the_pod(pod: &Pod) {
    for port in PORTS {
        let loopback: SocketAddr = (Ipv4Addr::LOCALHOST, port).into();
        for address in [loopback, pod.at(port), pod.at6(port)] {
            assert_eq!(ask_name(pod, address).unwrap(), pod.name(), "{address}");
        }
    }
}

#[test]
fn an_application_that_had_the_ports_before_enrolment_keeps_them() {
    let bed = world("before").build().unwrap();
    let server = bed.pod("server");
    let _applications = listen_on_all(server);
    bed.start_all().unwrap();
    assert_reached_within_the_pod(server);
}

#[test]
fn an_application_that_takes_the_ports_after_enrolment_gets_them() {
    let bed = world("after").start().unwrap();
    let server = bed.pod("server");
    let _applications = listen_on_all(server);
    assert_reached_within_the_pod(server);
}

#[test]
fn pods_of_the_mesh_reach_an_application_on_these_ports_or_are_refused() {
    let bed = world("from others").start().unwrap();
    let server = bed.pod("server");
    let _applications = listen_on_all(server);
    for port in PORTS {
        let attempt = bed.pod("client").run(|| net::attempt(server.at(port))).unwrap();
        let answered = attempt.text == "server" && attempt.ending == Some(Ending::Fin);
        assert!(answered || attempt.was_refused(), "port {port}: {attempt:?}");
        // Only the port of the tunnels itself may be out of reach for others.
        assert!(answered || port == 15_008, "port {port}: {attempt:?}");
    }
}

#[test]
fn the_applications_port_can_be_bound_again_while_connections_to_it_are_open() {
    let bed = world("rebind").start().unwrap();
    let (client, server) = (bed.pod("client"), bed.pod("server"));
    let first = name(server, 8080);
    let hold = |stage: &adit_tests::bed::Stage| -> anyhow::Result<()> {
        let _open = net::connect(server.at(8080))?;
        stage.reached("open")?;
        stage.hold()
    };
    let _holder = client.serve(hold).unwrap();
    drop(first);
    let _second = name(server, 8080);
    assert_eq!(ask_name(client, server.at(8080)).unwrap(), "server");
}
