//! Pods by their cgroups: whose a cgroup is, and which network namespace is the pod's own.
//!
//! The kubelet names a pod's cgroup by the pod's uid, and no pod can leave its cgroup: what is found there is the pod's,
//! whatever it calls itself.

use std::cell::OnceCell;
use std::collections::HashMap;
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

/// Below the pods' cgroup there are those of the classes of service, and then the pods'.
const DEPTH: usize = 4;
/// The field of `/proc/<pid>/stat` that tells when the process began, counted from the one after the command's name.
const START_TIME: usize = 19;

/// A pod's network namespace, as one of its processes shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct FoundNetns {
    /// That of the process: `/proc/<pid>/ns/net`.
    pub(super) path: PathBuf,
    /// By which it is told from others that there are at the same time.
    pub(super) inode: u64,
}

/// The cgroups of pods that there are, looked for once, when somebody asks.
pub(super) struct PodCgroups<'a> {
    root: &'a Path,
    /// The inode of the node's own network namespace.
    host: u64,
    by_uid: OnceCell<HashMap<String, PathBuf>>,
}

impl<'a> PodCgroups<'a> {
    /// Those below `root`; `host` is the inode of the node's own network namespace.
    pub(super) fn new(root: &'a Path, host: u64) -> Self {
        Self {
            root,
            host,
            by_uid: OnceCell::new(),
        }
    }

    /// The network namespace of the pod of this uid, where it has a process already.
    pub(super) fn netns(&self, uid: &str) -> Option<FoundNetns> {
        let by_uid = self.by_uid.get_or_init(|| {
            let mut found = HashMap::new();
            collect(self.root, 0, &mut found);
            found
        });
        netns_of(by_uid.get(uid)?, self.host)
    }
}

fn collect(folder: &Path, depth: usize, found: &mut HashMap<String, PathBuf>) {
    for (name, path) in folders(folder) {
        match pod_uid(&name) {
            Some(uid) => drop(found.insert(uid, path)),
            None if depth < DEPTH => collect(&path, depth + 1, found),
            None => {}
        }
    }
}

fn folders(folder: &Path) -> impl Iterator<Item = (String, PathBuf)> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries
        .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
        .map(|entry| (entry.file_name().to_string_lossy().into_owned(), entry.path()))
}

/// The network namespace of the pod whose cgroup this is: that of its oldest process, which is the sandbox's as long as
/// that lives. Processes in the node's own are still on their way. None where there is no other.
pub(super) fn netns_of(cgroup: &Path, host: u64) -> Option<FoundNetns> {
    let mut oldest: Option<(u64, u32, FoundNetns)> = None;
    let mut pids = Vec::new();
    processes(cgroup, &mut pids);
    for pid in pids {
        let path = PathBuf::from(format!("/proc/{pid}/ns/net"));
        // The process may be gone.
        let (Some(inode), Some(started)) = (inode(&path), started(pid)) else {
            continue;
        };
        let is_older = |(than, number, _): &(u64, u32, _)| (started, pid) < (*than, *number);
        if inode != host && oldest.as_ref().is_none_or(is_older) {
            oldest = Some((started, pid, FoundNetns { path, inode }));
        }
    }
    oldest.map(|(_, _, netns)| netns)
}

/// Adds the processes of the cgroup and of those below it.
pub(super) fn processes(cgroup: &Path, pids: &mut Vec<u32>) {
    let own = fs::read_to_string(cgroup.join("cgroup.procs")).unwrap_or_default();
    pids.extend(
        own.lines()
            .filter_map(|pid| pid.parse::<u32>().ok())
            .filter(|pid| *pid != 0),
    );
    for (_, path) in folders(cgroup) {
        processes(&path, pids);
    }
}

