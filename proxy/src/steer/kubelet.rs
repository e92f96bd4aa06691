//! The programs on the kubelet's cgroup, by which its probes reach enrolled pods.

use std::fs;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use adit_common::{COMMAND_LEN, Config};
use aya_obj::generated::bpf_attach_type;

use super::attach::CgroupPrograms;
use super::cgroup::{cgroup_mount, own_path};
use super::object::{Object, ProgramSpec};
use super::pins::Pins;
use super::{Maps, SteerError, cgroup_id, sock_addr, sock_ops, sys};

/// In the order in which they are attached. They need no order among themselves: what one has not noted is a stranger's.
const PROGRAMS: [ProgramSpec; 3] = [
    sock_ops("adit_kubelet"),
    sock_addr("adit_kubelet4", bpf_attach_type::BPF_CGROUP_INET4_CONNECT),
    sock_addr("adit_kubelet6", bpf_attach_type::BPF_CGROUP_INET6_CONNECT),
];

/// Who the kubelet is.
#[derive(Debug, Clone)]
pub struct KubeletSettings {
    /// Where its cgroup is.
    pub cgroup: KubeletCgroup,
    /// Its command name; empty where every process of the cgroup is it.
    pub command: String,
    /// The cookie of the node's own network namespace, in which its sockets are.
    pub netns: u64,
}

/// Where the kubelet's cgroup is.
#[derive(Debug, Clone)]
pub enum KubeletCgroup {
    /// In this cgroup v2 directory.
    At(PathBuf),
    /// Where the process of its command name is, outside the cgroup of all pods, which this is.
    OfProcess(PathBuf),
}

/// The programs, and their links.
pub(super) struct Kubelet {
    settings: KubeletSettings,
    /// Where its cgroup was last.
    found: Mutex<Option<PathBuf>>,
    programs: CgroupPrograms,
    links: Mutex<Vec<OwnedFd>>,
}

impl Kubelet {
    /// Loads the programs. They are attached by [`Kubelet::keep`].
    pub(super) fn load(settings: &KubeletSettings, object: &Object) -> Result<Self, SteerError> {
        Ok(Self {
            settings: settings.clone(),
            found: Mutex::default(),
            programs: CgroupPrograms::load("the kubelet's cgroup", &PROGRAMS, object)?,
            links: Mutex::default(),
        })
    }

    /// Puts the programs in their place, if they are not. Whether something had to be done.
    pub(super) fn keep(&self, maps: &Maps, pins: Option<&Pins>) -> Result<bool, SteerError> {
        let path = self.cgroup()?;
        let about_cgroup = |error| match error {
            SteerError::Cgroup { error, .. } => SteerError::KubeletCgroup {
                path: path.clone(),
                error,
            },
            error => error,
        };
        let cgroup = cgroup_id(&path).map_err(about_cgroup)?;
        maps.set_kubelet_cgroup(cgroup)?;
        let mut links = self.links.lock().unwrap_or_else(PoisonError::into_inner);
        let changes = self.programs.put(&path, &mut links, pins).map_err(about_cgroup)?;
        Ok(!changes.is_empty())
    }

    /// Where its cgroup is now. All processes are looked through only while none of those in the known one is it.
    fn cgroup(&self) -> Result<PathBuf, SteerError> {
        let pods = match &self.settings.cgroup {
            KubeletCgroup::At(path) => return Ok(path.clone()),
            KubeletCgroup::OfProcess(pods) => pods,
        };
        let mut found = self.found.lock().unwrap_or_else(PoisonError::into_inner);
        let command = &self.settings.command;
        let has_kubelet = |path: &PathBuf| {
            let processes = fs::read_to_string(path.join("cgroup.procs")).unwrap_or_default();
            let mut processes = processes.lines().map(|pid| Path::new("/proc").join(pid));
            processes.any(|process| is_kubelet(&process, command))
        };
        if let Some(path) = found.as_ref().filter(|path| has_kubelet(path)) {
            return Ok(path.clone());
        }
        let Some(path) = find_kubelet(command, pods)? else {
            return Err(SteerError::NoKubelet(command.clone()));
        };
        if found.as_ref() != Some(&path) {
            tracing::info!("the kubelet is in the cgroup {}", path.display());
        }
        Ok(found.insert(path).clone())
    }

