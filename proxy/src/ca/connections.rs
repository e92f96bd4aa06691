//! Connections: which are let in, and what they are once their handshake is done.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::task::{Context, Poll};

use thiserror::Error;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::server::TlsStream;
use tonic::transport::server::{Connected, TcpConnectInfo};

use crate::admin::{Peer, Peers, Place, TooMany};

/// Connections of all peers. An idle one takes 25 KiB, so these take 150 MiB of the 256 MiB that the chart grants; and a
/// cluster has at most 5,000 nodes, of which each needs one.
const MAX_CONNECTIONS: usize = 6144;
/// And of them with an unfinished handshake: a silent one takes 2.5 KiB, and the longest first message that TLS lets a
/// client send 64 KiB, so these take 64 MiB at the very worst.
const MAX_HANDSHAKES: usize = 1024;
/// Unfinished handshakes of one peer: one in so many of the connections that it may have...
const CONNECTIONS_FOR_HANDSHAKE: usize = 16;
/// ... but at least so many.
const MIN_HANDSHAKES_OF_PEER: usize = 8;

/// Which limit a connection is beyond.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub(super) enum Excess {
    #[error("{0} connections, which is the limit")]
    Connections(TooMany),
    #[error("{0} unfinished handshakes, which is the limit")]
    Handshakes(TooMany),
}

/// Lets connections in, so many of each peer and all together.
pub(super) struct Door {
    connections: Peers,
    handshakes: Peers,
    connections_of_peer: usize,
}

impl Door {
    pub(super) fn new(connections_of_peer: usize) -> Self {
        Self {
            connections: Peers::new(MAX_CONNECTIONS),
            handshakes: Peers::new(MAX_HANDSHAKES),
            connections_of_peer,
        }
    }

    /// Counts a connection that was accepted: until the first is dropped as one, and until the second is as one whose
    /// handshake is not done.
    pub(super) fn enter(&self, address: IpAddr) -> Result<(Place, Place), Excess> {
        let (peer, limit) = (Peer::at(address), self.connections_of_peer);
        let connection = self.connections.add(peer, limit).map_err(Excess::Connections)?;
        let handshake = self
            .handshakes
            .add(peer, handshakes_of_peer(peer, limit))
            .map_err(Excess::Handshakes)?;
        Ok((connection, handshake))
    }
}

/// How many handshakes a peer may have under way that may have so many connections. In a cluster only the authority's own
/// pod is on loopback; elsewhere all that is on its host, and may begin at once.
fn handshakes_of_peer(peer: Peer, connections: usize) -> usize {
    if peer.is_loopback() {
        return connections;
    }
    (connections / CONNECTIONS_FOR_HANDSHAKE).max(MIN_HANDSHAKES_OF_PEER)
}

/// A connection whose handshake is done.
pub(super) struct Connection {
    pub(super) stream: TlsStream<TcpStream>,
    pub(super) peer: SocketAddr,
    pub(super) _place: Place,
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

    fn address(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn a_peer_has_a_handshake_for_each_sixteen_of_its_connections_but_at_least_eight() {
        for (from, connections, handshakes) in [
            ("10.0.0.1", 1, 8),
            ("10.0.0.1", 128, 8),
            ("10.0.0.1", 160, 10),
            ("2001:db8::1", 6144, 384),
            ("127.0.0.1", 128, 128),
        ] {
            let peer = Peer::at(address(from));
            assert_eq!(
                handshakes_of_peer(peer, connections),
                handshakes,
                "{from} {connections}"
            );
        }
    }

    #[test]
    fn an_address_that_finishes_no_handshake_gets_no_further_and_others_come_in() {
        let (door, mut held) = (Door::new(128), Vec::new());
        for (from, granted) in [
            ("10.0.0.1", 8),
            ("::ffff:10.0.0.1", 0),
            ("10.0.0.2", 8),
            ("2001:db8::1", 8),
            ("2001:db8::2", 0),
        ] {
            let let_in: Vec<_> = (0..200).filter_map(|_| door.enter(address(from)).ok()).collect();
            assert_eq!(let_in.len(), granted, "{from}");
            held.extend(let_in);
        }
        let Err(Excess::Handshakes(TooMany::OfPeer { limit: 8, .. })) = door.enter(address("10.0.0.1")) else {
            panic!()
        };
        // Neither does what was turned away count as a connection.
        drop(held);
        let done: Vec<_> = (0..200)
            .filter_map(|_| door.enter(address("10.0.0.1")).ok().map(|(open, _)| open))
            .collect();
        assert_eq!(done.len(), 128);
        let said = door.enter(address("10.0.0.1")).err().unwrap().to_string();
        assert_eq!(said, "10.0.0.1 has 128 connections, which is the limit");
        assert!(door.enter(address("10.0.0.2")).is_ok());
    }

    #[test]
    fn all_together_have_limits_too() {
        let door = Door::new(128);
        let from = |number: usize| IpAddr::from([10, 0, (number >> 8) as u8, number as u8]);
        let unfinished: Vec<_> = (0..MAX_HANDSHAKES)
            .map(|number| door.enter(from(number)).unwrap())
            .collect();
        let all = TooMany::All(MAX_HANDSHAKES);
        assert_eq!(door.enter(from(5000)).err(), Some(Excess::Handshakes(all)));
        let mut open: Vec<_> = unfinished.into_iter().map(|(open, _)| open).collect();
        open.extend((open.len()..MAX_CONNECTIONS).map(|number| door.enter(from(number)).unwrap().0));
        let all = TooMany::All(MAX_CONNECTIONS);
        assert_eq!(door.enter(from(9000)).err(), Some(Excess::Connections(all)));
    }
}
