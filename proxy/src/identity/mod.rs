//! Who a workload is: SPIFFE ids, certificates, the per-identity store and the CA clients that fill it.

mod spiffe;

pub use spiffe::{MAX_ID_LEN, MAX_TRUST_DOMAIN_LEN, SpiffeError, SpiffeId, TrustDomain};
