//! Services by their virtual addresses: which endpoint, which port, and what if one fails.

use std::collections::BTreeSet;
use std::process::Command;

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
fn an_endpoint_elsewhere_that_refuses_is_passed_over_before_the_first_byte() {
    let bed = spread("failover", web("shop/web"));
    // Nothing listens in two.
    let _servers = ["one", "three"].map(|pod| name(bed.pod(pod), PORT));
    let service = bed.service("shop/web");
    for _ in 0..30 {
        let answered = ask_name(bed.pod("client"), service.at(80)).unwrap();
        assert!(["one", "three"].contains(&answered.as_str()), "{answered}");
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

/// Makes a service's virtual address lead to a pod on n2, for pods on n1: by routes and an address of the pod's, in the
/// place of the cluster's own load balancer.
fn balance(bed: &Bed, service: &str, pod: &str) {
    let address = format!("{}/32", bed.service(service).at(80).ip());
    let pod = bed.pod(pod);
    pod.output("ip", &["address", "add", &address, "dev", "lo"]).unwrap();
    for (node, via) in [("n1", bed.node("n2").v4()), ("n2", pod.v4())] {
        let via = via.to_string();
        let arguments = ["route", "add", &address, "via", &via];
        let status = bed.node(node).inside(|| Command::new("ip").args(arguments).status());
        assert!(status.unwrap().unwrap().success(), "{node} {arguments:?}");
    }
}

#[test]
fn a_service_that_leads_outside_the_mesh_alone_is_left_to_the_cluster() {
    let bed = world("outside")
        .service(ServiceSpec::new("shop/out").port(80, PORT).endpoint("other/outsider"))
        .start()
        .unwrap();
    balance(&bed, "shop/out", "outsider");
    let _server = echo(bed.pod("outsider"), 80);
    let client = bed.pod("client");
    let address = bed.service("shop/out").at(80);
    let line = source_line(&bed, client, &ask(client, address));
    assert!(
        line.has(&[
            ("service", "shop/out"),
            ("path", "direct"),
            ("destination.addr", &address.to_string()),
            ("how", "fin"),
        ]),
        "{line:?}"
    );
}

#[test]
fn a_service_may_lead_within_and_outside_the_mesh() {
    let bed = world("in and out")
        .service(
            ServiceSpec::new("shop/both")
                .port(80, PORT)
                .endpoint("other/outsider")
                .endpoint("server"),
        )
        .start()
        .unwrap();
    let _servers = ["outsider", "server"].map(|pod| echo(bed.pod(pod), PORT));
    let client = bed.pod("client");
    let ways: BTreeSet<(String, String)> = (0..30)
        .map(|_| {
            let line = source_line(&bed, client, &ask(client, bed.service("shop/both").at(80)));
            (line.get("path").to_owned(), line.get("destination.addr").to_owned())
        })
        .collect();
    let way = |path: &str, pod: &str| (path.to_owned(), bed.pod(pod).at(PORT).to_string());
    assert_eq!(
        ways,
        BTreeSet::from([way("direct", "outsider"), way("hbone", "server")])
    );
}
