//! Debian packages that a task needs: installed when we may, named otherwise.

use std::{
    fs,
    os::unix::fs::{MetadataExt as _, PermissionsExt as _},
    path::Path,
    sync::Mutex,
};

use anyhow::{Context as _, Result, bail};

use crate::{
    context::{Context, say, step},
    process::{command, find, run},
};

/// Asked by maintainer scripts before they start a service; 101 means no.
const POLICY: &str = "/usr/sbin/policy-rc.d";

/// apt takes one customer at a time, and tasks prepare side by side.
static APT: Mutex<()> = Mutex::new(());

/// A thing that must be on the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Need {
    /// A program's name, or an absolute path, in which one component may be `*`.
    pub(crate) probe: &'static str,
    /// The Debian package that brings it.
    pub(crate) package: &'static str,
}

impl Need {
    fn is_met(&self) -> bool {
        if let Some((folder, rest)) = self.probe.split_once("/*/") {
            let entries = fs::read_dir(folder).into_iter().flatten().flatten();
            entries.map(|entry| entry.path().join(rest)).any(|path| path.exists())
        } else if self.probe.starts_with('/') {
            Path::new(self.probe).exists()
        } else {
            find(self.probe).is_some()
        }
    }
}

/// Makes sure that every need is met. As root on Debian it installs what is missing, without starting any service;
/// elsewhere it fails and says what to install.
pub(crate) fn ensure(context: &Context, purpose: &str, needs: &[Need]) -> Result<()> {
    let missing = missing(needs);
    if missing.is_empty() {
        return Ok(());
    }
    if !can_install() {
        bail!(
            "for {purpose} this machine lacks {}. Install it, on Debian as root: apt-get install {}",
            missing.iter().map(|need| need.probe).collect::<Vec<_>>().join(", "),
            names(&missing).join(" ")
        );
    }
    install(context, purpose, &names(&missing))?;
    if let Some(need) = needs.iter().find(|need| !need.is_met()) {
        bail!(
            "for {purpose} this machine lacks {}, which the package {} did not bring",
            need.probe,
            need.package
        );
    }
    Ok(())
}

/// Installs packages by name, after saying so.
pub(crate) fn install(context: &Context, purpose: &str, packages: &[&str]) -> Result<()> {
    let _turn = APT.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    say(&format!(
        "for {purpose} Debian packages are missing; installing: {}",
        packages.join(" ")
    ));
    step("install packages", || {
        let _quiet = NoServices::start()?;
        run(apt(context).args(["update", "-qq"]))?;
        let mut apt = apt(context);
        apt.args([
            "install",
            "-y",
            "-qq",
            "--no-install-recommends",
            "-o",
            "Dpkg::Use-Pty=0",
        ])
        .args(packages);
        apt.stdout(std::process::Stdio::null());
        run(&mut apt)
    })
}

/// Whether packages can be installed here: as root, on a system with apt.
pub(crate) fn can_install() -> bool {
    is_root() && is_debian()
}

/// Whether this process runs as root.
pub(crate) fn is_root() -> bool {
    // The owner of /proc/self is the effective user.
    fs::metadata("/proc/self").is_ok_and(|me| me.uid() == 0)
}

/// Whether this is Debian or made from it.
pub(crate) fn is_debian() -> bool {
    fs::read_to_string("/etc/os-release").is_ok_and(|text| describes_debian(&text)) && find("apt-get").is_some()
}

/// `apt-get` without questions.
pub(crate) fn apt(context: &Context) -> std::process::Command {
    let mut apt = command(context, "apt-get");
    // Another apt, such as a timer's, may hold the lock for a while.
    apt.env("DEBIAN_FRONTEND", "noninteractive")
        .args(["-o", "DPkg::Lock::Timeout=300"]);
    apt
}

fn missing(needs: &[Need]) -> Vec<Need> {
    needs.iter().filter(|need| !need.is_met()).copied().collect()
}

fn names(needs: &[Need]) -> Vec<&'static str> {
    let mut names = Vec::new();
    for need in needs {
        if !names.contains(&need.package) {
            names.push(need.package);
        }
    }
    names
}

fn describes_debian(os_release: &str) -> bool {
    os_release
        .lines()
        .filter_map(|line| line.strip_prefix("ID=").or_else(|| line.strip_prefix("ID_LIKE=")))
        .any(|value| value.trim_matches('"').split(' ').any(|id| id == "debian"))
}

/// While it lives, installing a package starts no service. A policy that was there before is left alone.
struct NoServices {
    ours: bool,
}

impl NoServices {
    fn start() -> Result<NoServices> {
        if Path::new(POLICY).exists() {
            return Ok(NoServices { ours: false });
        }
        fs::write(POLICY, "#!/bin/sh\nexit 101\n").with_context(|| format!("writing {POLICY}"))?;
        let guard = NoServices { ours: true };
        fs::set_permissions(POLICY, fs::Permissions::from_mode(0o755)).with_context(|| format!("marking {POLICY}"))?;
        Ok(guard)
    }
}

impl Drop for NoServices {
    fn drop(&mut self) {
        if self.ours {
            let _ = fs::remove_file(POLICY);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn debian_and_what_is_made_from_it_are_known() {
        assert!(describes_debian("NAME=\"Debian GNU/Linux\"\nID=debian\n"));
        assert!(describes_debian("ID=linuxmint\nID_LIKE=\"ubuntu debian\"\n"));
        assert!(!describes_debian("ID=fedora\nVARIANT_ID=debian-like\n"));
    }

    #[test]
    fn a_package_is_named_once() {
        let needs = [
            Need {
                probe: "redis-server",
                package: "redis",
            },
            Need {
                probe: "redis-cli",
                package: "redis",
            },
            Need {
                probe: "curl",
                package: "curl",
            },
        ];
        assert_eq!(names(&needs), ["redis", "curl"]);
    }

    #[test]
    fn a_need_is_met_by_a_program_on_the_path_or_by_a_file() {
        assert!(
            Need {
                probe: "sh",
                package: "dash"
            }
            .is_met()
        );
        assert!(
            Need {
                probe: "/bin/sh",
                package: "dash"
            }
            .is_met()
        );
        assert!(
            !Need {
                probe: "no-such-program",
                package: "none"
            }
            .is_met()
        );
    }
}
