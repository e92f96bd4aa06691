//! Connections that need no encryption go from socket to socket, with identity, policy, log and metrics kept.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr};
use std::time::{Duration, Instant};

use adit_tests::bed::{AccessLine, Bed, Pod, PodSpec, Stage, wait_for};
use adit_tests::net::{self, Ending};

use crate::world::{BY_ADDRESS, LONG, PORT, SOON, ask, assert_refused, canonical, echo, source_line, world};

/// Forbids the neighbour what comes from the client, and asks nobody.
const NO_CLIENT: &str = "
    name: no-client
    namespace: shop
    scope: namespace
    action: deny
    rules:
      - from:
          - principals: [cluster.local/ns/shop/sa/client]
";

fn line_of(bed: &Bed, node: &str, local: SocketAddr) -> AccessLine {
    let address = canonical(local).to_string();
    bed.node(node)
        .wait_for_access(&format!("of {address}"), SOON, |line| {
            line.get("source.addr") == address
        })
        .unwrap()
}

/// The client sends so many bytes and gets the others' count back; `client_first` says who closes first.
fn exchange(client: &Pod, server: &Pod, up: usize, down: usize, client_first: bool) -> SocketAddr {
    let serving = server
        .serve(|stage| {
            net::serve_one(stage, ("::", PORT), |mut stream, _| {
                let mut sent = vec![0; up];
                stream.read_exact(&mut sent)?;
                stream.write_all(&vec![7; down])?;
                if client_first {
                    stream.read_exact(&mut [0; 1]).unwrap_err();
                }
                Ok(())
            })
        })
        .unwrap();
    let to = server.at(PORT);
    let local = client
        .run(move || {
            let mut stream = net::connect(to)?;
            let local = stream.local_addr()?;
            stream.write_all(&vec![3; up])?;
            if client_first {
                stream.shutdown(Shutdown::Write)?;
            }
            let (text, ending) = net::read_to_end(&stream);
            anyhow::ensure!((text.len(), ending) == (down, Ending::Fin), "{} {ending:?}", text.len());
            Ok(local)
        })
        .unwrap();
    serving.join(LONG).unwrap();
    local
}

#[test]
fn the_log_counts_exactly_the_bytes_that_the_applications_moved() {
    let bed = world("exact").start().unwrap();
    let (client, neighbour) = (bed.pod("client"), bed.pod("neighbour"));
    for (up, down, client_first) in [
        (1, 1, true),
        (1 << 20, 300_000, true),
        (1000, 1 << 20, false),
        (5, 0, false),
    ] {
        let line = line_of(&bed, "n1", exchange(client, neighbour, up, down, client_first));
        let closed_by = if client_first { "source" } else { "destination" };
        assert!(
            line.has(&[
                ("path", "direct"),
                ("bytes_sent", &up.to_string()),
                ("bytes_received", &down.to_string()),
                ("closed_by", closed_by),
                ("how", "fin"),
            ]),
            "{up} {down} {line:?}"
        );
        assert_ne!(line.get("rtt_ms"), "", "{line:?}");
        assert!(line.get("retransmits").parse::<u32>().is_ok(), "{line:?}");
        assert_ne!(line.get("command"), "", "{line:?}");
    }
    let metrics = bed.node("n1").metrics().unwrap();
    let direct = [("path", "direct"), ("reporter", "source")];
    assert_eq!(metrics.sum("istio_tcp_connections_opened_total", &direct), 4.0);
    assert_eq!(metrics.sum("istio_tcp_connections_closed_total", &direct), 4.0);
    let sent = (1 + (1 << 20) + 1000 + 5) as f64;
    assert_eq!(metrics.sum("istio_tcp_sent_bytes_total", &direct), sent);
    assert_eq!(metrics.sum("adit_direct_ends_lost_total", &[]), 0.0);
}

#[test]
fn nothing_of_a_direct_connection_passes_the_proxy() {
    let bed = world("no proxy").start().unwrap();
    let (client, neighbour) = (bed.pod("client"), bed.pod("neighbour"));
    let _server = echo(neighbour, PORT);
    let to = neighbour.at(PORT);
    let before = bed.node("n1").open_files().unwrap();
    let mut holding = client
        .spawn_staged(move |stage| {
            let open = net::connect_many(to, 100, 4)?;
            stage.reached(())?;
            stage.hold()?;
            drop(open);
            Ok(())
        })
        .unwrap();
    holding.stage::<()>(LONG).unwrap();
    assert!(
        bed.node("n1").open_files().unwrap() < before + 50,
        "the proxy holds them"
    );
    let shown = || {
        let state = bed.node("n1").state()?;
        let connections = state["connections"].as_array().map_or(0, |all| {
            all.iter().filter(|connection| connection["path"] == "direct").count()
        });
        Ok(connections == 100)
    };
    wait_for("the state to show the open connections", SOON, shown).unwrap();
    holding.proceed().unwrap();
    holding.join(LONG).unwrap();
}

