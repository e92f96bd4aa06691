//! What is in a machine: a few tools, the test program and `adit`, each with its libraries, and a start script.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, Result};

use crate::{
    context::Context,
    process::{command, find, output},
    vm::{cpio::Archive, kernel::Kernel},
};

/// Tools that the test bed starts, besides those of busybox. The shell is among them because that of busybox takes its
/// own `ip` before any other.
const TOOLS: &[&str] = &["sh", "ip", "nsenter", "ss"];

/// Printed at the end by the start script, with the test program's exit status.
pub(crate) const EXIT_MARKER: &str = "adit-vm-exit:";

/// Long enough for the tests under software emulation on a loaded machine. Kept inside the machine, so that one whose
/// owner was killed ends too.
const TIME_LIMIT: Duration = Duration::from_secs(25 * 60);

/// How long the owner waits.
pub(crate) const MACHINE_TIME_LIMIT: Duration = TIME_LIMIT.saturating_add(Duration::from_secs(60));

/// The part that all machines share: all but the kernel's modules.
pub(crate) fn userland(context: &Context, program: &Path, names: &[String]) -> Result<Archive> {
    let mut archive = Archive::default();
    archive.console();
    for folder in [
        "proc", "sys", "tmp", "run", "etc", "root", "var/lib", "bin", "sbin", "usr/bin", "usr/sbin",
    ] {
        archive.folder(folder);
    }
    archive.link("/var/run", "/run");
    archive.link("/bin/sh", "/usr/bin/sh");
    archive.file(
        "/etc/passwd",
        b"root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/sh\n",
    );
    archive.file("/etc/group", b"root:x:0:\nnogroup:x:65534:\n");
    archive.file("/etc/hosts", b"127.0.0.1 localhost\n::1 localhost\n");
    let busybox = find("busybox").context("busybox is not installed")?;
    add_program(context, &mut archive, &busybox, "/bin/busybox")?;
    for tool in TOOLS {
        let path = find(tool).with_context(|| format!("the tool {tool} is not installed"))?;
        add_program(context, &mut archive, &path, &format!("/usr/bin/{tool}"))?;
    }
    add_program(context, &mut archive, program, "/adit/tests")?;
    let adit = context.release("adit");
    if adit.is_file() {
        add_program(context, &mut archive, &adit, "/adit/adit")?;
    }
    archive.file("/adit/names", lines(names).as_bytes());
    Ok(archive)
}

/// The whole image for one kernel.
pub(crate) fn with_kernel(context: &Context, userland: &Archive, kernel: &Kernel) -> Result<Vec<u8>> {
    let mut archive = userland.clone();
    let mut names = Vec::new();
    for (index, path) in kernel.modules()?.iter().enumerate() {
        // Numbered, because the script loads them in this order.
        let name = format!("/modules/{index:03}.ko");
        archive.file(&name, &module(context, path)?);
        names.push(name);
    }
    archive.file("/modules/order", lines(&names).as_bytes());
    archive.file("/init", init().as_bytes());
    Ok(archive.finish())
}

/// The start script. Busybox' applets come last in the path, so that the real tools win.
const INIT: &str = r#"#!/bin/busybox sh
/bin/busybox mkdir -p /bin/applets
/bin/busybox --install -s /bin/applets
export PATH=/usr/sbin:/usr/bin:/sbin:/bin:/bin/applets HOME=/root TMPDIR=/tmp RUST_BACKTRACE=1
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mkdir -p /dev/pts /dev/shm
mount -t devpts devpts /dev/pts
mount -t tmpfs tmp /tmp
mount -t tmpfs run /run
mount -t tmpfs shm /dev/shm
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mount -t bpf bpf /sys/fs/bpf
mkdir -p /run/netns
ln -sf /proc/self/fd /dev/fd
while read -r module; do insmod "$module" || echo "insmod $module failed"; done < /modules/order
ip link set lo up
ulimit -n 1048576
export ADIT_BIN=/adit/adit ADIT_VM=1
cd /tmp
timeout TIME_LIMIT /adit/tests $(cat /adit/names) --test-threads=1 --include-ignored 2>&1
echo "EXIT_MARKER$?"
poweroff -f
"#;

fn init() -> String {
    INIT.replace("EXIT_MARKER", EXIT_MARKER)
        .replace("TIME_LIMIT", &TIME_LIMIT.as_secs().to_string())
}

/// Adds a program, without its debug information, and the libraries that it loads.
fn add_program(context: &Context, archive: &mut Archive, file: &Path, name: &str) -> Result<()> {
    archive.file(name, &stripped(context, file)?);
    for library in libraries(context, file)? {
        let contents = fs::read(&library).with_context(|| format!("reading the library {}", library.display()))?;
        archive.file(&library.to_string_lossy(), &contents);
    }
    Ok(())
}

/// The file's contents without debug information, of which a release build has a lot.
fn stripped(context: &Context, file: &Path) -> Result<Vec<u8>> {
    let draft = context.target.join(format!("xtask-strip.{}", std::process::id()));
    output(
        command(context, "strip")
            .arg("--strip-debug")
            .arg("-o")
            .arg(&draft)
            .arg(file),
    )?;
    let contents = fs::read(&draft).with_context(|| format!("reading {}", draft.display()));
    fs::remove_file(&draft).with_context(|| format!("removing {}", draft.display()))?;
    contents
}

/// The shared libraries of a program, the dynamic loader among them, wherever they are found.
fn libraries(context: &Context, file: &Path) -> Result<BTreeSet<PathBuf>> {
    // Fails on static programs, which have none.
    let text = output(command(context, "ldd").arg(file)).unwrap_or_default();
    Ok(text.lines().filter_map(library).map(PathBuf::from).collect())
}

/// From a line `libc.so.6 => /lib/libc.so.6 (0x7f)` or `/lib64/ld-linux-x86-64.so.2 (0x7f)`.
fn library(line: &str) -> Option<&str> {
    let path = line.split_once("=>").map_or(line, |(_, path)| path);
    let path = path.trim().split(' ').next()?;
    path.starts_with('/').then_some(path)
}

/// A module's contents, unpacked: the loader in the machine reads plain ones only.
fn module(context: &Context, path: &Path) -> Result<Vec<u8>> {
    if path.extension().is_none_or(|extension| extension != "xz") {
        return fs::read(path).with_context(|| format!("reading the module {}", path.display()));
    }
    let output = command(context, "xz")
        .arg("-dc")
        .arg(path)
        .output()
        .context("starting xz")?;
    anyhow::ensure!(
        output.status.success(),
        "xz cannot unpack the module {}",
        path.display()
    );
    Ok(output.stdout)
}

fn lines(names: &[String]) -> String {
    names.iter().map(|name| format!("{name}\n")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_are_read_from_what_ldd_prints() {
        assert_eq!(
            library("\tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f)"),
            Some("/lib/x86_64-linux-gnu/libc.so.6")
        );
        assert_eq!(
            library("\t/lib64/ld-linux-x86-64.so.2 (0x00007f)"),
            Some("/lib64/ld-linux-x86-64.so.2")
        );
        assert_eq!(library("\tlinux-vdso.so.1 (0x00007ffe)"), None);
        assert_eq!(library("\tstatically linked"), None);
        assert_eq!(library("\tlibmissing.so => not found"), None);
    }
}
