//! Authorization policies: who may connect to whom.

use adit_tests::bed::{AccessLine, Bed, Pod, PodSpec, ServiceSpec, wait_for};

use crate::world::{PORT, SOON, ask, assert_refused, destination_line, echo, is_answered, world};

/// The line of the proxy at the server's node that tells of the refusal by policy.
fn refusal(bed: &Bed, client: &Pod, server: &Pod) -> AccessLine {
    let (source, destination) = (client.v4().to_string(), server.workload());
    let wanted = |line: &AccessLine| {
        line.has(&[("destination.workload", &destination), ("how", "policy")])
            && line.get("source.addr").starts_with(&source)
    };
    bed.node(server.node())
        .wait_for_access("how=policy", SOON, wanted)
        .unwrap()
}

#[test]
fn an_allow_policy_admits_its_principals_and_nobody_else() {
    let bed = world("allow")
        .policy(
            "
            name: clients
            namespace: shop
            scope: workload
            selector: {app: server}
            action: allow
            rules:
              - from:
                  - principals: [cluster.local/ns/shop/sa/client]
            ",
        )
        .start()
        .unwrap();
    let (client, server) = (bed.pod("client"), bed.pod("server"));
    let _server = echo(server, PORT);
    ask(client, server.at(PORT));
    ask(client, server.at6(PORT));
    for other in [bed.pod("neighbour"), bed.pod("outsider")] {
        assert_refused(other, server.at(PORT));
        let line = refusal(&bed, other, server);
        assert!(line.get("detail").contains("no allow policy matched"), "{line:?}");
        assert!(line.get("detail").contains("shop/clients"), "{line:?}");
    }
}

#[test]
fn a_deny_policy_by_port_refuses_that_port_only_and_its_rule_is_named() {
    let bed = world("port")
        .policy(
            "
            name: no-admin
            namespace: shop
            scope: namespace
            action: deny
            rules:
              - to:
                  - ports: ['8081']
            ",
        )
        .start()
        .unwrap();
    let (client, server) = (bed.pod("client"), bed.pod("server"));
    let _servers = [echo(server, PORT), echo(server, 8081)];
    ask(client, server.at(PORT));
    assert_refused(client, server.at(8081));
    let line = refusal(&bed, client, server);
    assert!(line.get("detail").contains("deny: shop/no-admin"), "{line:?}");
    assert_eq!(line.get("closed_by"), "proxy", "{line:?}");
    assert_eq!(line.number("bytes_sent") + line.number("bytes_received"), 0, "{line:?}");
}

#[test]
fn a_deny_policy_by_namespace_refuses_its_pods() {
    let bed = world("namespace")
        .pod("n1", PodSpec::new("stranger").account("foreign/stranger"))
        .policy(
            "
            name: no-foreigners
            namespace: shop
            scope: namespace
            action: deny
            rules:
              - from:
                  - namespaces: [foreign]
            ",
        )
        .start()
        .unwrap();
    let (client, server, stranger) = (bed.pod("client"), bed.pod("server"), bed.pod("stranger"));
    let _server = echo(server, PORT);
    ask(client, server.at(PORT));
    assert_refused(stranger, server.at(PORT));
    assert!(
        refusal(&bed, stranger, server)
            .get("detail")
            .contains("shop/no-foreigners")
    );
    // The policy is of the namespace shop: it says nothing of others.
    let _other = echo(stranger, PORT);
    ask(client, stranger.at(PORT));
}

#[test]
fn a_policy_holds_between_pods_of_one_node_too() {
    let bed = world("same node")
        .policy(
            "
            name: no-client
            namespace: shop
            scope: workload
            selector: {app: neighbour}
            action: deny
            rules:
              - from:
                  - serviceAccounts: [client]
            ",
        )
        .pod("n1", PodSpec::new("friend").account("shop/friend"))
        .start()
        .unwrap();
    let (client, friend, neighbour) = (bed.pod("client"), bed.pod("friend"), bed.pod("neighbour"));
    let _server = echo(neighbour, PORT);
    ask(friend, neighbour.at(PORT));
    assert_refused(client, neighbour.at(PORT));
    assert_refused(client, neighbour.at6(PORT));
    let wanted = |line: &AccessLine| line.get("how") == "policy" && line.get("detail").contains("shop/no-client");
    bed.node("n1").wait_for_access("the refusal", SOON, wanted).unwrap();
}

