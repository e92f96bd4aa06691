//! What exists: workloads, services and policies, and the indexes over them.

mod model;

pub use model::{Protocol, Service, ServicePort, TargetPort, TrafficDistribution, Workload};
