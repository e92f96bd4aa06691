//! `build-ebpf`: the kernel programs, for the target `bpfel-unknown-none`.

pub(crate) mod toolchain;

use std::{fs, path::Path, time::Instant};

use anyhow::{Context as _, Result, bail};

use crate::{
    context::{Context, say, seconds, step},
    process::run,
};

/// The target triple: little-endian BPF without an operating system.
pub(crate) const TARGET: &str = "bpfel-unknown-none";

/// Builds the object file, and puts it where the build of the crate `adit` looks for it.
pub(crate) fn build(context: &Context) -> Result<()> {
    let toolchain = toolchain::prepare(context)?;
    let start = Instant::now();
    step(
        &format!("build the kernel programs with {}", toolchain.describe()),
        || {
            let mut cargo = toolchain.cargo(context, "build")?;
            // Other code comes of it, and the verifier might not like it: everybody is to have the same.
            run(cargo.env("CARGO_INCREMENTAL", "0"))
        },
    )?;
    let built = toolchain.target_folder(context).join(TARGET).join("release/adit-ebpf");
    let object = context.bpf_object();
    let stripped = built.with_extension("stripped");
    let mut strip = toolchain.objcopy(context);
    strip.args([
        "--strip-debug",
        "--remove-section=.BTF.ext",
        "--remove-section=.rel.BTF.ext",
    ]);
    run(strip.arg(&built).arg(&stripped)).context(
        "stripping the kernel programs of what only a debugger reads; llvm-objcopy comes with LLVM \
         (rustup component add llvm-tools has it too)",
    )?;
    let size = publish(&stripped, &object)?;
    say(&format!(
        "    {}: {size} bytes in {}",
        object.display(),
        seconds(start.elapsed())
    ));
    Ok(())
}

/// Copies the object only if it differs, so that nothing which embeds it is rebuilt for nothing.
fn publish(built: &Path, object: &Path) -> Result<usize> {
    let bytes = fs::read(built).with_context(|| format!("reading the kernel programs at {}", built.display()))?;
    if !is_bpf_object(&bytes) {
        bail!(
            "{} is not a BPF object: the linker used was not bpf-linker",
            built.display()
        );
    }
    if fs::read(object).ok().as_deref() != Some(&bytes) {
        // Renamed into place: a build that runs beside this one sees the old object or the new one.
        let draft = object.with_extension("new");
        fs::write(&draft, &bytes).with_context(|| format!("writing {}", draft.display()))?;
        fs::rename(&draft, object).with_context(|| format!("writing {}", object.display()))?;
    }
    Ok(bytes.len())
}

/// Whether these are a little-endian ELF file for the machine BPF (`EM_BPF`, 247).
fn is_bpf_object(bytes: &[u8]) -> bool {
    bytes.starts_with(b"\x7fELF\x02\x01") && bytes.get(18..20) == Some(&247u16.to_le_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_elf_files_for_bpf_are_published() {
        let mut object = b"\x7fELF\x02\x01".to_vec();
        object.resize(64, 0);
        assert!(!is_bpf_object(&object));
        object[18] = 247;
        assert!(is_bpf_object(&object));
        assert!(!is_bpf_object(b"!<arch>"));
        assert!(!is_bpf_object(b"\x7fELF\x02\x01"));
    }
}
