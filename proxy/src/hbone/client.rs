//! A tunnel from the client's side.

use std::cell::{Cell, RefCell};
use std::net::SocketAddr;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Instant, SystemTime};

use bytes::Bytes;
use h2::client::SendRequest;
use h2::{Ping, PingPong, Reason};
use http::{Method, Request, StatusCode};
use tokio::net::TcpStream;
use tokio::task::spawn_local;
use tokio::time::{sleep, timeout};

use super::cut::given_up;
use super::{HboneError, HboneSettings, Stream, forwarded_for, tls};
use crate::identity::{Certificate, PeerChain, Role, SpiffeId};

/// One connection to a peer's proxy, for streams of one identity to one workload. Belongs to one worker.
pub struct Tunnel {
    requests: RefCell<Option<SendRequest<Bytes>>>,
    use_: Rc<TunnelUse>,
    settings: Rc<HboneSettings>,
}

/// How much a tunnel is used.
struct TunnelUse {
    streams: Cell<u32>,
    /// When the last stream ended; meaningful while there are none.
    idle_since: Cell<Instant>,
    /// The connection has ended, or takes no new streams.
    closed: Cell<bool>,
    /// The serial number of the certificate that the tunnel's client has shown.
    serial: Arc<str>,
    /// When that expires. From then on the tunnel takes no new streams.
    not_after: SystemTime,
    /// What the tunnel's server has shown.
    peer: Arc<PeerChain>,
}

/// A stream's place among its tunnel's; given back on drop.
pub(super) struct StreamPlace(Rc<TunnelUse>);

impl std::fmt::Debug for StreamPlace {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "StreamPlace({} in use)", self.0.streams.get())
    }
}

impl StreamPlace {
    pub(super) fn certificate(&self) -> &Arc<str> {
        &self.0.serial
    }

    pub(super) fn peer(&self) -> &Arc<PeerChain> {
        &self.0.peer
    }
}

impl Drop for StreamPlace {
    fn drop(&mut self) {
        let left = self.0.streams.get() - 1;
        self.0.streams.set(left);
        if left == 0 {
            self.0.idle_since.set(Instant::now());
        }
    }
}

impl Tunnel {
    /// Shakes hands over a fresh connection: TLS, then HTTP/2. Must run on a worker's `LocalSet`, which then drives
    /// the tunnel. Its client shows `certificate`, its server must be `destination`. Cancelling closes the connection.
    pub async fn establish(
        tcp: TcpStream,
        certificate: &Certificate,
        destination: &SpiffeId,
        settings: Rc<HboneSettings>,
    ) -> Result<Rc<Self>, HboneError> {
        let generation = certificate.trust().generation();
        let handshake = async {
            let (tls, shown) = tls::connect(tcp, certificate.client_config(destination))
                .await
                .map_err(|error| HboneError::tls(&error))?;
            let peer = certificate
                .remember(&shown, Role::Server, generation)
                .map_err(|error| HboneError::Tls(error.to_string()))?;
            let (requests, connection) = h2::client::Builder::new()
                .enable_push(false)
                .initial_window_size(settings.stream_window)
                .initial_connection_window_size(settings.connection_window)
                .max_frame_size(settings.max_frame)
                .max_send_buffer_size(settings.stream_window as usize)
                .max_header_list_size(16 << 10)
                .handshake::<_, Bytes>(tls)
                .await
                .map_err(|error| HboneError::http2(&error))?;
            Ok((requests, connection, peer))
        };
        let (requests, mut connection, peer) = timeout(settings.handshake_timeout, handshake)
            .await
            .map_err(|_| HboneError::HandshakeTimeout)??;
        let use_ = Rc::new(TunnelUse {
            streams: Cell::new(0),
            idle_since: Cell::new(Instant::now()),
            closed: Cell::new(false),
            serial: Arc::clone(certificate.serial()),
            not_after: certificate.not_after(),
            peer,
        });
        let tunnel = Rc::new(Self {
            requests: RefCell::new(Some(requests)),
            use_: Rc::clone(&use_),
            settings: Rc::clone(&settings),
        });
        let ping = connection.ping_pong();
        let weak = Rc::downgrade(&tunnel);
        spawn_local(async move {
            let given_up = given_up(&use_.peer, &use_.closed, || use_.streams.get() == 0);
            let mut connection = pin!(connection);
            let alive = keep_alive(ping, &settings);
            let retire = async {
                loop {
                    sleep(settings.idle_timeout / 4).await;
                    let Some(tunnel) = weak.upgrade() else { return };
                    tunnel.retire_if_idle();
                }
            };
            tokio::select! {
                result = &mut connection => {
                    if let Err(error) = result {
                        tracing::debug!("tunnel: {error}");
                    }
                }
                reason = given_up => tracing::info!("tunnel: closing: {reason}"),
                () = alive => tracing::debug!("tunnel: no sign of life from the peer; closing"),
                // Without handles and streams the connection says goodbye and ends by itself.
                () = async { retire.await; std::future::pending().await } => {}
            }
            use_.closed.set(true);
        });
        Ok(tunnel)
    }

