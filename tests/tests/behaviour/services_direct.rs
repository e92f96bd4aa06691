//! The kernel chooses the endpoint of a service, and what is known of that endpoint decides.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};

use adit_tests::bed::{AccessLine, Bed, BedBuilder, Pod, PodSpec, ServiceSpec, wait_for};
use adit_tests::net;

use crate::world::{PORT, SOON, ask, assert_refused, canonical, echo, name, source_line, world};

fn web() -> ServiceSpec {
    ServiceSpec::new("shop/web").port(80, PORT).selector("part", "web")
}

/// A client on n1, and servers of `shop/web` on the nodes given.
fn servers(bed: &str, service: ServiceSpec, servers: &[(&str, &str)]) -> BedBuilder {
    let server = |name: &str| PodSpec::new(name).account(&format!("shop/{name}")).label("part", "web");
    servers.iter().fold(
        Bed::builder(bed)
            .node("n1")
            .node("n2")
            .pod("n1", PodSpec::new("client").account("shop/client"))
            .service(service),
        |bed, (node, name)| bed.pod(node, server(name)),
    )
}

/// How often each server answers one of `count` connections; those refused by the kernel, under the error's number.
fn answers(client: &Pod, to: SocketAddr, count: usize) -> BTreeMap<String, usize> {
    let attempts = client
        .run(|| (0..count).map(|_| net::attempt(to)).collect::<anyhow::Result<Vec<_>>>())
        .unwrap();
    let mut answers = BTreeMap::new();
    for attempt in attempts {
        let answer = attempt.connect.map_or(attempt.text, |errno| format!("errno {errno}"));
        *answers.entry(answer).or_default() += 1;
    }
    answers
}

fn names(answers: &BTreeMap<String, usize>) -> Vec<&str> {
    answers.keys().map(String::as_str).collect()
}

fn mapped(address: SocketAddr) -> SocketAddr {
    match address {
        SocketAddr::V4(v4) => (Ipv4Addr::to_ipv6_mapped(v4.ip()), v4.port()).into(),
        v6 => v6,
    }
}

#[test]
fn an_endpoint_on_this_node_is_reached_directly_under_the_services_address() {
    let bed = world("service direct")
        .service(ServiceSpec::new("shop/web").port(80, PORT).endpoint("neighbour"))
        .start()
        .unwrap();
    let (client, neighbour, service) = (bed.pod("client"), bed.pod("neighbour"), bed.service("shop/web"));
    let _server = echo(neighbour, PORT);
    for (dialled, server) in [
        (service.at(80), neighbour.at(PORT)),
        (service.at6(80), neighbour.at6(PORT)),
        (mapped(service.at(80)), neighbour.at(PORT)),
    ] {
        let seen = ask(client, dialled);
        assert_eq!(seen.peer, dialled);
        assert!(client.addresses().contains(&canonical(seen.local).ip()), "{seen:?}");
        let line = source_line(&bed, client, &seen);
        assert!(
            line.has(&[
                ("path", "direct"),
                ("service", "shop/web"),
                ("destination.addr", &server.to_string()),
                ("destination.workload", "shop/neighbour"),
                ("destination.identity", &neighbour.identity()),
                ("how", "fin"),
            ]),
            "{dialled} {line:?}"
        );
    }
}

#[test]
fn endpoints_on_this_node_have_each_its_share() {
    let all = [("n1", "one"), ("n1", "two"), ("n1", "three")];
    let bed = servers("shares", web(), &all).start().unwrap();
    let _servers = all.map(|(_, pod)| name(bed.pod(pod), PORT));
    // The deviation to be expected is 8.
    let answers = answers(bed.pod("client"), bed.service("shop/web").at(80), 300);
    assert_eq!(names(&answers), ["one", "three", "two"]);
    assert!(answers.values().all(|count| (55..145).contains(count)), "{answers:?}");
    let lines = bed.node("n1").access_log();
    assert!(lines.iter().all(|line| line.get("path") == "direct"), "{lines:?}");
}

