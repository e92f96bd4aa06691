//! Where what the mesh consists of comes from, as flags say, and the source that follows.

use std::path::PathBuf;

use clap::builder::NonEmptyStringValueParser;
use clap::{Args, ValueEnum};
use ipnet::IpNet;

use super::settings::SettingsError;
use crate::identity::TrustDomain;
use crate::mesh::MeshHandle;
use crate::mesh::source::kubernetes::{EnrolmentLabel, KubernetesSettings, KubernetesSource, View};
use crate::mesh::source::{FileSource, StatusHandle, Synced};

pub(super) const HEADING: &str = "Source of truth";

/// The kinds of sources.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum SourceKind {
    /// A mesh file.
    File,
    /// The Kubernetes API.
    Kubernetes,
}

/// The flags of the source.
#[derive(Debug, Clone, Args)]
pub struct SourceArgs {
    /// Where nodes, workloads, services and policies are learned from: a mesh file, or the Kubernetes API
    #[arg(long, value_name = "SOURCE", env = "ADIT_SOURCE", help_heading = HEADING, default_value = "file")]
    pub(super) source: SourceKind,

    /// The file of nodes, workloads, services and policies; read again when it changes. Needed with --source file
    #[arg(long, value_name = "FILE", env = "ADIT_MESH_FILE", help_heading = HEADING)]
    pub(super) mesh_file: Option<PathBuf>,

    /// How the API server is reached; in a pod of the cluster by the pod's service account, where it is left out
    #[arg(long, value_name = "FILE", env = "ADIT_KUBECONFIG", help_heading = HEADING)]
    pub(super) kubeconfig: Option<PathBuf>,

    /// The trust domain of all identities; a mesh file has its own
    #[arg(long, value_name = "NAME", env = "ADIT_TRUST_DOMAIN", help_heading = HEADING, default_value = "cluster.local")]
    pub(super) trust_domain: TrustDomain,

    /// The cluster's DNS domain; a mesh file has its own
    #[arg(long, value_name = "NAME", env = "ADIT_CLUSTER_DOMAIN", help_heading = HEADING,
          default_value = "cluster.local", value_parser = NonEmptyStringValueParser::new())]
    pub(super) cluster_domain: String,

    /// The namespace whose policies hold in the whole mesh
    #[arg(long, value_name = "NAME", env = "ADIT_ROOT_NAMESPACE", help_heading = HEADING,
          default_value = "adit-system", value_parser = NonEmptyStringValueParser::new())]
    pub(super) root_namespace: String,

    /// The label that wants pods in the mesh, on their namespace or on themselves
    #[arg(long, value_name = "KEY=VALUE", env = "ADIT_ENROLMENT_LABEL", help_heading = HEADING,
          default_value = "mesh.adit/mode=enabled")]
    pub(super) enrolment_label: EnrolmentLabel,

    /// Where addresses of pods and services lie, such as 10.96.0.0/16, besides the ranges that nodes have for their
    /// pods. May be given more than once
    #[arg(long, value_name = "RANGE", env = "ADIT_CLUSTER_RANGES", help_heading = HEADING, value_delimiter = ',')]
    pub(super) cluster_ranges: Vec<IpNet>,
}

/// Where what the mesh consists of comes from.
#[derive(Debug, Clone)]
pub enum SourceSettings {
    /// This file.
    File(PathBuf),
    /// The Kubernetes API.
    Kubernetes(KubernetesSettings),
}

impl TryFrom<SourceArgs> for SourceSettings {
    type Error = SettingsError;

    fn try_from(args: SourceArgs) -> Result<Self, SettingsError> {
        match (args.source, args.mesh_file) {
            (SourceKind::File, Some(file)) => Ok(Self::File(file)),
            (SourceKind::File, None) => Err(SettingsError::NoMeshFile),
            (SourceKind::Kubernetes, Some(file)) => Err(SettingsError::MeshFileUnused(file)),
            (SourceKind::Kubernetes, None) => Ok(Self::Kubernetes(KubernetesSettings {
                kubeconfig: args.kubeconfig,
                trust_domain: args.trust_domain,
                cluster_domain: args.cluster_domain,
                root_namespace: args.root_namespace,
                enrolment: args.enrolment_label,
                cluster_ranges: args.cluster_ranges,
            })),
        }
    }
}

/// A source, opened.
pub(super) enum Source {
    File(FileSource),
    Kubernetes(Box<KubernetesSource>),
}

impl Source {
    /// Opens the source. A file is read; the API server is not asked yet.
    pub(super) async fn open(settings: &SourceSettings, view: View) -> anyhow::Result<Self> {
        Ok(match settings {
            SourceSettings::File(file) => Self::File(FileSource::open(file)?),
            SourceSettings::Kubernetes(settings) => {
                Self::Kubernetes(Box::new(KubernetesSource::open(settings.clone(), view).await?))
            }
        })
    }

    /// The mesh; empty until [`Self::synced`].
    pub(super) fn mesh(&self) -> MeshHandle {
        match self {
            Self::File(file) => file.mesh(),
            Self::Kubernetes(kubernetes) => kubernetes.mesh(),
        }
    }

    /// How the source is doing.
    pub(super) fn status(&self) -> StatusHandle {
        match self {
            Self::File(file) => file.status(),
            Self::Kubernetes(kubernetes) => kubernetes.status(),
        }
    }

    /// What tells that the mesh is whole.
    pub(super) fn synced(&self) -> Synced {
        match self {
            Self::File(_) => Synced::already(),
            Self::Kubernetes(kubernetes) => kubernetes.synced(),
        }
    }

    /// A client of the Kubernetes API, where that is the source.
    pub(super) fn client(&self) -> Option<kube::Client> {
        match self {
            Self::File(_) => None,
            Self::Kubernetes(kubernetes) => Some(kubernetes.client()),
        }
    }

    /// Follows the source for as long as the future is polled.
    pub(super) async fn watch(self) {
        match self {
            Self::File(file) => file.watch().await,
            Self::Kubernetes(kubernetes) => kubernetes.watch().await,
        }
    }
}
