//! The file systems of a machine, seen from inside: those that the kernel makes, and folders of its own where programs
//! keep their state.

use std::fs;
use std::path::Path;

use anyhow::Context;
use nix::mount::{MsFlags, mount};

use super::hierarchy::{Hierarchy, is_only_unified};
use super::layout::Machine;

/// Where a node's programs keep what outlives them.
const KEPT: [&str; 6] = [
    "/var/lib/kubelet",
    "/var/lib/containerd",
    "/var/lib/cni",
    "/var/log/pods",
    "/var/log/containers",
    "/etc/cni/net.d",
];

/// What a kubelet writes although it is not only its node's.
const SYSCTLS: [&str; 6] = [
    "vm/overcommit_memory",
    "vm/panic_on_oom",
    "kernel/panic",
    "kernel/panic_on_oops",
    "kernel/keys/root_maxkeys",
    "kernel/keys/root_maxbytes",
];

/// Makes them, in a mount namespace that is the machine's.
pub(super) fn make(folder: &Path, machine: Machine) -> anyhow::Result<()> {
    // Nothing of this is to show outside.
    change("/", MsFlags::MS_REC | MsFlags::MS_PRIVATE)?;
    let safe = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    fresh("proc", "/proc", safe, None)?;
    if machine == Machine::ControlPlane {
        return Ok(());
    }
    fresh("sysfs", "/sys", safe, None)?;
    cgroups()?;
    fresh("bpf", "/sys/fs/bpf", safe, Some("mode=700"))?;
    for (kind, place) in [
        ("tracefs", "/sys/kernel/tracing"),
        ("securityfs", "/sys/kernel/security"),
    ] {
        // Not every kernel has these, and nothing here depends on them.
        let _ = fresh(kind, place, safe, None);
    }
    fresh(
        "tmpfs",
        "/run",
        MsFlags::MS_NOSUID | MsFlags::MS_NODEV,
        Some("mode=755"),
    )?;
    for place in ["/run/lock", "/run/netns"] {
        fs::create_dir(place).with_context(|| format!("make {place}"))?;
    }
    for place in KEPT {
        let own = folder.join("root").join(place.trim_start_matches('/'));
        for folder in [&own, Path::new(place)] {
            fs::create_dir_all(folder).with_context(|| format!("make {}", folder.display()))?;
        }
        bind(&own, Path::new(place))?;
    }
    let sysctls = folder.join("sysctl");
    fs::create_dir_all(&sysctls).with_context(|| format!("make {}", sysctls.display()))?;
    for name in SYSCTLS {
        let (real, own) = (Path::new("/proc/sys").join(name), sysctls.join(name.replace('/', ".")));
        if real.exists() {
            fs::copy(&real, &own).with_context(|| format!("copy {}", real.display()))?;
            bind(&own, &real)?;
        }
    }
    // As systemd does on a host: a container's mounts may be asked to show outside of it.
    change("/", MsFlags::MS_REC | MsFlags::MS_SHARED)
}

/// Mounts all hierarchies as the host has them. In this cgroup namespace their roots are the machine's cgroups.
fn cgroups() -> anyhow::Result<()> {
    let top = Path::new("/sys/fs/cgroup");
    if is_only_unified()
        || Hierarchy::own()?
            .iter()
            .all(|hierarchy| hierarchy.controllers.is_empty())
    {
        return fresh("cgroup2", "/sys/fs/cgroup", MsFlags::empty(), None);
    }
    fresh("tmpfs", "/sys/fs/cgroup", MsFlags::empty(), Some("mode=755"))?;
    for hierarchy in Hierarchy::own()? {
        let place = hierarchy.mount(top);
        fs::create_dir_all(&place).with_context(|| format!("make {}", place.display()))?;
        let place = place.to_string_lossy();
        match hierarchy.controllers.as_str() {
            "" => fresh("cgroup2", &place, MsFlags::empty(), None)?,
            named if named.starts_with("name=") => {
                fresh("cgroup", &place, MsFlags::empty(), Some(&format!("none,{named}")))?;
            }
            controllers => fresh("cgroup", &place, MsFlags::empty(), Some(controllers))?,
        }
    }
    Ok(())
}

fn fresh(kind: &str, place: &str, flags: MsFlags, options: Option<&str>) -> anyhow::Result<()> {
    mount(Some(kind), place, Some(kind), flags, options).with_context(|| format!("mount {kind} at {place}"))
}

fn bind(from: &Path, to: &Path) -> anyhow::Result<()> {
    mount(Some(from), to, None::<&str>, MsFlags::MS_BIND, None::<&str>)
        .with_context(|| format!("mount {} at {}", from.display(), to.display()))
}

fn change(place: &str, flags: MsFlags) -> anyhow::Result<()> {
    mount(None::<&str>, place, None::<&str>, flags, None::<&str>)
        .with_context(|| format!("change how mounts at {place} spread"))
}
