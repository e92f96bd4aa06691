//! The self-test: a real connection, captured in a namespace of its own, before the proxy calls itself ready.

use std::fs;
use std::io::{self, BufRead as _, Write as _};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use nix::sched::{CloneFlags, unshare};

use super::{Netns, listen_in};
use crate::steer::{ListenerFds, PodSteering, SteerError, Steering, cgroup_id, is_cgroup2};

/// The scratch pod's own address, of the range for documentation (RFC 5737).
const POD: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);
/// Where the scratch pod's connection is going; nobody is there, and nothing leads there.
const DESTINATION: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(198, 51, 100, 1)), 15);
const DEADLINE: Duration = Duration::from_secs(5);

/// Connects from a scratch pod and sees that the connection arrives here, with its destination and its author.
pub fn self_test(steering: &Steering, pods_cgroup: &Path) -> Result<(), SteerError> {
    run(steering, &ScratchCgroup::make(pods_cgroup)?)
}

/// The same with programs and maps of its own, beside those that are in charge, which it does not touch.
pub fn isolated_self_test(pods_cgroup: &Path) -> Result<(), SteerError> {
    // Not among the pods, where the programs in charge would have their say.
    let beside = pods_cgroup
        .parent()
        .filter(|parent| is_cgroup2(parent).unwrap_or(false));
    let cgroup = ScratchCgroup::make(beside.unwrap_or(pods_cgroup))?;
    run(&Steering::isolated(&cgroup.0)?, &cgroup)
}

fn run(steering: &Steering, cgroup: &ScratchCgroup) -> Result<(), SteerError> {
    // On a thread of its own, which ends inside the namespace; with it and the child goes the namespace.
    thread::scope(|scope| scope.spawn(|| in_scratch_netns(steering, cgroup)).join())
        .unwrap_or_else(|_| Err(SteerError::SelfTest("the test's thread panicked".to_owned())))
}

/// The child's part: waits until it is in its place, then connects.
pub fn self_test_connect() -> io::Result<()> {
    io::stdin().lock().read_line(&mut String::new())?;
    let stream = TcpStream::connect_timeout(&DESTINATION, DEADLINE)?;
    println!("{}", stream.peer_addr()?);
    Ok(())
}

fn in_scratch_netns(steering: &Steering, cgroup: &ScratchCgroup) -> Result<(), SteerError> {
    unshare(CloneFlags::CLONE_NEWNET).map_err(|error| failed("making a network namespace", &error))?;
    let netns = Netns::current().map_err(|error| failed("opening the new namespace", &error))?;
    super::socket::bring_up_loopback(POD).map_err(|error| failed("bringing up the loopback", &error))?;
    let listeners = listen_in(&netns, 1).map_err(|error| failed("making listeners", &error))?;
    let Some(listeners) = listeners.first() else {
        unreachable!("one was asked for")
    };
    steering.attach_pod(&PodSteering {
        namespace: "adit",
        name: "self-test",
        netns: netns.as_fd(),
        cookie: netns.cookie(),
        identity: None,
        same_node_encrypted: false,
        exclusions: None,
        kept: &[],
        addresses: &[POD.into()],
        local_ports: netns
            .local_port_range()
            .map_err(|error| failed("reading the port range", &error))?,
        listeners: Some(ListenerFds {
            outbound: listeners.outbound.as_fd(),
            hbone: listeners.hbone.as_fd(),
            plaintext: listeners.plaintext.as_fd(),
        }),
    })?;
    let result = connect_captured(steering, cgroup, netns.cookie(), &listeners.outbound);
    steering.release_pod(netns.cookie());
    result
}

fn connect_captured(
    steering: &Steering,
    cgroup: &ScratchCgroup,
    cookie: u64,
    outbound: &TcpListener,
) -> Result<(), SteerError> {
    let mut child = KillOnDrop(
        Command::new("/proc/self/exe")
            .arg("self-test-connect")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|error| failed("starting the scratch pod's process", &error))?,
    );
    fs::write(cgroup.0.join("cgroup.procs"), child.0.id().to_string())
        .map_err(|error| failed("moving it to its cgroup", &error))?;
    if let Some(stdin) = child.0.stdin.as_mut() {
        stdin
            .write_all(b"\n")
            .map_err(|error| failed("starting the connection", &error))?;
    }

    let deadline = Instant::now() + DEADLINE;
    let (stream, from) = loop {
        match outbound.accept() {
            Ok(accepted) => break accepted,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock && Instant::now() < deadline => {
                thread::sleep(Duration::from_millis(1));
            }
            Err(error) => return Err(failed("the connection was not captured", &error)),
        }
    };
    let local = stream
        .local_addr()
        .map_err(|error| failed("reading the captured connection's address", &error))?;
    let from = SocketAddr::new(from.ip().to_canonical(), from.port());
    let found = steering.flows().take(cookie, from, local.port())?;
    // By its cgroup: numbers of processes are another PID namespace's where this node is a container itself.
    let author = cgroup_id(&cgroup.0)?;
    match found {
        Some(original) if original.addr == DESTINATION && original.cgroup == author => {}
        Some(other) => {
            return Err(failed(
                "the captured connection's record is wrong",
                &format!("{other:?}"),
            ));
        }
        None => return Err(failed("the captured connection", &"has no record")),
    }
    let mut seen = String::new();
    if let Some(stdout) = child.0.stdout.take() {
        io::BufReader::new(stdout)
            .read_line(&mut seen)
            .map_err(|error| failed("hearing from the child", &error))?;
    }
    if seen.trim() != DESTINATION.to_string() {
        return Err(failed("getpeername shows another address", &seen.trim()));
    }
    Ok(())
}

fn failed(doing: &str, error: &dyn std::fmt::Display) -> SteerError {
    SteerError::SelfTest(format!("{doing}: {error}"))
}

/// A cgroup for the length of the test.
pub(super) struct ScratchCgroup(PathBuf);

impl ScratchCgroup {
    pub(super) fn make(pods: &Path) -> Result<Self, SteerError> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let path = pods.join(format!("adit-self-test-{}-{number}", std::process::id()));
        match fs::create_dir(&path) {
            Ok(()) => Ok(Self(path)),
            Err(error) => Err(SteerError::Cgroup { path, error }),
        }
    }

    pub(super) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for ScratchCgroup {
    fn drop(&mut self) {
        let deadline = Instant::now() + DEADLINE;
        // The process that was in it may take a moment to be gone.
        while let Err(error) = fs::remove_dir(&self.0) {
            if error.raw_os_error() != Some(libc::EBUSY) || Instant::now() > deadline {
                tracing::warn!("removing {}: {error}", self.0.display());
                return;
            }
            thread::sleep(Duration::from_millis(1));
        }
    }
}

struct KillOnDrop(Child);

impl Drop for KillOnDrop {
    fn drop(&mut self) {
        // Gone already, most likely.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
