//! Bytes between two connections, with half-close and reset carried over.
//!
//! What each side must know of the other: its bytes, in order and whole; that it has no more to send (a half-close);
//! that it is gone (a reset). A relay adds nothing and leaves nothing out. While nothing moves it holds no buffer.

mod tcp;
mod tunnel;

use std::cell::Cell;
use std::future::poll_fn;
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, ready};

use bytes::Bytes;

pub use tcp::{AppStream, TcpReader, TcpWriter};
pub use tunnel::{TunnelReader, TunnelWriter};

/// Why a side broke off.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fault {
    /// It reset the connection.
    Reset,
    /// It takes no more, but what it sent before stands: it has closed, where a mere half-close would go on taking.
    Stopped,
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

    /// Ready when the side has broken off, found out without writing to it.
    fn poll_broken(&mut self, cx: &mut Context<'_>) -> Poll<Fault>;

    /// Tells that the connection is broken off.
    fn abort(&mut self);
}

/// Moves bytes between a client and a server until both have ended, or one has broken off, which is then told to the
/// other. `sent` and `received` count what has been passed on to the server and to the client.
///
/// Dropping the future leaves both sides to their owners, who reset them.
pub async fn relay(
    client: (impl Read, impl Write),
    server: (impl Read, impl Write),
    sent: &AtomicU64,
    received: &AtomicU64,
) -> Outcome {
    let ((mut from_client, mut to_client), (mut from_server, mut to_server)) = (client, server);
    let result = both_ways(
        (&mut from_client, &mut to_client),
        (&mut from_server, &mut to_server),
        sent,
        received,
    )
    .await;
    result.unwrap_or_else(|(side, fault)| {
        to_client.abort();
        to_server.abort();
        Outcome::Broken(side, fault)
    })
}

type Broken = (Side, Fault);

async fn both_ways(
    (from_client, to_client): (&mut impl Read, &mut impl Write),
    (from_server, to_server): (&mut impl Read, &mut impl Write),
    sent: &AtomicU64,
    received: &AtomicU64,
) -> Result<Outcome, Broken> {
    let first_end = Cell::new(None);
    let mut up = pin!(pump(from_client, to_server, Side::Client, sent, &first_end));
    let mut down = pin!(pump(from_server, to_client, Side::Server, received, &first_end));
    let (mut up_done, mut down_done) = (false, false);
    poll_fn(|cx| {
        let first_before = first_end.get();
        // A direction that ends lets the other watch for a reset, for which that must be polled once more.
        for _ in 0..2 {
            if !up_done && let Poll::Ready(result) = up.as_mut().poll(cx) {
                result?;
                up_done = true;
            }
            if !down_done && let Poll::Ready(result) = down.as_mut().poll(cx) {
                result?;
                down_done = true;
            }
            if first_end.get() == first_before {
                break;
            }
        }
        match first_end.get() {
            Some(side) if up_done && down_done => Poll::Ready(Ok(Outcome::Closed(side))),
            _ => Poll::Pending,
        }
    })
    .await
}

/// One direction: from `from`, which is `side`, to the other side.
async fn pump(
    from: &mut impl Read,
    to: &mut impl Write,
    side: Side,
    count: &AtomicU64,
    first_end: &Cell<Option<Side>>,
) -> Result<(), Broken> {
    let other = match side {
        Side::Client => Side::Server,
        Side::Server => Side::Client,
    };
    match pass_on(from, to, (side, other), count, first_end).await {
        Err((at, Fault::Stopped)) if at == other => discard(from, (side, other), first_end).await,
        result => result,
    }
}

async fn pass_on(
    from: &mut impl Read,
    to: &mut impl Write,
    (side, other): (Side, Side),
    count: &AtomicU64,
    first_end: &Cell<Option<Side>>,
) -> Result<(), Broken> {
    loop {
        let next = poll_fn(|cx| {
            if let Poll::Ready(result) = from.poll_chunk(cx) {
                return Poll::Ready(result.map_err(|fault| (side, fault)));
            }
            // While the other direction still reads, a reset is found out there.
            if first_end.get() == Some(other) {
                return Poll::Ready(Err((other, ready!(to.poll_broken(cx)))));
            }
            Poll::Pending
        });
        let Some(mut chunk) = next.await? else { break };
        let len = chunk.len() as u64;
        poll_fn(|cx| to.poll_write(cx, &mut chunk))
            .await
            .map_err(|fault| (other, fault))?;
        count.fetch_add(len, Ordering::Relaxed);
    }
    to.finish().map_err(|fault| (other, fault))?;
    if first_end.get().is_none() {
        first_end.set(Some(side));
    }
    Ok(())
}

/// What `side` still sends has no taker any more. It is read until all from the other side has been passed on: closing
/// a connection with bytes unread would reset it, and what is on the way to `side` would be lost.
async fn discard(
    from: &mut impl Read,
    (side, other): (Side, Side),
    first_end: &Cell<Option<Side>>,
) -> Result<(), Broken> {
    poll_fn(|cx| {
        loop {
            match from.poll_chunk(cx) {
                Poll::Ready(Ok(Some(_))) => {}
                Poll::Ready(Ok(None)) => return Poll::Ready(Ok(())),
                Poll::Ready(Err(fault)) => return Poll::Ready(Err((side, fault))),
                Poll::Pending if first_end.get() == Some(other) => return Poll::Ready(Ok(())),
                Poll::Pending => return Poll::Pending,
            }
        }
    })
    .await
}
