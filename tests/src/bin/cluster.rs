//! `adit-cluster`: a Kubernetes cluster on this machine, and what runs in its machines.

use std::process::ExitCode;

fn main() -> ExitCode {
    adit_tests::cluster::cli::main()
}
