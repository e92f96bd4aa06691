//! The end of a tunnel whose peer's identity is proven no more.

use std::cell::Cell;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::time::sleep;

use crate::identity::PeerChain;

/// How long a tunnel's streams may take to be cut before it is closed.
const CUT_GRACE: Duration = Duration::from_secs(1);

/// Ready, with the reason, once what the peer has proven holds no more and the tunnel's streams, which whoever relays
/// them is to cut, have had a moment to end. `closed` is set before: no stream is to begin from then on.
pub async fn given_up(peer: &PeerChain, closed: &Cell<bool>, is_idle: impl Fn() -> bool) -> Arc<str> {
    let reason = peer.given_up().await;
    closed.set(true);
    let begun = Instant::now();
    while !is_idle() && begun.elapsed() < CUT_GRACE {
        sleep(CUT_GRACE / 20).await;
    }
    reason
}
