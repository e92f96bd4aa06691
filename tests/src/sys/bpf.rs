//! What the kernel tells of its BPF programs: which are attached, how often they ran and for how long; and what somebody
//! with the right capabilities may do to them.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

const BPF_OBJ_GET: libc::c_int = 7;
const BPF_PROG_GET_FD_BY_ID: libc::c_int = 13;
const BPF_OBJ_GET_INFO_BY_FD: libc::c_int = 15;
const BPF_PROG_QUERY: libc::c_int = 16;
/// Linux 5.8.
const BPF_ENABLE_STATS: libc::c_int = 32;
const BPF_LINK_DETACH: libc::c_int = 34;
const BPF_STATS_RUN_TIME: u32 = 0;

/// More programs of one kind than anybody attaches to one place.
const MOST_PROGRAMS: usize = 64;

/// `union bpf_attr` as `BPF_PROG_QUERY` reads it.
#[repr(C)]
struct Query {
    target: u32,
    attach_type: u32,
    query_flags: u32,
    attach_flags: u32,
    ids: u64,
    count: u32,
    reserved: u32,
}

/// `union bpf_attr` as `BPF_OBJ_GET_INFO_BY_FD` reads it.
#[repr(C)]
struct InfoByFd {
    fd: u32,
    length: u32,
    info: u64,
}

/// `struct bpf_prog_info` up to the counters.
#[repr(C)]
struct ProgramInfo {
    before_name: [u64; 8],
    name: [u8; 16],
    between: [u64; 14],
    run_time_ns: u64,
    run_count: u64,
}

const _: () = assert!(
    std::mem::offset_of!(ProgramInfo, name) == 64 && std::mem::offset_of!(ProgramInfo, run_time_ns) == 192,
    "as in linux/bpf.h"
);

/// How much a program has run since it was loaded, while [`count_program_time`] was in force.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ProgramTime {
    pub(crate) name: String,
    pub(crate) nanoseconds: u64,
    pub(crate) runs: u64,
}

/// Makes the kernel count the runs of all programs on the machine, until the result is dropped.
pub(crate) fn count_program_time() -> io::Result<OwnedFd> {
    bpf(BPF_ENABLE_STATS, &mut BPF_STATS_RUN_TIME.clone()).map(descriptor)
}

/// The ids of the programs of a kind (`enum bpf_attach_type`) that are attached right to a cgroup or network namespace.
pub(crate) fn attached_programs(target: &impl AsFd, attach_type: u32) -> io::Result<Vec<u32>> {
    let mut ids = vec![0_u32; MOST_PROGRAMS];
    let mut query = Query {
        target: target.as_fd().as_raw_fd() as u32,
        attach_type,
        query_flags: 0,
        attach_flags: 0,
        ids: ids.as_mut_ptr().addr() as u64,
        count: MOST_PROGRAMS as u32,
        reserved: 0,
    };
    bpf(BPF_PROG_QUERY, &mut query)?;
    ids.truncate(query.count as usize);
    Ok(ids)
}

/// The counters of the program with this id.
pub(crate) fn program_time(id: u32) -> io::Result<ProgramTime> {
    let program = descriptor(bpf(BPF_PROG_GET_FD_BY_ID, &mut [id, 0, 0])?);
    let mut info = ProgramInfo {
        before_name: [0; 8],
        name: [0; 16],
        between: [0; 14],
        run_time_ns: 0,
        run_count: 0,
    };
    let mut attr = InfoByFd {
        fd: program.as_raw_fd() as u32,
        length: size_of::<ProgramInfo>() as u32,
        info: (&raw mut info).addr() as u64,
    };
    bpf(BPF_OBJ_GET_INFO_BY_FD, &mut attr)?;
    let name = info.name.split(|byte| *byte == 0).next().unwrap_or_default();
    Ok(ProgramTime {
        name: String::from_utf8_lossy(name).into_owned(),
        nanoseconds: info.run_time_ns,
        runs: info.run_count,
    })
}

/// Detaches the link that is pinned at `path`; the pin stays.
pub fn detach_pinned_link(path: &Path) -> io::Result<()> {
    #[repr(C)]
    struct Get {
        path: u64,
        fd: u32,
        flags: u32,
    }
    let path = CString::new(path.as_os_str().as_bytes())?;
    let mut get = Get {
        path: path.as_ptr().addr() as u64,
        fd: 0,
        flags: 0,
    };
    let link = descriptor(bpf(BPF_OBJ_GET, &mut get)?);
    bpf(BPF_LINK_DETACH, &mut (link.as_raw_fd() as u32)).map(drop)
}

pub(super) fn bpf<T>(command: libc::c_int, attr: &mut T) -> io::Result<RawFd> {
    // SAFETY: `attr` is a prefix of `union bpf_attr` that the command reads, of the size given; what it points to
    // lives through the call and has the length that it names.
    let result = unsafe { libc::syscall(libc::SYS_bpf, command, std::ptr::from_mut(attr), size_of::<T>()) };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    RawFd::try_from(result).map_err(io::Error::other)
}

/// The descriptor that a call has just made, or handed over.
pub(super) fn descriptor(number: RawFd) -> OwnedFd {
    // SAFETY: it belongs to nobody else yet.
    unsafe { OwnedFd::from_raw_fd(number) }
}
