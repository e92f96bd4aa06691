//! One program for all fuzz targets: the variable `ADIT_FUZZ_TARGET` says which one it is.
#![no_main]

use std::sync::LazyLock;

use adit::fuzzing::{TARGETS, Target};
use libfuzzer_sys::fuzz_target;

static TARGET: LazyLock<Target> = LazyLock::new(|| {
    let name = std::env::var("ADIT_FUZZ_TARGET").unwrap_or_default();
    let target = TARGETS.into_iter().find(|target| target.name == name);
    target.unwrap_or_else(|| panic!("ADIT_FUZZ_TARGET names no target: {name:?}"))
});

fuzz_target!(|data: &[u8]| (TARGET.run)(data));
