//! The records of direct connections: begun before the SYN, told to the proxy at the end.

use core::mem::MaybeUninit;

use adit_common::{Addr, Counter, Direct, DirectEnd, DirectKind, Flow, HostPort};
use aya_ebpf::EbpfContext as _;
use aya_ebpf::bindings::BPF_ANY;
use aya_ebpf::helpers::generated::{bpf_get_socket_cookie, bpf_ktime_get_ns};
use aya_ebpf::maps::ring_buf::RingBufEntry;
use aya_ebpf::programs::SockOpsContext;

use crate::maps::{DIRECT, EVENTS, count};

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
        reserved: 0,
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

/// The socket has closed, from `state`.
#[inline(always)]
pub fn end(ctx: &SockOpsContext, state: u32) {
    let cookie = cookie(ctx);
    // SAFETY: as above.
    let Some(direct) = (unsafe { DIRECT.get(cookie) }) else {
        return;
    };
    // SAFETY: the context's own fields.
    let (acked, received, srtt, retransmits) = unsafe {
        let ops = &*ctx.ops;
        (ops.bytes_acked, ops.bytes_received, ops.srtt_us, ops.total_retrans)
    };
    if let Some(mut entry) = EVENTS.reserve(0) {
        fill(&mut entry, |end| {
            end.direct = *direct;
            end.cookie = cookie;
            end.closed = now();
            end.acked = acked;
            end.received = received;
            end.srtt = srtt;
            end.retransmits = retransmits;
            end.state = state;
            end.reserved = 0;
        });
        // First: whoever hears of the end finds it open no more.
        let _ = DIRECT.remove(cookie);
        entry.submit(0);
    } else {
        let _ = DIRECT.remove(cookie);
        count(Counter::LostEnds, 1);
        count(Counter::LostSent, acked);
        count(Counter::LostReceived, received);
    }
}

/// A connect to `server` was refused by a cached verdict, or because there is no such server. `describe` fills in what
/// was dialled and its author.
#[inline(always)]
pub fn tell_refused(netns: u64, server: Option<(Addr, HostPort)>, describe: impl FnOnce(&mut Flow)) {
    let mut flow = Flow::default();
    describe(&mut flow);
    let nowhere = (Addr::default(), HostPort(0));
    tell(
        DirectKind::Outbound,
        netns,
        nowhere,
        server.unwrap_or(nowhere),
        Some(&flow),
    );
}

/// A SYN was refused by a cached verdict.
#[inline(always)]
pub fn tell_refused_syn(netns: u64, client: Addr, client_port: HostPort, server: Addr, server_port: HostPort) {
    tell(
        DirectKind::Inbound,
        netns,
        (client, client_port),
        (server, server_port),
        None,
    );
}

#[inline(always)]
fn tell(kind: DirectKind, netns: u64, client: (Addr, HostPort), server: (Addr, HostPort), flow: Option<&Flow>) {
    let Some(mut entry) = EVENTS.reserve(0) else {
        count(Counter::LostEnds, 1);
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
        end.direct.reserved = 0;
        end.cookie = 0;
        end.closed = now;
        end.acked = 0;
        end.received = 0;
        end.srtt = 0;
        end.retransmits = 0;
        end.state = 0;
        end.reserved = 0;
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
