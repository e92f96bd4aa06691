//! Whether a pod is captured: a real connection from within its network namespace, by a process below the pods' cgroup,
//! through the hooks that its own connections pass, to the worker that answers.

use std::collections::HashSet;
use std::fs;
use std::io::{self, Read as _};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream};
use std::os::fd::AsFd as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use nix::sched::{CloneFlags, setns};
use thiserror::Error;

use super::LocalPod;
use super::self_test::ScratchCgroup;
use crate::steer::{OriginalDst, SteerError, cgroup_id};

/// Where test connections are going, of the ranges for documentation (RFC 5737, RFC 3849): nobody is there, and whoever
/// is not captured gets no answer.
pub const CAPTURE_TEST: [SocketAddr; 2] = [
    SocketAddr::new(IpAddr::V4(Ipv4Addr::new(198, 51, 100, 1)), 15),
    SocketAddr::new(IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 15)), 15),
];
const DEADLINE: Duration = Duration::from_secs(5);

/// Why a pod is not known to be captured.
#[derive(Debug, Error)]
pub enum CaptureTestError {
    /// The test's cgroup cannot be used.
    #[error(transparent)]
    Cgroup(#[from] SteerError),
    /// The test's process cannot be started.
    #[error("starting a process to test whether a pod is captured: {0}")]
    Start(io::Error),
    /// A connection from within the pod did not get to this proxy.
    #[error("a test connection from within the pod was not captured: {0}")]
    NotCaptured(String),
}

/// The tests that are under way. Clones are one.
#[derive(Debug, Clone, Default)]
pub struct CaptureTests(Arc<Mutex<HashSet<u64>>>);

impl CaptureTests {
    /// Whether a captured connection is one of a test: it comes from a cgroup that is a test's.
    pub fn is_test(&self, original: &OriginalDst) -> bool {
        CAPTURE_TEST.contains(&original.addr) && self.cgroups().contains(&original.cgroup)
    }

    /// Connects from within the pod, and sees that the worker answers that has it. Takes milliseconds where all is well,
    /// and seconds where it is not. The pod must have an address.
    pub fn run(&self, pods_cgroup: &Path, pod: &LocalPod) -> Result<(), CaptureTestError> {
        let is_v4 = pod.workload().addresses.iter().any(IpAddr::is_ipv4);
        let [v4, v6] = CAPTURE_TEST;
        let to = if is_v4 { v4 } else { v6 };
        let cgroup = ScratchCgroup::make(pods_cgroup)?;
        let id = cgroup_id(cgroup.path())?;
        let netns = pod
            .netns()
            .as_fd()
            .try_clone_to_owned()
            .map_err(CaptureTestError::Start)?;
        self.cgroups().insert(id);
        let output = Command::new("/proc/self/exe")
            .arg("capture-test")
            .arg(cgroup.path())
            .arg(to.to_string())
            .stdin(netns)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .output();
        self.cgroups().remove(&id);
        let output = output.map_err(CaptureTestError::Start)?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
        match text(&output.stdout) {
            answer if output.status.success() && answer == **pod.uid() => Ok(()),
            answer if output.status.success() => {
                let what = format!("it was answered {answer:?} in place of the pod's uid");
                Err(CaptureTestError::NotCaptured(what))
            }
            _ => Err(CaptureTestError::NotCaptured(text(&output.stderr))),
        }
    }

    fn cgroups(&self) -> std::sync::MutexGuard<'_, HashSet<u64>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The child's part: goes to the cgroup and, by its standard input, to the network namespace; connects, and says what it
/// is told.
pub fn capture_test_connect(cgroup: &Path, to: SocketAddr) -> io::Result<()> {
    fs::write(cgroup.join("cgroup.procs"), "0")?;
    setns(io::stdin().as_fd(), CloneFlags::CLONE_NEWNET)?;
    let mut stream = TcpStream::connect_timeout(&to, DEADLINE)?;
    stream.set_read_timeout(Some(DEADLINE))?;
    let seen = stream.peer_addr()?;
    if seen != to {
        return Err(io::Error::other(format!("getpeername shows {seen} in place of {to}")));
    }
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    println!("{answer}");
    Ok(())
}