#[test]
fn the_nearest_are_chosen_and_when_none_is_ready_the_next() {
    let all = [("n1", "near"), ("n2", "far")];
    let bed = servers("nearest", web().distribution("PreferSameNode"), &all)
        .start()
        .unwrap();
    let _servers = all.map(|(_, pod)| name(bed.pod(pod), PORT));
    let (client, to) = (bed.pod("client"), bed.service("shop/web").at(80));
    assert_eq!(names(&answers(client, to, 20)), ["near"]);
    let set_ready = |ready| {
        bed.update(|mesh| {
            if let Some(near) = mesh.workload("near") {
                near.ready = Some(ready);
            }
        })
        .unwrap();
    };
    for (ready, nearest) in [(false, "far"), (true, "near")] {
        set_ready(ready);
        wait_for(nearest, SOON, || Ok(names(&answers(client, to, 1)) == [nearest])).unwrap();
        assert_eq!(names(&answers(client, to, 20)), [nearest]);
    }
}

#[test]
fn an_endpoint_on_another_node_is_handed_to_the_proxy() {
    let bed = servers("far", web(), &[("n2", "far")]).start().unwrap();
    let _server = echo(bed.pod("far"), PORT);
    let (client, service) = (bed.pod("client"), bed.service("shop/web"));
    for dialled in [service.at(80), service.at6(80), mapped(service.at(80))] {
        let seen = ask(client, dialled);
        assert_eq!(seen.peer, dialled);
        let line = source_line(&bed, client, &seen);
        assert!(line.has(&[("path", "hbone"), ("service", "shop/web")]), "{line:?}");
    }
}

#[test]
fn an_endpoint_that_policy_denies_is_refused_and_the_others_are_not() {
    let bed = servers("denied endpoint", web(), &[("n1", "closed"), ("n1", "open")])
        .policy("{name: closed, namespace: shop, scope: workload, selector: {app: closed}, action: deny, rules: [{}]}")
        .start()
        .unwrap();
    let _servers = ["closed", "open"].map(|pod| name(bed.pod(pod), PORT));
    let answers = answers(bed.pod("client"), bed.service("shop/web").at(80), 60);
    assert_eq!(names(&answers), [format!("errno {}", libc::EPERM).as_str(), "open"]);
    let wanted = |line: &AccessLine| line.get("how") == "policy";
    let line = bed.node("n1").wait_for_access("the refusal", SOON, wanted).unwrap();
    assert!(
        line.has(&[
            ("path", "direct"),
            ("service", "shop/web"),
            ("destination.addr", &bed.pod("closed").at(PORT).to_string()),
            ("detail", "deny: shop/closed rule 0"),
        ]),
        "{line:?}"
    );
}

#[test]
fn a_service_that_leads_nowhere_refuses_within_connect() {
    let bed = servers("nowhere", web().distribution("SameNodeOnly"), &[("n2", "far")])
        .start()
        .unwrap();
    let _server = echo(bed.pod("far"), PORT);
    let (client, service) = (bed.pod("client"), bed.service("shop/web"));
    for address in [service.at(80), service.at6(80)] {
        let attempt = assert_refused(client, address);
        assert_eq!(attempt.connect, Some(libc::ECONNREFUSED), "{attempt:?}");
        let dialled = address.to_string();
        let wanted = |line: &AccessLine| line.get("destination.addr") == dialled;
        let line = bed.node("n1").wait_for_access("the refusal", SOON, wanted).unwrap();
        assert!(
            line.has(&[
                ("how", "refused"),
                ("phase", "decide"),
                ("service", "shop/web"),
                ("closed_by", "proxy"),
                (
                    "detail",
                    "service web.shop.svc.cluster.local port 80: none of 1 endpoints can be used, 1 are ready",
                ),
            ]),
            "{line:?}"
        );
    }
}

#[test]
fn the_refusal_of_an_endpoint_on_this_node_reaches_the_client() {
    let bed = servers("closed endpoint", web(), &[("n1", "near")]).start().unwrap();
    let attempt = assert_refused(bed.pod("client"), bed.service("shop/web").at(80));
    assert_eq!(attempt.connect, Some(libc::ECONNREFUSED), "{attempt:?}");
}

