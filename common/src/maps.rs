//! Keys and values of the maps. The layout is part of the contract between kernel and user space: fixed, without
//! padding that the compiler chooses, and asserted below.

use crate::{Addr, Endpoint, HostPort};

/// The version of the layout of all maps and values: part of the name of the folder in which they are pinned. To be
/// raised with every change to a map's kind, size, key or value, or to what one of them means.
pub const LAYOUT: u32 = 3;
/// The most pods that one node enrols.
pub const MAX_PODS: u32 = 1024;
/// The most captured connections between their SYN and the proxy's accept.
pub const MAX_FLOWS: u32 = 65_536;
/// The most connections from the proxy to applications between the proxy's dial and their establishment.
pub const MAX_CLIENTS: u32 = 16_384;
/// The most proxies whose sockets are left alone: the one in charge, and those that still drain.
pub const MAX_PROXIES: u32 = 64;
/// The kernel's `TASK_COMM_LEN`.
pub const COMMAND_LEN: usize = 16;
/// How many places of the listener map belong to one pod.
pub const LISTENERS_PER_POD: u32 = 4;

/// The listeners that the proxy holds in each enrolled pod's network namespace.
#[repr(u32)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Listener {
    /// Takes the pod's own captured connections.
    Outbound = 0,
    /// Takes tunnels from other nodes: port 15008.
    Hbone = 1,
    /// Takes plaintext connections to the pod from outside the mesh.
    Plaintext = 2,
}

/// The listener's place in the map of listeners, given the pod's slot.
#[inline(always)]
pub const fn listener_index(slot: u32, listener: Listener) -> u32 {
    slot * LISTENERS_PER_POD + listener as u32
}

/// Properties of an enrolled pod.
#[repr(transparent)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PodFlags(pub u32);

impl PodFlags {
    /// The programs log their decisions on this pod's connections.
    pub const LOG: Self = Self(1);
    /// The pod has more addresses than the first of each family: the address map knows them.
    pub const MORE_ADDRESSES: Self = Self(2);
    /// The pod's connections within the node take the proxy too.
    pub const SAME_NODE_ENCRYPTED: Self = Self(4);
    /// Some of what the pod dials is left alone: the map of exclusions says what.
    pub const EXCLUDES_OUTBOUND: Self = Self(8);
    /// Some of what comes in to the pod is left alone.
    pub const EXCLUDES_INBOUND: Self = Self(16);

    /// Whether all of `flag` is set.
    #[inline(always)]
    pub const fn has(self, flag: Self) -> bool {
        self.0 & flag.0 == flag.0
    }

    /// Both together.
    pub const fn with(self, flag: Self) -> Self {
        Self(self.0 | flag.0)
    }
}

/// An enrolled pod, keyed by its network namespace's cookie.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Pod {
    /// The pod's first IPv4 address, or none.
    pub v4: Addr,
    /// The pod's first IPv6 address, or none.
    pub v6: Addr,
    /// The pod's place in the map of listeners.
    pub slot: u32,
    /// See [`PodFlags`].
    pub flags: PodFlags,
    /// The pod's `net.ipv4.ip_local_port_range`: rewritten ports stay out of it.
    pub local_ports: [u16; 2],
    /// A random number of this pod, so that rewritten ports cannot be foretold.
    pub seed: u32,
    /// The number of the pod's identity among the verdicts' sources.
    pub source: u32,
    /// Always zero.
    pub reserved: u32,
}

/// An address of a pod: namespace cookie and address.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AddrKey {
    /// The network namespace's cookie.
    pub netns: u64,
    /// The address.
    pub addr: Addr,
}

/// A connection whose SYN is on its way to a socket lookup, by what that sees of it.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct FlowKey {
    /// The cookie of the network namespace of the side that accepts.
    pub netns: u64,
    /// The address of the side that connects.
    pub client: Addr,
    /// The port of the side that connects.
    pub client_port: HostPort,
    /// The port of the side that accepts.
    pub server_port: HostPort,
    /// Always zero.
    pub reserved: u32,
}

impl FlowKey {
    /// The key of a connection.
    #[inline(always)]
    pub const fn new(netns: u64, client: Addr, client_port: HostPort, server_port: HostPort) -> Self {
        Self {
            netns,
            client,
            client_port,
            server_port,
            reserved: 0,
        }
    }
}

/// What a connection on its way is to the socket lookup of the side that accepts.
#[repr(u16)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FlowKind {
    /// Captured: for the proxy.
    Captured = 0,
    /// Permitted: for the application itself.
    Direct = 1,
    /// From the pod to itself, by an address for which the kernel does not keep strangers from saying that they are it.
    Own = 2,
    /// A probe by the node's kubelet, which no policy forbids: for the application itself.
    Probe = 3,
}

