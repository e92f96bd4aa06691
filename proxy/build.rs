//! Compiles the wire definitions in `proto/` with a compiler written in Rust, so that a build needs no `protoc`.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed=proto");
    let files = protox::compile(["proto/citadel.proto"], ["proto"])?;
    tonic_prost_build::configure().emit_rerun_if_changed(false).compile_fds(files)?;
    Ok(())
}
