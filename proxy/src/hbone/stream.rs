//! One stream of a tunnel: bytes both ways, half-close and reset.

use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use h2::{Reason, RecvStream, SendStream};

use super::client::StreamPlace;
use crate::identity::PeerChain;

/// An established CONNECT. Dropping it before both sides have ended resets it.
#[derive(Debug)]
pub struct Stream {
    send: SendStream<Bytes>,
    recv: RecvStream,
    /// Counts among the tunnel's streams.
    place: Option<StreamPlace>,
}

impl Stream {
    pub(super) fn new(send: SendStream<Bytes>, recv: RecvStream, place: Option<StreamPlace>) -> Self {
        Self { send, recv, place }
    }

    /// The serial number of the certificate that the tunnel's client has shown; known on the client's side.
    pub fn certificate(&self) -> Option<&Arc<str>> {
        self.place.as_ref().map(StreamPlace::certificate)
    }

    /// What the tunnel's server has shown; known on the client's side.
    pub fn peer(&self) -> Option<&Arc<PeerChain>> {
        self.place.as_ref().map(StreamPlace::peer)
    }

    /// The two directions apart.
    pub fn split(self) -> (Receiver, Sender) {
        (
            Receiver {
                recv: self.recv,
                unreleased: 0,
            },
            Sender {
                send: self.send,
                _place: self.place,
            },
        )
    }
}

/// What comes from the peer.
#[derive(Debug)]
pub struct Receiver {
    recv: RecvStream,
    /// Bytes handed out whose room the peer has not got back yet.
    unreleased: usize,
}

impl Receiver {
    /// The next bytes; none at the peer's end of the stream. Asking for more tells that the last ones are done with,
    /// and only then may the peer send as many again.
    pub fn poll_chunk(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<Bytes>, h2::Error>> {
        if self.unreleased > 0 {
            let done = std::mem::take(&mut self.unreleased);
            // Fails only for more than was received.
            let _ = self.recv.flow_control().release_capacity(done);
        }
        match ready!(self.recv.poll_data(cx)) {
            Some(Ok(chunk)) => {
                self.unreleased = chunk.len();
                Poll::Ready(Ok(Some(chunk)))
            }
            Some(Err(error)) => Poll::Ready(Err(error)),
            None => Poll::Ready(Ok(None)),
        }
    }
}

/// What goes to the peer.
#[derive(Debug)]
pub struct Sender {
    send: SendStream<Bytes>,
    _place: Option<StreamPlace>,
}

impl Sender {
    /// Hands over as much of `chunk` as the peer has room for, and takes that off it.
    pub fn poll_send(&mut self, cx: &mut Context<'_>, chunk: &mut Bytes) -> Poll<Result<(), h2::Error>> {
        while !chunk.is_empty() {
            self.send.reserve_capacity(chunk.len());
            let granted = self.send.capacity();
            if granted == 0 {
                match ready!(self.send.poll_capacity(cx)) {
                    Some(granted) => drop(granted?),
                    // The stream has ended; a reset tells why.
                    None => return Poll::Ready(Err(ready!(self.send.poll_reset(cx))?.into())),
                }
                continue;
            }
            let part = chunk.split_to(granted.min(chunk.len()));
            self.send.send_data(part, false)?;
        }
        Poll::Ready(Ok(()))
    }

    /// Ends this direction.
    pub fn finish(&mut self) -> Result<(), h2::Error> {
        self.send.send_data(Bytes::new(), true)
    }

    /// Waits for the peer to reset the stream.
    pub fn poll_reset(&mut self, cx: &mut Context<'_>) -> Poll<Result<Reason, h2::Error>> {
        self.send.poll_reset(cx)
    }

    /// Resets the stream; what the peer has not been sent yet it will not be sent.
    pub fn abort(&mut self, reason: Reason) {
        self.send.send_reset(reason);
    }
}