/// When a process began, in ticks since the machine did.
fn started(pid: u32) -> Option<u64> {
    start_time(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

fn start_time(stat: &str) -> Option<u64> {
    // The name, in parentheses, may have any bytes in it.
    let (_, after_name) = stat.rsplit_once(") ")?;
    after_name.split_ascii_whitespace().nth(START_TIME)?.parse().ok()
}

/// The inode by which a network namespace is told from others that there are at the same time.
pub(super) fn inode(path: &Path) -> Option<u64> {
    fs::metadata(path).ok().map(|metadata| metadata.ino())
}

/// The cgroup of the pod that `cgroup` belongs to: the outermost whose name has a pod's uid in it as the kubelet writes
/// it, else the outermost below `root`.
pub(super) fn pod_of(root: &Path, cgroup: &Path) -> PathBuf {
    let Ok(below) = cgroup.strip_prefix(root) else {
        return cgroup.to_owned();
    };
    let names: Vec<_> = below.components().collect();
    let of_pod = names
        .iter()
        .position(|name| pod_uid(&name.as_os_str().to_string_lossy()).is_some());
    let depth = of_pod.map_or(1, |at| at + 1);
    names
        .into_iter()
        .take(depth)
        .fold(root.to_owned(), |path, name| path.join(name))
}

/// The uid of the pod whose cgroup this is, by its name.
pub(super) fn uid_of(cgroup: &Path) -> Option<String> {
    pod_uid(&cgroup.file_name()?.to_string_lossy())
}

/// The uid in a cgroup's name, which ends, but for `.slice`, in `pod` and the uid: 8-4-4-4-12 hexadecimal digits, joined
/// by dashes or, by systemd's driver, underscores; or, of a static pod, 32 digits. Joined by dashes it is returned.
fn pod_uid(name: &str) -> Option<String> {
    let name = name.strip_suffix(".slice").unwrap_or(name);
    let (_, uid) = name.rsplit_once("pod")?;
    let is_joint = |byte| byte == b'-' || byte == b'_';
    let digits = uid.bytes().filter(u8::is_ascii_hexdigit).count();
    let is_uid = digits == 32 && uid.bytes().all(|byte| byte.is_ascii_hexdigit() || is_joint(byte));
    is_uid.then(|| uid.replace('_', "-"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const UID: &str = "0123abcd-1111-2222-3333-0123456789ab";
    const OF_STATIC: &str = "0123456789abcdef0123456789abcdef";

    #[test]
    fn a_pods_uid_is_in_its_cgroups_name_however_the_driver_writes_it() {
        let joined = UID.replace('-', "_");
        for (name, uid) in [
            (format!("pod{UID}"), Some(UID)),
            (format!("kubepods-pod{joined}.slice"), Some(UID)),
            (format!("kubepods-burstable-pod{joined}.slice"), Some(UID)),
            (format!("kubepods-besteffort-pod{joined}.slice"), Some(UID)),
            (format!("kubelet-kubepods-besteffort-pod{joined}.slice"), Some(UID)),
            (format!("pod{OF_STATIC}"), Some(OF_STATIC)),
            (format!("kubepods-burstable-pod{OF_STATIC}.slice"), Some(OF_STATIC)),
            ("kubepods".to_owned(), None),
            ("kubepods-burstable.slice".to_owned(), None),
            ("burstable".to_owned(), None),
            ("podium".to_owned(), None),
            (format!("pod{}", &UID[..30]), None),
            (format!("pod{UID}0"), None),
            (format!("cri-containerd-{OF_STATIC}{OF_STATIC}.scope"), None),
            (format!("{OF_STATIC}{OF_STATIC}"), None),
        ] {
            assert_eq!(pod_uid(&name).as_deref(), uid, "{name}");
        }
    }

    #[test]
    fn the_cgroup_of_a_pod_is_found_by_its_uid_or_else_is_the_outermost() {
        let systemd = format!("burstable.slice/kubepods-burstable-pod{}.slice", UID.replace('-', "_"));
        let plain = format!("besteffort/pod{UID}");
        let of_static = format!("pod{OF_STATIC}");
        for (cgroup, pod) in [
            (format!("{systemd}/cri-containerd-12.scope"), &systemd),
            (format!("{plain}/12/nested"), &plain),
            (format!("{plain}/12/pod{OF_STATIC}"), &plain),
            (format!("{of_static}/12"), &of_static),
            ("web/sandbox".to_owned(), &"web".to_owned()),
            ("podium/a".to_owned(), &"podium".to_owned()),
            ("web".to_owned(), &"web".to_owned()),
        ] {
            let root = Path::new("/sys/fs/cgroup/kubepods");
            assert_eq!(pod_of(root, &root.join(&cgroup)), root.join(pod), "{cgroup}");
        }
    }

    #[test]
    fn pods_are_found_below_their_classes_and_not_within_each_other() {
        let root = tempfile::tempdir().unwrap();
        let other = "99999999-1111-2222-3333-0123456789ab";
        for cgroup in [
            format!("burstable/pod{UID}/0a/pod{OF_STATIC}"),
            format!(
                "kubepods-besteffort.slice/kubepods-besteffort-pod{}.slice",
                other.replace('-', "_")
            ),
        ] {
            fs::create_dir_all(root.path().join(cgroup)).unwrap();
        }
        let mut found = HashMap::new();
        collect(root.path(), 0, &mut found);
        let mut uids: Vec<_> = found.keys().map(String::as_str).collect();
        uids.sort_unstable();
        assert_eq!(uids, [UID, other]);
        assert_eq!(found[UID], root.path().join(format!("burstable/pod{UID}")));
    }

    #[test]
    fn a_process_began_when_its_stat_says_whatever_its_name() {
        let fields = "S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 4711 20";
        for name in ["pause", "a) b (c", ") 1 2"] {
            assert_eq!(start_time(&format!("42 ({name}) {fields}")), Some(4711), "{name}");
        }
        assert_eq!(start_time("42 (pause) S 1"), None);
        assert!(started(std::process::id()).is_some());
    }
}
