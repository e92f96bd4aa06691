//! What a mesh consists of: workloads and services, as every source of truth describes them.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use super::Exclusions;
use crate::identity::SpiffeId;

/// How a workload is reached from another node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Protocol {
    /// Over a tunnel with mutual TLS: the workload is in the mesh.
    Hbone,
    /// In plaintext: the workload is known, but not in the mesh.
    #[default]
    Plain,
}

/// How connections between pods of one node travel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SameNode {
    /// From pod to pod, without a proxy, where the kernel can decide.
    #[default]
    Direct,
    /// In a tunnel with mutual TLS, as between nodes.
    Encrypted,
}

/// A machine that runs workloads.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Node {
    /// The node's name.
    pub name: Arc<str>,
    /// Its zone; empty where unknown.
    pub zone: Arc<str>,
    /// Its own addresses.
    pub addresses: Vec<IpAddr>,
    /// The ranges that its pods' addresses are from; none where that is not known.
    pub ranges: Vec<IpNet>,
}

/// A pod, or something else with addresses that stands for one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Workload {
    /// Unique for the life of the workload; a pod that comes again has another.
    pub uid: Arc<str>,
    /// The pod's name.
    pub name: Arc<str>,
    /// The pod's namespace.
    pub namespace: Arc<str>,
    /// The identity that its connections carry: trust domain, namespace and service account.
    pub identity: SpiffeId,
    /// The node it runs on.
    pub node: Arc<str>,
    /// Its addresses.
    pub addresses: Vec<IpAddr>,
    /// Named container ports.
    pub ports: BTreeMap<String, u16>,
    /// How it is reached from another node.
    pub protocol: Protocol,
    /// How its connections within its node travel.
    pub same_node: SameNode,
    /// Labels, for services' selectors and `canonical_*`.
    pub labels: BTreeMap<String, String>,
    /// The zone of its node; empty where unknown.
    pub zone: Arc<str>,
    /// Policies of workload scope that apply, as `namespace/name`.
    pub policies: Vec<Arc<str>>,
    /// Whether it may be chosen as an endpoint.
    pub ready: bool,
    /// What of its traffic is left alone; none where nothing is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exclusions: Option<Arc<Exclusions>>,
    /// For a pod of the local node, a path to its network namespace. Where there is none, the namespace is found by the
    /// pod's cgroup.
    pub netns: Option<PathBuf>,
    /// What its own node must know of it besides; none elsewhere, and from sources that know no pods.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pod: Option<Arc<PodDetails>>,
}

/// What the agent of a pod's own node must know of it besides.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct PodDetails {
    /// Whether labels want it in the mesh, whatever else forbids it.
    pub labelled: bool,
    /// Whether it has no network namespace of its own.
    pub host_network: bool,
    /// Whether all its containers have ended for good.
    pub finished: bool,
    /// Whether it is being deleted.
    pub deleting: bool,
    /// The name of its RuntimeClass.
    pub runtime_class: Option<Arc<str>>,
    /// For a static pod, the uid that the kubelet knows it by; its own uid is its mirror's.
    pub static_uid: Option<Arc<str>>,
    /// Its annotations that begin with `mesh.adit/`.
    pub annotations: BTreeMap<String, String>,
    /// What is wrong with those.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub faults: Vec<String>,
    /// The condition `mesh.adit/Captured`, where it has one.
    pub captured: Option<Captured>,
}

/// The type of the condition by which a pod's agent tells whether the pod is captured.
pub const CAPTURED: &str = "mesh.adit/Captured";

/// The condition by which a pod's agent tells whether the pod is captured.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Captured {
    /// Whether it is.
    pub status: bool,
    /// Why, in one word.
    pub reason: String,
    /// Why, for people.
    pub message: String,
}

/// What a pod is that is on the node, and that the mesh does not list.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Unlisted {
    /// Outside the mesh: the source lists all that is inside.
    #[default]
    Outside,
    /// Nobody knows yet: the source lists every pod, and will list this one.
    Awaited,
}

