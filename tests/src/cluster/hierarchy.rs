//! The cgroups of a machine: one folder below the caller's own in every hierarchy, which is the root of what the
//! machine sees. A host has one hierarchy (`/sys/fs/cgroup`), or one per controller and the unified one beside them.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};

const MOUNT: &str = "/sys/fs/cgroup";

/// Where the first process of a machine is, and what is started by hand.
pub(super) const INIT: &str = "init.scope";

/// A hierarchy that a process is in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Hierarchy {
    /// `cpu,cpuacct`, `name=systemd`, or empty for the unified hierarchy.
    pub(super) controllers: String,
    /// Where the process is in it.
    path: String,
}

impl Hierarchy {
    /// Those of the calling process.
    pub(super) fn own() -> anyhow::Result<Vec<Hierarchy>> {
        let text = fs::read_to_string("/proc/self/cgroup").context("read /proc/self/cgroup")?;
        Ok(text.lines().filter_map(Hierarchy::parse).collect())
    }

    /// Reads `4:memory:/some/where`.
    fn parse(line: &str) -> Option<Hierarchy> {
        let mut fields = line.splitn(3, ':').skip(1);
        Some(Hierarchy {
            controllers: fields.next()?.to_owned(),
            path: fields.next()?.to_owned(),
        })
    }

    /// Where it is mounted below a folder like `/sys/fs/cgroup`.
    pub(super) fn mount(&self, top: &Path) -> PathBuf {
        match self.controllers.as_str() {
            "" if is_only_unified() => top.to_path_buf(),
            "" => top.join("unified"),
            name => top.join(name.strip_prefix("name=").unwrap_or(name)),
        }
    }

    fn make(&self, name: &str) -> anyhow::Result<PathBuf> {
        let mount = self.mount(Path::new(MOUNT));
        // The unified hierarchy alone allows no controllers to what has processes of its own beside it; the root is
        // the one place without that rule.
        let parent = if is_only_unified() {
            mount
        } else {
            mount.join(self.path.trim_start_matches('/'))
        };
        let folder = parent.join(name);
        fs::create_dir_all(&folder).with_context(|| format!("make the cgroup {}", folder.display()))?;
        if self.controllers.split(',').any(|controller| controller == "cpuset") {
            for file in ["cpuset.cpus", "cpuset.mems"] {
                let inherited = fs::read(parent.join(file)).with_context(|| format!("read {file} of the parent"))?;
                fs::write(folder.join(file), inherited).with_context(|| format!("set {file}"))?;
            }
            fs::write(folder.join("cgroup.clone_children"), "1").context("pass cpus and mems to children")?;
        }
        Ok(folder)
    }
}

/// Whether all controllers are in the unified hierarchy.
pub(super) fn is_only_unified() -> bool {
    Path::new(MOUNT).join("cgroup.controllers").exists()
}

/// That cgroups can be seen at all, and are not hidden by something that was mounted above.
pub(super) fn ensure_visible() -> anyhow::Result<()> {
    if Hierarchy::own()?
        .iter()
        .any(|own| own.mount(Path::new(MOUNT)).join("cgroup.procs").exists())
    {
        return Ok(());
    }
    bail!("no cgroups are to be seen at {MOUNT}: is something mounted over it? See /proc/self/mountinfo")
}

/// Makes the cgroups `name` and gives their folders.
pub(super) fn make(name: &str) -> anyhow::Result<Vec<PathBuf>> {
    if is_only_unified() {
        // A kubelet wants controllers that a host may not pass on, such as cpuset.
        let offered =
            fs::read_to_string(Path::new(MOUNT).join("cgroup.controllers")).context("read the controllers")?;
        for controller in offered.split_whitespace() {
            // One that cannot be passed on is missed by whoever needs it, who then says so.
            let _ = fs::write(
                Path::new(MOUNT).join("cgroup.subtree_control"),
                format!("+{controller}"),
            );
        }
    }
    Hierarchy::own()?
        .iter()
        .filter(|hierarchy| hierarchy.mount(Path::new(MOUNT)).is_dir())
        .map(|hierarchy| hierarchy.make(name))
        .collect()
}

/// Moves the calling process to the cgroup `below` each of the folders, which is made.
pub(super) fn join(folders: &[PathBuf], below: &str) -> anyhow::Result<()> {
    for folder in folders {
        let inner = folder.join(below);
        fs::create_dir_all(&inner).with_context(|| format!("make the cgroup {}", inner.display()))?;
        // 0 is the writer.
        fs::write(inner.join("cgroup.procs"), "0").with_context(|| format!("enter the cgroup {}", inner.display()))?;
    }
    Ok(())
}

/// All cgroups, in whichever hierarchy, whose names `wanted` accepts. Not those inside of them.
pub(super) fn find(wanted: impl Fn(&str) -> bool) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut left = vec![PathBuf::from(MOUNT)];
    while let Some(folder) = left.pop() {
        for entry in fs::read_dir(&folder).into_iter().flatten().flatten() {
            if !entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                continue;
            }
            if entry.file_name().to_str().is_some_and(&wanted) {
                found.push(entry.path());
            } else {
                left.push(entry.path());
            }
        }
    }
    found
}

/// Kills every process in these trees and removes the trees.
pub(super) fn remove(trees: &[PathBuf]) -> anyhow::Result<()> {
    let deadline = Instant::now() + Duration::from_secs(10);
    loop {
        for tree in trees {
            let kill = tree.join("cgroup.kill");
            // Linux 5.14; only the unified hierarchy has it, and every process is in that one.
            if kill.exists() {
                let _ = fs::write(kill, "1");
            }
        }
        let failed = trees
            .iter()
            .find_map(|tree| remove_folders(tree).err().map(|error| (tree, error)));
        match failed {
            None => return Ok(()),
            Some((_, error)) if is_busy(&error) && Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(5));
            }
            Some((tree, error)) => bail!(
                "removing the cgroup {}: {error}; its processes: {:?}",
                tree.display(),
                processes(tree)
            ),
        }
    }
}

fn is_busy(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EBUSY | libc::ENOTEMPTY))
}

fn remove_folders(folder: &Path) -> io::Result<()> {
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        entries => entries?,
    };
    for entry in entries {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            remove_folders(&entry.path())?;
        }
    }
    match fs::remove_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

/// The processes in this cgroup and below it.
pub(super) fn processes(tree: &Path) -> Vec<u32> {
    let mut found = Vec::new();
    let mut left = vec![tree.to_path_buf()];
    while let Some(folder) = left.pop() {
        let listed = fs::read_to_string(folder.join("cgroup.procs")).unwrap_or_default();
        found.extend(listed.lines().filter_map(|line| line.parse::<u32>().ok()));
        let entries = fs::read_dir(&folder).into_iter().flatten().flatten();
        left.extend(
            entries
                .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
                .map(|entry| entry.path()),
        );
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hierarchies_are_read_from_the_kernels_list() {
        let hierarchy = Hierarchy::parse("4:cpu,cpuacct:/some/where").unwrap();
        assert_eq!(hierarchy.controllers, "cpu,cpuacct");
        assert_eq!(hierarchy.mount(Path::new("/x")), Path::new("/x/cpu,cpuacct"));
        let named = Hierarchy::parse("9:name=systemd:/").unwrap();
        assert_eq!(named.mount(Path::new("/x")), Path::new("/x/systemd"));
        assert_eq!(Hierarchy::parse("0::/a:b").unwrap().path, "/a:b");
    }
}
