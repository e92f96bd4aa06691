//! Many identities with certificates that live for seconds, a CA that fails in every way by chance, and traffic all the
//! while.

use std::time::{Duration, Instant};

use adit_tests::bed::{Bed, PodSpec, wait_for};
use adit_tests::net;
use nix::sys::signal::Signal;
use serde::{Deserialize, Serialize};

use crate::world::{LONG, PORT, echo};

/// The lifetime of a certificate. It is renewed every few seconds, as it is issued with some life behind it.
const LIFETIME: Duration = Duration::from_secs(20);
/// How long the CA may be away at once: certificates outlive it.
const AWAY: Duration = Duration::from_secs(8);
/// The most that memory may grow from the first third to the last, in KiB: a store that leaked a certificate for each
/// renewal would grow by megabytes.
const GROWTH_KIB: u64 = 3 * 1024;

/// How long, and with how many identities a node: briefly, or with `ADIT_LONG` for long.
fn size() -> (Duration, usize) {
    match std::env::var("ADIT_LONG") {
        Ok(_) => (Duration::from_secs(900), 150),
        Err(_) => (Duration::from_secs(25), 20),
    }
}

/// What a pod that connects all the time has come to.
#[derive(Debug, Serialize, Deserialize)]
struct Calls {
    done: u64,
    failed: Vec<String>,
}

#[test]
fn no_connection_fails_and_nothing_leaks_while_the_ca_fails_in_every_way() {
    let (time, count) = size();
    let names = |node: &str| (0..count).map(move |n| format!("{node}-{n}")).collect::<Vec<_>>();
    let bed = ["n1", "n2"].into_iter().fold(Bed::builder("soak"), |bed, node| {
        let bed = bed.node(node);
        names(node).iter().fold(bed, |bed, name| {
            bed.pod(node, PodSpec::new(name).account(&format!("shop/{name}")))
        })
    });
    let lifetime = format!("--certificate-ttl={}s", LIFETIME.as_secs());
    let bed = bed.node_argument(&lifetime).start().unwrap();
    let pairs: Vec<_> = names("n1").into_iter().zip(names("n2")).take(8).collect();
    let _servers: Vec<_> = pairs.iter().map(|(_, server)| echo(bed.pod(server), PORT)).collect();
    let mut callers = Vec::new();
    for (client, server) in &pairs {
        let to = bed.pod(server).at(PORT);
        let caller = bed.pod(client).spawn(move || {
            let begin = Instant::now();
            let mut calls = Calls {
                done: 0,
                failed: Vec::new(),
            };
            while begin.elapsed() < time {
                // A tunnel of its own, with a handshake, now and then; it rests on whatever certificate is in force.
                match net::ask(to, "still there") {
                    Ok(seen) if seen.text == "still there" => calls.done += 1,
                    other => calls.failed.push(format!("after {:?}: {other:?}", begin.elapsed())),
                }
                std::thread::sleep(Duration::from_millis(50));
            }
            Ok(calls)
        });
        callers.push(caller.unwrap());
    }

    let mut random = fastrand::Rng::with_seed(11);
    let begin = Instant::now();
    let mut memory = Vec::new();
    let (mut stopped, mut killed) = (0, 0);
    while begin.elapsed() + AWAY < time {
        let away = Duration::from_millis(random.u64(500..=AWAY.as_millis() as u64));
        if random.bool() {
            bed.signal_ca(Signal::SIGSTOP).unwrap();
            std::thread::sleep(away);
            bed.signal_ca(Signal::SIGCONT).unwrap();
            stopped += 1;
        } else {
            bed.kill_ca();
            std::thread::sleep(away);
            bed.start_ca().unwrap();
            killed += 1;
        }
        std::thread::sleep(Duration::from_millis(random.u64(1000..4000)));
        memory.push(bed.nodes().iter().map(|node| node.resident_kib().unwrap()).sum::<u64>());
    }
    let mut done = 0;
    for (caller, (client, server)) in callers.into_iter().zip(&pairs) {
        let calls = caller.join(time + LONG).unwrap();
        assert_eq!(calls.failed, Vec::<String>::new(), "{client} to {server}");
        done += calls.done;
    }
    let mut issued = 0.0;
    for node in bed.nodes() {
        let healthy = || {
            let metrics = node.metrics()?;
            Ok(metrics.sum("adit_certificates", &[("state", "valid")]) == count as f64)
        };
        wait_for("all certificates to be healthy", Duration::from_secs(10), healthy).unwrap();
        issued += node
            .metrics()
            .unwrap()
            .sum("adit_ca_calls_total", &[("result", "issued")]);
    }
    println!(
        "{done} connections, {issued} certificates, the CA stopped {stopped} and killed {killed} times, memory {memory:?} KiB"
    );
    assert!(stopped + killed >= 2);
    assert!(issued >= 2.0 * 2.0 * count as f64, "each was renewed");
    let mean = |part: &[u64]| part.iter().sum::<u64>() / part.len().max(1) as u64;
    let third = memory.len().div_ceil(3);
    let (first, last) = (mean(&memory[..third]), mean(&memory[memory.len() - third..]));
    assert!(last <= first + GROWTH_KIB, "memory grew: {memory:?} KiB");
}
