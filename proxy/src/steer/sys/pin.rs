//! Names of objects in a bpffs.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use super::{bpf, made};

const BPF_OBJ_PIN: libc::c_int = 6;
const BPF_OBJ_GET: libc::c_int = 7;

/// `union bpf_attr` as `BPF_OBJ_PIN` and `BPF_OBJ_GET` read it.
#[repr(C)]
struct PinnedObject {
    path: u64,
    fd: u32,
    flags: u32,
}

/// Gives an object a name in a bpffs, which keeps it.
pub(in crate::steer) fn pin(object: BorrowedFd<'_>, path: &Path) -> io::Result<()> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    let mut attr = PinnedObject {
        path: path.as_ptr().addr() as u64,
        fd: object.as_raw_fd() as u32,
        flags: 0,
    };
    bpf(BPF_OBJ_PIN, &mut attr).map(drop)
}

/// Opens the object of that name in a bpffs, if there is one.
pub(in crate::steer) fn pinned(path: &Path) -> io::Result<Option<OwnedFd>> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    let mut attr = PinnedObject {
        path: path.as_ptr().addr() as u64,
        fd: 0,
        flags: 0,
    };
    match made(bpf(BPF_OBJ_GET, &mut attr)) {
        Ok(object) => Ok(Some(object)),
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(None),
        Err(error) => Err(error),
    }
}
