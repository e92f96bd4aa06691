//! What is kept of a cluster for who wants to know why something failed.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context;

use super::{Cluster, Machine};

/// What is asked of the API server: a file for each.
const QUESTIONS: [(&str, &[&str]); 4] = [
    (
        "objects.txt",
        &[
            "get",
            "all,nodes,endpointslices",
            "--all-namespaces",
            "--output",
            "wide",
        ],
    ),
    ("pods.yaml", &["get", "pods", "--all-namespaces", "--output", "yaml"]),
    (
        "events.txt",
        &["get", "events", "--all-namespaces", "--sort-by=.lastTimestamp"],
    ),
    ("nodes.txt", &["describe", "nodes"]),
];

/// Copies everything into a folder. What cannot be had is left out, with the reason in its place.
pub(super) fn collect(cluster: &Cluster, folder: &Path) -> anyhow::Result<()> {
    fs::create_dir_all(folder).with_context(|| format!("make {}", folder.display()))?;
    for (file, question) in QUESTIONS {
        let patience = ["--request-timeout=5s"];
        let answer = cluster.kubectl(question.iter().chain(&patience));
        let text = answer.unwrap_or_else(|error| format!("{error:#}\n"));
        fs::write(folder.join(file), text).with_context(|| format!("write {file}"))?;
    }
    for machine in Machine::all() {
        let state = cluster.prefix().folder(machine);
        let to = folder.join(machine.to_string());
        copy_logs(&state, &to)?;
        copy_logs(&state.join("root/var/log/pods"), &to.join("pods"))?;
    }
    Ok(())
}

/// Copies all files that end in `.log` from a folder and, but for containers' file systems, from those in it.
fn copy_logs(from: &Path, to: &Path) -> anyhow::Result<()> {
    for entry in fs::read_dir(from).into_iter().flatten().flatten() {
        let (path, name) = (entry.path(), entry.file_name());
        let Ok(kind) = entry.file_type() else { continue };
        if kind.is_dir() && name != "root" && name != "etcd" {
            copy_logs(&path, &to.join(name))?;
        } else if kind.is_file() && path.extension().is_some_and(|extension| extension == "log") {
            fs::create_dir_all(to).with_context(|| format!("make {}", to.display()))?;
            fs::copy(&path, to.join(name)).with_context(|| format!("copy {}", path.display()))?;
        }
    }
    Ok(())
}

/// Copies everything to where it stays, and says where that is.
pub(super) fn keep(cluster: &Cluster, what: &str) -> String {
    let folder = std::env::var_os("ADIT_LOGS").map_or_else(std::env::temp_dir, PathBuf::from);
    let folder = folder.join(format!("cluster-{}-{what}", cluster.prefix()));
    match collect(cluster, &folder) {
        Ok(()) => folder.display().to_string(),
        Err(error) => format!("{error:#}"),
    }
}
