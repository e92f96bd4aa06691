//! What can go wrong with a tunnel.

use std::io;

use thiserror::Error;

use crate::identity::explain_tls;

/// Why a tunnel, or a stream in it, did not come to be.
#[derive(Debug, Clone, Error)]
pub enum HboneError {
    /// The peer's proxy could not be reached.
    #[error("connecting to the peer's tunnel port: {0}")]
    Connect(String),
    /// Connecting took longer than it may.
    #[error("connecting to the peer's tunnel port: no answer in time")]
    ConnectTimeout,
    /// The TLS handshake failed.
    #[error("TLS handshake: {0}")]
    Tls(String),
    /// The TLS handshake or the HTTP/2 preface took longer than it may.
    #[error("TLS handshake: no answer in time")]
    HandshakeTimeout,
    /// The peer's HTTP/2 is not acceptable, or the tunnel has broken.
    #[error("HTTP/2: {0}")]
    Http2(String),
    /// The peer refused the request.
    #[error("the peer answered {0}")]
    Status(http::StatusCode),
    /// The peer reset the stream instead of answering: its application has reset the connection.
    #[error("the peer reset the stream")]
    Reset,
    /// The answer to the request took longer than it may.
    #[error("the peer did not answer the request in time")]
    RequestTimeout,
}

impl HboneError {
    pub(super) fn http2(error: &h2::Error) -> Self {
        Self::Http2(error.to_string())
    }

    pub(super) fn tls(error: &io::Error) -> Self {
        let reason = error.get_ref().and_then(|error| error.downcast_ref());
        Self::Tls(reason.map_or_else(|| error.to_string(), explain_tls))
    }
}
