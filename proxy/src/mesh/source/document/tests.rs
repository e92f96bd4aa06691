use super::*;
use crate::identity::SpiffeError;
use crate::mesh::{ExclusionError, IpBlockError, MeshError, StringMatchError};

const HEAD: &str = "trustDomain: cluster.local\n";

fn good(text: &str) -> Mesh {
    parse(format!("{HEAD}{text}").as_bytes()).unwrap_or_else(|error| panic!("{error:?} in\n{text}"))
}

/// The fault and its line and column in the text, which begins on line 2.
fn bad(text: &str) -> (u64, u64, Fault) {
    match parse(format!("{HEAD}{text}").as_bytes()) {
        Ok(_) => panic!("taken over:\n{text}"),
        Err(Misplaced { place, fault }) => (place.line, place.column, fault),
    }
}

fn workload(more: &str) -> String {
    format!("workloads:\n  - name: cart\n    namespace: shop\n    serviceAccount: cart\n{more}")
}

#[test]
fn defaults_are_as_documented() {
    let mesh = good(&workload("    addresses: [10.0.0.1]\n"));
    assert_eq!(mesh.cluster_domain(), "cluster.local");
    let cart = mesh.workload_by_uid("shop/cart").unwrap();
    assert_eq!(cart.identity.as_str(), "spiffe://cluster.local/ns/shop/sa/cart");
    assert_eq!(
        (cart.protocol, cart.ready, &*cart.node, &*cart.zone),
        (Protocol::Hbone, true, "", "")
    );
    assert!(cart.netns.is_none() && cart.labels.is_empty() && cart.policies.is_empty());
}

#[test]
fn everything_that_can_be_written_is_taken_over() {
    let mesh = good(
        r#"
clusterDomain: mesh.test
nodes:
  - {name: n1, zone: z1, addresses: [192.0.2.1]}
workloads:
  - name: cart
    namespace: shop
    serviceAccount: cart
    uid: 0b3c
    node: n1
    addresses: [10.0.0.1, "fd00::1"]
    ports: {http: 8080}
    protocol: plain
    labels: {app: cart, version: "2"}
    policies: [shop/listed]
    ready: false
    netns: /run/netns/cart
services:
  - name: cart
    namespace: shop
    addresses: [10.96.0.1]
    ports: [{port: 80, target: http}, {port: 81, target: 8081}, {port: 82}]
    selector: {app: cart}
    distribution: PreferSameZone
"#,
    );
    let cart = mesh.workload_by_uid("0b3c").unwrap();
    assert_eq!((&*cart.zone, cart.protocol, cart.ready), ("z1", Protocol::Plain, false));
    assert_eq!(cart.ports["http"], 8080);
    assert_eq!(cart.labels["version"], "2");
    assert_eq!(cart.netns.as_deref(), Some("/run/netns/cart".as_ref()));
    assert_eq!(&*cart.policies[0], "shop/listed");
    assert_eq!(mesh.node("n1").unwrap().addresses.len(), 1);
    let service = mesh.service_by_name("shop/cart").unwrap();
    assert_eq!(&*service.hostname, "cart.shop.svc.mesh.test");
    assert_eq!(service.distribution, TrafficDistribution::PreferSameZone);
    assert_eq!(service.endpoints, [ServiceEndpoint::Workload("0b3c".into())]);
    let targets: Vec<_> = service.ports.iter().map(|port| port.target.clone()).collect();
    assert_eq!(
        targets,
        [
            TargetPort::Name("http".into()),
            TargetPort::Number(8081),
            TargetPort::Number(82)
        ]
    );
}

