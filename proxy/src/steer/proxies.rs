//! The cgroups whose sockets in pods' namespaces are left alone: that of this process, and those of predecessors that
//! still drain.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, FromRawFd as _, OwnedFd};

use super::cgroup::{cgroup_mount, own_cgroup_id};
use super::error::at;
use super::{Maps, SteerError, Steering, sys};

impl Maps {
    /// Enters this process's cgroup.
    pub(super) fn enter_own_cgroup(&self) -> Result<(), SteerError> {
        let own = own_cgroup_id()?;
        sys::update(self.proxies.as_fd(), &own, &1_u8, 0).map_err(at("entering the proxy's own cgroup"))
    }
}

impl Steering {
    /// Removes the cgroups that are gone.
    pub fn sweep_proxies(&self) -> Result<usize, SteerError> {
        let at = at("sweeping the cgroups of proxies that are gone");
        let map = self.maps.proxies.as_fd();
        let mount = File::open(cgroup_mount()?).map_err(at)?;
        let mut gone = Vec::new();
        for id in sys::keys::<u64>(map).map_err(at)? {
            if !exists(&mount, id).map_err(at)? {
                gone.push(id);
            }
        }
        for id in &gone {
            sys::delete(map, id).map_err(at)?;
        }
        Ok(gone.len())
    }
}

/// Whether there is a cgroup of that id below the mount.
#[expect(unsafe_code, reason = "a system call without a safe wrapper")]
fn exists(mount: &File, id: u64) -> io::Result<bool> {
    /// The kernel's `struct file_handle` with a handle of kernfs (`FILEID_KERNFS`): the id.
    #[repr(C)]
    struct Handle {
        bytes: u32,
        kind: i32,
        id: [u8; 8],
    }
    const FILEID_KERNFS: i32 = 0xfe;

    let mut handle = Handle {
        bytes: 8,
        kind: FILEID_KERNFS,
        id: id.to_ne_bytes(),
    };
    // SAFETY: the handle lives through the call and has the form that the kernel reads.
    let fd = unsafe {
        libc::syscall(
            libc::SYS_open_by_handle_at,
            mount.as_raw_fd(),
            &raw mut handle,
            libc::O_PATH | libc::O_CLOEXEC,
        )
    };
    if fd >= 0 {
        // SAFETY: a descriptor that the kernel has just made for us.
        drop(unsafe { OwnedFd::from_raw_fd(fd as i32) });
        return Ok(true);
    }
    let error = io::Error::last_os_error();
    match error.raw_os_error() {
        Some(libc::ESTALE | libc::ENOENT) => Ok(false),
        _ => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cgroup_exists_by_its_id_until_it_is_removed() {
        let mount = cgroup_mount().unwrap();
        let at = File::open(&mount).unwrap();
        assert!(exists(&at, own_cgroup_id().unwrap()).unwrap());
        assert!(!exists(&at, u64::MAX - 7).unwrap());
    }
}
