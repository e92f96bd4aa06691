//! The user-space half of the kernel programs: load, attach, verify, and the maps.
//!
//! The cgroup programs are loaded once and attached to the cgroup that holds all pods. The socket lookup has an
//! instance for each enrolled pod, told by constants which pod it is; all share the maps. Maps and links are pinned:
//! they outlive the process, and the next one adopts them.

mod adopt;
mod attach;
mod cgroup;
mod destroy;
mod direct;
mod error;
mod exclusions;
mod flows;
mod kubelet;
mod log;
mod object;
mod others;
mod pins;
mod pod;
mod probe;
mod proxies;
mod repair;
mod ring;
mod services;
mod startup;
mod sys;
mod verdicts;

use std::collections::HashMap;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use adit_common::{Config, Counter};
use aya_obj::generated::{bpf_attach_type, bpf_prog_type};

pub use attach::Prepared;
pub use cgroup::{cgroup_id, cgroup_mount, enter_host_cgroup_namespace, find_pods_cgroup, own_cgroup_id};
pub use destroy::{OpenSocket, SockDiag};
pub use direct::{DirectEnds, Losses, OpenDirect};
pub use error::SteerError;
pub use flows::{Clients, Flows, OriginalDst, command};
pub use kubelet::{KubeletCgroup, KubeletSettings};
pub use log::{LogScope, ProgramLog, forward_logs};
pub use others::{AttachedProgram, attached_programs};
pub use pins::{PinsStanding, pins_standing, uninstall};
pub use pod::{ListenerFds, PodPlace, PodSteering};
pub use probe::missing_features;
pub use repair::Repairs;
pub use services::ServiceMaps;
pub use startup::{Namespaces, Startup, StartupCounts, Strangers};
pub use sys::monotonic_ns;
pub use verdicts::{VerdictMaps, range};

use attach::CgroupPrograms;
use error::at;
use kubelet::Kubelet;
use object::{Object, ProgramSpec, Template};
use pins::Pins;
use pod::HeldPods;
use verdicts::SourceNumbers;

/// The cgroup programs, in the order in which they are attached: what a capture needs is there before anything is
/// captured.
const CGROUP_PROGRAMS: [ProgramSpec; 5] = [
    sock_ops("adit_sock_ops"),
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

const fn sock_ops(name: &'static str) -> ProgramSpec {
    ProgramSpec {
        name,
        kind: bpf_prog_type::BPF_PROG_TYPE_SOCK_OPS,
        attach: bpf_attach_type::BPF_CGROUP_SOCK_OPS,
    }
}

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
    /// The folder of a bpffs in which maps and links are pinned.
    pub bpf_dir: PathBuf,
    /// The version of the layout of maps, by which their folder is named: [`adit_common::LAYOUT`], but for tests.
    pub layout: u32,
    /// Maps that are to have other sizes than they are made for: for tests.
    pub map_entries: HashMap<String, u32>,
    /// For which pods the programs log their decisions.
    pub log: LogScope,
}

/// The programs in their place. They stay there when this is dropped: pods that are enrolled are steered to nobody then,
/// until another process adopts them.
pub struct Steering {
    pods_cgroup: PathBuf,
    programs: CgroupPrograms,
    /// The cgroup programs' links, in the order of [`CGROUP_PROGRAMS`].
    links: Mutex<Vec<OwnedFd>>,
    /// None where the kubelet's probes are like anybody's.
    kubelet: Option<Kubelet>,
    lookup: Mutex<Template>,
    maps: Arc<Maps>,
    /// None in a self-test that is to touch nothing.
    pins: Option<Pins>,
    pods: Mutex<HeldPods>,
    sources: SourceNumbers,
    log: LogScope,
    log_taken: AtomicBool,
    /// The id of a program that logs.
    logging_program: u32,
}

/// The maps' descriptors.
pub(crate) struct Maps {
    pods: OwnedFd,
    addrs: OwnedFd,
    flows: Arc<OwnedFd>,
    clients: Arc<OwnedFd>,
    listeners: OwnedFd,
    proxies: OwnedFd,
    destinations: OwnedFd,
    ranges: OwnedFd,
    exclusions: OwnedFd,
    verdicts: OwnedFd,
    services: OwnedFd,
    endpoints: OwnedFd,
    direct: OwnedFd,
    events: OwnedFd,
    refusals: OwnedFd,
    refused: OwnedFd,
    counters: OwnedFd,
    config: OwnedFd,
    others: OwnedFd,
    strangers: OwnedFd,
}

impl Steering {
    /// Sees to it that the programs on the kubelet's cgroup are attached where they are to be, and else nowhere: a
    /// kubelet that is started anew has a new cgroup. Whether they had to be put there.
    pub fn keep_kubelet(&self) -> Result<bool, SteerError> {
        match (&self.kubelet, &self.pins) {
            (Some(kubelet), pins) => kubelet.keep(&self.maps, pins.as_ref()),
            (None, Some(pins)) => Kubelet::remove(pins).map(|()| false),
            (None, None) => Ok(false),
        }
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

    /// Where the kernel is told the endpoints of services.
    pub fn services(&self) -> ServiceMaps {
        ServiceMaps::new(Arc::clone(&self.maps))
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

    /// The ring that tells refusals. One reader only.
    pub fn refusals(&self) -> Result<DirectEnds, SteerError> {
        DirectEnds::of_refusals(&self.maps)
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
            proxies: object.map("adit_proxies")?,
            destinations: object.map("adit_destinations")?,
            ranges: object.map("adit_ranges")?,
            exclusions: object.map("adit_exclusions")?,
            verdicts: object.map("adit_verdicts")?,
            services: object.map("adit_services")?,
            endpoints: object.map("adit_endpoints")?,
            direct: object.map("adit_direct")?,
            events: object.map("adit_events")?,
            refusals: object.map("adit_refusals")?,
            refused: object.map("adit_refused")?,
            counters: object.map("adit_counters")?,
            config: object.map("adit_config")?,
            others: object.map("adit_others")?,
            strangers: object.map("adit_strangers")?,
        })
    }

    /// A counter of the kernel programs, over all CPUs.
    fn counted(&self, counter: Counter) -> Result<u64, SteerError> {
        let values = sys::get_per_cpu(self.counters.as_fd(), counter as u32).map_err(at("reading counters"))?;
        Ok(values.into_iter().sum())
    }

    /// Changes what the programs are told by the settings.
    fn change_config(&self, change: impl FnOnce(&mut Config)) -> Result<(), SteerError> {
        let at = at("telling the programs the settings");
        let mut config: Config = sys::get(self.config.as_fd(), &0_u32).map_err(at)?.unwrap_or_default();
        change(&mut config);
        sys::update(self.config.as_fd(), &0_u32, &config, 0).map_err(at)
    }
}

/// Whether `path` lies on a cgroup v2 file system.
pub(crate) fn is_cgroup2(path: &Path) -> std::io::Result<bool> {
    let stat = nix::sys::statfs::statfs(path)?;
    Ok(stat.filesystem_type() == nix::sys::statfs::CGROUP2_SUPER_MAGIC)
}
