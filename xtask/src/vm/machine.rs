//! One virtual machine: starting it, following its console, ending it.

use std::{
    env, fs,
    io::BufReader,
    process::{Child, Stdio},
    sync::mpsc,
    thread,
    time::Instant,
};

use anyhow::{Context as _, Result};

use crate::{
    context::{Context, say, seconds},
    process::command,
    test::totals::{Counter, Totals},
    vm::{
        cpio::Archive,
        image::{self, EXIT_MARKER, MACHINE_TIME_LIMIT},
        kernel::Kernel,
    },
};

/// `kvm` makes the machines fast where it works. It is not tried by itself: on a host that is a virtual machine too,
/// `/dev/kvm` may open and then abort the emulator or hang the guest.
const ACCELERATOR: &str = "ADIT_VM_ACCEL";

/// Without hardware to help, the machine's clock counts instructions, one a nanosecond, and jumps over times in which
/// nothing runs. So the tests' deadlines hold however slow the emulation and however busy this machine is.
const EMULATION: [&str; 4] = ["-accel", "tcg,thread=single", "-icount", "shift=0,sleep=off"];

/// One each: the machines run side by side, and emulating two cores on one is slower than one.
const CPUS: &str = "1";
const MEMORY_MIB: &str = "1536";

/// Boots the kernel with the image and follows the tests to their end.
pub(crate) fn run(context: &Context, kernel: &Kernel, userland: &Archive) -> Result<Totals> {
    let image = context
        .target
        .join(format!("vm-{}.{}.cpio", kernel.version, std::process::id()));
    fs::write(&image, image::with_kernel(context, userland, kernel)?)
        .with_context(|| format!("writing {}", image.display()))?;
    let outcome = boot(context, kernel, &image);
    fs::remove_file(&image).with_context(|| format!("removing {}", image.display()))?;
    outcome
}

fn boot(context: &Context, kernel: &Kernel, image: &std::path::Path) -> Result<Totals> {
    let mut qemu = command(context, "qemu-system-x86_64");
    match env::var(ACCELERATOR) {
        Ok(accelerator) => qemu.args(["-accel", &accelerator]),
        Err(_) => qemu.args(EMULATION),
    };
    qemu.args(["-smp", CPUS, "-m", MEMORY_MIB]);
    qemu.args("-cpu max -no-reboot -nodefaults -display none -serial stdio -device virtio-rng-pci".split(' '));
    qemu.arg("-kernel").arg(kernel.image()).arg("-initrd").arg(image);
    qemu.args(["-append", "console=ttyS0 quiet loglevel=2 panic=-1 mitigations=off"]);
    let child = qemu
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .context("starting qemu-system-x86_64")?;
    let mut machine = Machine { child };
    let output = machine.child.stdout.take().context("the emulator has no output")?;
    let errors = machine
        .child
        .stderr
        .take()
        .context("the emulator has no error output")?;
    let (sender, lines) = mpsc::channel();
    let forward = sender.clone();
    thread::spawn(move || send_lines(BufReader::new(output), &sender));
    thread::spawn(move || send_lines(BufReader::new(errors), &forward));
    Ok(follow(kernel.name(), &lines))
}

/// Prints the console with the kernel's name in front of each line, and counts.
fn follow(name: &str, lines: &mpsc::Receiver<String>) -> Totals {
    let start = Instant::now();
    let mut counter = Counter::default();
    let mut status = None;
    loop {
        let left = MACHINE_TIME_LIMIT.saturating_sub(start.elapsed());
        match lines.recv_timeout(left) {
            Ok(line) => {
                if let Some((_, number)) = line.split_once(EXIT_MARKER) {
                    status = Some(number.trim().to_owned());
                } else if status.is_none() {
                    say(&format!("[{name}] {line}"));
                    counter.feed(line.as_bytes());
                    counter.feed(b"\n");
                }
            }
            Err(mpsc::RecvTimeoutError::Disconnected) => break,
            Err(mpsc::RecvTimeoutError::Timeout) => {
                say(&format!(
                    "[{name}] stopped: not done within {}",
                    seconds(MACHINE_TIME_LIMIT)
                ));
                break;
            }
        }
    }
    match &status {
        Some(status) if status == "0" => {}
        Some(status) => say(&format!("[{name}] the test program ended with status {status}")),
        None => say(&format!("[{name}] the machine ended before the tests did")),
    }
    counter.finish(status.as_deref() == Some("0"))
}

fn send_lines(mut reader: impl std::io::BufRead, sender: &mpsc::Sender<String>) {
    let mut line = Vec::new();
    while let Ok(1..) = reader.read_until(b'\n', &mut line) {
        // The serial console ends lines with a carriage return; the firmware draws with escape sequences.
        let text = String::from_utf8_lossy(&line);
        let text = text.trim_end_matches(['\r', '\n']);
        let text = text
            .rsplit('\x1b')
            .next()
            .filter(|_| text.starts_with('\x1b'))
            .unwrap_or(text);
        if sender.send(text.to_owned()).is_err() {
            return;
        }
        line.clear();
    }
}

/// Ends the emulator with its owner, whatever happened.
struct Machine {
    child: Child,
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
