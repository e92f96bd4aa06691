//! The messages and stubs of the Delegated Identity API, generated from `proto/spire.proto`.
#![allow(
    missing_docs,
    unreachable_pub,
    unused_qualifications,
    clippy::unwrap_used,
    clippy::large_futures
)]
// Only tests serve it.
#![cfg_attr(not(test), allow(dead_code))]

use std::fmt;

tonic::include_proto!("spire.api.agent.delegatedidentity.v1");

impl fmt::Debug for X509svidWithKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("X509SVIDWithKey")
            .field("x509_svid", &self.x509_svid)
            .finish_non_exhaustive()
    }
}
