//! The programs on the kubelet's cgroup, by which its probes reach enrolled pods.

use std::fs;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use adit_common::{COMMAND_LEN, Config};
use aya_obj::generated::bpf_attach_type;

use super::attach::CgroupPrograms;
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
    /// Its cgroup v2 directory.
    pub cgroup: PathBuf,
    /// Its command name; empty where every process of the cgroup is it.
    pub command: String,
    /// The cookie of the node's own network namespace, in which its sockets are.
    pub netns: u64,
}

/// The programs, and their links.
pub(super) struct Kubelet {
    cgroup: PathBuf,
    programs: CgroupPrograms,
    links: Mutex<Vec<OwnedFd>>,
}

impl Kubelet {
    /// Loads the programs. They are attached by [`Kubelet::keep`].
    pub(super) fn load(settings: &KubeletSettings, pods: &Path, object: &Object) -> Result<Self, SteerError> {
        if holds(&settings.cgroup, pods) {
            let reason = "the pods' cgroup lies within it, and any pod could pass for the kubelet";
            return Err(SteerError::KubeletCgroup {
                path: settings.cgroup.clone(),
                error: std::io::Error::other(reason),
            });
        }
        Ok(Self {
            cgroup: settings.cgroup.clone(),
            programs: CgroupPrograms::load("the kubelet's cgroup", &settings.cgroup, &PROGRAMS, object)?,
            links: Mutex::default(),
        })
    }

    /// Puts the programs in their place, if they are not. Whether something had to be done.
    pub(super) fn keep(&self, pins: Option<&Pins>) -> Result<bool, SteerError> {
        let mut links = self.links.lock().unwrap_or_else(PoisonError::into_inner);
        match self.programs.put(&mut links, pins) {
            Ok(changes) => Ok(!changes.is_empty()),
            Err(SteerError::Cgroup { error, .. }) => Err(SteerError::KubeletCgroup {
                path: self.cgroup.clone(),
                error,
            }),
            Err(error) => Err(error),
        }
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

/// Whether the cgroup `outer` is `inner` or one above it, whichever paths lead to the two. One that is not there has no
/// cgroups below it.
fn holds(outer: &Path, inner: &Path) -> bool {
    let Ok(outer) = cgroup_id(outer) else {
        return false;
    };
    let Ok(inner) = fs::canonicalize(inner) else {
        return false;
    };
    inner
        .ancestors()
        .map_while(|cgroup| cgroup_id(cgroup).ok())
        .any(|id| id == outer)
}
