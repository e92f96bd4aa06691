//! Certificates of SPIRE, by a real server and a real agent on each node.

use std::time::Duration;

use adit_tests::bed::{AccessLine, Bed, Node, Spire, wait_for};
use adit_tests::ca_call::openssl_req;
use adit_tests::net::{Outcome, Steady};
use serde_json::Value;

use crate::world::{LONG, PORT, SOON, ask, destination_line, echo, is_answered, world};

const LOAD: Steady = Steady {
    makers: 2,
    maker_pause: Duration::from_millis(20),
    talkers: 3,
    talker_pause: Duration::from_millis(20),
};

/// How long certificates live, in seconds, where nothing waits for their end.
const LONG_LIVED: u32 = 3600;
/// And where something does. SPIRE dates certificates 10 s back.
const SHORT_LIVED: u32 = 20;
const ENDING: Duration = Duration::from_secs(40);

const ALL: [(&str, u32); 3] = [
    ("client", LONG_LIVED),
    ("neighbour", LONG_LIVED),
    ("server", LONG_LIVED),
];

/// A bed, with SPIRE on it, pods registered for certificates that live so many seconds, and the proxies running. SPIRE ends
/// before the bed.
fn start(name: &str, registered: &[(&str, u32)]) -> (Bed, Spire) {
    let bed = world(name).build().unwrap();
    let spire = Spire::start(&bed).unwrap();
    for (pod, seconds) in registered {
        spire.register(bed.pod(pod), *seconds, &[]).unwrap();
    }
    for node in bed.nodes() {
        node.launch_with(&[&spire.flag(node.name()).unwrap()]).unwrap();
    }
    (bed, spire)
}

fn wait_until_ready(bed: &Bed) {
    bed.nodes().iter().for_each(|node| node.wait_ready(LONG).unwrap());
}

fn certificates(node: &Node, state: &str) -> f64 {
    node.metrics().unwrap().sum("adit_certificates", &[("state", state)])
}

/// Waits until a node's roots are these: of our own trust domain, and of another.
fn wait_for_roots(bed: &Bed, own: usize, foreign: usize) {
    for node in bed.nodes() {
        let what = format!("{} to have {own} roots of its own and {foreign} others", node.name());
        let there = || {
            let state = node.state()?;
            let roots = state["trust"]["roots"].as_array().cloned().unwrap_or_default();
            let (others, ours): (Vec<Value>, Vec<Value>) = roots
                .into_iter()
                .partition(|root| root["trust_domain"] == "other.example");
            let named = ours.iter().filter(|root| root["leaving"] == false).count();
            Ok((named, others.len()) == (own, foreign))
        };
        wait_for(&what, LONG, there).unwrap();
    }
}

#[test]
fn identities_come_and_go_with_their_entries_and_hold_up_no_other() {
    let (bed, spire) = start("spire", &[("client", SHORT_LIVED), ("server", LONG_LIVED)]);
    let (client, neighbour, server) = (bed.pod("client"), bed.pod("neighbour"), bed.pod("server"));
    let _server = echo(server, PORT);
    wait_until_ready(&bed);
    ask(client, server.at(PORT));
    let line = destination_line(&bed, client, server);
    assert_eq!(line.get("source.identity"), client.identity(), "{line:?}");
    // Nobody has registered it.
    assert!(!is_answered(neighbour, server.at(PORT)));
    let why = |account: &'static str| {
        move |line: &AccessLine| {
            line.get("how") == "identity" && line.get("detail").contains(&format!("k8s:sa:{account}"))
        }
    };
    let node = bed.node("n1");
    node.wait_for_access("why the neighbour is refused", SOON, why("neighbour"))
        .unwrap();

    // With an entry that federates with somebody.
    let root = bed.dir().join("other.pem");
    std::fs::write(
        &root,
        openssl_req(&["-x509", "-days", "2", "-subj", "/CN=other", "-keyout", "/dev/null"]).unwrap(),
    )
    .unwrap();
    let (other, path) = ("spiffe://other.example", root.to_str().unwrap());
    spire.server(&["bundle", "set", "-id", other, "-path", path]).unwrap();
    spire
        .register(neighbour, LONG_LIVED, &["-federatesWith", other])
        .unwrap();
    let granted = || Ok(is_answered(neighbour, server.at(PORT)));
    wait_for("the neighbour's entry to count", LONG, granted).unwrap();
    let there = || Ok(node.state()?["trust"]["roots"].to_string().contains("other.example"));
    wait_for("the other trust domain to be federated", LONG, there).unwrap();

    // What is there is served until it ends.
    spire.forget(client).unwrap();
    let noticed = || Ok(certificates(node, "failing") + certificates(node, "unavailable") >= 1.0);
    wait_for("the entry to be gone", LONG, noticed).unwrap();
    let ended = || Ok(!is_answered(client, server.at(PORT)));
    wait_for("the client's certificate to end", ENDING, ended).unwrap();
    node.wait_for_access("why the client is refused", SOON, why("client"))
        .unwrap();
    ask(neighbour, server.at(PORT));
}

