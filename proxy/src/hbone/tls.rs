//! TLS over a tunnel's TCP connection. The rest of the tunnel sees a byte stream and nothing of how it is sealed.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::{Buf as _, BytesMut};
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, ServerConfig};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::{TlsAcceptor, TlsConnector, client, server};

use crate::node::read_available;

/// What one read from the socket takes at most. rustls itself asks for one record at a time.
const READ_AHEAD: usize = 512 << 10;
/// How much sealed data waits at most for room in the socket's buffer.
const WRITE_BUFFER: usize = 256 << 10;

/// A tunnel's client side.
pub(super) type ClientStream = client::TlsStream<ReadAhead>;
/// A tunnel's server side.
pub(super) type ServerStream = server::TlsStream<ReadAhead>;

/// Shakes hands as the client. No server name is sent: the expected identity is the configuration's.
pub(super) async fn connect(tcp: TcpStream, config: Arc<ClientConfig>) -> io::Result<ClientStream> {
    let name = ServerName::IpAddress(tcp.peer_addr()?.ip().into());
    let mut stream = TlsConnector::from(config).connect(name, ReadAhead::new(tcp)).await?;
    stream.get_mut().1.set_buffer_limit(Some(WRITE_BUFFER));
    Ok(stream)
}

/// Shakes hands as the server.
pub(super) async fn accept(tcp: TcpStream, config: Arc<ServerConfig>) -> io::Result<ServerStream> {
    let mut stream = TlsAcceptor::from(config).accept(ReadAhead::new(tcp)).await?;
    stream.get_mut().1.set_buffer_limit(Some(WRITE_BUFFER));
    Ok(stream)
}

/// The certificates that the client has shown and proven.
pub(super) fn peer_certificates(stream: &ServerStream) -> &[CertificateDer<'static>] {
    stream.get_ref().1.peer_certificates().unwrap_or_default()
}

/// The certificates that the server has shown and proven.
pub(super) fn server_certificates(stream: &ClientStream) -> &[CertificateDer<'static>] {
    stream.get_ref().1.peer_certificates().unwrap_or_default()
}

/// A TCP connection that is read in large pieces. Between pieces it holds no memory.
pub(super) struct ReadAhead {
    tcp: TcpStream,
    piece: BytesMut,
}

impl ReadAhead {
    fn new(tcp: TcpStream) -> Self {
        Self {
            tcp,
            piece: BytesMut::new(),
        }
    }
}

impl AsyncRead for ReadAhead {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        while this.piece.is_empty() {
            // Memory is taken only once there is something to read.
            ready!(this.tcp.poll_read_ready(cx))?;
            this.piece.reserve(READ_AHEAD);
            match read_available(&this.tcp, &mut this.piece) {
                Ok(0) => return Poll::Ready(Ok(())),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
        let len = this.piece.len().min(into.remaining());
        into.put_slice(&this.piece[..len]);
        this.piece.advance(len);
        if this.piece.is_empty() {
            this.piece = BytesMut::new();
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for ReadAhead {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, from: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.tcp).poll_write(cx, from)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        from: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.tcp).poll_write_vectored(cx, from)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.tcp).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.tcp).poll_shutdown(cx)
    }
}