#[test]
fn what_a_workload_excludes_is_taken_over() {
    let mesh = good(&workload(
        "    exclude: {inboundPorts: [9090, 8000-8010], outboundPorts: [5432], outboundCidrs: [192.0.2.0/24, \"fd00::/8\"]}",
    ));
    let cart = mesh.workload_by_uid("shop/cart").unwrap();
    let exclusions = cart.exclusions.as_deref().unwrap();
    assert_eq!(
        exclusions.inbound_ports,
        ["8000-8010", "9090"].map(|ports| ports.parse().unwrap())
    );
    assert_eq!(exclusions.outbound_ports, ["5432"].map(|ports| ports.parse().unwrap()));
    assert_eq!(
        exclusions.outbound_cidrs,
        ["192.0.2.0/24", "fd00::/8"].map(|net| net.parse().unwrap())
    );
    for (port, excluded) in [(9090, true), (8005, true), (8011, false), (5432, false)] {
        assert_eq!(cart.excludes_inbound(port), excluded, "{port}");
    }
    for nothing in ["", "    exclude: {}", "    exclude: {inboundPorts: []}"] {
        let mesh = good(&workload(nothing));
        assert_eq!(mesh.workload_by_uid("shop/cart").unwrap().exclusions, None, "{nothing}");
    }
}

#[test]
fn selectors_stay_in_their_namespace_and_want_all_labels() {
    let mesh = good(
        r"
workloads:
  - {name: a, namespace: shop, serviceAccount: a, labels: {app: x, tier: front}}
  - {name: b, namespace: shop, serviceAccount: a, labels: {app: x}}
  - {name: a, namespace: bank, serviceAccount: a, labels: {app: x, tier: front}}
services:
  - {name: one, namespace: shop, ports: [{port: 1}], selector: {app: x, tier: front}}
  - {name: all, namespace: shop, ports: [{port: 1}], selector: {app: x}}
  - {name: named, namespace: shop, ports: [{port: 1}], endpoints: [b, bank/a, b]}
  - {name: none, namespace: shop, ports: [{port: 1}], endpoints: []}
policies:
  - {name: p, namespace: shop, scope: workload, selector: {app: x, tier: front}, action: deny}
",
    );
    let endpoints = |service: &str| {
        let service = mesh.service_by_name(service).unwrap();
        let uids = service.endpoints.iter().map(|endpoint| match endpoint {
            ServiceEndpoint::Workload(uid) => uid.to_string(),
            ServiceEndpoint::Resolved(_) => panic!("of another source"),
        });
        uids.collect::<Vec<_>>().join(" ")
    };
    assert_eq!(endpoints("shop/one"), "shop/a");
    assert_eq!(endpoints("shop/all"), "shop/a shop/b");
    assert_eq!(endpoints("shop/named"), "shop/b bank/a");
    assert_eq!(endpoints("shop/none"), "");
    let policies = |workload: &str| mesh.workload_by_uid(workload).unwrap().policies.join(" ");
    assert_eq!(
        (policies("shop/a"), policies("shop/b"), policies("bank/a")),
        ("shop/p".into(), String::new(), String::new())
    );
}

#[test]
fn rules_become_one_clause_for_from_and_one_for_to() {
    let mesh = good(
        r#"
policies:
  - name: p
    namespace: shop
    scope: namespace
    action: allow
    dryRun: true
    rules:
      - from:
          - principals: ["cluster.local/ns/a/*", "*/sa/b"]
            notPrincipals: ["*"]
          - namespaces: [a]
            notNamespaces: [b]
            serviceAccounts: [web, bank/teller]
            notServiceAccounts: [bank/thief]
            ipBlocks: [10.0.0.0/8, "fd00::1"]
            notIpBlocks: [10.1.0.0/16]
        to:
          - ports: [80, 443]
            notPorts: [443]
            ipBlocks: [10.0.0.1]
            notIpBlocks: [10.0.0.2]
      - {}
      - to: [{ports: [1]}]
"#,
    );
    let policy = mesh.policies().get("shop/p").unwrap();
    assert_eq!(
        (policy.scope, policy.action, policy.dry_run),
        (Scope::Namespace, Action::Allow, true)
    );
    let shape: Vec<Vec<usize>> = policy
        .rules
        .iter()
        .map(|rule| rule.clauses.iter().map(|clause| clause.matches.len()).collect())
        .collect();
    assert_eq!(shape, [vec![2, 1], vec![], vec![1]]);
    let second = &policy.rules[0].clauses[0].matches[1];
    assert_eq!(second.service_accounts[0].namespace, "shop");
    assert_eq!(second.service_accounts[1].namespace, "bank");
    assert_eq!((second.source_ips.len(), second.not_source_ips.len()), (2, 1));
    let to = &policy.rules[0].clauses[1].matches[0];
    assert_eq!(
        (&to.destination_ports[..], &to.not_destination_ports[..]),
        (&[80, 443][..], &[443][..])
    );
    assert_eq!((to.destination_ips.len(), to.not_destination_ips.len()), (1, 1));
}