#[test]
fn an_agent_that_is_away_costs_nothing_and_is_found_again() {
    let (bed, spire) = start("spire away", &ALL);
    wait_until_ready(&bed);
    let (client, neighbour, server, node) = (
        bed.pod("client"),
        bed.pod("neighbour"),
        bed.pod("server"),
        bed.node("n1"),
    );
    let _server = echo(server, PORT);
    let to = server.at(PORT);
    let load = client.serve(move |stage| LOAD.run(stage, &[to])).unwrap();
    spire.kill_agent("n1").unwrap();
    let (away, back) = (
        || Ok(certificates(node, "failing") == 2.0),
        || Ok(certificates(node, "valid") == 2.0),
    );
    wait_for("the agent to be missed", LONG, away).unwrap();
    ask(neighbour, to);
    let state = node.state().unwrap()["certificates"].to_string();
    assert!(state.contains("admin.sock"), "{state}");
    spire.start_agent("n1").unwrap();
    wait_for("the agent to be found again", LONG, back).unwrap();
    load.proceed().unwrap();
    let outcome: Outcome = load.join(LONG).unwrap();
    assert!(outcome.losses.is_empty() && outcome.made > 20, "{outcome:?}");
}

#[test]
fn the_servers_root_is_rotated_under_traffic_without_a_failed_connection() {
    let (bed, spire) = start("spire rotation", &ALL);
    wait_until_ready(&bed);
    let (client, server) = (bed.pod("client"), bed.pod("server"));
    let _server = echo(server, PORT);
    let to = server.at(PORT);
    let load = client.serve(move |stage| LOAD.run(stage, &[to])).unwrap();
    let authority = |words: &[&str]| {
        let words = [&["localauthority", "x509"], words, &["-output", "json"]].concat();
        serde_json::from_str::<Value>(&spire.server(&words).unwrap()).unwrap()
    };
    let id = |of: &Value| of["authority_id"].as_str().unwrap().to_owned();
    let old = id(&authority(&["show"])["active"]);
    wait_for_roots(&bed, 1, 0);

    let new = id(&authority(&["prepare"])["prepared_authority"]);
    wait_for_roots(&bed, 2, 0);
    authority(&["activate", "-authorityID", &new]);
    let serials = |node: &Node| -> anyhow::Result<Vec<String>> {
        let state = node.state()?;
        let all = state["certificates"].as_array().cloned().unwrap_or_default();
        Ok(all.iter().map(|one| one["serial"].to_string()).collect())
    };
    let before: Vec<_> = bed.nodes().iter().map(|node| serials(node).unwrap()).collect();
    // Agents then have all certificates below it signed anew, at once.
    authority(&["taint", "-authorityID", &old]);
    for (node, before) in bed.nodes().iter().zip(&before) {
        assert!(!before.is_empty());
        let renewed = || Ok(serials(node)?.iter().all(|serial| !before.contains(serial)));
        wait_for("certificates by the new root", LONG, renewed).unwrap();
    }
    authority(&["revoke", "-authorityID", &old]);
    wait_for_roots(&bed, 1, 0);
    load.proceed().unwrap();
    let outcome: Outcome = load.join(LONG).unwrap();
    println!("{} connections, {} exchanges", outcome.made, outcome.exchanges);
    assert!(outcome.losses.is_empty() && outcome.made > 20, "{outcome:?}");
}
