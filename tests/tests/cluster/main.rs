//! What a real Kubernetes cluster shows: one file per behaviour, one cluster for all of them.
#![expect(clippy::unwrap_used, reason = "a test panics where it fails, its helpers too")]

mod bed;
mod capture;
mod failures;
mod labels;
mod probes;
mod stage;
mod statefulset;
mod world;