impl FlowKind {
    /// From a map's value.
    #[inline(always)]
    pub const fn from_u16(value: u16) -> Self {
        match value {
            1 => Self::Direct,
            2 => Self::Own,
            3 => Self::Probe,
            _ => Self::Captured,
        }
    }
}

/// What the programs are told by the proxy's settings. There is one.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Config {
    /// The cookie of the node's own network namespace, in which the kubelet's sockets are.
    pub host_netns: u64,
    /// The cgroup that the kubelet is in: itself, not one below it.
    pub kubelet_cgroup: u64,
    /// The kubelet's command name, filled up with zero bytes; all zero where every process of its cgroup is it.
    pub kubelet: [u8; COMMAND_LEN],
    /// A [`Startup`](crate::Startup).
    pub startup: u32,
    /// Always zero.
    pub reserved: u32,
}

impl Config {
    /// Whether a process of this cgroup and command name, with a socket in this namespace, is the kubelet.
    #[inline(always)]
    pub const fn is_kubelet(&self, netns: u64, cgroup: u64, command: &[u8; COMMAND_LEN]) -> bool {
        let wanted = words(&self.kubelet);
        let is = words(command);
        let any = wanted[0] == 0 && wanted[1] == 0;
        let in_place = self.host_netns != 0 && netns == self.host_netns && cgroup == self.kubelet_cgroup;
        in_place && (any || (wanted[0] == is[0] && wanted[1] == is[1]))
    }
}

/// The name as two words: a comparison of arrays is a call of a function that the kernel does not have.
#[inline(always)]
const fn words(name: &[u8; COMMAND_LEN]) -> [u64; 2] {
    let [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p] = *name;
    [
        u64::from_ne_bytes([a, b, c, d, e, f, g, h]),
        u64::from_ne_bytes([i, j, k, l, m, n, o, p]),
    ]
}

/// The truth about a connection.
///
/// In the map of flows and in a client's socket: the destination that the client dialled, and who dialled.
/// In the map of clients and in an accepted socket: the true client; the author is then zero.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Flow {
    /// The true address of the peer.
    pub addr: Addr,
    /// The true port of the peer.
    pub port: HostPort,
    /// A [`FlowKind`].
    pub kind: u16,
    /// The process (thread group) that called `connect`, in the initial PID namespace.
    pub pid: u32,
    /// The cgroup of that process.
    pub cgroup: u64,
    /// The command name of that process, ended by a zero byte.
    pub command: [u8; COMMAND_LEN],
    /// The endpoint that was chosen, where a service was dialled; otherwise none.
    pub endpoint: Endpoint,
    /// Always zero.
    pub reserved: u32,
}

const _: () = {
    assert!(size_of::<Addr>() == 16);
    assert!(size_of::<Pod>() == 56);
    assert!(size_of::<AddrKey>() == 24);
    assert!(size_of::<FlowKey>() == 32);
    assert!(size_of::<Flow>() == 72);
    assert!(size_of::<Config>() == 40);
};

#[cfg(feature = "user")]
#[expect(
    unsafe_code,
    reason = "a promise about layout that only the owner of the types can make"
)]
mod pod {
    // SAFETY: each type is `repr(C)` or transparent, `Copy`, without padding (its size is the sum of its fields', as
    // asserted above), and every bit pattern is a valid value.
    unsafe impl aya::Pod for super::Pod {}
    // SAFETY: as above.
    unsafe impl aya::Pod for super::AddrKey {}
    // SAFETY: as above.
    unsafe impl aya::Pod for super::FlowKey {}
    // SAFETY: as above.
    unsafe impl aya::Pod for super::Flow {}
    // SAFETY: as above.
    unsafe impl aya::Pod for super::Config {}
    // SAFETY: as above.
    unsafe impl aya::Pod for crate::Addr {}
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(text: &str) -> [u8; COMMAND_LEN] {
        let mut name = [0; COMMAND_LEN];
        name[..text.len()].copy_from_slice(text.as_bytes());
        name
    }

    #[test]
    fn the_kubelet_is_known_by_its_namespace_and_its_whole_name() {
        let named = Config {
            host_netns: 7,
            kubelet_cgroup: 5,
            kubelet: name("kubelet"),
            ..Config::default()
        };
        let any = Config {
            kubelet: name(""),
            ..named
        };
        let unset = Config::default();
        for (config, netns, cgroup, command, is_kubelet) in [
            (named, 7, 5, "kubelet", true),
            (named, 8, 5, "kubelet", false),
            (named, 7, 6, "kubelet", false),
            (named, 7, 5, "kubelet2", false),
            (named, 7, 5, "kubele", false),
            (named, 7, 5, "kubelet-wrapper", false),
            (any, 7, 5, "whatever", true),
            (any, 8, 5, "whatever", false),
            (unset, 0, 0, "kubelet", false),
        ] {
            assert_eq!(
                config.is_kubelet(netns, cgroup, &name(command)),
                is_kubelet,
                "{netns} {cgroup} {command}"
            );
        }
    }
}
