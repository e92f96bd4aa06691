//! `connect4`, `connect6`: an enrolled pod's TCP connect goes to the proxy.
//!
//! Minimum kernel 5.15 (`bpf_get_netns_cookie` in `sock_ops`, which needs what is stored here).

use core::mem;
use core::ptr;

use adit_common::{
    Addr, AddrKey, ConnectFacts, ConnectVerdict, Flow, HostPort, MAX_CANDIDATES, Pod, PodFlags, Refusal,
    candidate_port, connect, destination_hash,
};
use aya_ebpf::EbpfContext as _;
use aya_ebpf::bindings::{
    BPF_F_CURRENT_NETNS, bpf_sock_addr, bpf_sock_tuple, bpf_sock_tuple__bindgen_ty_1__bindgen_ty_1,
    bpf_sock_tuple__bindgen_ty_1__bindgen_ty_2,
};
use aya_ebpf::helpers::generated::{
    bpf_get_current_cgroup_id, bpf_get_netns_cookie, bpf_sk_release, bpf_skc_lookup_tcp,
};
use aya_ebpf::helpers::{bpf_get_current_comm, bpf_get_current_pid_tgid};
use aya_ebpf::macros::cgroup_sock_addr;
use aya_ebpf::programs::SockAddrContext;
use aya_log_ebpf::info;

use crate::context::{read_addr, write_addr};
use crate::maps::{ADDRS, PODS, clear_socket_flow, set_socket_flow};

/// The hook's answers.
const ALLOW: i32 = 1;
/// The application sees `EPERM`.
const REFUSE: i32 = 0;

const IPPROTO_TCP: u32 = 6;

#[cgroup_sock_addr(connect4)]
pub fn adit_connect4(ctx: SockAddrContext) -> i32 {
    // SAFETY: the kernel's context; the verifier checks each access.
    let address = unsafe { &mut *ctx.sock_addr };
    let destination = Addr::v4(address.user_ip4);
    steer(&ctx, destination, |address, to| address.user_ip4 = to.v4_word())
}

#[cgroup_sock_addr(connect6)]
pub fn adit_connect6(ctx: SockAddrContext) -> i32 {
    // SAFETY: as above.
    let address = unsafe { &mut *ctx.sock_addr };
    // SAFETY: a field of the context.
    let destination = unsafe { read_addr(&raw const address.user_ip6) };
    // SAFETY: as above.
    steer(&ctx, destination, |address, to| unsafe {
        write_addr(&raw mut address.user_ip6, &to)
    })
}

#[inline(always)]
fn steer(ctx: &SockAddrContext, addr: Addr, rewrite: impl FnOnce(&mut bpf_sock_addr, Addr)) -> i32 {
    // SAFETY: the kernel's context; the verifier checks each access.
    let address = unsafe { &mut *ctx.sock_addr };
    if address.protocol != IPPROTO_TCP {
        return ALLOW;
    }
    // SAFETY: a helper on the program's own context.
    let netns = unsafe { bpf_get_netns_cookie(ctx.as_ptr()) };
    // SAFETY: entries are replaced as a whole when a pod changes; a torn read could only show a pod that is leaving.
    let Some(pod) = (unsafe { PODS.get(netns) }) else {
        return ALLOW;
    };
    // SAFETY: a helper without arguments.
    let cgroup = unsafe { bpf_get_current_cgroup_id() };
    let facts = ConnectFacts {
        destination: addr,
        by_proxy: cgroup == pod.proxy_cgroup,
        to_other_own_address: pod.flags.has(PodFlags::MORE_ADDRESSES)
            && ADDRS.get_ptr(&AddrKey { netns, addr }).is_some(),
    };
    let log = pod.flags.has(PodFlags::LOG);
    let port = HostPort::from_be16(address.user_port as u16);
    // SAFETY: a read of the union's only meaningful member in this program type.
    let sk = unsafe { address.__bindgen_anon_1.sk };
    match connect(pod, &facts) {
        ConnectVerdict::Pass => {
            // A socket that was captured before may be connected anew.
            // SAFETY: the context's socket.
            unsafe { clear_socket_flow(sk) };
            if log {
                info!(ctx, "netns {} connect {:i}:{} left alone", netns, addr.octets(), port.0);
            }
            ALLOW
        }
        ConnectVerdict::Capture(to) => {
            let flow = Flow {
                addr,
                port,
                reserved: 0,
                pid: (bpf_get_current_pid_tgid() >> 32) as u32,
                cgroup,
                command: bpf_get_current_comm().unwrap_or_default(),
            };
            let Some(rewritten) = free_port(ctx, pod, &to, destination_hash(pod.seed, &addr, port)) else {
                return refuse(ctx, log, netns, addr, port, Refusal::NoPort);
            };
            // SAFETY: the context's socket.
            if !unsafe { set_socket_flow(sk, &flow) } {
                return refuse(ctx, log, netns, addr, port, Refusal::NoMemory);
            }
            rewrite(address, to);
            address.user_port = rewritten.to_be16().into();
            if log {
                info!(
                    ctx,
                    "netns {} pid {} connect {:i}:{} captured at port {}",
                    netns,
                    flow.pid,
                    addr.octets(),
                    port.0,
                    rewritten.0
                );
            }
            ALLOW
        }
        ConnectVerdict::Refuse(reason) => refuse(ctx, log, netns, addr, port, reason),
    }
}

