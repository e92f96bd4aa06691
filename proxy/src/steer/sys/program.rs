//! Programs and their type information.

use std::ffi::CStr;
use std::io;
use std::os::fd::OwnedFd;

use aya_obj::generated::bpf_insn;

use super::{NAME_LEN, bpf, made, object_name};
use crate::steer::object::ProgramSpec;

const BPF_PROG_LOAD: libc::c_int = 5;
const BPF_BTF_LOAD: libc::c_int = 18;

/// Enough for the verifier's words on any of the programs; only made where one is refused.
const VERIFIER_LOG: usize = 1 << 20;

/// `union bpf_attr` as `BPF_PROG_LOAD` reads it.
#[repr(C)]
struct ProgramLoad {
    kind: u32,
    instruction_count: u32,
    instructions: u64,
    licence: u64,
    log_level: u32,
    log_size: u32,
    log: u64,
    kernel_version: u32,
    flags: u32,
    name: [u8; NAME_LEN],
    ifindex: u32,
    expected_attach_type: u32,
}

/// `union bpf_attr` as `BPF_BTF_LOAD` reads it.
#[repr(C)]
struct BtfLoad {
    btf: u64,
    log: u64,
    btf_size: u32,
    log_size: u32,
    log_level: u32,
    reserved: u32,
}

/// Loads type information.
pub(in crate::steer) fn load_btf(btf: &[u8]) -> io::Result<OwnedFd> {
    let mut attr = BtfLoad {
        btf: btf.as_ptr().addr() as u64,
        log: 0,
        btf_size: btf.len() as u32,
        log_size: 0,
        log_level: 0,
        reserved: 0,
    };
    made(bpf(BPF_BTF_LOAD, &mut attr))
}

/// Why the kernel refused a program.
pub(in crate::steer) struct Refused {
    pub(in crate::steer) error: io::Error,
    /// The verifier's words.
    pub(in crate::steer) log: String,
}

/// Loads a program.
pub(in crate::steer) fn load_program(
    program: ProgramSpec,
    instructions: &[bpf_insn],
    licence: &CStr,
) -> Result<OwnedFd, Refused> {
    let mut attr = ProgramLoad {
        kind: program.kind as u32,
        instruction_count: instructions.len() as u32,
        instructions: instructions.as_ptr().addr() as u64,
        licence: licence.as_ptr().addr() as u64,
        log_level: 0,
        log_size: 0,
        log: 0,
        kernel_version: 0,
        flags: 0,
        name: object_name(program.name),
        ifindex: 0,
        expected_attach_type: program.attach as u32,
    };
    let error = match made(bpf(BPF_PROG_LOAD, &mut attr)) {
        Ok(program) => return Ok(program),
        Err(error) => error,
    };
    // Once more, to hear why.
    let mut log = vec![0_u8; VERIFIER_LOG];
    attr.log_level = 1;
    attr.log_size = log.len() as u32;
    attr.log = log.as_mut_ptr().addr() as u64;
    match made(bpf(BPF_PROG_LOAD, &mut attr)) {
        // The first refusal was of a passing kind.
        Ok(program) => Ok(program),
        Err(_) => {
            let text = CStr::from_bytes_until_nul(&log).unwrap_or_default();
            Err(Refused {
                error,
                log: text.to_string_lossy().into_owned(),
            })
        }
    }
}
