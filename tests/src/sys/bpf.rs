//! What somebody with the right capabilities may do to Adit's programs.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

const BPF_OBJ_GET: libc::c_int = 7;
const BPF_LINK_DETACH: libc::c_int = 34;

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
    // SAFETY: the attribute has the form that the command reads, and the path in it lives through the call.
    let fd = unsafe { libc::syscall(libc::SYS_bpf, BPF_OBJ_GET, &raw mut get, size_of::<Get>()) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a descriptor that the kernel has just made for us.
    let link = unsafe { OwnedFd::from_raw_fd(fd as i32) };
    let mut detach = link.as_raw_fd() as u32;
    // SAFETY: the attribute has the form that the command reads.
    let done = unsafe { libc::syscall(libc::SYS_bpf, BPF_LINK_DETACH, &raw mut detach, size_of::<u32>()) };
    if done < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}
