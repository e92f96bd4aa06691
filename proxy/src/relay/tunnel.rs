//! A stream of a tunnel as a side of a relay.

use std::task::{Context, Poll, ready};

use bytes::Bytes;

use super::{Fault, Read, Write};
use crate::hbone::{Receiver, Sender};

/// The reading half.
pub struct TunnelReader(pub Receiver);

impl Read for TunnelReader {
    fn poll_chunk(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<Bytes>, Fault>> {
        loop {
            // An empty DATA frame is no end.
            match ready!(self.0.poll_chunk(cx)) {
                Ok(Some(chunk)) if chunk.is_empty() => {}
                result => return Poll::Ready(result.map_err(|error| fault(&error))),
            }
        }
    }
}

/// The writing half.
pub struct TunnelWriter(pub Sender);

impl Write for TunnelWriter {
    fn poll_write(&mut self, cx: &mut Context<'_>, chunk: &mut Bytes) -> Poll<Result<(), Fault>> {
        self.0.poll_send(cx, chunk).map_err(|error| fault(&error))
    }

    fn finish(&mut self) -> Result<(), Fault> {
        self.0.finish().map_err(|error| fault(&error))
    }

    fn poll_broken(&mut self, cx: &mut Context<'_>) -> Poll<Fault> {
        match ready!(self.0.poll_reset(cx)) {
            Ok(_) => Poll::Ready(Fault::Reset),
            Err(error) => Poll::Ready(fault(&error)),
        }
    }

    fn abort(&mut self) {
        self.0.abort();
    }
}

fn fault(error: &h2::Error) -> Fault {
    if error.is_reset() {
        Fault::Reset
    } else {
        Fault::Other(format!("tunnel: {error}"))
    }
}
