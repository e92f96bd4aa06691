//! The programs on the kubelet's cgroup, by which its probes reach enrolled pods.

use std::fs::{self, File};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use adit_common::{COMMAND_LEN, Config};
use aya_obj::generated::{bpf_attach_type, bpf_prog_type};

use super::object::{Object, ProgramSpec};
use super::{Maps, SteerError, attach_loaded, cgroup_id, sock_addr};

/// In the order in which they are attached. They need no order among themselves: what one has not noted is a stranger's.
const PROGRAMS: [ProgramSpec; 3] = [
    ProgramSpec {
        name: "adit_kubelet",
        kind: bpf_prog_type::BPF_PROG_TYPE_SOCK_OPS,
        attach: bpf_attach_type::BPF_CGROUP_SOCK_OPS,
    },
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

/// The programs, and what they are attached to.
pub(super) struct Kubelet {
    cgroup: PathBuf,
    programs: Vec<(ProgramSpec, OwnedFd)>,
    attached: Mutex<Option<Attached>>,
}

struct Attached {
    cgroup: u64,
    _links: Vec<OwnedFd>,
}

impl Kubelet {
    /// Loads the programs, and tells them who the kubelet is. They are attached by [`Kubelet::attach`].
    pub(super) fn load(
        settings: &KubeletSettings,
        pods: &Path,
        object: &Object,
        maps: &Arc<Maps>,
    ) -> Result<Self, SteerError> {
        let at = |error| SteerError::KubeletCgroup {
            path: settings.cgroup.clone(),
            error,
        };
        if holds(&settings.cgroup, pods) {
            let reason = "the pods' cgroup lies within it, and any pod could pass for the kubelet";
            return Err(at(std::io::Error::other(reason)));
        }
        let mut kubelet = [0; COMMAND_LEN];
        // The kernel too cuts names to what leaves room for the zero byte at the end.
        for (to, from) in kubelet[..COMMAND_LEN - 1].iter_mut().zip(settings.command.bytes()) {
            *to = from;
        }
        maps.change_config(|config| {
            *config = Config {
                host_netns: settings.netns,
                kubelet,
                ..*config
            };
        })?;
        let programs = PROGRAMS.map(|program| object.load(program).map(|loaded| (program, loaded)));
        Ok(Self {
            cgroup: settings.cgroup.clone(),
            programs: programs.into_iter().collect::<Result<_, _>>()?,
            attached: Mutex::default(),
        })
    }

    /// Attaches the programs to the kubelet's cgroup, if they are not. A kubelet that is started anew has a new one.
    /// Whether they were attached now.
    pub(super) fn attach(&self) -> Result<bool, SteerError> {
        let at = |error| SteerError::KubeletCgroup {
            path: self.cgroup.clone(),
            error,
        };
        let cgroup = File::open(&self.cgroup).map_err(at)?;
        let id = cgroup_id(&self.cgroup).map_err(|error| match error {
            SteerError::Cgroup { error, .. } => at(error),
            other => other,
        })?;
        let mut attached = self.attached.lock().unwrap_or_else(PoisonError::into_inner);
        if attached.as_ref().is_some_and(|attached| attached.cgroup == id) {
            return Ok(false);
        }
        let links = self.programs.iter().map(|(program, loaded)| {
            let link = attach_loaded(*program, loaded, &cgroup, id, "the kubelet's cgroup")?;
            Ok(link.0)
        });
        *attached = Some(Attached {
            cgroup: id,
            _links: links.collect::<Result<_, SteerError>>()?,
        });
        Ok(true)
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