#[test]
fn bad_values_are_refused_at_their_place() {
    let service = |more: &str| format!("services:\n  - name: s\n    namespace: shop\n{more}");
    let policy = |more: &str| format!("policies:\n  - name: p\n    namespace: shop\n    action: deny\n{more}");
    let rule = |more: &str| policy(&format!("    scope: namespace\n    rules:\n      - {more}"));
    let cases = [
        (
            workload("    addresses: [10.0.0.1, 10.0.0]"),
            (6, 27),
            Fault::Address("10.0.0".into()),
        ),
        (
            workload("    addresses:\n      - 10.0.0.256"),
            (7, 9),
            Fault::Address("10.0.0.256".into()),
        ),
        (workload("    netns: run/x"), (6, 12), Fault::NetnsPath("run/x".into())),
        (
            format!("nodes: [{{name: n1}}]\n{}", workload("    node: n2")),
            (7, 11),
            Fault::UnknownNode("n2".into()),
        ),
        (workload("    ports: {\"80\": 80}"), (6, 19), Fault::Port("80".into())),
        (
            workload("    ports: {http: 65536}"),
            (6, 19),
            Fault::Port("65536".into()),
        ),
        (workload("    ports: {http: -1}"), (6, 19), Fault::Port("-1".into())),
        (
            workload("    exclude: {inboundPorts: [9090, http]}"),
            (6, 36),
            Fault::Exclusion("inboundPorts", ExclusionError::Port("http".into())),
        ),
        (
            workload("    exclude: {inboundPorts: [15008]}"),
            (6, 29),
            Fault::Exclusion("inboundPorts", ExclusionError::TunnelPort),
        ),
        (
            workload("    exclude: {outboundCidrs: [10.0.0.0]}\n    ports: {http: 0}"),
            (7, 19),
            Fault::Port("0".into()),
        ),
        (
            workload("    exclude: {outboundCidrs: [net]}"),
            (6, 31),
            Fault::Exclusion("outboundCidrs", ExclusionError::Cidr("net".into())),
        ),
        (workload("    uid: 'a b'"), (6, 10), Fault::Uid("a b".into())),
        (
            "policies: [{name: a/b, scope: global, action: deny}]".into(),
            (2, 19),
            Fault::Name("a/b".into()),
        ),
        ("nodes: [{name: 'a b'}]".into(), (2, 16), Fault::Name("a b".into())),
        (
            "workloads:\n  - {name: a, namespace: b, serviceAccount: c/d}".into(),
            (3, 45),
            Fault::Identity(SpiffeError::Path),
        ),
        (
            service("    ports: [{port: 80, target: 70000}]\n    endpoints: []"),
            (5, 32),
            Fault::Port("70000".into()),
        ),
        (
            service("    ports: [{port: 80, target: 0}]\n    endpoints: []"),
            (5, 32),
            Fault::Port("0".into()),
        ),
        (service("    ports: []"), (3, 5), Fault::Endpoints),
        (
            service("    ports: []\n    endpoints: []\n    selector: {a: b}"),
            (3, 5),
            Fault::Endpoints,
        ),
        (
            service("    ports: []\n    selector: {}"),
            (6, 15),
            Fault::EmptySelector,
        ),
        (
            service("    ports: []\n    endpoints: [gone]"),
            (6, 17),
            Fault::UnknownWorkload("gone".into()),
        ),
        (
            policy("    scope: global\n    selector: {a: b}"),
            (7, 15),
            Fault::Selector,
        ),
        (
            policy("    scope: workload\n    selector: {}"),
            (7, 15),
            Fault::EmptySelector,
        ),
        (rule("from: []"), (8, 15), Fault::EmptyList("from")),
        (rule("to: []"), (8, 13), Fault::EmptyList("to")),
        (rule("from: [{}]"), (8, 16), Fault::EmptyMatch),
        (
            rule("from: [{principals: []}]"),
            (8, 29),
            Fault::EmptyList("principals"),
        ),
        (
            rule("from: [{principals: [a, a*b]}]"),
            (8, 33),
            Fault::Pattern("a*b".into(), StringMatchError::Star),
        ),
        (
            rule("from: [{principals: ['spiffe://cluster.local/ns/a/sa/b']}]"),
            (8, 30),
            Fault::Scheme("spiffe://cluster.local/ns/a/sa/b".into()),
        ),
        (
            rule("from: [{serviceAccounts: [a/b/c]}]"),
            (8, 35),
            Fault::ServiceAccount("a/b/c".into()),
        ),
        (
            rule("from: [{serviceAccounts: [a/*]}]"),
            (8, 35),
            Fault::ServiceAccount("a/*".into()),
        ),
        (
            rule("from: [{ipBlocks: [10.0.0.0/33]}]"),
            (8, 28),
            Fault::Block("10.0.0.0/33".into(), IpBlockError),
        ),
        (rule("to: [{ports: [0]}]"), (8, 23), Fault::Port("0".into())),
        (rule("to: [{ports: [65536]}]"), (8, 23), Fault::Port("65536".into())),
        (rule("to: [{ports: [http]}]"), (8, 23), Fault::Port("http".into())),
    ];
    for (text, place, fault) in cases {
        let (line, column, found) = bad(&text);
        assert_eq!(((line, column), found), (place, fault), "in\n{text}");
    }
    let Err(Misplaced { place, fault }) = parse(b"trustDomain: Cluster.Local\n") else {
        panic!("taken over");
    };
    assert_eq!(
        (place, fault),
        (
            Place { line: 1, column: 14 },
            Fault::TrustDomain(SpiffeError::TrustDomain)
        )
    );
}

