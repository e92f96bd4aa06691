//! What can go wrong between the proxy and its kernel programs.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

/// Why the kernel programs could not be put in place.
#[derive(Debug, Error)]
pub enum SteerError {
    /// The kernel lacks something that the programs need.
    #[error("this kernel lacks {0}; Adit needs Linux 6.1 or newer with BPF and cgroup v2")]
    Unsupported(String),
    /// The kernel could not be asked what it has; most often a capability is missing.
    #[error("asking the kernel whether it has {what}: {error}; Adit needs CAP_BPF, CAP_NET_ADMIN and CAP_SYS_ADMIN")]
    Probe {
        /// The feature asked for.
        what: String,
        /// The kernel's answer.
        error: String,
    },
    /// The pods' cgroup cannot be used.
    #[error("the pods' cgroup {path}: {error}; name a directory of the cgroup v2 hierarchy with --pods-cgroup")]
    Cgroup {
        /// The directory.
        path: PathBuf,
        /// What the kernel says.
        error: io::Error,
    },
    /// The kubelet's cgroup cannot be used.
    #[error(
        "the kubelet's cgroup {path}: {error}; name its directory of the cgroup v2 hierarchy with --kubelet-cgroup"
    )]
    KubeletCgroup {
        /// The directory.
        path: PathBuf,
        /// What the kernel says.
        error: io::Error,
    },
    /// There is no process by which the kubelet's cgroup could be found.
    #[error(
        "finding the kubelet's cgroup: no process {0:?} outside pods, or several in different cgroups; name the \
         directory with --kubelet-cgroup"
    )]
    NoKubelet(String),
    /// No kubelet's cgroup of pods is there.
    #[error(
        "below {0} there is neither kubepods.slice nor kubepods: does a kubelet run here, and is the host's cgroup v2 mounted? \
             --pods-cgroup names another directory"
    )]
    NoPodsCgroup(PathBuf),
    /// This process's own cgroup cannot be found.
    #[error("finding this process's own cgroup: {0}")]
    OwnCgroup(String),
    /// The object is not what this binary takes for one.
    #[error("reading the kernel object: {0}; build it and this binary from the same source")]
    Object(String),
    /// A map could not be made.
    #[error("making the map {name}: {error}; Adit needs CAP_BPF and memory for it")]
    MakeMap {
        /// The map's name.
        name: String,
        /// What the kernel says.
        error: io::Error,
    },
    /// The folder for pins is not on a bpffs.
    #[error(
        "{0} is not on a bpffs, which keeps maps and programs while the proxy is away; \
             mount one on the node, not in a container: mount -t bpf bpf /sys/fs/bpf, or name a folder of another \
             with --bpf-dir"
    )]
    NotBpffs(PathBuf),
    /// A pin could not be made, read or removed.
    #[error("{doing} {path}: {error}")]
    Pin {
        /// What was tried.
        doing: &'static str,
        /// On what.
        path: PathBuf,
        /// What the kernel says.
        error: io::Error,
    },
    /// A pinned map is not what this version of Adit takes it for.
    #[error(
        "the pinned map {path} has {found}, not {expected}; it is not of this version of Adit: \
             remove it with `adit node --uninstall`, which lets all pods go"
    )]
    PinnedMap {
        /// Where it is pinned.
        path: PathBuf,
        /// What it is.
        found: String,
        /// What it should be.
        expected: String,
    },
    /// A program was refused.
    #[error("loading the kernel program {program}: {error}; the verifier says: {}", last_lines(.log))]
    Program {
        /// The program's name.
        program: &'static str,
        /// What the kernel says.
        error: io::Error,
        /// All of the verifier's words.
        log: String,
    },
    /// A program could not be attached.
    #[error("attaching the kernel program {program} to {target}: {error}")]
    Attach {
        /// The program's name.
        program: &'static str,
        /// To what.
        target: &'static str,
        /// What the kernel says.
        error: io::Error,
    },
    /// A program or map is not in the object; the object and this binary were not built together.
    #[error("the kernel object lacks {0}; build it and this binary from the same source")]
    Missing(&'static str),
    /// The kernel attached a program somewhere else.
    #[error("kernel program {program} is attached to cgroup {actual}, not {intended}")]
    Misattached {
        /// The program's name.
        program: &'static str,
        /// Where it is.
        actual: u64,
        /// Where it should be.
        intended: u64,
    },
    /// A map did not take a change.
    #[error("{doing}: {error}")]
    Map {
        /// What was tried.
        doing: &'static str,
        /// What the kernel says.
        error: io::Error,
    },
    /// A port of a service has more endpoints than a list holds.
    #[error("{count} endpoints of one port, the most that the kernel chooses from is {most}")]
    TooManyEndpoints {
        /// How many it has.
        count: usize,
        /// How many there may be.
        most: usize,
    },
    /// The node has as many enrolled pods as there are places.
    #[error("this node has {0} enrolled pods already, the most that Adit takes")]
    TooManyPods(u32),
    /// The self-test did not see what it should.
    #[error("self-test of the kernel programs: {0}")]
    SelfTest(String),
}

/// What makes an error of the kernel's one of a map, by what was tried on it.
pub(super) fn at(doing: &'static str) -> impl Fn(io::Error) -> SteerError + Copy {
    move |error| SteerError::Map { doing, error }
}

/// The end of the verifier's log, which tells the reason.
fn last_lines(log: &str) -> String {
    let lines: Vec<&str> = log.lines().collect();
    lines[lines.len().saturating_sub(8)..].join(" | ")
}
