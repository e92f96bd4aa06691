//! The admin page's listener: few connections of each peer, none of them idle for long, and from loopback only where the
//! page tells more than anybody may know.

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::serve::Listener;
use thiserror::Error;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{Instant, Sleep, sleep};

use super::peers::{Peer, Peers, Place, TooMany, Warnings};

/// Connections at once. They are accepted before they are counted: what waited in the kernel's queue, for whoever it was,
/// would wait before a probe that decides whether this process lives.
const MAX_CONNECTIONS: usize = 256;
/// And of them of one peer: a kubelet's probes and a scraper need one or two each.
const MAX_CONNECTIONS_OF_PEER: usize = 8;
/// How long a connection may go without a byte of an answer: time to send a request, to take the answer, to ask again.
const IDLE: Duration = Duration::from_secs(10);

/// Why the admin page cannot be served where it was asked to be.
#[derive(Debug, Error)]
pub enum AdminError {
    /// Not a loopback address.
    #[error(
        "cannot serve the admin page on {0}: it is for this host alone; give a loopback address, such as 127.0.0.1:15000"
    )]
    NotLoopback(SocketAddr),
    /// The address cannot be listened on.
    #[error(
        "cannot serve on {address}; is another proxy running? --admin, --metrics and, of adit ca, --health set other addresses"
    )]
    Bind {
        /// The address.
        address: SocketAddr,
        /// Why.
        source: io::Error,
    },
}

/// A listener for few connections.
#[derive(Debug)]
pub struct AdminListener {
    inner: TcpListener,
    /// Whether peers must be on loopback, too.
    loopback_only: bool,
    peers: Peers,
    warnings: Warnings,
    idle: Duration,
}

impl AdminListener {
    /// Listens on a loopback address, and on no other.
    pub async fn bind(address: SocketAddr) -> Result<Self, AdminError> {
        if !address.ip().is_loopback() {
            return Err(AdminError::NotLoopback(address));
        }
        Self::listen(address, true).await
    }

    /// Listens on any address, for a page that tells and does nothing that not everybody may know and do.
    pub async fn bind_anywhere(address: SocketAddr) -> Result<Self, AdminError> {
        Self::listen(address, false).await
    }

    async fn listen(address: SocketAddr, loopback_only: bool) -> Result<Self, AdminError> {
        let inner = TcpListener::bind(address)
            .await
            .map_err(|source| AdminError::Bind { address, source })?;
        Ok(Self {
            inner,
            loopback_only,
            peers: Peers::new(MAX_CONNECTIONS),
            warnings: Warnings::default(),
            idle: IDLE,
        })
    }

    /// The address, with the port that the kernel chose where 0 was asked for.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.inner.local_addr()
    }

    #[cfg(test)]
    pub(super) fn with_limits(mut self, connections: usize, idle: Duration) -> Self {
        self.peers = Peers::new(connections);
        self.idle = idle;
        self
    }
}

impl Listener for AdminListener {
    type Io = Limited;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Limited, SocketAddr) {
        loop {
            match self.inner.accept().await {
                // With route_localnet set, as some load-balancers do, neighbours on the link reach 127.0.0.1.
                Ok((_, peer)) if self.loopback_only && !peer.ip().to_canonical().is_loopback() => {
                    tracing::warn!(%peer, "refused a connection to the admin page from another host");
                }
                Ok((stream, peer)) => match place(&self.peers, peer) {
                    Ok(place) => return (Limited::new(stream, self.idle, place), peer),
                    Err(reason) => {
                        if let Some(left_out) = self.warnings.due(Instant::now().into_std()) {
                            tracing::warn!(%peer, %reason, left_out, "too many connections to the admin or metrics page; closed one");
                        }
                    }
                },
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a connection to the admin or metrics page; trying again in a second");
                    sleep(Duration::from_secs(1)).await;
                }
            }
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.inner.local_addr()
    }
}

/// Counts a connection. Whoever is on this host may take what is there, but not more.
fn place(peers: &Peers, peer: SocketAddr) -> Result<Place, TooMany> {
    let peer = Peer::at(peer.ip());
    let limit = if peer.is_loopback() {
        usize::MAX
    } else {
        MAX_CONNECTIONS_OF_PEER
    };
    peers.add(peer, limit)
}

/// A connection that fails once it has gone too long without a byte of an answer. A request that trickles in does not
/// prolong it.
#[derive(Debug)]
pub struct Limited {
    stream: TcpStream,
    idle: Duration,
    deadline: Pin<Box<Sleep>>,
    _place: Place,
}

impl Limited {
    fn new(stream: TcpStream, idle: Duration, place: Place) -> Self {
        Self {
            stream,
            idle,
            deadline: Box::pin(sleep(idle)),
            _place: place,
        }
    }

    fn expired<T>(&mut self, context: &mut Context<'_>) -> Poll<io::Result<T>> {
        ready!(self.deadline.as_mut().poll(context));
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }

    fn progress(&mut self, written: &Poll<io::Result<usize>>) {
        if matches!(written, Poll::Ready(Ok(1..))) {
            let next = Instant::now() + self.idle;
            self.deadline.as_mut().reset(next);
        }
    }
}

impl AsyncRead for Limited {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if let Poll::Ready(expired) = self.expired(context) {
            return Poll::Ready(expired);
        }
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for Limited {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.progress(&written);
        if written.is_pending() {
            self.expired(context)
        } else {
            written
        }
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(context, slices);
        self.progress(&written);
        if written.is_pending() {
            self.expired(context)
        } else {
            written
        }
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_peer_has_a_few_connections_and_leaves_the_rest_to_the_others_and_to_this_host() {
        let (peers, mut held) = (Peers::new(MAX_CONNECTIONS), Vec::new());
        for (address, asked, granted) in [
            ("10.0.0.1:1", 100, MAX_CONNECTIONS_OF_PEER),
            ("[::ffff:10.0.0.1]:1", 1, 0),
            ("10.0.0.2:1", 3, 3),
            ("[2001:db8::1]:1", 5, 5),
            ("[2001:db8::2]:1", 100, MAX_CONNECTIONS_OF_PEER - 5),
            ("[2001:db8:0:1::2]:1", 1, 1),
            ("127.0.0.1:1", 100, 100),
            ("[::1]:1", 1000, MAX_CONNECTIONS - 120),
            ("10.0.0.3:1", 1, 0),
        ] {
            let places: Vec<_> = (0..asked)
                .filter_map(|_| place(&peers, address.parse().unwrap()).ok())
                .collect();
            assert_eq!(places.len(), granted, "{address}");
            held.extend(places);
        }
        drop(held);
        assert!(place(&peers, "10.0.0.1:1".parse().unwrap()).is_ok());
    }
}
