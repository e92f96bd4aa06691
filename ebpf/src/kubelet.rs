//! The programs on the kubelet's cgroup: its probes reach enrolled pods under any policy.
//!
//! A probe is known by the socket that the kubelet has connected, never by the node's address, which every process of
//! the host has. Which command connects can only be asked at connect; the source port is known only after: the connect
//! hooks note the socket, and `sock_ops` announces its connection. Minimum kernel 5.15, as for the pods' programs.

use adit_common::{Addr, COMMAND_LEN, FlowKey, FlowKind, HostPort, NOBODY};
use aya_ebpf::EbpfContext as _;
use aya_ebpf::bindings::{BPF_ANY, BPF_SOCK_OPS_STATE_CB, BPF_SOCK_OPS_TCP_CONNECT_CB};
use aya_ebpf::helpers::generated::{bpf_get_current_cgroup_id, bpf_get_current_comm, bpf_get_netns_cookie};
use aya_ebpf::macros::{cgroup_sock_addr, sock_ops};
use aya_ebpf::programs::{SockAddrContext, SockOpsContext};

use crate::connect::{ALLOW, IPPROTO_TCP, describe};
use crate::context::read_addr;
use crate::maps::{CONFIG, FLOWS, clear_socket_flow, known, new_socket_flow, socket_flow};
use crate::sock_ops::{TCP_CLOSE, TCP_SYN_SENT, local, remote, socket, tell_states};

#[cgroup_sock_addr(connect4)]
pub fn adit_kubelet4(ctx: SockAddrContext) -> i32 {
    // SAFETY: the kernel's context; the verifier checks each access.
    note(&ctx, Addr::v4(unsafe { (*ctx.sock_addr).user_ip4 }))
}

#[cgroup_sock_addr(connect6)]
pub fn adit_kubelet6(ctx: SockAddrContext) -> i32 {
    // SAFETY: a field of the context.
    note(&ctx, unsafe { read_addr(&raw const (*ctx.sock_addr).user_ip6) })
}

#[sock_ops]
pub fn adit_kubelet(ctx: SockOpsContext) -> u32 {
    match ctx.op() {
        BPF_SOCK_OPS_TCP_CONNECT_CB => announce(&ctx),
        BPF_SOCK_OPS_STATE_CB if ctx.arg(0) == TCP_SYN_SENT && ctx.arg(1) == TCP_CLOSE => withdraw(&ctx),
        _ => {}
    }
    1
}

/// Notes with the socket that what it connects is the kubelet's, where it goes to an enrolled pod of this node. Nothing
/// is ever refused here.
#[inline(always)]
fn note(ctx: &SockAddrContext, addr: Addr) -> i32 {
    // SAFETY: the kernel's context; the verifier checks each access.
    let address = unsafe { &*ctx.sock_addr };
    if address.protocol != IPPROTO_TCP {
        return ALLOW;
    }
    let port = HostPort::from_be16(address.user_port as u16);
    // SAFETY: a read of the union's only meaningful member in this program type.
    let sk = unsafe { address.__bindgen_anon_1.sk };
    let (destination, _) = known(NOBODY, &addr, port);
    if destination == 0 || !is_kubelet(ctx) {
        // A socket that was noted before may be connected anew, by another command.
        // SAFETY: the context's socket.
        unsafe { clear_socket_flow(sk) };
        return ALLOW;
    }
    // SAFETY: the context's socket. Without memory the probe is a stranger's.
    if let Some(flow) = unsafe { new_socket_flow(sk) } {
        // SAFETY: a helper without arguments.
        let cgroup = unsafe { bpf_get_current_cgroup_id() };
        describe(flow, FlowKind::Probe, addr, port, None, cgroup);
    }
    ALLOW
}

/// Whether it is the kubelet that connects, in the host's network namespace. Its cgroup may hold the pods', which these
/// programs see too then: one below it is another's.
#[inline(always)]
fn is_kubelet(ctx: &SockAddrContext) -> bool {
    let mut command = [0_u8; COMMAND_LEN];
    // SAFETY: the helper writes at most so many bytes, and ends the name with a zero byte.
    if unsafe { bpf_get_current_comm(command.as_mut_ptr().cast(), COMMAND_LEN as u32) } != 0 {
        return false;
    }
    // SAFETY: a helper on the program's own context.
    let netns = unsafe { bpf_get_netns_cookie(ctx.as_ptr()) };
    // SAFETY: a helper without arguments.
    let cgroup = unsafe { bpf_get_current_cgroup_id() };
    CONFIG
        .get(0)
        .is_some_and(|config| config.is_kubelet(netns, cgroup, &command))
}

/// Tells the socket lookup of the pod, before the SYN. Where there is no room, the probe is a stranger's.
fn announce(ctx: &SockOpsContext) {
    let Some(sk) = socket(ctx) else { return };
    // SAFETY: the context's socket.
    let Some(flow) = (unsafe { socket_flow(sk) }) else {
        return;
    };
    if flow.kind == FlowKind::Probe as u16
        && let Some(key) = destination_key(ctx)
        && FLOWS.insert(key, flow, BPF_ANY.into()).is_ok()
    {
        // A connect that fails takes its entry away.
        tell_states(ctx);
    }
}

/// The connect has failed.
fn withdraw(ctx: &SockOpsContext) {
    if let Some(key) = destination_key(ctx) {
        // It is gone already where the other end has a socket by now.
        let _ = FLOWS.remove(key);
    }
}

/// The connection as the enrolled pod sees it that it goes to.
#[inline(always)]
fn destination_key(ctx: &SockOpsContext) -> Option<FlowKey> {
    let (client, server) = (local(ctx), remote(ctx));
    let (destination, _) = known(NOBODY, &server.0, server.1);
    (destination != 0).then(|| FlowKey::new(destination, client.0, client.1, server.1))
}
