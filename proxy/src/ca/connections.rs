//! Connections, counted by the address that they come from.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::server::TlsStream;
use tonic::transport::server::{Connected, TcpConnectInfo};

/// How many connections each address has.
#[derive(Clone)]
pub(super) struct Connections {
    limit: usize,
    of_peers: Arc<Mutex<HashMap<IpAddr, usize>>>,
}

impl Connections {
    pub(super) fn new(limit: usize) -> Self {
        Self {
            limit,
            of_peers: Arc::default(),
        }
    }

    /// Counts one more until what is returned is dropped; none where that is one too many.
    pub(super) fn add(&self, peer: IpAddr) -> Option<Counted> {
        let mut of_peers = self.lock();
        let count = of_peers.entry(peer).or_default();
        if *count >= self.limit {
            return None;
        }
        *count += 1;
        drop(of_peers);
        Some(Counted {
            peer,
            connections: self.clone(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<IpAddr, usize>> {
        self.of_peers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One connection among those of its address.
pub(super) struct Counted {
    peer: IpAddr,
    connections: Connections,
}

impl Drop for Counted {
    fn drop(&mut self) {
        let mut of_peers = self.connections.lock();
        if let Some(count) = of_peers.get_mut(&self.peer) {
            *count -= 1;
            if *count == 0 {
                of_peers.remove(&self.peer);
            }
        }
    }
}

/// A connection whose handshake is done.
pub(super) struct Connection {
    pub(super) stream: TlsStream<TcpStream>,
    pub(super) peer: SocketAddr,
    pub(super) _counted: Counted,
}

impl Connected for Connection {
    type ConnectInfo = TcpConnectInfo;

    fn connect_info(&self) -> TcpConnectInfo {
        TcpConnectInfo {
            local_addr: self.stream.get_ref().0.local_addr().ok(),
            remote_addr: Some(self.peer),
        }
    }
}

impl AsyncRead for Connection {
    fn poll_read(self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().stream).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().stream).poll_write_vectored(context, parts)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_has_only_so_many_connections_and_others_theirs() {
        let connections = Connections::new(2);
        let [one, two] = [1, 2].map(|number| IpAddr::from([10, 0, 0, number]));
        let held = [connections.add(one), connections.add(one)].map(Option::unwrap);
        assert!(connections.add(one).is_none());
        assert!(connections.add(two).is_some());
        drop(held);
        assert!(connections.add(one).is_some());
        assert!(connections.lock().is_empty());
    }
}
