//! TLS 1.3 over a tunnel's TCP connection. The rest of the tunnel sees a byte stream and nothing of how it is sealed.
//!
//! rustls shakes hands, and keeps the secrets for changes of keys. The records after that are opened and sealed here: what
//! has come is opened straight into the reader's memory, and what is to go is sealed in the buffer that it is sent from.
//! rustls' own streams copy each byte three times more.

mod handshake;
mod record;
mod stream;
#[cfg(test)]
mod tests;

use std::io;
use std::sync::Arc;

use rustls::client::UnbufferedClientConnection;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::server::UnbufferedServerConnection;
use rustls::{ClientConfig, ServerConfig};
use tokio::net::TcpStream;

pub(super) use stream::TlsStream;

/// The certificates that the peer has shown and proven.
pub(super) type PeerCertificates = Vec<CertificateDer<'static>>;

/// Shakes hands as the client. No server name is sent: the expected identity is the configuration's.
pub(super) async fn connect(tcp: TcpStream, config: Arc<ClientConfig>) -> io::Result<(TlsStream, PeerCertificates)> {
    let name = ServerName::IpAddress(tcp.peer_addr()?.ip().into());
    let connection = UnbufferedClientConnection::new(config, name).map_err(fault)?;
    handshake::complete(tcp, connection).await
}

/// Shakes hands as the server.
pub(super) async fn accept(tcp: TcpStream, config: Arc<ServerConfig>) -> io::Result<(TlsStream, PeerCertificates)> {
    let connection = UnbufferedServerConnection::new(config).map_err(fault)?;
    handshake::complete(tcp, connection).await
}

/// What TLS finds wrong, as an error of the stream, which keeps the reason.
fn fault(error: rustls::Error) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}