    /// Detaches what another process has attached, where the kubelet's probes are no longer to be let through.
    pub(super) fn remove(pins: &Pins) -> Result<(), SteerError> {
        for program in PROGRAMS {
            if let Some(link) = pins.link(program.name)? {
                // Gone with its cgroup, or detached by somebody else.
                let _ = sys::detach_link(link.as_fd());
            }
        }
        Ok(())
    }
}

impl Maps {
    /// Tells the programs which cgroup the kubelet is in now.
    fn set_kubelet_cgroup(&self, kubelet_cgroup: u64) -> Result<(), SteerError> {
        self.change_config(|config| {
            *config = Config {
                kubelet_cgroup,
                ..*config
            }
        })
    }

    /// Tells the programs who the kubelet is.
    pub(super) fn set_kubelet(&self, settings: &KubeletSettings) -> Result<(), SteerError> {
        let mut kubelet = [0; COMMAND_LEN];
        // The kernel too cuts names to what leaves room for the zero byte at the end.
        for (to, from) in kubelet[..COMMAND_LEN - 1].iter_mut().zip(settings.command.bytes()) {
            *to = from;
        }
        self.change_config(|config| {
            *config = Config {
                host_netns: settings.netns,
                kubelet,
                ..*config
            };
        })
    }
}

/// Whether a process may be the kubelet: of root, of this command name, in the node's own network namespace.
fn is_kubelet(process: &Path, command: &str) -> bool {
    let read = |name: &str| fs::read_to_string(process.join(name)).unwrap_or_default();
    let netns = |process: &Path| fs::metadata(process.join("ns/net")).ok().map(|netns| netns.ino());
    is_command(&read("comm"), command)
        && is_of_root(&read("status"))
        && netns(process).is_some_and(|netns_of_process| netns(Path::new("/proc/self")) == Some(netns_of_process))
}

/// Whether a process whose status the kernel tells so is root's, by all of its user ids. Whose its files in `/proc` are does
/// not tell: they are root's, too, where it has made itself undumpable.
fn is_of_root(status: &str) -> bool {
    let ids = status.lines().find_map(|line| line.strip_prefix("Uid:"));
    ids.is_some_and(|ids| ids.split_whitespace().count() == 4 && ids.split_whitespace().all(|id| id == "0"))
}

/// The cgroup v2 directory of the kubelet's process. Not one of a pod: below `pods` anybody may have the name. None where
/// there is no such process, or several in different cgroups.
fn find_kubelet(command: &str, pods: &Path) -> Result<Option<PathBuf>, SteerError> {
    let mount = cgroup_mount()?;
    let mut found: Option<PathBuf> = None;
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let process = entry.path();
        if !is_kubelet(&process, command) {
            continue;
        }
        let cgroup = fs::read_to_string(process.join("cgroup")).unwrap_or_default();
        let Some(path) = own_path(&cgroup).map(|relative| mount.join(relative)) else {
            continue;
        };
        if path.starts_with(pods) {
            continue;
        }
        if found.as_ref().is_some_and(|other| *other != path) {
            return Ok(None);
        }
        found = Some(path);
    }
    Ok(found)
}

/// Whether a process whose name the kernel tells as `comm` is this command: it keeps the first 15 bytes.
fn is_command(comm: &str, command: &str) -> bool {
    let kept = command.as_bytes();
    let kept = &kept[..kept.len().min(COMMAND_LEN - 1)];
    !kept.is_empty() && comm.trim_end_matches('\n').as_bytes() == kept
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_roots_processes_can_be_the_kubelet() {
        for (status, is_it) in [
            ("Name:\tkubelet\nUid:\t0\t0\t0\t0\nGid:\t0\t0\t0\t0\n", true),
            ("Name:\tkubelet\nUid:\t1000\t1000\t1000\t1000\n", false),
            ("Name:\tkubelet\nUid:\t1000\t0\t0\t0\n", false),
            ("Name:\tkubelet\nUid:\t0\n", false),
            ("", false),
        ] {
            assert_eq!(is_of_root(status), is_it, "{status:?}");
        }
    }

    #[test]
    fn a_command_is_known_by_what_the_kernel_keeps_of_its_name() {
        for (comm, command, is_it) in [
            ("kubelet\n", "kubelet", true),
            ("kubelet-wrapper\n", "kubelet", false),
            ("kube\n", "kubelet", false),
            ("a-command-of-ma\n", "a-command-of-many-letters", true),
            ("\n", "", false),
        ] {
            assert_eq!(is_command(comm, command), is_it, "{comm:?} {command:?}");
        }
    }
}
