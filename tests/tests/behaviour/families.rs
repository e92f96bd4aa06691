//! Pods with one family of addresses, and addresses of one in the clothes of the other.

use std::net::{Ipv4Addr, SocketAddr};

use adit_tests::bed::{Bed, PodSpec, wait_for};
use adit_tests::net;

use crate::world::{PORT, SOON, ask, assert_refused, echo, source_line};

fn mapped(address: SocketAddr) -> SocketAddr {
    match address {
        SocketAddr::V4(v4) => (Ipv4Addr::to_ipv6_mapped(v4.ip()), v4.port()).into(),
        v6 => v6,
    }
}

#[test]
fn pods_without_ipv6_reach_and_are_reached() {
    let bed = Bed::builder("one family")
        .node("n1")
        .node("n2")
        .pod("n1", PodSpec::new("client").account("shop/client").ipv4_only())
        .pod("n1", PodSpec::new("neighbour").account("shop/neighbour"))
        .pod("n2", PodSpec::new("server").account("shop/server"))
        .pod("n2", PodSpec::new("only4").account("shop/only4").ipv4_only())
        .pod("n2", PodSpec::new("outsider").account("other/outsider").outside())
        .start()
        .unwrap();
    let pod = |name: &str| bed.pod(name);
    let _servers: Vec<_> = ["client", "neighbour", "server", "outsider"]
        .map(|name| echo(pod(name), PORT))
        .into();
    let only4 = pod("only4");
    let _only4 = only4
        .serve(|stage| net::echo_forever(stage, (Ipv4Addr::UNSPECIFIED, PORT)))
        .unwrap();
    for (from, to, path) in [
        ("client", "server", "hbone"),
        ("client", "only4", "hbone"),
        ("neighbour", "only4", "hbone"),
        ("only4", "client", "hbone"),
        ("server", "client", "hbone"),
        ("client", "neighbour", "direct"),
        ("neighbour", "client", "direct"),
        ("client", "outsider", "direct"),
    ] {
        let line = source_line(&bed, pod(from), &ask(pod(from), pod(to).at(PORT)));
        assert!(line.has(&[("path", path), ("how", "fin")]), "{from} to {to}: {line:?}");
    }
    ask(pod("outsider"), pod("client").at(PORT));
}

#[test]
fn a_policy_by_ipv4_addresses_holds_for_their_mapped_form() {
    let bed = crate::world::world("mapped").start().unwrap();
    let (client, server) = (bed.pod("client"), bed.pod("server"));
    let _server = echo(server, PORT);
    ask(client, mapped(server.at(PORT)));
    let block = format!("{}/32", client.v4());
    let policy = format!(
        "{{name: by-block, namespace: shop, scope: workload, selector: {{app: server}}, action: deny, \
          rules: [{{from: [{{ipBlocks: [{block}]}}]}}]}}"
    );
    bed.update(|mesh| mesh.policies.push(policy)).unwrap();
    let closed = || Ok(!crate::world::is_answered(client, server.at(PORT)));
    wait_for("the policy", SOON, closed).unwrap();
    for to in [server.at(PORT), mapped(server.at(PORT))] {
        assert!(!crate::world::is_answered(client, to), "{to}");
    }
    ask(client, server.at6(PORT));
}

#[test]
fn a_pod_of_which_one_family_is_known_gets_out_by_no_other() {
    let bed = crate::world::world("half known").build().unwrap();
    bed.update(|mesh| {
        if let Some(client) = mesh.workload("client") {
            client.addresses.retain(std::net::IpAddr::is_ipv6);
        }
    })
    .unwrap();
    bed.start_all().unwrap();
    let (client, server) = (bed.pod("client"), bed.pod("server"));
    let _server = echo(server, PORT);
    let line = source_line(&bed, client, &ask(client, server.at6(PORT)));
    assert!(line.has(&[("path", "hbone"), ("how", "fin")]), "{line:?}");
    for to in [server.at(PORT), mapped(server.at(PORT))] {
        assert_eq!(assert_refused(client, to).connect, Some(libc::EPERM), "{to}");
    }
}

/// How many pods stand so, by the metrics.
fn standing(bed: &Bed, capture: &str) -> f64 {
    let metrics = bed.node("n1").metrics().unwrap();
    metrics.sum("adit_pods", &[("capture", capture)])
}

#[test]
fn pods_that_cannot_be_served_hold_up_nobody_and_are_told_of_until_they_can_or_are_gone() {
    let bed = crate::world::world("unserved")
        .pod("n1", PodSpec::new("mended").account("shop/mended"))
        .pod("n1", PodSpec::new("deleted").account("shop/deleted"))
        .build()
        .unwrap();
    let (node, server) = (bed.node("n1"), bed.pod("server"));
    let _server = echo(server, PORT);
    // With two ports there is none for the third listener.
    let ports = |pod: &str, range: &str| {
        let write = format!("echo '{range}' > /proc/sys/net/ipv4/ip_local_port_range");
        bed.pod(pod).output("sh", &["-c", &write]).unwrap();
    };
    for pod in ["mended", "deleted"] {
        ports(pod, "20000 20001");
    }
    // Also ready, that is.
    bed.start_all().unwrap();
    ask(bed.pod("client"), server.at(PORT));
    wait_for("the figures", SOON, || {
        Ok((standing(&bed, "captured"), standing(&bed, "failed")) == (2.0, 2.0))
    })
    .unwrap();
    for pod in ["mended", "deleted"] {
        node.wait_for_log(&format!("pod shop/{pod} cannot be enrolled"), SOON)
            .unwrap();
        assert_refused(bed.pod(pod), server.at(PORT));
        let states = node.state().unwrap()["capture"].clone();
        let state = states
            .as_array()
            .unwrap()
            .iter()
            .find(|state| state["name"] == *pod)
            .unwrap();
        assert!(
            state["reason"].as_str().unwrap().contains("making listeners"),
            "{state}"
        );
    }
    ports("mended", "32768 60999");
    bed.update(|mesh| mesh.workloads.retain(|workload| workload.name != "deleted"))
        .unwrap();
    wait_for("the figures to follow", SOON, || {
        Ok((standing(&bed, "captured"), standing(&bed, "failed")) == (3.0, 0.0))
    })
    .unwrap();
    ask(bed.pod("mended"), server.at(PORT));
    assert!(!node.state().unwrap()["capture"].to_string().contains("deleted"));
    assert_eq!(node.get("/healthz/ready").unwrap().status, 200);
}
