//! What of an enrolled pod's traffic is left alone, as the pod's annotations say.

use crate::{Addr, HostPort};

/// The most entries of all pods together: far more than pods can ask for.
pub const MAX_EXCLUSIONS: u32 = 1 << 18;

/// The value of what is left alone.
pub const EXCLUDED: u32 = 1;
/// The value of what is captured, though a shorter prefix is left alone.
pub const KEPT: u32 = 0;
/// What stands for a value that is not there: see [`NO_VERDICT`](crate::NO_VERDICT).
pub const NOT_EXCLUDED: u32 = u32::MAX;

/// What an entry is about.
#[repr(u32)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ExclusionKind {
    /// A port that the pod serves.
    InboundPort = 1,
    /// A port that the pod dials.
    OutboundPort = 2,
    /// An IPv4 address that the pod dials. A kind of its own, so that no prefix of IPv6 holds the mapped form.
    OutboundV4 = 3,
    /// An IPv6 address that the pod dials.
    OutboundV6 = 4,
}

/// Something that may be left alone: what is matched of an [`Exclusion`].
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct Excludable {
    /// The cookie of the pod's network namespace, in two words: so nothing here is aligned to more than the key is.
    pub netns: [u32; 2],
    /// An [`ExclusionKind`].
    pub kind: u32,
    /// The address; of a port its number in network order, in the first two bytes.
    pub addr: Addr,
}

impl Excludable {
    /// How many bits come before the address.
    pub const BITS_BEFORE: u32 = 96;

    #[inline(always)]
    const fn new(netns: u64, kind: ExclusionKind, addr: Addr) -> Self {
        Self {
            netns: [netns as u32, (netns >> 32) as u32],
            kind: kind as u32,
            addr,
        }
    }

    /// A port of the pod of this namespace.
    #[inline(always)]
    pub const fn port(netns: u64, kind: ExclusionKind, port: HostPort) -> Self {
        let number = ((port.0 as u32) << 16).to_be();
        let addr = Addr {
            words: [number, 0, 0, 0],
        };
        Self::new(netns, kind, addr)
    }

    /// An address that the pod of this namespace dials.
    #[inline(always)]
    pub const fn outbound(netns: u64, addr: Addr) -> Self {
        let kind = if addr.is_v4() {
            ExclusionKind::OutboundV4
        } else {
            ExclusionKind::OutboundV6
        };
        Self::new(netns, kind, addr)
    }

    /// The pod's namespace.
    pub const fn cookie(&self) -> u64 {
        self.netns[0] as u64 | (self.netns[1] as u64) << 32
    }
}

/// The key of an entry: a longest-prefix match.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct Exclusion {
    /// How many bits count: those before the address, and those of it.
    pub prefix_len: u32,
    /// What it begins with.
    pub of: Excludable,
}

/// Whether a connect of the pod to `addr` and `port` is left alone. `find` gives the value of the longest prefix, or
/// [`NOT_EXCLUDED`]. What is kept by its address is kept at every port.
#[inline(always)]
pub fn excludes_outbound(netns: u64, addr: &Addr, port: HostPort, find: impl Fn(&Excludable) -> u32) -> bool {
    match find(&Excludable::outbound(netns, *addr)) {
        EXCLUDED => true,
        KEPT => false,
        _ => find(&Excludable::port(netns, ExclusionKind::OutboundPort, port)) == EXCLUDED,
    }
}

/// Whether what comes in at `port` of the pod is left alone.
#[inline(always)]
pub fn excludes_inbound(netns: u64, port: HostPort, find: impl Fn(&Excludable) -> u32) -> bool {
    find(&Excludable::port(netns, ExclusionKind::InboundPort, port)) == EXCLUDED
}

const _: () = {
    assert!(size_of::<Excludable>() == 28);
    assert!(size_of::<Exclusion>() == 32);
};

