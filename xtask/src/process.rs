//! Running other programs.

use std::{
    env,
    ffi::OsStr,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context as _, Result, bail};

use crate::context::Context;

/// What `cargo run` adds to our environment. A child must not inherit it: the library path would make another
/// toolchain's compiler load this one's libraries.
const CARGO_RUN_LEFTOVERS: &[&str] = &[
    "LD_LIBRARY_PATH",
    "CARGO_MANIFEST_DIR",
    "CARGO_MANIFEST_PATH",
    "CARGO_BIN_NAME",
    "CARGO_CRATE_NAME",
    "OUT_DIR",
];

/// A command that runs in the workspace, in a clean environment.
pub(crate) fn command(context: &Context, program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new(program);
    command.current_dir(&context.root).stdin(Stdio::null());
    for name in CARGO_RUN_LEFTOVERS {
        command.env_remove(name);
    }
    for (name, _) in env::vars_os() {
        if name.to_string_lossy().starts_with("CARGO_PKG_") {
            command.env_remove(name);
        }
    }
    command
}

/// The cargo that started us.
pub(crate) fn cargo(context: &Context) -> Command {
    let mut cargo = command(context, env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.env("CARGO_TARGET_DIR", &context.target);
    cargo
}

/// Runs a command to its end with its output shown; fails unless it succeeds.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let status = command
        .status()
        .with_context(|| format!("starting `{}`", line(command)))?;
    if !status.success() {
        bail!("`{}` failed: {status}", line(command));
    }
    Ok(())
}

/// Runs a command and gives its standard output; fails, with what it said, unless it succeeds.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    let output = command
        .output()
        .with_context(|| format!("starting `{}`", line(command)))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        bail!("`{}` failed: {}\n{}", line(command), output.status, said.trim_end());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Finds a program on `PATH`, and in the folders of system tools that a user's `PATH` may lack.
pub(crate) fn find(program: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let system = ["/usr/sbin", "/sbin", "/usr/local/sbin"].map(PathBuf::from);
    env::split_paths(&path)
        .chain(system)
        .map(|folder| folder.join(program))
        .find(|file| file.is_file())
}

/// `PATH` with a folder put first.
pub(crate) fn path_with(folder: &Path) -> Result<std::ffi::OsString> {
    let path = env::var_os("PATH").unwrap_or_default();
    env::join_paths(std::iter::once(folder.to_path_buf()).chain(env::split_paths(&path)))
        .context("a folder in PATH holds a colon")
}

/// The command as one would type it, for messages.
fn line(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(OsStr::to_string_lossy).collect::<Vec<_>>().join(" ")
}
