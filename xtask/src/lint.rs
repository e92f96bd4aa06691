//! `lint`: formatting and clippy, warnings denied, on every crate.

use anyhow::{Result, bail};

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

/// Runs every check, also after one has failed, so that one run shows all there is to mend.
pub(crate) fn run(context: &Context) -> Result<()> {
    let format = step("check formatting", || {
        run_cargo(context, &["fmt", "--all", "--check"])?;
        // The fuzzer is a workspace of its own.
        run_cargo(context, &["fmt", "--manifest-path", "tests/fuzz/Cargo.toml", "--check"])
    });
    // The build of the crate `adit` wants the object to embed.
    bpf::build(context)?;
    let kernel = step("clippy: kernel programs", || kernel_programs(context));
    // In release mode, which shares procedural macros and build scripts, C libraries among them, with the build.
    let workspace = step("clippy: workspace", || {
        let arguments = [
            "clippy",
            "--release",
            "--all-targets",
            "--workspace",
            "--exclude",
            "adit-ebpf",
        ];
        run_cargo(context, &[&arguments[..], &["--", "-D", "warnings"]].concat())
    });
    let failures: Vec<String> = [format, kernel, workspace]
        .into_iter()
        .filter_map(Result::err)
        .map(|error| format!("{error:#}"))
        .collect();
    if !failures.is_empty() {
        bail!("lint found problems:\n  {}", failures.join("\n  "));
    }
    Ok(())
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
