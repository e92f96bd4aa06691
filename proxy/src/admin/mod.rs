//! Readiness, metrics and state over HTTP, on loopback.
