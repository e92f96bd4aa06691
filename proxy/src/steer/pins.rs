//! The names under which maps and links outlive the process: files of a bpffs.
//!
//! ```text
//! /sys/fs/bpf/adit/v3/maps/adit_pods     each map
//!                    /links/adit_connect4  each cgroup program's link
//!                    /pods/4f          each enrolled pod's socket lookup, by the cookie of its network namespace
//! ```
//!
//! As long as they are there, enrolled pods' connections are steered: to a proxy that listens, or to nobody.

use std::fs;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use nix::fcntl::{Flock, FlockArg};
use nix::mount::{MsFlags, mount};
use nix::sys::statfs::{BPF_FS_MAGIC, statfs};

use super::{SteerError, sys};

/// Time enough for a `connect` to get from its first hook to its last.
const BEING_MADE: Duration = Duration::from_millis(20);

/// Where a bpffs is usually mounted.
const USUAL_BPFFS: &str = "/sys/fs/bpf";

/// The folder of this version's layout.
pub(super) struct Pins {
    dir: PathBuf,
    root: PathBuf,
}

impl Pins {
    /// Opens the folder of this layout below `dir`, which is made where it is missing.
    pub(super) fn open(dir: &Path, layout: u32) -> Result<Self, SteerError> {
        let pins = Self {
            dir: dir.to_owned(),
            root: dir.join(format!("v{layout}")),
        };
        pins.ensure_folders()?;
        Ok(pins)
    }

    /// Makes the folders that are missing, and mounts the bpffs where that is for Adit to do.
    pub(super) fn ensure_folders(&self) -> Result<(), SteerError> {
        ensure_bpffs(&self.dir)?;
        for folder in ["maps", "links", "pods"] {
            let path = self.root.join(folder);
            fs::create_dir_all(&path).map_err(|error| failed("making the folder", &path, error))?;
        }
        Ok(())
    }

