//! A half-close arrives as a half-close, and half-closed connections do not pile up.

use std::io::Write;
use std::net::Shutdown;
use std::time::Duration;

use adit_tests::bed::{Bed, Pod, wait_for};
use adit_tests::net::{self, Ending};

use crate::world::{LONG, PORT, SOON, ask, echo, world};

const MUCH: u64 = 1 << 20;

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
fn a_client_that_ends_its_side_still_gets_the_whole_answer() {
    let bed = world("client side").start().unwrap();
    for (client, server) in pairs(&bed) {
        let running = server
            .serve(|stage| {
                net::serve_one(stage, ("::", PORT), |mut stream, _| {
                    let question = net::read_to_end(&stream);
                    // Only now, with the client's side at its end, comes the answer.
                    Ok((question, net::send_pattern(&mut stream, MUCH, 1)?))
                })
            })
            .unwrap();
        let to = server.at(PORT);
        let (got, ending) = client
            .run(|| {
                let mut stream = net::connect(to)?;
                stream.write_all(b"question")?;
                stream.shutdown(Shutdown::Write)?;
                Ok(net::drain(&mut stream))
            })
            .unwrap();
        let (question, sent) = running.join(SOON).unwrap();
        assert_eq!(
            question,
            ("question".to_owned(), Ending::Fin),
            "{} to {}",
            client.name(),
            server.name()
        );
        assert_eq!(
            (got, ending),
            (sent, Ending::Fin),
            "{} to {}",
            client.name(),
            server.name()
        );
    }
}

#[test]
fn a_server_that_ends_its_side_still_gets_what_the_client_sends() {
    let bed = world("server side").start().unwrap();
    for (client, server) in pairs(&bed) {
        let running = server
            .serve(|stage| {
                net::serve_one(stage, ("::", PORT), |mut stream, _| {
                    stream.write_all(b"bye")?;
                    stream.shutdown(Shutdown::Write)?;
                    Ok(net::drain(&mut stream))
                })
            })
            .unwrap();
        let to = server.at(PORT);
        let (greeting, sent) = client
            .run(|| {
                let mut stream = net::connect(to)?;
                let greeting = net::read_to_end(&stream);
                // The server's side has ended; this one has not.
                Ok((greeting, net::send_pattern(&mut stream, MUCH, 2)?))
            })
            .unwrap();
        assert_eq!(
            greeting,
            ("bye".to_owned(), Ending::Fin),
            "{} to {}",
            client.name(),
            server.name()
        );
        assert_eq!(
            running.join(SOON).unwrap(),
            (sent, Ending::Fin),
            "{} to {}",
            client.name(),
            server.name()
        );
    }
}

#[test]
fn half_closed_connections_leave_no_descriptor_behind() {
    const COUNT: usize = 300;
    let bed = world("piling up").start().unwrap();
    let (client, server) = (bed.pod("client"), bed.pod("server"));
    let warm = echo(server, 9090);
    ask(client, server.at(9090));
    drop(warm);
    let before: Vec<usize> = bed.nodes().iter().map(|node| node.open_files().unwrap()).collect();

    // The server ends its side of each and waits for the client's end.
    let running = server
        .serve(|stage| {
            let listener = net::listen(("::", PORT))?;
            stage.reached("listening")?;
            let mut open = Vec::with_capacity(COUNT);
            for _ in 0..COUNT {
                let (stream, _) = listener.accept()?;
                net::with_deadlines(&stream)?;
                stream.shutdown(Shutdown::Write)?;
                open.push(stream);
            }
            Ok(open
                .iter()
                .filter(|stream| net::read_to_end(stream).1 == Ending::Fin)
                .count())
        })
        .unwrap();
    let to = server.at(PORT);
    let ended = client
        .spawn(|| {
            let open = (0..COUNT)
                .map(|_| net::connect(to))
                .collect::<anyhow::Result<Vec<_>>>()?;
            // All are half-closed and silent at once; then the client closes them.
            Ok(open
                .iter()
                .filter(|stream| net::read_to_end(stream).1 == Ending::Fin)
                .count())
        })
        .unwrap();
    assert_eq!(ended.join(LONG).unwrap(), COUNT, "each client saw the server's end");
    assert_eq!(running.join(LONG).unwrap(), COUNT, "each server saw the client's end");
    for (node, before) in bed.nodes().iter().zip(before) {
        let what = format!("the descriptors of {} to return to {before}", node.name());
        // Idle tunnels may stay open.
        wait_for(&what, Duration::from_secs(8), || Ok(node.open_files()? <= before + 8)).unwrap();
    }
}
