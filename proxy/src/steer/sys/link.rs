//! Links: programs attached to cgroups and network namespaces.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};

use aya_obj::generated::bpf_attach_type;

use super::{bpf, info, made};

const BPF_LINK_CREATE: libc::c_int = 28;
const BPF_LINK_UPDATE: libc::c_int = 29;
const BPF_LINK_DETACH: libc::c_int = 34;

/// `union bpf_attr` as `BPF_LINK_CREATE` reads it.
#[repr(C)]
struct LinkCreate {
    program: u32,
    target: u32,
    attach_type: u32,
    flags: u32,
}

/// `union bpf_attr` as `BPF_LINK_UPDATE` reads it.
#[repr(C)]
struct LinkUpdate {
    link: u32,
    program: u32,
    flags: u32,
    old_program: u32,
}

/// `struct bpf_link_info` up to the members of a link to a cgroup or a network namespace.
#[repr(C)]
#[derive(Default)]
struct RawLinkInfo {
    kind: u32,
    id: u32,
    program_id: u32,
    reserved: u32,
    /// The cgroup's id; of a link to a network namespace, the first half is the namespace's inode.
    target: [u32; 2],
    attach_type: u32,
    reserved2: u32,
}

/// Attaches a program; closing the link detaches it. Minimum kernel 5.9.
pub(in crate::steer) fn link(
    program: BorrowedFd<'_>,
    target: BorrowedFd<'_>,
    attach: bpf_attach_type,
) -> io::Result<OwnedFd> {
    let mut attr = LinkCreate {
        program: program.as_raw_fd() as u32,
        target: target.as_raw_fd() as u32,
        attach_type: attach as u32,
        flags: 0,
    };
    made(bpf(BPF_LINK_CREATE, &mut attr))
}

/// Puts another program into a link, at once: no connection meets neither. Minimum kernel 5.7.
pub(in crate::steer) fn update_link(link: BorrowedFd<'_>, program: BorrowedFd<'_>) -> io::Result<()> {
    let mut attr = LinkUpdate {
        link: link.as_raw_fd() as u32,
        program: program.as_raw_fd() as u32,
        flags: 0,
        old_program: 0,
    };
    bpf(BPF_LINK_UPDATE, &mut attr).map(drop)
}

/// Detaches a link, whoever else holds it. Minimum kernel 5.9.
pub(in crate::steer) fn detach_link(link: BorrowedFd<'_>) -> io::Result<()> {
    bpf(BPF_LINK_DETACH, &mut (link.as_raw_fd() as u32)).map(drop)
}

/// Where a link leads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::steer) struct LinkInfo {
    /// The id of its program.
    pub(in crate::steer) program: u32,
    /// The id of its cgroup; zero where that is gone.
    pub(in crate::steer) cgroup: u64,
    /// The inode of its network namespace; zero where that is gone.
    pub(in crate::steer) netns: u32,
}

/// Asks where a link leads. Minimum kernel 5.8.
pub(in crate::steer) fn link_info(link: BorrowedFd<'_>) -> io::Result<LinkInfo> {
    let info: RawLinkInfo = info(link)?;
    let [low, high] = info.target.map(u32::to_ne_bytes);
    let mut cgroup = [0; 8];
    cgroup[..4].copy_from_slice(&low);
    cgroup[4..].copy_from_slice(&high);
    Ok(LinkInfo {
        program: info.program_id,
        cgroup: u64::from_ne_bytes(cgroup),
        netns: info.target[0],
    })
}
