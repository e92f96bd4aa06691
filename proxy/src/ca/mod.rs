//! The embedded certificate authority.
//!
//! It serves `istio.v1.auth.IstioCertificateService` over TLS and grants a node proxy the identities of the pods
//! on that proxy's own node, and nothing else to anybody. Without a cluster it keeps its keys in a folder and knows its
//! callers by the keys of a token issuer; in a cluster the keys are in a Secret, and the API server says who calls.

mod args;
#[cfg(test)]
mod attacks;
mod audit;
mod authority;
mod authorize;
mod cluster;
mod connections;
mod counts;
mod csr;
#[cfg(test)]
mod fake_api;
mod files;
mod folder;
pub(crate) mod fuzz;
mod health;
mod jwks;
mod keyring;
mod leader;
mod limits;
mod mint;
mod provided;
mod review;
mod root;
mod rotate;
mod rotation;
mod secret;
mod serve;
mod service;
mod signer;
mod spiffe_bundle;
mod status;
pub mod token;
mod trust_bundle;

pub use args::{CaArgs, Surroundings, Switch, TokenArgs, run, run_token};
pub use audit::AuditLog;
pub use authority::{Authority, AuthorityError, SignedCertificate};
pub use authorize::{PodRules, Refusal, ServiceAccount};
pub use cluster::{ClusterError, ClusterSettings};
pub use counts::Counts;
pub use csr::CsrError;
pub use files::FileError;
pub use keyring::{Answer, Phase, RootStanding, Standing, Step};
pub use limits::{LimitSettings, Overload};
pub use provided::Provided;
pub use rotate::{RotateArgs, run_rotate};
pub use serve::{ServeError, Server, Settings};
pub use status::{StatusArgs, run_status};
