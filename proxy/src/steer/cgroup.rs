//! Cgroups by their kernel ids.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use nix::sched::{CloneFlags, setns};

use super::{SteerError, is_cgroup2};

/// The kernel's id of a cgroup v2 directory, which is its inode number.
pub fn cgroup_id(path: &Path) -> Result<u64, SteerError> {
    let at = |error| SteerError::Cgroup {
        path: path.to_owned(),
        error,
    };
    if !is_cgroup2(path).map_err(at)? {
        return Err(at(io::Error::new(
            io::ErrorKind::InvalidInput,
            "not a directory of cgroup v2",
        )));
    }
    Ok(fs::metadata(path).map_err(at)?.ino())
}

/// Sees cgroups as the node's first process does, from now on and in all threads to come, and not as the container that
/// this process may be in: there its own cgroup is the root of all, whatever is mounted. Does nothing where the node's
/// processes are not to be seen (hostPID).
///
/// # Errors
///
/// It is not permitted: CAP_SYS_ADMIN is missing, or CAP_SYS_PTRACE.
pub fn enter_host_cgroup_namespace() -> io::Result<()> {
    let host = fs::File::open("/proc/1/ns/cgroup")?;
    setns(host, CloneFlags::CLONE_NEWCGROUP).map_err(io::Error::from)
}

/// The id of the cgroup that this process is in.
pub fn own_cgroup_id() -> Result<u64, SteerError> {
    let mount = mount_point()?;
    let own = read("/proc/self/cgroup")?;
    let relative =
        own_path(&own).ok_or_else(|| SteerError::OwnCgroup("/proc/self/cgroup names no cgroup v2".to_owned()))?;
    cgroup_id(&mount.join(relative))
}

fn read(path: &str) -> Result<String, SteerError> {
    fs::read_to_string(path).map_err(|error| SteerError::OwnCgroup(format!("reading {path}: {error}")))
}

/// Where cgroup v2 is mounted.
pub(super) fn mount_point() -> Result<PathBuf, SteerError> {
    mount_point_of(&read("/proc/self/mountinfo")?)
        .ok_or_else(|| SteerError::OwnCgroup("no cgroup v2 file system is mounted".to_owned()))
}

/// Where cgroup v2 is mounted: `/sys/fs/cgroup`, or `/sys/fs/cgroup/unified` beside version 1. Of several mounts the last
/// that shows all of it: a container's own shows but what is the container's.
fn mount_point_of(mountinfo: &str) -> Option<PathBuf> {
    let mounts = mountinfo.lines().filter_map(|line| {
        let (before, after) = line.split_once(" - ")?;
        let mut fields = before.split(' ').skip(3);
        let (root, point) = (fields.next()?, fields.next()?);
        after
            .starts_with("cgroup2 ")
            .then(|| (root == "/", PathBuf::from(point)))
    });
    mounts.max_by_key(|(whole, _)| *whole).map(|(_, point)| point)
}

/// The path of the process's cgroup v2 below the mount point, without a leading slash.
pub(super) fn own_path(cgroup: &str) -> Option<&str> {
    cgroup.lines().find_map(|line| line.strip_prefix("0::/"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mount_point_is_found_beside_version_1() {
        let mountinfo = "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n\
                         32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu\n\
                         41 31 0:38 / /sys/fs/cgroup/unified rw,relatime shared:9 - cgroup2 cgroup2 rw\n";
        assert_eq!(mount_point_of(mountinfo), Some(PathBuf::from("/sys/fs/cgroup/unified")));
        let in_a_container = "50 40 0:26 /../../.. /host/cgroup rw - cgroup2 cgroup2 rw\n\
                              51 40 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n\
                              52 40 0:26 /kubepods/pod1/abc /own rw - cgroup2 cgroup2 rw\n";
        assert_eq!(mount_point_of(in_a_container), Some(PathBuf::from("/sys/fs/cgroup")));
        assert_eq!(mount_point_of("31 23 0:28 / / rw - ext4 /dev/vda rw\n"), None);
    }

    #[test]
    fn the_own_path_is_that_of_version_2() {
        assert_eq!(
            own_path("9:pids:/x\n0::/kubepods/pod1/abc\n"),
            Some("kubepods/pod1/abc")
        );
        assert_eq!(own_path("0::/\n"), Some(""));
        assert_eq!(own_path("9:pids:/x\n"), None);
    }

    #[test]
    fn a_directory_elsewhere_is_refused() {
        let error = cgroup_id(Path::new("/tmp")).unwrap_err();
        assert!(error.to_string().contains("not a directory of cgroup v2"), "{error}");
    }
}
