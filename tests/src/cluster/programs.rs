//! Where the programs of a cluster are: those of Kubernetes in a folder, Adit's own beside this one.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};

/// A folder of the cluster's programs: their builder names it by `ADIT_K8S_BIN`.
pub(super) const FOLDER: &str = "ADIT_K8S_BIN";

/// Finds a program of Kubernetes, etcd or Helm: in the folder `ADIT_K8S_BIN`, else on `PATH`.
pub(super) fn kubernetes(name: &str) -> anyhow::Result<PathBuf> {
    built(FOLDER, name, "cargo xtask cluster build")
}

/// Finds Istio's control plane: in the folder `ADIT_ISTIOD_BIN`, else on `PATH`.
pub(super) fn istiod() -> anyhow::Result<PathBuf> {
    built("ADIT_ISTIOD_BIN", "pilot-discovery", "cargo xtask cluster build")
}

/// Finds a program in the folder that its builder names by `variable`, else on `PATH`. `task` makes it.
pub(crate) fn built(variable: &str, name: &str, task: &str) -> anyhow::Result<PathBuf> {
    let named = std::env::var_os(variable).map(|folder| Path::new(&folder).join(name));
    let found = named.filter(|path| path.is_file()).or_else(|| on_path(name));
    found.with_context(|| {
        format!("no program {name} in the folder {variable} or on PATH; `{task}` makes it and says where")
    })
}

/// Finds a program that a machine runs as the host has it.
pub(super) fn host(name: &str) -> anyhow::Result<PathBuf> {
    on_path(name).with_context(|| format!("no program {name} on PATH; `cargo xtask cluster build` installs it"))
}

fn on_path(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let system = ["/usr/sbin", "/usr/bin", "/sbin", "/bin"].map(PathBuf::from);
    std::env::split_paths(&path)
        .chain(system)
        .map(|folder| folder.join(name))
        .find(|file| file.is_file())
}

/// A program of this crate: `target/…/release/NAME`, seen from there or from the folder of test programs below it.
pub(super) fn own(name: &str) -> anyhow::Result<PathBuf> {
    let own = std::env::current_exe().context("find this program's own file")?;
    let found = own.ancestors().skip(1).take(2).map(|folder| folder.join(name));
    match found.into_iter().find(|path| path.is_file()) {
        Some(path) => Ok(path),
        None => bail!(
            "no program {name} near {}; build it: cargo build --release -p adit-tests",
            own.display()
        ),
    }
}