#[cfg(feature = "user")]
#[expect(
    unsafe_code,
    reason = "a promise about layout that only the owner of the type can make"
)]
mod pod {
    // SAFETY: `repr(C)`, `Copy`, without padding (its size is the sum of its fields', as asserted above), and every bit
    // pattern is a valid value.
    unsafe impl aya::Pod for super::Exclusion {}
}

#[cfg(test)]
mod tests {
    extern crate std;
    use core::net::IpAddr;
    use std::vec::Vec;

    use super::*;

    fn addr(text: &str) -> Addr {
        text.parse::<IpAddr>().unwrap().into()
    }

    fn bytes(of: &Excludable) -> Vec<u8> {
        let words = [of.netns[0], of.netns[1], of.kind].into_iter().chain(of.addr.words);
        words.flat_map(u32::to_ne_bytes).collect()
    }

    /// As the kernel's map finds it: by the bits of memory in their order.
    fn find(entries: &[(Exclusion, u32)], wanted: &Excludable) -> u32 {
        let bit = |bytes: &[u8], at: usize| bytes[at / 8] >> (7 - at % 8) & 1;
        let wanted = bytes(wanted);
        let matching = entries.iter().filter(|(key, _)| {
            let known = bytes(&key.of);
            (0..key.prefix_len as usize).all(|at| bit(&known, at) == bit(&wanted, at))
        });
        let longest = matching.max_by_key(|(key, _)| key.prefix_len);
        longest.map_or(NOT_EXCLUDED, |(_, value)| *value)
    }

    fn entry(of: Excludable, bits: u32) -> Exclusion {
        Exclusion {
            prefix_len: Excludable::BITS_BEFORE + bits,
            of,
        }
    }

    #[test]
    fn what_is_left_alone_is_told_by_pod_direction_and_family() {
        const POD: u64 = 0x1_0000_0007;
        let port = |kind, port, bits| entry(Excludable::port(POD, kind, HostPort(port)), bits);
        let net = |text: &str, bits| entry(Excludable::outbound(POD, addr(text)), bits);
        let entries = [
            (port(ExclusionKind::OutboundPort, 5432, 16), EXCLUDED),
            (port(ExclusionKind::OutboundPort, 8000, 13), EXCLUDED),
            (port(ExclusionKind::InboundPort, 9090, 16), EXCLUDED),
            (net("10.1.0.0", 96 + 16), EXCLUDED),
            (net("::", 0), EXCLUDED),
            (net("10.1.9.9", 128), KEPT),
            (net("fd00::9", 128), KEPT),
        ];
        let find = |of: &Excludable| find(&entries, of);
        for (pod, to, port, excluded) in [
            (POD, "10.2.0.1", 5432, true),
            (7, "10.2.0.1", 5432, false),
            (POD, "10.2.0.1", 5433, false),
            (POD, "10.2.0.1", 8000, true),
            (POD, "10.2.0.1", 8007, true),
            (POD, "10.2.0.1", 8008, false),
            (POD, "10.2.0.1", 7999, false),
            (POD, "10.2.0.1", 9090, false),
            (POD, "10.1.255.1", 80, true),
            // All of IPv6 is not IPv4 in its mapped form.
            (POD, "10.2.0.1", 80, false),
            (POD, "fd00::1", 80, true),
            (7, "fd00::1", 80, false),
            (POD, "10.1.9.9", 5432, false),
            (POD, "fd00::9", 80, false),
        ] {
            assert_eq!(
                excludes_outbound(pod, &addr(to), HostPort(port), find),
                excluded,
                "{pod} {to} {port}"
            );
        }
        for (pod, port, excluded) in [
            (POD, 9090, true),
            (7, 9090, false),
            (POD, 9091, false),
            (POD, 5432, false),
        ] {
            assert_eq!(excludes_inbound(pod, HostPort(port), find), excluded, "{pod} {port}");
        }
        assert_eq!(Excludable::outbound(POD, addr("::")).cookie(), POD);
    }
}
