//! The CA as a server: TLS under a certificate of its own root, gRPC over it.

use std::fmt;
use std::future::Future;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use rustls::ServerConfig;
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use thiserror::Error;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio_rustls::TlsAcceptor;

use super::audit::AuditLog;
use super::authority::{Authority, AuthorityError};
use super::authorize::{PodRules, Rules, ServiceAccount};
use super::connections::{Connection, Door};
use super::counts::Counts;
use super::limits::{LimitSettings, Limits};
use super::service::{Callers, Seen, Service};
use super::token::MAX_TOKEN_BYTES;
use crate::admin::Warnings;
use crate::identity::proto::istio_certificate_service_server::IstioCertificateServiceServer;
use crate::mesh::MeshHandle;

/// The largest request accepted: a signing request and some metadata.
const MAX_REQUEST_BYTES: usize = 64 * 1024;
/// Room for a token and the other headers.
const MAX_HEADER_BYTES: u32 = MAX_TOKEN_BYTES as u32 + 8 * 1024;
const MAX_STREAMS: u32 = 64;
const HANDSHAKE_DEADLINE: Duration = Duration::from_secs(5);
const CALL_DEADLINE: Duration = Duration::from_secs(5);
/// How long a call waits for the watch of the cluster to show what its caller has heard of already.
const PATIENCE: Duration = Duration::from_secs(1);
/// How long open calls may run after a shutdown was asked for.
const DRAIN_DEADLINE: Duration = Duration::from_secs(5);
/// After accept fails, for instance for want of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
const SERVING_LIFETIME: Duration = Duration::from_secs(24 * 60 * 60);

/// How the CA serves.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Where it listens.
    pub listen: SocketAddr,
    /// The DNS names and IP addresses under which clients reach it.
    pub names: Vec<String>,
    /// The service accounts of node proxies.
    pub node_proxies: Vec<ServiceAccount>,
    /// How callers' pods are looked at; not at all where the mesh has none of them, as in a file.
    pub pods: Option<PodRules>,
    /// The longest lifetime granted.
    pub max_ttl: Duration,
    /// The lifetime granted if the caller asks for none.
    pub default_ttl: Duration,
    /// How much is asked for at most.
    pub limits: LimitSettings,
}