#[test]
fn a_policy_that_asks_for_an_identity_refuses_plaintext_peers() {
    let bed = world("strict")
        .policy(
            "
            name: strict
            namespace: shop
            scope: namespace
            action: deny
            rules:
              - from:
                  - notPrincipals: ['*']
            ",
        )
        .start()
        .unwrap();
    let (client, server, outsider) = (bed.pod("client"), bed.pod("server"), bed.pod("outsider"));
    let _server = echo(server, PORT);
    ask(client, server.at(PORT));
    assert_refused(outsider, server.at(PORT));
    assert_refused(outsider, server.at6(PORT));
    let line = refusal(&bed, outsider, server);
    assert_eq!(
        (line.get("path"), line.get("source.identity")),
        ("direct", ""),
        "{line:?}"
    );
}

#[test]
fn a_policy_in_dry_run_lets_pass_and_tells_what_it_would_have_refused() {
    let bed = world("dry run")
        .policy(
            "
            name: maybe
            namespace: shop
            scope: namespace
            action: deny
            dryRun: true
            rules:
              - from:
                  - namespaces: [shop]
            ",
        )
        .start()
        .unwrap();
    let (client, server) = (bed.pod("client"), bed.pod("server"));
    let _server = echo(server, PORT);
    ask(client, server.at(PORT));
    assert_eq!(destination_line(&bed, client, server).get("how"), "fin");
    let node = bed.node("n2");
    wait_for("the dry run's line", SOON, || {
        Ok(node
            .log()
            .dry_run()
            .iter()
            .any(|line| line.get("detail").contains("shop/maybe")))
    })
    .unwrap();
    assert!(node.metrics().unwrap().sum("adit_policy_dry_run_denials_total", &[]) >= 1.0);
}

#[test]
fn a_listed_policy_that_does_not_exist_denies() {
    let bed = world("missing")
        .pod(
            "n2",
            PodSpec::new("guarded").account("shop/guarded").policy("shop/absent"),
        )
        .start()
        .unwrap();
    let (client, guarded) = (bed.pod("client"), bed.pod("guarded"));
    let _server = echo(guarded, PORT);
    assert_refused(client, guarded.at(PORT));
    assert!(
        refusal(&bed, client, guarded)
            .get("detail")
            .contains("missing policy shop/absent")
    );
}

#[test]
fn a_port_in_a_policy_is_the_pods_whether_a_service_or_the_pod_is_dialled() {
    let service = |name: &str, pod: &str| {
        ServiceSpec::new(&format!("shop/{name}"))
            .port(80, PORT)
            .selector("app", pod)
    };
    let bed = world("which port")
        .service(service("near", "neighbour"))
        .service(service("far", "server"))
        .start()
        .unwrap();
    let client = bed.pod("client");
    let _servers = ["neighbour", "server"].map(|pod| echo(bed.pod(pod), PORT));
    let dialled: Vec<_> = ["neighbour", "server"]
        .iter()
        .flat_map(|pod| [bed.pod(pod).at(PORT), bed.pod(pod).at6(PORT)])
        .chain(
            ["shop/near", "shop/far"]
                .iter()
                .flat_map(|name| [bed.service(name).at(80), bed.service(name).at6(80)]),
        )
        .collect();
    let deny = |port: u16| {
        let policy = format!(
            "{{name: port-{port}, namespace: shop, scope: namespace, action: deny, rules: [{{to: [{{ports: ['{port}']}}]}}]}}"
        );
        bed.update(|mesh| mesh.policies = vec![policy]).unwrap();
        let known = || {
            let policies = bed.nodes().iter().map(|node| Ok(node.state()?["policies"].to_string()));
            let policies = policies.collect::<anyhow::Result<Vec<_>>>()?;
            Ok(policies
                .iter()
                .all(|policies| policies.contains(&format!("port-{port}"))))
        };
        wait_for("the policy", SOON, known).unwrap();
    };
    // The service's port means nothing.
    deny(80);
    for to in &dialled {
        ask(client, *to);
    }
    deny(PORT);
    for to in &dialled {
        let closed = || Ok(!is_answered(client, *to));
        wait_for(&format!("{to} to be closed"), SOON, closed).unwrap();
        assert_refused(client, *to);
    }
}