impl Workload {
    /// The uid in the name of the pod's cgroup.
    pub fn cgroup_uid(&self) -> &str {
        let of_static = self.pod.as_ref().and_then(|pod| pod.static_uid.as_deref());
        of_static.unwrap_or(&self.uid)
    }

    /// Whether what comes in at the port goes straight to the application, whoever it is from. To whoever dials it, it is
    /// outside the mesh.
    pub fn excludes_inbound(&self, port: u16) -> bool {
        let ranges = self.exclusions.iter().flat_map(|exclusions| &exclusions.inbound_ports);
        ranges.into_iter().any(|range| range.contains(port))
    }

    /// Its address of the same family as `like`, where it has one.
    pub fn address_like(&self, like: IpAddr) -> Option<IpAddr> {
        self.addresses
            .iter()
            .copied()
            .find(|address| address.is_ipv4() == like.to_canonical().is_ipv4())
    }

    /// The canonical service name: the label that says so, else `app`, else the workload's name.
    pub fn canonical_name(&self) -> &str {
        ["service.istio.io/canonical-name", "app.kubernetes.io/name", "app"]
            .iter()
            .find_map(|label| self.labels.get(*label))
            .map_or(&self.name, String::as_str)
    }

    /// The canonical revision: the label that says so, else `version`, else `latest`.
    pub fn canonical_revision(&self) -> &str {
        [
            "service.istio.io/canonical-revision",
            "app.kubernetes.io/version",
            "version",
        ]
        .iter()
        .find_map(|label| self.labels.get(*label))
        .map_or("latest", String::as_str)
    }
}

/// Which endpoints of a service are preferred.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum TrafficDistribution {
    /// All alike.
    #[default]
    Any,
    /// Those on the caller's node first, then its zone, then any (`PreferSameNode`).
    PreferSameNode,
    /// Those in the caller's zone first, then any (`PreferClose`, `PreferSameZone`).
    #[serde(alias = "PreferClose")]
    PreferSameZone,
    /// Only those on the caller's node (`internalTrafficPolicy: Local`).
    SameNodeOnly,
}

/// The port of an endpoint that a service's port leads to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum TargetPort {
    /// The same number on every endpoint.
    Number(u16),
    /// Looked up in each workload's named ports.
    Name(String),
}

/// A port of a service.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ServicePort {
    /// The port that clients dial.
    pub port: u16,
    /// Where it leads.
    pub target: TargetPort,
}

/// A service with virtual addresses.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Service {
    /// The service's name.
    pub name: Arc<str>,
    /// Its namespace.
    pub namespace: Arc<str>,
    /// Its full DNS name, `name.namespace.svc.<cluster domain>`.
    pub hostname: Arc<str>,
    /// Its virtual addresses.
    pub addresses: Vec<IpAddr>,
    /// Its ports.
    pub ports: Vec<ServicePort>,
    /// Which endpoints are preferred.
    pub distribution: TrafficDistribution,
    /// Whether connections of one client are to go to one endpoint.
    pub affinity: bool,
    /// Its endpoints.
    pub endpoints: Vec<ServiceEndpoint>,
}

/// What a service's connections may lead to.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize)]
#[serde(untagged)]
pub enum ServiceEndpoint {
    /// The workload of that uid, at its own addresses, by the service's target ports, while it is ready.
    Workload(Arc<str>),
    /// An address with all that the source has resolved for it.
    Resolved(ResolvedEndpoint),
}

/// An endpoint as the cluster's control plane has resolved it.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize)]
pub struct ResolvedEndpoint {
    /// The uid of the workload that is behind the address; none where that is no workload.
    pub workload: Option<Arc<str>>,
    /// Where it is reached.
    pub address: IpAddr,
    /// Whether it may be chosen.
    pub readiness: Readiness,
    /// Its node; empty where unknown.
    pub node: Arc<str>,
    /// Its zone; empty where unknown.
    pub zone: Arc<str>,
    /// By each port of the service, its own; a port of the service that it lacks is not here.
    pub ports: Arc<[(u16, u16)]>,
}

/// Whether an endpoint may be chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Readiness {
    /// It may.
    Ready,
    /// It ends, but still serves: only where no other is ready.
    Draining,
    /// It may not.
    NotReady,
}
