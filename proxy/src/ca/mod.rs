//! The embedded certificate authority.
//!
//! It serves `istio.v1.auth.IstioCertificateService` over TLS and grants a node proxy the identities of the pods
//! on that proxy's own node, and nothing else to anybody.

mod args;
mod authority;
mod authorize;
mod csr;
mod files;
mod jwks;
mod mint;
mod serve;
mod service;
pub mod token;

pub use args::{CaArgs, TokenArgs, run, run_token};
pub use authority::{Authority, AuthorityError, SignedCertificate};
pub use authorize::{Placement, Refusal, ServiceAccount};
pub use csr::CsrError;
pub use files::FileError;
pub use serve::{ServeError, Server, Settings, serve};
