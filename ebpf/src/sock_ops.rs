//! `sock_ops`: announces connections before their SYN, gives accepted sockets their true client, and records direct
//! connections to their end.
//!
//! Minimum kernel 5.15 (`bpf_get_netns_cookie`).

use adit_common::{Addr, Cached, Counter, DirectKind, Flow, FlowKey, FlowKind, HBONE_PORT, HostPort, NOBODY};
use aya_ebpf::EbpfContext as _;
use aya_ebpf::bindings::{
    BPF_ANY, BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB, BPF_SOCK_OPS_STATE_CB, BPF_SOCK_OPS_STATE_CB_FLAG,
    BPF_SOCK_OPS_TCP_CONNECT_CB, bpf_sock,
};
use aya_ebpf::helpers::generated::bpf_get_netns_cookie;
use aya_ebpf::macros::sock_ops;
use aya_ebpf::programs::SockOpsContext;

use crate::context::read_addr;
use crate::direct;
use crate::maps::{CLIENTS, FLOWS, PODS, count, known, set_socket_flow, socket_flow};

const AF_INET: u32 = 2;
pub const TCP_SYN_SENT: u32 = 2;
const TCP_FIN_WAIT2: u32 = 5;
pub const TCP_CLOSE: u32 = 7;

#[sock_ops]
pub fn adit_sock_ops(ctx: SockOpsContext) -> u32 {
    match ctx.op() {
        BPF_SOCK_OPS_TCP_CONNECT_CB => publish(&ctx),
        BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB => accepted(&ctx),
        BPF_SOCK_OPS_STATE_CB => match (ctx.arg(0), ctx.arg(1)) {
            (state, TCP_CLOSE) => {
                if state == TCP_SYN_SENT {
                    withdraw(&ctx);
                }
                direct::end(&ctx, state);
            }
            (_, TCP_FIN_WAIT2) => direct::half_closed(&ctx),
            _ => {}
        },
        _ => {}
    }
    1
}

/// Lets the socket lookup, and for a captured connection the proxy, find what the connect hook has decided.
///
/// Where the map is full the SYN of a captured connection finds no listener at the rewritten port, and the application
/// sees a refusal; a direct one is a stranger's to the destination.
fn publish(ctx: &SockOpsContext) {
    let Some(sk) = socket(ctx) else { return };
    // SAFETY: the context's socket.
    let Some(flow) = (unsafe { socket_flow(sk) }) else {
        return;
    };
    let announced = match FlowKind::from_u16(flow.kind) {
        FlowKind::Captured | FlowKind::Own => announce(flow_key(ctx), flow),
        FlowKind::Direct => publish_direct(ctx, flow),
        // Never a pod's.
        FlowKind::Probe => false,
    };
    if announced {
        // A connect that fails takes its entry away.
        tell_states(ctx);
    }
}

/// Records the connection, and announces it to the pod of this node that it goes to, if it does. Not where its source
/// address is another's: then it is a stranger's to that pod.
#[inline(always)]
fn publish_direct(ctx: &SockOpsContext, flow: &Flow) -> bool {
    let (netns, client, server) = (netns(ctx), local(ctx), remote(ctx));
    if !direct::record(ctx, DirectKind::Outbound, netns, client, server, Some(flow)) {
        return false;
    }
    let (destination, _) = known(NOBODY, &server.0, server.1);
    if destination != 0 && known(NOBODY, &client.0, client.1).0 == netns {
        // Where the map is full it is a stranger's too.
        announce(FlowKey::new(destination, client.0, client.1, server.1), flow);
    }
    true
}

/// Announces a connection to the socket lookup of the side that accepts. Whether there was room.
#[inline(always)]
fn announce(key: FlowKey, flow: &Flow) -> bool {
    let announced = FLOWS.insert(key, flow, BPF_ANY.into()).is_ok();
    if !announced {
        count(Counter::FlowsFull, 1);
    }
    announced
}

