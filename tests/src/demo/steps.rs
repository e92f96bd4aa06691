//! The steps of the demo, in order. Each shows one thing and checks it.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::Context;

use super::report::Report;
use super::world::{CLOSED_PORT, PORT, SOON, World};
use super::{authority, http, kernel, outage};
use crate::bed::process::TokenSpec;
use crate::bed::{AccessLine, Pod};
use crate::bench::load;
use crate::ca_call::{CaCall, PERMISSION_DENIED, csr};
use crate::net::{self, Ending};

/// A text that must not be readable between the nodes.
const MARKER: &str = "this-text-is-nobodys-business-7c41";

type Step = fn(&World, &mut Report) -> anyhow::Result<()>;

/// All steps between laying out and clearing away.
pub(super) const ALL: &[(&str, Step)] = &[
    ("The certificates of each node", certificates),
    ("A request from one node to the other", request),
    ("What a capture on the link between the nodes saw", wire),
    ("Two pods of one node", kernel::direct),
    ("Policy", policy),
    ("A policy that changes while a connection is open", kernel::change),
    ("The certificate authority and another node's identity", impersonation),
    ("HTTP, unmodified", http::show),
    ("Throughput against plain TCP", throughput),
    ("The certificate authority is away", authority::away),
    ("The root of the certificate authority is changed", authority::rotation),
    ("The proxy is killed", outage::killed),
    ("The proxy is replaced under load", outage::replaced),
];

fn certificates(world: &World, report: &mut Report) -> anyhow::Result<()> {
    for node in world.bed.nodes() {
        let state = node.state()?;
        let held = state["certificates"]
            .as_array()
            .context("no certificates in the state")?;
        let text = |value: &serde_json::Value| value.as_str().unwrap_or("-").to_owned();
        for certificate in held {
            report.say(format!(
                "{}  {:<42} serial {}",
                node.name(),
                text(&certificate["identity"]),
                text(&certificate["serial"])
            ));
            report.say(format!(
                "    valid {} to {}, for {} pod(s)",
                text(&certificate["not_before"]),
                text(&certificate["not_after"]),
                certificate["pods"]
            ));
        }
        let held: BTreeSet<String> = held.iter().map(|certificate| text(&certificate["identity"])).collect();
        let enrolled = world
            .bed
            .pods()
            .iter()
            .filter(|pod| pod.node() == node.name() && is_enrolled(pod));
        let own: BTreeSet<String> = enrolled.map(Pod::identity).collect();
        report.check(
            &format!("{} holds the certificates of its own pods and no other", node.name()),
            held == own && !state.to_string().contains("PRIVATE"),
            format!("{} of {}", held.len(), own.len()),
        );
    }
    Ok(())
}

fn is_enrolled(pod: &Pod) -> bool {
    pod.identity().contains("/ns/shop/")
}

fn request(world: &World, report: &mut Report) -> anyhow::Result<()> {
    let (client, server) = (world.pod("cart"), world.pod("web"));
    let dialled = world.bed.service("shop/web").at(80);
    let echo = server.serve(|stage| net::echo_once(stage, ("0.0.0.0", PORT)))?;
    let at_client = client.run(|| net::ask(dialled, MARKER))?;
    let at_server = echo.join(SOON)?;
    report.say(format!(
        "pod cart on n1 connects to {dialled} (service shop/web), sends a text and gets it back"
    ));
    report.say(format!(
        "the client sees: own address {}, peer {}, {} bytes back",
        at_client.local,
        at_client.peer,
        at_client.text.len()
    ));
    report.say(format!(
        "the server sees: own address {}, peer {}, {} bytes",
        at_server.local,
        at_server.peer,
        at_server.text.len()
    ));
    let whole = at_client.text == MARKER && at_server.text == MARKER;
    let orderly = (at_client.ending, at_server.ending) == (Ending::Fin, Ending::Fin);
    report.check(
        "the request arrived whole and so did the answer",
        whole && orderly,
        format!("{} bytes each way, closed by FIN on both sides", MARKER.len()),
    );
    report.check(
        "the client sees the address that it dialled",
        at_client.peer == dialled,
        format!("getpeername says {}", at_client.peer),
    );
    report.check(
        "the server sees the true client",
        at_server.peer.ip() == client.v4(),
        format!("accept says {}; pod cart has {}", at_server.peer.ip(), client.v4()),
    );
    let mut ends = Vec::new();
    for (reporter, pod) in [("source", "cart"), ("destination", "web")] {
        let node = world.node_of(pod);
        let wanted = |line: &AccessLine| {
            line.has(&[
                ("reporter", reporter),
                ("source.workload", &client.workload()),
                ("destination.workload", &server.workload()),
            ])
        };
        let (text, line) = world.access(node, &format!("reporter={reporter}"), wanted)?;
        report.say(format!("access log of {}:", node.name()));
        report.quote(text);
        ends.push(line);
    }
    let proven = ends.iter().all(|line| {
        line.has(&[
            ("path", "hbone"),
            ("source.identity", &client.identity()),
            ("destination.identity", &server.identity()),
            ("how", "fin"),
        ])
    });
    let certificates: BTreeSet<&str> = ends.iter().map(|line| line.get("certificate")).collect();
    report.check(
        "both access logs carry both identities, each proven by its own certificate",
        proven && certificates.len() == 2,
        format!("{} -> {}", client.identity(), server.identity()),
    );
    Ok(())
}

