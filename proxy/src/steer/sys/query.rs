//! Programs that others have attached, and their names.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd as _, AsRawFd, BorrowedFd};

use aya_obj::generated::bpf_attach_type;

use super::{NAME_LEN, bpf, info, made};

const BPF_PROG_GET_FD_BY_ID: libc::c_int = 13;
const BPF_PROG_QUERY: libc::c_int = 16;

/// The kernel lets no more be attached to one cgroup (`BPF_CGROUP_MAX_PROGS`).
const MOST: usize = 64;

/// `union bpf_attr` as `BPF_PROG_QUERY` reads and writes it, to the end that newer kernels know.
#[repr(C)]
struct ProgramQuery {
    target: u32,
    attach_type: u32,
    query_flags: u32,
    attach_flags: u32,
    ids: u64,
    count: u32,
    reserved: u32,
    newer: [u64; 4],
}

/// `union bpf_attr` as `BPF_PROG_GET_FD_BY_ID` reads it.
#[repr(C)]
struct GetById {
    id: u32,
    next: u32,
    flags: u32,
}

/// `struct bpf_prog_info` up to the name.
#[repr(C)]
#[derive(Default)]
struct RawProgramInfo {
    before: [u64; 8],
    name: [u8; NAME_LEN],
}

/// The numbers of the programs attached to this very cgroup. Minimum kernel 4.15; needs CAP_NET_ADMIN.
pub(in crate::steer) fn attached(cgroup: BorrowedFd<'_>, attach: bpf_attach_type) -> io::Result<Vec<u32>> {
    let mut ids = vec![0_u32; MOST];
    let mut attr = ProgramQuery {
        target: cgroup.as_raw_fd() as u32,
        attach_type: attach as u32,
        query_flags: 0,
        attach_flags: 0,
        ids: ids.as_mut_ptr().addr() as u64,
        count: MOST as u32,
        reserved: 0,
        newer: [0; 4],
    };
    bpf(BPF_PROG_QUERY, &mut attr)?;
    ids.truncate(attr.count as usize);
    Ok(ids)
}

/// A program's name, cut to 15 bytes, by its number. Needs CAP_SYS_ADMIN.
pub(in crate::steer) fn program_name(id: u32) -> io::Result<String> {
    let mut attr = GetById { id, next: 0, flags: 0 };
    let program = made(bpf(BPF_PROG_GET_FD_BY_ID, &mut attr))?;
    let info: RawProgramInfo = info(program.as_fd())?;
    let name = CStr::from_bytes_until_nul(&info.name).unwrap_or_default();
    Ok(name.to_string_lossy().into_owned())
}
