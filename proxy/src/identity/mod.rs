//! Who a workload is: SPIFFE ids, certificates, the per-identity store and the CA clients that fill it.

mod ca;
mod certificate;
mod chain;
mod entry;
mod folder;
pub(crate) mod fuzz;
mod gate;
mod issuer;
mod key;
mod lease;
pub(crate) mod proto;
mod queue;
mod schedule;
mod spiffe;
mod spire;
mod status;
mod store;
#[cfg(test)]
pub(crate) mod testing;
mod tls;
mod trust;
mod verify;

pub use ca::{CaClient, CaSettings, CaSettingsError};
pub(crate) use ca::{causes, causes_after};
pub use certificate::Certificate;
pub(crate) use chain::hex;
pub use chain::{CertificateError, MAX_CHAIN_BYTES, MAX_CHAIN_CERTS};
pub use folder::CertificateFolder;
pub use issuer::{BoxFuture, CallOutcome, IssueError, Issued, Issuer};
pub use key::{KeyError, PrivateKey};
pub use lease::IdentityLease;
pub use spiffe::{MAX_ID_LEN, MAX_TRUST_DOMAIN_LEN, SpiffeError, SpiffeId, TrustDomain};
pub use spire::{SpireAgent, SpireSettings, SpireSettingsError};
pub use status::{IdentityState, IdentityStatus, StoreStats};
pub use store::{CertStore, IdentityError, StoreSettings};
pub(crate) use tls::provider as crypto_provider;
pub use trust::{CrlPolicy, CrlStatus, PeerChain, Role, RootSource, RootStatus, Trust, TrustSettings, TrustStatus};
pub(crate) use verify::explain as explain_tls;
