//! What the kernel decides by itself, and how it is told to decide otherwise.

use std::io::Write;
use std::time::{Duration, Instant};

use super::report::Report;
use super::world::{PORT, SOON, World};
use crate::bed::{AccessLine, Node, Pod, Running, Stage};
use crate::net::{self, Digest, Ending};

/// What the step sends without the proxy.
const LENGTH: u64 = 64 << 20;

const FORBID: &str = "
    name: no-cart-in-billing
    namespace: shop
    scope: workload
    selector: {app: billing}
    action: deny
    rules:
      - from:
          - principals: [cluster.local/ns/shop/sa/cart]
";

/// Every byte that the proxy of a node has carried.
fn carried(node: &Node) -> anyhow::Result<f64> {
    let metrics = node.metrics()?;
    let sum = |path| {
        ["istio_tcp_sent_bytes_total", "istio_tcp_received_bytes_total"]
            .map(|name| metrics.sum(name, &[("path", path)]))
            .into_iter()
            .sum::<f64>()
    };
    Ok(["hbone", "local", "plain"].map(sum).into_iter().sum())
}

/// The bytes that have gone over the pod's own loopback, by which the proxy's listeners are reached.
fn over_loopback(pod: &Pod) -> anyhow::Result<u64> {
    let table = pod.output("cat", &["/proc/self/net/dev"])?;
    let line = table.lines().find_map(|line| line.trim().strip_prefix("lo:"));
    let first = line.and_then(|line| line.split_whitespace().next());
    first
        .and_then(|bytes| bytes.parse().ok())
        .ok_or_else(|| anyhow::anyhow!("no count of bytes of lo in {table}"))
}

pub(super) fn direct(world: &World, report: &mut Report) -> anyhow::Result<()> {
    let (client, server) = (world.pod("cart"), world.pod("billing"));
    let node = world.node_of("cart");
    let serving = server.serve(|stage| {
        net::serve_one(stage, ("0.0.0.0", PORT), |mut stream, peer| {
            let (digest, ending) = net::drain(&mut stream);
            stream.write_all(digest.sha256.as_bytes())?;
            Ok((peer, digest, ending))
        })
    })?;
    let to = server.at(PORT);
    let before = (carried(node)?, over_loopback(client)?, over_loopback(server)?);
    let (local, sent, answer) = client.run(|| {
        let mut stream = net::connect(to)?;
        let local = stream.local_addr()?;
        let sent = net::send_pattern(&mut stream, LENGTH, 7)?;
        stream.shutdown(std::net::Shutdown::Write)?;
        let (answer, _) = net::read_to_end(&stream);
        Ok((local, sent, answer))
    })?;
    let (peer, read, ending): (_, Digest, Ending) = serving.join(SOON)?;
    let after = (carried(node)?, over_loopback(client)?, over_loopback(server)?);
    report.say(format!(
        "pod cart sends {} MiB to pod billing on the same node, {to}, from {local}",
        LENGTH >> 20
    ));
    report.check(
        "two pods of one node are connected socket to socket",
        read == sent && answer == sent.sha256 && peer == local && ending == Ending::Fin,
        format!("the same SHA-256 at both ends; accept says {peer}"),
    );
    let loopback = (after.1 - before.1) + (after.2 - before.2);
    report.say(format!(
        "bytes over the two pods' loopback, where the proxy listens: {loopback}"
    ));
    report.check(
        "not a byte of it passed the proxy",
        after.0 == before.0 && loopback < LENGTH / 1000,
        format!(
            "the proxy had carried {:.0} bytes before, and {:.0} after",
            before.0, after.0
        ),
    );
    let from = local.to_string();
    let wanted = |line: &AccessLine| line.get("source.addr") == from;
    let (text, line) = world.access(node, "path=direct", wanted)?;
    report.say(format!("access log of {}:", node.name()));
    report.quote(text);
    let known = line.has(&[
        ("path", "direct"),
        ("source.identity", &client.identity()),
        ("destination.identity", &server.identity()),
        ("bytes_sent", &LENGTH.to_string()),
        ("bytes_received", &answer.len().to_string()),
        ("how", "fin"),
    ]);
    report.check(
        "it is logged like any other, with identities, bytes, author and round trip",
        known && !line.get("rtt_ms").is_empty() && !line.get("command").is_empty(),
        format!(
            "path=direct, {} and {} bytes, rtt_ms={}, command={}",
            line.get("bytes_sent"),
            line.get("bytes_received"),
            line.get("rtt_ms"),
            line.get("command")
        ),
    );
    Ok(())
}

