//! Programs of others at the hooks where Adit's are.

use std::fs::File;
use std::io;
use std::os::fd::AsFd as _;
use std::path::Path;

use aya_obj::generated::bpf_attach_type;

use super::sys;

/// What the names of all of Adit's programs begin with.
const OURS: &str = "adit_";

/// The hooks that decide where a connection goes and what its ends see of it.
const HOOKS: [(bpf_attach_type, &str); 5] = [
    (bpf_attach_type::BPF_CGROUP_INET4_CONNECT, "connect4"),
    (bpf_attach_type::BPF_CGROUP_INET6_CONNECT, "connect6"),
    (bpf_attach_type::BPF_CGROUP_SOCK_OPS, "sock_ops"),
    (bpf_attach_type::BPF_CGROUP_INET4_GETPEERNAME, "getpeername4"),
    (bpf_attach_type::BPF_CGROUP_INET6_GETPEERNAME, "getpeername6"),
];

/// A program that is attached to a cgroup.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AttachedProgram {
    /// The kernel's number of it.
    pub id: u32,
    /// Its name, as the kernel cuts it; empty where it has none or may not be asked.
    pub name: String,
    /// At which hook.
    pub hook: &'static str,
}

impl AttachedProgram {
    /// Whether it is, by its name, one of Adit's.
    pub fn is_ours(&self) -> bool {
        self.name.starts_with(OURS)
    }
}

/// The programs attached to this very cgroup, not to those above or below it, at the hooks that Adit uses.
///
/// # Errors
///
/// The directory is none of cgroup v2, or CAP_NET_ADMIN is missing.
pub fn attached_programs(cgroup: &Path) -> io::Result<Vec<AttachedProgram>> {
    let directory = File::open(cgroup)?;
    let mut found = Vec::new();
    for (attach, hook) in HOOKS {
        for id in sys::attached(directory.as_fd(), attach)? {
            // It may be gone by now.
            let name = sys::program_name(id).unwrap_or_default();
            found.push(AttachedProgram { id, name, hook });
        }
    }
    Ok(found)
}
