//! A policy that changes ends the open connections that it now forbids, and no others.

use std::io::Write;
use std::time::{Duration, Instant};

use adit_tests::bed::{AccessLine, Bed, Pod, Running, Stage};
use adit_tests::net::{self, Ending, read_text};

use crate::world::{BY_ADDRESS, LONG, PORT, SOON, world};

/// A server for one connection that gives back the first word, and then says what more it saw.
fn one(server: &Pod, port: u16) -> Running<(String, Ending)> {
    let serve = move |stage: &Stage| {
        net::serve_one(stage, ("::", port), |mut stream, _| {
            let first = read_text(&mut stream, 5)?;
            stream.write_all(first.as_bytes())?;
            Ok(net::read_to_end(&stream))
        })
    };
    server.serve(serve).unwrap()
}

/// A client whose connection is open once it has reached its stage, and which then says what more it saw.
fn open(client: &Pod, server: &Pod, port: u16) -> Running<(String, Ending)> {
    let to = server.at(port);
    let work = move |stage: &Stage| {
        let mut stream = net::connect(to)?;
        stream.write_all(b"hello")?;
        anyhow::ensure!(read_text(&mut stream, 5)? == "hello", "a wrong answer");
        stage.reached("open")?;
        Ok(net::read_to_end(&stream))
    };
    let mut running = client.spawn_staged(work).unwrap();
    running.stage::<String>(SOON).unwrap();
    running
}

/// A client that, once told to proceed, shows that its connection still works, and closes it.
fn lasting(client: &Pod, server: &Pod, port: u16) -> Running<(String, Ending)> {
    let to = server.at(port);
    let work = move |stage: &Stage| {
        let mut stream = net::connect(to)?;
        stream.write_all(b"hello")?;
        anyhow::ensure!(read_text(&mut stream, 5)? == "hello", "a wrong answer");
        stage.reached("open")?;
        stage.hold()?;
        stream.write_all(b"still here")?;
        stream.shutdown(std::net::Shutdown::Write)?;
        Ok(net::read_to_end(&stream))
    };
    let mut running = client.spawn_staged(work).unwrap();
    running.stage::<String>(SOON).unwrap();
    running
}

fn forbid(bed: &Bed, rules: &str) {
    let policy = format!(
        "
        name: closed
        namespace: shop
        scope: namespace
        action: deny
        rules:
          - from:
              - {rules}
        "
    );
    bed.update(|mesh| mesh.policies.push(policy)).unwrap();
}

const OTHER_PORT: u16 = PORT + 1;

/// What both ends of a connection see that the proxy carries.
const RESET: [Ending; 2] = [Ending::RESET, Ending::RESET];

/// `forbidden` has a connection open to `server`, and so has `other`. When `rules` forbid the first, its ends see this, the
/// client's and the server's, and the line of the proxy that decided says why; the second goes on.
fn ends_only_what_is_forbidden(
    bed: &Bed,
    [forbidden, other, server]: [&str; 3],
    rules: &str,
    [client_sees, server_sees]: [Ending; 2],
) -> AccessLine {
    let [forbidden, other, server] = [forbidden, other, server].map(|name| bed.pod(name));
    let servers = [one(server, PORT), one(server, OTHER_PORT)];
    let ending = open(forbidden, server, PORT);
    let going_on = lasting(other, server, OTHER_PORT);
    let [at_server, beside] = servers;

    let start = Instant::now();
    forbid(bed, rules);
    assert_eq!(ending.join(SOON).unwrap(), (String::new(), client_sees));
    assert_eq!(at_server.join(SOON).unwrap(), (String::new(), server_sees));
    println!("{} ms from the file's change", start.elapsed().as_millis());
    assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());

    let destination = server.workload();
    let wanted = |line: &AccessLine| {
        line.has(&[
            ("how", "policy"),
            ("phase", "relay"),
            ("closed_by", "proxy"),
            ("destination.workload", &destination),
        ])
    };
    let line = bed
        .node(server.node())
        .wait_for_access("how=policy phase=relay", SOON, wanted)
        .unwrap();
    assert_eq!(line.get("detail"), "deny: shop/closed rule 0", "{line:?}");
    assert_eq!(
        (line.number("bytes_sent"), line.number("bytes_received")),
        (5, 5),
        "{line:?}"
    );

    going_on.proceed().unwrap();
    assert_eq!(going_on.join(LONG).unwrap(), (String::new(), Ending::Fin));
    assert_eq!(beside.join(LONG).unwrap(), ("still here".to_owned(), Ending::Fin));
    line
}

