//! Two thousand connections at once.

use std::collections::HashSet;

use adit_tests::net::{self, read_text};

use crate::world::{LONG, PORT, world};

const COUNT: usize = 2_000;
const DIGITS: usize = 6;

fn all_at_once(name: &str, server: &str) {
    let bed = world(name).start().unwrap();
    let (client, server) = (bed.pod("client"), bed.pod(server));
    let running = server
        .serve(|stage| net::answer_when_all_are_there(stage, ("::", PORT), COUNT, DIGITS))
        .unwrap();
    let to = server.at(PORT);
    let answers = client
        .spawn(|| {
            net::raise_open_files()?;
            let mut open = net::connect_many(to, COUNT, DIGITS)?;
            open.iter_mut()
                .map(|stream| read_text(stream, DIGITS))
                .collect::<anyhow::Result<Vec<String>>>()
        })
        .unwrap();
    let answers = answers.join(LONG).unwrap();
    let wanted: Vec<String> = (0..COUNT).map(|number| format!("{number:0DIGITS$}")).collect();
    assert_eq!(answers, wanted, "each connection got its own answer");
    let peers = running.join(LONG).unwrap();
    assert_eq!(peers.len(), COUNT);
    let ports: HashSet<u16> = peers.iter().map(|peer| peer.port()).collect();
    assert_eq!(ports.len(), COUNT, "the server can tell the clients apart");
}

#[test]
fn two_thousand_connections_are_open_at_once_across_nodes() {
    all_at_once("many across", "server");
}

#[test]
fn two_thousand_connections_are_open_at_once_on_one_node() {
    all_at_once("many on one", "neighbour");
}
