//! The machine's clock is put forward and back, as by a time service that finds it wrong.

use std::io::Write;
use std::time::Duration;

use adit_tests::bed::wait_for;
use adit_tests::net;
use nix::sys::time::{TimeSpec, TimeValLike};
use nix::time::{ClockId, clock_gettime, clock_settime};
use serde_json::Value;

use crate::world::{LONG, PORT, ask, echo, is_answered, world};

/// Longer than certificates live here.
const STEP: Duration = Duration::from_secs(12 * 60 * 60);

/// Puts the clock forward until this is dropped.
struct Stepped;

impl Stepped {
    fn forward() -> Self {
        step(1);
        Self
    }
}

impl Drop for Stepped {
    fn drop(&mut self) {
        step(-1);
    }
}

fn step(times: i64) {
    let by = TimeSpec::seconds(times * i64::try_from(STEP.as_secs()).unwrap());
    let now = clock_gettime(ClockId::CLOCK_REALTIME).unwrap();
    clock_settime(ClockId::CLOCK_REALTIME, now + by).unwrap();
}

#[test]
#[ignore = "sets the machine's clock, so only a virtual machine runs it"]
fn certificates_follow_a_clock_that_is_stepped_and_what_is_open_goes_on() {
    let bed = world("clock").node_argument("--certificate-ttl=6h").start().unwrap();
    let (client, server) = (bed.pod("client"), bed.pod("server"));
    let _server = echo(server, PORT);
    let to = server.at(PORT);
    ask(client, to);
    let mut open = client
        .serve(move |stage| {
            let mut stream = net::connect(to)?;
            for text in ["before", "during", "after"] {
                stream.write_all(text.as_bytes())?;
                stage.reached(&net::read_text(&mut stream, text.len())?)?;
                stage.hold()?;
            }
            Ok(())
        })
        .unwrap();
    let serials = || {
        let certificates = bed.node("n1").state().unwrap()["certificates"].clone();
        let serial = |certificate: &Value| certificate["serial"].as_str().unwrap().to_owned();
        certificates.as_array().unwrap().iter().map(serial).collect::<Vec<_>>()
    };
    let first = serials();
    assert!(!first.is_empty());
    let stepped = Stepped::forward();
    // Those that are there have expired, and are no use to either side.
    wait_for("other certificates", LONG, || {
        Ok(serials().iter().all(|serial| !first.contains(serial)))
    })
    .unwrap();
    wait_for("new connections after the step", LONG, || Ok(is_answered(client, to))).unwrap();
    open.proceed().unwrap();
    assert_eq!(open.stage::<String>(LONG).unwrap(), "during");
    drop(stepped);
    // The new ones are not valid yet.
    wait_for("new connections after the step back", LONG, || {
        Ok(is_answered(client, to))
    })
    .unwrap();
    ask(client, to);
    open.proceed().unwrap();
    assert_eq!(open.stage::<String>(LONG).unwrap(), "after");
    open.proceed().unwrap();
    open.join(LONG).unwrap();
}