#[test]
fn contradictions_are_placed_at_the_later_of_the_two() {
    let two = "
workloads:
  - {name: a, namespace: shop, serviceAccount: a, addresses: [10.0.0.1]}
  - {name: b, namespace: shop, serviceAccount: a, addresses: [10.0.0.1]}
";
    let (line, _, fault) = bad(two);
    assert_eq!(line, 5);
    assert_eq!(
        fault.to_string(),
        "workloads shop/a and shop/b both have the address 10.0.0.1"
    );
    for (text, line, fault) in [
        (
            "workloads:\n  - {name: a, namespace: b, serviceAccount: c}\n  - {name: a, namespace: b, serviceAccount: c}",
            4,
            MeshError::DuplicateUid { uid: "b/a".into() },
        ),
        (
            "nodes:\n  - name: n\n  - name: n",
            4,
            MeshError::DuplicateNode { name: "n".into() },
        ),
        (
            "services:\n  - {name: s, namespace: b, endpoints: [], ports: [{port: 1}, {port: 1}]}",
            3,
            MeshError::DuplicateServicePort {
                service: "b/s".into(),
                port: 1,
            },
        ),
        (
            "policies:\n  - {name: p, scope: namespace, action: deny}",
            3,
            MeshError::PolicyName { key: "p".into() },
        ),
    ] {
        let (found_line, _, found) = bad(text);
        assert_eq!((found_line, found), (line, Fault::Mesh(fault)), "in\n{text}");
    }
}

