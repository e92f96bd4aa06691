//! Ctrl-C as an orderly end: what a program of the bed made must go with it.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};

use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};

static INTERRUPTED: AtomicBool = AtomicBool::new(false);

extern "C" fn note(_signal: libc::c_int) {
    INTERRUPTED.store(true, Ordering::Relaxed);
}

/// From now on SIGINT, SIGTERM and SIGHUP do not end the process but interrupt what it waits for, and
/// [`check_interrupt`] fails. The second such signal ends it.
pub(crate) fn note_interrupts() -> io::Result<()> {
    // Without SA_RESTART, so that a blocking call returns.
    let action = SigAction::new(SigHandler::Handler(note), SaFlags::SA_RESETHAND, SigSet::empty());
    for signal in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP] {
        // SAFETY: the handler only stores to an atomic, which is async-signal-safe.
        unsafe { sigaction(signal, &action) }?;
    }
    Ok(())
}

/// An error once the process was asked to end.
pub(crate) fn check_interrupt() -> anyhow::Result<()> {
    anyhow::ensure!(!INTERRUPTED.load(Ordering::Relaxed), "interrupted");
    Ok(())
}
