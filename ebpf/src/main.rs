//! Adit's kernel programs: one file for each family of hooks.
//!
//! What a hook decides is a pure function of `adit_common`; what is here reads contexts and maps, asks it, and acts.
//! Only contexts and helpers of the stable UAPI are used, so that one object serves every kernel from 6.1 on.

#![no_std]
#![no_main]
#![expect(unsafe_code, reason = "contexts are raw pointers, checked by the kernel's verifier")]
#![allow(
    missing_docs,
    unreachable_pub,
    reason = "a program, not a library; the macros make items of their own"
)]

mod connect;
mod context;
mod direct;
mod getpeername;
mod maps;
mod services;
mod sk_lookup;
mod sock_ops;

#[cfg(not(test))]
#[panic_handler]
fn panic(_info: &core::panic::PanicInfo) -> ! {
    // The verifier rejects a program from which this can be reached.
    loop {}
}

/// The kernel lets programs call all the helpers used here only under a GPL-compatible licence.
#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";
