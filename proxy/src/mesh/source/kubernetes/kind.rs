//! The kinds of objects that are followed.

use super::hook::PolicyKind;

/// A kind of objects.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Kind {
    Namespaces,
    Nodes,
    Pods,
    ServiceRanges,
    Services,
    EndpointSlices,
    AuthorizationPolicies,
    PeerAuthentications,
}

/// How objects are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Encoding {
    /// Custom resources have no other.
    Json,
    Protobuf,
}

impl Kind {
    /// What the agent of a node follows.
    pub(super) const ALL: [Self; 8] = [
        Self::Namespaces,
        Self::Nodes,
        Self::Pods,
        Self::ServiceRanges,
        Self::Services,
        Self::EndpointSlices,
        Self::AuthorizationPolicies,
        Self::PeerAuthentications,
    ];
    /// What tells where identities may be used.
    pub(super) const PLACEMENT: [Self; 3] = [Self::Namespaces, Self::Nodes, Self::Pods];
    /// The policies.
    pub(super) const POLICIES: [Self; 2] = [Self::AuthorizationPolicies, Self::PeerAuthentications];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Namespaces => "namespaces",
            Self::Nodes => "nodes",
            Self::Pods => "pods",
            Self::ServiceRanges => "servicecidrs",
            Self::Services => "services",
            Self::EndpointSlices => "endpointslices",
            Self::AuthorizationPolicies => "authorizationpolicies",
            Self::PeerAuthentications => "peerauthentications",
        }
    }

    /// The path of all its objects, and which of them are wanted.
    pub(super) fn path(self) -> &'static str {
        match self {
            Self::Namespaces => "/api/v1/namespaces?",
            Self::Nodes => "/api/v1/nodes?",
            // What is not scheduled yet runs nowhere.
            Self::Pods => "/api/v1/pods?fieldSelector=spec.nodeName%21%3D&",
            Self::ServiceRanges => "/apis/networking.k8s.io/v1/servicecidrs?",
            Self::Services => "/api/v1/services?",
            // Those of services without addresses of their own are never asked for.
            Self::EndpointSlices => {
                "/apis/discovery.k8s.io/v1/endpointslices?labelSelector=%21service.kubernetes.io%2Fheadless&"
            }
            Self::AuthorizationPolicies => "/apis/security.istio.io/v1/authorizationpolicies?",
            Self::PeerAuthentications => "/apis/security.istio.io/v1/peerauthentications?",
        }
    }

    pub(super) fn encoding(self) -> Encoding {
        match self {
            Self::AuthorizationPolicies | Self::PeerAuthentications => Encoding::Json,
            _ => Encoding::Protobuf,
        }
    }

    /// The kind of policies that these are.
    pub(super) fn policy(self) -> Option<PolicyKind> {
        match self {
            Self::AuthorizationPolicies => Some(PolicyKind::AuthorizationPolicy),
            Self::PeerAuthentications => Some(PolicyKind::PeerAuthentication),
            _ => None,
        }
    }

    /// Whether a cluster may be without its definition.
    pub(super) fn is_optional(self) -> bool {
        matches!(
            self,
            Self::ServiceRanges | Self::AuthorizationPolicies | Self::PeerAuthentications
        )
    }
}
