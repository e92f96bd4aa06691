//! The mesh file of the bed: the one source of truth of its CA and its proxies.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use anyhow::Context;
use serde::Serialize;

/// What the mesh file says. Change it with [`Bed::update`](super::Bed::update).
#[derive(Debug, Clone, Default)]
pub struct MeshDoc {
    /// The trust domain.
    pub trust_domain: String,
    /// Where the cluster's addresses lie, if it says so.
    pub cluster_ranges: Vec<String>,
    /// What pods are that are not listed, if it says so.
    pub unlisted_pods: Option<String>,
    /// The nodes.
    pub nodes: Vec<NodeDoc>,
    /// The workloads.
    pub workloads: Vec<WorkloadDoc>,
    /// The services.
    pub services: Vec<ServiceDoc>,
    /// The authorization policies, each a YAML mapping as in the mesh file.
    pub policies: Vec<String>,
}

/// A node in the mesh file.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
#[expect(missing_docs, reason = "the fields are the mesh file's own")]
pub struct NodeDoc {
    pub name: String,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub addresses: Vec<IpAddr>,
}

/// A workload in the mesh file.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
#[expect(missing_docs, reason = "the fields are the mesh file's own")]
pub struct WorkloadDoc {
    pub name: String,
    pub namespace: String,
    pub service_account: String,
    pub uid: String,
    pub node: String,
    pub addresses: Vec<IpAddr>,
    pub protocol: String,
    pub labels: BTreeMap<String, String>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub ports: BTreeMap<String, u16>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub policies: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub same_node: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ready: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exclude: Option<ExcludeDoc>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub netns: Option<PathBuf>,
}

/// What of a workload's traffic is left alone.
#[derive(Debug, Clone, Default, Serialize)]
#[serde(rename_all = "camelCase")]
#[expect(missing_docs, reason = "the fields are the mesh file's own")]
pub struct ExcludeDoc {
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub inbound_ports: Vec<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub outbound_ports: Vec<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub outbound_cidrs: Vec<String>,
}

/// A service in the mesh file.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
#[expect(missing_docs, reason = "the fields are the mesh file's own")]
pub struct ServiceDoc {
    pub name: String,
    pub namespace: String,
    pub addresses: Vec<IpAddr>,
    pub ports: Vec<PortDoc>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub selector: Option<BTreeMap<String, String>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub endpoints: Option<Vec<String>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub distribution: Option<String>,
}

/// A service's port in the mesh file.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
#[expect(missing_docs, reason = "the fields are the mesh file's own")]
pub struct PortDoc {
    pub port: u16,
    pub target: String,
}

impl MeshDoc {
    /// The workload of this name.
    pub fn workload(&mut self, name: &str) -> Option<&mut WorkloadDoc> {
        self.workloads.iter_mut().find(|workload| workload.name == name)
    }

    /// The text of the file. Entries are written in JSON's notation, which is YAML too.
    pub fn to_yaml(&self) -> anyhow::Result<String> {
        let mut text = format!("trustDomain: {}\n", self.trust_domain);
        if let Some(unlisted) = &self.unlisted_pods {
            writeln!(text, "unlistedPods: {unlisted}")?;
        }
        list(
            &mut text,
            "clusterRanges",
            self.cluster_ranges.iter().map(serde_json::to_string),
        )?;
        list(&mut text, "nodes", self.nodes.iter().map(serde_json::to_string))?;
        list(&mut text, "workloads", self.workloads.iter().map(serde_json::to_string))?;
        list(&mut text, "services", self.services.iter().map(serde_json::to_string))?;
        list(
            &mut text,
            "policies",
            self.policies.iter().map(|policy| Ok(indented(policy))),
        )?;
        Ok(text)
    }

    /// Puts the file in place at once: a reader sees the old or the new one, never a part.
    pub(super) fn write(&self, path: &Path) -> anyhow::Result<()> {
        replace(path, &self.to_yaml()?)
    }
}

/// Puts `text` in place of the file at `path` by a rename.
pub(super) fn replace(path: &Path, text: &str) -> anyhow::Result<()> {
    let next = path.with_extension("next");
    fs::write(&next, text).with_context(|| format!("write {}", next.display()))?;
    fs::rename(&next, path).with_context(|| format!("rename {} to {}", next.display(), path.display()))
}

fn list(
    text: &mut String,
    name: &str,
    entries: impl ExactSizeIterator<Item = serde_json::Result<String>>,
) -> anyhow::Result<()> {
    if entries.len() == 0 {
        writeln!(text, "{name}: []")?;
        return Ok(());
    }
    writeln!(text, "{name}:")?;
    for entry in entries {
        writeln!(text, "  - {}", entry?)?;
    }
    Ok(())
}

/// A block of YAML, its indentation made to fit an entry of a list.
fn indented(block: &str) -> String {
    let lines: Vec<&str> = block.lines().filter(|line| !line.trim().is_empty()).collect();
    let margin = lines
        .iter()
        .map(|line| line.len() - line.trim_start().len())
        .min()
        .unwrap_or(0);
    let lines: Vec<&str> = lines.iter().map(|line| &line[margin..]).collect();
    lines.join("\n    ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_policy_is_indented_as_an_entry_of_the_list() {
        let doc = MeshDoc {
            trust_domain: "cluster.local".to_owned(),
            policies: vec!["\n        name: a\n        rules:\n          - to: []\n".to_owned()],
            ..MeshDoc::default()
        };
        let text = doc.to_yaml().unwrap();
        assert!(
            text.ends_with("policies:\n  - name: a\n    rules:\n      - to: []\n"),
            "{text}"
        );
    }
}
