//! The `bpf` and mount system calls that aya 0.14 does not offer.

#![expect(unsafe_code, reason = "system calls without a safe wrapper")]

use std::ffi::CStr;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use aya::Pod;

const BPF_MAP_LOOKUP_ELEM: libc::c_int = 1;
const BPF_MAP_UPDATE_ELEM: libc::c_int = 2;
const BPF_MAP_DELETE_ELEM: libc::c_int = 3;
const BPF_MAP_GET_NEXT_KEY: libc::c_int = 4;
const BPF_OBJ_GET_INFO_BY_FD: libc::c_int = 15;
const BPF_MAP_LOOKUP_AND_DELETE_ELEM: libc::c_int = 21;
const BPF_LINK_GET_FD_BY_ID: libc::c_int = 30;

const FSOPEN_CLOEXEC: libc::c_uint = 1;
const FSMOUNT_CLOEXEC: libc::c_uint = 1;
const FSCONFIG_CMD_CREATE: libc::c_uint = 6;

/// `union bpf_attr` as the commands on map elements read it.
#[repr(C)]
struct MapElement {
    map_fd: u32,
    reserved: u32,
    key: u64,
    value_or_next_key: u64,
    flags: u64,
}

/// `union bpf_attr` as `BPF_OBJ_GET_INFO_BY_FD` reads it.
#[repr(C)]
struct InfoByFd {
    fd: u32,
    info_len: u32,
    info: u64,
}

/// `union bpf_attr` as `BPF_LINK_GET_FD_BY_ID` reads it.
#[repr(C)]
struct FdById {
    id: u32,
    next_id: u32,
    open_flags: u32,
}

/// `struct bpf_link_info` up to the members of a link to a cgroup.
#[repr(C)]
#[derive(Default)]
struct CgroupLinkInfo {
    kind: u32,
    id: u32,
    program_id: u32,
    reserved: u32,
    cgroup_id: u64,
    attach_type: u32,
    reserved2: u32,
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

fn element<K, V>(map: BorrowedFd<'_>, key: *const K, value: *mut V, flags: u64) -> MapElement {
    MapElement {
        map_fd: map.as_raw_fd() as u32,
        reserved: 0,
        key: key.addr() as u64,
        value_or_next_key: value.addr() as u64,
        flags,
    }
}

/// Sets `key` to `value`. `flags` as in bpf(2).
pub(super) fn update<K: Pod, V: Pod>(map: BorrowedFd<'_>, key: &K, value: &V, flags: u64) -> io::Result<()> {
    let mut attr = element(map, key, std::ptr::from_ref(value).cast_mut(), flags);
    bpf(BPF_MAP_UPDATE_ELEM, &mut attr).map(drop)
}

/// Removes `key`; that it was not there is no error.
pub(super) fn delete<K: Pod>(map: BorrowedFd<'_>, key: &K) -> io::Result<()> {
    let mut attr = element::<K, u8>(map, key, std::ptr::null_mut(), 0);
    absent_is_none(bpf(BPF_MAP_DELETE_ELEM, &mut attr)).map(drop)
}

/// Takes `key` out of a hash. Minimum kernel 5.14.
pub(super) fn take<K: Pod, V: Pod>(map: BorrowedFd<'_>, key: &K) -> io::Result<Option<V>> {
    read(BPF_MAP_LOOKUP_AND_DELETE_ELEM, map, key)
}

/// Reads the value of `key`.
pub(super) fn get<K: Pod, V: Pod>(map: BorrowedFd<'_>, key: &K) -> io::Result<Option<V>> {
    read(BPF_MAP_LOOKUP_ELEM, map, key)
}

fn read<K: Pod, V: Pod>(command: libc::c_int, map: BorrowedFd<'_>, key: &K) -> io::Result<Option<V>> {
    let mut value = MaybeUninit::<V>::uninit();
    let mut attr = element(map, key, value.as_mut_ptr(), 0);
    // SAFETY: on success the kernel has written a whole value, and any bits are a valid `V`.
    Ok(absent_is_none(bpf(command, &mut attr))?.map(|_| unsafe { value.assume_init() }))
}

/// The key after `key`, or the first.
pub(super) fn next_key<K: Pod>(map: BorrowedFd<'_>, key: Option<&K>) -> io::Result<Option<K>> {
    let mut next = MaybeUninit::<K>::uninit();
    let key = key.map_or(std::ptr::null(), std::ptr::from_ref);
    let mut attr = element(map, key, next.as_mut_ptr(), 0);
    // SAFETY: as in `read`.
    Ok(absent_is_none(bpf(BPF_MAP_GET_NEXT_KEY, &mut attr))?.map(|_| unsafe { next.assume_init() }))
}

fn absent_is_none(result: io::Result<RawFd>) -> io::Result<Option<RawFd>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(None),
        Err(error) => Err(error),
    }
}

/// The id of the cgroup that a link is attached to. Minimum kernel 5.8.
pub(super) fn link_cgroup_id(link_id: u32) -> io::Result<u64> {
    let mut attr = FdById {
        id: link_id,
        next_id: 0,
        open_flags: 0,
    };
    let link = bpf(BPF_LINK_GET_FD_BY_ID, &mut attr)?;
    // SAFETY: a descriptor that the kernel has just made for us.
    let link = unsafe { OwnedFd::from_raw_fd(link) };
    let mut info = CgroupLinkInfo::default();
    let mut attr = InfoByFd {
        fd: link.as_raw_fd() as u32,
        info_len: size_of::<CgroupLinkInfo>() as u32,
        info: std::ptr::from_mut(&mut info).addr() as u64,
    };
    bpf(BPF_OBJ_GET_INFO_BY_FD, &mut attr)?;
    Ok(info.cgroup_id)
}

/// A bpf file system that is mounted nowhere: it lives as long as the descriptor, and so do pins in it.
/// Minimum kernel 5.2.
pub(super) fn private_bpffs() -> io::Result<OwnedFd> {
    const NAME: &CStr = c"bpf";
    let owned = |fd: libc::c_long| {
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: a descriptor that the kernel has just made for us.
        Ok(unsafe { OwnedFd::from_raw_fd(fd as RawFd) })
    };
    // SAFETY: a system call whose arguments live through it.
    let context = owned(unsafe { libc::syscall(libc::SYS_fsopen, NAME.as_ptr(), FSOPEN_CLOEXEC) })?;
    let null = std::ptr::null::<libc::c_char>();
    // SAFETY: as above; this command takes no key and no value.
    let created = unsafe {
        libc::syscall(
            libc::SYS_fsconfig,
            context.as_raw_fd(),
            FSCONFIG_CMD_CREATE,
            null,
            null,
            0,
        )
    };
    if created < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: as above.
    owned(unsafe { libc::syscall(libc::SYS_fsmount, context.as_raw_fd(), FSMOUNT_CLOEXEC, 0) })
}
