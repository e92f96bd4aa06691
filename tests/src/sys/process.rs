//! Processes that begin their life inside a pod.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use nix::unistd::Pid;

/// Where a process belongs: a network namespace and a cgroup, both held open.
#[derive(Debug, Clone)]
pub(crate) struct Place {
    netns: Arc<File>,
    procs: Arc<File>,
}

impl Place {
    /// Opens the namespace at `netns` and the cgroup in the folder `cgroup`.
    pub(crate) fn open(netns: &Path, cgroup: &Path) -> anyhow::Result<Self> {
        let file = File::open(netns).with_context(|| format!("open network namespace {}", netns.display()))?;
        let path = cgroup.join("cgroup.procs");
        let procs = OpenOptions::new()
            .write(true)
            .open(&path)
            .with_context(|| format!("open cgroup {}", path.display()))?;
        Ok(Self {
            netns: Arc::new(file),
            procs: Arc::new(procs),
        })
    }

    /// The same cgroup with the namespace at `netns`.
    pub(crate) fn with_netns(&self, netns: &Path) -> anyhow::Result<Self> {
        let file = File::open(netns).with_context(|| format!("open network namespace {}", netns.display()))?;
        Ok(Self {
            netns: Arc::new(file),
            procs: self.procs.clone(),
        })
    }

    /// Makes `command` start in this place and die with the thread that starts it; with `group` in a process group
    /// of its own, so that it can be killed with all it started.
    pub(crate) fn enter_on_exec(&self, command: &mut Command, group: bool) {
        let place = self.clone();
        let parent = nix::unistd::getpid();
        let enter = move || {
            if group {
                nix::unistd::setpgid(Pid::from_raw(0), Pid::from_raw(0))?;
            }
            place.enter(parent)
        };
        // SAFETY: the closure runs between fork and exec and only makes system calls: no allocation, no lock.
        unsafe {
            command.pre_exec(enter);
        }
    }

    /// Moves the calling process, which must have a single thread, to this place. Async-signal-safe.
    fn enter(&self, parent: Pid) -> io::Result<()> {
        nix::sys::prctl::set_pdeathsig(nix::sys::signal::Signal::SIGKILL)?;
        if nix::unistd::getppid() != parent {
            // The parent died before the signal was asked for.
            return Err(io::Error::from_raw_os_error(libc::ESRCH));
        }
        // The namespace first: the test's own is not the node's, and would be taken for the pod's if it were seen in its cgroup.
        nix::sched::setns(&*self.netns, nix::sched::CloneFlags::CLONE_NEWNET)?;
        // "0" is the writer itself.
        nix::unistd::write(&*self.procs, b"0")?;
        Ok(())
    }
}

/// Forks a child that enters `place`, runs `body` with its end of a stream to the caller and ends. The child dies
/// with the calling thread. If the place cannot be entered, `body` is told.
pub(crate) fn fork_into(
    place: &Place,
    body: impl FnOnce(UnixStream, io::Result<()>),
) -> io::Result<(Pid, UnixStream, OwnedFd)> {
    let (ours, theirs) = UnixStream::pair()?;
    let parent = nix::unistd::getpid();
    // SAFETY: the child of a process with threads has this thread only. glibc makes its allocator usable after fork;
    // beyond it the child touches no lock that another thread may have held: it does not use stdout, stderr or the
    // test harness, and leaves with `_exit`, which runs no destructors or exit handlers of the parent.
    let pid = unsafe { libc::fork() };
    match pid {
        -1 => Err(io::Error::last_os_error()),
        0 => {
            drop(ours);
            body(theirs, place.enter(parent));
            // SAFETY: ends the process at once and has no preconditions.
            unsafe { libc::_exit(0) }
        }
        pid => {
            let pid = Pid::from_raw(pid);
            let pidfd = pidfd(pid)?;
            Ok((pid, ours, pidfd))
        }
    }
}

/// A descriptor that becomes readable when the child `pid`, not yet waited for, ends.
pub(crate) fn pidfd(pid: Pid) -> io::Result<OwnedFd> {
    // SAFETY: pidfd_open takes two integers and returns a new descriptor or -1.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid.as_raw(), 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    let fd = i32::try_from(fd).map_err(io::Error::other)?;
    // SAFETY: the descriptor was just made and belongs to nobody else.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Waits until one of `fds` is readable or `timeout` has passed; says which are readable or closed.
pub(crate) fn wait_readable<const N: usize>(fds: [BorrowedFd<'_>; N], timeout: Duration) -> io::Result<[bool; N]> {
    wait_for_events(fds, libc::POLLIN, timeout)
}

/// Waits until `fd` is writable or has failed, at most so long; says whether it is.
pub(crate) fn wait_writable(fd: BorrowedFd<'_>, timeout: Duration) -> io::Result<bool> {
    wait_for_events([fd], libc::POLLOUT, timeout).map(|[ready]| ready)
}

fn wait_for_events<const N: usize>(
    fds: [BorrowedFd<'_>; N],
    events: libc::c_short,
    timeout: Duration,
) -> io::Result<[bool; N]> {
    let mut polled = fds.map(|fd| libc::pollfd {
        fd: fd.as_raw_fd(),
        events,
        revents: 0,
    });
    let timeout = i32::try_from(timeout.as_millis()).unwrap_or(i32::MAX).saturating_add(1);
    // SAFETY: `polled` is an array of N pollfd that outlives the call, of descriptors borrowed for as long.
    let ready = unsafe { libc::poll(polled.as_mut_ptr(), N as libc::nfds_t, timeout) };
    if ready < 0 {
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
    Ok(polled.map(|fd| ready > 0 && fd.revents != 0))
}
