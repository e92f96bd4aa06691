//! Which network namespaces below the pods' cgroup are in the mesh, and which are not.
//!
//! A pod that the mesh lists is enrolled; the namespace of any other is told to the kernel as one that is not ours. Until
//! one of the two is done, the kernel does with its connects what `--startup` says.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use thiserror::Error;
use tokio::sync::Notify;

use super::enrol::wanted;
use super::{Netns, NetnsError};
use crate::mesh::MeshHandle;
use crate::steer::{Namespaces, SteerError};

/// How often a pod that waits for its enrolment has that tried at once; then it is every so often.
const EAGER: u32 = 3;
const PATIENT: Duration = Duration::from_millis(200);

/// How many namespaces are named in the log between two sweeps: a pod can make any number.
pub(super) const LOGGED: usize = 100;

/// Why namespaces cannot be classified.
#[derive(Debug, Error)]
pub enum ClassifyError {
    /// The maps cannot be read or changed.
    #[error(transparent)]
    Steer(#[from] SteerError),
    /// This process's own namespace cannot be used.
    #[error(transparent)]
    Netns(#[from] NetnsError),
    /// The processes of pods have no numbers here.
    #[error("{path} has processes that this process cannot see: run it in the host's PID namespace (hostPID)")]
    HiddenProcesses {
        /// The cgroup's list of processes.
        path: PathBuf,
    },
    /// The cgroups of pods cannot be watched.
    #[error("watching the cgroups of pods below {path}: {error}")]
    Watch {
        /// The cgroup of all pods.
        path: PathBuf,
        /// What the kernel says.
        error: io::Error,
    },
}

/// A network namespace that processes below the pods' cgroup are in.
struct Found {
    /// That of a process: `/proc/<pid>/ns/net`.
    path: PathBuf,
    /// The pods whose processes these are, as their cgroups tell.
    pods: HashSet<PathBuf>,
}

/// Looks at the processes of pods, and tells the kernel which namespaces are not in the mesh.
pub(super) struct Classifier {
    pub(super) root: PathBuf,
    namespaces: Namespaces,
    node: String,
    mesh: MeshHandle,
    /// Wakes who enrols.
    born: Arc<Notify>,
    /// This process's own namespace, by its inode.
    own: u64,
    /// The cgroups of pods that are in the mesh, and their namespaces. What else is found there is a namespace within
    /// the pod, and remains unclassified: it would be a way around.
    in_mesh: HashMap<PathBuf, u64>,
    /// Namespaces within such pods that were logged.
    nested: HashSet<u64>,
    /// When, and how often, somebody was woken for a namespace.
    woken: HashMap<u64, (Instant, u32)>,
    /// Whether the kernel has not taken a namespace since the last sweep: there may be too many, most of them gone.
    full: bool,
}

impl Classifier {
    pub(super) fn new(
        root: &Path,
        namespaces: Namespaces,
        node: &str,
        mesh: MeshHandle,
        born: Arc<Notify>,
    ) -> Result<Self, ClassifyError> {
        let own = Netns::current()?;
        // That of pods of the host's network too.
        namespaces.add_other(own.cookie())?;
        Ok(Self {
            root: root.to_owned(),
            namespaces,
            node: node.to_owned(),
            mesh,
            born,
            own: own.inode(),
            in_mesh: HashMap::new(),
            nested: HashSet::new(),
            woken: HashMap::new(),
            full: false,
        })
    }

    /// Classifies the namespaces of the processes in these cgroups. Gives the cookies of all that were found, but for
    /// this process's own.
    pub(super) fn look<'a>(
        &mut self,
        cgroups: impl IntoIterator<Item = &'a PathBuf>,
    ) -> Result<HashSet<u64>, ClassifyError> {
        let mut found = HashMap::new();
        for cgroup in cgroups {
            self.find(cgroup, &mut found)?;
        }
        let mut seen = HashSet::with_capacity(found.len());
        if found.is_empty() {
            return Ok(seen);
        }
        let mesh = self.mesh.load();
        let awaited: HashSet<u64> = wanted(&self.node, &mesh)
            .filter_map(|workload| inode(workload.netns.as_deref()?))
            .collect();
        let mut strangers = Vec::new();
        for (inode, found) in found {
            let Some(cookie) = cookie(&found.path, inode) else {
                continue;
            };
            seen.insert(cookie);
            let enrolled = self.namespaces.is_enrolled(cookie)?;
            if enrolled || awaited.contains(&inode) {
                self.in_mesh.extend(found.pods.into_iter().map(|pod| (pod, cookie)));
                if !enrolled {
                    self.wake(cookie);
                }
                continue;
            }
            // It may have left the mesh.
            self.in_mesh.retain(|_, known| *known != cookie);
            if !self.namespaces.is_other(cookie)? {
                strangers.push((cookie, found));
            }
        }
        for (cookie, found) in strangers {
            if self.is_within_the_mesh(&found, &seen)? {
                if self.nested.len() < LOGGED && self.nested.insert(cookie) {
                    tracing::info!(
                        "{} is a network namespace within a pod of the mesh; it stays unclassified",
                        found.path.display()
                    );
                }
                continue;
            }
            if let Err(error) = self.namespaces.add_other(cookie) {
                if !std::mem::replace(&mut self.full, true) {
                    tracing::warn!("{error}; its connects are refused until there is room");
                }
                continue;
            }
            // It may have been enrolled in the meantime.
            if self.namespaces.is_enrolled(cookie)? {
                self.namespaces.remove_other(cookie)?;
            }
            tracing::debug!("{} is not in the mesh", found.path.display());
        }
        Ok(seen)
    }

    /// Whether it is time to forget what is gone.
    pub(super) fn is_full(&self) -> bool {
        self.full
    }

    /// Forgets what is gone. `now` are the namespaces that there are, `before` those that the last sweep has seen: what
    /// neither has is no namespace that is between two processes.
    pub(super) fn forget(&mut self, now: &HashSet<u64>, before: &HashSet<u64>) -> Result<(), ClassifyError> {
        let none = HashSet::new();
        let before = if std::mem::take(&mut self.full) { &none } else { before };
        let own = Netns::current()?.cookie();
        for cookie in self.namespaces.others()? {
            if cookie != own && !now.contains(&cookie) && !before.contains(&cookie) {
                self.namespaces.remove_other(cookie)?;
            }
        }
        let is_enrolled = |cookie: &u64| self.namespaces.is_enrolled(*cookie).unwrap_or(true);
        self.in_mesh
            .retain(|_, cookie| now.contains(cookie) || is_enrolled(cookie));
        self.nested.retain(|cookie| now.contains(cookie));
        self.woken.retain(|cookie, _| now.contains(cookie));
        Ok(())
    }

    /// Adds the namespaces of a cgroup's own processes to `found`, by their inodes.
    fn find(&self, cgroup: &Path, found: &mut HashMap<u64, Found>) -> Result<(), ClassifyError> {
        let path = cgroup.join("cgroup.procs");
        // A cgroup that is gone, or whose processes another lists.
        let Ok(processes) = fs::read_to_string(&path) else {
            return Ok(());
        };
        for pid in processes.lines() {
            if pid == "0" {
                return Err(ClassifyError::HiddenProcesses { path });
            }
            let path = PathBuf::from(format!("/proc/{pid}/ns/net"));
            // The process may be gone.
            let Some(inode) = inode(&path).filter(|inode| *inode != self.own) else {
                continue;
            };
            let entry = found.entry(inode).or_insert_with(|| Found {
                path,
                pods: HashSet::new(),
            });
            entry.pods.insert(pod_of(&self.root, cgroup));
        }
        Ok(())
    }

    fn is_within_the_mesh(&self, found: &Found, seen: &HashSet<u64>) -> Result<bool, ClassifyError> {
        for pod in &found.pods {
            if let Some(cookie) = self.in_mesh.get(pod)
                && (seen.contains(cookie) || self.namespaces.is_enrolled(*cookie)?)
            {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn wake(&mut self, cookie: u64) {
        let now = Instant::now();
        let (last, times) = self.woken.entry(cookie).or_insert((now, 0));
        if *times < EAGER || now.duration_since(*last) >= PATIENT {
            (*last, *times) = (now, *times + 1);
            self.born.notify_one();
        }
    }
}

/// The inode by which a network namespace is told from others that there are at the same time.
fn inode(path: &Path) -> Option<u64> {
    fs::metadata(path).ok().map(|metadata| metadata.ino())
}

/// The cookie of the namespace at `path`, if it still is that of this inode: a process may be gone, and its number
/// another's.
fn cookie(path: &Path, inode: u64) -> Option<u64> {
    let netns = Netns::open(path).ok()?;
    (netns.inode() == inode).then(|| netns.cookie())
}

/// The cgroup of the pod that `cgroup` belongs to: the outermost whose name has a pod's uid in it as the kubelet writes
/// it, else the outermost below `root`.
fn pod_of(root: &Path, cgroup: &Path) -> PathBuf {
    let Ok(below) = cgroup.strip_prefix(root) else {
        return cgroup.to_owned();
    };
    let names: Vec<_> = below.components().collect();
    let of_pod = names
        .iter()
        .position(|name| is_pod(&name.as_os_str().to_string_lossy()));
    let depth = of_pod.map_or(1, |at| at + 1);
    names
        .into_iter()
        .take(depth)
        .fold(root.to_owned(), |path, name| path.join(name))
}

/// Whether a cgroup's name ends, but for `.slice`, in `pod` and a uid: 8-4-4-4-12 hexadecimal digits, joined by dashes
/// or, by systemd's driver, underscores; or, of a static pod, 32 digits.
fn is_pod(name: &str) -> bool {
    let name = name.strip_suffix(".slice").unwrap_or(name);
    let Some((_, uid)) = name.rsplit_once("pod") else {
        return false;
    };
    let is_joint = |byte| byte == b'-' || byte == b'_';
    let digits = uid.bytes().filter(u8::is_ascii_hexdigit).count();
    digits == 32 && uid.bytes().all(|byte| byte.is_ascii_hexdigit() || is_joint(byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cgroup_of_a_pod_is_found_by_its_uid_or_else_is_the_outermost() {
        let uid = "0123abcd-1111-2222-3333-0123456789ab";
        let systemd = format!("burstable.slice/kubepods-burstable-pod{}.slice", uid.replace('-', "_"));
        let plain = format!("besteffort/pod{uid}");
        let static_pod = "pod0123456789abcdef0123456789abcdef".to_owned();
        for (cgroup, pod) in [
            (format!("{systemd}/cri-containerd-12.scope"), &systemd),
            (format!("{plain}/12/nested"), &plain),
            (format!("{static_pod}/12"), &static_pod),
            ("web/sandbox".to_owned(), &"web".to_owned()),
            ("podium/a".to_owned(), &"podium".to_owned()),
            ("web".to_owned(), &"web".to_owned()),
        ] {
            let root = Path::new("/sys/fs/cgroup/kubepods");
            assert_eq!(pod_of(root, &root.join(&cgroup)), root.join(pod), "{cgroup}");
        }
    }
}
