//! `image`: the container image, one static program and nothing else.

use std::{
    collections::BTreeMap,
    env, fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, ensure};
use xtask::archive::{Entry, Image, sha256, write_archive};

use crate::{
    bpf, build,
    context::{Context, say, step},
    packages::{self, Need},
    process::{cargo, command, output, run},
};

/// No image may be larger, in bytes.
const LIMIT: u64 = 30 << 20;

/// Of the resolver that is linked in; a pod's `/etc/hosts` goes before DNS, as elsewhere.
const NSSWITCH: &str = "hosts: files dns\n";

/// Takes symbols out of what another build has made.
const STRIP: Need = Need {
    probe: "strip",
    package: "binutils",
};

/// What is made.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// The image's name and tag [default: localhost/adit:VERSION]
    #[arg(long)]
    tag: Option<String>,
    /// Take the program of `cargo xtask build` instead of building one that is the same wherever it is built
    #[arg(long)]
    from_build: bool,
}

/// Makes the image and says where it is.
pub(crate) fn make(context: &Context, options: &Options) -> Result<()> {
    let tag = options.tag.clone().unwrap_or_else(default_tag);
    let program = if options.from_build {
        build::everything(context)?;
        stripped(context, &context.release("adit"))?
    } else {
        bpf::build(context)?;
        step("build adit, the same wherever it is built", || reproducible(context))?
    };
    let program = fs::read(&program).with_context(|| format!("reading {}", program.display()))?;
    ensure!(
        is_static(&program)?,
        "the program asks for a loader, which the image has not: it is not linked statically"
    );
    let path = context.target.join(format!("image/adit-{}.tar", version()));
    context_for_a_registry(context, &program)?;
    write_archive(&path, &image(context, tag.clone(), program))?;
    let bytes = fs::read(&path).with_context(|| format!("reading {}", path.display()))?;
    let size = bytes.len() as u64;
    ensure!(size <= LIMIT, "{} is {size} bytes, more than {LIMIT}", path.display());
    say(&format!("image   {tag}, {:.1} MiB", size as f64 / f64::from(1 << 20)));
    say(&format!("archive {}", path.display()));
    say(&format!("sha256  {}", sha256(&bytes)));
    Ok(())
}

/// The folder that `deploy/Containerfile` is given.
fn context_for_a_registry(context: &Context, program: &[u8]) -> Result<()> {
    let folder = context.target.join("image/context");
    fs::create_dir_all(&folder).with_context(|| format!("making {}", folder.display()))?;
    let file = folder.join("adit");
    fs::write(&file, program).with_context(|| format!("writing {}", file.display()))?;
    fs::set_permissions(&file, fs::Permissions::from_mode(0o755))
        .with_context(|| format!("marking {}", file.display()))?;
    fs::write(folder.join("nsswitch.conf"), NSSWITCH).context("writing nsswitch.conf")
}

/// The image of a program.
fn image(context: &Context, tag: String, program: Vec<u8>) -> Image {
    let mut labels = BTreeMap::from(
        [
            ("title", "adit"),
            (
                "description",
                "The Adit node proxy, its certificate authority and the operator's commands",
            ),
            ("version", version()),
            ("source", env!("CARGO_PKG_REPOSITORY")),
            ("licenses", "Apache-2.0"),
        ]
        .map(|(name, value)| (label(name), value.to_owned())),
    );
    let git = |args: &[&str]| output(command(context, "git").args(args)).ok();
    // An archive of the sources has no history: the image then says neither of what commit it is, nor of when.
    if let Some(commit) = git(&["rev-parse", "HEAD"]) {
        let clean = git(&["status", "--porcelain", "--untracked-files=no"]).is_some_and(|changes| changes.is_empty());
        let suffix = if clean { "" } else { "-dirty" };
        labels.insert(label("revision"), format!("{}{suffix}", commit.trim()));
    }
    let created = git(&["log", "-1", "--format=%cd", "--date=format-local:%Y-%m-%dT%H:%M:%SZ"]);
    Image {
        tag,
        entries: vec![
            Entry::program("/adit", program),
            Entry::file("/etc/nsswitch.conf", NSSWITCH),
        ],
        entrypoint: vec!["/adit".to_owned()],
        labels,
        created: created.map(|text| text.trim().to_owned()),
        ..Image::default()
    }
}

