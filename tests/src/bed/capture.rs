//! What travels between the nodes, packet by packet.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::Context;
use socket2::Socket;

use super::netns;
use crate::sys::{kernel_drops, packet_socket};

/// How many bytes of packets are kept for [`Capture::contains`].
const KEPT_BYTES: usize = 64 << 20;

/// A running capture on the links between the nodes: every packet once, where it arrives. Ends when dropped.
#[derive(Debug)]
pub struct Capture {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
    seen: Arc<Mutex<Seen>>,
}

#[derive(Debug, Default)]
struct Seen {
    packets: u64,
    bytes: u64,
    kept: Vec<u8>,
    complete: bool,
    error: Option<String>,
    /// How often each link was found with nothing more to read.
    idle: Vec<u64>,
}

impl Capture {
    /// Captures what arrives on `device` of each of these network namespaces.
    pub(super) fn start(namespaces: Vec<PathBuf>, device: &'static str) -> anyhow::Result<Self> {
        let mut capture = Self {
            stop: Arc::default(),
            threads: Vec::new(),
            seen: Arc::new(Mutex::new(Seen {
                complete: true,
                ..Seen::default()
            })),
        };
        capture.seen().idle = vec![0; namespaces.len()];
        for (link, namespace) in namespaces.into_iter().enumerate() {
            let socket = netns::inside(&namespace, || packet_socket(device))?
                .with_context(|| format!("capture on {device} in {}", namespace.display()))?;
            socket.set_read_timeout(Some(Duration::from_millis(20)))?;
            let (stop, seen) = (Arc::clone(&capture.stop), Arc::clone(&capture.seen));
            capture
                .threads
                .push(std::thread::spawn(move || receive(&socket, link, &stop, &seen)));
        }
        Ok(capture)
    }

    /// Waits until all that has arrived before the call has been read; with traffic that never pauses, at most 2 s.
    fn settle(&self) {
        let before = self.seen().idle.clone();
        let read = || Ok(self.seen().idle.iter().zip(&before).all(|(now, before)| now > before));
        let _ = super::wait_for("the captured packets", Duration::from_secs(2), read);
    }

    /// Packets so far.
    pub fn packets(&self) -> u64 {
        self.settle();
        self.seen().packets
    }

    /// Bytes so far, with the headers.
    pub fn bytes(&self) -> u64 {
        self.settle();
        self.seen().bytes
    }

    /// Whether a packet so far has held these bytes. A text that spans two packets is not found: write it at once.
    pub fn contains(&self, text: impl AsRef<[u8]>) -> bool {
        self.settle();
        let text = text.as_ref();
        self.seen().kept.windows(text.len()).any(|window| window == text)
    }

    /// How often the bytes occur.
    pub fn count(&self, text: impl AsRef<[u8]>) -> usize {
        self.settle();
        let text = text.as_ref();
        self.seen()
            .kept
            .windows(text.len())
            .filter(|window| *window == text)
            .count()
    }

    /// Whether every packet so far was seen and kept whole; only then does the absence of a text prove anything.
    pub fn is_complete(&self) -> bool {
        self.settle();
        let seen = self.seen();
        seen.complete && seen.error.is_none()
    }

    fn seen(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Capture {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

fn receive(mut socket: &Socket, link: usize, stop: &AtomicBool, seen: &Mutex<Seen>) {
    use std::io::{ErrorKind, Read};

    // The largest packet that segmentation offload makes, with room to see that it was not cut.
    let mut packet = vec![0; 128 << 10];
    while !stop.load(Ordering::Relaxed) {
        let result = socket.read(&mut packet);
        let mut seen = seen.lock().unwrap_or_else(PoisonError::into_inner);
        match result {
            Ok(count) => {
                seen.packets += 1;
                seen.bytes += count as u64;
                if seen.kept.len() + count <= KEPT_BYTES && count < packet.len() {
                    seen.kept.extend_from_slice(&packet[..count]);
                } else {
                    seen.complete = false;
                }
            }
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {
                seen.idle[link] += 1;
                if !kernel_drops(socket).is_ok_and(|drops| drops == 0) {
                    seen.complete = false;
                }
            }
            Err(error) => {
                seen.error = Some(error.to_string());
                return;
            }
        }
    }
}
