//! `adit-bench`: plain TCP and Adit side by side. See `docs/performance.md`.

use std::process::ExitCode;

fn main() -> ExitCode {
    adit_tests::bench::main()
}