#[inline(always)]
fn refuse(ctx: &SockAddrContext, log: bool, netns: u64, addr: Addr, port: HostPort, reason: Refusal) -> i32 {
    if log {
        info!(
            ctx,
            "netns {} connect {:i}:{} refused, reason {}",
            netns,
            addr.octets(),
            port.0,
            reason as u32
        );
    }
    REFUSE
}

/// The first candidate port on which no application listens and which, for a socket bound to a source port, no other
/// connection of that port uses.
///
/// That nobody listens there makes a connect fail, rather than go astray, should the map of flows be full.
#[inline(always)]
fn free_port(ctx: &SockAddrContext, pod: &Pod, to: &Addr, hash: u32) -> Option<HostPort> {
    // SAFETY: the context's socket; the verifier checks the access.
    let source_port = unsafe { (*(*ctx.sock_addr).__bindgen_anon_1.sk).src_port } as u16;
    for attempt in 0..MAX_CANDIDATES {
        let port = candidate_port(hash, attempt, pod.local_ports);
        if port.0 != source_port && !in_use(ctx, to, source_port, port) {
            return Some(port);
        }
    }
    None
}

/// Whether a packet from `source_port` to `port`, both on `addr`, would find a socket.
#[inline(always)]
fn in_use(ctx: &SockAddrContext, addr: &Addr, source_port: u16, port: HostPort) -> bool {
    // SAFETY: plain integers, for which zero is valid.
    let mut tuple: bpf_sock_tuple = unsafe { mem::zeroed() };
    let size = if addr.is_v4() { 12 } else { 36 };
    // A connection of the same source port: the client's end, from before its SYN on.
    set_tuple(&mut tuple, addr, port, HostPort(source_port));
    if source_port != 0 && lookup(ctx, &mut tuple, size) {
        return true;
    }
    // The end that accepts: a connection's, or a listener.
    set_tuple(&mut tuple, addr, HostPort(source_port), port);
    lookup(ctx, &mut tuple, size)
}

/// A packet's ports, both on `addr`.
#[inline(always)]
fn set_tuple(tuple: &mut bpf_sock_tuple, addr: &Addr, from: HostPort, to: HostPort) {
    let tuple = &mut tuple.__bindgen_anon_1;
    let (word, sport, dport) = (addr.v4_word(), from.to_be16(), to.to_be16());
    if addr.is_v4() {
        tuple.ipv4 = bpf_sock_tuple__bindgen_ty_1__bindgen_ty_1 {
            saddr: word,
            daddr: word,
            sport,
            dport,
        };
    } else {
        let (saddr, daddr) = (addr.words, addr.words);
        tuple.ipv6 = bpf_sock_tuple__bindgen_ty_1__bindgen_ty_2 {
            saddr,
            daddr,
            sport,
            dport,
        };
    }
}

#[inline(always)]
fn lookup(ctx: &SockAddrContext, tuple: &mut bpf_sock_tuple, size: u32) -> bool {
    // SAFETY: helpers on the program's own context; a socket found is released at once.
    unsafe {
        let sk = bpf_skc_lookup_tcp(ctx.as_ptr(), ptr::from_mut(tuple), size, BPF_F_CURRENT_NETNS as u64, 0);
        if sk.is_null() {
            return false;
        }
        bpf_sk_release(sk.cast());
    }
    true
}
