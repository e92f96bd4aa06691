//! Which network namespaces below the pods' cgroup are in the mesh, and which are not.
//!
//! A pod that the mesh lists is enrolled; the namespace of any other is told to the kernel as one that is not ours, once it
//! is known that the pod is not in the mesh. Until one of the two is done, the kernel does with its connects what
//! `--startup` says.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use thiserror::Error;
use tokio::sync::Notify;

use super::enrol::wanted;
use super::pod_cgroup::{inode, netns_of, pod_of, uid_of};
use super::{Netns, NetnsError};
use crate::mesh::{Mesh, MeshHandle, Unlisted, Workload};
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
    /// The cgroups in which these are.
    cgroups: Vec<PathBuf>,
}

/// What is known of a pod whose process is in a namespace that is not enrolled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Known {
    /// It is in the mesh, with another namespace.
    Inside,
    /// The mesh lists it, and it is not in it.
    Outside,
    /// The mesh does not list it.
    Unlisted,
}

/// What becomes of a namespace that is not enrolled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    /// It is known not to be in the mesh.
    Other,
    /// It is within a pod of the mesh, and would be a way around: it stays unclassified.
    Nested,
    /// It stays unclassified until the mesh says what the pod is.
    Wait,
}

/// What becomes of a namespace with processes of these pods.
fn fate(pods: impl IntoIterator<Item = Known>, unlisted: Unlisted) -> Fate {
    pods.into_iter().fold(Fate::Other, |fate, pod| match (pod, unlisted) {
        (Known::Inside, _) => Fate::Nested,
        (Known::Unlisted, Unlisted::Awaited) if fate == Fate::Other => Fate::Wait,
        _ => fate,
    })
}

/// The pods of this node as the mesh lists them, by the uids in their cgroups' names.
struct Listed<'m> {
    by_uid: HashMap<&'m str, &'m Arc<Workload>>,
    /// Those that should be enrolled and whose namespace is found by their cgroup.
    by_cgroup: HashSet<&'m str>,
    /// The namespaces of those that should be enrolled and say where it is.
    awaited: HashSet<u64>,
}

impl<'m> Listed<'m> {
    fn of(node: &str, mesh: &'m Mesh) -> Self {
        let local = mesh.local_workloads(node);
        let mut listed = Self {
            by_uid: local.map(|workload| (workload.cgroup_uid(), workload)).collect(),
            by_cgroup: HashSet::new(),
            awaited: HashSet::new(),
        };
        for workload in wanted(node, mesh) {
            match &workload.netns {
                Some(path) => listed.awaited.extend(inode(path)),
                None => drop(listed.by_cgroup.insert(workload.cgroup_uid())),
            }
        }
        listed
    }
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
    /// Cgroups with processes in namespaces of pods of which the mesh is yet to say what they are.
    waiting: HashSet<PathBuf>,
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
            waiting: HashSet::new(),
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
        let listed = Listed::of(&self.node, &mesh);
        let mut strangers = Vec::new();
        for (inode, found) in found {
            let Some(cookie) = cookie(&found.path, inode) else {
                continue;
            };
            seen.insert(cookie);
            let enrolled = self.namespaces.is_enrolled(cookie)?;
            if enrolled || listed.awaited.contains(&inode) || self.is_own_of(inode, &found, &listed) {
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
            match self.fate(&found, &listed, mesh.unlisted(), &seen)? {
                Fate::Other => {}
                Fate::Nested => {
                    if self.nested.len() < LOGGED && self.nested.insert(cookie) {
                        tracing::info!(
                            "{} is a network namespace within a pod of the mesh; it stays unclassified",
                            found.path.display()
                        );
                    }
                    continue;
                }
                Fate::Wait => {
                    tracing::debug!("{} is that of a pod that is not listed yet", found.path.display());
                    self.waiting.extend(found.cgroups);
                    continue;
                }
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

    /// Gives the cgroups that are to be looked at again now that the mesh has changed.
    pub(super) fn take_waiting(&mut self) -> HashSet<PathBuf> {
        std::mem::take(&mut self.waiting)
    }

    /// A handle on the mesh by which it classifies.
    pub(super) fn mesh(&self) -> MeshHandle {
        self.mesh.clone()
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
                cgroups: Vec::new(),
            });
            entry.pods.insert(pod_of(&self.root, cgroup));
            entry.cgroups.push(cgroup.to_owned());
        }
        Ok(())
    }

    /// Whether it is the namespace of a pod that should be enrolled and that is found by its cgroup.
    fn is_own_of(&self, inode: u64, found: &Found, listed: &Listed<'_>) -> bool {
        found.pods.iter().any(|pod| {
            uid_of(pod).is_some_and(|uid| listed.by_cgroup.contains(&*uid))
                && netns_of(pod, self.own).is_some_and(|own| own.inode == inode)
        })
    }

    fn fate(
        &self,
        found: &Found,
        listed: &Listed<'_>,
        unlisted: Unlisted,
        seen: &HashSet<u64>,
    ) -> Result<Fate, ClassifyError> {
        let mut known = Vec::with_capacity(found.pods.len());
        for pod in &found.pods {
            let uid = uid_of(pod);
            let enrolled = match self.in_mesh.get(pod) {
                Some(cookie) => seen.contains(cookie) || self.namespaces.is_enrolled(*cookie)?,
                None => false,
            };
            known.push(match uid.and_then(|uid| listed.by_uid.get(&*uid).copied()) {
                _ if enrolled => Known::Inside,
                Some(workload) if listed.by_cgroup.contains(workload.cgroup_uid()) => Known::Inside,
                Some(_) => Known::Outside,
                None => Known::Unlisted,
            });
        }
        Ok(fate(known, unlisted))
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

/// The cookie of the namespace at `path`, if it still is that of this inode: a process may be gone, and its number
/// another's.
fn cookie(path: &Path, inode: u64) -> Option<u64> {
    let netns = Netns::open(path).ok()?;
    (netns.inode() == inode).then(|| netns.cookie())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_namespace_is_other_only_where_all_that_is_known_of_its_pods_says_so() {
        use Known::{Inside, Outside, Unlisted as New};
        for (pods, unlisted, expected) in [
            (&[Outside][..], Unlisted::Awaited, Fate::Other),
            (&[Outside], Unlisted::Outside, Fate::Other),
            (&[New], Unlisted::Outside, Fate::Other),
            (&[New], Unlisted::Awaited, Fate::Wait),
            (&[Outside, New], Unlisted::Awaited, Fate::Wait),
            (&[New, Outside], Unlisted::Awaited, Fate::Wait),
            (&[Inside], Unlisted::Awaited, Fate::Nested),
            (&[Inside, New], Unlisted::Awaited, Fate::Nested),
            (&[New, Inside, Outside], Unlisted::Awaited, Fate::Nested),
            (&[Outside, Inside], Unlisted::Outside, Fate::Nested),
        ] {
            assert_eq!(fate(pods.iter().copied(), unlisted), expected, "{pods:?} {unlisted:?}");
        }
    }
}