#[test]
fn what_is_not_the_schema_is_refused_with_line_and_reason() {
    let mut wrong = Vec::new();
    for (text, line, reason) in [
        ("workload: []", 2, "workload"),
        ("workloads:\n  - name: a\n    namespace: b", 4, "serviceAccount"),
        (&workload("    servicAccount: x"), 6, "servicAccount"),
        (&workload("    protocol: quic"), 6, "quic"),
        (&workload("    ready: maybe"), 6, "bool"),
        (&workload("    addresses: 10.0.0.1"), 6, "sequence"),
        (&workload("    addresses: [10.0.0.1"), 6, ""),
        (&workload("    name: again"), 6, "name"),
        ("trustDomain: again", 2, "trust"),
        ("workloads:\n\t- name: a", 3, ""),
        ("workloads: *nowhere", 2, "unknown anchor"),
        ("---\ntrustDomain: second", 3, "second"),
        ("policies:\n  - {name: p, scope: cluster, action: deny}", 3, "cluster"),
        ("policies:\n  - {name: p, scope: global, action: audit}", 3, "audit"),
        (
            "policies:\n  - {name: p, scope: global, action: deny, rules: [{when: []}]}",
            3,
            "when",
        ),
    ] {
        let (found_line, column, fault) = bad(text);
        let message = fault.to_string();
        let right = matches!(fault, Fault::Yaml(_))
            && message.to_lowercase().contains(&reason.to_lowercase())
            && found_line == line
            && column > 0
            && !message.contains('\n');
        if !right {
            wrong.push(format!("{found_line}:{column}: {message}\nin\n{text}\n"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn an_empty_or_cut_off_file_is_not_an_empty_mesh() {
    for text in [
        "",
        "\n",
        "# nothing\n",
        "null",
        "[]",
        "trustDomain:",
        "trustDomain: a\nworkloads:\n",
        "trustDomain: a\nwork",
    ] {
        assert!(parse(text.as_bytes()).is_err(), "{text:?}");
    }
}

#[test]
fn bytes_that_are_not_utf8_are_placed() {
    let Err(Misplaced { place, fault }) = parse(b"trustDomain: a\nx: \xc3\xa4\xff\n") else {
        panic!("taken over");
    };
    assert_eq!((place, fault), (Place { line: 2, column: 5 }, Fault::Encoding));
}

#[test]
fn bombs_are_refused_in_little_time() {
    let deep = format!("workloads: {}", "[".repeat(100_000));
    let nested: String = (0..5_000).map(|depth| format!("{}a:\n", " ".repeat(depth))).collect();
    let mut laughs = String::from("a0: &a0 [x, x, x, x, x, x, x, x, x]\n");
    for level in 1..30 {
        let row = format!("*a{},", level - 1).repeat(9);
        laughs.push_str(&format!("a{level}: &a{level} [{row}]\n"));
    }
    let begun = std::time::Instant::now();
    for text in [deep, nested, laughs] {
        let (line, _, fault) = bad(&text);
        assert!(line > 0 && matches!(fault, Fault::Yaml(_)), "{fault:?}");
    }
    assert!(begun.elapsed().as_secs() < 10);
}

#[test]
fn random_damage_never_panics() {
    let example = include_str!("../../../../../deploy/mesh.example.yaml");
    let mut rng = fastrand::Rng::with_seed(7);
    for _ in 0..2_000 {
        let mut bytes = example.as_bytes().to_vec();
        for _ in 0..rng.usize(1..4) {
            let at = rng.usize(..bytes.len());
            match rng.u8(..3) {
                0 => bytes[at] = rng.u8(..),
                1 => bytes.truncate(at.max(1)),
                _ => bytes.insert(at, *rng.choice(b"[]{}:-&*!|>'\"%@`#, \n\t").unwrap()),
            }
        }
        if let Err(Misplaced { fault, .. }) = parse(&bytes) {
            assert!(!fault.to_string().is_empty());
        }
    }
}

#[test]
fn the_example_is_a_mesh() {
    let mesh = parse(include_bytes!("../../../../../deploy/mesh.example.yaml")).unwrap();
    assert!(mesh.nodes().count() > 1 && mesh.workloads().count() > 3);
    assert!(mesh.services().count() > 1 && mesh.policies().len() > 3);
    // Every policy that a workload lists is there.
    for workload in mesh.workloads() {
        assert!(
            workload.policies.iter().all(|key| mesh.policies().get(key).is_some()),
            "{}",
            workload.uid
        );
    }
}
