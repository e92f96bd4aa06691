//! Connects below the pods' cgroup in namespaces that are no enrolled pod's: of pods outside the mesh, and of pods that
//! nobody has looked at yet.

use core::mem::MaybeUninit;

use adit_common::{Addr, Counter, Startup, StartupVerdict, Stranger, not_enrolled};
use aya_ebpf::helpers::bpf_get_current_pid_tgid;
use aya_ebpf::helpers::generated::bpf_get_current_cgroup_id;

use crate::connect::{ALLOW, REFUSE};
use crate::maps::{CONFIG, OTHERS, STRANGERS, count};

/// Decides on a TCP connect there.
#[inline(always)]
pub fn connect(netns: u64, destination: &Addr) -> i32 {
    let startup = CONFIG
        .get(0)
        .map_or(Startup::Off, |config| Startup::from_u32(config.startup));
    match not_enrolled(startup, destination, || OTHERS.get_ptr(netns).is_some()) {
        StartupVerdict::Pass => ALLOW,
        StartupVerdict::PassUnclassified => {
            count(Counter::StartupPassed, 1);
            tell(netns, startup);
            ALLOW
        }
        StartupVerdict::Refuse => {
            count(Counter::StartupRefused, 1);
            tell(netns, startup);
            REFUSE
        }
    }
}

/// Has the proxy look at the namespace. Where the ring is full, it is about to look at others.
#[inline(always)]
fn tell(netns: u64, startup: Startup) {
    let Some(mut entry) = STRANGERS.reserve(0) else { return };
    let uninit: &mut MaybeUninit<Stranger> = &mut entry;
    // SAFETY: a helper without arguments.
    let cgroup = unsafe { bpf_get_current_cgroup_id() };
    uninit.write(Stranger {
        netns,
        cgroup,
        pid: (bpf_get_current_pid_tgid() >> 32) as u32,
        startup: startup as u32,
    });
    entry.submit(0);
}
