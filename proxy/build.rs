fn main() {
    println!("cargo:rustc-env=ADIT_BPF_OBJECT=/work/main/target/bpf/adit.bpf.o");
}