    /// Whether a further stream may be opened.
    pub(super) fn has_room(&self) -> bool {
        !self.use_.closed.get()
            && self.requests.borrow().as_ref().is_some_and(|requests| {
                let offered = u32::try_from(requests.current_max_send_streams()).unwrap_or(u32::MAX);
                self.use_.streams.get() < self.settings.max_streams.min(offered)
            })
    }

    /// Whether the tunnel is of no more use.
    pub(super) fn is_closed(&self) -> bool {
        self.use_.closed.get() || self.requests.borrow().is_none() || SystemTime::now() >= self.use_.not_after
    }

    /// Takes a place for a stream; to be asked only where there is room.
    pub(super) fn take_place(&self) -> StreamPlace {
        self.use_.streams.set(self.use_.streams.get() + 1);
        StreamPlace(Rc::clone(&self.use_))
    }

    /// Asks for a stream to `authority` on behalf of `client`. Cancelling resets it.
    pub(super) async fn open(
        &self,
        place: StreamPlace,
        authority: SocketAddr,
        client: SocketAddr,
    ) -> Result<Stream, OpenError> {
        let Some(requests) = self.requests.borrow().clone() else {
            return Err(OpenError::Stale(HboneError::Http2("the tunnel is closing".to_owned())));
        };
        let stale = |error: h2::Error| {
            if error.is_go_away() || error.is_io() {
                self.use_.closed.set(true);
            }
            OpenError::Stale(HboneError::http2(&error))
        };
        let request = Request::builder()
            .method(Method::CONNECT)
            .uri(authority.to_string())
            .version(http::Version::HTTP_2)
            .header("forwarded", forwarded_for(client))
            .body(())
            .map_err(|error| OpenError::Failed(HboneError::Http2(error.to_string())))?;
        let exchange = async {
            let mut requests = requests.ready().await.map_err(stale)?;
            let (response, send) = requests.send_request(request, false).map_err(stale)?;
            drop(requests);
            let response = response.await.map_err(|error| {
                // A peer that resets the stream has answered, unless it says that it has not taken it up (RFC 9113, 8.7);
                // anything else says that the tunnel is gone.
                if error.is_reset() && error.reason() != Some(Reason::REFUSED_STREAM) {
                    OpenError::Failed(HboneError::Reset)
                } else {
                    stale(error)
                }
            })?;
            if response.status() != StatusCode::OK {
                return Err(OpenError::Failed(HboneError::Status(response.status())));
            }
            Ok(Stream::new(send, response.into_body(), Some(place)))
        };
        timeout(self.settings.request_timeout, exchange)
            .await
            .map_err(|_| OpenError::Failed(HboneError::RequestTimeout))?
    }

    /// Takes no new streams any more; those that there are go on.
    pub(super) fn retire(&self) {
        self.requests.borrow_mut().take();
    }

    fn retire_if_idle(&self) {
        if self.use_.streams.get() == 0 && self.use_.idle_since.get().elapsed() >= self.settings.idle_timeout {
            self.retire();
        }
    }
}

/// Why a stream was not opened.
#[derive(Debug)]
pub(super) enum OpenError {
    /// The tunnel went away before the peer took up the request: another tunnel may serve.
    Stale(HboneError),
    /// The peer refused, or did not answer.
    Failed(HboneError),
}

/// Returns when the peer gives no sign of life.
pub(super) async fn keep_alive(ping: Option<PingPong>, settings: &HboneSettings) {
    let Some(mut ping) = ping else {
        return std::future::pending().await;
    };
    loop {
        sleep(settings.ping_interval).await;
        match timeout(settings.ping_timeout, ping.ping(Ping::opaque())).await {
            Ok(Ok(_)) => {}
            // The connection's own future tells why.
            Ok(Err(_)) => return std::future::pending().await,
            Err(_) => return,
        }
    }
}
