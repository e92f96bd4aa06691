//! The decisions of the kernel programs.

use core::num::NonZeroU32;

use crate::{Addr, Cached, FlowKind, HostPort, Listener, Pod};

/// The port on which an enrolled pod takes tunnels.
pub const HBONE_PORT: HostPort = HostPort(15008);

/// How many rewritten ports are tried before a connect is refused.
pub const MAX_CANDIDATES: u32 = 8;

/// What the connect hook knows.
#[derive(Clone, Copy, Debug)]
pub struct ConnectFacts {
    /// The address that the application dials.
    pub destination: Addr,
    /// Whether the caller is the proxy.
    pub by_proxy: bool,
    /// Whether the address map names the destination as the pod's own.
    pub to_other_own_address: bool,
    /// Whether the pod excludes the destination.
    pub excluded: bool,
}

/// What becomes of a connect.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ConnectVerdict {
    /// Left alone.
    Pass,
    /// Permitted, to the destination or the endpoint that was chosen, and recorded.
    Direct,
    /// To the pod itself, which the socket lookup must be told.
    Own,
    /// Rewritten to this address, at a port that [`RewrittenPorts`] gives.
    Capture(Addr),
    /// Refused: where a service leads nowhere with `ECONNREFUSED`, otherwise with `EPERM`.
    Refuse(Refusal),
}

/// Why a connect is refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Refusal {
    /// The pod has no address of the destination's family to rewrite to.
    NoAddress,
    /// No rewritten port was free.
    NoPort,
    /// The kernel had no memory for the socket's storage.
    NoMemory,
    /// A cached verdict denies it.
    Policy,
    /// It is to a service that leads nowhere.
    NoEndpoint,
}

/// Decides on a TCP connect in an enrolled pod's network namespace. `known` finds what is known of the destination or,
/// of a service, the endpoint that is chosen: none where it leads nowhere. It is asked only for what leaves the pod.
#[inline(always)]
pub fn connect(pod: &Pod, facts: &ConnectFacts, known: impl FnOnce() -> Option<Cached>) -> ConnectVerdict {
    let destination = &facts.destination;
    if facts.by_proxy || destination.is_loopback() || destination.is_unspecified() {
        return ConnectVerdict::Pass;
    }
    let own = if destination.is_v4() { pod.v4 } else { pod.v6 };
    if facts.to_other_own_address || destination.same(&own) {
        return if destination.is_v4() {
            ConnectVerdict::Pass
        } else {
            ConnectVerdict::Own
        };
    }
    if facts.excluded {
        return ConnectVerdict::Pass;
    }
    match known() {
        None => ConnectVerdict::Refuse(Refusal::NoEndpoint),
        Some(Cached::Allow) => ConnectVerdict::Direct,
        Some(Cached::Excluded) => ConnectVerdict::Pass,
        Some(Cached::Deny) => ConnectVerdict::Refuse(Refusal::Policy),
        Some(_) if own.is_none() => ConnectVerdict::Refuse(Refusal::NoAddress),
        Some(_) => ConnectVerdict::Capture(own),
    }
}

/// A number that spreads destinations over the rewritten ports.
#[inline(always)]
pub const fn destination_hash(seed: u32, addr: &Addr, port: HostPort) -> u32 {
    let mut hash = seed ^ (port.0 as u32).wrapping_mul(0x9e37_79b1);
    hash = (hash ^ addr.words[0]).wrapping_mul(0x85eb_ca6b);
    hash = (hash ^ (hash >> 15) ^ addr.words[1]).wrapping_mul(0xc2b2_ae35);
    hash = (hash ^ (hash >> 13) ^ addr.words[2]).wrapping_mul(0x27d4_eb2f);
    hash = (hash ^ (hash >> 15) ^ addr.words[3]).wrapping_mul(0x1656_67b1);
    hash ^ (hash >> 16)
}

/// The ports that connects of a pod are rewritten to: those outside the pod's range of local ports. A source port that
/// equals one, on the same address, would make TCP connect to itself.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RewrittenPorts {
    /// How many there are.
    count: NonZeroU32,
    /// The first local port, and how many local ports there are.
    skip: [u32; 2],
}

