//! The system calls that have no safe form: forking into a pod, packet sockets, io_uring, and what a pod may try.
#![expect(
    unsafe_code,
    reason = "fork, pre_exec, pidfd_open, packet sockets, io_uring, bpf, capset and SCM_RIGHTS have no safe form in the \
              crates at hand"
)]

mod bpf;
mod privileged;
mod process;
mod signal;
mod socket;
mod uring;

pub use bpf::detach_pinned_link;
pub(crate) use bpf::{ProgramTime, attached_programs, count_program_time, program_time};
pub use privileged::{
    attach_connect4, detach_connect4, keep_capabilities, load_allow_all, open_some_link, pass_socket, take_socket,
};
pub(crate) use process::{Place, fork_into, wait_readable, wait_writable};
pub(crate) use signal::{check_interrupt, note_interrupts};
pub(crate) use socket::{bind_address_no_port, fastopen_connect, kernel_drops, packet_socket, send_frame};
pub use socket::{disconnect, fastopen_listen, repair, source_route};
pub(crate) use uring::uring_connect;
