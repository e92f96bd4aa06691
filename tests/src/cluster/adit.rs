//! Adit on a cluster, by its chart.

use std::path::PathBuf;

use anyhow::ensure;

use super::hierarchy::is_only_unified;
use super::{Cluster, adit_name};

/// Adit's own namespace.
pub const SYSTEM: &str = "adit-system";

/// The chart: the one that `ADIT_CHART` names, else that of this source.
fn chart() -> anyhow::Result<PathBuf> {
    let path = std::env::var_os("ADIT_CHART").map(PathBuf::from);
    let path = path.unwrap_or_else(|| PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy/chart/adit")));
    ensure!(
        path.join("Chart.yaml").is_file(),
        "there is no chart in {}",
        path.display()
    );
    Ok(path)
}

/// The words after `helm` that do `verb` (`install` or `upgrade`) with Adit on a cluster of this machine: which image,
/// where cgroup version 2 is mounted, and an address of the authority, as there is no DNS. `more` are values, as
/// `key=value`.
pub fn helm_words(verb: &str, more: &[&str]) -> anyhow::Result<Vec<String>> {
    let chart = chart()?.display().to_string();
    let mut words: Vec<String> = [verb, "adit", &chart, "--namespace", SYSTEM].map(String::from).into();
    if verb == "install" {
        words.push("--create-namespace".to_owned());
    }
    words.extend(["--wait", "--timeout", "2m"].map(String::from));
    let name = adit_name();
    let mut values = Vec::new();
    if let Some((repository, tag)) = name.rsplit_once(':') {
        values.push(format!("image.repository={repository}"));
        values.push(format!("image.tag={tag}"));
    }
    values.push("ca.clusterIP=10.96.0.15".to_owned());
    if !is_only_unified() {
        values.push("cgroupRoot=/sys/fs/cgroup/unified".to_owned());
    }
    values.extend(more.iter().map(|value| (*value).to_owned()));
    words.extend(values.into_iter().flat_map(|value| ["--set".to_owned(), value]));
    Ok(words)
}

impl Cluster {
    /// Installs Adit, whose image is taken into the nodes first, and waits until it is ready.
    pub fn install_adit(&self, more: &[&str]) -> anyhow::Result<()> {
        self.import_adit()?;
        self.helm(helm_words("install", more)?)?;
        Ok(())
    }
}
