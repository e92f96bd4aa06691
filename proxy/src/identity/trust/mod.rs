//! Which roots peers are verified against, per trust domain, and what is not trusted any more.
//!
//! The decisions (what a snapshot consists of, when a learnt root is dropped, whether a chain is acceptable) are pure;
//! [`Trust`] holds the state and reads the files.

mod certificates;
mod compose;
mod crl;
mod distrust;
mod files;
pub(super) mod fuzz;
mod given;
mod learnt;
mod path;
mod peer;
mod root;
mod settings;
mod status;
mod store;
#[cfg(test)]
mod tests;

pub use path::Role;
pub(super) use path::{Check, Purpose, weakness};
pub use peer::PeerChain;
pub(super) use root::Root;
pub use settings::{CrlPolicy, TrustSettings};
pub use status::{CrlStatus, RootSource, RootStatus, TrustStatus};
pub use store::Trust;
