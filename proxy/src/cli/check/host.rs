//! What is found about the node itself: kernel, capabilities, cgroups, bpffs.

use std::path::{Path, PathBuf};

use super::finding::Finding;
use crate::steer::PinsStanding;

/// The oldest kernel that Adit is made for.
const OLDEST: (u32, u32) = (6, 1);

/// The capabilities that are needed, their numbers, and for what.
const CAPABILITIES: [(u32, &str, &str); 4] = [
    (12, "NET_ADMIN", "to attach its programs and to answer in pods' names"),
    (21, "SYS_ADMIN", "to load its programs and to enter pods' namespaces"),
    (19, "SYS_PTRACE", "to find pods' network namespaces by their processes"),
    (2, "DAC_READ_SEARCH", "to look at other users' processes"),
];
/// Implies DAC_READ_SEARCH.
const DAC_OVERRIDE: u32 = 1;
const DAC_READ_SEARCH: u32 = 2;

/// What was seen of the kernel.
#[derive(Debug)]
pub(super) struct KernelFacts {
    /// As `uname` gives it.
    pub(super) release: String,
    /// What steering needs and this kernel lacks, or why it could not be asked.
    pub(super) missing: Result<Vec<&'static str>, String>,
}

pub(super) fn kernel(facts: &KernelFacts) -> Finding {
    let release = &facts.release;
    match &facts.missing {
        Err(error) => Finding::failed(
            "kernel",
            format!("Linux {release}; {error}"),
            "run it as root, with the capabilities that `adit node` has",
        ),
        Ok(missing) if !missing.is_empty() => Finding::failed(
            "kernel",
            format!("Linux {release} lacks {}", missing.join(", ")),
            "use a kernel of 6.1 or newer with BPF and cgroup v2",
        ),
        Ok(_) if version(release).is_none_or(|version| version < OLDEST) => Finding::warning(
            "kernel",
            format!("Linux {release} has the features that steering needs, but is older than 6.1"),
            "use 6.1 or newer, which is what Adit is tested with",
        ),
        Ok(_) => Finding::ok("kernel", format!("Linux {release} has all that steering needs")),
    }
}

