//! Which compiler can build for BPF here, and what it takes to get one.
//!
//! There are two ways. Debian's `rustc-web` has a precompiled `core` for BPF; only the linker is missing. A nightly
//! from rustup has the sources of `core` in its component `rust-src` and builds it along.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, bail};

use crate::{
    bpf::TARGET,
    context::{Context, say, step},
    packages,
    process::{cargo, command, find, output, path_with, run},
};

/// The release of bpf-linker, and the LLVM of Debian's compiler, which it must match.
const LINKER_VERSION: &str = "0.13.0";
const DEBIAN_LLVM: u32 = 22;
const DEBIAN_RUSTC: &str = "/usr/bin/rustc";
const DEBIAN_LLVM_PREFIX: &str = "/usr/lib/llvm-22";

/// A file or folder, and the Debian package that brings it.
const DEBIAN_PARTS: &[(&str, &str)] = &[
    (DEBIAN_RUSTC, "rustc-web"),
    ("/usr/lib/rustlib/bpfel-unknown-none/lib", "libstd-rust-web-dev-bpf"),
    ("/usr/lib/llvm-22/bin/llvm-config", "llvm-22-dev"),
];

/// A way to build for BPF that is ready to use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Toolchain {
    /// Debian's compiler with its precompiled `core`; holds the folder of bpf-linker.
    Debian(PathBuf),
    /// A nightly that compiles `core` itself; holds the folder of bpf-linker.
    Nightly(PathBuf),
}

impl Toolchain {
    /// For the step's title.
    pub(crate) fn describe(&self) -> &'static str {
        match self {
            Toolchain::Debian(_) => "Debian's rustc",
            Toolchain::Nightly(_) => "nightly rustc",
        }
    }

    /// Its own folder: neither lock nor flags nor compiler are those of the host's build.
    pub(crate) fn target_folder(&self, context: &Context) -> PathBuf {
        context.target.join("bpf")
    }

    /// `cargo SUBCOMMAND` for the crate of the kernel programs.
    pub(crate) fn cargo(&self, context: &Context, subcommand: &str) -> Result<Command> {
        let (mut cargo, linker) = match self {
            Toolchain::Debian(linker) => {
                let mut cargo = cargo(context);
                cargo
                    .arg(subcommand)
                    .env("RUSTC", DEBIAN_RUSTC)
                    .env("RUSTC_BOOTSTRAP", "1");
                (cargo, linker)
            }
            Toolchain::Nightly(linker) => {
                let mut cargo = command(context, "rustup");
                cargo.args(["run", "nightly", "cargo", subcommand, "-Z", "build-std=core"]);
                cargo.env_remove("RUSTC").env_remove("CARGO");
                (cargo, linker)
            }
        };
        cargo.args([
            "--release",
            "--package",
            "adit-ebpf",
            "--target",
            TARGET,
            "--target-dir",
        ]);
        cargo.arg(self.target_folder(context)).env("PATH", path_with(linker)?);
        // Flags meant for the host, such as `target-cpu=native`, are nonsense for BPF. The kernel wants the types of some
        // maps, which the linker makes from debug information.
        cargo
            .env_remove("CARGO_ENCODED_RUSTFLAGS")
            .env("RUSTFLAGS", "-C debuginfo=2 -C link-arg=--btf");
        Ok(cargo)
    }
}

impl Toolchain {
    /// LLVM's `objcopy`: the one beside Debian's compiler, or what `PATH` has.
    pub(super) fn objcopy(&self, context: &Context) -> Command {
        match self {
            Self::Debian(_) => command(context, format!("{DEBIAN_LLVM_PREFIX}/bin/llvm-objcopy")),
            Self::Nightly(_) => command(context, "llvm-objcopy"),
        }
    }
}

/// What is on the machine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Facts {
    /// The Debian packages of that way which are missing.
    debian_missing: Vec<&'static str>,
    /// The LLVM version that Debian's compiler was built with, if there is one.
    debian_llvm: Option<u32>,
    /// bpf-linker built against Debian's LLVM is in the cache.
    debian_linker: bool,
    /// Packages can be installed: root on a Debian.
    can_install: bool,
    is_debian: bool,
    /// A nightly toolchain is installed, and whether it has `rust-src`.
    nightly: Option<NightlyFacts>,
    /// bpf-linker on `PATH`.
    linker_on_path: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct NightlyFacts {
    rust_src: bool,
}

/// What to do about the facts.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Plan {
    /// Debian's compiler, after installing packages and the linker where missing.
    Debian {
        install: Vec<&'static str>,
        build_linker: bool,
    },
    /// The nightly, after installing the linker where missing.
    Nightly { build_linker: bool },
    /// Nothing can be done without the user.
    Advise(String),
}

