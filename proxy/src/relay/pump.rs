//! The two directions of a relay, and what each must know of the other.

use std::cell::Cell;
use std::future::{pending, poll_fn};
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::time::{Sleep, sleep};

use super::{Breaker, Fault, Outcome, Read, Side, Write};

/// How long the bytes of a side that has reset may still wait for the other to take any of them: at least so long, and
/// at most twice.
const GRACE: Duration = Duration::from_secs(1);

type Fell = (Side, Fault);

/// What the two directions know of each other; each is named by the side whose bytes it moves.
struct Ways<'a> {
    client: Way<'a>,
    server: Way<'a>,
    first_end: Cell<Option<Side>>,
}

struct Way<'a> {
    /// What has been passed on.
    count: &'a AtomicU64,
    /// Bytes wait for the taker to have room.
    blocked: Cell<bool>,
    /// All has been passed on.
    ended: Cell<bool>,
}

impl<'a> Way<'a> {
    fn new(count: &'a AtomicU64) -> Self {
        Self {
            count,
            blocked: Cell::new(false),
            ended: Cell::new(false),
        }
    }
}

impl<'a> Ways<'a> {
    fn of(&self, side: Side) -> &Way<'a> {
        match side {
            Side::Client => &self.client,
            Side::Server => &self.server,
        }
    }

    /// What the client's direction, which is polled first, watches of the server's.
    fn watched(&self) -> (Option<Side>, bool) {
        (self.first_end.get(), self.server.blocked.get())
    }
}

pub(super) async fn both_ways(
    (from_client, to_client): (&mut impl Read, &mut impl Write),
    (from_server, to_server): (&mut impl Read, &mut impl Write),
    (sent, received): (&AtomicU64, &AtomicU64),
    breaker: Option<&Breaker>,
) -> Outcome {
    let ways = Ways {
        client: Way::new(sent),
        server: Way::new(received),
        first_end: Cell::new(None),
    };
    let mut up = pin!(pump(from_client, to_server, (Side::Client, Side::Server), &ways));
    let mut down = pin!(pump(from_server, to_client, (Side::Server, Side::Client), &ways));
    poll_fn(|cx| {
        if let Some(breaker) = breaker
            && let Poll::Ready((grounds, reason)) = breaker.poll_cut(cx)
        {
            return Poll::Ready(Outcome::Cut(grounds, reason));
        }
        // What happens to one direction may let the other watch for a reset, for which that must be polled once more.
        for _ in 0..2 {
            let before = ways.watched();
            if let Poll::Ready((side, fault)) = up.as_mut().poll(cx) {
                return Poll::Ready(Outcome::Broken(side, fault));
            }
            if let Poll::Ready((side, fault)) = down.as_mut().poll(cx) {
                return Poll::Ready(Outcome::Broken(side, fault));
            }
            if ways.watched() == before {
                break;
            }
        }
        match ways.first_end.get() {
            Some(side) if ways.client.ended.get() && ways.server.ended.get() => Poll::Ready(Outcome::Closed(side)),
            _ => Poll::Pending,
        }
    })
    .await
}

/// One direction: from `from`, which is `side`, to `to`, the other. Comes back only where one of them has broken off.
async fn pump(from: &mut impl Read, to: &mut impl Write, (side, other): (Side, Side), ways: &Ways<'_>) -> Fell {
    let fell = pass_on(from, to, (side, other), ways).await;
    if fell != (other, Fault::Stopped) {
        return fell;
    }
    if let Err(fault) = discard(from, other, ways).await {
        return (side, fault);
    }
    ways.of(side).ended.set(true);
    pending().await
}

async fn pass_on(from: &mut impl Read, to: &mut impl Write, (side, other): (Side, Side), ways: &Ways<'_>) -> Fell {
    let way = ways.of(side);
    let mut grace = None;
    loop {
        let next = poll_fn(|cx| {
            if let Poll::Ready(result) = from.poll_chunk(cx) {
                return Poll::Ready(result.map_err(|fault| (side, fault)));
            }
            // While the other direction still reads, a reset is found out there.
            if ways.first_end.get() == Some(other) {
                return Poll::Ready(Err((other, ready!(to.poll_broken(cx)).fault)));
            }
            Poll::Ready(Err((other, ready!(poll_given_up(to, ways.of(other), &mut grace, cx)))))
        });
        let mut chunk = match next.await {
            Ok(Some(chunk)) => chunk,
            Ok(None) => break,
            Err(fell) => return fell,
        };
        let written = poll_fn(|cx| {
            let before = chunk.len();
            let result = to.poll_write(cx, &mut chunk);
            way.count.fetch_add((before - chunk.len()) as u64, Ordering::Relaxed);
            way.blocked.set(result.is_pending());
            result
        });
        if let Err(fault) = written.await {
            return (other, fault);
        }
    }
    if let Err(fault) = to.finish() {
        return (other, fault);
    }
    way.ended.set(true);
    if ways.first_end.get().is_none() {
        ways.first_end.set(Some(side));
    }
    let given_up = poll_fn(|cx| poll_given_up(to, ways.of(other), &mut grace, cx));
    (other, given_up.await)
}

/// Ready when a side has reset, and what it had sent is stuck: the other direction, which would find the reset behind
/// these bytes, never comes to it. `to` is that side, `its` the direction of its bytes.
fn poll_given_up(
    to: &mut impl Write,
    its: &Way<'_>,
    grace: &mut Option<(u64, Pin<Box<Sleep>>)>,
    cx: &mut Context<'_>,
) -> Poll<Fault> {
    if !its.blocked.get() {
        return Poll::Pending;
    }
    let broken = ready!(to.poll_broken(cx));
    if broken.ended {
        return Poll::Pending;
    }
    let passed = its.count.load(Ordering::Relaxed);
    if grace.as_ref().is_none_or(|(at, _)| *at != passed) {
        *grace = Some((passed, Box::pin(sleep(GRACE))));
    }
    if let Some((_, over)) = grace {
        ready!(over.as_mut().poll(cx));
    }
    Poll::Ready(broken.fault)
}

/// What a side still sends has no taker any more. It is read until all from the other side has been passed on: closing
/// a connection with bytes unread would reset it, and what is on the way to the side would be lost.
async fn discard(from: &mut impl Read, other: Side, ways: &Ways<'_>) -> Result<(), Fault> {
    poll_fn(|cx| {
        loop {
            match from.poll_chunk(cx) {
                Poll::Ready(Ok(Some(_))) => {}
                Poll::Ready(Ok(None)) => return Poll::Ready(Ok(())),
                Poll::Ready(Err(fault)) => return Poll::Ready(Err(fault)),
                Poll::Pending if ways.first_end.get() == Some(other) => return Poll::Ready(Ok(())),
                Poll::Pending => return Poll::Pending,
            }
        }
    })
    .await
}
