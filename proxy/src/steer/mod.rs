//! The user-space half of the kernel programs: load, attach, verify, and the maps.
//!
//! The cgroup programs are loaded once and attached to the cgroup that holds all pods. The socket lookup has an
//! instance for each enrolled pod, told by constants which pod it is; all share the maps.

mod cgroup;
mod destroy;
mod direct;
mod error;
mod flows;
mod kubelet;
mod log;
mod object;
mod pod;
mod probe;
mod startup;
mod sys;
mod verdicts;

use std::fs::File;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use adit_common::Config;
use aya_obj::generated::{bpf_attach_type, bpf_prog_type};

pub use cgroup::{cgroup_id, own_cgroup_id};
pub use destroy::{OpenSocket, SockDiag};
pub use direct::{DirectEnds, Losses, OpenDirect};
pub use error::SteerError;
pub use flows::{Clients, Flows, OriginalDst, command};
pub use kubelet::KubeletSettings;
pub use log::{LogScope, ProgramLog, forward_logs};
pub use pod::{PodAttachment, PodSteering};
pub use startup::{Namespaces, Startup, StartupCounts, Strangers};
pub use sys::monotonic_ns;
pub use verdicts::{VerdictMaps, range};

use kubelet::Kubelet;
use object::{Object, ProgramSpec, Template};
use pod::Slots;
use verdicts::SourceNumbers;

/// The cgroup programs, in the order in which they are attached: what a capture needs is there before anything is
/// captured.
const CGROUP_PROGRAMS: [ProgramSpec; 5] = [
    ProgramSpec {
        name: "adit_sock_ops",
        kind: bpf_prog_type::BPF_PROG_TYPE_SOCK_OPS,
        attach: bpf_attach_type::BPF_CGROUP_SOCK_OPS,
    },
    sock_addr("adit_getpeername4", bpf_attach_type::BPF_CGROUP_INET4_GETPEERNAME),
    sock_addr("adit_getpeername6", bpf_attach_type::BPF_CGROUP_INET6_GETPEERNAME),
    sock_addr("adit_connect4", bpf_attach_type::BPF_CGROUP_INET4_CONNECT),
    sock_addr("adit_connect6", bpf_attach_type::BPF_CGROUP_INET6_CONNECT),
];

/// The program of which each enrolled pod has an instance.
const SK_LOOKUP: ProgramSpec = ProgramSpec {
    name: "adit_sk_lookup",
    kind: bpf_prog_type::BPF_PROG_TYPE_SK_LOOKUP,
    attach: bpf_attach_type::BPF_SK_LOOKUP,
};

const fn sock_addr(name: &'static str, attach: bpf_attach_type) -> ProgramSpec {
    ProgramSpec {
        name,
        kind: bpf_prog_type::BPF_PROG_TYPE_CGROUP_SOCK_ADDR,
        attach,
    }
}

/// Where and how to steer.
#[derive(Debug, Clone)]
pub struct SteerSettings {
    /// The cgroup v2 directory below which all pods' cgroups lie.
    pub pods_cgroup: PathBuf,
    /// The node's kubelet, where its probes are to reach enrolled pods under any policy.
    pub kubelet: Option<KubeletSettings>,
    /// For which pods the programs log their decisions.
    pub log: LogScope,
}

/// The programs in their place. Dropping this detaches them; pods are then as without Adit.
pub struct Steering {
    /// The cgroup programs' links, in the order in which they are detached: nothing is captured any more before the
    /// rest goes.
    _links: Vec<OwnedFd>,
    kubelet: Option<Kubelet>,
    lookup: Mutex<Template>,
    maps: Arc<Maps>,
    slots: Arc<Slots>,
    sources: SourceNumbers,
    log: LogScope,
    log_taken: AtomicBool,
    /// The id of a program that logs.
    logging_program: u32,
    proxy_cgroup: u64,
}

/// The maps' descriptors.
pub(crate) struct Maps {
    pods: OwnedFd,
    addrs: OwnedFd,
    flows: Arc<OwnedFd>,
    clients: Arc<OwnedFd>,
    listeners: OwnedFd,
    destinations: OwnedFd,
    ranges: OwnedFd,
    verdicts: OwnedFd,
    direct: OwnedFd,
    events: OwnedFd,
    counters: OwnedFd,
    config: OwnedFd,
    others: OwnedFd,
    strangers: OwnedFd,
}

impl Steering {
    /// Loads the programs, attaches them and verifies where they are. What the kernel lacks is found out where it
    /// refuses something.
    pub fn start(settings: &SteerSettings) -> Result<Self, SteerError> {
        let proxy_cgroup = own_cgroup_id()?;
        let cgroup = File::open(&settings.pods_cgroup).map_err(|error| SteerError::Cgroup {
            path: settings.pods_cgroup.clone(),
            error,
        })?;
        let intended = cgroup_id(&settings.pods_cgroup)?;

        let object = Object::open(&settings.log)?;
        let mut links = Vec::with_capacity(CGROUP_PROGRAMS.len());
        let mut logging_program = 0;
        for program in CGROUP_PROGRAMS {
            let (link, id) = attach(&object, program, &cgroup, intended)?;
            links.insert(0, link);
            logging_program = id;
        }
        let maps = Arc::new(Maps::of(&object)?);
        let load = |kubelet| Kubelet::load(kubelet, &settings.pods_cgroup, &object, &maps);
        let kubelet = settings.kubelet.as_ref().map(load).transpose()?;
        Ok(Self {
            _links: links,
            kubelet,
            maps,
            lookup: Mutex::new(object.into_template(SK_LOOKUP)?),
            slots: Arc::new(Slots::default()),
            sources: SourceNumbers::default(),
            log: settings.log.clone(),
            log_taken: AtomicBool::new(false),
            logging_program,
            proxy_cgroup,
        })
    }

