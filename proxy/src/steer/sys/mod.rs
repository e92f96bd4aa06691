//! The `bpf` system calls.

#![expect(unsafe_code, reason = "system calls without a safe wrapper")]

mod link;
mod map;
mod pin;
mod program;
mod query;

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use aya::Pod;

pub(super) use link::{detach_link, link, link_info, update_link};
pub(super) use map::{
    MapInfo, MapSpec, changing_entries, create_map, delete, entries, freeze, get, get_per_cpu, keys, map_info,
    next_key, take, update, update_bytes,
};
pub(super) use pin::{pin, pinned};
pub(super) use program::{load_btf, load_program};
pub(super) use query::{attached, program_name};

const BPF_OBJ_GET_INFO_BY_FD: libc::c_int = 15;

/// The kernel's `BPF_OBJ_NAME_LEN`.
const NAME_LEN: usize = 16;

/// `union bpf_attr` as `BPF_OBJ_GET_INFO_BY_FD` reads it.
#[repr(C)]
struct InfoByFd {
    fd: u32,
    info_len: u32,
    info: u64,
}

fn bpf<T>(command: libc::c_int, attr: &mut T) -> io::Result<RawFd> {
    // SAFETY: `attr` is a prefix of `union bpf_attr` that the command reads, of the size given; what it points to
    // lives through the call, as each caller below shows.
    let result = unsafe { libc::syscall(libc::SYS_bpf, command, std::ptr::from_mut(attr), size_of::<T>()) };
    // The result of bpf(2) is an int.
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(result as RawFd)
    }
}

/// The monotonic clock, by which the kernel programs tell time, in nanoseconds.
pub fn monotonic_ns() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the kernel writes one `timespec`; this clock always exists.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// A value from the bytes of a ring's item; none where these are too few.
pub(super) fn from_bytes<T: Pod>(bytes: &[u8]) -> Option<T> {
    // SAFETY: as many bytes are there, any bits are a valid `T`, and it is read unaligned.
    (bytes.len() >= size_of::<T>()).then(|| unsafe { bytes.as_ptr().cast::<T>().read_unaligned() })
}

/// The kernel's number of a map, program or link.
pub(super) fn object_id(object: BorrowedFd<'_>) -> io::Result<u32> {
    // What the kernel tells of each of them begins with its type and its id.
    info::<[u32; 2]>(object).map(|[_, id]| id)
}

/// `T` is a prefix of what the kernel tells of such an object; plain integers.
fn info<T: Default>(object: BorrowedFd<'_>) -> io::Result<T> {
    let mut info = T::default();
    let mut attr = InfoByFd {
        fd: object.as_raw_fd() as u32,
        info_len: size_of::<T>() as u32,
        info: std::ptr::from_mut(&mut info).addr() as u64,
    };
    bpf(BPF_OBJ_GET_INFO_BY_FD, &mut attr)?;
    Ok(info)
}

/// A name as the kernel takes it: cut to its length.
fn object_name(name: &str) -> [u8; NAME_LEN] {
    let mut field = [0; NAME_LEN];
    // The kernel takes letters, digits, dots and underscores, and wants a zero at the end.
    for (to, from) in field[..NAME_LEN - 1].iter_mut().zip(name.bytes()) {
        *to = from;
    }
    field
}

fn made(result: io::Result<RawFd>) -> io::Result<OwnedFd> {
    // SAFETY: a descriptor that the kernel has just made for us, and closes on exec.
    result.map(|fd| unsafe { OwnedFd::from_raw_fd(fd) })
}
