//! The admin page's listener: few connections, none of them idle for long, and from loopback only where the page tells
//! more than anybody may know.

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::serve::Listener;
use thiserror::Error;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, Sleep, sleep};

/// Connections at once; more wait in the kernel's queue.
const MAX_CONNECTIONS: usize = 32;
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
    slots: Arc<Semaphore>,
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
            slots: Arc::new(Semaphore::new(MAX_CONNECTIONS)),
            idle: IDLE,
        })
    }

    /// The address, with the port that the kernel chose where 0 was asked for.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.inner.local_addr()
    }

    #[cfg(test)]
    pub(super) fn with_limits(mut self, connections: usize, idle: Duration) -> Self {
        self.slots = Arc::new(Semaphore::new(connections));
        self.idle = idle;
        self
    }
}

impl Listener for AdminListener {
    type Io = Limited;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Limited, SocketAddr) {
        loop {
            // The semaphore is never closed.
            let Ok(slot) = Arc::clone(&self.slots).acquire_owned().await else {
                return std::future::pending().await;
            };
            match self.inner.accept().await {
                // With route_localnet set, as some load-balancers do, neighbours on the link reach 127.0.0.1.
                Ok((_, peer)) if self.loopback_only && !peer.ip().to_canonical().is_loopback() => {
                    tracing::warn!(%peer, "refused a connection to the admin page from another host");
                }
                Ok((stream, peer)) => return (Limited::new(stream, self.idle, slot), peer),
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

/// A connection that fails once it has gone too long without a byte of an answer. A request that trickles in does not
/// prolong it.
#[derive(Debug)]
pub struct Limited {
    stream: TcpStream,
    idle: Duration,
    deadline: Pin<Box<Sleep>>,
    _slot: OwnedSemaphorePermit,
}

impl Limited {
    fn new(stream: TcpStream, idle: Duration, slot: OwnedSemaphorePermit) -> Self {
        Self {
            stream,
            idle,
            deadline: Box::pin(sleep(idle)),
            _slot: slot,
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
