//! Roots come and go, with traffic running.

use std::fs;
use std::path::Path;
use std::time::Duration;

use adit_tests::bed::process::CaSettings;
use adit_tests::bed::{AccessLine, Bed, Node, wait_for};
use adit_tests::net::{Outcome, Steady};

use crate::world::{LONG, PORT, SOON, ask, echo, is_answered, talks, world};

const LOAD: Steady = Steady {
    makers: 2,
    maker_pause: Duration::from_millis(20),
    talkers: 5,
    talker_pause: Duration::from_millis(20),
};

/// Starts the CA. It, after it has made itself another root, in a folder of its own; and the roots of both.
fn two_roots(bed: &Bed, folder: &Path) -> (CaSettings, String, String) {
    let next = CaSettings {
        dir: folder.join("next-ca"),
        ..bed.ca_settings().clone()
    };
    bed.start_ca_with(&next).unwrap();
    bed.kill_ca();
    bed.start_ca().unwrap();
    bed.introduce_ca().unwrap();
    let [old, new] = [bed.ca_settings().root(), next.root()].map(|root| fs::read_to_string(root).unwrap());
    (next, old, new)
}

fn replace(file: &Path, text: &str) {
    let new = file.with_extension("new");
    fs::write(&new, text).unwrap();
    fs::rename(new, file).unwrap();
}

/// How many roots of this mesh's own trust domain the node has from this source.
fn roots(node: &Node, source: &str) -> f64 {
    let labels = [("domain", "own"), ("source", source)];
    node.metrics().unwrap().sum("adit_trust_roots", &labels)
}

fn wait_for_roots(bed: &Bed, source: &str, count: f64) {
    for node in bed.nodes() {
        let what = format!("{} to have {count} roots of {source}", node.name());
        wait_for(&what, LONG, || Ok(roots(node, source) == count)).unwrap();
    }
}

#[test]
fn a_root_is_rotated_under_traffic_without_a_failed_connection() {
    let folder = tempfile::tempdir().unwrap();
    let bundle = folder.path().join("bundle.pem");
    let bed = world("rotation")
        .certificate_lifetime(12)
        .node_argument(&format!("--trust-bundle={}", bundle.display()))
        .build()
        .unwrap();
    let (next, old, new) = two_roots(&bed, folder.path());
    fs::write(&bundle, &old).unwrap();
    bed.nodes().iter().for_each(|node| node.launch().unwrap());
    bed.nodes().iter().for_each(|node| node.wait_ready(LONG).unwrap());
    let (client, server) = (bed.pod("client"), bed.pod("server"));
    let _server = echo(server, PORT);
    ask(client, server.at(PORT));
    let to = server.at(PORT);
    let load = client.serve(move |stage| LOAD.run(stage, &[to])).unwrap();

    // Publish.
    replace(&bundle, &format!("{old}{new}"));
    replace(bed.trust_file(), &format!("{old}{new}"));
    wait_for_roots(&bed, "file", 2.0);
    // Sign.
    bed.kill_ca();
    bed.start_ca_with(&next).unwrap();
    wait_for_roots(&bed, "ca", 2.0);
    let old_ones = |node: &Node| -> anyhow::Result<bool> {
        let state = node.state()?;
        let roots = state["trust"]["roots"].as_array().cloned().unwrap_or_default();
        Ok(roots
            .iter()
            .any(|root| root["source"] == "ca" && root["leaving"] == true))
    };
    for node in bed.nodes() {
        wait_for("the CA's answers to name the old root no more", LONG, || old_ones(node)).unwrap();
    }
    // Certificates by the old root have been replaced by now, or run out while they serve nobody new.
    std::thread::sleep(Duration::from_secs(12));
    // Retire.
    replace(&bundle, &new);
    wait_for_roots(&bed, "file", 1.0);
    load.proceed().unwrap();
    let outcome: Outcome = load.join(LONG).unwrap();
    println!("{} connections, {} exchanges", outcome.made, outcome.exchanges);
    assert!(outcome.losses.is_empty(), "{:?}", outcome.losses);
    assert!(outcome.made > 300, "{outcome:?}");
}

#[test]
fn a_compromised_root_is_removed_at_once_and_what_rests_on_it_ends() {
    let folder = tempfile::tempdir().unwrap();
    let (bundle, distrusted) = (folder.path().join("bundle.pem"), folder.path().join("distrusted"));
    let bed = world("removal")
        .node_argument(&format!("--trust-bundle={}", bundle.display()))
        .node_argument(&format!("--distrust={}", distrusted.display()))
        .build()
        .unwrap();
    let (next, old, new) = two_roots(&bed, folder.path());
    fs::write(&bundle, &new).unwrap();
    bed.nodes().iter().for_each(|node| node.launch().unwrap());
    bed.nodes().iter().for_each(|node| node.wait_ready(LONG).unwrap());
    let (client, server, neighbour) = (bed.pod("client"), bed.pod("server"), bed.pod("neighbour"));
    let (_server, _neighbour) = (echo(server, PORT), echo(neighbour, PORT));
    let far = talks(client, server.at(PORT), 2);
    let mut near = talks(client, neighbour.at(PORT), 2);

    replace(&distrusted, &old);
    for (node, reporter) in [("n1", "source"), ("n2", "destination")] {
        let cut = |line: &AccessLine| {
            line.has(&[
                ("reporter", reporter),
                ("how", "identity"),
                ("closed_by", "proxy"),
                ("phase", "relay"),
            ]) && line.get("detail").contains("named as distrusted")
        };
        // Whoever is the first to cut resets the other, which may see the end of the tunnel before that of the stream.
        let other = |line: &AccessLine| {
            let ended = ["reset", "error"].contains(&line.get("how"));
            line.has(&[("reporter", reporter), ("phase", "relay")]) && ended
        };
        let what = format!("the {reporter}'s word on the connection that was cut");
        let line = bed
            .node(node)
            .wait_for_access(&what, LONG, |line| cut(line) || other(line))
            .unwrap();
        println!("{line:?}");
    }
    far.proceed().unwrap();
    assert!(far.join(SOON).is_err(), "the connection is cut");
    // No new one either: the CA has nothing but the old root.
    assert!(!is_answered(client, server.at(PORT)));
    let told = |line: &AccessLine| line.get("how") == "identity" && line.get("detail").contains("named as distrusted");
    bed.node("n1")
        .wait_for_access("why there is no new one", SOON, told)
        .unwrap();
    // Within the node nothing rests on a certificate.
    near.proceed().unwrap();
    near.stage::<()>(SOON).unwrap();

    replace(bed.trust_file(), &format!("{old}{new}"));
    bed.kill_ca();
    bed.start_ca_with(&next).unwrap();
    wait_for("connections by the new root", LONG, || {
        Ok(is_answered(client, server.at(PORT)))
    })
    .unwrap();
}
