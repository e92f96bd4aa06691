//! Bytes between two connections, with half-close and reset carried over.
//!
//! What each side must know of the other: its bytes, in order and whole; that it has no more to send (a half-close);
//! that it is gone (a reset). A relay adds nothing and leaves nothing out. While nothing moves it holds no buffer.

mod breaker;
mod pump;
mod tcp;
#[cfg(test)]
mod tests;
mod tunnel;

use std::sync::atomic::AtomicU64;
use std::task::{Context, Poll};

use bytes::Bytes;

pub use breaker::{Breaker, Grounds};
pub use tcp::{AppStream, TcpReader, TcpWriter};
pub use tunnel::{TunnelReader, TunnelWriter};

/// Why a side broke off.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fault {
    /// It reset the connection.
    Reset,
    /// It takes no more, but what it sent before stands: it has closed, where a mere half-close would go on taking.
    Stopped,
    /// It is another proxy, which a policy forbids to go on.
    Forbidden,
    /// It stopped answering.
    Timeout,
    /// Something else; the text says what.
    Other(String),
}

/// Which of the two sides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// The one that the connection came from.
    Client,
    /// The one that it leads to.
    Server,
}

/// How a relayed connection ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// Both sides have sent all they had; this one was the first to say so.
    Closed(Side),
    /// This side broke off, and the other was reset.
    Broken(Side, Fault),
    /// It was broken off from here, for the reason given to [`Breaker::cut`], and both sides were reset.
    Cut(Grounds, String),
}

/// The reading half of a side.
pub trait Read {
    /// The next bytes, none at the end. Asking for more tells that the last ones are done with.
    fn poll_chunk(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<Bytes>, Fault>>;
}

/// The writing half of a side.
pub trait Write {
    /// Writes as much of `chunk` as there is room for, and takes that off it; ready once it is empty.
    fn poll_write(&mut self, cx: &mut Context<'_>, chunk: &mut Bytes) -> Poll<Result<(), Fault>>;

    /// Tells that there is no more.
    fn finish(&mut self) -> Result<(), Fault>;

    /// Ready when the side has broken off, found out without writing to it; and ready from then on.
    fn poll_broken(&mut self, cx: &mut Context<'_>) -> Poll<Broken>;

    /// Tells that the connection is broken off and, where that can be told, whether because a policy forbids it.
    fn abort(&mut self, forbidden: bool);
}

/// That a side has broken off.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Broken {
    /// Why.
    pub fault: Fault,
    /// Whether it is known to have ended before: what it sent before stands, whether or not it was read yet.
    pub ended: bool,
}

/// Moves bytes between a client and a server until both have ended, one has broken off, which is then told to the
/// other, or `breaker` cuts them. `sent` and `received` count what has been passed on to the server and to the client.
///
/// Dropping the future leaves both sides to their owners, who reset them.
pub async fn relay(
    client: (impl Read, impl Write),
    server: (impl Read, impl Write),
    sent: &AtomicU64,
    received: &AtomicU64,
    breaker: Option<&Breaker>,
) -> Outcome {
    let ((mut from_client, mut to_client), (mut from_server, mut to_server)) = (client, server);
    let outcome = pump::both_ways(
        (&mut from_client, &mut to_client),
        (&mut from_server, &mut to_server),
        (sent, received),
        breaker,
    )
    .await;
    if !matches!(outcome, Outcome::Closed(_)) {
        let forbidden = matches!(
            outcome,
            Outcome::Cut(Grounds::Policy, _) | Outcome::Broken(_, Fault::Forbidden)
        );
        to_client.abort(forbidden);
        to_server.abort(forbidden);
    }
    outcome
}
