//! Adit, a node data plane for Kubernetes: each pod's TCP traffic under the pod's own identity.
//!
//! The modules stand in layers; each uses only those above it in this list.

pub mod admin;
pub mod ca;
pub mod cli;
pub mod dataplane;
#[doc(hidden)]
pub mod fuzzing;
pub mod hbone;
pub mod identity;
pub mod mesh;
pub mod node;
pub mod policy;
pub mod relay;
pub mod steer;
pub mod telemetry;
