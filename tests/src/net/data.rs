//! Data to send that can be checked at the other end.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use anyhow::Context;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::Ending;

/// How many bytes and which.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Digest {
    /// The number of bytes.
    pub bytes: u64,
    /// Their SHA-256.
    pub sha256: String,
}

/// Sends so many bytes of noise that is the same for the same seed.
pub fn send_pattern(stream: &mut TcpStream, bytes: u64, seed: u64) -> anyhow::Result<Digest> {
    let mut noise = Noise(seed | 1);
    let mut hash = Sha256::new();
    let mut left = bytes;
    let mut buffer = vec![0; 256 << 10];
    while left > 0 {
        let length = buffer.len().min(usize::try_from(left)?);
        noise.fill(&mut buffer[..length]);
        hash.update(&buffer[..length]);
        stream
            .write_all(&buffer[..length])
            .with_context(|| format!("send, {left} of {bytes} bytes left"))?;
        left -= length as u64;
    }
    Ok(digest(bytes, hash))
}

/// Reads to the end and gives what came, and how it ended.
pub fn drain(stream: &mut TcpStream) -> (Digest, Ending) {
    drain_slowly(stream, 256 << 10, Duration::ZERO)
}

/// Reads to the end in pieces, with a pause after each.
pub fn drain_slowly(stream: &mut TcpStream, piece: usize, pause: Duration) -> (Digest, Ending) {
    let mut hash = Sha256::new();
    let mut bytes = 0;
    let mut buffer = vec![0; piece];
    let ending = loop {
        match stream.read(&mut buffer) {
            Ok(0) => break Ending::Fin,
            Ok(count) => {
                hash.update(&buffer[..count]);
                bytes += count as u64;
            }
            Err(error) => break Ending::of(&error),
        }
        if !pause.is_zero() {
            std::thread::sleep(pause);
        }
    };
    (digest(bytes, hash), ending)
}

fn digest(bytes: u64, hash: Sha256) -> Digest {
    let sha256 = hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
    Digest { bytes, sha256 }
}

/// xorshift64*: fast and not compressible.
struct Noise(u64);

impl Noise {
    fn fill(&mut self, buffer: &mut [u8]) {
        for chunk in buffer.chunks_mut(8) {
            self.0 ^= self.0 >> 12;
            self.0 ^= self.0 << 25;
            self.0 ^= self.0 >> 27;
            let word = self.0.wrapping_mul(0x2545_f491_4f6c_dd1d).to_le_bytes();
            chunk.copy_from_slice(&word[..chunk.len()]);
        }
    }
}
