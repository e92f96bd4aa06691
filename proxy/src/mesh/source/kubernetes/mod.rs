//! The Kubernetes API as a source of truth.

pub mod events;