fn version(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

/// Of `CapEff` as in `/proc/self/status`.
pub(super) fn capabilities(effective: Option<u64>) -> Finding {
    let Some(effective) = effective else {
        return Finding::failed("capabilities", "/proc/self/status does not tell them", "mount /proc");
    };
    let has =
        |number: u32| effective >> number & 1 == 1 || (number == DAC_READ_SEARCH && effective >> DAC_OVERRIDE & 1 == 1);
    let missing: Vec<_> = CAPABILITIES.iter().filter(|(number, ..)| !has(*number)).collect();
    if missing.is_empty() {
        let names = CAPABILITIES.map(|(_, name, _)| name);
        return Finding::ok("capabilities", names.join(", "));
    }
    let names: Vec<_> = missing.iter().map(|(_, name, _)| *name).collect();
    let uses: Vec<_> = missing.iter().map(|(_, name, what)| format!("{name} {what}")).collect();
    Finding::failed(
        "capabilities",
        format!("{} missing", names.join(", ")),
        format!("run it as root and grant {}", uses.join("; ")),
    )
}

/// The effective capabilities, of `/proc/self/status`.
pub(super) fn effective(status: &str) -> Option<u64> {
    let digits = status.lines().find_map(|line| line.strip_prefix("CapEff:"))?;
    u64::from_str_radix(digits.trim(), 16).ok()
}

/// What was seen of cgroups.
#[derive(Debug)]
pub(super) struct CgroupFacts {
    /// Where cgroup v2 is mounted.
    pub(super) mount: Result<PathBuf, String>,
    /// The pods' cgroup, given or found.
    pub(super) pods: Result<PathBuf, String>,
    /// Whether it was given.
    pub(super) is_given: bool,
}

pub(super) fn cgroups(facts: &CgroupFacts) -> Finding {
    match (&facts.mount, &facts.pods) {
        (Err(error), _) => Finding::failed(
            "cgroups",
            error,
            "boot with cgroup v2 (systemd.unified_cgroup_hierarchy=1), or mount it: mount -t cgroup2 cgroup2 /sys/fs/cgroup; in \
             a container, mount the node's (Helm value cgroupRoot)",
        ),
        (Ok(mount), Err(error)) => Finding::failed(
            "cgroups",
            format!("cgroup v2 at {}, but not the pods': {error}", mount.display()),
            "name the cgroup that the kubelet puts its pods into by --pods-cgroup (Helm value podsCgroup), and see that the node's \
             whole hierarchy is mounted (Helm value cgroupRoot)",
        ),
        (Ok(mount), Ok(pods)) => {
            let how = if facts.is_given { "given" } else { "found" };
            let (mount, pods) = (mount.display(), pods.display());
            Finding::ok("cgroups", format!("cgroup v2 at {mount}, the pods' at {pods} ({how})"))
        }
    }
}

/// What was seen of the folder for pins.
#[derive(Debug)]
pub(super) struct PinsFacts {
    pub(super) dir: PathBuf,
    pub(super) standing: Result<PinsStanding, String>,
}

pub(super) fn bpffs(facts: &PinsFacts) -> Finding {
    let dir = facts.dir.display();
    match &facts.standing {
        Ok(PinsStanding::Bpffs { in_force: true }) => Finding::ok("bpffs", format!("{dir}, with programs in force")),
        Ok(PinsStanding::Bpffs { in_force: false }) => Finding::ok("bpffs", format!("{dir}, with no programs yet")),
        Ok(PinsStanding::ToBeMounted) => Finding::warning(
            "bpffs",
            format!("none is mounted where {dir} is to be; `adit node` mounts one when it starts"),
            "nothing; or mount one, as systemd does at the start: mount -t bpf bpf /sys/fs/bpf",
        ),
        Ok(PinsStanding::Elsewhere) => Finding::failed(
            "bpffs",
            format!("{dir} is not on a bpffs"),
            "mount one on the node, not in a container: mount -t bpf bpf /sys/fs/bpf; or give a folder of another as --bpf-dir",
        ),
        Err(error) => Finding::failed("bpffs", error, "let this process read it: it needs to be root"),
    }
}

/// The cgroups from where the hierarchy is mounted down to the pods'.
pub(super) fn chain(mount: &Path, pods: &Path) -> Vec<PathBuf> {
    let mut chain: Vec<PathBuf> = pods
        .ancestors()
        .take_while(|folder| folder.starts_with(mount))
        .map(Path::to_owned)
        .collect();
    chain.reverse();
    chain
}

#[cfg(test)]
mod tests {
    use super::super::finding::Level;
    use super::*;

    #[test]
    fn a_kernel_is_judged_by_what_it_has_and_then_by_its_age() {
        for (release, missing, level, part) in [
            ("6.8.0-45-generic", Ok(vec![]), Level::Ok, "has all"),
            ("6.1.0", Ok(vec![]), Level::Ok, "6.1.0"),
            ("5.15.0", Ok(vec![]), Level::Warning, "older than 6.1"),
            ("7.0", Ok(vec![]), Level::Ok, "7.0"),
            (
                "4.18.0",
                Ok(vec!["ring buffers", "hash maps"]),
                Level::Failed,
                "lacks ring buffers, hash maps",
            ),
            ("6.8.0", Err("EPERM".to_owned()), Level::Failed, "EPERM"),
        ] {
            let finding = kernel(&KernelFacts {
                release: release.to_owned(),
                missing,
            });
            assert_eq!(finding.level, level, "{release}");
            assert!(finding.what.contains(part), "{finding:?}");
        }
    }

    #[test]
    fn each_capability_that_is_missing_is_named() {
        let all = 1 << 12 | 1 << 21 | 1 << 19 | 1 << 2;
        for (effective, level, part) in [
            (
                Some(all),
                Level::Ok,
                "NET_ADMIN, SYS_ADMIN, SYS_PTRACE, DAC_READ_SEARCH",
            ),
            (Some(u64::MAX), Level::Ok, "NET_ADMIN"),
            (Some(all & !(1 << 2) | 1 << 1), Level::Ok, "DAC_READ_SEARCH"),
            (Some(all & !(1 << 2)), Level::Failed, "DAC_READ_SEARCH missing"),
            (Some(all & !(1 << 19)), Level::Failed, "SYS_PTRACE missing"),
            (
                Some(0),
                Level::Failed,
                "NET_ADMIN, SYS_ADMIN, SYS_PTRACE, DAC_READ_SEARCH missing",
            ),
            (None, Level::Failed, "/proc"),
        ] {
            let finding = capabilities(effective);
            assert_eq!(finding.level, level, "{effective:?}");
            assert!(finding.what.contains(part), "{finding:?}");
        }
        assert_eq!(effective("Name:\tadit\nCapEff:\t0000000000281004\n"), Some(0x28_1004));
        assert_eq!(effective("Name:\tadit\n"), None);
    }

    #[test]
    fn cgroups_fail_where_none_is_mounted_or_the_pods_is_not_found() {
        let ok = |path: &str| Ok(PathBuf::from(path));
        for (mount, pods, is_given, level, part) in [
            (
                ok("/c"),
                ok("/c/kubepods"),
                false,
                Level::Ok,
                "the pods' at /c/kubepods (found)",
            ),
            (ok("/c"), ok("/c/mine"), true, Level::Ok, "(given)"),
            (ok("/c"), Err("neither".to_owned()), false, Level::Failed, "neither"),
            (
                Err("no cgroup v2".to_owned()),
                ok("/c"),
                true,
                Level::Failed,
                "no cgroup v2",
            ),
        ] {
            let finding = cgroups(&CgroupFacts { mount, pods, is_given });
            assert_eq!(finding.level, level);
            assert!(finding.what.contains(part), "{finding:?}");
        }
    }

    #[test]
    fn a_missing_bpffs_fails_unless_the_proxy_mounts_one() {
        for (standing, level) in [
            (Ok(PinsStanding::Bpffs { in_force: true }), Level::Ok),
            (Ok(PinsStanding::Bpffs { in_force: false }), Level::Ok),
            (Ok(PinsStanding::ToBeMounted), Level::Warning),
            (Ok(PinsStanding::Elsewhere), Level::Failed),
            (Err("denied".to_owned()), Level::Failed),
        ] {
            let dir = PathBuf::from("/b");
            let finding = bpffs(&PinsFacts { dir, standing });
            assert_eq!(finding.level, level, "{finding:?}");
            assert_eq!(finding.advice.is_some(), level != Level::Ok);
        }
    }

    #[test]
    fn the_chain_of_cgroups_begins_at_the_mount() {
        let chain = chain(Path::new("/sys/fs/cgroup"), Path::new("/sys/fs/cgroup/a/b"));
        assert_eq!(
            chain,
            ["/sys/fs/cgroup", "/sys/fs/cgroup/a", "/sys/fs/cgroup/a/b"].map(PathBuf::from)
        );
    }
}