#[test]
fn named_ports_that_differ_are_found_by_the_kernel() {
    let server = |name: &str, port| PodSpec::new(name).label("part", "web").port("http", port);
    let bed = Bed::builder("named ports")
        .node("n1")
        .pod("n1", PodSpec::new("client"))
        .pod("n1", server("one", 8081))
        .pod("n1", server("two", 8082))
        .service(ServiceSpec::new("web").port(80, "http").selector("part", "web"))
        .start()
        .unwrap();
    let _servers = [("one", 8081), ("two", 8082)].map(|(pod, port)| name(bed.pod(pod), port));
    let answers = answers(bed.pod("client"), bed.service("default/web").at(80), 40);
    assert_eq!(names(&answers), ["one", "two"]);
    let lines = bed.node("n1").access_log();
    assert!(lines.iter().all(|line| line.get("path") == "direct"), "{lines:?}");
}

#[test]
fn an_endpoint_without_an_address_of_the_family_that_was_dialled_is_reached_by_the_proxy() {
    let bed = Bed::builder("families")
        .node("n1")
        .pod("n1", PodSpec::new("client"))
        .pod("n1", PodSpec::new("web").ipv4_only())
        .service(ServiceSpec::new("web").port(80, PORT).endpoint("web"))
        .start()
        .unwrap();
    let _server = echo(bed.pod("web"), PORT);
    let (client, service) = (bed.pod("client"), bed.service("default/web"));
    for (dialled, path) in [(service.at(80), "direct"), (service.at6(80), "local")] {
        let seen = ask(client, dialled);
        assert_eq!(seen.peer, dialled);
        let line = source_line(&bed, client, &seen);
        assert!(line.has(&[("path", path), ("service", "default/web")]), "{line:?}");
    }
}

#[test]
fn while_endpoints_change_nobody_reaches_another_service_or_nobody() {
    let pod = |name: &str, part: &str| PodSpec::new(name).label("part", part);
    let service = |name: &str| ServiceSpec::new(name).port(80, PORT).selector("part", name);
    let all = [("a1", "a"), ("a2", "a"), ("b1", "b"), ("b2", "b")];
    let bed = all
        .iter()
        .fold(
            Bed::builder("changes").node("n1").pod("n1", PodSpec::new("client")),
            |bed, (name, part)| bed.pod("n1", pod(name, part)),
        )
        .service(service("a"))
        .service(service("b"))
        .start()
        .unwrap();
    let _servers = all.map(|(pod, _)| name(bed.pod(pod), PORT));
    let client = bed.pod("client");
    let (a, b) = (bed.service("default/a").at(80), bed.service("default/b").at(80));
    for leaver in ["a1", "b1", "a2", "b2"] {
        bed.update(|mesh| {
            for (name, _) in all {
                if let Some(workload) = mesh.workload(name) {
                    workload.ready = Some(name != leaver);
                }
            }
        })
        .unwrap();
        let gone = || {
            let (from_a, from_b) = (answers(client, a, 25), answers(client, b, 25));
            for (answers, part) in [(&from_a, 'a'), (&from_b, 'b')] {
                assert!(answers.keys().all(|name| name.starts_with(part)), "{part}: {answers:?}");
            }
            Ok(!from_a.contains_key(leaver) && !from_b.contains_key(leaver))
        };
        wait_for(&format!("{leaver} to be chosen no more"), SOON, gone).unwrap();
    }
}

#[test]
fn the_programs_say_what_becomes_of_a_connect_where_they_are_asked_to() {
    let bed = world("explained")
        .service(ServiceSpec::new("shop/web").port(80, PORT).endpoint("neighbour"))
        .node_argument("--bpf-log=all")
        .start()
        .unwrap();
    let _server = echo(bed.pod("neighbour"), PORT);
    let dialled = bed.service("shop/web").at(80);
    ask(bed.pod("client"), dialled);
    let said = format!("{dialled} direct");
    bed.node("n1").wait_for_log(&said, SOON).unwrap();
}
