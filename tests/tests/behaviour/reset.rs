//! A reset arrives as a reset: in each direction, in each phase, on each path.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::{Duration, Instant};

use adit_tests::bed::{Bed, Pod, Stage};
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

/// On each path: the server does `at_server` with the connection and the client `at_client`; gives what both return.
fn on_each_path<C, S>(
    bed: &Bed,
    at_client: impl Fn(TcpStream) -> anyhow::Result<C>,
    at_server: impl Fn(TcpStream) -> anyhow::Result<S>,
    check: impl Fn(&str, C, S),
) where
    C: serde::Serialize + serde::de::DeserializeOwned,
    S: serde::Serialize + serde::de::DeserializeOwned,
{
    for (client, server) in pairs(bed) {
        let serve = |stage: &Stage| net::serve_one(stage, ("::", PORT), |stream, _| at_server(stream));
        let running = server.serve(serve).unwrap();
        let to = server.at(PORT);
        let client_saw = client
            .spawn(|| at_client(net::connect(to)?))
            .unwrap()
            .join(LONG)
            .unwrap();
        let server_saw = running.join(LONG).unwrap();
        check(
            &format!("{} to {}", client.name(), server.name()),
            client_saw,
            server_saw,
        );
    }
}

#[test]
fn a_server_reset_before_the_first_byte_reaches_the_client_as_a_reset() {
    let bed = world("at accept").start().unwrap();
    for (client, server) in pairs(&bed) {
        let serve = |stage: &Stage| net::serve_one(stage, ("::", PORT), |stream, _| net::reset(stream));
        let running = server.serve(serve).unwrap();
        let to = server.at(PORT);
        // It may come as early as in `connect` itself.
        let attempt = client.run(|| net::attempt(to)).unwrap();
        running.join(SOON).unwrap();
        let errno = attempt.connect.map(Ending::Errno).or(attempt.ending);
        assert_eq!(
            (attempt.text.as_str(), errno),
            ("", Some(Ending::RESET)),
            "{} to {}",
            client.name(),
            server.name()
        );
    }
}

#[test]
fn a_server_reset_in_the_midst_of_an_answer_reaches_the_client_as_a_reset() {
    let bed = world("midst").start().unwrap();
    on_each_path(
        &bed,
        |mut stream| {
            let first = net::read_text(&mut stream, 4)?;
            // The server knows that this much has arrived; then it resets.
            stream.write_all(b"go on")?;
            Ok((first, net::read_to_end(&stream).1))
        },
        |mut stream| {
            stream.write_all(b"half")?;
            net::read_text(&mut stream, 5)?;
            net::reset(stream)
        },
        |path, seen, ()| assert_eq!(seen, ("half".to_owned(), Ending::RESET), "{path}"),
    );
}

#[test]
fn a_client_reset_reaches_the_server_as_a_reset() {
    let bed = world("by client").start().unwrap();
    on_each_path(
        &bed,
        |mut stream| {
            stream.write_all(b"half")?;
            net::read_text(&mut stream, 5)?;
            net::reset(stream)
        },
        |mut stream| {
            let first = net::read_text(&mut stream, 4)?;
            stream.write_all(b"go on")?;
            Ok((first, net::read_to_end(&stream).1))
        },
        |path, (), seen| assert_eq!(seen, ("half".to_owned(), Ending::RESET), "{path}"),
    );
}

#[test]
fn a_client_reset_reaches_a_server_that_is_writing() {
    let bed = world("writing").start().unwrap();
    on_each_path(
        &bed,
        |mut stream| {
            net::read_text(&mut stream, 1 << 20)?;
            net::reset(stream)
        },
        |mut stream| {
            let block = [0; 64 << 10];
            // More than all buffers on the way hold.
            for _ in 0..4096 {
                if let Err(error) = stream.write_all(&block) {
                    return Ok(error.raw_os_error());
                }
            }
            Ok(None)
        },
        |path, (), errno| {
            let reset = [Some(libc::ECONNRESET), Some(libc::EPIPE)];
            assert!(reset.contains(&errno), "{path}: {errno:?}");
        },
    );
}

#[test]
fn a_client_reset_reaches_a_server_that_does_not_read() {
    let bed = world("not reading").start().unwrap();
    on_each_path(
        &bed,
        |mut stream| {
            stream.set_write_timeout(Some(Duration::from_millis(300)))?;
            let block = [0; 64 << 10];
            // Until all buffers on the way are full.
            while stream.write_all(&block).is_ok() {}
            net::reset(stream)
        },
        |stream| {
            let deadline = Instant::now() + net::STUCK;
            while Instant::now() < deadline {
                if let Some(error) = stream.take_error()? {
                    return Ok(error.raw_os_error());
                }
                std::thread::sleep(Duration::from_millis(10));
            }
            Ok(None)
        },
        |path, (), errno| assert_eq!(errno, Some(libc::ECONNRESET), "{path}"),
    );
}

#[test]
fn a_server_reset_after_the_clients_half_close_is_not_taken_for_an_end() {
    let bed = world("after half-close").start().unwrap();
    on_each_path(
        &bed,
        |stream| {
            stream.shutdown(Shutdown::Write)?;
            Ok(net::read_to_end(&stream))
        },
        |mut stream| {
            let mut rest = Vec::new();
            stream.read_to_end(&mut rest)?;
            net::reset(stream)
        },
        |path, seen, ()| assert_eq!(seen, (String::new(), Ending::RESET), "{path}"),
    );
}

#[test]
fn the_log_says_who_reset_the_connection() {
    let bed = world("who").start().unwrap();
    let (client, server) = (bed.pod("client"), bed.pod("server"));
    let running = server
        .serve(|stage| net::serve_one(stage, ("::", PORT), |stream, _| net::reset(stream)))
        .unwrap();
    let to = server.at(PORT);
    assert!(client.run(|| net::attempt(to)).unwrap().was_refused());
    running.join(SOON).unwrap();
    for node in bed.nodes() {
        let line = node
            .wait_for_access("how=reset", SOON, |line| line.get("how") == "reset")
            .unwrap();
        assert_eq!(line.get("closed_by"), "destination", "{line:?}");
    }
}
