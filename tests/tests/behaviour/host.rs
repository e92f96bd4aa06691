//! Processes of the node itself have no identity: policy decides on them as on any peer outside the mesh.

use adit_tests::bed::wait_for;
use adit_tests::net::{self, Attempt};

use crate::world::{PORT, SOON, ask, echo, world};

/// Admits one account.
const ONLY_CLIENT: &str = "
    name: only-client
    namespace: shop
    scope: workload
    selector: {app: server}
    action: allow
    rules:
      - from:
          - principals: [cluster.local/ns/shop/sa/client]
";

#[test]
fn a_policy_that_asks_for_an_identity_keeps_out_the_node_and_one_that_names_its_address_admits_it() {
    let bed = world("host").start().unwrap();
    let (client, server) = (bed.pod("client"), bed.pod("server"));
    let _server = echo(server, PORT);
    let to = server.at(PORT);
    let attempt = |node: &str| -> Attempt { bed.node(node).inside(|| net::attempt(to)).unwrap().unwrap() };
    let source = |node: &str| {
        bed.node(node)
            .inside(|| net::ask(to, "hello"))
            .unwrap()
            .unwrap()
            .local
            .ip()
    };
    // From the server's own node and from the other.
    let addresses = [source("n1"), source("n2")];

    bed.update(|mesh| mesh.policies.push(ONLY_CLIENT.to_owned())).unwrap();
    for node in ["n2", "n1"] {
        wait_for("the policy to be in force", SOON, || {
            let asked = bed.node(node).inside(|| net::ask(to, "hello")).unwrap();
            Ok(asked.map_or(true, |seen| seen.text.is_empty()))
        })
        .unwrap();
        let refused = attempt(node);
        assert!(refused.was_refused() && refused.took_ms < 1_000, "{node}: {refused:?}");
    }
    ask(client, to);

    let admits = format!(
        "{{name: node, namespace: shop, scope: workload, selector: {{app: server}}, action: allow, \
         rules: [{{from: [{{ipBlocks: ['{}']}}]}}]}}",
        addresses[0]
    );
    bed.update(|mesh| mesh.policies.push(admits)).unwrap();
    wait_for("the first node to be admitted", SOON, || {
        let asked = bed.node("n1").inside(|| net::ask(to, "hello")).unwrap();
        Ok(asked.is_ok_and(|seen| seen.text == "hello"))
    })
    .unwrap();
    assert!(attempt("n2").was_refused(), "the other one is not: {addresses:?}");
}
