//! The images of test pods, from programs of this machine: nothing is pulled from anywhere.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, ensure};
use xtask::archive::{Entry, Image, write_archive};

use super::programs;
use crate::bed::process::binary;

/// What holds a pod's namespaces.
pub(super) const PAUSE: &str = "localhost/pause:1";

/// The tests' own client and server, `/tool`: see `adit-tool`.
pub const TOOL: &str = "localhost/adit-tool:1";

/// A shell and small tools, `/bin/busybox`.
pub const BUSYBOX: &str = "localhost/busybox:1";

/// What a shell in a pod is likely to want.
const APPLETS: [&str; 16] = [
    "sh", "sleep", "nc", "wget", "cat", "ls", "ip", "ps", "env", "id", "kill", "hostname", "netstat", "grep", "true",
    "echo",
];

/// The image of Adit of this version, as its chart names it in the bed.
pub fn adit_name() -> String {
    format!("localhost/adit:{}", env!("CARGO_PKG_VERSION"))
}

/// Writes the images that every cluster has into a folder.
pub(super) fn make(folder: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let tool = read(&programs::own("adit-tool")?)?;
    let busybox = read(&programs::host("busybox")?)?;
    let mut shell: Vec<Entry> = APPLETS
        .iter()
        .map(|name| Entry::link(&format!("/bin/{name}"), "busybox"))
        .collect();
    shell.extend([Entry::program("/bin/busybox", busybox), Entry::folder("/tmp", 0o1777)]);
    let images = [
        (
            "pause",
            PAUSE,
            vec![Entry::program("/tool", tool.clone())],
            vec!["/tool", "pause"],
        ),
        ("tool", TOOL, vec![Entry::program("/tool", tool)], vec!["/tool"]),
        ("busybox", BUSYBOX, shell, vec!["/bin/sh"]),
    ];
    let mut written = Vec::new();
    for (file, tag, entries, entrypoint) in images {
        let path = folder.join(format!("{file}.tar"));
        let image = Image {
            tag: tag.to_owned(),
            entries,
            entrypoint: entrypoint.into_iter().map(str::to_owned).collect(),
            environment: vec!["PATH=/bin".to_owned()],
            ..Image::default()
        };
        write_archive(&path, &image)?;
        written.push(path);
    }
    Ok(written)
}

/// Adit's image: the archive that `ADIT_IMAGE` names, else one made in `folder` from the program under test.
pub(super) fn adit(folder: &Path) -> anyhow::Result<PathBuf> {
    if let Some(path) = std::env::var_os("ADIT_IMAGE") {
        return Ok(PathBuf::from(path));
    }
    let stripped = folder.join("adit");
    let mut strip = Command::new("strip");
    strip.args(["--strip-all", "-o"]).arg(&stripped).arg(binary()?);
    let status = strip.status().context("start `strip` (Debian package binutils)")?;
    ensure!(status.success(), "taking the symbols out of adit failed: {status}");
    let path = folder.join("adit.tar");
    let image = Image {
        tag: adit_name(),
        entries: vec![
            Entry::program("/adit", read(&stripped)?),
            Entry::file("/etc/nsswitch.conf", "hosts: files dns\n"),
        ],
        entrypoint: vec!["/adit".to_owned()],
        ..Image::default()
    };
    write_archive(&path, &image)?;
    Ok(path)
}

fn read(path: &Path) -> anyhow::Result<Vec<u8>> {
    fs::read(path).with_context(|| format!("read {}", path.display()))
}