impl RewrittenPorts {
    /// The ports outside `local_ports`. Where these are unknown or are all that there is, any port.
    #[inline(always)]
    pub const fn outside(local_ports: [u16; 2]) -> Self {
        const ALL: NonZeroU32 = NonZeroU32::new(65_535).unwrap();
        let [low, high] = [local_ports[0] as u32, local_ports[1] as u32];
        if low > 0 && low <= high {
            let inside = high - low + 1;
            if let Some(count) = NonZeroU32::new(ALL.get() - inside) {
                let skip = [low, inside];
                return Self { count, skip };
            }
        }
        Self {
            count: ALL,
            skip: [65_536, 0],
        }
    }

    /// The port that a connect is rewritten to, on the `attempt`th try.
    #[inline(always)]
    pub fn candidate(&self, hash: u32, attempt: u32) -> HostPort {
        // Steps of a large odd number, so that attempts do not run into a neighbour's.
        let hash = hash.wrapping_add(attempt.wrapping_mul(0x9e37_79b9));
        let port = 1 + hash % self.count;
        let [low, inside] = self.skip;
        HostPort(if port >= low { port + inside } else { port } as u16)
    }
}

/// What the socket lookup knows of a SYN.
#[derive(Clone, Copy, Debug)]
pub struct SynFacts {
    /// Where it comes from.
    pub remote: Addr,
    /// Where it goes.
    pub local: Addr,
    /// The port it goes to.
    pub port: HostPort,
    /// What it was announced as, if it was.
    pub announced: Option<FlowKind>,
    /// Whether the address map names the source as one of the pod's own.
    pub from_other_own_address: bool,
    /// Whether no packet has come in by any interface: the connect hook looks for a free port.
    pub searched: bool,
}

/// What becomes of a SYN.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SynVerdict {
    /// To whatever the application has there.
    Pass,
    /// To nobody: the client is reset.
    Refuse,
    /// To this listener of the proxy, and dropped where that is gone.
    Steer(Listener),
}

/// Decides on a SYN that reaches an enrolled pod. `nobody` finds what is known of peers without an identity.
///
/// A source that is a loopback address, or one of the pod's own of IPv4, cannot come from outside: the kernel drops such
/// packets as martians. Of IPv6 it does not: there a packet under the pod's own address is the pod's if it was announced,
/// and a search under it is, which is to find what the application has there.
#[inline(always)]
pub fn syn(facts: &SynFacts, nobody: impl FnOnce() -> Cached) -> SynVerdict {
    match facts.announced {
        Some(FlowKind::Captured) => return SynVerdict::Steer(Listener::Outbound),
        Some(FlowKind::Direct | FlowKind::Own | FlowKind::Probe) => return SynVerdict::Pass,
        None => {}
    }
    let own = facts.remote.same(&facts.local) || facts.from_other_own_address;
    if facts.remote.is_loopback() || (own && (facts.remote.is_v4() || facts.searched)) {
        return SynVerdict::Pass;
    }
    if facts.port.0 == HBONE_PORT.0 {
        return SynVerdict::Steer(Listener::Hbone);
    }
    match nobody() {
        Cached::Allow | Cached::Excluded => SynVerdict::Pass,
        Cached::Deny => SynVerdict::Refuse,
        Cached::Ask | Cached::Table | Cached::Service => SynVerdict::Steer(Listener::Plaintext),
    }
}

#[cfg(test)]
mod tests {
    extern crate std;
    use core::net::IpAddr;
    use std::collections::BTreeSet;

    use super::*;

    fn addr(text: &str) -> Addr {
        text.parse::<IpAddr>().unwrap().into()
    }

    fn dual_stack() -> Pod {
        Pod {
            v4: addr("10.0.0.5"),
            v6: addr("fd00::5"),
            ..Pod::default()
        }
    }

