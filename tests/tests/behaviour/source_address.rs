//! A pod with several addresses is seen by the one that it used.

use std::io::Write;
use std::net::SocketAddr;

use adit_tests::bed::{Bed, PodSpec};
use adit_tests::net;

use crate::world::{PORT, SOON, canonical};

#[test]
fn two_streams_from_two_addresses_of_a_pod_are_seen_by_their_own_address() {
    let bed = Bed::builder("two addresses")
        .node("n1")
        .node("n2")
        .pod("n1", PodSpec::new("client").account("shop/client").extra_addresses(1))
        .pod("n1", PodSpec::new("neighbour").account("shop/neighbour"))
        .pod("n2", PodSpec::new("server").account("shop/server"))
        .start()
        .unwrap();
    let client = bed.pod("client");
    for name in ["server", "neighbour"] {
        let server = bed.pod(name);
        for (to, v4) in [(server.at(PORT), true), (server.at6(PORT), false)] {
            let sources: Vec<SocketAddr> = client
                .addresses()
                .into_iter()
                .filter(|address| address.is_ipv4() == v4)
                .map(|address| (address, 0).into())
                .collect();
            assert_eq!(sources.len(), 2);
            // Both are open at once, as streams of one tunnel may be.
            let running = server
                .serve(|stage| {
                    let listener = net::listen(("::", PORT))?;
                    stage.reached("listening")?;
                    let mut open = [listener.accept()?, listener.accept()?];
                    for (stream, peer) in &mut open {
                        net::with_deadlines(stream)?;
                        let claimed = net::read_text(stream, 2)?;
                        let seen = canonical(*peer).ip().to_string();
                        write!(stream, "{seen:<45}")?;
                        stage.reached(format!("{claimed} is {seen}"))?;
                    }
                    Ok(())
                })
                .unwrap();
            let seen = client
                .run(|| {
                    let mut open = sources
                        .iter()
                        .map(|source| net::connect_from(*source, to))
                        .collect::<anyhow::Result<Vec<_>>>()?;
                    for (index, stream) in open.iter_mut().enumerate() {
                        write!(stream, "#{index}")?;
                    }
                    open.iter_mut()
                        .map(|stream| net::read_text(stream, 45))
                        .collect::<anyhow::Result<Vec<_>>>()
                })
                .unwrap();
            running.join(SOON).unwrap();
            let seen: Vec<&str> = seen.iter().map(|text| text.trim_end()).collect();
            let wanted: Vec<String> = sources.iter().map(|source| source.ip().to_string()).collect();
            assert_eq!(seen, wanted, "to {to}");
        }
    }
}
