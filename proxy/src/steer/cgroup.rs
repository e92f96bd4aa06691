//! Cgroups by their kernel ids.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process;

use nix::sched::{CloneFlags, setns};

use super::{SteerError, is_cgroup2};

/// With the driver systemd, and with cgroupfs.
const PODS_CGROUPS: [&str; 2] = ["kubepods.slice", "kubepods"];

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
    let mount = cgroup_mount()?;
    let own = read("/proc/self/cgroup")?;
    let relative =
        own_path(&own).ok_or_else(|| SteerError::OwnCgroup("/proc/self/cgroup names no cgroup v2".to_owned()))?;
    let (pid, named) = (process::id(), mount.join(relative));
    if holds_process(&named, pid) {
        return cgroup_id(&named);
    }
    // In a container, the path begins at the container's own cgroup, while the file system is the whole host's.
    let found = find_below(&mount, &|folder| holds_process(folder, pid));
    let found = found.ok_or_else(|| {
        let mount = mount.display();
        SteerError::OwnCgroup(format!(
            "no cgroup below {mount} has the process {pid}: mount the host's, and use its PID namespace"
        ))
    })?;
    cgroup_id(&found)
}

/// The cgroup that kubelets put their pods into, by the name that it has with either of their drivers.
pub fn find_pods_cgroup() -> Result<PathBuf, SteerError> {
    pods_cgroup_below(&cgroup_mount()?)
}

fn pods_cgroup_below(mount: &Path) -> Result<PathBuf, SteerError> {
    let candidates = PODS_CGROUPS.map(|name| mount.join(name));
    let found = candidates.iter().find(|path| path.is_dir());
    found.cloned().ok_or_else(|| SteerError::NoPodsCgroup(mount.to_owned()))
}

fn holds_process(cgroup: &Path, pid: u32) -> bool {
    let pids = fs::read_to_string(cgroup.join("cgroup.procs")).unwrap_or_default();
    pids.lines().any(|line| line.parse() == Ok(pid))
}

/// The first directory, `folder` or one below it, that fits.
fn find_below(folder: &Path, fits: &dyn Fn(&Path) -> bool) -> Option<PathBuf> {
    if fits(folder) {
        return Some(folder.to_owned());
    }
    let entries = fs::read_dir(folder).ok()?.flatten();
    let mut folders = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    folders.find_map(|entry| find_below(&entry.path(), fits))
}

fn read(path: &str) -> Result<String, SteerError> {
    fs::read_to_string(path).map_err(|error| SteerError::OwnCgroup(format!("reading {path}: {error}")))
}

/// Where cgroup v2 is mounted.
pub fn cgroup_mount() -> Result<PathBuf, SteerError> {
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
    fn the_pods_cgroup_is_found_by_either_drivers_name() {
        for name in ["kubepods", "kubepods.slice"] {
            let mount = tempfile::tempdir().unwrap();
            let error = pods_cgroup_below(mount.path()).unwrap_err();
            assert!(error.to_string().contains("--pods-cgroup"), "{error}");
            fs::create_dir(mount.path().join(name)).unwrap();
            assert_eq!(pods_cgroup_below(mount.path()).unwrap(), mount.path().join(name));
        }
    }

    #[test]
    fn a_process_is_found_where_its_cgroup_lists_it() {
        let mount = tempfile::tempdir().unwrap();
        let (other, own) = (mount.path().join("a/b"), mount.path().join("kubepods/pod1/c"));
        for (folder, pids) in [(&other, "1\n123\n"), (&own, "7\n12\n")] {
            fs::create_dir_all(folder).unwrap();
            fs::write(folder.join("cgroup.procs"), pids).unwrap();
        }
        assert_eq!(find_below(mount.path(), &|folder| holds_process(folder, 12)), Some(own));
        assert_eq!(find_below(mount.path(), &|folder| holds_process(folder, 2)), None);
    }

    #[test]
    fn a_directory_elsewhere_is_refused() {
        let error = cgroup_id(Path::new("/tmp")).unwrap_err();
        assert!(error.to_string().contains("not a directory of cgroup v2"), "{error}");
    }
}
