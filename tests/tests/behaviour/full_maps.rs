//! A map of the kernel's that is full: what has no room is decided by the proxy, or refused; nothing is let through.

use adit_tests::bed::{AccessLine, Bed, BedBuilder, PodSpec, ServiceSpec, wait_for};
use adit_tests::net;
use nix::sys::signal::Signal;

use crate::world::{LONG, PORT, SOON, ask, assert_refused, echo, source_line, world};

const MARKER: &str = "never-in-the-clear-5d1e";

fn small(name: &str, map: &str, entries: u32) -> BedBuilder {
    world(name).node_argument(&format!("--map-entries={map}={entries}"))
}

fn unplaced(bed: &Bed, what: &str) -> f64 {
    bed.node("n1")
        .metrics()
        .unwrap()
        .sum("adit_unplaced", &[("what", what)])
}

#[test]
fn verdicts_without_room_are_the_proxys_and_stay_what_they_were() {
    let bed = small("verdicts full", "adit_verdicts", 1)
        .pod("n1", PodSpec::new("friend").account("shop/friend"))
        .policy(
            "{name: no-client, namespace: shop, scope: namespace, action: deny, \
              rules: [{from: [{principals: [cluster.local/ns/shop/sa/client]}]}]}",
        )
        .start()
        .unwrap();
    let (client, friend, neighbour) = (bed.pod("client"), bed.pod("friend"), bed.pod("neighbour"));
    let _server = echo(neighbour, PORT);
    let line = source_line(&bed, friend, &ask(friend, neighbour.at(PORT)));
    assert!(line.has(&[("path", "local"), ("how", "fin")]), "{line:?}");
    let attempt = client.run(|| net::attempt(neighbour.at(PORT))).unwrap();
    assert_eq!(attempt.text, "", "{attempt:?}");
    let denied = |line: &AccessLine| line.has(&[("path", "local"), ("how", "policy")]);
    bed.node("n1").wait_for_access("the refusal", SOON, denied).unwrap();
    assert!(unplaced(&bed, "verdicts") >= 1.0);
    bed.node("n1").wait_for_log("no room for", SOON).unwrap();
}

#[test]
fn a_service_without_room_is_carried_by_the_proxy() {
    for (map, entries) in [("adit_services", 1), ("adit_endpoints", 1)] {
        let service = |name: &str| ServiceSpec::new(name).port(80, PORT).endpoint("neighbour");
        let bed = small(&format!("{map} full"), map, entries)
            .service(service("shop/one"))
            .service(service("shop/two"))
            .start()
            .unwrap();
        let (client, neighbour) = (bed.pod("client"), bed.pod("neighbour"));
        let _server = echo(neighbour, PORT);
        let addresses = ["shop/one", "shop/two"].map(|name| [bed.service(name).at(80), bed.service(name).at6(80)]);
        let paths: Vec<String> = addresses
            .into_iter()
            .flatten()
            .map(|to| source_line(&bed, client, &ask(client, to)).get("path").to_owned())
            .collect();
        let with_room = paths.iter().filter(|path| *path == "direct").count();
        assert_eq!(with_room, 1, "{map}: {paths:?}");
        assert_eq!(unplaced(&bed, "services"), 3.0, "{map}");
    }
}

#[test]
fn addresses_without_room_are_asked_whatever_their_range_would_permit() {
    // The pods of n1 have four addresses; nothing is left for the server's, which lies outside the cluster's ranges.
    for (map, entries) in [("adit_destinations", 4), ("adit_destinations", 1), ("adit_ranges", 2)] {
        let bed = small(&format!("{map} {entries}"), map, entries).build().unwrap();
        let range = format!("{}/24", bed.pod("client").v4());
        bed.update(|mesh| mesh.cluster_ranges = vec![range, "fd77::/16".to_owned(), "192.0.2.0/24".to_owned()])
            .unwrap();
        bed.start_all().unwrap();
        let (client, server, outsider) = (bed.pod("client"), bed.pod("server"), bed.pod("outsider"));
        let _servers = [
            echo(server, PORT),
            echo(outsider, PORT),
            echo(bed.pod("neighbour"), PORT),
        ];
        let capture = bed.capture_link().unwrap();
        for to in [server.at(PORT), server.at6(PORT)] {
            let seen = client.run(|| net::ask(to, MARKER)).unwrap();
            assert_eq!(seen.text, MARKER);
            let line = source_line(&bed, client, &seen);
            assert!(
                line.has(&[("path", "hbone"), ("how", "fin")]),
                "{map} {entries}: {line:?}"
            );
        }
        assert_eq!(capture.count(MARKER), 0, "{map} {entries}");
        assert!(capture.is_complete());
        ask(client, outsider.at(PORT));
        ask(client, bed.pod("neighbour").at6(PORT));
        let what = map.trim_start_matches("adit_");
        assert!(unplaced(&bed, what) >= 1.0, "{map} {entries}");
    }
}

#[test]
fn a_captured_connect_is_refused_where_no_more_can_be_on_their_way() {
    let bed = small("flows full", "adit_flows", 2).start().unwrap();
    let (client, server) = (bed.pod("client"), bed.pod("server"));
    let _server = echo(server, PORT);
    let (node, to) = (bed.node("n1"), server.at(PORT));
    // So that what is captured stays on its way.
    node.signal(Signal::SIGSTOP).unwrap();
    let connects = client.run(|| {
        let connects = (0..6).map(|_| std::net::TcpStream::connect(to));
        let errors = connects.map(|connect| connect.err().and_then(|error| error.raw_os_error()));
        Ok(errors.collect::<Vec<_>>())
    });
    node.signal(Signal::SIGCONT).unwrap();
    let connects = connects.unwrap();
    let refused = connects
        .iter()
        .filter(|error| **error == Some(libc::ECONNREFUSED))
        .count();
    assert!((1..6).contains(&refused), "{connects:?}");
    assert_eq!(connects.iter().flatten().count(), refused, "{connects:?}");
    let counted = || Ok(node.metrics()?.sum("adit_flows_full_total", &[]) == refused as f64);
    wait_for("the refusals to be counted", SOON, counted).unwrap();
    wait_for("room again", SOON, || Ok(crate::world::is_answered(client, to))).unwrap();
}

#[test]
fn a_direct_connection_without_a_record_is_a_strangers() {
    let only_known = "{name: only-known, namespace: shop, scope: namespace, action: allow, \
        rules: [{from: [{namespaces: [shop]}]}]}";
    let bed = small("direct full", "adit_direct", 1)
        .policy(only_known)
        .start()
        .unwrap();
    let (client, neighbour) = (bed.pod("client"), bed.pod("neighbour"));
    let _server = echo(neighbour, PORT);
    let to = neighbour.at(PORT);
    let mut open = client
        .spawn_staged(move |stage| {
            let stream = net::connect(to)?;
            stage.reached(())?;
            stage.hold()?;
            net::ask_on(stream, "with a record").map(|seen| seen.text)
        })
        .unwrap();
    open.stage::<()>(SOON).unwrap();
    assert_refused(client, to);
    let metrics = bed.node("n1").metrics().unwrap();
    assert!(metrics.sum("adit_direct_unrecorded_total", &[]) >= 1.0);
    open.proceed().unwrap();
    assert_eq!(open.join(LONG).unwrap(), "with a record");
    wait_for("room again", SOON, || Ok(crate::world::is_answered(client, to))).unwrap();
}
