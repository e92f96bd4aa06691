//! The records of direct connections: begun before the SYN, told to the proxy at the end.

use core::mem::MaybeUninit;
use core::ptr;

use adit_common::{Addr, Counter, Direct, DirectEnd, DirectKind, Flow, HostPort, RefusalKind, refusal_index};
use aya_ebpf::EbpfContext as _;
use aya_ebpf::bindings::BPF_ANY;
use aya_ebpf::helpers::generated::{bpf_get_socket_cookie, bpf_ktime_get_ns};
use aya_ebpf::maps::ring_buf::RingBufEntry;
use aya_ebpf::programs::SockOpsContext;

use crate::maps::{DIRECT, EVENTS, REFUSALS, REFUSED, count};

/// Records a connection. `flow` is what is known of it at the side that connects. Whether there was memory for it.
#[inline(always)]
pub fn record(
    ctx: &SockOpsContext,
    kind: DirectKind,
    netns: u64,
    client: (Addr, HostPort),
    server: (Addr, HostPort),
    flow: Option<&Flow>,
) -> bool {
    let direct = Direct {
        client: client.0,
        server: server.0,
        dialled: flow.map_or(server.0, |flow| flow.addr),
        netns,
        opened: now(),
        cgroup: flow.map_or(0, |flow| flow.cgroup),
        half_closed_received: 0,
        command: flow.map_or([0; _], |flow| flow.command),
        pid: flow.map_or(0, |flow| flow.pid),
        client_port: client.1,
        server_port: server.1,
        dialled_port: flow.map_or(server.1, |flow| flow.port),
        kind: kind as u16,
        state: 0,
        closed: 0,
        acked: 0,
        received: 0,
        srtt: 0,
        retransmits: 0,
    };
    let recorded = DIRECT.insert(cookie(ctx), direct, BPF_ANY.into()).is_ok();
    if !recorded {
        count(Counter::Unrecorded, 1);
    }
    recorded
}

/// This end has closed, and the other has not yet: from here on what is received tells whether the other's FIN has come.
#[inline(always)]
pub fn half_closed(ctx: &SockOpsContext) {
    if let Some(direct) = DIRECT.get_ptr_mut(cookie(ctx)) {
        // SAFETY: an entry of the map; this socket's callbacks are its only writers. The context's own field.
        unsafe { (*direct).half_closed_received = (*ctx.ops).bytes_received };
    }
}

/// The socket has closed, from `state`. Where the ring is full the end waits in the map.
#[inline(always)]
pub fn end(ctx: &SockOpsContext, state: u32) {
    let cookie = cookie(ctx);
    let Some(place) = DIRECT.get_ptr_mut(cookie) else {
        return;
    };
    // SAFETY: the context's own fields.
    let (acked, received, srtt, retransmits) = unsafe {
        let ops = &*ctx.ops;
        (ops.bytes_acked, ops.bytes_received, ops.srtt_us, ops.total_retrans)
    };
    if let Some(mut entry) = EVENTS.reserve(0) {
        fill(&mut entry, |end| {
            // SAFETY: as above.
            end.direct = unsafe { *place };
            end.direct.closed = now();
            end.direct.acked = acked;
            end.direct.received = received;
            end.direct.srtt = srtt;
            end.direct.retransmits = retransmits;
            end.direct.state = state;
            end.cookie = cookie;
        });
        // First: whoever hears of the end finds it open no more.
        let _ = DIRECT.remove(cookie);
        entry.submit(0);
    } else {
        // SAFETY: as above.
        unsafe {
            (*place).closed = now();
            (*place).acked = acked;
            (*place).received = received;
            (*place).srtt = srtt;
            (*place).retransmits = retransmits;
            // Last: by this the proxy knows it.
            ptr::write_volatile(&raw mut (*place).state, state);
        }
        count(Counter::LateEnds, 1);
    }
}

/// A connect of the pod at `slot` to `server` was refused by a cached verdict, or because there is no such server.
/// `describe` fills in what was dialled and its author.
#[inline(always)]
pub fn tell_refused(netns: u64, slot: u32, server: Option<(Addr, HostPort)>, describe: impl FnOnce(&mut Flow)) {
    let nowhere = (Addr::default(), HostPort(0));
    let server = server.unwrap_or(nowhere);
    if !is_to_be_told(slot, RefusalKind::Connect) {
        return;
    }
    let mut flow = Flow::default();
    describe(&mut flow);
    tell(DirectKind::Outbound, netns, nowhere, server, Some(&flow));
}

/// A SYN to the pod at `slot` was refused by a cached verdict.
#[inline(always)]
pub fn tell_refused_syn(
    netns: u64,
    slot: u32,
    client: Addr,
    client_port: HostPort,
    server: Addr,
    server_port: HostPort,
) {
    if is_to_be_told(slot, RefusalKind::Syn) {
        let (client, server) = ((client, client_port), (server, server_port));
        tell(DirectKind::Inbound, netns, client, server, None);
    }
}

/// Whether the pod's share of refusals is not used up; else this one is only counted.
#[inline(always)]
fn is_to_be_told(slot: u32, kind: RefusalKind) -> bool {
    let Some(place) = REFUSED.get_ptr_mut(refusal_index(slot, kind)) else {
        return false;
    };
    // SAFETY: an element of the map. Others may write at the same time: then a few more are told, or not counted here.
    let tell = unsafe {
        let (share, tell) = (*place).one_more(now());
        *place = share;
        tell
    };
    if !tell {
        count(Counter::UntoldRefusals, 1);
    }
    tell
}

#[inline(always)]
fn tell(kind: DirectKind, netns: u64, client: (Addr, HostPort), server: (Addr, HostPort), flow: Option<&Flow>) {
    let Some(mut entry) = REFUSALS.reserve(0) else {
        count(Counter::UntoldRefusals, 1);
        return;
    };
    fill(&mut entry, |end| {
        let now = now();
        end.direct.client = client.0;
        end.direct.server = server.0;
        end.direct.dialled = flow.map_or(server.0, |flow| flow.addr);
        end.direct.netns = netns;
        end.direct.opened = now;
        end.direct.cgroup = flow.map_or(0, |flow| flow.cgroup);
        end.direct.half_closed_received = 0;
        end.direct.command = flow.map_or([0; _], |flow| flow.command);
        end.direct.pid = flow.map_or(0, |flow| flow.pid);
        end.direct.client_port = client.1;
        end.direct.server_port = server.1;
        end.direct.dialled_port = flow.map_or(server.1, |flow| flow.port);
        end.direct.kind = kind as u16;
        end.direct.state = 0;
        end.direct.closed = now;
        end.direct.acked = 0;
        end.direct.received = 0;
        end.direct.srtt = 0;
        end.direct.retransmits = 0;
        end.cookie = 0;
    });
    entry.submit(0);
}

/// Fills in every field of an entry, in place.
#[inline(always)]
fn fill(entry: &mut RingBufEntry<DirectEnd>, fields: impl FnOnce(&mut DirectEnd)) {
    let uninit: &mut MaybeUninit<DirectEnd> = entry;
    // SAFETY: plain integers, of which `fields` writes each without reading it.
    fields(unsafe { uninit.assume_init_mut() });
}

#[inline(always)]
fn cookie(ctx: &SockOpsContext) -> u64 {
    // SAFETY: a helper on the program's own context.
    unsafe { bpf_get_socket_cookie(ctx.as_ptr()) }
}

#[inline(always)]
fn now() -> u64 {
    // SAFETY: a helper without arguments.
    unsafe { bpf_ktime_get_ns() }
}
