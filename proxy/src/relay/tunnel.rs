//! A stream of a tunnel as a side of a relay.

use std::task::{Context, Poll, Waker, ready};

use bytes::Bytes;
use h2::Reason;

use super::{Broken, Fault, Read, Write};
use crate::hbone::{self, Receiver, Sender};

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

impl TunnelWriter {
    /// Why the stream takes no more. Sending on a stream that was reset only says that it is not active.
    fn fault(&mut self, error: &h2::Error) -> Fault {
        match self.0.poll_reset(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(Ok(reason)) => of_reset(reason),
            _ => fault(error),
        }
    }
}

impl Write for TunnelWriter {
    fn poll_write(&mut self, cx: &mut Context<'_>, chunk: &mut Bytes) -> Poll<Result<(), Fault>> {
        let sent = ready!(self.0.poll_send(cx, chunk));
        Poll::Ready(sent.map_err(|error| self.fault(&error)))
    }

    fn finish(&mut self) -> Result<(), Fault> {
        self.0.finish().map_err(|error| self.fault(&error))
    }

    fn poll_broken(&mut self, cx: &mut Context<'_>) -> Poll<Broken> {
        let fault = match ready!(self.0.poll_reset(cx)) {
            Ok(reason) => of_reset(reason),
            Err(error) => fault(&error),
        };
        // Whether an END_STREAM came before a reset, HTTP/2 does not keep for the sender.
        let ended = fault == Fault::Stopped;
        Poll::Ready(Broken { fault, ended })
    }

    fn abort(&mut self, forbidden: bool) {
        self.0
            .abort(if forbidden { hbone::forbidden() } else { Reason::CANCEL });
    }
}

/// What a reset means to the one who sends. A peer that has sent all it had and wants nothing more says so by a reset
/// without an error (RFC 9113, section 8.1). Envoy ends every stream that way whose server has closed, with an internal
/// error instead where it had to wait for room before it could send the last bytes. Neither is an application's reset,
/// and where no END_STREAM came before, the reading half sees the stream broken off.
fn of_reset(reason: Reason) -> Fault {
    match reason {
        Reason::NO_ERROR | Reason::INTERNAL_ERROR | Reason::STREAM_CLOSED => Fault::Stopped,
        reason if reason == hbone::forbidden() => Fault::Forbidden,
        _ => Fault::Reset,
    }
}

fn fault(error: &h2::Error) -> Fault {
    if error.is_reset() && error.reason() == Some(hbone::forbidden()) {
        Fault::Forbidden
    } else if error.is_reset() {
        Fault::Reset
    } else {
        Fault::Other(format!("tunnel: {error}"))
    }
}
