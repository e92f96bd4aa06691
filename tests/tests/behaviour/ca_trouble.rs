//! The CA is down, hangs, or is not the one it should be.

use std::time::{Duration, Instant};

use adit_tests::bed::process::{CaSettings, TokenSpec};
use adit_tests::bed::{AccessLine, Bed, PodSpec, wait_for};
use adit_tests::ca_call::openssl_req;
use adit_tests::net;
use nix::sys::signal::Signal;

use crate::world::{LONG, PORT, SOON, ask, echo, is_answered, world};

/// The client's connection fails for want of a certificate, within the 5 s that it may wait, and the log says so.
fn assert_no_identity(bed: &Bed) {
    let (client, server) = (bed.pod("client"), bed.pod("server"));
    let attempt = client.run(|| net::attempt(server.at(PORT))).unwrap();
    assert!(attempt.was_refused(), "{attempt:?}");
    assert!(attempt.took_ms < 7_500, "{attempt:?}");
    let wanted = |line: &AccessLine| line.get("how") == "identity";
    let line = bed.node("n1").wait_for_access("how=identity", SOON, wanted).unwrap();
    assert!(!line.get("detail").is_empty(), "the reason is said: {line:?}");
    assert_eq!(line.get("phase"), "identity", "{line:?}");
}

/// Waits until the pods are captured, whatever the proxies lack.
fn wait_until_captured(bed: &Bed) {
    // Without Adit, `connect` to an address that nobody has fails; with it, the connection is accepted, as only the
    // proxy can tell who is there, and then reset. That takes no certificate.
    let nobody = "10.255.255.1:9".parse().unwrap();
    for from in ["client", "server"] {
        let captured = || Ok(bed.pod(from).run(|| net::attempt(nobody))?.connect.is_none());
        wait_for(&format!("{from} to be captured"), LONG, captured).unwrap();
    }
}

#[test]
fn running_certificates_serve_while_the_ca_is_down() {
    let bed = world("down").start().unwrap();
    let (client, server) = (bed.pod("client"), bed.pod("server"));
    let _server = echo(server, PORT);
    bed.kill_ca();
    for address in [server.at(PORT), server.at6(PORT)] {
        ask(client, address);
    }
}

#[test]
fn running_certificates_serve_while_the_ca_hangs() {
    let bed = world("hangs").start().unwrap();
    let (client, server) = (bed.pod("client"), bed.pod("server"));
    let _server = echo(server, PORT);
    bed.signal_ca(Signal::SIGSTOP).unwrap();
    ask(client, server.at(PORT));
    // A pod that comes now gets its certificate when the CA goes on, and no later.
    bed.signal_ca(Signal::SIGCONT).unwrap();
    ask(client, server.at(PORT));
}

#[test]
fn without_a_ca_from_the_start_connections_fail_with_the_reason_and_work_as_soon_as_it_is_there() {
    let bed = world("late").build().unwrap();
    let server = bed.pod("server");
    let _server = echo(server, PORT);
    // Root and tokens are there; the CA that made them is gone again.
    bed.start_ca().unwrap();
    bed.introduce_ca().unwrap();
    bed.kill_ca();
    bed.nodes().iter().for_each(|node| node.launch().unwrap());
    wait_until_captured(&bed);
    assert_no_identity(&bed);
    let ready = bed.node("n1").get("/healthz/ready").unwrap();
    assert_ne!(ready.status, 200);
    assert!(!ready.body.trim().is_empty(), "it names what is pending");

    bed.start_ca().unwrap();
    bed.nodes().iter().for_each(|node| node.wait_ready(SOON).unwrap());
    ask(bed.pod("client"), server.at(PORT));
}

#[test]
fn a_connection_that_waits_for_its_certificate_goes_on_when_the_ca_wakes_up() {
    let bed = world("wakes up").build().unwrap();
    let (client, server) = (bed.pod("client"), bed.pod("server"));
    let _server = echo(server, PORT);
    bed.start_ca().unwrap();
    bed.introduce_ca().unwrap();
    bed.signal_ca(Signal::SIGSTOP).unwrap();
    bed.nodes().iter().for_each(|node| node.launch().unwrap());
    wait_until_captured(&bed);
    let to = server.at(PORT);
    let waiting = client.spawn(|| net::ask(to, "patience")).unwrap();
    // The connection has been accepted and waits.
    let pending = || {
        Ok(bed.node("n1").state()?["connections"]
            .to_string()
            .contains(&to.to_string()))
    };
    let _ = wait_for("the connection in the state", Duration::from_secs(1), pending);
    bed.signal_ca(Signal::SIGCONT).unwrap();
    assert_eq!(waiting.join(LONG).unwrap().text, "patience");
}

#[test]
fn a_ca_that_the_proxies_have_no_reason_to_trust_is_not_believed() {
    let bed = world("false root").build().unwrap();
    let _server = echo(bed.pod("server"), PORT);
    bed.start_ca().unwrap();
    bed.introduce_ca().unwrap();
    // The proxies are told to trust somebody else.
    let root = openssl_req(&[
        "-x509",
        "-days",
        "2",
        "-subj",
        "/CN=somebody else",
        "-keyout",
        "/dev/null",
    ])
    .unwrap();
    std::fs::write(bed.trust_file(), root).unwrap();
    bed.nodes().iter().for_each(|node| node.launch().unwrap());
    wait_until_captured(&bed);
    assert_no_identity(&bed);
    let granted = bed.ca_log().text().matches(&bed.pod("client").identity()).count();
    assert_eq!(granted, 0, "the CA was never asked for it: {}", bed.ca_log().text());
}