/// Why the CA does not run.
#[derive(Debug, Error)]
pub enum ServeError {
    /// Its authority is not usable.
    #[error(transparent)]
    Authority(#[from] AuthorityError),
    /// The address cannot be listened on.
    #[error("cannot listen on {address}: {error}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// What the system said.
        error: std::io::Error,
    },
    /// The TLS parameters are refused.
    #[error("TLS: {0}")]
    Tls(#[from] rustls::Error),
    /// Serving ended.
    #[error("serving failed: {0}")]
    Serve(#[from] tonic::transport::Error),
}

/// A CA that listens but does not answer yet.
pub struct Server {
    listener: TcpListener,
    address: SocketAddr,
    acceptor: TlsAcceptor,
    door: Door,
    service: Service,
}

impl Server {
    /// Makes the serving certificate and begins to listen.
    pub(super) async fn bind(
        settings: Settings,
        authority: Arc<Authority>,
        callers: Callers,
        mesh: MeshHandle,
        counts: Counts,
        audit: AuditLog,
    ) -> Result<Self, ServeError> {
        let certificate = ServingCertificate::new(authority.clone(), settings.names)?;
        counts.signer_expires(authority.signer_not_after());
        let mut tls = ServerConfig::builder_with_provider(crate::identity::crypto_provider().clone())
            .with_protocol_versions(&[&rustls::version::TLS13])?
            .with_no_client_auth()
            .with_cert_resolver(Arc::new(certificate));
        tls.alpn_protocols = vec![b"h2".to_vec()];
        let in_cluster = settings.pods.is_some();
        let failed = |error| ServeError::Listen {
            address: settings.listen,
            error,
        };
        let listener = TcpListener::bind(settings.listen).await.map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let door = Door::new(settings.limits.connections_of_address);
        let service = Service {
            callers,
            rules: Rules {
                trust_domain: authority.trust_domain().clone(),
                node_proxies: settings.node_proxies,
                pods: settings.pods,
            },
            // A file says all there is.
            patience: if in_cluster { PATIENCE } else { Duration::ZERO },
            authority,
            mesh,
            seen: Seen::default(),
            counts,
            limits: Limits::new(settings.limits),
            audit,
            default_ttl: settings.default_ttl,
            max_ttl: settings.max_ttl,
        };
        Ok(Self {
            listener,
            address,
            acceptor: TlsAcceptor::from(Arc::new(tls)),
            door,
            service,
        })
    }

    /// Where it listens.
    pub fn local_addr(&self) -> SocketAddr {
        self.address
    }

    /// The roots that clients must trust, PEM.
    pub fn root_pem(&self) -> Arc<str> {
        self.service.authority.root_pem()
    }

    /// Serves until `shutdown` completes and open calls have ended.
    pub async fn run(self, shutdown: impl Future<Output = ()> + Send) -> Result<(), ServeError> {
        tracing::info!(address = %self.address, trust_domain = %self.service.authority.trust_domain(), "CA ready");
        let (ready, mut connections) = mpsc::channel(16);
        let accepting = tokio::spawn(accept(self.listener, self.acceptor, self.door, ready));
        let incoming = futures_util::stream::poll_fn(move |context| connections.poll_recv(context));
        let service = IstioCertificateServiceServer::new(self.service).max_decoding_message_size(MAX_REQUEST_BYTES);
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let serving = tonic::transport::Server::builder()
            .timeout(CALL_DEADLINE)
            .max_concurrent_streams(MAX_STREAMS)
            .http2_max_header_list_size(MAX_HEADER_BYTES)
            .http2_keepalive_interval(Some(Duration::from_secs(30)))
            .http2_keepalive_timeout(Some(Duration::from_secs(10)))
            .add_service(service)
            .serve_with_incoming_shutdown(incoming, async {
                // A dropped sender means the same.
                let _ = stopped.await;
            });
        let drain = async {
            shutdown.await;
            accepting.abort();
            let _ = stop.send(());
            tokio::time::sleep(DRAIN_DEADLINE).await;
        };
        tokio::select! {
            result = serving => Ok(result?),
            () = drain => Ok(()),
        }
    }
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Server({})", self.address)
    }
}

/// Accepts connections and hands over those whose handshake succeeds in time. None waits for another: what cannot be had
/// now is closed, and its client tries again later.
async fn accept(
    listener: TcpListener,
    acceptor: TlsAcceptor,
    door: Door,
    ready: mpsc::Sender<Result<Connection, std::io::Error>>,
) {
    let mut warnings = Warnings::default();
    loop {
        let (stream, peer) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!(%error, "accepting a connection failed");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let (place, unfinished) = match door.enter(peer.ip()) {
            Ok(places) => places,
            Err(reason) => {
                if let Some(left_out) = warnings.due(Instant::now()) {
                    tracing::warn!(
                        %peer, %reason, left_out,
                        "too many connections; closed one (where many nodes share an address, raise --address-connections)"
                    );
                }
                continue;
            }
        };
        let (acceptor, ready) = (acceptor.clone(), ready.clone());
        tokio::spawn(async move {
            let _unfinished = unfinished;
            // Without it answers may wait for the client's delayed acknowledgement; nothing depends on it.
            let _ = stream.set_nodelay(true);
            match tokio::time::timeout(HANDSHAKE_DEADLINE, acceptor.accept(stream)).await {
                Ok(Ok(stream)) => {
                    let stream = Connection {
                        stream,
                        peer,
                        _place: place,
                    };
                    // The receiver is gone only when the server is.
                    let _ = ready.send(Ok(stream)).await;
                }
                Ok(Err(error)) => tracing::debug!(%peer, %error, "handshake failed"),
                Err(_) => tracing::debug!(%peer, "handshake not done in time"),
            }
        });
    }
}

/// The serving certificate, made anew in memory at half its life.
struct ServingCertificate {
    authority: Arc<Authority>,
    names: Vec<String>,
    current: Mutex<Served>,
}

struct Served {
    certificate: Arc<CertifiedKey>,
    signer: String,
    made: SystemTime,
    due: SystemTime,
}

impl ServingCertificate {
    fn new(authority: Arc<Authority>, names: Vec<String>) -> Result<Self, AuthorityError> {
        let current = Served::make(&authority, &names, SystemTime::now())?;
        Ok(Self {
            authority,
            names,
            current: Mutex::new(current),
        })
    }

    fn at(&self, now: SystemTime) -> Arc<CertifiedKey> {
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        // Made in the future: the clock was set back, and the certificate may not be valid yet.
        // Another intermediate signs now: what has signed this certificate may not be trusted for long.
        if now >= current.due || now < current.made || current.signer != self.authority.signer_pem() {
            match Served::make(&self.authority, &self.names, now) {
                Ok(new) => *current = new,
                Err(error) => tracing::error!(%error, "the serving certificate could not be renewed"),
            }
        }
        current.certificate.clone()
    }
}

impl Served {
    fn make(authority: &Authority, names: &[String], now: SystemTime) -> Result<Self, AuthorityError> {
        // It expires sooner where what signs it does.
        let (certificate, not_after, signer) = authority.serving_certificate(names, SERVING_LIFETIME, now)?;
        let life = not_after.duration_since(now).unwrap_or_default();
        Ok(Self {
            certificate: Arc::new(certificate),
            signer,
            made: now,
            due: now + life / 2,
        })
    }
}

impl ResolvesServerCert for ServingCertificate {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.at(SystemTime::now()))
    }
}

impl fmt::Debug for ServingCertificate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ServingCertificate({:?})", self.names)
    }
}
