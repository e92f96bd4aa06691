//! `adit-tool`: the client and server that tests put into pods.

use std::process::ExitCode;

fn main() -> ExitCode {
    adit_tests::tool::main()
}
