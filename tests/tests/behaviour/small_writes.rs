//! Small writes are passed on at once.

use std::io::{Read, Write};
use std::time::{Duration, Instant};

use adit_tests::bed::{Pod, Stage};
use adit_tests::net;

use crate::world::{LONG, PORT, echo, world};

/// The times of so many exchanges, sorted, in microseconds.
fn exchanges(client: &Pod, server: &Pod, count: usize, parts: &[&str]) -> Vec<u64> {
    let to = server.at(PORT);
    let work = |_: &Stage| {
        let mut stream = net::connect(to)?;
        stream.set_nodelay(true)?;
        let mut times = Vec::with_capacity(count);
        for _ in 0..count {
            let begin = Instant::now();
            for part in parts {
                stream.write_all(part.as_bytes())?;
            }
            let length = parts.iter().map(|part| part.len()).sum();
            let mut answer = vec![0; length];
            stream.read_exact(&mut answer)?;
            times.push(u64::try_from(begin.elapsed().as_micros())?);
        }
        times.sort_unstable();
        Ok(times)
    };
    client.spawn_staged(work).unwrap().join(LONG).unwrap()
}

#[test]
fn a_thousand_exchanges_of_one_byte_wait_for_no_timer() {
    let bed = world("one byte").start().unwrap();
    for server in ["server", "neighbour"] {
        let _server = echo(bed.pod(server), PORT);
        let times = exchanges(bed.pod("client"), bed.pod(server), 1_000, &["x"]);
        let (median, p99) = (times[500], times[990]);
        // Nagle's algorithm against a delayed acknowledgement costs 40 ms. The machine may be busy, so the bounds are wide.
        assert!(median < 3_000, "to {server}: median {median} us");
        assert!(p99 < 20_000, "to {server}: 99th percentile {p99} us");
    }
}

#[test]
fn a_head_and_a_body_written_apart_wait_for_no_timer() {
    let bed = world("head and body").start().unwrap();
    let server = bed.pod("server");
    let _server = echo(server, PORT);
    let times = exchanges(
        bed.pod("client"),
        server,
        200,
        &["HEAD: of a request\r\n\r\n", "and its body"],
    );
    let median = Duration::from_micros(times[100]);
    assert!(median < Duration::from_millis(5), "median {median:?}");
}
