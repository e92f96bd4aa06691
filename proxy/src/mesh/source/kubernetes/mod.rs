//! The Kubernetes API as a source of truth.

pub mod events;
mod hook;
pub mod policies;

pub use hook::{PolicyConversion, PolicyKind};