/// Finds a way, installs what it lacks if that may be done, and says what to do otherwise.
pub(crate) fn prepare(context: &Context) -> Result<Toolchain> {
    match plan(&look(context)) {
        Plan::Debian { install, build_linker } => {
            if !install.is_empty() {
                packages::install(context, "building the kernel programs", &install)?;
                // The compiler may only have come now: look at its version.
                if let Plan::Advise(advice) = plan(&look(context)) {
                    bail!(advice);
                }
            }
            let root = linker_root(context);
            if build_linker {
                install_linker(context, &root)?;
            }
            Ok(Toolchain::Debian(root.join("bin")))
        }
        Plan::Nightly { build_linker } => {
            let root = context.cache.join(format!("tools/bpf-linker-{LINKER_VERSION}-nightly"));
            if !build_linker && let Some(linker) = find("bpf-linker") {
                return Ok(Toolchain::Nightly(
                    linker.parent().context("bpf-linker lies in no folder")?.to_path_buf(),
                ));
            }
            if !root.join("bin/bpf-linker").is_file() {
                install_nightly_linker(context, &root)?;
            }
            Ok(Toolchain::Nightly(root.join("bin")))
        }
        Plan::Advise(advice) => bail!(advice),
    }
}

/// The decision, apart from the machine that it is taken for.
fn plan(facts: &Facts) -> Plan {
    let llvm_fits = facts.debian_llvm.is_none_or(|version| version == DEBIAN_LLVM);
    let debian = || Plan::Debian {
        install: facts.debian_missing.clone(),
        build_linker: !facts.debian_linker,
    };
    if facts.debian_missing.is_empty() && llvm_fits {
        return debian();
    }
    if facts.nightly == Some(NightlyFacts { rust_src: true }) {
        return Plan::Nightly {
            build_linker: !facts.linker_on_path,
        };
    }
    if facts.can_install && llvm_fits {
        return debian();
    }
    Plan::Advise(advice(facts, llvm_fits))
}

fn advice(facts: &Facts, llvm_fits: bool) -> String {
    let mut text =
        String::from("no compiler on this machine can build the kernel programs (target bpfel-unknown-none).");
    if facts.is_debian && llvm_fits {
        text.push_str(&format!(
            "\n  On Debian: run this as root, which installs it, or: apt-get install {}",
            facts.debian_missing.join(" ")
        ));
    } else if let Some(version) = facts.debian_llvm.filter(|_| !llvm_fits) {
        text.push_str(&format!(
            "\n  {DEBIAN_RUSTC} was built with LLVM {version}; bpf-linker {LINKER_VERSION} is set up here for LLVM {DEBIAN_LLVM}."
        ));
    }
    text.push_str(match facts.nightly {
        None => "\n  Or, with rustup: rustup toolchain install nightly --component rust-src",
        Some(_) => "\n  Or, with rustup: rustup component add rust-src --toolchain nightly",
    });
    if !facts.linker_on_path {
        text.push_str(&format!(
            "\n    and a released bpf-linker {LINKER_VERSION} or newer on PATH."
        ));
    }
    text.push_str("\n  Then run `cargo xtask build-ebpf` again.");
    text
}

/// Looks at the machine.
fn look(context: &Context) -> Facts {
    let debian_missing: Vec<_> = DEBIAN_PARTS
        .iter()
        .filter(|(path, _)| !Path::new(path).exists())
        .map(|(_, package)| *package)
        .collect();
    let debian_llvm = if Path::new(DEBIAN_RUSTC).exists() {
        output(command(context, DEBIAN_RUSTC).arg("-vV"))
            .ok()
            .as_deref()
            .and_then(llvm_version)
    } else {
        None
    };
    Facts {
        debian_missing,
        debian_llvm,
        debian_linker: linker_root(context).join("bin/bpf-linker").is_file(),
        can_install: packages::can_install(),
        is_debian: packages::is_debian(),
        nightly: nightly(context),
        linker_on_path: find("bpf-linker").is_some(),
    }
}

fn nightly(context: &Context) -> Option<NightlyFacts> {
    let sysroot = output(command(context, "rustup").args(["run", "nightly", "rustc", "--print", "sysroot"])).ok()?;
    let sources = Path::new(sysroot.trim()).join("lib/rustlib/src/rust/library/core/src/lib.rs");
    Some(NightlyFacts {
        rust_src: sources.is_file(),
    })
}

/// The major version from the line `LLVM version: 22.1.8` of `rustc -vV`.
fn llvm_version(text: &str) -> Option<u32> {
    let version = text.lines().find_map(|line| line.strip_prefix("LLVM version: "))?;
    version.split('.').next()?.trim().parse().ok()
}

fn linker_root(context: &Context) -> PathBuf {
    context.cache.join(format!("tools/bpf-linker-{LINKER_VERSION}"))
}

