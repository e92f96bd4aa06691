//! What exists: workloads, services and policies, and the indexes over them.
//!
//! A [`Mesh`] is one immutable snapshot. A source of truth ([`source`]) builds each anew and publishes it through a
//! [`MeshHandle`]; everything else loads the latest and sees one consistent state for as long as it holds it.

mod aliases;
mod edit;
mod endpoints;
mod error;
mod exclusions;
mod handle;
mod model;
mod policy_model;
mod shards;
mod snapshot;
pub mod source;

pub use edit::{Change, Changes};
pub use endpoints::{Endpoint, EndpointError, Place};
pub use error::{MeshError, Subject};
pub use exclusions::{AnnotationError, ExclusionError, Exclusions, MAX_BLOCKS, PortRange};
pub use handle::MeshHandle;
pub use model::{
    CAPTURED, Captured, Node, PodDetails, Protocol, Readiness, ResolvedEndpoint, SameNode, Service, ServiceEndpoint,
    ServicePort, TargetPort, TrafficDistribution, Unlisted, Workload,
};
pub use policy_model::{
    Action, Clause, IpBlock, IpBlockError, Listed, Match, Policy, PolicySet, Rule, Scope, ServiceAccountMatch,
    StringMatch, StringMatchError,
};
pub use snapshot::{Mesh, MeshParts};

#[cfg(test)]
pub(crate) use snapshot::tests::{parts as test_parts, workload as test_workload};
