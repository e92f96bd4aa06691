//! What this source must be told.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use ipnet::IpNet;
use thiserror::Error;

use crate::identity::TrustDomain;

/// How the cluster's state is read, and what is made of it.
#[derive(Debug, Clone)]
pub struct KubernetesSettings {
    /// How the API server is reached; by the pod's own service account where this is none.
    pub kubeconfig: Option<PathBuf>,
    /// The trust domain of all identities.
    pub trust_domain: TrustDomain,
    /// The cluster's DNS domain.
    pub cluster_domain: String,
    /// The namespace whose policies hold in the whole mesh.
    pub root_namespace: String,
    /// The label that wants pods in the mesh.
    pub enrolment: EnrolmentLabel,
    /// Where addresses of the cluster lie, besides those that its nodes have for their pods.
    pub cluster_ranges: Vec<IpNet>,
}

/// What of the cluster is looked at.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum View {
    /// All that the agent of this node needs. A pod of another node is in the mesh once it is captured there.
    Node(String),
    /// Which identities may be used on which node: those of all pods that are to be in the mesh.
    Authority,
}

/// A label `KEY=VALUE` on a namespace, or on a pod, where it goes before the namespace's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EnrolmentLabel {
    /// Its key.
    pub key: String,
    /// The value that wants pods in the mesh. Any other does not.
    pub value: String,
}

/// A text that is no label.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{0:?} is not of the form KEY=VALUE, such as mesh.adit/mode=enabled")]
pub struct NoLabel(String);

impl FromStr for EnrolmentLabel {
    type Err = NoLabel;

    fn from_str(label: &str) -> Result<Self, NoLabel> {
        match label.split_once('=') {
            Some((key, value)) if !key.is_empty() && !value.is_empty() && !value.contains('=') => Ok(Self {
                key: key.to_owned(),
                value: value.to_owned(),
            }),
            _ => Err(NoLabel(label.to_owned())),
        }
    }
}

impl fmt::Display for EnrolmentLabel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.key, self.value)
    }
}