fn install_linker(context: &Context, root: &Path) -> Result<()> {
    step(
        &format!("build bpf-linker {LINKER_VERSION} (once, into {})", root.display()),
        || {
            let mut cargo = cargo_install(context, root);
            cargo
                .args(["--no-default-features", "--features", "llvm-22"])
                .env("LLVM_PREFIX", DEBIAN_LLVM_PREFIX);
            run(&mut cargo)
        },
    )
}

/// Against the LLVM that the machine has: bpf-linker's own build says what it misses.
fn install_nightly_linker(context: &Context, root: &Path) -> Result<()> {
    step(
        &format!("build bpf-linker {LINKER_VERSION} (once, into {})", root.display()),
        || {
            run(&mut cargo_install(context, root)).with_context(|| {
                format!(
                    "put a released bpf-linker {LINKER_VERSION} or newer on PATH, or install the LLVM that it asks for"
                )
            })
        },
    )?;
    say("    bpf-linker is ready");
    Ok(())
}

fn cargo_install(context: &Context, root: &Path) -> Command {
    let mut cargo = cargo(context);
    cargo
        .args([
            "install",
            "bpf-linker",
            "--version",
            LINKER_VERSION,
            "--locked",
            "--force",
            "--root",
        ])
        .arg(root);
    // Its own target folder, removed by cargo at the end; and away from this workspace's configuration, as it loads LLVM
    // as a shared library.
    cargo.env_remove("CARGO_TARGET_DIR").current_dir("/");
    cargo
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ready_debian() -> Facts {
        Facts {
            debian_llvm: Some(22),
            debian_linker: true,
            is_debian: true,
            can_install: true,
            ..Facts::default()
        }
    }

    fn bare() -> Facts {
        Facts {
            debian_missing: vec!["rustc-web", "llvm-22-dev"],
            ..Facts::default()
        }
    }

    fn text(plan: Plan) -> String {
        match plan {
            Plan::Advise(text) => text,
            other => panic!("no advice but {other:?}"),
        }
    }

    #[test]
    fn a_ready_debian_is_used_as_it_is() {
        assert_eq!(
            plan(&ready_debian()),
            Plan::Debian {
                install: vec![],
                build_linker: false
            }
        );
    }

    #[test]
    fn only_the_linker_is_built_when_only_it_is_missing() {
        let facts = Facts {
            debian_linker: false,
            can_install: false,
            ..ready_debian()
        };
        assert_eq!(
            plan(&facts),
            Plan::Debian {
                install: vec![],
                build_linker: true
            }
        );
    }

    #[test]
    fn root_on_debian_installs_what_is_missing() {
        let facts = Facts {
            can_install: true,
            is_debian: true,
            nightly: Some(NightlyFacts { rust_src: false }),
            ..bare()
        };
        assert_eq!(
            plan(&facts),
            Plan::Debian {
                install: vec!["rustc-web", "llvm-22-dev"],
                build_linker: true
            }
        );
    }

    #[test]
    fn a_nightly_with_sources_comes_before_installing_packages() {
        let facts = Facts {
            can_install: true,
            is_debian: true,
            nightly: Some(NightlyFacts { rust_src: true }),
            ..bare()
        };
        assert_eq!(plan(&facts), Plan::Nightly { build_linker: true });
        assert_eq!(
            plan(&Facts {
                linker_on_path: true,
                ..facts
            }),
            Plan::Nightly { build_linker: false }
        );
    }

    #[test]
    fn a_debian_user_is_told_the_packages() {
        let advice = text(plan(&Facts {
            is_debian: true,
            ..bare()
        }));
        assert!(advice.contains("apt-get install rustc-web llvm-22-dev"), "{advice}");
        assert!(
            advice.contains("rustup toolchain install nightly --component rust-src"),
            "{advice}"
        );
    }

    #[test]
    fn others_are_told_the_nightly_way_only() {
        let facts = Facts {
            nightly: Some(NightlyFacts { rust_src: false }),
            ..bare()
        };
        let advice = text(plan(&facts));
        assert!(!advice.contains("apt-get"), "{advice}");
        assert!(
            advice.contains("rustup component add rust-src --toolchain nightly"),
            "{advice}"
        );
    }

    #[test]
    fn a_compiler_with_another_llvm_is_not_used() {
        let advice = text(plan(&Facts {
            debian_llvm: Some(23),
            ..ready_debian()
        }));
        assert!(advice.contains("was built with LLVM 23"), "{advice}");
    }

    #[test]
    fn the_llvm_version_is_read_from_the_compiler() {
        assert_eq!(
            llvm_version("rustc 1.96.0\nrelease: 1.96.0\nLLVM version: 22.1.8\n"),
            Some(22)
        );
        assert_eq!(llvm_version("rustc 1.96.0\n"), None);
    }
}