    #[test]
    fn a_connect_is_captured_unless_it_stays_in_the_pod_or_is_the_proxys() {
        let (both, only4) = (
            dual_stack(),
            Pod {
                v6: Addr::default(),
                ..dual_stack()
            },
        );
        let capture4 = ConnectVerdict::Capture(addr("10.0.0.5"));
        let capture6 = ConnectVerdict::Capture(addr("fd00::5"));
        for (pod, destination, by_proxy, other_own, verdict) in [
            (both, "10.0.0.9", false, false, capture4),
            (both, "::ffff:10.0.0.9", false, false, capture4),
            (both, "fd00::9", false, false, capture6),
            (both, "10.0.0.9", true, false, ConnectVerdict::Pass),
            (both, "10.0.0.5", false, false, ConnectVerdict::Pass),
            (both, "fd00::5", false, false, ConnectVerdict::Own),
            (both, "fd00::6", false, true, ConnectVerdict::Own),
            (both, "fd00::5", true, false, ConnectVerdict::Pass),
            (both, "10.0.0.6", false, true, ConnectVerdict::Pass),
            (both, "127.0.0.1", false, false, ConnectVerdict::Pass),
            (both, "::1", false, false, ConnectVerdict::Pass),
            (both, "::ffff:127.8.8.8", false, false, ConnectVerdict::Pass),
            (both, "0.0.0.0", false, false, ConnectVerdict::Pass),
            (both, "::", false, false, ConnectVerdict::Pass),
            (
                only4,
                "fd00::9",
                false,
                false,
                ConnectVerdict::Refuse(Refusal::NoAddress),
            ),
            (only4, "10.0.0.9", false, false, capture4),
        ] {
            let facts = ConnectFacts {
                destination: addr(destination),
                by_proxy,
                to_other_own_address: other_own,
                excluded: false,
            };
            assert_eq!(
                connect(&pod, &facts, || Some(Cached::Ask)),
                verdict,
                "{destination}, by proxy {by_proxy}"
            );
        }
    }

    #[test]
    fn what_is_known_of_a_destination_decides_on_what_leaves_the_pod() {
        for (destination, known, verdict) in [
            ("10.0.0.9", Some(Cached::Allow), ConnectVerdict::Direct),
            ("10.0.0.9", Some(Cached::Deny), ConnectVerdict::Refuse(Refusal::Policy)),
            (
                "10.0.0.9",
                Some(Cached::Table),
                ConnectVerdict::Capture(addr("10.0.0.5")),
            ),
            ("10.0.0.9", None, ConnectVerdict::Refuse(Refusal::NoEndpoint)),
            ("10.0.0.9", Some(Cached::Excluded), ConnectVerdict::Pass),
            ("10.0.0.5", Some(Cached::Deny), ConnectVerdict::Pass),
            ("127.0.0.1", Some(Cached::Deny), ConnectVerdict::Pass),
            ("127.0.0.1", None, ConnectVerdict::Pass),
        ] {
            let facts = ConnectFacts {
                destination: addr(destination),
                by_proxy: false,
                to_other_own_address: false,
                excluded: false,
            };
            assert_eq!(connect(&dual_stack(), &facts, || known), verdict, "{destination}");
        }
    }

    #[test]
    fn what_the_pod_excludes_is_left_alone_whatever_is_known_of_it_but_for_its_own_addresses() {
        for (destination, verdict) in [
            ("10.0.0.9", ConnectVerdict::Pass),
            ("fd00::9", ConnectVerdict::Pass),
            ("fd00::5", ConnectVerdict::Own),
        ] {
            for known in [None, Some(Cached::Deny), Some(Cached::Allow), Some(Cached::Ask)] {
                let facts = ConnectFacts {
                    destination: addr(destination),
                    by_proxy: false,
                    to_other_own_address: false,
                    excluded: true,
                };
                assert_eq!(
                    connect(&dual_stack(), &facts, || known),
                    verdict,
                    "{destination} {known:?}"
                );
            }
        }
    }

