//! Services by their virtual addresses: which endpoint, which port, and what if one fails.

use std::collections::BTreeSet;

use adit_tests::bed::{Bed, PodSpec, ServiceSpec};

use crate::world::{PORT, ask, ask_name, echo, name, source_line, world};

fn web(ns: &str) -> ServiceSpec {
    ServiceSpec::new(ns).port(80, PORT).selector("part", "web")
}

/// A client on n1; servers one on n1, two and three on n2.
fn spread(name: &str, service: ServiceSpec) -> Bed {
    let server = |name: &str| PodSpec::new(name).account("shop/web").label("part", "web");
    Bed::builder(name)
        .node("n1")
        .node("n2")
        .pod("n1", PodSpec::new("client").account("shop/client"))
        .pod("n1", server("one"))
        .pod("n2", server("two"))
        .pod("n2", server("three"))
        .service(service)
        .start()
        .unwrap()
}

#[test]
fn the_endpoints_of_a_service_share_its_connections() {
    let bed = spread("share", web("shop/web"));
    let _servers = ["one", "two", "three"].map(|pod| name(bed.pod(pod), PORT));
    let service = bed.service("shop/web");
    let client = bed.pod("client");
    let names: BTreeSet<String> = (0..40)
        .map(|number| {
            ask_name(
                client,
                if number % 2 == 0 {
                    service.at(80)
                } else {
                    service.at6(80)
                },
            )
            .unwrap()
        })
        .collect();
    assert_eq!(names.into_iter().collect::<Vec<_>>(), ["one", "three", "two"]);
}

#[test]
fn a_service_that_prefers_the_same_node_stays_there() {
    let bed = spread("same node", web("shop/web").distribution("PreferSameNode"));
    let _servers = ["one", "two", "three"].map(|pod| name(bed.pod(pod), PORT));
    let service = bed.service("shop/web");
    for _ in 0..20 {
        assert_eq!(ask_name(bed.pod("client"), service.at(80)).unwrap(), "one");
    }
}

#[test]
fn an_endpoint_that_refuses_is_passed_over_before_the_first_byte() {
    let bed = spread("failover", web("shop/web"));
    // Nothing listens in one and two.
    let _server = name(bed.pod("three"), PORT);
    let service = bed.service("shop/web");
    for _ in 0..20 {
        assert_eq!(ask_name(bed.pod("client"), service.at(80)).unwrap(), "three");
    }
}

#[test]
fn a_service_port_leads_to_the_named_port_of_the_endpoint() {
    let bed = Bed::builder("named")
        .node("n1")
        .node("n2")
        .pod("n1", PodSpec::new("client").account("shop/client"))
        .pod("n2", PodSpec::new("web").account("shop/web").port("http", 8088))
        .service(ServiceSpec::new("shop/web").port(80, "http").endpoint("web"))
        .start()
        .unwrap();
    let _server = echo(bed.pod("web"), 8088);
    let client = bed.pod("client");
    let seen = ask(client, bed.service("shop/web").at(80));
    let line = source_line(&bed, client, &seen);
    assert_eq!(
        (line.get("service"), line.get("path")),
        ("shop/web", "hbone"),
        "{line:?}"
    );
    assert_eq!(line.get("destination.workload"), "shop/web", "{line:?}");
}

#[test]
fn a_service_may_lead_outside_the_mesh() {
    let bed = world("outside")
        .service(ServiceSpec::new("shop/out").port(80, PORT).endpoint("other/outsider"))
        .start();
    let bed = bed.unwrap();
    let _server = echo(bed.pod("outsider"), PORT);
    let client = bed.pod("client");
    let seen = ask(client, bed.service("shop/out").at(80));
    let line = source_line(&bed, client, &seen);
    assert_eq!(
        (line.get("service"), line.get("path")),
        ("shop/out", "plain"),
        "{line:?}"
    );
}
