//! The user-space half of the kernel programs: load, attach, verify, and the maps.
//!
//! The cgroup programs are loaded once and attached to the cgroup that holds all pods. The socket lookup has an
//! instance for each enrolled pod, told by constants which pod it is; all share the maps, through pins in a bpf file
//! system that is mounted nowhere and goes away with this process.

mod cgroup;
mod error;
mod flows;
mod log;
mod pod;
mod probe;
mod sys;

use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use aya::programs::links::FdLink;
use aya::programs::{CgroupAttachMode, CgroupSockAddr, SockOps};
use aya::{Ebpf, EbpfLoader};

pub use cgroup::{cgroup_id, own_cgroup_id};
pub use error::SteerError;
pub use flows::{Clients, Flows, OriginalDst};
pub use log::{LogScope, ProgramLog, forward_logs};
pub use pod::{PodAttachment, PodSteering};

use pod::Slots;

/// The kernel programs, built by `cargo xtask build-ebpf`.
static OBJECT: &[u8] = aya::include_bytes_aligned!(env!("ADIT_BPF_OBJECT"));

/// The maps, all shared between the programs' instances.
const MAPS: [&str; 7] = [
    "adit_pods",
    "adit_addrs",
    "adit_flows",
    "adit_clients",
    "adit_listeners",
    "adit_sockets",
    // The log's ring has the name that aya-log gives it.
    "AYA_LOGS",
];

/// Where and how to steer.
#[derive(Debug, Clone)]
pub struct SteerSettings {
    /// The cgroup v2 directory below which all pods' cgroups lie.
    pub pods_cgroup: PathBuf,
    /// For which pods the programs log their decisions.
    pub log: LogScope,
}

/// The programs in their place. Dropping this detaches them; pods are then as without Adit.
pub struct Steering {
    /// The cgroup programs' links, in the order in which they are detached: nothing is captured any more before the
    /// rest goes.
    _links: Vec<FdLink>,
    ebpf: Mutex<Ebpf>,
    maps: Arc<Maps>,
    slots: Arc<Slots>,
    log: LogScope,
    proxy_cgroup: u64,
}

/// The maps' descriptors, and where they are pinned.
pub(crate) struct Maps {
    bpffs: OwnedFd,
    pods: OwnedFd,
    addrs: OwnedFd,
    flows: Arc<OwnedFd>,
    clients: Arc<OwnedFd>,
    listeners: OwnedFd,
}

impl Steering {
    /// Probes the kernel, loads the programs, attaches them and verifies where they are.
    pub fn start(settings: &SteerSettings) -> Result<Self, SteerError> {
        probe::probe()?;
        let proxy_cgroup = own_cgroup_id()?;
        let at_cgroup = |error| SteerError::Cgroup {
            path: settings.pods_cgroup.clone(),
            error,
        };
        let cgroup = File::open(&settings.pods_cgroup).map_err(at_cgroup)?;
        let intended = cgroup_id(&settings.pods_cgroup)?;

        let bpffs = sys::private_bpffs().map_err(|error| SteerError::Map {
            doing: "making a bpf file system",
            error,
        })?;
        let mut ebpf = loader(&bpffs, &settings.log).load(OBJECT)?;
        // The other way round: what a capture needs is there before anything is captured.
        let mut links = vec![attach_sock_ops(&mut ebpf, &cgroup, intended)?];
        for name in [
            "adit_getpeername4",
            "adit_getpeername6",
            "adit_connect4",
            "adit_connect6",
        ] {
            links.insert(0, attach_sock_addr(&mut ebpf, name, &cgroup, intended)?);
        }
        let maps = Maps::of(&mut ebpf, bpffs)?;
        Ok(Self {
            _links: links,
            ebpf: Mutex::new(ebpf),
            maps: Arc::new(maps),
            slots: Arc::new(Slots::default()),
            log: settings.log.clone(),
            proxy_cgroup,
        })
    }

    /// Where captured connections' true destinations are found.
    pub fn flows(&self) -> Flows {
        Flows::new(Arc::clone(&self.maps.flows))
    }

    /// Where the true clients of the proxy's own connections to applications are told.
    pub fn clients(&self) -> Clients {
        Clients::new(Arc::clone(&self.maps.clients))
    }

