//! The bed's cgroups: one tree per bed below the root of the unified hierarchy.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};

/// Where the unified hierarchy is mounted: `/sys/fs/cgroup`, or `/sys/fs/cgroup/unified` on a hybrid host.
pub fn mount_point() -> anyhow::Result<PathBuf> {
    let text = fs::read_to_string("/proc/self/mountinfo").context("read /proc/self/mountinfo")?;
    for line in text.lines() {
        // "31 23 0:28 / /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw"
        let Some((mount, filesystem)) = line.split_once(" - ") else {
            continue;
        };
        if filesystem.starts_with("cgroup2 ")
            && let Some(point) = mount.split(' ').nth(4)
        {
            return Ok(PathBuf::from(point));
        }
    }
    bail!("no cgroup2 file system is mounted; mount one: mount -t cgroup2 none /sys/fs/cgroup/unified")
}

/// A cgroup and all below it, removed when dropped; processes left in it are killed.
#[derive(Debug)]
pub(super) struct Tree {
    path: PathBuf,
}

impl Tree {
    /// Makes the cgroup `name` below the root of the hierarchy.
    pub(super) fn create(name: &str) -> anyhow::Result<Self> {
        let path = mount_point()?.join(name);
        fs::create_dir(&path).with_context(|| format!("make cgroup {}", path.display()))?;
        Ok(Self { path })
    }

    /// Makes the cgroup at `below`, a path relative to the tree's root.
    pub(super) fn add(&self, below: impl AsRef<Path>) -> anyhow::Result<PathBuf> {
        let path = self.path.join(below);
        fs::create_dir_all(&path).with_context(|| format!("make cgroup {}", path.display()))?;
        Ok(path)
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        if let Err(error) = remove_tree(&self.path) {
            eprintln!("cannot remove cgroup {}: {error}", self.path.display());
        }
    }
}

/// Kills every process in the cgroup `root` and below, and removes the whole tree.
pub(super) fn remove_tree(root: &Path) -> io::Result<()> {
    if !root.exists() {
        return Ok(());
    }
    // Linux 5.14. Killing is asynchronous: the folders are busy until the processes are gone.
    fs::write(root.join("cgroup.kill"), "1")?;
    let deadline = Instant::now() + Duration::from_secs(5);
    loop {
        match remove_folders(root) {
            Ok(()) => return Ok(()),
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) && Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(2));
            }
            Err(error) => return Err(error),
        }
    }
}

fn remove_folders(folder: &Path) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            remove_folders(&entry.path())?;
        }
    }
    fs::remove_dir(folder)
}
