//! `sock_ops`: publishes captured connections before their SYN, and gives accepted sockets their true client.
//!
//! Minimum kernel 5.15 (`bpf_get_netns_cookie`).

use adit_common::{Addr, FlowKey, HostPort};
use aya_ebpf::EbpfContext as _;
use aya_ebpf::bindings::{
    BPF_ANY, BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB, BPF_SOCK_OPS_STATE_CB, BPF_SOCK_OPS_STATE_CB_FLAG,
    BPF_SOCK_OPS_TCP_CONNECT_CB, bpf_sock,
};
use aya_ebpf::helpers::generated::bpf_get_netns_cookie;
use aya_ebpf::macros::sock_ops;
use aya_ebpf::programs::SockOpsContext;

use crate::context::read_addr;
use crate::maps::{CLIENTS, FLOWS, set_socket_flow, socket_flow};

const AF_INET: u32 = 2;
const TCP_SYN_SENT: u32 = 2;
const TCP_CLOSE: u32 = 7;

#[sock_ops]
pub fn adit_sock_ops(ctx: SockOpsContext) -> u32 {
    match ctx.op() {
        BPF_SOCK_OPS_TCP_CONNECT_CB => publish(&ctx),
        BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB => adopt_client(&ctx),
        BPF_SOCK_OPS_STATE_CB if ctx.arg(0) == TCP_SYN_SENT && ctx.arg(1) == TCP_CLOSE => withdraw(&ctx),
        _ => {}
    }
    1
}

/// The socket was captured: lets the socket lookup and the proxy find its true destination.
///
/// Where the map is full the SYN finds no listener at the rewritten port, and the application sees a refusal.
fn publish(ctx: &SockOpsContext) {
    let Some(sk) = socket(ctx) else { return };
    // SAFETY: the context's socket.
    let Some(flow) = (unsafe { socket_flow(sk) }) else {
        return;
    };
    if FLOWS.insert(flow_key(ctx), flow, BPF_ANY.into()).is_ok() {
        // A connect that fails takes its entry away. On failure here it stays until the proxy sweeps.
        let _ = ctx.set_cb_flags(BPF_SOCK_OPS_STATE_CB_FLAG as i32);
    }
}

/// The application got a connection from the proxy: notes whom it is really from.
fn adopt_client(ctx: &SockOpsContext) {
    let key = client_key(ctx);
    // SAFETY: the entry is written once, before the SYN, and removed only here or by the proxy after a failed dial.
    let Some(flow) = (unsafe { CLIENTS.get(key) }) else {
        return;
    };
    if let Some(sk) = socket(ctx) {
        // SAFETY: the context's socket. Without memory the application sees the proxy's own address.
        unsafe { set_socket_flow(sk, flow) };
    }
    let _ = CLIENTS.remove(key);
}

/// The connect has failed. One that has succeeded leaves its entry even if the client is gone by now: the proxy is yet
/// to accept, and what the client has sent is to arrive.
fn withdraw(ctx: &SockOpsContext) {
    let _ = FLOWS.remove(flow_key(ctx));
}

#[inline(always)]
fn socket(ctx: &SockOpsContext) -> Option<*mut bpf_sock> {
    // SAFETY: a read of the context; the verifier knows the pointer as a socket or null.
    let sk = unsafe { (*ctx.ops).__bindgen_anon_2.sk };
    (!sk.is_null()).then_some(sk)
}

#[inline(always)]
fn flow_key(ctx: &SockOpsContext) -> FlowKey {
    FlowKey::new(netns(ctx), local_addr(ctx), local_port(ctx), remote_port(ctx))
}

#[inline(always)]
fn client_key(ctx: &SockOpsContext) -> FlowKey {
    FlowKey::new(netns(ctx), remote_addr(ctx), remote_port(ctx), local_port(ctx))
}

#[inline(always)]
fn netns(ctx: &SockOpsContext) -> u64 {
    // SAFETY: a helper on the program's own context.
    unsafe { bpf_get_netns_cookie(ctx.as_ptr()) }
}

#[inline(always)]
fn local_port(ctx: &SockOpsContext) -> HostPort {
    HostPort(ctx.local_port() as u16)
}

#[inline(always)]
fn remote_port(ctx: &SockOpsContext) -> HostPort {
    // In network order in the upper half of the word, read as a whole.
    HostPort(u32::from_be(ctx.remote_port()) as u16)
}

#[inline(always)]
fn local_addr(ctx: &SockOpsContext) -> Addr {
    if ctx.family() == AF_INET {
        return Addr::v4(ctx.local_ip4());
    }
    // SAFETY: a field of the context.
    unsafe { read_addr(&raw const (*ctx.ops).local_ip6) }
}

#[inline(always)]
fn remote_addr(ctx: &SockOpsContext) -> Addr {
    if ctx.family() == AF_INET {
        return Addr::v4(ctx.remote_ip4());
    }
    // SAFETY: a field of the context.
    unsafe { read_addr(&raw const (*ctx.ops).remote_ip6) }
}
