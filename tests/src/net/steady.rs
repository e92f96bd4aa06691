//! A steady load on several servers, whose every loss is noted: for tests of what must lose nothing.

use std::io::{Read, Write};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::{Ending, ask, connect, with_deadlines};
use crate::bed::Stage;

/// The bytes of an exchange on a connection that stays open.
const EXCHANGE: usize = 4096;

/// How much there is of it, for each server.
#[derive(Debug, Clone, Copy)]
pub struct Steady {
    /// Threads that make one new connection after the other.
    pub makers: usize,
    /// The pause of each in between.
    pub maker_pause: Duration,
    /// Connections that stay open and talk all the time.
    pub talkers: usize,
    /// The pause of each in between.
    pub talker_pause: Duration,
}

/// What became of a load.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Outcome {
    /// Connections that were made, answered in full and closed in order.
    pub made: u64,
    /// Exchanges on the connections that stay open.
    pub exchanges: u64,
    /// What went wrong, each in words.
    pub losses: Vec<String>,
}

struct Load {
    shape: Steady,
    stop: AtomicBool,
    made: AtomicU64,
    exchanges: AtomicU64,
    losses: Mutex<Vec<String>>,
    begin: Instant,
}

impl Steady {
    /// Loads echo servers until the test says proceed.
    pub fn run(self, stage: &Stage, servers: &[SocketAddr]) -> anyhow::Result<Outcome> {
        let load = Arc::new(Load {
            shape: self,
            stop: AtomicBool::new(false),
            made: AtomicU64::new(0),
            exchanges: AtomicU64::new(0),
            losses: Mutex::default(),
            begin: Instant::now(),
        });
        let mut threads = Vec::new();
        for &to in servers {
            for number in 0..self.makers + self.talkers {
                let load = Arc::clone(&load);
                threads.push(thread::spawn(move || {
                    if number < load.shape.makers {
                        load.make(to);
                    } else {
                        load.talk(to);
                    }
                }));
            }
        }
        stage.reached(())?;
        stage.hold()?;
        load.stop.store(true, Ordering::Relaxed);
        for thread in threads {
            anyhow::ensure!(thread.join().is_ok(), "a thread of the load panicked");
        }
        let losses = load.losses.lock().unwrap_or_else(PoisonError::into_inner).clone();
        Ok(Outcome {
            made: load.made.load(Ordering::Relaxed),
            exchanges: load.exchanges.load(Ordering::Relaxed),
            losses,
        })
    }
}

impl Load {
    fn lost(&self, what: &str) {
        let at = self.begin.elapsed().as_millis();
        let mut losses = self.losses.lock().unwrap_or_else(PoisonError::into_inner);
        losses.push(format!("after {at} ms: {what}"));
    }

    fn make(&self, to: SocketAddr) {
        let mut number = 0_u64;
        while !self.stop.load(Ordering::Relaxed) {
            number += 1;
            let text = format!("connection {number} to {to}, {:?}", thread::current().id());
            match ask(to, &text) {
                Ok(seen) if seen.text == text && seen.ending == Ending::Fin => {
                    self.made.fetch_add(1, Ordering::Relaxed);
                }
                Ok(seen) => self.lost(&format!("asked {to} and saw {seen:?}")),
                Err(error) => self.lost(&format!("asked {to}: {error:#}")),
            }
            thread::sleep(self.shape.maker_pause);
        }
    }

    fn talk(&self, to: SocketAddr) {
        let talk = || -> anyhow::Result<()> {
            let mut stream = connect(to)?;
            with_deadlines(&stream)?;
            let (mut number, mut answer) = (0_u64, vec![0; EXCHANGE]);
            while !self.stop.load(Ordering::Relaxed) {
                number += 1;
                let sent: Vec<u8> = number.to_be_bytes().into_iter().cycle().take(EXCHANGE).collect();
                stream.write_all(&sent)?;
                stream.read_exact(&mut answer)?;
                anyhow::ensure!(answer == sent, "exchange {number} came back changed");
                self.exchanges.fetch_add(1, Ordering::Relaxed);
                thread::sleep(self.shape.talker_pause);
            }
            Ok(())
        };
        if let Err(error) = talk() {
            self.lost(&format!("talking with {to}: {error:#}"));
        }
    }
}
