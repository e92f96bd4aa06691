//! The facts of this node that findings are made of. Nothing is changed by looking.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use nix::sys::utsname::uname;

use super::host::{self, CgroupFacts, KernelFacts, PinsFacts};
use super::others::{CgroupPrograms, CniFacts, MESH_PORTS};
use crate::cli::args::AUTO;
use crate::node::{PodListener, pod_listeners};
use crate::steer;

/// Where CNI configurations are, as the node's first process sees files, and as this one does.
const CNI_FOLDERS: [&str; 2] = ["/proc/1/root/etc/cni/net.d", "/etc/cni/net.d"];
/// The largest CNI configuration that is read.
const MOST_BYTES: u64 = 1 << 20;

pub(super) fn kernel() -> KernelFacts {
    let release = uname().map(|name| name.release().to_string_lossy().into_owned());
    KernelFacts {
        release: release.unwrap_or_else(|error| error.to_string()),
        missing: steer::missing_features().map_err(|error| error.to_string()),
    }
}

pub(super) fn capabilities() -> Option<u64> {
    host::effective(&fs::read_to_string("/proc/self/status").ok()?)
}

pub(super) fn cgroups(pods_cgroup: &Path) -> CgroupFacts {
    let is_given = pods_cgroup.as_os_str() != AUTO;
    let pods = if is_given {
        steer::cgroup_id(pods_cgroup).map(|_| pods_cgroup.to_owned())
    } else {
        steer::find_pods_cgroup()
    };
    CgroupFacts {
        mount: steer::cgroup_mount().map_err(|error| error.to_string()),
        pods: pods.map_err(|error| error.to_string()),
        is_given,
    }
}

pub(super) fn pins(bpf_dir: &Path) -> PinsFacts {
    PinsFacts {
        dir: bpf_dir.to_owned(),
        standing: steer::pins_standing(bpf_dir).map_err(|error| error.to_string()),
    }
}

/// The programs at the pods' cgroup and at each above it.
pub(super) fn programs(cgroups: &CgroupFacts) -> Vec<CgroupPrograms> {
    let (Ok(mount), Ok(pods)) = (&cgroups.mount, &cgroups.pods) else {
        return Vec::new();
    };
    let programs = host::chain(mount, pods).into_iter().map(|cgroup| CgroupPrograms {
        programs: steer::attached_programs(&cgroup).map_err(|error| error.to_string()),
        cgroup,
    });
    programs.collect()
}

/// Who listens in pods at the ports of other meshes.
pub(super) fn listeners(cgroups: &CgroupFacts) -> Vec<PodListener> {
    let (Ok(pods), Ok(own)) = (&cgroups.pods, fs::metadata("/proc/self/ns/net")) else {
        return Vec::new();
    };
    pod_listeners(pods, own.ino(), &MESH_PORTS)
}

/// The CNI configurations, where they can be seen.
pub(super) fn cni() -> Option<CniFacts> {
    let (folder, entries) = CNI_FOLDERS
        .iter()
        .find_map(|folder| Some((PathBuf::from(folder), fs::read_dir(folder).ok()?)))?;
    let mut files: Vec<(String, String)> = entries
        .flatten()
        .filter(|entry| {
            entry
                .metadata()
                .is_ok_and(|metadata| metadata.is_file() && metadata.len() <= MOST_BYTES)
        })
        .map(|entry| {
            let name = entry.file_name().to_string_lossy().into_owned();
            (name, fs::read_to_string(entry.path()).unwrap_or_default())
        })
        .collect();
    files.sort();
    Some(CniFacts { folder, files })
}
