//! Sources of truth: each builds a [`Mesh`](super::Mesh) from what it reads and publishes it.

mod document;
mod fault;
pub mod file;
pub mod kubernetes;
mod status;

pub use fault::{Fault, SourceError};
pub use file::FileSource;
pub use kubernetes::KubernetesSource;
pub use status::{SourceStatus, StatusHandle, Synced};