fn wire(world: &World, report: &mut Report) -> anyhow::Result<()> {
    let (client, server, outsider) = (world.pod("cart"), world.pod("web"), world.pod("legacy"));
    let _servers = [server, outsider]
        .map(|pod| pod.serve(|stage| net::echo_forever(stage, ("::", PORT))))
        .into_iter()
        .collect::<anyhow::Result<Vec<_>>>()?;
    let ask = |to| -> anyhow::Result<bool> {
        let seen = client.run(|| net::ask(to, MARKER))?;
        Ok(seen.text == MARKER)
    };
    let capture = world.bed.capture_link()?;
    let asked = ask(server.at(PORT))? && ask(server.at6(PORT))? && ask(world.bed.service("shop/web").at(80))?;
    let (packets, bytes, found) = (capture.packets(), capture.bytes(), capture.count(MARKER));
    let complete = capture.is_complete();
    report.say(format!(
        "pod cart says {MARKER:?} to pod web three times and hears it back: by IPv4, by IPv6, by the service"
    ));
    report.say(format!(
        "the link carried {packets} packets, {bytes} bytes; the text occurs in them {found} times"
    ));
    report.check(
        "the text is never on the wire between pods of the mesh",
        asked && complete && packets > 0 && found == 0,
        format!("{found} occurrences in {packets} packets"),
    );
    drop(capture);

    let capture = world.bed.capture_link()?;
    let asked = ask(outsider.at(PORT))?;
    let (packets, found) = (capture.packets(), capture.count(MARKER));
    report.say(format!(
        "the same text to pod legacy, outside the mesh, goes in plain: {found} times in {packets} packets"
    ));
    report.check(
        "the capture would have seen it",
        asked && found == 2,
        format!("{found} occurrences on the way to a pod outside the mesh, there and back"),
    );
    Ok(())
}

fn policy(world: &World, report: &mut Report) -> anyhow::Result<()> {
    let server = world.pod("web");
    let _servers = [PORT, CLOSED_PORT]
        .map(|port| server.serve(move |stage| net::echo_forever(stage, ("::", port))))
        .into_iter()
        .collect::<anyhow::Result<Vec<_>>>()?;
    report.say("shop/web-clients: only the service account shop/cart may connect to pod web");
    report.say("shop/no-admin-port: nobody may connect to port 9000 in namespace shop");
    let cases = [
        (
            "an account that is not on the list",
            "billing",
            PORT,
            "shop/web-clients",
        ),
        (
            "a port that is closed to all",
            "cart",
            CLOSED_PORT,
            "shop/no-admin-port",
        ),
        ("a client without an identity", "legacy", PORT, "shop/web-clients"),
    ];
    for (what, name, port, policy) in cases {
        let (client, to) = (world.pod(name), server.at(port));
        let attempt = client.run(|| net::attempt(to))?;
        let address = format!("{}:", client.v4());
        let to = to.to_string();
        let wanted = |line: &AccessLine| {
            line.has(&[("how", "policy"), ("destination.addr", &to)]) && line.get("source.addr").starts_with(&address)
        };
        let (_, line) = world.access(world.node_of("web"), "how=policy", wanted)?;
        let rule = line.get("detail");
        report.check(
            &format!("{what} is refused, with the rule that decided"),
            attempt.was_refused() && rule.contains(policy),
            format!("{name} -> {to}: reset after {} ms; {rule}", attempt.took_ms),
        );
    }
    let to = server.at(PORT);
    let seen = world.pod("cart").run(|| net::ask(to, "hello"))?;
    report.check(
        "the account on the list is admitted",
        seen.text == "hello",
        format!("cart -> {to}"),
    );
    Ok(())
}