/// A connection that is open, and then waits for its end.
fn watch(client: &Pod, to: std::net::SocketAddr) -> anyhow::Result<Running<Ending>> {
    let work = move |stage: &Stage| {
        let mut stream = net::connect(to)?;
        stream.write_all(b"hello")?;
        anyhow::ensure!(net::read_text(&mut stream, 5)? == "hello", "a wrong answer");
        stage.reached(())?;
        Ok(net::read_to_end(&stream).1)
    };
    let mut running = client.spawn_staged(work)?;
    running.stage::<()>(SOON)?;
    Ok(running)
}

/// A connection that is open, and shows that it still is when it is told to proceed.
fn lasting(client: &Pod, to: std::net::SocketAddr) -> anyhow::Result<Running<String>> {
    let work = move |stage: &Stage| {
        let mut stream = net::connect(to)?;
        stage.reached(())?;
        stage.hold()?;
        stream.write_all(b"still here")?;
        net::read_text(&mut stream, 10)
    };
    let mut running = client.spawn_staged(work)?;
    running.stage::<()>(SOON)?;
    Ok(running)
}

pub(super) fn change(world: &World, report: &mut Report) -> anyhow::Result<()> {
    let (client, server) = (world.pod("cart"), world.pod("billing"));
    let node = world.node_of("cart");
    let _servers = [server, client]
        .map(|pod| pod.serve(|stage| net::echo_forever(stage, ("::", PORT))))
        .into_iter()
        .collect::<anyhow::Result<Vec<_>>>()?;
    let to = server.at(PORT);
    let doomed = watch(client, to)?;
    let spared = lasting(server, client.at(PORT))?;
    report.say(format!(
        "pod cart has a direct connection open to pod billing ({to}), and pod billing one to pod cart"
    ));
    let begin = Instant::now();
    world.bed.update(|mesh| mesh.policies.push(FORBID.to_owned()))?;
    report.say("the mesh file gets a new policy, shop/no-cart-in-billing: deny shop/cart at pod billing");
    let ending = doomed.join(SOON)?;
    let took = begin.elapsed();
    let wanted = |line: &AccessLine| line.has(&[("path", "direct"), ("how", "policy"), ("phase", "relay")]);
    let (text, line) = world.access(node, "path=direct how=policy", wanted)?;
    report.quote(text);
    let ended = matches!(ending, Ending::Errno(libc::ECONNABORTED | libc::ECONNRESET));
    report.check(
        "an open direct connection that a new policy forbids is ended, and the log names the rule",
        ended && took < Duration::from_secs(1) && line.get("detail").contains("shop/no-cart-in-billing"),
        format!(
            "{} ms after the file's change (it is looked at twice a second); {}",
            took.as_millis(),
            line.get("detail")
        ),
    );
    let attempt = client.run(|| net::attempt(to))?;
    report.check(
        "a new one is refused in connect",
        attempt.connect == Some(libc::EPERM),
        format!("cart -> {to}: EPERM after {} ms", attempt.took_ms),
    );
    spared.proceed()?;
    let said = spared.join(SOON)?;
    report.check(
        "the connection that no policy forbids goes on",
        said == "still here",
        format!("billing -> {} still answers", client.at(PORT)),
    );
    world.bed.update(|mesh| drop(mesh.policies.pop()))?;
    crate::bed::wait_for("the policy to be gone", SOON, || {
        Ok(client
            .run(|| net::ask(to, "again"))
            .is_ok_and(|seen| seen.text == "again"))
    })?;
    Ok(())
}
