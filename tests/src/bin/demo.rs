//! `adit-demo`: Adit's main job on two nodes, step by step.

use std::process::ExitCode;

fn main() -> ExitCode {
    adit_tests::demo::main()
}
