//! `getpeername4`, `getpeername6`: the true peer of a connection whose addresses were rewritten.
//!
//! The kernel calls them for `getpeername` and for the address that `accept` returns. Minimum kernel 5.8.

use aya_ebpf::macros::cgroup_sock_addr;
use aya_ebpf::programs::SockAddrContext;

use crate::context::write_addr;
use crate::maps::socket_flow;

/// The only answer that the kernel takes from these hooks.
const OK: i32 = 1;

#[cgroup_sock_addr(getpeername4)]
pub fn adit_getpeername4(ctx: SockAddrContext) -> i32 {
    // SAFETY: the kernel's context and its socket; the verifier checks each access.
    unsafe {
        let address = &mut *ctx.sock_addr;
        if let Some(flow) = socket_flow(address.__bindgen_anon_1.sk) {
            address.user_ip4 = flow.addr.v4_word();
            address.user_port = flow.port.to_be16().into();
        }
    }
    OK
}

#[cgroup_sock_addr(getpeername6)]
pub fn adit_getpeername6(ctx: SockAddrContext) -> i32 {
    // SAFETY: as above.
    unsafe {
        let address = &mut *ctx.sock_addr;
        if let Some(flow) = socket_flow(address.__bindgen_anon_1.sk) {
            write_addr(&raw mut address.user_ip6, &flow.addr);
            address.user_port = flow.port.to_be16().into();
        }
    }
    OK
}