    #[test]
    fn a_syn_goes_to_the_listener_that_its_source_and_port_call_for() {
        let steer = SynVerdict::Steer;
        let (captured, direct) = (Some(FlowKind::Captured), Some(FlowKind::Direct));
        let probe = Some(FlowKind::Probe);
        for (remote, port, announced, other_own, nobody, verdict) in [
            ("10.0.0.5", 80, None, false, Cached::Ask, SynVerdict::Pass),
            ("10.0.0.5", 80, captured, false, Cached::Ask, steer(Listener::Outbound)),
            (
                "10.0.0.5",
                15008,
                captured,
                false,
                Cached::Ask,
                steer(Listener::Outbound),
            ),
            ("10.0.0.5", 15008, None, false, Cached::Deny, SynVerdict::Pass),
            ("127.0.0.1", 15008, None, false, Cached::Deny, SynVerdict::Pass),
            ("10.0.0.6", 80, None, true, Cached::Deny, SynVerdict::Pass),
            ("10.9.0.1", 80, None, false, Cached::Ask, steer(Listener::Plaintext)),
            ("10.9.0.1", 80, None, false, Cached::Allow, SynVerdict::Pass),
            ("10.9.0.1", 80, None, false, Cached::Excluded, SynVerdict::Pass),
            (
                "10.9.0.1",
                80,
                captured,
                false,
                Cached::Excluded,
                steer(Listener::Outbound),
            ),
            ("10.9.0.1", 80, None, false, Cached::Deny, SynVerdict::Refuse),
            ("10.9.0.1", 80, direct, false, Cached::Deny, SynVerdict::Pass),
            ("10.9.0.1", 80, probe, false, Cached::Deny, SynVerdict::Pass),
            ("10.9.0.1", 15008, None, false, Cached::Deny, steer(Listener::Hbone)),
            ("10.9.0.1", 15008, direct, false, Cached::Deny, SynVerdict::Pass),
            ("10.9.0.1", 15001, None, false, Cached::Ask, steer(Listener::Plaintext)),
        ] {
            let facts = SynFacts {
                remote: addr(remote),
                local: addr("10.0.0.5"),
                port: HostPort(port),
                announced,
                from_other_own_address: other_own,
                searched: false,
            };
            assert_eq!(syn(&facts, || nobody), verdict, "{remote} to {port}");
        }
    }

    #[test]
    fn a_syn_of_ipv6_under_the_pods_own_address_is_the_pods_only_if_it_was_announced() {
        let own = Some(FlowKind::Own);
        for (remote, port, announced, searched, verdict) in [
            ("fd00::5", 80, own, false, SynVerdict::Pass),
            ("fd00::5", 80, None, false, SynVerdict::Refuse),
            // Whatever holds of strangers, a search finds what the application has.
            ("fd00::5", 80, None, true, SynVerdict::Pass),
            ("fd00::5", 15_008, None, true, SynVerdict::Pass),
            ("fd00::9", 80, None, true, SynVerdict::Refuse),
            ("::1", 80, None, false, SynVerdict::Pass),
        ] {
            let facts = SynFacts {
                remote: addr(remote),
                local: addr("fd00::5"),
                port: HostPort(port),
                announced,
                from_other_own_address: false,
                searched,
            };
            assert_eq!(
                syn(&facts, || Cached::Deny),
                verdict,
                "{remote} {announced:?} {searched}"
            );
        }
    }

    #[test]
    fn rewritten_ports_stay_out_of_the_range_of_local_ports() {
        for range in [
            [32_768, 60_999],
            [1024, 65_535],
            [1, 65_534],
            [40_000, 40_999],
            [2, 65_535],
        ] {
            for hash in (0..200_000_u32).map(|i| i.wrapping_mul(2_654_435_761)) {
                let port = RewrittenPorts::outside(range).candidate(hash, hash % MAX_CANDIDATES).0;
                assert!(
                    port != 0 && !(range[0]..=range[1]).contains(&port),
                    "{port} in {range:?}"
                );
            }
        }
    }

    #[test]
    fn a_range_that_leaves_no_port_or_is_unknown_still_gives_one() {
        for range in [[1, 65_535], [0, 0], [9, 3]] {
            for attempt in 0..1000 {
                assert_ne!(RewrittenPorts::outside(range).candidate(7, attempt).0, 0, "{range:?}");
            }
        }
    }

    #[test]
    fn rewritten_ports_spread_over_the_whole_space() {
        let ports: BTreeSet<u16> = (0..10_000_u32)
            .map(|i| {
                let hash = destination_hash(1, &Addr::v4(i.to_be()), HostPort(80));
                RewrittenPorts::outside([32_768, 60_999]).candidate(hash, 0).0
            })
            .collect();
        // Throwing 10,000 balls into 37,303 bins leaves some 8,770 bins in use.
        assert!(ports.len() > 8_500, "{}", ports.len());
    }

    #[test]
    fn attempts_of_one_destination_differ() {
        let ports: BTreeSet<u16> = (0..MAX_CANDIDATES)
            .map(|attempt| RewrittenPorts::outside([32_768, 60_999]).candidate(99, attempt).0)
            .collect();
        assert_eq!(ports.len() as u32, MAX_CANDIDATES);
    }
}
