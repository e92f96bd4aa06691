//! As much of io_uring as it takes to connect a socket with it.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};

use socket2::SockAddr;

const IORING_OP_CONNECT: u8 = 16;
const IORING_SETUP_SQPOLL: u32 = 2;
const IORING_ENTER_GETEVENTS: libc::c_uint = 1;
const IORING_ENTER_SQ_WAKEUP: libc::c_uint = 2;
const IORING_OFF_SQ_RING: i64 = 0;
const IORING_OFF_CQ_RING: i64 = 0x800_0000;
const IORING_OFF_SQES: i64 = 0x1000_0000;

#[repr(C)]
#[derive(Default, Clone, Copy)]
struct SqOffsets {
    head: u32,
    tail: u32,
    ring_mask: u32,
    ring_entries: u32,
    flags: u32,
    dropped: u32,
    array: u32,
    reserved: u32,
    user_addr: u64,
}

#[repr(C)]
#[derive(Default, Clone, Copy)]
struct CqOffsets {
    head: u32,
    tail: u32,
    ring_mask: u32,
    ring_entries: u32,
    overflow: u32,
    cqes: u32,
    flags: u32,
    reserved: u32,
    user_addr: u64,
}

#[repr(C)]
#[derive(Default, Clone, Copy)]
struct Params {
    sq_entries: u32,
    cq_entries: u32,
    flags: u32,
    sq_thread_cpu: u32,
    sq_thread_idle: u32,
    features: u32,
    wq_fd: u32,
    reserved: [u32; 3],
    sq: SqOffsets,
    cq: CqOffsets,
}

#[repr(C)]
#[derive(Default, Clone, Copy)]
struct Submission {
    opcode: u8,
    flags: u8,
    ioprio: u16,
    fd: i32,
    offset: u64,
    address: u64,
    length: u32,
    op_flags: u32,
    user_data: u64,
    rest: [u64; 3],
}

#[repr(C)]
#[derive(Default, Clone, Copy)]
struct Completion {
    user_data: u64,
    result: i32,
    flags: u32,
}

const _: () = assert!(size_of::<Params>() == 120 && size_of::<Submission>() == 64 && size_of::<Completion>() == 16);

/// Connects `socket` to `peer` by a ring of its own and waits for the completion; the error is the completion's. With
/// `polled` a thread of the kernel's makes the call.
pub(crate) fn uring_connect(socket: &impl AsFd, peer: SocketAddr, polled: bool) -> io::Result<()> {
    let mut params = Params {
        flags: if polled { IORING_SETUP_SQPOLL } else { 0 },
        ..Params::default()
    };
    // SAFETY: io_uring_setup reads and writes one `io_uring_params`, whose layout is asserted above.
    let fd = unsafe { libc::syscall(libc::SYS_io_uring_setup, 1, &raw mut params) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    let fd = i32::try_from(fd).map_err(io::Error::other)?;
    // SAFETY: the descriptor was just made and belongs to nobody else.
    let ring = unsafe { OwnedFd::from_raw_fd(fd) };

    let sq_length = params.sq.array as usize + params.sq_entries as usize * size_of::<u32>();
    let cq_length = params.cq.cqes as usize + params.cq_entries as usize * size_of::<Completion>();
    let sq = Mapping::new(&ring, sq_length, IORING_OFF_SQ_RING)?;
    let cq = Mapping::new(&ring, cq_length, IORING_OFF_CQ_RING)?;
    let sqes = Mapping::new(
        &ring,
        params.sq_entries as usize * size_of::<Submission>(),
        IORING_OFF_SQES,
    )?;

    let address = SockAddr::from(peer);
    let submission = Submission {
        opcode: IORING_OP_CONNECT,
        fd: socket.as_fd().as_raw_fd(),
        // For connect, the offset field carries the address' length.
        offset: u64::from(address.len()),
        address: address.as_ptr() as u64,
        ..Submission::default()
    };
    // SAFETY: slot 0 of the mapped array of submissions; the kernel reads it only after the tail has moved.
    unsafe { sqes.at::<Submission>(0).write(submission) };
    // SAFETY: the ring's index array is within the mapping; entry 0 names slot 0.
    unsafe { sq.at::<u32>(params.sq.array as usize).write(0) };
    sq.atomic(params.sq.tail).store(1, Ordering::Release);

    let wake = if polled { IORING_ENTER_SQ_WAKEUP } else { 0 };
    let mut to_submit = 1;
    loop {
        // SAFETY: plain integers and no signal mask; the address the kernel reads outlives the wait.
        let entered = unsafe {
            libc::syscall(
                libc::SYS_io_uring_enter,
                ring.as_raw_fd(),
                to_submit,
                1,
                IORING_ENTER_GETEVENTS | wake,
                std::ptr::null::<u8>(),
                0,
            )
        };
        match entered {
            0.. => to_submit = 0,
            _ => {
                let error = io::Error::last_os_error();
                if error.kind() != io::ErrorKind::Interrupted {
                    return Err(error);
                }
            }
        }
        // The kernel's own work for the ring may end the wait before the connection is there.
        if cq.atomic(params.cq.tail).load(Ordering::Acquire) > 0 {
            break;
        }
    }
    // SAFETY: the tail says that completion 0, which lies within the mapping, has been written.
    let completion = unsafe { cq.at::<Completion>(params.cq.cqes as usize).read() };
    if completion.result < 0 {
        Err(io::Error::from_raw_os_error(-completion.result))
    } else {
        Ok(())
    }
}

/// A part of the ring shared with the kernel.
struct Mapping {
    start: NonNull<libc::c_void>,
    length: usize,
}

impl Mapping {
    fn new(ring: &OwnedFd, length: usize, offset: i64) -> io::Result<Self> {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_SHARED | libc::MAP_POPULATE;
        // SAFETY: a new mapping at an address that the kernel chooses.
        let start = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                length,
                protection,
                flags,
                ring.as_raw_fd(),
                offset,
            )
        };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let start = NonNull::new(start).ok_or_else(|| io::Error::other("the ring was mapped at address 0"))?;
        Ok(Self { start, length })
    }

    fn at<T>(&self, offset: usize) -> *mut T {
        assert!(offset + size_of::<T>() <= self.length, "outside the ring");
        self.start.as_ptr().cast::<u8>().wrapping_add(offset).cast()
    }

    fn atomic(&self, offset: u32) -> &AtomicU32 {
        // SAFETY: within the mapping, aligned as the kernel lays it out, and only accessed atomically.
        unsafe { AtomicU32::from_ptr(self.at::<u32>(offset as usize)) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: unmaps exactly what was mapped; no reference into it outlives self.
        unsafe { libc::munmap(self.start.as_ptr(), self.length) };
    }
}
