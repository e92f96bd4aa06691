//! What a real Kubernetes cluster shows: one file per behaviour, one cluster for all of them.
#![expect(clippy::unwrap_used, reason = "a test panics where it fails, its helpers too")]

mod bed;
mod ca;
mod capture;
mod exclusions;
mod failures;
mod install;
mod istiod;
mod labels;
mod policies;
mod probes;
mod rbac;
mod services;
mod stage;
mod statefulset;
mod world;
