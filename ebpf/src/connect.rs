//! `connect4`, `connect6`: an enrolled pod's TCP connect goes directly where that is decided, or to the proxy.
//!
//! Minimum kernel 6.1 (`bpf_set_retval` in these hooks).

use core::mem;
use core::ptr;

use adit_common::{
    Addr, AddrKey, COMMAND_LEN, Cached, ConnectFacts, ConnectVerdict, Endpoint, Flow, FlowKind, HostPort,
    MAX_CANDIDATES, Pod, PodFlags, Refusal, RewrittenPorts, connect, destination_hash, through,
};
use aya_ebpf::EbpfContext as _;
use aya_ebpf::bindings::{
    BPF_F_CURRENT_NETNS, bpf_sock_addr, bpf_sock_tuple, bpf_sock_tuple__bindgen_ty_1__bindgen_ty_1,
    bpf_sock_tuple__bindgen_ty_1__bindgen_ty_2,
};
use aya_ebpf::helpers::bpf_get_current_pid_tgid;
use aya_ebpf::helpers::generated::{
    bpf_get_current_cgroup_id, bpf_get_current_comm, bpf_get_netns_cookie, bpf_set_retval, bpf_sk_release,
    bpf_skc_lookup_tcp,
};
use aya_ebpf::macros::cgroup_sock_addr;
use aya_ebpf::programs::SockAddrContext;
use aya_log_ebpf::info;

use crate::context::{read_addr, write_addr};
use crate::direct;
use crate::maps::{ADDRS, PODS, PROXIES, clear_socket_flow, excludes_outbound, known, new_socket_flow, owner};
use crate::services::{self, Chosen};
use crate::startup;

/// The hook's answers.
pub const ALLOW: i32 = 1;
/// The application sees `EPERM`, or the error that was set.
pub const REFUSE: i32 = 0;
const ECONNREFUSED: i32 = 111;

pub const IPPROTO_TCP: u32 = 6;

#[cgroup_sock_addr(connect4)]
pub fn adit_connect4(ctx: SockAddrContext) -> i32 {
    // SAFETY: the kernel's context; the verifier checks each access.
    let address = unsafe { &mut *ctx.sock_addr };
    let destination = Addr::v4(address.user_ip4);
    steer::<true>(&ctx, destination, |address, to| address.user_ip4 = to.v4_word())
}

#[cgroup_sock_addr(connect6)]
pub fn adit_connect6(ctx: SockAddrContext) -> i32 {
    // SAFETY: as above.
    let address = unsafe { &mut *ctx.sock_addr };
    // SAFETY: a field of the context.
    let destination = unsafe { read_addr(&raw const address.user_ip6) };
    // SAFETY: as above.
    steer::<false>(&ctx, destination, |address, to| unsafe {
        write_addr(&raw mut address.user_ip6, &to)
    })
}

