//! The tunnel: HTTP/2 CONNECT over mutual TLS, client pool and server.
