//! What a pod with privileges may try: capabilities, BPF programs on its own cgroup, sockets from elsewhere.

use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;

use nix::cmsg_space;
use nix::sys::socket::{ControlMessage, ControlMessageOwned, MsgFlags, recvmsg, sendmsg};

use super::bpf::{bpf, descriptor};

const CAPABILITY_VERSION_3: u32 = 0x2008_0522;

/// The capabilities of `keep` (bit masks) are all that the calling process, of one thread, has from now on.
pub fn keep_capabilities(keep: u64) -> io::Result<()> {
    for capability in 0..64 {
        if keep >> capability & 1 == 0 {
            // SAFETY: takes plain integers. What the kernel does not know or the process lacks, it need not drop.
            unsafe { libc::prctl(libc::PR_CAPBSET_DROP, capability, 0, 0, 0) };
        }
    }
    let head = [CAPABILITY_VERSION_3, 0];
    let (low, high) = (keep as u32, (keep >> 32) as u32);
    // Effective, permitted and inheritable, of the lower and then of the upper 32 capabilities.
    let sets = [low, low, 0, high, high, 0];
    // SAFETY: `capset` reads a head of two words and, in version 3, two times three words.
    let done = unsafe { libc::syscall(libc::SYS_capset, head.as_ptr(), sets.as_ptr()) };
    if done == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

const BPF_PROG_LOAD: libc::c_int = 5;
const BPF_PROG_ATTACH: libc::c_int = 8;
const BPF_PROG_DETACH: libc::c_int = 9;
const BPF_LINK_GET_FD_BY_ID: libc::c_int = 30;
const BPF_LINK_GET_NEXT_ID: libc::c_int = 31;
const BPF_PROG_TYPE_CGROUP_SOCK_ADDR: u32 = 18;
const BPF_CGROUP_INET4_CONNECT: u32 = 10;

/// The largest part of `union bpf_attr` used here.
type Attributes = [u32; 32];

fn set_pointer(attributes: &mut Attributes, word: usize, pointer: *const u8) {
    let address = pointer as u64;
    attributes[word] = address as u32;
    attributes[word + 1] = (address >> 32) as u32;
}

/// Loads a `connect4` program that allows everything.
pub fn load_allow_all() -> io::Result<OwnedFd> {
    // r0 = 1; exit
    let code: [u64; 2] = [0x0000_0001_0000_00b7, 0x95];
    let licence = c"GPL";
    let mut attributes: Attributes = [0; 32];
    attributes[0] = BPF_PROG_TYPE_CGROUP_SOCK_ADDR;
    attributes[1] = code.len() as u32;
    set_pointer(&mut attributes, 2, code.as_ptr().cast());
    set_pointer(&mut attributes, 4, licence.as_ptr().cast());
    // expected_attach_type, at byte 68
    attributes[17] = BPF_CGROUP_INET4_CONNECT;
    bpf(BPF_PROG_LOAD, &mut attributes).map(descriptor)
}

/// Attaches a `connect4` program to the cgroup by the old call, with these flags.
pub fn attach_connect4(cgroup: &File, program: &OwnedFd, flags: u32) -> io::Result<()> {
    let mut attributes: Attributes = [0; 32];
    attributes[0] = cgroup.as_raw_fd() as u32;
    attributes[1] = program.as_raw_fd() as u32;
    attributes[2] = BPF_CGROUP_INET4_CONNECT;
    attributes[3] = flags;
    bpf(BPF_PROG_ATTACH, &mut attributes).map(drop)
}

/// Detaches a `connect4` program from the cgroup: this one, or whichever is there.
pub fn detach_connect4(cgroup: &File, program: Option<&OwnedFd>) -> io::Result<()> {
    let mut attributes: Attributes = [0; 32];
    attributes[0] = cgroup.as_raw_fd() as u32;
    attributes[1] = program.map_or(0, |program| program.as_raw_fd() as u32);
    attributes[2] = BPF_CGROUP_INET4_CONNECT;
    bpf(BPF_PROG_DETACH, &mut attributes).map(drop)
}

/// Opens some link of the host, as who wants to detach it must.
pub fn open_some_link() -> io::Result<OwnedFd> {
    let mut attributes: Attributes = [0; 32];
    bpf(BPF_LINK_GET_NEXT_ID, &mut attributes)?;
    let mut by_id: Attributes = [0; 32];
    by_id[0] = attributes[1];
    bpf(BPF_LINK_GET_FD_BY_ID, &mut by_id).map(descriptor)
}

/// Passes a descriptor to the other end (`SCM_RIGHTS`).
pub fn pass_socket(over: &UnixStream, socket: &impl AsFd) -> io::Result<()> {
    let descriptors = [socket.as_fd().as_raw_fd()];
    let rights = [ControlMessage::ScmRights(&descriptors)];
    let part = [IoSlice::new(&[1])];
    sendmsg::<()>(over.as_raw_fd(), &part, &rights, MsgFlags::empty(), None)?;
    Ok(())
}

/// Takes a descriptor that the other end passes.
pub fn take_socket(over: &UnixStream) -> io::Result<OwnedFd> {
    let mut byte = [0];
    let mut part = [IoSliceMut::new(&mut byte)];
    let mut room = cmsg_space!(RawFd);
    let message = recvmsg::<()>(over.as_raw_fd(), &mut part, Some(&mut room), MsgFlags::empty())?;
    let passed = message.cmsgs()?.find_map(|control| match control {
        ControlMessageOwned::ScmRights(descriptors) => descriptors.first().copied(),
        _ => None,
    });
    let passed = passed.ok_or_else(|| io::Error::other("no descriptor came"))?;
    Ok(descriptor(passed))
}