#[test]
fn a_denied_connect_fails_at_once_and_the_rule_is_logged() {
    let bed = world("denied").policy(NO_CLIENT).start().unwrap();
    let (client, neighbour) = (bed.pod("client"), bed.pod("neighbour"));
    let _server = echo(neighbour, PORT);
    let attempt = assert_refused(client, neighbour.at(PORT));
    assert_eq!(attempt.connect, Some(libc::EPERM), "{attempt:?}");
    let wanted = |line: &AccessLine| line.get("how") == "policy";
    let line = bed.node("n1").wait_for_access("the refusal", SOON, wanted).unwrap();
    assert!(
        line.has(&[
            ("path", "direct"),
            ("detail", "deny: shop/no-client rule 0"),
            ("source.identity", &client.identity()),
            ("destination.addr", &neighbour.at(PORT).to_string()),
            ("closed_by", "proxy"),
        ]),
        "{line:?}"
    );
    let metrics = bed.node("n1").metrics().unwrap();
    let denied = [("path", "direct"), ("response_flags", "DENY")];
    assert_eq!(metrics.sum("istio_tcp_connections_failed_total", &denied), 1.0);
}

#[test]
fn a_policy_that_depends_on_addresses_leaves_the_connection_to_the_proxy() {
    let bed = world("by address").policy(BY_ADDRESS).start().unwrap();
    let (client, neighbour, outsider) = (bed.pod("client"), bed.pod("neighbour"), bed.pod("outsider"));
    let server = bed.pod("server");
    let _servers = [echo(neighbour, PORT), echo(server, PORT)];
    let line = source_line(&bed, client, &ask(client, neighbour.at(PORT)));
    assert!(line.has(&[("path", "local"), ("how", "fin")]), "{line:?}");
    let line = line_of(&bed, "n2", ask(outsider, server.at(PORT)).local);
    assert!(line.has(&[("path", "plain"), ("how", "fin")]), "{line:?}");
}

#[test]
fn where_a_workload_asks_for_it_the_tunnel_is_taken_on_one_node_too() {
    let bed = world("encrypted").build().unwrap();
    bed.update(|mesh| {
        if let Some(neighbour) = mesh.workload("neighbour") {
            neighbour.same_node = Some("encrypted".to_owned());
        }
    })
    .unwrap();
    bed.start_all().unwrap();
    let (client, neighbour) = (bed.pod("client"), bed.pod("neighbour"));
    let _servers = [echo(neighbour, PORT), echo(client, PORT)];
    for (from, to) in [(client, neighbour), (neighbour, client)] {
        let line = source_line(&bed, from, &ask(from, to.at(PORT)));
        assert!(line.has(&[("path", "hbone"), ("how", "fin")]), "{line:?}");
    }
}

#[test]
fn outside_the_clusters_ranges_a_stranger_is_reached_directly_and_within_them_by_the_proxy() {
    let bed = world("ranges")
        .pod("n2", PodSpec::new("stranger").unknown())
        .build()
        .unwrap();
    let (client, stranger) = (bed.pod("client"), bed.pod("stranger"));
    let range = format!("{}/24", client.v4());
    bed.update(|mesh| mesh.cluster_ranges = vec![range]).unwrap();
    bed.start_all().unwrap();
    let _server = echo(stranger, PORT);
    // Of IPv6 no range is known, so every address may be the cluster's.
    for (address, path) in [(stranger.at(PORT), "direct"), (stranger.at6(PORT), "plain")] {
        let line = source_line(&bed, client, &ask(client, address));
        assert!(line.has(&[("path", path), ("how", "fin")]), "{line:?}");
    }
    let range = format!("{}/16", client.v4());
    bed.update(|mesh| mesh.cluster_ranges = vec![range]).unwrap();
    let asked = || {
        let line = source_line(&bed, client, &ask(client, stranger.at(PORT)));
        Ok(line.get("path") == "plain")
    };
    wait_for("the new range to be asked", SOON, asked).unwrap();
}

