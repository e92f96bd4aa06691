//! Who may have which identity: a pure decision.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;
use std::time::Duration;

use ipnet::IpNet;
use thiserror::Error;

use super::token::{Bound, Caller};
use crate::identity::{SpiffeError, SpiffeId, TrustDomain};
use crate::mesh::source::StatusHandle;
use crate::mesh::{Mesh, Node, Protocol};

/// How old the view of the cluster may be. A watch that has silently broken is made anew well before.
const MAX_AGE: Duration = Duration::from_secs(300);

/// A Kubernetes service account, written `<namespace>/<name>`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ServiceAccount {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
}

impl FromStr for ServiceAccount {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once('/') {
            Some((namespace, name)) if !namespace.is_empty() && !name.is_empty() && !name.contains('/') => Ok(Self {
                namespace: namespace.into(),
                name: name.into(),
            }),
            _ => Err(format!(
                "{text:?} is not a service account of the form <namespace>/<name>"
            )),
        }
    }
}

impl ServiceAccount {
    fn is(&self, identity: &SpiffeId) -> bool {
        self.namespace == identity.namespace() && self.name == identity.service_account()
    }
}

impl fmt::Display for ServiceAccount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// Why an authenticated caller does not get what it asks for.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Refusal {
    /// Only node proxies may ask for others' identities.
    #[error("the service account {0} is not a node proxy's")]
    NotNodeProxy(ServiceAccount),
    /// The token could have been copied off its pod.
    #[error("the caller's token is not bound to a pod")]
    NotBoundToPod,
    /// Without a node the placement cannot be checked.
    #[error("the caller's token is not bound to a node")]
    NotBoundToNode,
    /// The request names nobody.
    #[error("the request names no identity under ImpersonatedIdentity")]
    NoIdentity,
    /// The request's identity does not parse.
    #[error("the identity asked for does not parse: {0}")]
    BadIdentity(#[from] SpiffeError),
    /// The identity belongs to another authority.
    #[error("{identity} is not of the trust domain {trust_domain}")]
    ForeignTrustDomain {
        /// What was asked for.
        identity: SpiffeId,
        /// What this CA signs for.
        trust_domain: TrustDomain,
    },
    /// The caller's pod is not among those that the CA knows, as the CA may not have heard of it yet.
    #[error("the CA has not heard of the caller's pod {0} yet")]
    PodUnknown(String),
    /// The caller's pod was there once, and has ended or been deleted.
    #[error("the caller's pod {0} is gone")]
    PodGone(String),
    /// The pod of that uid is not the one that the token tells of.
    #[error("the caller's pod {said} is known to the CA as {found}")]
    OtherPod {
        /// What the token says.
        said: String,
        /// What the CA knows.
        found: String,
    },
    /// The token says that its pod is where it is not.
    #[error("the caller's token is for the node {said}, but its pod runs on {found}")]
    OtherNode {
        /// What the token says.
        said: String,
        /// Where the pod is.
        found: String,
    },
    /// The CA does not know the addresses of the caller's node, perhaps not yet.
    #[error("the CA does not know the addresses of the node {0} yet")]
    NodeUnknown(String),
    /// The connection does not come from the caller's node: the token may have been stolen.
    #[error(
        "the call comes from {peer}, which is no address of the node {node}; where the network rewrites addresses, give its \
         ranges by --caller-ranges"
    )]
    CallerAddress {
        /// Where the connection comes from.
        peer: IpAddr,
        /// The node of the caller's pod.
        node: String,
    },
    /// Nobody is to pass for a node proxy in the mesh.
    #[error("{0} is the identity of node proxies, which is granted to nobody")]
    ProxyIdentity(SpiffeId),
    /// What the CA knows of pods is too old to go by.
    #[error("the CA has heard nothing new of the cluster for {0} s, and grants nothing until it has")]
    Stale(u64),
    /// No such pod there.
    #[error("no workload of {identity} runs on the node {node}")]
    NotOnNode {
        /// What was asked for.
        identity: SpiffeId,
        /// The caller's node.
        node: String,
    },
}

impl Refusal {
    /// Whether the same call may be granted in a moment, when the CA has heard of what its caller has heard of already.
    pub(super) fn may_pass(&self) -> bool {
        matches!(
            self,
            Self::PodUnknown(_) | Self::NodeUnknown(_) | Self::NotOnNode { .. }
        )
    }

    /// The reason in one word, for metrics.
    pub(super) fn word(&self) -> &'static str {
        match self {
            Self::NotNodeProxy(_) => "not_node_proxy",
            Self::NotBoundToPod | Self::NotBoundToNode => "not_bound",
            Self::NoIdentity | Self::BadIdentity(_) => "bad_identity",
            Self::ForeignTrustDomain { .. } => "foreign_trust_domain",
            Self::PodUnknown(_) => "pod_unknown",
            Self::PodGone(_) => "pod_gone",
            Self::OtherPod { .. } | Self::OtherNode { .. } => "pod_differs",
            Self::NodeUnknown(_) => "node_unknown",
            Self::CallerAddress { .. } => "caller_address",
            Self::ProxyIdentity(_) => "proxy_identity",
            Self::Stale(_) => "stale",
            Self::NotOnNode { .. } => "not_on_node",
        }
    }

    /// Whether the caller is not at fault: its own word is good, but the CA cannot tell yet.
    pub(super) fn is_ignorance(&self) -> bool {
        matches!(self, Self::PodUnknown(_) | Self::NodeUnknown(_) | Self::Stale(_))
    }
}