    /// Attaches the programs on the kubelet's cgroup, if they are to be there and are not: a kubelet that is started anew
    /// has a new cgroup. Whether they were attached now.
    pub fn keep_kubelet(&self) -> Result<bool, SteerError> {
        self.kubelet.as_ref().map_or(Ok(false), Kubelet::attach)
    }

    /// Where captured connections' true destinations are found.
    pub fn flows(&self) -> Flows {
        Flows::new(Arc::clone(&self.maps.flows))
    }

    /// Where the true clients of the proxy's own connections to applications are told.
    pub fn clients(&self) -> Clients {
        Clients::new(Arc::clone(&self.maps.clients))
    }

    /// Where the kernel is told what it decides by itself.
    pub fn verdicts(&self) -> VerdictMaps {
        VerdictMaps::new(Arc::clone(&self.maps))
    }

    /// What the kernel knows of network namespaces that are not enrolled.
    pub fn namespaces(&self) -> Namespaces {
        Namespaces::new(Arc::clone(&self.maps))
    }

    /// The direct connections that are open.
    pub fn open_direct(&self) -> OpenDirect {
        OpenDirect::new(Arc::clone(&self.maps))
    }

    /// The ring that tells the ends of direct connections. One reader only.
    pub fn direct_ends(&self) -> Result<DirectEnds, SteerError> {
        DirectEnds::of(&self.maps)
    }

    /// The ring that the programs log to; once, and not where nothing is logged.
    pub fn take_log(&self) -> Option<ProgramLog> {
        if self.log == LogScope::None || self.log_taken.swap(true, Ordering::Relaxed) {
            return None;
        }
        ProgramLog::of(self.logging_program)
    }
}

impl Maps {
    fn of(object: &Object) -> Result<Self, SteerError> {
        Ok(Self {
            pods: object.map("adit_pods")?,
            addrs: object.map("adit_addrs")?,
            flows: Arc::new(object.map("adit_flows")?),
            clients: Arc::new(object.map("adit_clients")?),
            listeners: object.map("adit_listeners")?,
            destinations: object.map("adit_destinations")?,
            ranges: object.map("adit_ranges")?,
            verdicts: object.map("adit_verdicts")?,
            direct: object.map("adit_direct")?,
            events: object.map("adit_events")?,
            counters: object.map("adit_counters")?,
            config: object.map("adit_config")?,
            others: object.map("adit_others")?,
            strangers: object.map("adit_strangers")?,
        })
    }

    /// Changes what the programs are told by the settings.
    fn change_config(&self, change: impl FnOnce(&mut Config)) -> Result<(), SteerError> {
        let at = |error| SteerError::Map {
            doing: "telling the programs the settings",
            error,
        };
        let mut config: Config = sys::get(self.config.as_fd(), &0_u32).map_err(at)?.unwrap_or_default();
        change(&mut config);
        sys::update(self.config.as_fd(), &0_u32, &config, 0).map_err(at)
    }
}

/// Loads a cgroup program and attaches it. Gives the link and the program's id.
fn attach(object: &Object, program: ProgramSpec, cgroup: &File, intended: u64) -> Result<(OwnedFd, u32), SteerError> {
    attach_loaded(program, &object.load(program)?, cgroup, intended, "the pods' cgroup")
}

/// Attaches a loaded cgroup program to `target`. Gives the link and the program's id.
fn attach_loaded(
    program: ProgramSpec,
    loaded: &OwnedFd,
    cgroup: &File,
    intended: u64,
    target: &'static str,
) -> Result<(OwnedFd, u32), SteerError> {
    let failed = |error| SteerError::Attach {
        program: program.name,
        target,
        error,
    };
    let link = sys::link(loaded.as_fd(), cgroup.as_fd(), program.attach).map_err(failed)?;
    // That the link is where it should be: links have been seen on a cgroup that was dying.
    let (actual, id) = sys::cgroup_link(link.as_fd()).map_err(failed)?;
    if actual != intended {
        return Err(SteerError::Misattached {
            program: program.name,
            actual,
            intended,
        });
    }
    Ok((link, id))
}

/// Whether `path` lies on a cgroup v2 file system.
fn is_cgroup2(path: &Path) -> std::io::Result<bool> {
    let stat = nix::sys::statfs::statfs(path)?;
    Ok(stat.filesystem_type() == nix::sys::statfs::CGROUP2_SUPER_MAGIC)
}