    /// Whether there is something in force, of this version or of another.
    pub(super) fn in_force(&self) -> Result<bool, SteerError> {
        for version in versions(&self.dir)? {
            if !names(&version.join("links"))?.is_empty() {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Where programs are in force and one of their maps is not pinned, makes what is there another version's: it keeps
    /// pods closed until they are enrolled in new maps. New programs in the same links would know of no pod until then.
    pub(super) fn set_aside_unless_whole<'a>(&self, maps: impl Iterator<Item = &'a str>) -> Result<(), SteerError> {
        let missing: Vec<&str> = maps
            .filter(|name| !self.root.join("maps").join(name).exists())
            .collect();
        if missing.is_empty() || names(&self.root.join("links"))?.is_empty() {
            return Ok(());
        }
        let aside = (0..=u32::MAX)
            .rev()
            .map(|version| self.dir.join(format!("v{version}")))
            .find(|path| !path.exists())
            .ok_or_else(|| failed("setting aside", &self.root, io::ErrorKind::AlreadyExists.into()))?;
        tracing::warn!(
            "{} of the maps of the programs in force are not pinned any more ({}, ...): all are made anew; the programs in \
             force keep pods closed until these are enrolled again",
            missing.len(),
            missing.first().unwrap_or(&"")
        );
        fs::rename(&self.root, &aside).map_err(|error| failed("setting aside", &self.root, error))?;
        self.ensure_folders()
    }

    /// Detaches and removes what is of other versions. Returns how many there were.
    pub(super) fn remove_other_versions(&self) -> Result<usize, SteerError> {
        let mut others = versions(&self.dir)?;
        others.retain(|version| *version != self.root);
        for version in &others {
            remove_version(version)?;
        }
        Ok(others.len())
    }

    /// The pinned map, checked against what is wanted; made and pinned where there is none.
    pub(super) fn map(
        &self,
        wanted: &sys::MapSpec<'_>,
        make: impl FnOnce() -> Result<OwnedFd, SteerError>,
    ) -> Result<OwnedFd, SteerError> {
        let path = self.root.join("maps").join(wanted.name);
        let Some(map) = sys::pinned(&path).map_err(|error| failed("opening", &path, error))? else {
            let map = make()?;
            sys::pin(map.as_fd(), &path).map_err(|error| failed("pinning a map as", &path, error))?;
            return Ok(map);
        };
        let found = sys::map_info(map.as_fd()).map_err(|error| failed("reading", &path, error))?;
        let expected = sys::MapInfo {
            kind: wanted.kind,
            key_size: wanted.key_size,
            value_size: wanted.value_size,
            max_entries: wanted.max_entries,
            flags: wanted.flags,
        };
        if found != expected {
            return Err(SteerError::PinnedMap {
                path,
                found: describe(found),
                expected: describe(expected),
            });
        }
        Ok(map)
    }

    /// The pinned link of a cgroup program.
    pub(super) fn link(&self, program: &str) -> Result<Option<OwnedFd>, SteerError> {
        open(&self.link_path(program))
    }

    /// Sees that the link of a cgroup program is pinned. Returns whether it was not.
    pub(super) fn ensure_link(&self, program: &str, link: &OwnedFd) -> Result<bool, SteerError> {
        ensure(&self.link_path(program), link)
    }

    /// Sees that a map is pinned. Returns whether it was not.
    pub(super) fn ensure_map(&self, name: &str, map: &OwnedFd) -> Result<bool, SteerError> {
        ensure(&self.root.join("maps").join(name), map)
    }

    fn link_path(&self, program: &str) -> PathBuf {
        self.root.join("links").join(program)
    }

    /// The pinned socket lookup of the pod with this cookie.
    pub(super) fn pod(&self, cookie: u64) -> Result<Option<OwnedFd>, SteerError> {
        open(&self.pod_path(cookie))
    }

    /// Sees that a pod's socket lookup is pinned. Returns whether it was not.
    pub(super) fn ensure_pod(&self, cookie: u64, link: &OwnedFd) -> Result<bool, SteerError> {
        ensure(&self.pod_path(cookie), link)
    }

    /// Takes a pod's socket lookup away; that it was not there is no error.
    pub(super) fn unpin_pod(&self, cookie: u64) -> Result<(), SteerError> {
        unpin(&self.pod_path(cookie))
    }

    fn pod_path(&self, cookie: u64) -> PathBuf {
        self.root.join("pods").join(format!("{cookie:x}"))
    }

    /// The cookies of all pods with a pinned socket lookup.
    pub(super) fn pods(&self) -> Result<Vec<u64>, SteerError> {
        let names = names(&self.root.join("pods"))?;
        Ok(names
            .iter()
            .filter_map(|name| u64::from_str_radix(name, 16).ok())
            .collect())
    }
}

/// Detaches and removes everything of all versions below `dir`, and `dir` itself. Pods are then as without Adit. Returns
/// whether there was anything.
pub fn uninstall(dir: &Path) -> Result<bool, SteerError> {
    if !dir.exists() {
        return Ok(false);
    }
    for version in versions(dir)? {
        remove_version(&version)?;
    }
    fs::remove_dir(dir).map_err(|error| failed("removing", dir, error))?;
    Ok(true)
}

/// The folders of all versions.
fn versions(dir: &Path) -> Result<Vec<PathBuf>, SteerError> {
    let is_version = |name: &String| {
        name.strip_prefix('v')
            .is_some_and(|number| number.parse::<u32>().is_ok())
    };
    let names = names(dir)?.into_iter().filter(is_version);
    Ok(names.map(|name| dir.join(name)).collect())
}

/// Connects are let go first, so that none is captured that finds no listener.
fn remove_version(root: &Path) -> Result<(), SteerError> {
    let (links, pods, maps) = (root.join("links"), root.join("pods"), root.join("maps"));
    let take_away = |path: PathBuf| {
        if let Some(link) = open(&path)? {
            detach(&link, &path)?;
            unpin(&path)?;
        }
        Ok(())
    };
    let mut rest = names(&links)?;
    rest.retain(|name| !name.contains("connect"));
    for name in names(&links)?.iter().filter(|name| !rest.contains(name)) {
        take_away(links.join(name))?;
    }
    // A connect that has just been captured is still to be published, and to find its listener.
    thread::sleep(BEING_MADE);
    for name in &rest {
        take_away(links.join(name))?;
    }
    for name in names(&pods)? {
        take_away(pods.join(name))?;
    }
    for name in names(&maps)? {
        unpin(&maps.join(name))?;
    }
    for folder in [&links, &pods, &maps, &root.to_owned()] {
        match fs::remove_dir(folder) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed("removing", folder, error)),
            _ => {}
        }
    }
    Ok(())
}

fn detach(link: &OwnedFd, path: &Path) -> Result<(), SteerError> {
    match sys::detach_link(link.as_fd()) {
        // Detached already, by the end of its cgroup or namespace.
        Err(error) if error.raw_os_error() != Some(libc::ENOLINK) => Err(failed("detaching", path, error)),
        _ => Ok(()),
    }
}

fn open(path: &Path) -> Result<Option<OwnedFd>, SteerError> {
    sys::pinned(path).map_err(|error| failed("opening", path, error))
}

