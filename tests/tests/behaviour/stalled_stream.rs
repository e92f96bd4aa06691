//! A stream that is not read does not stop the others in its tunnel.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use adit_tests::bed::Stage;
use adit_tests::net::{self, read_text};

use crate::world::{LONG, PORT, world};

const STALLED: usize = 3;
const LIVELY: usize = 7;

/// Sends without end to those who say `pour`, and sends back what the others say.
fn pour_or_echo(stage: &Stage) -> anyhow::Result<()> {
    let listener = net::listen(("::", PORT))?;
    stage.reached("listening")?;
    for stream in listener.incoming() {
        let mut stream = stream?;
        std::thread::spawn(move || -> anyhow::Result<()> {
            let first = read_text(&mut stream, 4)?;
            if first == "pour" {
                let block = vec![0; 1 << 20];
                for _ in 0..64 {
                    stream.write_all(&block)?;
                }
            }
            let mut buffer = [0; 1024];
            loop {
                let count = stream.read(&mut buffer)?;
                stream.write_all(&buffer[..count])?;
                if count == 0 {
                    return Ok(());
                }
            }
        });
    }
    Ok(())
}

#[test]
fn streams_that_are_not_read_do_not_slow_the_others_of_the_same_pods() {
    let bed = world("stalled").start().unwrap();
    let (client, server) = (bed.pod("client"), bed.pod("server"));
    let _server = server.serve(pour_or_echo).unwrap();
    let to = server.at(PORT);
    let work = |_: &Stage| {
        let say = |text: &str| -> anyhow::Result<TcpStream> {
            let mut stream = net::connect(to)?;
            stream.write_all(text.as_bytes())?;
            Ok(stream)
        };
        let mut lively = (0..LIVELY).map(|_| say("echo")).collect::<anyhow::Result<Vec<_>>>()?;
        let mut stalled = (0..STALLED).map(|_| say("pour")).collect::<anyhow::Result<Vec<_>>>()?;
        // They pour: the first byte is there. Nothing is read from here on.
        for stream in &mut stalled {
            read_text(stream, 1)?;
        }
        let mut slowest = Duration::ZERO;
        for _ in 0..200 {
            for stream in &mut lively {
                let begin = Instant::now();
                stream.write_all(b"ping")?;
                anyhow::ensure!(read_text(stream, 4)? == "ping", "a wrong answer");
                slowest = slowest.max(begin.elapsed());
            }
        }
        // New ones get through as well.
        let mut late = say("echo")?;
        late.write_all(b"late")?;
        anyhow::ensure!(read_text(&mut late, 4)? == "late", "a wrong answer");
        // And what was not read is still there.
        let rest = read_text(&mut stalled[0], (64 << 20) - 1)?;
        Ok((u64::try_from(slowest.as_millis())?, rest.len()))
    };
    let (slowest_ms, rest) = client.spawn_staged(work).unwrap().join(LONG).unwrap();
    assert!(slowest_ms < 500, "the slowest exchange took {slowest_ms} ms");
    assert_eq!(rest, (64 << 20) - 1);
}
