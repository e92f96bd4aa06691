//! One can see what goes on: metrics, state, access log.

use std::io::Write;

use adit_tests::bed::{Stage, wait_for};
use adit_tests::net;

use crate::world::{PORT, SOON, ask, echo, source_line, world};

#[test]
fn both_nodes_count_connections_and_bytes_under_istios_names() {
    let bed = world("metrics").start().unwrap();
    let (client, server) = (bed.pod("client"), bed.pod("server"));
    let _server = echo(server, PORT);
    let length = ask(client, server.at(PORT)).text.len() as f64;
    for (node, reporter) in [("n1", "source"), ("n2", "destination")] {
        let labels = [
            ("reporter", reporter),
            ("source_principal", &client.identity()),
            ("destination_principal", &server.identity()),
            ("connection_security_policy", "mutual_tls"),
        ];
        let closed = || {
            Ok(bed
                .node(node)
                .metrics()?
                .sum("istio_tcp_connections_closed_total", &labels)
                == 1.0)
        };
        wait_for(&format!("one closed connection at {node}"), SOON, closed).unwrap();
        let metrics = bed.node(node).metrics().unwrap();
        assert_eq!(
            metrics.sum("istio_tcp_connections_opened_total", &labels),
            1.0,
            "{node}"
        );
        let bytes = ["istio_tcp_sent_bytes_total", "istio_tcp_received_bytes_total"];
        assert_eq!(bytes.map(|name| metrics.sum(name, &labels)), [length, length], "{node}");
        assert!(metrics.sum("adit_handshake_seconds_count", &[]) >= 1.0, "{node}");
        assert!(
            metrics.sum("adit_ca_calls_total", &[("result", "issued")]) >= 1.0,
            "{node}"
        );
        assert!(metrics.has("adit_certificate_expiry_seconds"), "{node}");
    }
}

#[test]
fn the_access_log_names_the_process_that_connected() {
    let bed = world("author").start().unwrap();
    let (client, server) = (bed.pod("client"), bed.pod("server"));
    let _server = echo(server, PORT);
    let to = server.at(PORT);
    let (pid, seen) = client
        .run(|| Ok((std::process::id(), net::ask(to, "who asks?")?)))
        .unwrap();
    let line = source_line(&bed, client, &seen);
    assert_eq!(line.number("pid"), u64::from(pid), "{line:?}");
    assert!(!line.get("command").is_empty(), "{line:?}");

    let target = format!("http://{to}/");
    // It speaks no HTTP in return; curl's outcome does not matter.
    let _ = client
        .command("curl")
        .args(["-s", "-m", "3", "--http0.9", &target])
        .output()
        .unwrap();
    let wanted = |line: &adit_tests::bed::AccessLine| line.get("command") == "curl";
    bed.node("n1").wait_for_access("command=curl", SOON, wanted).unwrap();
}

#[test]
fn the_state_shows_pods_certificates_and_live_connections_but_no_keys() {
    let bed = world("state").start().unwrap();
    let (client, server) = (bed.pod("client"), bed.pod("server"));
    let _server = echo(server, PORT);
    let to = server.at(PORT);
    let hold = |stage: &Stage| -> anyhow::Result<()> {
        let mut stream = net::connect(to)?;
        stream.write_all(b"hello")?;
        net::read_text(&mut stream, 5)?;
        stage.reached(stream.local_addr()?)?;
        stage.hold()
    };
    let open = client.serve(hold).unwrap();
    for (node, reporter) in [("n1", "source"), ("n2", "destination")] {
        let state = bed.node(node).state().unwrap();
        let connections = state["connections"].to_string();
        assert!(connections.contains(&client.identity()), "{node}: {state}");
        assert!(connections.contains(reporter), "{node}: {state}");
        let own = if node == "n1" { client } else { server };
        assert!(
            state["certificates"].to_string().contains(&own.identity()),
            "{node}: {state}"
        );
        assert!(state["pods"].to_string().contains(own.name()), "{node}: {state}");
        assert!(!state.to_string().contains("PRIVATE"), "{node}");
    }
    open.proceed().unwrap();
    open.join(SOON).unwrap();
    let gone = || {
        Ok(!bed.node("n1").state()?["connections"]
            .to_string()
            .contains(&client.identity()))
    };
    wait_for("the connection to leave the state", SOON, gone).unwrap();
}

#[test]
fn the_admin_pages_are_on_loopback_only() {
    let bed = world("admin").start().unwrap();
    let node = bed.node("n1");
    let address = (node.v4(), 15_000);
    assert!(node.inside(|| std::net::TcpStream::connect(address).is_err()).unwrap());
    // Nor do pods find them on their own loopback.
    let attempt = bed
        .pod("client")
        .run(|| net::attempt("127.0.0.1:15000".parse()?))
        .unwrap();
    assert_eq!(attempt.connect, Some(libc::ECONNREFUSED));
}
