//! What `adit check` says of a node.

use anyhow::Context;
use serde::Deserialize;

use super::node::Node;

/// What has been found.
#[derive(Debug, Clone, Deserialize)]
pub struct CheckReport {
    /// The worst level.
    pub result: String,
    /// One for each thing that was looked at.
    pub findings: Vec<CheckFinding>,
    /// Whether the program said by its status that nothing has failed.
    #[serde(skip)]
    pub succeeded: bool,
}

/// What one check has found.
#[derive(Debug, Clone, Deserialize)]
pub struct CheckFinding {
    /// What was looked at.
    pub name: String,
    /// `ok`, `warning` or `failed`.
    pub level: String,
    /// What was seen.
    pub what: String,
    /// What to do about it.
    pub advice: Option<String>,
}

impl Node {
    /// What `adit check` finds with the proxy's own arguments, in the place where the proxy runs, and with more, each
    /// `--flag=value`.
    pub fn check(&self, more: &[&str]) -> anyhow::Result<CheckReport> {
        let (text, succeeded) = self.with(more).check(&self.place, &["--json"])?;
        let report = serde_json::from_str(&text).with_context(|| format!("`adit check --json`: {text}"))?;
        Ok(CheckReport { succeeded, ..report })
    }

    /// The same, as it is said to people.
    pub fn check_text(&self, more: &[&str]) -> anyhow::Result<String> {
        Ok(self.with(more).check(&self.place, &[])?.0)
    }
}
