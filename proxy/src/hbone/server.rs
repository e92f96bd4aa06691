//! A tunnel from the server's side.

use std::future::poll_fn;
use std::net::SocketAddr;
use std::sync::Arc;
use std::task::Poll;

use bytes::Bytes;
use h2::server::{Connection, SendResponse};
use h2::{Reason, RecvStream};
use http::{Method, Response, StatusCode};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::client::keep_alive;
use super::tls::{self, TlsStream};
use super::{Authority, AuthorityError, HboneError, HboneSettings, Stream, parse_forwarded};
use crate::identity::{Certificate, PeerChain, Role, SpiffeId};

/// A tunnel that a peer has opened to a pod of this node.
pub struct ServerConnection {
    connection: Connection<TlsStream, Bytes>,
    peer: Arc<PeerChain>,
}

/// A request of the peer's for a stream.
pub struct Incoming {
    /// What it asks for.
    pub request: Result<Request, AuthorityError>,
    method_is_connect: bool,
    recv: RecvStream,
    respond: SendResponse<Bytes>,
}

/// What a CONNECT asks for.
#[derive(Debug, Clone, Copy)]
pub struct Request {
    /// Where the stream shall lead.
    pub authority: Authority,
    /// The client's address, as the peer tells it.
    pub forwarded: Option<SocketAddr>,
}

/// Shakes hands with a peer that has connected: TLS with the pod's certificate, then HTTP/2.
pub async fn accept(
    tcp: TcpStream,
    certificate: &Certificate,
    settings: &HboneSettings,
) -> Result<ServerConnection, HboneError> {
    // What becomes known against the peer meanwhile is found out by who watches for it.
    let generation = certificate.trust().generation();
    let handshake = async {
        let (tls, shown) = tls::accept(tcp, certificate.server_config())
            .await
            .map_err(|error| HboneError::tls(&error))?;
        let peer = certificate
            .remember(&shown, Role::Client, generation)
            .map_err(|error| HboneError::Tls(error.to_string()))?;
        let connection = h2::server::Builder::new()
            .initial_window_size(settings.stream_window)
            .initial_connection_window_size(settings.connection_window)
            .max_frame_size(settings.max_frame)
            .max_concurrent_streams(settings.max_streams)
            .max_send_buffer_size(settings.stream_window as usize)
            .max_header_list_size(16 << 10)
            .handshake(tls)
            .await
            .map_err(|error| HboneError::http2(&error))?;
        Ok(ServerConnection { connection, peer })
    };
    timeout(settings.handshake_timeout, handshake)
        .await
        .map_err(|_| HboneError::HandshakeTimeout)?
}

impl ServerConnection {
    /// The identity that the peer has proven.
    pub fn peer(&self) -> &SpiffeId {
        self.peer.id()
    }

    /// The chain by which it has.
    pub fn chain(&self) -> &Arc<PeerChain> {
        &self.peer
    }

    /// Serves the tunnel to its end: `each` is told of every request. Once `drain` resolves no new requests are
    /// taken. Must be polled for streams to move; dropping it resets them all.
    pub async fn serve(
        mut self,
        settings: &HboneSettings,
        drain: impl Future<Output = ()>,
        mut each: impl FnMut(Incoming),
    ) -> Result<(), HboneError> {
        let mut drain = std::pin::pin!(drain);
        let mut draining = false;
        let ping = self.connection.ping_pong();
        let mut dead = std::pin::pin!(keep_alive(ping, settings));
        poll_fn(|cx| {
            if !draining && drain.as_mut().poll(cx).is_ready() {
                draining = true;
                self.connection.graceful_shutdown();
            }
            if dead.as_mut().poll(cx).is_ready() {
                return Poll::Ready(Err(HboneError::Http2("no sign of life from the peer".to_owned())));
            }
            loop {
                match self.connection.poll_accept(cx) {
                    Poll::Ready(Some(Ok((request, respond)))) => each(Incoming::new(request, respond)),
                    Poll::Ready(Some(Err(error))) => return Poll::Ready(Err(HboneError::http2(&error))),
                    Poll::Ready(None) => return Poll::Ready(Ok(())),
                    Poll::Pending => return Poll::Pending,
                }
            }
        })
        .await
    }
}

impl Incoming {
    fn new(request: http::Request<RecvStream>, respond: SendResponse<Bytes>) -> Self {
        let (head, recv) = request.into_parts();
        let authority = head.uri.authority().map_or("", |authority| authority.as_str());
        let forwarded = head
            .headers
            .get("forwarded")
            .and_then(|value| parse_forwarded(value.to_str().ok()?));
        Self {
            request: Authority::parse(authority).map(|authority| Request { authority, forwarded }),
            method_is_connect: head.method == Method::CONNECT,
            recv,
            respond,
        }
    }

    /// Whether the request is a CONNECT at all.
    pub fn is_connect(&self) -> bool {
        self.method_is_connect
    }

    /// Grants the stream.
    pub fn grant(mut self) -> Result<Stream, HboneError> {
        let mut response = Response::new(());
        *response.status_mut() = StatusCode::OK;
        let send = self
            .respond
            .send_response(response, false)
            .map_err(|error| HboneError::http2(&error))?;
        Ok(Stream::new(send, self.recv, None))
    }

    /// Resets the stream: the application has reset the connection.
    pub fn reset(mut self) {
        self.respond.send_reset(Reason::CANCEL);
    }

    /// Refuses it.
    pub fn refuse(mut self, status: StatusCode) {
        let mut response = Response::new(());
        *response.status_mut() = status;
        // The peer may have gone already.
        let _ = self.respond.send_response(response, true);
    }
}