#[test]
fn a_listener_that_says_nothing_in_the_place_of_the_ca_does_not_hold_up_the_proxy() {
    let bed = world("mute").build().unwrap();
    let _server = echo(bed.pod("server"), PORT);
    bed.start_ca().unwrap();
    bed.introduce_ca().unwrap();
    bed.kill_ca();
    // It accepts and never answers.
    let place = bed.ca_settings().listen;
    let _mute = bed
        .node("n1")
        .inside(|| std::net::TcpListener::bind(place))
        .unwrap()
        .unwrap();
    bed.nodes().iter().for_each(|node| node.launch().unwrap());
    wait_until_captured(&bed);
    assert_no_identity(&bed);
    // Those who need no certificate are served meanwhile.
    let outsider = bed.pod("outsider");
    let _outside = echo(outsider, PORT);
    ask(bed.pod("client"), outsider.at(PORT));
}

#[test]
fn a_ca_that_refuses_at_first_is_asked_again_soon_as_long_as_somebody_waits() {
    let bed = world("refuses").build().unwrap();
    let (client, server, node) = (bed.pod("client"), bed.pod("server"), bed.node("n1"));
    let _server = echo(server, PORT);
    bed.start_ca().unwrap();
    bed.introduce_ca().unwrap();
    // As a CA does that does not know a node's pods yet: it answers, and the answer is no.
    for node in bed.nodes() {
        let token = TokenSpec {
            node: node.name().to_owned(),
            audience: Some("somebody else".to_owned()),
            ..TokenSpec::default()
        };
        node.write_token(&bed.token(&token).unwrap()).unwrap();
        node.launch().unwrap();
    }
    for (node, pod) in [("n1", "client"), ("n2", "server")] {
        let line = format!("pod shop/{pod} is enrolled");
        bed.node(node).wait_for_log(&line, SOON).unwrap();
    }
    let to = server.at(PORT);
    let mut waits = client
        .spawn_staged(move |stage| {
            stage.reached(())?;
            let begin = Instant::now();
            while begin.elapsed() < LONG {
                if net::ask(to, "at last").is_ok_and(|seen| seen.text == "at last") {
                    return Ok(());
                }
            }
            anyhow::bail!("it never was")
        })
        .unwrap();
    waits.stage::<()>(SOON).unwrap();
    // Long enough for the pauses after failures in a row to be much longer than that.
    let calls = || node.metrics().unwrap().sum("adit_ca_calls_total", &[]);
    std::thread::sleep(Duration::from_secs(2));
    let before = calls();
    std::thread::sleep(Duration::from_secs(5));
    let calls = calls() - before;
    assert!((4.0..=12.0).contains(&calls), "{calls} calls for two identities in 5 s");
    assert!(bed.ca_log().text().contains("audience"), "{}", bed.ca_log().tail());
    bed.introduce_ca().unwrap();
    let right = Instant::now();
    waits.join(LONG).unwrap();
    let took = right.elapsed();
    println!("{took:?} from when the CA grants to the first answer");
    assert!(took < Duration::from_secs(2), "{took:?}");
}

#[test]
fn identities_that_the_ca_refuses_hold_up_no_other_and_no_upgrade() {
    // Each is waited for; together they take no longer than one.
    let refused = ["refused-1", "refused-2", "refused-3"];
    let bed = refused.iter().fold(world("some refused"), |bed, name| {
        bed.pod("n1", PodSpec::new(name).account(&format!("shop/{name}")))
    });
    let bed = bed.node_argument("--identity-wait=4s").build().unwrap();
    let (server, node) = (bed.pod("server"), bed.node("n1"));
    let _server = echo(server, PORT);
    // The CA sees no pod of it on the node.
    let mesh = bed.dir().join("of-the-ca.yaml");
    bed.update(|whole| {
        let mut part = whole.clone();
        part.workloads
            .retain(|workload| workload.name != "neighbour" && !refused.contains(&workload.name.as_str()));
        std::fs::write(&mesh, part.to_yaml().unwrap()).unwrap();
    })
    .unwrap();
    bed.start_ca_with(&CaSettings {
        mesh,
        ..bed.ca_settings().clone()
    })
    .unwrap();
    bed.introduce_ca().unwrap();
    bed.nodes().iter().for_each(|node| node.start().unwrap());
    let check = || {
        node.wait_for_log("sa/neighbour fail until it is granted", SOON)
            .unwrap();
        ask(bed.pod("client"), server.at(PORT));
        assert!(!is_answered(bed.pod("neighbour"), server.at(PORT)));
        let unavailable = node
            .metrics()
            .unwrap()
            .sum("adit_certificates", &[("state", "unavailable")]);
        assert_eq!(unavailable, 4.0);
    };
    check();
    node.upgrade(&[]).unwrap();
    check();
    bed.kill_ca();
    bed.start_ca().unwrap();
    let granted = || Ok(is_answered(bed.pod("neighbour"), server.at(PORT)));
    wait_for("the identity to be granted", SOON, granted).unwrap();
}
