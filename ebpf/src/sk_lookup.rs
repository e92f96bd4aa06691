//! `sk_lookup`: a SYN that reaches an enrolled pod goes to the listener that it is for.
//!
//! The hook cannot tell which namespace it runs in, so each pod has an instance of its own, told by constants whose
//! pod it is: an address that two pods claim cannot lead to the other's listeners. Minimum kernel 5.17 (`ingress_ifindex`).

use adit_common::{
    Addr, AddrKey, Cached, FlowKey, FlowKind, HostPort, Listener, NOBODY, PodFlags, SynFacts, SynVerdict,
    listener_index, syn,
};
use aya_ebpf::Global;
use aya_ebpf::bindings::sk_action::{SK_DROP, SK_PASS};
use aya_ebpf::macros::sk_lookup;
use aya_ebpf::programs::SkLookupContext;
use aya_log_ebpf::info;

use crate::context::read_addr;
use crate::direct;
use crate::maps::{ADDRS, CLIENTS, FLOWS, LISTENERS, excludes_inbound, known};

/// The cookie of the pod's network namespace.
#[unsafe(no_mangle)]
static ADIT_NETNS: Global<u64> = Global::new(0);
/// The pod's slot in the map of listeners.
#[unsafe(no_mangle)]
static ADIT_SLOT: Global<u32> = Global::new(0);
/// The pod's flags.
#[unsafe(no_mangle)]
static ADIT_FLAGS: Global<u32> = Global::new(0);

const AF_INET: u32 = 2;
const IPPROTO_TCP: u32 = 6;

#[sk_lookup]
pub fn adit_sk_lookup(ctx: SkLookupContext) -> u32 {
    // SAFETY: reads of the kernel's context; the verifier checks each access.
    let (protocol, family) = unsafe { ((*ctx.lookup).protocol, (*ctx.lookup).family) };
    if protocol != IPPROTO_TCP {
        return SK_PASS;
    }
    let (remote, local) = if family == AF_INET {
        // SAFETY: as above.
        unsafe { (Addr::v4((*ctx.lookup).remote_ip4), Addr::v4((*ctx.lookup).local_ip4)) }
    } else {
        // SAFETY: as above.
        unsafe {
            (
                read_addr(&raw const (*ctx.lookup).remote_ip6),
                read_addr(&raw const (*ctx.lookup).local_ip6),
            )
        }
    };
    // SAFETY: as above.
    let (remote_port, port) = unsafe {
        (
            HostPort::from_be16((*ctx.lookup).remote_port),
            HostPort((*ctx.lookup).local_port as u16),
        )
    };
    let netns = ADIT_NETNS.load();
    let flags = PodFlags(ADIT_FLAGS.load());
    let facts = SynFacts {
        remote,
        local,
        port,
        announced: announced(&FlowKey::new(netns, remote, remote_port, port)),
        from_other_own_address: flags.has(PodFlags::MORE_ADDRESSES)
            && ADDRS.get_ptr(AddrKey { netns, addr: remote }).is_some(),
        // SAFETY: as above.
        searched: unsafe { (*ctx.lookup).ingress_ifindex } == 0,
    };
    let nobody = || {
        if flags.has(PodFlags::EXCLUDES_INBOUND) && excludes_inbound(netns, port) {
            return Cached::Excluded;
        }
        match known(NOBODY, &local, port) {
            (owner, verdict) if owner == netns => verdict,
            // Another pod's address, or nobody's: nothing is known of this pod by it.
            _ => Cached::Ask,
        }
    };
    match syn(&facts, nobody) {
        SynVerdict::Pass => {
            if flags.has(PodFlags::LOG) {
                info!(
                    &ctx,
                    "netns {} syn {:i}:{} to port {} passed",
                    netns,
                    remote.octets(),
                    remote_port.0,
                    port.0
                );
            }
            SK_PASS
        }
        SynVerdict::Refuse => {
            direct::tell_refused_syn(netns, ADIT_SLOT.load(), remote, remote_port, local, port);
            SK_DROP
        }
        SynVerdict::Steer(listener) => assign(&ctx, netns, flags, remote, remote_port, port, listener),
    }
}

#[inline(always)]
fn announced(key: &FlowKey) -> Option<FlowKind> {
    // SAFETY: the field is written before the SYN, and not changed after.
    if let Some(flow) = unsafe { FLOWS.get(key) } {
        return Some(FlowKind::from_u16(flow.kind));
    }
    // The proxy's own, to an application.
    let of_proxy = !key.client.is_v4() && CLIENTS.get_ptr(key).is_some();
    of_proxy.then_some(FlowKind::Own)
}

#[inline(always)]
fn assign(
    ctx: &SkLookupContext,
    netns: u64,
    flags: PodFlags,
    remote: Addr,
    remote_port: HostPort,
    port: HostPort,
    listener: Listener,
) -> u32 {
    let assigned = LISTENERS
        .redirect_sk_lookup(ctx, listener_index(ADIT_SLOT.load(), listener), 0)
        .is_ok();
    if flags.has(PodFlags::LOG) {
        info!(
            ctx,
            "netns {} syn {:i}:{} to port {} for listener {}, found {}",
            netns,
            remote.octets(),
            remote_port.0,
            port.0,
            listener as u32,
            assigned as u32
        );
    }
    // Never to the application past the proxy.
    if assigned { SK_PASS } else { SK_DROP }
}
