//! The end of a cluster, however it came: by names alone, at any time, and as often as one likes.

use std::fs;
use std::io::ErrorKind;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::path::Path;
use std::time::Duration;

use anyhow::Context;

use super::hierarchy;
use super::layout::{Machine, Prefix, STATES};
use crate::bed::{netns, wait_for};

/// Held while a cluster comes up or goes down. The kernel takes it back from a process that dies.
pub(super) struct Lock {
    _socket: UnixListener,
}

impl Lock {
    pub(super) fn take(prefix: &Prefix) -> anyhow::Result<Lock> {
        let address = SocketAddr::from_abstract_name(format!("adit-cluster/{prefix}")).context("name the lock")?;
        let mut taken = None;
        wait_for(
            &format!("others to leave cluster {prefix} alone"),
            Duration::from_secs(60),
            || {
                match UnixListener::bind_addr(&address) {
                    Ok(socket) => taken = Some(socket),
                    Err(error) if error.kind() == ErrorKind::AddrInUse => {}
                    Err(error) => return Err(error).context("lock the cluster"),
                }
                Ok(taken.is_some())
            },
        )?;
        let _socket = taken.context("the lock that was just taken")?;
        Ok(Lock { _socket })
    }
}

/// Ends a cluster and removes all that is of it. Says whether there was anything.
pub(super) fn remove(prefix: &Prefix, _lock: &Lock) -> anyhow::Result<bool> {
    // Its processes are found by their cgroups.
    hierarchy::ensure_visible()?;
    let names: Vec<String> = Machine::all().map(|machine| prefix.name(machine)).collect();
    let trees = hierarchy::find(|name| names.iter().any(|own| own == name));
    hierarchy::remove(&trees)?;
    let namespaces: Vec<String> = netns::list().into_iter().filter(|name| names.contains(name)).collect();
    netns::delete(&namespaces);
    let state = remove_state(prefix)?;
    Ok(state || !trees.is_empty() || !namespaces.is_empty())
}

fn remove_state(prefix: &Prefix) -> anyhow::Result<bool> {
    let state = prefix.state();
    let removed = match fs::remove_dir_all(&state) {
        Err(error) if error.kind() == ErrorKind::NotFound => false,
        removed => removed
            .map(|()| true)
            .with_context(|| format!("remove {}", state.display()))?,
    };
    // The folder of all states goes with the last of them.
    let _ = fs::remove_dir(STATES);
    Ok(removed)
}

/// Ends the clusters of owners that are dead: those with prefixes that [`owned_prefix`] gave.
pub(super) fn sweep() -> anyhow::Result<()> {
    for name in names() {
        if owner(&name).is_some_and(|pid| !Path::new("/proc").join(pid.to_string()).exists()) {
            let prefix: Prefix = name.parse()?;
            remove(&prefix, &Lock::take(&prefix)?)?;
        }
    }
    Ok(())
}

/// A prefix for a cluster that belongs to the calling process: `kind`, a letter, says what it is for.
pub fn owned_prefix(kind: char) -> String {
    format!("{kind}{}", std::process::id())
}

/// The process id in a prefix that [`owned_prefix`] gave.
fn owner(prefix: &str) -> Option<u32> {
    let mut letters = prefix.chars();
    letters.next().filter(char::is_ascii_lowercase)?;
    letters.as_str().parse().ok()
}

/// The prefixes of clusters of which there is anything.
pub(super) fn names() -> Vec<String> {
    let states = fs::read_dir(STATES).into_iter().flatten().flatten();
    let mut found: Vec<String> = states
        .filter_map(|entry| entry.file_name().into_string().ok())
        .collect();
    found.extend(netns::list().iter().filter_map(|name| prefix_in(name)));
    let cgroups = hierarchy::find(|name| prefix_in(name).is_some());
    let names = cgroups.iter().filter_map(|path| path.file_name()?.to_str());
    found.extend(names.filter_map(prefix_in));
    found.sort();
    found.dedup();
    found.retain(|name| name.parse::<Prefix>().is_ok());
    found
}

/// The prefix in the name of a machine's namespace or cgroup.
fn prefix_in(name: &str) -> Option<String> {
    let (prefix, machine) = name.strip_prefix("adit-")?.split_once('-')?;
    machine.parse::<Machine>().ok()?;
    Some(prefix.to_owned())
}

/// What is on this machine of a cluster, however little.
pub fn residue(prefix: &str) -> Vec<String> {
    let is_own = |name: &str| prefix_in(name).is_some_and(|found| found == prefix);
    let mut found: Vec<String> = netns::list()
        .into_iter()
        .filter(|name| is_own(name))
        .map(|name| format!("netns {name}"))
        .collect();
    found.extend(
        hierarchy::find(is_own)
            .iter()
            .map(|path| format!("cgroup {}", path.display())),
    );
    let state = Path::new(STATES).join(prefix);
    if state.exists() {
        found.push(format!("state {}", state.display()));
    }
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    found.extend(
        mounts
            .lines()
            .filter(|line| line.contains(&*state.to_string_lossy()))
            .map(|line| format!("mount {line}")),
    );
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_owner_is_in_its_prefix() {
        assert_eq!(owner(&owned_prefix('t')), Some(std::process::id()));
        assert_eq!(owner("be"), None);
        assert_eq!(owner("t"), None);
    }

    #[test]
    fn machines_of_clusters_are_known_by_their_names() {
        assert_eq!(prefix_in("adit-be-n1").as_deref(), Some("be"));
        assert_eq!(prefix_in("adit-4711-1-pod-client"), None);
        assert_eq!(prefix_in("adit-4711-1"), None);
    }
}
