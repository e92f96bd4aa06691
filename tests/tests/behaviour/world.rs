//! The world in which most behaviours are shown, and words that their stories share.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use adit_tests::bed::{AccessLine, Bed, BedBuilder, Pod, PodSpec, Running};
use adit_tests::net::{self, Attempt, Ending, Seen};

/// How long to wait for what should happen at once.
pub(crate) const SOON: Duration = Duration::from_secs(5);

/// How long a longer piece of work in a pod may take.
pub(crate) const LONG: Duration = Duration::from_secs(20);

/// The port of most servers.
pub(crate) const PORT: u16 = 8080;

/// Depends on addresses, so that the proxy decides on each connection, and carries it, and not the kernel.
pub(crate) const BY_ADDRESS: &str = "
    name: by-address
    namespace: shop
    scope: namespace
    action: deny
    rules:
      - from:
          - ipBlocks: [192.0.2.0/24]
";

/// Two nodes. On n1 `client` and `neighbour`, on n2 `server`, each with an account of its own in namespace `shop`; on n2
/// `outsider`, a workload outside the mesh.
pub(crate) fn world(name: &str) -> BedBuilder {
    Bed::builder(name)
        .node("n1")
        .node("n2")
        .pod("n1", PodSpec::new("client").account("shop/client"))
        .pod("n1", PodSpec::new("neighbour").account("shop/neighbour"))
        .pod("n2", PodSpec::new("server").account("shop/server"))
        .pod("n2", PodSpec::new("outsider").account("other/outsider").outside())
}

/// A server for ever on every address of the pod that sends back what comes.
pub(crate) fn echo(pod: &Pod, port: u16) -> Running<()> {
    pod.serve(|stage| net::echo_forever(stage, ("::", port))).unwrap()
}

/// A server for ever on every address of the pod that says the pod's name and closes.
pub(crate) fn name(pod: &Pod, port: u16) -> Running<()> {
    let name = pod.name().to_owned();
    pod.serve(|stage| net::name_forever(stage, ("::", port), &name))
        .unwrap()
}

/// A connection of the pod that says something each time it is told to go on, and last closes.
pub(crate) fn talks(pod: &Pod, to: SocketAddr, times: usize) -> Running<()> {
    pod.serve(move |stage| {
        let mut stream = TcpStream::connect(to)?;
        net::with_deadlines(&stream)?;
        for time in 0..times {
            let said = format!("turn {time}");
            stream.write_all(said.as_bytes())?;
            let mut heard = vec![0; said.len()];
            stream.read_exact(&mut heard)?;
            anyhow::ensure!(heard == said.as_bytes(), "turn {time}");
            stage.reached(())?;
            stage.hold()?;
        }
        Ok(())
    })
    .unwrap()
}

/// The client asks an echo server, which must answer in full and in order.
pub(crate) fn ask(client: &Pod, server: SocketAddr) -> Seen {
    let text = format!("from {} to {server}", client.name());
    let seen = client.run(|| net::ask(server, &text)).unwrap();
    assert_eq!(
        (seen.text.as_str(), seen.ending),
        (text.as_str(), Ending::Fin),
        "{} asks {server}",
        client.name()
    );
    seen
}

/// Whether the client gets its answer from an echo server; false if it is refused or cut off, in whichever way.
pub(crate) fn is_answered(client: &Pod, server: SocketAddr) -> bool {
    let seen = client.run(|| net::ask(server, "are you there?"));
    seen.is_ok_and(|seen| seen.text == "are you there?" && seen.ending == Ending::Fin)
}

/// The client asks a naming server and gets the name.
pub(crate) fn ask_name(client: &Pod, server: SocketAddr) -> anyhow::Result<String> {
    let attempt = client.run(|| net::attempt(server))?;
    anyhow::ensure!(attempt.ending == Some(Ending::Fin), "{attempt:?}");
    Ok(attempt.text)
}

/// The client is told "no" plainly and at once.
pub(crate) fn assert_refused(client: &Pod, server: SocketAddr) -> Attempt {
    let attempt = client.run(|| net::attempt(server)).unwrap();
    assert!(attempt.was_refused(), "{} to {server}: {attempt:?}", client.name());
    assert!(attempt.took_ms < 2_000, "{} to {server}: {attempt:?}", client.name());
    attempt
}

/// The line that the proxy of the client's node wrote of the client's connection.
pub(crate) fn source_line(bed: &Bed, client: &Pod, seen: &Seen) -> AccessLine {
    let address = canonical(seen.local).to_string();
    let wanted = |line: &AccessLine| line.has(&[("reporter", "source"), ("source.addr", &address)]);
    bed.node(client.node())
        .wait_for_access(&format!("reporter=source source.addr={address}"), SOON, wanted)
        .unwrap()
}

/// The line that the proxy of the server's node wrote of a connection between the two.
pub(crate) fn destination_line(bed: &Bed, client: &Pod, server: &Pod) -> AccessLine {
    let (source, destination) = (client.workload(), server.workload());
    let wanted = |line: &AccessLine| {
        line.has(&[
            ("reporter", "destination"),
            ("source.workload", &source),
            ("destination.workload", &destination),
        ])
    };
    let what = format!("reporter=destination from {source} to {destination}");
    bed.node(server.node()).wait_for_access(&what, SOON, wanted).unwrap()
}

/// The address without the clothes of IPv6 that IPv4 may wear.
pub(crate) fn canonical(address: SocketAddr) -> SocketAddr {
    (address.ip().to_canonical(), address.port()).into()
}