#[inline(always)]
fn steer<const ONLY_V4: bool>(
    ctx: &SockAddrContext,
    addr: Addr,
    rewrite: impl FnOnce(&mut bpf_sock_addr, Addr),
) -> i32 {
    // SAFETY: the kernel's context; the verifier checks each access.
    let address = unsafe { &mut *ctx.sock_addr };
    if address.protocol != IPPROTO_TCP {
        return ALLOW;
    }
    // SAFETY: a helper on the program's own context.
    let netns = unsafe { bpf_get_netns_cookie(ctx.as_ptr()) };
    // SAFETY: entries are replaced as a whole when a pod changes; a torn read could only show a pod that is leaving.
    let Some(pod) = (unsafe { PODS.get(netns) }) else {
        return startup::connect(netns, &addr);
    };
    let port = HostPort::from_be16(address.user_port as u16);
    // SAFETY: a helper without arguments.
    let cgroup = unsafe { bpf_get_current_cgroup_id() };
    let facts = ConnectFacts {
        destination: addr,
        by_proxy: PROXIES.get_ptr(cgroup).is_some(),
        to_other_own_address: pod.flags.has(PodFlags::MORE_ADDRESSES)
            && ADDRS.get_ptr(AddrKey { netns, addr }).is_some(),
        excluded: pod.flags.has(PodFlags::EXCLUDES_OUTBOUND) && excludes_outbound(netns, &addr, port),
    };
    let log = pod.flags.has(PodFlags::LOG);
    // SAFETY: a read of the union's only meaningful member in this program type.
    let sk = unsafe { address.__bindgen_anon_1.sk };
    let mut chosen: Option<Endpoint> = None;
    let known = || match known_to(netns, pod, &addr, port) {
        Cached::Service => match services::endpoint(&addr, port) {
            Chosen::Ask => Some(Cached::Ask),
            Chosen::Nowhere => None,
            Chosen::Endpoint(endpoint) => {
                chosen = Some(endpoint);
                let verdict = known_to(netns, pod, &endpoint.addr, endpoint.port);
                Some(through(&addr, &endpoint.addr, verdict))
            }
        },
        verdict => Some(verdict),
    };
    match connect(pod, &facts, known) {
        ConnectVerdict::Pass => {
            // A socket that was captured before may be connected anew.
            // SAFETY: the context's socket.
            unsafe { clear_socket_flow(sk) };
            if log {
                info!(ctx, "netns {} connect {:i}:{} left alone", netns, addr.octets(), port.0);
            }
            ALLOW
        }
        verdict @ (ConnectVerdict::Direct | ConnectVerdict::Own) => {
            let own = matches!(verdict, ConnectVerdict::Own);
            // SAFETY: the context's socket.
            let Some(flow) = (unsafe { new_socket_flow(sk) }) else {
                return refuse(ctx, log, netns, addr, port, Refusal::NoMemory);
            };
            let kind = if own { FlowKind::Own } else { FlowKind::Direct };
            describe(flow, kind, addr, port, chosen.as_ref(), cgroup);
            if let Some(endpoint) = chosen {
                rewrite(address, endpoint.addr);
                address.user_port = endpoint.port.to_be16().into();
            }
            if log {
                info!(ctx, "netns {} connect {:i}:{} direct", netns, addr.octets(), port.0);
            }
            ALLOW
        }
        ConnectVerdict::Capture(to) => {
            let hash = destination_hash(pod.seed, &addr, port);
            // SAFETY: plain integers, for which zero is valid. One for both families: the stack has little room.
            let mut tuple: bpf_sock_tuple = unsafe { mem::zeroed() };
            // A family each, known to the verifier: see `free_port`.
            let rewritten = if ONLY_V4 || to.is_v4() {
                free_port::<true>(ctx, pod, &mut tuple, &to, hash)
            } else {
                free_port::<false>(ctx, pod, &mut tuple, &to, hash)
            };
            let Some(rewritten) = rewritten else {
                return refuse(ctx, log, netns, addr, port, Refusal::NoPort);
            };
            // SAFETY: the context's socket.
            let Some(flow) = (unsafe { new_socket_flow(sk) }) else {
                return refuse(ctx, log, netns, addr, port, Refusal::NoMemory);
            };
            describe(flow, FlowKind::Captured, addr, port, chosen.as_ref(), cgroup);
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
        ConnectVerdict::Refuse(reason) => {
            if matches!(reason, Refusal::Policy | Refusal::NoEndpoint) {
                let server = match (reason, chosen) {
                    (Refusal::NoEndpoint, _) => None,
                    (_, Some(endpoint)) => Some((endpoint.addr, endpoint.port)),
                    (_, None) => Some((addr, port)),
                };
                direct::tell_refused(netns, pod.slot, server, |flow| {
                    describe(flow, FlowKind::Direct, addr, port, None, cgroup)
                });
            }
            if reason == Refusal::NoEndpoint {
                // SAFETY: a helper; the error is one that the system call may give.
                unsafe { bpf_set_retval(-ECONNREFUSED) };
            }
            refuse(ctx, log, netns, addr, port, reason)
        }
    }
}

/// What is known of a connection of the pod, in this network namespace, to an address. One to a pod of this node is asked,
/// too, while the pod has just come and its own address is not known to be its: it would be a stranger's to the other.
#[inline(always)]
fn known_to(netns: u64, pod: &Pod, addr: &Addr, port: HostPort) -> Cached {
    match known(pod.source, addr, port) {
        (destination, Cached::Allow) if destination != 0 => {
            let own = if addr.is_v4() { pod.v4 } else { pod.v6 };
            if pod.flags.has(PodFlags::SAME_NODE_ENCRYPTED) || owner(&own) != netns {
                Cached::Ask
            } else {
                Cached::Allow
            }
        }
        (_, verdict) => verdict,
    }
}

/// Fills in what was dialled, the endpoint that was chosen, and the author. In place: the stack has little room.
#[inline(always)]
pub fn describe(flow: &mut Flow, kind: FlowKind, addr: Addr, port: HostPort, endpoint: Option<&Endpoint>, cgroup: u64) {
    flow.endpoint.addr = endpoint.map_or(Addr::default(), |endpoint| endpoint.addr);
    flow.endpoint.port = endpoint.map_or(HostPort(0), |endpoint| endpoint.port);
    flow.addr = addr;
    flow.port = port;
    flow.kind = kind as u16;
    flow.pid = (bpf_get_current_pid_tgid() >> 32) as u32;
    flow.cgroup = cgroup;
    // SAFETY: the helper writes at most so many bytes, and ends the name with a zero byte.
    let failed = unsafe { bpf_get_current_comm(flow.command.as_mut_ptr().cast(), COMMAND_LEN as u32) } != 0;
    if failed {
        flow.command = [0; COMMAND_LEN];
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
///
/// What is the same for all candidates is decided before the search: the verifier follows each way through the search
/// on its own, and a branch within it that always goes the same way would double their number with every candidate.
#[inline(always)]
fn free_port<const V4: bool>(
    ctx: &SockAddrContext,
    pod: &Pod,
    tuple: &mut bpf_sock_tuple,
    to: &Addr,
    hash: u32,
) -> Option<HostPort> {
    let ports = RewrittenPorts::outside(pod.local_ports);
    if V4 {
        let word = to.v4_word();
        tuple.__bindgen_anon_1.ipv4.saddr = word;
        tuple.__bindgen_anon_1.ipv4.daddr = word;
    } else {
        tuple.__bindgen_anon_1.ipv6.saddr = to.words;
        tuple.__bindgen_anon_1.ipv6.daddr = to.words;
    }
    // SAFETY: the context's socket; the verifier checks the access.
    let source_port = unsafe { (*(*ctx.sock_addr).__bindgen_anon_1.sk).src_port } as u16;
    if source_port == 0 {
        first_free::<V4, false>(ctx, &ports, tuple, hash, HostPort(0))
    } else {
        first_free::<V4, true>(ctx, &ports, tuple, hash, HostPort(source_port))
    }
}

#[inline(always)]
fn first_free<const V4: bool, const BOUND: bool>(
    ctx: &SockAddrContext,
    ports: &RewrittenPorts,
    tuple: &mut bpf_sock_tuple,
    hash: u32,
    source: HostPort,
) -> Option<HostPort> {
    for attempt in 0..MAX_CANDIDATES {
        let port = ports.candidate(hash, attempt);
        // A connection of the same source port: the client's end, from before its SYN on.
        if BOUND && (port.0 == source.0 || finds_socket::<V4>(ctx, tuple, port, source)) {
            continue;
        }
        // The end that accepts: a connection's, or a listener.
        if !finds_socket::<V4>(ctx, tuple, source, port) {
            return Some(port);
        }
    }
    None
}

/// Whether a packet between the tuple's addresses, with these ports, would find a socket.
#[inline(always)]
fn finds_socket<const V4: bool>(
    ctx: &SockAddrContext,
    tuple: &mut bpf_sock_tuple,
    from: HostPort,
    to: HostPort,
) -> bool {
    let (sport, dport) = (from.to_be16(), to.to_be16());
    let size = if V4 {
        tuple.__bindgen_anon_1.ipv4.sport = sport;
        tuple.__bindgen_anon_1.ipv4.dport = dport;
        size_of::<bpf_sock_tuple__bindgen_ty_1__bindgen_ty_1>()
    } else {
        tuple.__bindgen_anon_1.ipv6.sport = sport;
        tuple.__bindgen_anon_1.ipv6.dport = dport;
        size_of::<bpf_sock_tuple__bindgen_ty_1__bindgen_ty_2>()
    };
    // SAFETY: helpers on the program's own context; a socket found is released at once.
    unsafe {
        let sk = bpf_skc_lookup_tcp(
            ctx.as_ptr(),
            ptr::from_mut(tuple),
            size as u32,
            BPF_F_CURRENT_NETNS as u64,
            0,
        );
        if sk.is_null() {
            return false;
        }
        bpf_sk_release(sk.cast());
    }
    true
}
