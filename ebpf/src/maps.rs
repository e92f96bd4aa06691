//! The maps, and access to the storage of sockets.

use core::ffi::c_void;
use core::ptr;

use adit_common::{
    Addr, AddrKey, COUNTERS, Cached, Config, Counter, Destination, Direct, DirectEnd, EVENTS_LEN, Endpoint,
    EndpointKey, EndpointList, Excludable, Flow, FlowKey, HostPort, LISTENERS_PER_POD, MAX_CLIENTS, MAX_DESTINATIONS,
    MAX_DIRECT, MAX_ENDPOINTS, MAX_EXCLUSIONS, MAX_FLOWS, MAX_OTHERS, MAX_PODS, MAX_PROXIES, MAX_RANGES, MAX_SERVICES,
    MAX_VERDICTS, NO_VERDICT, NOT_EXCLUDED, Pod, REFUSALS_LEN, RefusalShare, STRANGERS_LEN, ServiceKey, Stranger,
    Verdict, VerdictKey,
};
use aya_ebpf::bindings::{BPF_F_NO_PREALLOC, BPF_SK_STORAGE_GET_F_CREATE, bpf_sock};
use aya_ebpf::btf_maps::lpm_trie::Key;
use aya_ebpf::btf_maps::{Array, HashMap, LpmTrie, PerCpuArray, RingBuf, SkStorage, SockMap};
use aya_ebpf::helpers::generated::{bpf_sk_storage_delete, bpf_sk_storage_get};
use aya_ebpf::macros::btf_map;

use crate::context::read_addr;

/// The enrolled pods of this node, by the cookie of their network namespace.
#[btf_map(name = "adit_pods")]
pub static PODS: HashMap<u64, Pod, { MAX_PODS as usize }> = HashMap::new();

/// The addresses of pods that have more than one of a family.
#[btf_map(name = "adit_addrs")]
pub static ADDRS: HashMap<AddrKey, u8, { 8 * MAX_PODS as usize }> = HashMap::new();

/// The cgroups of the proxies, whose own sockets in pods' namespaces are left alone.
#[btf_map(name = "adit_proxies")]
pub static PROXIES: HashMap<u64, u8, { MAX_PROXIES as usize }> = HashMap::new();

/// Captured connections from their SYN to the proxy's accept. Not an LRU: full means refused, never forgotten.
#[btf_map(name = "adit_flows")]
pub static FLOWS: HashMap<FlowKey, Flow, { MAX_FLOWS as usize }> = HashMap::new();

/// Connections from the proxy to applications, from before their SYN to their establishment.
#[btf_map(name = "adit_clients")]
pub static CLIENTS: HashMap<FlowKey, Flow, { MAX_CLIENTS as usize }> = HashMap::new();

/// The proxy's listeners in the pods' namespaces.
#[btf_map(name = "adit_listeners")]
pub static LISTENERS: SockMap<{ (MAX_PODS * LISTENERS_PER_POD) as usize }> = SockMap::new();

/// Made as they are needed: the limits are far above what most nodes use.
const GROWS: usize = BPF_F_NO_PREALLOC as usize;

/// Addresses of which something is known.
#[btf_map(name = "adit_destinations")]
pub static DESTINATIONS: HashMap<Addr, Destination, { MAX_DESTINATIONS as usize }, GROWS> = HashMap::new();

/// What holds of addresses of which nothing is known by themselves. Without an entry they are asked.
#[btf_map(name = "adit_ranges")]
pub static RANGES: LpmTrie<Addr, u32, { MAX_RANGES as usize }> = LpmTrie::new();

/// What of pods' traffic is left alone. Looked into for pods whose flags say that there is something.
#[btf_map(name = "adit_exclusions")]
pub static EXCLUSIONS: LpmTrie<Excludable, u32, { MAX_EXCLUSIONS as usize }> = LpmTrie::new();

/// The verdicts on connections within the node, and on peers without identity.
#[btf_map(name = "adit_verdicts")]
pub static VERDICTS: HashMap<VerdictKey, Verdict, { MAX_VERDICTS as usize }, GROWS> = HashMap::new();