/// A socket was made for a connection that has come in.
fn accepted(ctx: &SockOpsContext) {
    let key = client_key(ctx);
    // SAFETY: the entry is written once, before the SYN, and removed only here or by the proxy after a failed dial.
    if let Some(flow) = unsafe { CLIENTS.get(key) } {
        // From the proxy: notes whom it is really from.
        if let Some(sk) = socket(ctx) {
            // SAFETY: the context's socket. Without memory the application sees the proxy's own address.
            unsafe { set_socket_flow(sk, flow) };
        }
        let _ = CLIENTS.remove(key);
        return;
    }
    // SAFETY: the entry is written before the SYN, and not changed after.
    let flow = unsafe { FLOWS.get(key) };
    let kind = match flow.map(|flow| FlowKind::from_u16(flow.kind)) {
        // The client's end is recorded, where that is to be.
        Some(FlowKind::Direct | FlowKind::Own) => {
            let _ = FLOWS.remove(key);
            return;
        }
        // The proxy's own listener.
        Some(FlowKind::Captured) => return,
        // The client's end is the host's, which nobody watches.
        Some(FlowKind::Probe) => DirectKind::Probe,
        None if is_from_outside(ctx, key.netns) => DirectKind::Inbound,
        None => return,
    };
    if direct::record(ctx, kind, key.netns, remote(ctx), local(ctx), flow) {
        tell_states(ctx);
    }
    if kind == DirectKind::Probe {
        let _ = FLOWS.remove(key);
    }
}

/// Whether this is from a peer without identity that the socket lookup has let through to the application.
fn is_from_outside(ctx: &SockOpsContext, netns: u64) -> bool {
    let (client, server) = (remote(ctx), local(ctx));
    // SAFETY: as in `connect`.
    if unsafe { PODS.get(netns) }.is_none() || client.0.is_loopback() || client.0.same(&server.0) {
        return false;
    }
    let (owner, verdict) = known(NOBODY, &server.0, server.1);
    // Anything else has come to a listener of the proxy's.
    owner == netns && verdict == Cached::Allow && server.1.0 != HBONE_PORT.0
}

/// The connect has failed. One that has succeeded leaves its entry even if the client is gone by now: the proxy is yet
/// to accept, and what the client has sent is to arrive.
fn withdraw(ctx: &SockOpsContext) {
    let key = flow_key(ctx);
    if FLOWS.remove(key).is_err() {
        let server = remote(ctx);
        let (destination, _) = known(NOBODY, &server.0, server.1);
        if destination != 0 {
            let _ = FLOWS.remove(FlowKey {
                netns: destination,
                ..key
            });
        }
    }
}

/// Asks to be told of the socket's states from here on. Where that fails, what was recorded of it stays until the proxy
/// sweeps.
#[inline(always)]
pub fn tell_states(ctx: &SockOpsContext) {
    let _ = ctx.set_cb_flags(BPF_SOCK_OPS_STATE_CB_FLAG as i32);
}

#[inline(always)]
pub fn socket(ctx: &SockOpsContext) -> Option<*mut bpf_sock> {
    // SAFETY: a read of the context; the verifier knows the pointer as a socket or null.
    let sk = unsafe { (*ctx.ops).__bindgen_anon_2.sk };
    (!sk.is_null()).then_some(sk)
}

/// This end's address and port.
#[inline(always)]
pub fn local(ctx: &SockOpsContext) -> (Addr, HostPort) {
    (local_addr(ctx), local_port(ctx))
}

/// The other end's address and port.
#[inline(always)]
pub fn remote(ctx: &SockOpsContext) -> (Addr, HostPort) {
    (remote_addr(ctx), remote_port(ctx))
}

#[inline(always)]
pub fn flow_key(ctx: &SockOpsContext) -> FlowKey {
    FlowKey::new(netns(ctx), local_addr(ctx), local_port(ctx), remote_port(ctx))
}

#[inline(always)]
fn client_key(ctx: &SockOpsContext) -> FlowKey {
    FlowKey::new(netns(ctx), remote_addr(ctx), remote_port(ctx), local_port(ctx))
}

#[inline(always)]
pub fn netns(ctx: &SockOpsContext) -> u64 {
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
