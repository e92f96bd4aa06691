//! Protocols in which the server speaks first work without delay.

use std::time::{Duration, Instant};

use adit_tests::bed::ServiceSpec;
use adit_tests::net::{self, Ending};

use crate::world::{LONG, PORT, name, world};

#[test]
fn a_banner_arrives_without_a_word_from_the_client_on_every_path() {
    let bed = world("banner")
        .service(ServiceSpec::new("shop/mail").port(25, PORT).endpoint("server"))
        .start()
        .unwrap();
    let client = bed.pod("client");
    let _servers = ["server", "neighbour", "outsider"].map(|pod| name(bed.pod(pod), PORT));
    let _client = name(client, PORT);
    let cases = [
        (client, bed.pod("server").at(PORT), "server"),
        (client, bed.pod("server").at6(PORT), "server"),
        (client, bed.pod("neighbour").at(PORT), "neighbour"),
        (client, bed.pod("outsider").at(PORT), "outsider"),
        (client, bed.service("shop/mail").at(25), "server"),
        (bed.pod("outsider"), bed.pod("server").at(PORT), "server"),
        (bed.pod("outsider"), client.at6(PORT), "client"),
    ];
    for (from, to, banner) in cases {
        let attempt = from.run(|| net::attempt(to)).unwrap();
        assert_eq!(
            (attempt.text.as_str(), attempt.ending),
            (banner, Some(Ending::Fin)),
            "{} to {to}",
            from.name()
        );
        // Detecting the protocol by waiting for the client takes seconds.
        assert!(attempt.took_ms < 1_000, "{} to {to}: {attempt:?}", from.name());
    }
}

#[test]
fn two_hundred_silent_clients_at_once_all_get_their_banner() {
    const COUNT: usize = 200;
    let bed = world("many banners").start().unwrap();
    let _server = name(bed.pod("server"), PORT);
    let to = bed.pod("server").at(PORT);
    let begin = Instant::now();
    let banners = bed
        .pod("client")
        .spawn(|| {
            let open = (0..COUNT)
                .map(|_| net::connect(to))
                .collect::<anyhow::Result<Vec<_>>>()?;
            Ok(open
                .iter()
                .filter(|stream| net::read_to_end(stream) == ("server".into(), Ending::Fin))
                .count())
        })
        .unwrap();
    assert_eq!(banners.join(LONG).unwrap(), COUNT);
    assert!(begin.elapsed() < Duration::from_secs(5), "{:?}", begin.elapsed());
}