fn label(name: &str) -> String {
    format!("org.opencontainers.image.{name}")
}

fn version() -> &'static str {
    env!("CARGO_PKG_VERSION")
}

fn default_tag() -> String {
    format!("localhost/adit:{}", version())
}

/// Builds `adit` without a trace of the folders it is built in, which panics' messages would show.
fn reproducible(context: &Context) -> Result<PathBuf> {
    let target = context.target.join("image/build");
    let cargo_home = match env::var_os("CARGO_HOME") {
        Some(home) => PathBuf::from(home),
        None => Path::new(&env::var_os("HOME").context("neither CARGO_HOME nor HOME is set")?).join(".cargo"),
    };
    // The last that fits holds.
    let remapped = [
        (cargo_home.as_path(), "/cargo"),
        (&context.root, "/adit"),
        (&target, "/target"),
    ];
    let flags: Vec<String> = remapped
        .iter()
        .map(|(from, to)| format!("--remap-path-prefix={}={to}", from.display()))
        .collect();
    // In addition to the flags of the workspace's own configuration.
    let config = format!("target.'cfg(target_env = \"gnu\")'.rustflags={flags:?}");
    let mut cargo = cargo(context);
    cargo
        .env("CARGO_TARGET_DIR", &target)
        .env("ADIT_BPF_OBJECT", context.bpf_object())
        .env("CARGO_INCREMENTAL", "0")
        .env("CARGO_PROFILE_RELEASE_DEBUG", "false")
        .env("CARGO_PROFILE_RELEASE_STRIP", "symbols")
        .env_remove("RUSTFLAGS")
        .env_remove("CARGO_ENCODED_RUSTFLAGS");
    run(cargo.args([
        "build",
        "--release",
        "--locked",
        "--package",
        "adit",
        "--bin",
        "adit",
        "--config",
        &config,
    ]))?;
    let folder = context
        .programs
        .strip_prefix(&context.target)
        .with_context(|| format!("{} is not below the target folder", context.programs.display()))?;
    Ok(target.join(folder).join("adit"))
}

/// The program without its symbols, which are most of it.
fn stripped(context: &Context, program: &Path) -> Result<PathBuf> {
    packages::ensure(context, "the image", &[STRIP])?;
    let folder = context.target.join("image");
    fs::create_dir_all(&folder).with_context(|| format!("making {}", folder.display()))?;
    let to = folder.join("adit");
    run(command(context, "strip")
        .arg("--strip-all")
        .arg("-o")
        .arg(&to)
        .arg(program))?;
    Ok(to)
}

/// Whether an ELF program for 64 bits runs without a loader: it has no segment `PT_INTERP`.
fn is_static(program: &[u8]) -> Result<bool> {
    const PT_INTERP: u32 = 3;
    let word = |at: usize, size: usize| -> Result<u64> {
        let bytes = program.get(at..at + size).context("not a program in the format ELF")?;
        Ok(bytes.iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte)))
    };
    ensure!(
        program.starts_with(b"\x7fELF\x02\x01"),
        "not a little-endian ELF program for 64 bits"
    );
    let (table, size, count) = (word(32, 8)?, word(54, 2)?, word(56, 2)?);
    for index in 0..count {
        if word(usize::try_from(table + index * size)?, 4)? == u64::from(PT_INTERP) {
            return Ok(false);
        }
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A program header table with one entry of the given type.
    fn program(kind: u8) -> Vec<u8> {
        let mut bytes = vec![0; 64 + 56];
        bytes[..6].copy_from_slice(b"\x7fELF\x02\x01");
        bytes[32] = 64;
        bytes[54] = 56;
        bytes[56] = 1;
        bytes[64] = kind;
        bytes
    }

    #[test]
    fn a_program_that_needs_a_loader_is_not_static() {
        assert!(is_static(&program(1)).unwrap());
        assert!(!is_static(&program(3)).unwrap());
        assert!(is_static(b"#!/bin/sh").is_err());
        assert!(is_static(&program(1)[..60]).is_err());
    }
}
