//! The tunnel: HTTP/2 CONNECT over mutual TLS, as Istio's ambient mode speaks it. Client pool and server.

mod authority;
mod client;
mod cut;
mod error;
mod forwarded;
mod pool;
mod server;
mod stream;
mod tls;

pub use authority::{Authority, AuthorityError};
pub use client::Tunnel;
pub use cut::given_up;
pub use error::HboneError;
pub use forwarded::{forwarded_for, parse_forwarded};
pub use pool::{Dial, Pool, PoolKey};
pub use server::{Incoming, Request, ServerConnection, accept};
pub use stream::{Receiver, Sender, Stream};

use std::time::Duration;

use h2::Reason;

/// Why a stream is reset that a policy forbids by now. HTTP/2 has no word for it, so this is one of Adit's own: whoever
/// does not know it must take it for a reset like others (RFC 9113, section 7), and loses nothing but the reason.
pub fn forbidden() -> Reason {
    Reason::from(0xad17_0001)
}

/// Sizes and times of tunnels.
#[derive(Debug, Clone)]
pub struct HboneSettings {
    /// Bytes that a peer may send on one stream before the application has taken them.
    pub stream_window: u32,
    /// Bytes that a peer may send on all streams of a tunnel. Larger than the streams' windows together, so that
    /// streams whose readers stall cannot stop the others.
    pub connection_window: u32,
    /// The largest DATA frame taken.
    pub max_frame: u32,
    /// Streams on one tunnel, both as what is offered to peers and as what is used of their offer.
    pub max_streams: u32,
    /// For TLS and the HTTP/2 preface together.
    pub handshake_timeout: Duration,
    /// For the answer to a CONNECT.
    pub request_timeout: Duration,
    /// Silence after which the peer is asked for a sign of life.
    pub ping_interval: Duration,
    /// How long that sign may take.
    pub ping_timeout: Duration,
    /// How long a tunnel without streams is kept.
    pub idle_timeout: Duration,
}

impl Default for HboneSettings {
    fn default() -> Self {
        Self {
            stream_window: 1 << 20,
            connection_window: 100 << 20,
            max_frame: 1 << 20,
            max_streams: 100,
            handshake_timeout: Duration::from_secs(10),
            request_timeout: Duration::from_secs(10),
            ping_interval: Duration::from_secs(10),
            ping_timeout: Duration::from_secs(20),
            idle_timeout: Duration::from_secs(60),
        }
    }
}