/// The endpoints that ports of virtual addresses lead to at present.
#[btf_map(name = "adit_services")]
pub static SERVICES: HashMap<ServiceKey, EndpointList, { MAX_SERVICES as usize }, GROWS> = HashMap::new();

/// The endpoints in their lists. A list is written before it is named, and goes when it has not been named for long.
#[btf_map(name = "adit_endpoints")]
pub static ENDPOINTS: HashMap<EndpointKey, Endpoint, { MAX_ENDPOINTS as usize }, GROWS> = HashMap::new();

/// The open direct connections, by their socket's cookie.
#[btf_map(name = "adit_direct")]
pub static DIRECT: HashMap<u64, Direct, { MAX_DIRECT as usize }, GROWS> = HashMap::new();

/// The ends of direct connections, for the proxy's log and metrics.
#[btf_map(name = "adit_events")]
pub static EVENTS: RingBuf<DirectEnd, { EVENTS_LEN as usize }> = RingBuf::new();

/// Refusals, for the proxy's log and metrics. A ring of their own: they are not to crowd out the ends of connections.
#[btf_map(name = "adit_refusals")]
pub static REFUSALS: RingBuf<DirectEnd, { REFUSALS_LEN as usize }> = RingBuf::new();

/// How much of each pod's refusals has been told, so that no pod crowds out another's: see `refusal_index`.
#[btf_map(name = "adit_refused")]
pub static REFUSED: Array<RefusalShare, { 2 * MAX_PODS as usize }> = Array::new();

/// What is counted, by [`Counter`].
#[btf_map(name = "adit_counters")]
pub static COUNTED: PerCpuArray<u64, { COUNTERS as usize }> = PerCpuArray::new();

/// What the proxy's settings say.
#[btf_map(name = "adit_config")]
pub static CONFIG: Array<Config, 1> = Array::new();

/// The cookies of network namespaces that are known not to be in the mesh.
#[btf_map(name = "adit_others")]
pub static OTHERS: HashMap<u64, u8, { MAX_OTHERS as usize }, GROWS> = HashMap::new();

/// Connects in namespaces that are neither enrolled nor known not to be in the mesh.
#[btf_map(name = "adit_strangers")]
pub static STRANGERS: RingBuf<Stranger, { STRANGERS_LEN as usize }> = RingBuf::new();

/// What is known of a destination, and which pod of this node it is: the cookie is zero where it is none.
#[inline(always)]
pub fn known(source: u32, addr: &Addr, port: HostPort) -> (u64, Cached) {
    let Some(place) = DESTINATIONS.get_ptr(addr) else {
        let verdict = RANGES.get(&Key::new(128, *addr)).copied();
        return (0, Cached::from_u32(verdict.unwrap_or_default()));
    };
    // SAFETY: an element of the map, or of one that has its place by now. Volatile, for the order: see `Destination`.
    let (destination, owner) = unsafe {
        let destination = Destination {
            addr: *addr,
            netns: ptr::read_volatile(&raw const (*place).netns),
            slot: ptr::read_volatile(&raw const (*place).slot),
            verdict: ptr::read_volatile(&raw const (*place).verdict),
        };
        (destination, read_addr(&raw const (*place).addr.words))
    };
    if !owner.same(addr) {
        return (0, Cached::Ask);
    }
    (
        destination.netns,
        adit_common::cached(source, &destination, port, verdict),
    )
}

/// The network namespace of the pod of this node whose address this is known to be; 0 where it is nobody's.
#[inline(always)]
pub fn owner(addr: &Addr) -> u64 {
    let Some(place) = DESTINATIONS.get_ptr(addr) else {
        return 0;
    };
    // SAFETY: as in `known`.
    let (netns, of) = unsafe {
        (
            ptr::read_volatile(&raw const (*place).netns),
            read_addr(&raw const (*place).addr.words),
        )
    };
    if of.same(addr) { netns } else { 0 }
}