    /// The ring that the programs log to; once, and not where nothing is logged.
    pub fn take_log(&self) -> Option<ProgramLog> {
        if self.log == LogScope::None {
            return None;
        }
        ProgramLog::take(&mut self.ebpf.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Maps {
    fn of(ebpf: &mut Ebpf, bpffs: OwnedFd) -> Result<Self, SteerError> {
        let fd = |name: &'static str| {
            let map = ebpf.map(name).ok_or(SteerError::Missing(name))?;
            duplicate(map).map_err(|error| SteerError::Map {
                doing: "duplicating a map's descriptor",
                error,
            })
        };
        Ok(Self {
            pods: fd("adit_pods")?,
            addrs: fd("adit_addrs")?,
            flows: Arc::new(fd("adit_flows")?),
            clients: Arc::new(fd("adit_clients")?),
            listeners: fd("adit_listeners")?,
            bpffs,
        })
    }
}

fn duplicate(map: &aya::maps::Map) -> std::io::Result<OwnedFd> {
    use std::os::fd::AsFd as _;

    use aya::maps::Map;
    match map {
        Map::HashMap(data) | Map::SockMap(data) | Map::SkStorage(data) => data.fd().as_fd().try_clone_to_owned(),
        _ => Err(std::io::Error::other("an unexpected kind of map")),
    }
}

/// A loader under which every instance shares one set of maps.
fn loader(bpffs: &OwnedFd, log: &LogScope) -> EbpfLoader<'static> {
    let mut loader = EbpfLoader::new();
    if *log == LogScope::None {
        // A constant to the verifier, which then drops the logging from the programs.
        loader.override_global("AYA_LOG_LEVEL", &0_u8, false);
    }
    for name in MAPS {
        loader.map_pin_path(
            name,
            PathBuf::from(format!("/proc/self/fd/{}/{name}", bpffs.as_raw_fd())),
        );
    }
    loader
}

fn attach_sock_ops(ebpf: &mut Ebpf, cgroup: &File, intended: u64) -> Result<FdLink, SteerError> {
    const NAME: &str = "adit_sock_ops";
    let at = |error| SteerError::Program { program: NAME, error };
    let program: &mut SockOps = ebpf
        .program_mut(NAME)
        .ok_or(SteerError::Missing(NAME))?
        .try_into()
        .map_err(at)?;
    program.load().map_err(at)?;
    let link = program.attach(cgroup, CgroupAttachMode::Single).map_err(at)?;
    let link = program.take_link(link).map_err(at)?;
    verified(
        NAME,
        link.try_into()
            .map_err(|_| SteerError::Unsupported("bpf_link for cgroups".to_owned()))?,
        intended,
    )
}

fn attach_sock_addr(ebpf: &mut Ebpf, name: &'static str, cgroup: &File, intended: u64) -> Result<FdLink, SteerError> {
    let at = |error| SteerError::Program { program: name, error };
    let program: &mut CgroupSockAddr = ebpf
        .program_mut(name)
        .ok_or(SteerError::Missing(name))?
        .try_into()
        .map_err(at)?;
    program.load().map_err(at)?;
    let link = program.attach(cgroup, CgroupAttachMode::Single).map_err(at)?;
    let link = program.take_link(link).map_err(at)?;
    verified(
        name,
        link.try_into()
            .map_err(|_| SteerError::Unsupported("bpf_link for cgroups".to_owned()))?,
        intended,
    )
}

/// That the link is where it should be. Links have been seen on a cgroup that was dying.
fn verified(program: &'static str, link: FdLink, intended: u64) -> Result<FdLink, SteerError> {
    let at = |error| SteerError::Map {
        doing: "reading a link's cgroup",
        error,
    };
    let info = link.info().map_err(|error| at(std::io::Error::other(error)))?;
    let actual = sys::link_cgroup_id(info.id()).map_err(at)?;
    if actual != intended {
        return Err(SteerError::Misattached {
            program,
            actual,
            intended,
        });
    }
    Ok(link)
}

/// Whether `path` lies on a cgroup v2 file system.
fn is_cgroup2(path: &Path) -> std::io::Result<bool> {
    let stat = nix::sys::statfs::statfs(path)?;
    Ok(stat.filesystem_type() == nix::sys::statfs::CGROUP2_SUPER_MAGIC)
}
