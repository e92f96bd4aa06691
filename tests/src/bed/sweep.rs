//! Removal of what a killed test run left behind.

use std::fs;
use std::path::Path;

use super::{cgroup, netns, pins};

/// The prefix of all names that a bed gives: followed by the owner's process id.
pub(super) const PREFIX: &str = "adit-";

/// Removes the cgroups, processes, pins, namespaces and files of beds whose owner is dead. Those of live owners are left
/// alone.
pub fn sweep() {
    if let Ok(mount) = cgroup::mount_point() {
        for name in folder_names(&mount).into_iter().filter(|name| is_orphan(name)) {
            if let Err(error) = cgroup::remove_tree(&mount.join(&name)) {
                eprintln!("cannot remove the leftover cgroup {name}: {error}");
            }
        }
    }
    pins::remove(is_orphan);
    let orphans: Vec<String> = netns::list().into_iter().filter(|name| is_orphan(name)).collect();
    netns::delete(&orphans);
    let files = std::env::temp_dir();
    for name in folder_names(&files).into_iter().filter(|name| is_orphan(name)) {
        if let Err(error) = fs::remove_dir_all(files.join(&name)) {
            eprintln!("cannot remove the leftover folder {name}: {error}");
        }
    }
}

/// What beds of the process `owner` have on this machine: the names of namespaces, cgroups, pins and processes.
pub fn residue_of(owner: u32) -> Vec<String> {
    residue(&format!("{PREFIX}{owner}-"))
}

/// What is on this machine of the bed or beds whose names begin with `prefix`.
pub fn residue(prefix: &str) -> Vec<String> {
    let mut found: Vec<String> = netns::list()
        .into_iter()
        .filter(|name| name.starts_with(prefix))
        .map(|name| format!("netns {name}"))
        .collect();
    if let Ok(mount) = cgroup::mount_point() {
        let names = folder_names(&mount).into_iter().filter(|name| name.starts_with(prefix));
        found.extend(names.map(|name| format!("cgroup {name}")));
    }
    let pins = pins::list().into_iter().filter(|name| name.starts_with(prefix));
    found.extend(pins.map(|name| format!("pins {name}")));
    for process in folder_names(Path::new("/proc")) {
        // A process of a bed is in the bed's cgroup until it has been waited for.
        let Ok(cgroups) = fs::read_to_string(format!("/proc/{process}/cgroup")) else {
            continue;
        };
        if cgroups
            .lines()
            .any(|line| line.starts_with("0::/") && line[4..].starts_with(prefix))
        {
            found.push(format!("process {process}"));
        }
    }
    found
}

fn is_orphan(name: &str) -> bool {
    owner(name).is_some_and(|pid| !Path::new("/proc").join(pid.to_string()).exists())
}

/// The process id in `adit-<pid>-<n>…`.
fn owner(name: &str) -> Option<u32> {
    name.strip_prefix(PREFIX)?.split('-').next()?.parse().ok()
}

pub(super) fn folder_names(folder: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(folder) else {
        return Vec::new();
    };
    entries
        .flatten()
        .filter_map(|entry| entry.file_name().into_string().ok())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_with_a_process_id_have_an_owner() {
        assert_eq!(owner("adit-4711-0"), Some(4711));
        assert_eq!(owner("adit-4711-0-web"), Some(4711));
        assert_eq!(owner("adit-selftest"), None);
        assert_eq!(owner("other-4711-0"), None);
    }

    #[test]
    fn a_live_owner_keeps_its_beds() {
        assert!(!is_orphan(&format!("adit-{}-0", std::process::id())));
    }
}
