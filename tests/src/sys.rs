//! The system calls that have no safe form: forking into a pod, packet sockets, io_uring, bpf.
#![expect(
    unsafe_code,
    reason = "fork, pre_exec, pidfd_open, packet sockets, io_uring and bpf have no safe form in the crates at hand"
)]

mod bpf;
mod process;
mod signal;
mod socket;
mod uring;

pub(crate) use bpf::{ProgramTime, attached_programs, count_program_time, program_time};
pub(crate) use process::{Place, fork_into, wait_readable, wait_writable};
pub(crate) use signal::{check_interrupt, note_interrupts};
pub(crate) use socket::{bind_address_no_port, fastopen_connect, kernel_drops, packet_socket};
pub(crate) use uring::uring_connect;
