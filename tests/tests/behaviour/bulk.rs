//! Much data arrives whole, whoever is slow and whoever closes first.

use std::io::Write;
use std::net::Shutdown;
use std::time::Duration;

use adit_tests::bed::{Bed, Pod};
use adit_tests::net::{self, Ending};

use crate::world::{LONG, PORT, SOON, world};

fn pairs(bed: &Bed) -> [(&Pod, &Pod); 4] {
    let [client, neighbour, server, outsider] = ["client", "neighbour", "server", "outsider"].map(|name| bed.pod(name));
    [
        (client, server),
        (client, neighbour),
        (client, outsider),
        (outsider, server),
    ]
}

#[test]
fn sixty_four_mebibytes_each_way_at_once_arrive_whole_at_a_slow_reader() {
    const MUCH: u64 = 64 << 20;
    let bed = world("both ways").start().unwrap();
    let (client, server) = (bed.pod("client"), bed.pod("server"));
    let running = server
        .serve(|stage| {
            net::serve_one(stage, ("::", PORT), |stream, _| {
                let (mut writer, mut reader) = (stream.try_clone()?, stream);
                let writing = std::thread::spawn(move || {
                    let sent = net::send_pattern(&mut writer, MUCH, 1)?;
                    writer.shutdown(Shutdown::Write)?;
                    anyhow::Ok(sent)
                });
                let received = net::drain(&mut reader);
                let sent = writing.join().map_err(|_| anyhow::anyhow!("the writer panicked"))??;
                Ok((sent, received))
            })
        })
        .unwrap();
    let to = server.at(PORT);
    let talk = client
        .spawn(|| {
            let mut reader = net::connect(to)?;
            let mut writer = reader.try_clone()?;
            let writing = std::thread::spawn(move || {
                let sent = net::send_pattern(&mut writer, MUCH, 2)?;
                writer.shutdown(Shutdown::Write)?;
                anyhow::Ok(sent)
            });
            let received = net::drain_slowly(&mut reader, 128 << 10, Duration::from_millis(1));
            let sent = writing.join().map_err(|_| anyhow::anyhow!("the writer panicked"))??;
            Ok((sent, received))
        })
        .unwrap();
    let (client_sent, (client_got, client_end)) = talk.join(LONG).unwrap();
    let (server_sent, (server_got, server_end)) = running.join(SOON).unwrap();
    assert_eq!((&client_got, client_end), (&server_sent, Ending::Fin));
    assert_eq!((&server_got, server_end), (&client_sent, Ending::Fin));
    assert_eq!(client_got.bytes, MUCH);
}

#[test]
fn a_server_that_closes_at_once_after_its_answer_loses_nothing_to_a_slow_reader() {
    const MUCH: u64 = 24 << 20;
    let bed = world("server closes").start().unwrap();
    for (client, server) in pairs(&bed) {
        let running = server
            .serve(|stage| {
                net::serve_one(stage, ("::", PORT), |mut stream, _| {
                    net::send_pattern(&mut stream, MUCH, 3)
                })
            })
            .unwrap();
        let to = server.at(PORT);
        let reading = client
            .spawn(|| {
                let mut stream = net::connect(to)?;
                Ok(net::drain_slowly(&mut stream, 16 << 10, Duration::from_millis(1)))
            })
            .unwrap();
        let got = reading.join(LONG).unwrap();
        assert_eq!(
            got,
            (running.join(SOON).unwrap(), Ending::Fin),
            "{} to {}",
            client.name(),
            server.name()
        );
    }
}

#[test]
fn a_client_that_closes_at_once_after_its_upload_loses_nothing_to_a_slow_reader() {
    const MUCH: u64 = 24 << 20;
    let bed = world("client closes").start().unwrap();
    for (client, server) in pairs(&bed) {
        let running = server
            .serve(|stage| {
                net::serve_one(stage, ("::", PORT), |mut stream, _| {
                    Ok(net::drain_slowly(&mut stream, 16 << 10, Duration::from_millis(1)))
                })
            })
            .unwrap();
        let to = server.at(PORT);
        let sending = client
            .spawn(|| net::send_pattern(&mut net::connect(to)?, MUCH, 4))
            .unwrap();
        let sent = sending.join(LONG).unwrap();
        assert_eq!(
            running.join(LONG).unwrap(),
            (sent, Ending::Fin),
            "{} to {}",
            client.name(),
            server.name()
        );
    }
}

#[test]
fn a_word_from_a_client_that_closes_at_once_is_heard() {
    const COUNT: usize = 200;
    let bed = world("fire and forget").start().unwrap();
    for (client, server) in pairs(&bed) {
        let running = server
            .serve(|stage| {
                let listener = net::listen(("::", PORT))?;
                stage.reached("listening")?;
                let mut heard = Vec::with_capacity(COUNT);
                for _ in 0..COUNT {
                    let (stream, _) = listener.accept()?;
                    net::with_deadlines(&stream)?;
                    heard.push(net::read_to_end(&stream));
                }
                heard.sort();
                Ok(heard)
            })
            .unwrap();
        let to = server.at(PORT);
        client
            .run(|| {
                for number in 0..COUNT {
                    // Closed, and perhaps already forgotten by the client's kernel, before anybody has accepted it.
                    write!(net::connect(to)?, "word {number:03}")?;
                }
                Ok(())
            })
            .unwrap();
        let what = format!("{} to {}", client.name(), server.name());
        let heard = running.join(SOON).expect(&what);
        let wanted: Vec<_> = (0..COUNT)
            .map(|number| (format!("word {number:03}"), Ending::Fin))
            .collect();
        assert_eq!(heard, wanted, "{what}");
    }
}
