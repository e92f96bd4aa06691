//! `lint`: formatting and clippy, warnings denied, on every crate.

use anyhow::Result;

use crate::{
    bpf::{
        self,
        toolchain::{self, Toolchain},
    },
    context::{Context, step},
    packages::{self, Need},
    process::cargo,
};

/// Debian's clippy, of the same version as Debian's compiler.
const DEBIAN_CLIPPY: Need = Need {
    probe: "/usr/bin/clippy-driver",
    package: "rust-web-clippy",
};

/// Runs every check; the first that fails ends it.
pub(crate) fn run(context: &Context) -> Result<()> {
    step("check formatting", || run_cargo(context, &["fmt", "--all", "--check"]))?;
    // The build of the crate `adit` wants the object to embed.
    bpf::build(context)?;
    step("clippy: kernel programs", || kernel_programs(context))?;
    // In release mode, which shares procedural macros and build scripts, C libraries among them, with the build.
    step("clippy: workspace", || {
        let arguments = [
            "clippy",
            "--release",
            "--all-targets",
            "--workspace",
            "--exclude",
            "adit-ebpf",
        ];
        run_cargo(context, &[&arguments[..], &["--", "-D", "warnings"]].concat())
    })
}

fn kernel_programs(context: &Context) -> Result<()> {
    let toolchain = toolchain::prepare(context)?;
    let mut cargo = match &toolchain {
        Toolchain::Debian(_) => {
            packages::ensure(context, "clippy for the kernel programs", &[DEBIAN_CLIPPY])?;
            // `cargo clippy` would take the host toolchain's driver, which cannot read Debian's `core`. This is what
            // it does, with the driver that can.
            let mut cargo = toolchain.cargo(context, "check")?;
            cargo.env("RUSTC_WORKSPACE_WRAPPER", DEBIAN_CLIPPY.probe);
            cargo.env("CLIPPY_ARGS", "-D__CLIPPY_HACKERY__warnings__CLIPPY_HACKERY__");
            cargo
        }
        Toolchain::Nightly(_) => {
            let mut cargo = toolchain.cargo(context, "clippy")?;
            cargo.args(["--", "-D", "warnings"]);
            cargo
        }
    };
    crate::process::run(&mut cargo)
}

fn run_cargo(context: &Context, arguments: &[&str]) -> Result<()> {
    crate::process::run(cargo(context).args(arguments))
}