#[test]
fn a_policy_that_appears_ends_open_direct_connections_that_it_forbids_and_no_others() {
    let bed = world("ends")
        .pod("n1", PodSpec::new("friend").account("shop/friend"))
        .start()
        .unwrap();
    let (client, friend, neighbour) = (bed.pod("client"), bed.pod("friend"), bed.pod("neighbour"));
    let _server = echo(neighbour, PORT);
    let to = neighbour.at(PORT);
    let hold = |pod: &Pod| {
        let mut running = pod
            .spawn_staged(move |stage| {
                let mut stream = net::connect(to)?;
                stream.write_all(b"x")?;
                stream.read_exact(&mut [0])?;
                stage.reached(())?;
                stage.hold()?;
                stream.set_read_timeout(Some(SOON))?;
                // What was ended says so at once; what was not still answers.
                let answer = stream.write_all(b"y").and_then(|()| stream.read_exact(&mut [0]));
                Ok(answer.err().map(|error| error.raw_os_error().unwrap_or(0)))
            })
            .unwrap();
        running.stage::<()>(SOON).unwrap();
        running
    };
    let (doomed, spared) = (hold(client), hold(friend));
    bed.update(|mesh| mesh.policies.push(NO_CLIENT.to_owned())).unwrap();
    let wanted = |line: &AccessLine| line.has(&[("how", "policy"), ("path", "direct"), ("phase", "relay")]);
    let line = bed.node("n1").wait_for_access("of the end", SOON, wanted).unwrap();
    assert_eq!(line.get("detail"), "deny: shop/no-client rule 0", "{line:?}");
    assert_eq!(
        (line.get("bytes_sent"), line.get("bytes_received")),
        ("1", "1"),
        "{line:?}"
    );
    for (running, ended) in [(doomed, true), (spared, false)] {
        running.proceed().unwrap();
        let error: Option<i32> = running.join(LONG).unwrap();
        assert_eq!(error.is_some(), ended, "{error:?}");
    }
    assert_refused(client, to);
    ask(friend, to);
}

#[test]
fn a_refusal_by_the_application_is_logged_as_one() {
    let bed = world("closed port").start().unwrap();
    let (client, neighbour) = (bed.pod("client"), bed.pod("neighbour"));
    let attempt = assert_refused(client, neighbour.at(PORT));
    assert_eq!(attempt.connect, Some(libc::ECONNREFUSED), "{attempt:?}");
    let wanted = |line: &AccessLine| line.has(&[("how", "refused"), ("phase", "connect"), ("path", "direct")]);
    bed.node("n1").wait_for_access("the refusal", SOON, wanted).unwrap();
}

#[test]
fn a_pod_that_has_just_come_is_never_a_stranger_to_a_pod_of_its_node() {
    const COMING: usize = 12;
    let only_known = "{name: only-known, namespace: shop, scope: namespace, action: allow, \
        rules: [{from: [{namespaces: [shop]}]}]}";
    let is_coming = |name: &str| name.starts_with("coming-");
    // Their identity is known to the kernel before they come: it is the neighbour's.
    let bed = (0..COMING).fold(world("just come"), |bed, number| {
        bed.pod(
            "n1",
            PodSpec::new(&format!("coming-{number}")).account("shop/neighbour"),
        )
    });
    let bed = bed.policy(only_known).start().unwrap();
    let (node, server) = (bed.node("n1"), bed.pod("client"));
    let _server = echo(server, PORT);
    let to = server.at(PORT);
    ask(bed.pod("neighbour"), to);
    let mut all = Vec::new();
    bed.update(|mesh| all.clone_from(&mesh.workloads)).unwrap();
    let enrolled = |count: usize| {
        wait_for(&format!("{count} pods"), SOON, || {
            Ok(node.state()?["pods"].as_array().map(Vec::len) == Some(count))
        })
        .unwrap();
    };
    for _ in 0..4 {
        bed.update(|mesh| mesh.workloads.retain(|workload| !is_coming(&workload.name)))
            .unwrap();
        enrolled(2);
        let calling: Vec<_> = (0..COMING)
            .map(|number| {
                let calls = move |stage: &Stage| {
                    stage.reached(())?;
                    let (begin, mut answered) = (Instant::now(), 0);
                    while answered < 20 && begin.elapsed() < LONG {
                        answered += u32::from(net::ask(to, "hello").is_ok_and(|seen| seen.text == "hello"));
                        std::thread::sleep(Duration::from_millis(1));
                    }
                    Ok(answered)
                };
                bed.pod(&format!("coming-{number}")).serve(calls).unwrap()
            })
            .collect();
        bed.update(|mesh| mesh.workloads.clone_from(&all)).unwrap();
        enrolled(2 + COMING);
        for calling in calling {
            assert_eq!(calling.join(LONG).unwrap(), 20);
        }
    }
    // Of what the node saw of them before they were in the mesh, only the destination's end is told.
    let of_coming =
        |line: &AccessLine| line.get("source.workload").starts_with("shop/coming-") && line.get("reporter") == "source";
    let lines: Vec<_> = node.access_log().into_iter().filter(of_coming).collect();
    assert!(lines.len() >= 4 * COMING, "{}", lines.len());
    for line in lines {
        assert_eq!(line.get("how"), "fin", "{line:?}");
    }
}