fn impersonation(world: &World, report: &mut Report) -> anyhow::Result<()> {
    let node = world.bed.node("n1");
    let token = world.bed.token(&TokenSpec {
        node: node.name().to_owned(),
        ..TokenSpec::default()
    })?;
    report.say("with the token of n1, another program than Adit (curl) asks the certificate authority");
    for (name, entitled) in [("web", false), ("cart", true)] {
        let identity = world.pod(name).identity();
        let call = CaCall {
            token: Some(token.clone()),
            csr: csr(&identity)?,
            identity: Some(identity.clone()),
            seconds: 3600,
        };
        let answer = call.send(&world.bed, node)?;
        if entitled {
            report.check(
                "the CA gives n1 a certificate of its own pod",
                answer.status == 0 && answer.chain.len() > 1,
                format!("{identity}: a chain of {}", answer.chain.len()),
            );
        } else {
            report.check(
                "the CA refuses n1 the identity of a pod on n2",
                answer.status == PERMISSION_DENIED && answer.chain.is_empty(),
                format!("{identity}: gRPC status {}: {}", answer.status, answer.message),
            );
            let log = world.bed.ca_log();
            log.wait_for("refused", SOON)?;
            let text = log.text();
            let line = text
                .lines()
                .find(|line| line.contains("refused") && line.contains(&identity));
            report.say("audit log of the certificate authority:");
            report.quote(line.unwrap_or("(no such line)"));
        }
    }
    Ok(())
}

fn throughput(world: &World, report: &mut Report) -> anyhow::Result<()> {
    const ROUNDS: usize = 3;
    const TIME: Duration = Duration::from_millis(400);
    let pairs = [
        ("between nodes, plain TCP", "bare", "legacy"),
        ("between nodes, Adit: mutual TLS", "cart", "web"),
        ("on one node, plain TCP", "bare", "bare-2"),
        ("on one node, Adit: direct", "cart", "billing"),
    ];
    let _servers = pairs
        .map(|(_, _, server)| world.pod(server).serve(load::serve))
        .into_iter()
        .collect::<anyhow::Result<Vec<_>>>()?;
    let (mut best, mut moved) = ([0.0_f64; 4], [0_u64; 4]);
    for _ in 0..ROUNDS {
        for (index, (_, client, server)) in pairs.into_iter().enumerate() {
            let server = world.pod(server).v4().into();
            let bulk = world
                .pod(client)
                .spawn(|| load::bulk(server, 1, TIME))?
                .join(4 * SOON)?;
            best[index] = best[index].max(bulk.gbit_per_second());
            moved[index] += bulk.bytes;
        }
    }
    report.say(format!(
        "one stream, {ROUNDS} rounds of {} ms in turns, best of each:",
        TIME.as_millis()
    ));
    for (index, (what, client, server)) in pairs.into_iter().enumerate() {
        let plain = best[index & !1];
        let ratio = if index % 2 == 1 {
            format!(", {:.2} of plain", best[index] / plain)
        } else {
            String::new()
        };
        report.say(format!(
            "{what:<32} {:6.2} Gbit/s{ratio} (pod {client} to pod {server})",
            best[index]
        ));
    }
    report.check(
        "a bulk stream through Adit arrives whole",
        moved[1] > 0 && moved[3] > 0,
        format!(
            "{:.2} GB in the tunnel, {:.2} GB directly, all sent and read",
            moved[1] as f64 / 1e9,
            moved[3] as f64 / 1e9
        ),
    );
    Ok(())
}