/// What the decision goes by beside caller, request and mesh.
#[derive(Debug, Clone)]
pub(super) struct Rules {
    pub(super) trust_domain: TrustDomain,
    pub(super) node_proxies: Vec<ServiceAccount>,
    /// How callers' pods are looked at; not at all where the mesh has none of them, as in a file.
    pub(super) pods: Option<PodRules>,
}

/// What is asked of a caller's pod besides being there.
#[derive(Debug, Clone)]
pub struct PodRules {
    /// Whether calls must come from an address of the pod's node.
    pub check_address: bool,
    /// Where calls may come from besides, on networks that rewrite addresses.
    pub caller_ranges: Vec<IpNet>,
    /// When the cluster was heard of last.
    pub heard: Option<StatusHandle>,
}

impl Rules {
    /// Refuses everything while pods may long have gone that are still thought to be there.
    pub(super) fn check_view(&self) -> Result<(), Refusal> {
        let heard = self.pods.as_ref().and_then(|pods| pods.heard.as_ref()?.load().heard);
        match heard.map(|heard| heard.elapsed()) {
            Some(age) if age > MAX_AGE => Err(Refusal::Stale(age.as_secs())),
            _ => Ok(()),
        }
    }
}

/// A request that is granted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Grant {
    pub(super) identity: SpiffeId,
    /// The caller's node.
    pub(super) node: String,
    /// The pod there that entitles the caller, `namespace/name`.
    pub(super) pod: String,
}

/// Decides whether `caller`, who calls from `peer`, may have a certificate for the identity that it asks for.
pub(super) fn authorize(
    rules: &Rules,
    caller: &Caller,
    peer: Option<IpAddr>,
    requested: Option<&str>,
    mesh: &Mesh,
) -> Result<Grant, Refusal> {
    if !rules.node_proxies.contains(&caller.account) {
        return Err(Refusal::NotNodeProxy(caller.account.clone()));
    }
    let pod = caller.pod.as_ref().ok_or(Refusal::NotBoundToPod)?;
    let node = match &rules.pods {
        Some(pods) => {
            let node = node_of_pod(caller, pod, mesh)?;
            check_address(pods, peer, &node, mesh)?;
            node
        }
        None => caller.node.as_ref().ok_or(Refusal::NotBoundToNode)?.name.clone(),
    };
    let identity = SpiffeId::parse(requested.ok_or(Refusal::NoIdentity)?)?;
    if identity.trust_domain() != rules.trust_domain.as_str() {
        return Err(Refusal::ForeignTrustDomain {
            identity,
            trust_domain: rules.trust_domain.clone(),
        });
    }
    if rules.node_proxies.iter().any(|proxy| proxy.is(&identity)) {
        return Err(Refusal::ProxyIdentity(identity));
    }
    let pod = mesh
        .local_workloads(&node)
        .find(|pod| pod.protocol == Protocol::Hbone && pod.identity == identity)
        .map(|pod| format!("{}/{}", pod.namespace, pod.name));
    match pod {
        Some(pod) => Ok(Grant { identity, node, pod }),
        None => Err(Refusal::NotOnNode { identity, node }),
    }
}

/// The node that the caller's pod runs on, as the CA itself sees it.
fn node_of_pod(caller: &Caller, pod: &Bound, mesh: &Mesh) -> Result<String, Refusal> {
    let name = format!("{}/{}", caller.account.namespace, pod.name);
    let found = mesh
        .workload_by_uid(&pod.uid)
        .ok_or_else(|| Refusal::PodUnknown(name.clone()))?;
    let same = *found.namespace == *caller.account.namespace
        && *found.name == *pod.name
        && found.identity.service_account() == caller.account.name;
    if !same {
        return Err(Refusal::OtherPod {
            said: format!("{name} of {}", caller.account),
            found: format!("{}/{} of {}", found.namespace, found.name, found.identity),
        });
    }
    match &caller.node {
        // API servers before 1.30 do not say.
        None => {}
        Some(said) if *said.name == *found.node => {}
        Some(said) => {
            return Err(Refusal::OtherNode {
                said: said.name.clone(),
                found: found.node.to_string(),
            });
        }
    }
    Ok(found.node.to_string())
}

fn check_address(rules: &PodRules, peer: Option<IpAddr>, node: &str, mesh: &Mesh) -> Result<(), Refusal> {
    if !rules.check_address {
        return Ok(());
    }
    let peer = peer.unwrap_or(IpAddr::from([0; 4])).to_canonical();
    let known = mesh
        .node(node)
        .filter(|known| !known.addresses.is_empty())
        .ok_or_else(|| Refusal::NodeUnknown(node.to_owned()))?;
    let allowed = known.addresses.contains(&peer)
        || is_of_its_network(known, peer, mesh)
        || rules.caller_ranges.iter().any(|range| range.contains(&peer));
    if allowed {
        return Ok(());
    }
    Err(Refusal::CallerAddress {
        peer,
        node: node.to_owned(),
    })
}

/// Whether it is an address that the node itself has out of the range of its pods: that of the bridge or the overlay,
/// from which a call comes when a service's address is masqueraded.
fn is_of_its_network(node: &Node, peer: IpAddr, mesh: &Mesh) -> bool {
    node.ranges.iter().any(|range| range.contains(&peer)) && mesh.workload_by_addr(peer).is_none()
}

#[cfg(test)]
mod tests;