#[test]
fn an_open_stream_of_a_tunnel_is_reset_and_others_of_other_pods_go_on() {
    let bed = world("change hbone").start().unwrap();
    let rules = "serviceAccounts: [client]";
    let line = ends_only_what_is_forbidden(&bed, ["client", "neighbour", "server"], rules, RESET);
    assert_eq!(
        (line.get("path"), line.get("reporter")),
        ("hbone", "destination"),
        "{line:?}"
    );
    let told = |line: &AccessLine| line.has(&[("reporter", "source"), ("how", "policy"), ("closed_by", "destination")]);
    bed.node("n1").wait_for_access("the source's line", SOON, told).unwrap();
}

#[test]
fn an_open_plaintext_connection_is_reset_and_tunnels_go_on() {
    let bed = world("change plain").policy(BY_ADDRESS).start().unwrap();
    let rules = "notPrincipals: ['*']";
    let line = ends_only_what_is_forbidden(&bed, ["outsider", "client", "server"], rules, RESET);
    assert_eq!(
        (line.get("path"), line.get("source.identity")),
        ("plain", ""),
        "{line:?}"
    );
}

#[test]
fn an_open_connection_within_the_node_is_reset() {
    let bed = world("change local").policy(BY_ADDRESS).start().unwrap();
    let rules = "serviceAccounts: [client]";
    let line = ends_only_what_is_forbidden(&bed, ["client", "outsider", "neighbour"], rules, RESET);
    assert_eq!(line.get("path"), "local", "{line:?}");
}

/// The end at which the kernel has destroyed the socket.
const DESTROYED: Ending = Ending::Errno(libc::ECONNABORTED);

#[test]
fn an_open_direct_connection_from_outside_is_ended_and_those_of_the_mesh_go_on() {
    let bed = world("change outside").start().unwrap();
    let (rules, ends) = ("notPrincipals: ['*']", [Ending::RESET, DESTROYED]);
    let line = ends_only_what_is_forbidden(&bed, ["outsider", "neighbour", "client"], rules, ends);
    assert_eq!(
        (line.get("path"), line.get("reporter")),
        ("direct", "destination"),
        "{line:?}"
    );
}

#[test]
fn a_pod_that_comes_under_a_policy_by_its_labels_alone_loses_what_that_forbids() {
    let policy = "{name: by-label, namespace: shop, scope: workload, selector: {app: closed}, action: deny, \
        rules: [{from: [{serviceAccounts: [client]}]}]}";
    let bed = world("change labels").policy(policy).start().unwrap();
    let (client, server) = (bed.pod("client"), bed.pod("neighbour"));
    let at_server = one(server, PORT);
    let ending = open(client, server, PORT);
    bed.update(|mesh| {
        if let Some(workload) = mesh.workload("neighbour") {
            workload.labels.insert("app".to_owned(), "closed".to_owned());
        }
    })
    .unwrap();
    assert_eq!(ending.join(SOON).unwrap(), (String::new(), DESTROYED));
    assert_eq!(at_server.join(SOON).unwrap(), (String::new(), Ending::RESET));
}

#[test]
fn many_open_streams_are_ended_within_a_second() {
    const COUNT: usize = 300;
    let bed = world("change many").start().unwrap();
    let (client, server) = (bed.pod("client"), bed.pod("server"));
    let serve = |stage: &Stage| {
        let listener = net::listen(("::", PORT))?;
        stage.reached("listening")?;
        let open = (0..COUNT)
            .map(|_| Ok(listener.accept()?.0))
            .collect::<anyhow::Result<Vec<_>>>()?;
        stage.reached("all are there")?;
        Ok(open
            .iter()
            .filter(|stream| net::read_to_end(stream).1 == Ending::RESET)
            .count())
    };
    let mut running = server.serve(serve).unwrap();
    let to = server.at(PORT);
    let work = |stage: &Stage| {
        let open = (0..COUNT)
            .map(|_| net::connect(to))
            .collect::<anyhow::Result<Vec<_>>>()?;
        stage.reached("open")?;
        Ok(open
            .iter()
            .filter(|stream| net::read_to_end(stream).1 == Ending::RESET)
            .count())
    };
    let mut dialling = client.spawn_staged(work).unwrap();
    dialling.stage::<String>(LONG).unwrap();
    running.stage::<String>(LONG).unwrap();

    let start = Instant::now();
    forbid(&bed, "namespaces: [shop]");
    assert_eq!(dialling.join(SOON).unwrap(), COUNT);
    assert_eq!(running.join(SOON).unwrap(), COUNT);
    // The file is looked at twice a second.
    let took = start.elapsed();
    assert!(took < Duration::from_millis(1500), "{took:?}");
}