#[inline(always)]
fn verdict(key: &VerdictKey) -> u32 {
    let Some(place) = VERDICTS.get_ptr(key) else {
        return NO_VERDICT;
    };
    // SAFETY: as above.
    let (verdict, source, slot, port) = unsafe {
        (
            ptr::read_volatile(&raw const (*place).verdict),
            ptr::read_volatile(&raw const (*place).key.source),
            ptr::read_volatile(&raw const (*place).key.slot),
            ptr::read_volatile(&raw const (*place).key.port),
        )
    };
    let its_own = source == key.source && slot == key.slot && port == key.port;
    // Not "no verdict": that would let another key's be found instead.
    if its_own { verdict } else { Cached::Ask as u32 }
}

/// Whether a connect of the pod is left alone.
#[inline(always)]
pub fn excludes_outbound(netns: u64, addr: &Addr, port: HostPort) -> bool {
    adit_common::excludes_outbound(netns, addr, port, exclusion)
}

/// Whether what comes in at a port of the pod is left alone.
#[inline(always)]
pub fn excludes_inbound(netns: u64, port: HostPort) -> bool {
    adit_common::excludes_inbound(netns, port, exclusion)
}

#[inline(always)]
fn exclusion(of: &Excludable) -> u32 {
    let bits = 8 * size_of::<Excludable>() as u32;
    EXCLUSIONS.get(&Key::new(bits, *of)).copied().unwrap_or(NOT_EXCLUDED)
}

/// Adds to a counter.
#[inline(always)]
pub fn count(counter: Counter, by: u64) {
    if let Some(value) = COUNTED.get_ptr_mut(counter as u32) {
        // SAFETY: this CPU's own. A program that interrupts another's addition may have its own go lost.
        unsafe { *value += by };
    }
}

/// The truth about the peer of a socket whose peer was rewritten; freed with the socket.
#[btf_map(name = "adit_sockets")]
pub static SOCKETS: SkStorage<Flow> = SkStorage::new();

/// What is stored with the socket.
///
/// # Safety
///
/// `sk` is a socket pointer of the current context, as the verifier knows it.
#[inline(always)]
pub unsafe fn socket_flow<'a>(sk: *mut bpf_sock) -> Option<&'a Flow> {
    // SAFETY: the caller's promise; null or a value that stays valid for the program's run.
    unsafe { storage(sk, 0).as_ref() }
}

/// What is stored with the socket, made if there is nothing yet. None where the kernel had no memory for it.
///
/// # Safety
///
/// As for [`socket_flow`].
#[inline(always)]
pub unsafe fn new_socket_flow<'a>(sk: *mut bpf_sock) -> Option<&'a mut Flow> {
    // SAFETY: as for `socket_flow`.
    unsafe { storage(sk, BPF_SK_STORAGE_GET_F_CREATE.into()).as_mut() }
}

/// Stores `flow` with the socket, over what was there, unless the kernel has no memory for it.
///
/// # Safety
///
/// As for [`socket_flow`].
#[inline(always)]
pub unsafe fn set_socket_flow(sk: *mut bpf_sock, flow: &Flow) {
    // SAFETY: as for `socket_flow`. Through the pointer: between references the compiler makes the copy a loop.
    unsafe {
        let stored = storage(sk, BPF_SK_STORAGE_GET_F_CREATE.into());
        if !stored.is_null() {
            *stored = *flow;
        }
    }
}

/// The socket's storage, or null.
///
/// # Safety
///
/// As for [`socket_flow`].
#[inline(always)]
unsafe fn storage(sk: *mut bpf_sock, flags: u64) -> *mut Flow {
    // SAFETY: the caller's promise; the kernel returns null or a value of the map's type.
    unsafe { bpf_sk_storage_get(map_ptr(), sk.cast(), ptr::null_mut(), flags).cast() }
}

/// Forgets what is stored with the socket.
///
/// # Safety
///
/// As for [`socket_flow`].
#[inline(always)]
pub unsafe fn clear_socket_flow(sk: *mut bpf_sock) {
    // SAFETY: the caller's promise. Nothing being there is as good.
    unsafe { bpf_sk_storage_delete(map_ptr(), sk.cast()) };
}

#[inline(always)]
fn map_ptr() -> *mut c_void {
    ptr::from_ref(&SOCKETS).cast_mut().cast()
}