/// Sees that the pin is of this object. Returns whether it was not.
fn ensure(path: &Path, object: &OwnedFd) -> Result<bool, SteerError> {
    let id = |object: &OwnedFd| sys::object_id(object.as_fd());
    if let Ok(Some(pinned)) = sys::pinned(path)
        && id(&pinned).is_ok_and(|pinned| id(object).is_ok_and(|wanted| pinned == wanted))
    {
        return Ok(false);
    }
    unpin(path)?;
    sys::pin(object.as_fd(), path).map_err(|error| failed("pinning", path, error))?;
    Ok(true)
}

fn unpin(path: &Path) -> Result<(), SteerError> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(failed("removing", path, error)),
        _ => Ok(()),
    }
}

/// The names in a folder; none where there is no folder.
fn names(folder: &Path) -> Result<Vec<String>, SteerError> {
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(failed("reading", folder, error)),
    };
    Ok(entries
        .flatten()
        .filter_map(|entry| entry.file_name().into_string().ok())
        .collect())
}

fn failed(doing: &'static str, path: &Path, error: io::Error) -> SteerError {
    SteerError::Pin {
        doing,
        path: path.to_owned(),
        error,
    }
}

fn describe(map: sys::MapInfo) -> String {
    let sys::MapInfo {
        kind,
        key_size,
        value_size,
        max_entries,
        flags,
    } = map;
    format!("type {kind}, keys of {key_size} and values of {value_size} bytes, {max_entries} entries, flags {flags}")
}

/// Whether `dir`, or what there is of it, lies on a bpffs.
fn is_on_bpffs(dir: &Path) -> bool {
    let existing = dir.ancestors().find(|folder| folder.exists());
    existing.is_some_and(|folder| statfs(folder).is_ok_and(|stat| stat.filesystem_type() == BPF_FS_MAGIC))
}

/// How it stands with the folder for pins.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PinsStanding {
    /// It is on a bpffs. Whether programs are in force, of whichever version.
    Bpffs {
        /// Whether a cgroup program's link is pinned below it.
        in_force: bool,
    },
    /// It is on none, but where a proxy that starts mounts one by itself.
    ToBeMounted,
    /// It is on none, and no proxy changes that.
    Elsewhere,
}

/// How it stands with `dir` as the folder for pins. Changes nothing.
///
/// # Errors
///
/// What is below it cannot be read.
pub fn pins_standing(dir: &Path) -> Result<PinsStanding, SteerError> {
    if is_on_bpffs(dir) {
        let mut in_force = false;
        for version in versions(dir)? {
            in_force |= !names(&version.join("links"))?.is_empty();
        }
        return Ok(PinsStanding::Bpffs { in_force });
    }
    Ok(if dir.starts_with(USUAL_BPFFS) && !is_contained() {
        PinsStanding::ToBeMounted
    } else {
        PinsStanding::Elsewhere
    })
}

/// Whether a mount that this process makes would be a container's, and go with it: pins, and with them what keeps pods closed,
/// would go too. It shows where the container sees the node's processes, as the chart's does.
fn is_contained() -> bool {
    let mounts = |process: &str| fs::read_link(format!("/proc/{process}/ns/mnt")).ok();
    mounts("1").is_some_and(|first| mounts("self") != Some(first))
}

/// Sees that `dir` is, or can be made, on a bpffs. Mounts one only where it usually is.
fn ensure_bpffs(dir: &Path) -> Result<(), SteerError> {
    let not_bpffs = || SteerError::NotBpffs(dir.to_owned());
    let on_bpffs = || is_on_bpffs(dir);
    if on_bpffs() {
        return Ok(());
    }
    if !dir.starts_with(USUAL_BPFFS) || is_contained() {
        return Err(not_bpffs());
    }
    // One at a time: a second mount would hide what another process has just pinned.
    let folder = fs::File::open(USUAL_BPFFS).map_err(|_| not_bpffs())?;
    let _lock = Flock::lock(folder, FlockArg::LockExclusive).map_err(|_| not_bpffs())?;
    if !on_bpffs() {
        let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC | MsFlags::MS_RELATIME;
        mount(Some("bpf"), USUAL_BPFFS, Some("bpf"), flags, Some("mode=700")).map_err(|_| not_bpffs())?;
        tracing::info!("mounted a bpffs at {USUAL_BPFFS}");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use adit_common::LAYOUT;

    use super::*;

    #[test]
    fn a_folder_elsewhere_than_on_a_bpffs_is_refused() {
        let error = Pins::open(Path::new("/tmp/adit-no-bpffs"), LAYOUT)
            .err()
            .map(|error| error.to_string());
        assert!(
            error.as_ref().is_some_and(|error| error.contains("mount -t bpf")),
            "{error:?}"
        );
        assert!(!Path::new("/tmp/adit-no-bpffs").exists());
    }
}
