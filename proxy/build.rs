//! Compiles the wire definitions in `proto/` with a compiler written in Rust, so that a build needs no `protoc`, and
//! embeds the kernel programs.

use std::env;
use std::path::{Path, PathBuf};
use std::process;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed=proto");
    let files = protox::compile(["proto/citadel.proto", "proto/spire.proto"], ["proto"])?;
    tonic_prost_build::configure()
        .emit_rerun_if_changed(false)
        // It holds a private key.
        .skip_debug([".spire.api.agent.delegatedidentity.v1.X509SVIDWithKey"])
        .compile_fds(files)?;
    embed_kernel_programs();
    Ok(())
}

/// Tells the compiler where the kernel programs are, which `cargo xtask build-ebpf` has put into `bpf/adit.bpf.o` of
/// the target folder.
fn embed_kernel_programs() {
    println!("cargo::rerun-if-env-changed=ADIT_BPF_OBJECT");
    let object = env::var_os("ADIT_BPF_OBJECT").map_or_else(built_object, PathBuf::from);
    println!("cargo::rerun-if-changed={}", object.display());
    if !object.is_file() {
        eprintln!(
            "the kernel programs are not built yet: run `cargo xtask build-ebpf` once, then build again \
             (looked for {})",
            object.display()
        );
        process::exit(1);
    }
    println!("cargo::rustc-env=ADIT_BPF_OBJECT={}", object.display());
}

/// `bpf/adit.bpf.o` in the target folder, which is the one above our output folder that has it: that holds for
/// CARGO_TARGET_DIR, for the configuration's `target-dir` and for `--target` alike.
fn built_object() -> PathBuf {
    const OBJECT: &str = "bpf/adit.bpf.o";
    let out = PathBuf::from(env::var_os("OUT_DIR").unwrap_or_default());
    let built = out
        .ancestors()
        .skip(1)
        .map(|folder| folder.join(OBJECT))
        .find(|object| object.is_file());
    built.unwrap_or_else(|| Path::new("../target").join(OBJECT))
}
