//! The messages and stubs of the certificate service, generated from `proto/citadel.proto`.
#![allow(
    missing_docs,
    unreachable_pub,
    unused_qualifications,
    clippy::unwrap_used,
    clippy::large_futures
)]

tonic::include_proto!("istio.v1.auth");

/// The metadata key under which a node proxy names the identity that it asks for.
pub(crate) const IMPERSONATED_IDENTITY: &str = "ImpersonatedIdentity";
