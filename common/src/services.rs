//! How the kernel chooses an endpoint of a service.

use crate::{Addr, Cached, HostPort};

/// The most ports of virtual addresses that the kernel knows; a port that has no place is asked.
pub const MAX_SERVICES: u32 = 1 << 16;
/// The most endpoints of all services, each counted once for each virtual address and port.
pub const MAX_ENDPOINTS: u32 = 1 << 17;
/// The most endpoints of one port.
pub const MAX_ENDPOINTS_OF_PORT: usize = u16::MAX as usize;

/// A port of a virtual address.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct ServiceKey {
    /// The virtual address.
    pub addr: Addr,
    /// The port that clients dial.
    pub port: HostPort,
    /// Always zero.
    pub reserved: u16,
}

impl ServiceKey {
    /// The key of an address and port.
    #[inline(always)]
    pub const fn new(addr: Addr, port: HostPort) -> Self {
        Self {
            addr,
            port,
            reserved: 0,
        }
    }
}

/// The endpoints that a port leads to at present.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct EndpointList {
    /// The list's number, which no other list has had.
    pub number: u32,
    /// How many endpoints are in it; with none the port leads nowhere.
    pub count: u32,
}

/// A place in a list. The virtual address and port are part of it, so that whatever is read of a map that changes in
/// the meantime leads to an endpoint of the service that was dialled, or to none.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct EndpointKey {
    /// The virtual address.
    pub addr: Addr,
    /// The list's number.
    pub list: u32,
    /// The port that clients dial.
    pub port: HostPort,
    /// The place, from zero.
    pub index: u16,
}

/// An endpoint.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Hash)]
pub struct Endpoint {
    /// Its address; [`Addr::is_none`] where there is no endpoint.
    pub addr: Addr,
    /// Its port.
    pub port: HostPort,
    /// Always zero.
    pub reserved: u16,
}

impl Endpoint {
    /// The endpoint at an address and port.
    #[inline(always)]
    pub const fn new(addr: Addr, port: HostPort) -> Self {
        Self {
            addr,
            port,
            reserved: 0,
        }
    }
}

/// Where a connection to a port of a virtual address leads.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Choice {
    /// The kernel does not know: the proxy chooses.
    Ask,
    /// Nowhere.
    Nowhere,
    /// To the endpoint at this place, each with the same chance.
    Place(EndpointKey),
}

/// Chooses an endpoint by a random number.
#[inline(always)]
pub fn choose(service: &ServiceKey, list: Option<&EndpointList>, random: u32) -> Choice {
    let Some(list) = list else { return Choice::Ask };
    if list.count == 0 {
        return Choice::Nowhere;
    }
    Choice::Place(EndpointKey {
        addr: service.addr,
        list: list.number,
        port: service.port,
        // The random number as a fraction of the count. Never more than the map's keys can hold.
        index: ((random as u64 * list.count as u64) >> 32) as u16,
    })
}

/// What becomes of a connection to a chosen endpoint, by what is known of it. The socket of one family does not reach
/// an endpoint of the other; the proxy does.
#[inline(always)]
pub fn through(dialled: &Addr, endpoint: &Addr, known: Cached) -> Cached {
    match known {
        Cached::Deny => Cached::Deny,
        Cached::Allow if dialled.is_v4() == endpoint.is_v4() => Cached::Allow,
        _ => Cached::Ask,
    }
}

const _: () = {
    assert!(size_of::<ServiceKey>() == 20);
    assert!(size_of::<EndpointList>() == 8);
    assert!(size_of::<EndpointKey>() == 24);
    assert!(size_of::<Endpoint>() == 20);
};

#[cfg(feature = "user")]
#[expect(
    unsafe_code,
    reason = "a promise about layout that only the owner of the types can make"
)]
mod pod {
    // SAFETY: each type is `repr(C)`, `Copy`, without padding (its size is the sum of its fields', as asserted above),
    // and every bit pattern is a valid value.
    unsafe impl aya::Pod for super::ServiceKey {}
    // SAFETY: as above.
    unsafe impl aya::Pod for super::EndpointList {}
    // SAFETY: as above.
    unsafe impl aya::Pod for super::EndpointKey {}
    // SAFETY: as above.
    unsafe impl aya::Pod for super::Endpoint {}
}

#[cfg(test)]
mod tests {
    extern crate std;
    use core::net::IpAddr;
    use std::vec;

    use super::*;

    fn addr(text: &str) -> Addr {
        text.parse::<IpAddr>().unwrap().into()
    }

    fn service() -> ServiceKey {
        ServiceKey::new(addr("10.96.0.1"), HostPort(80))
    }

    #[test]
    fn a_port_is_asked_unless_it_is_known_and_leads_nowhere_without_endpoints() {
        assert_eq!(choose(&service(), None, 7), Choice::Ask);
        let none = EndpointList { number: 3, count: 0 };
        assert_eq!(choose(&service(), Some(&none), 7), Choice::Nowhere);
    }

    #[test]
    fn the_first_and_the_last_place_are_reached_and_none_beyond() {
        for (count, random, index) in [
            (1, 0, 0),
            (1, u32::MAX, 0),
            (3, 0, 0),
            (3, u32::MAX / 2, 1),
            (3, u32::MAX, 2),
            (65_535, u32::MAX, 65_534),
        ] {
            let list = EndpointList { number: 9, count };
            let place = EndpointKey {
                addr: addr("10.96.0.1"),
                list: 9,
                port: HostPort(80),
                index,
            };
            assert_eq!(
                choose(&service(), Some(&list), random),
                Choice::Place(place),
                "{count} {random}"
            );
        }
    }

    #[test]
    fn each_endpoint_has_the_same_chance() {
        for count in [2, 3, 7, 100] {
            let mut chosen = vec![0_u32; count as usize];
            let list = EndpointList { number: 1, count };
            for random in (0..100_000_u32).map(|i| i.wrapping_mul(42_950)) {
                match choose(&service(), Some(&list), random) {
                    Choice::Place(place) => chosen[usize::from(place.index)] += 1,
                    other => panic!("{other:?}"),
                }
            }
            let fair = 100_000 / count;
            assert!(chosen.iter().all(|n| n.abs_diff(fair) <= 1 + fair / 100), "{chosen:?}");
        }
    }

    #[test]
    fn an_endpoint_is_reached_directly_only_where_it_is_permitted_and_of_the_family_that_was_dialled() {
        let (v4, v6) = ("10.0.0.1", "fd00::1");
        for (dialled, endpoint, known, verdict) in [
            (v4, v4, Cached::Allow, Cached::Allow),
            (v6, v6, Cached::Allow, Cached::Allow),
            ("::ffff:10.96.0.1", v4, Cached::Allow, Cached::Allow),
            (v4, v6, Cached::Allow, Cached::Ask),
            (v6, v4, Cached::Allow, Cached::Ask),
            (v6, v4, Cached::Deny, Cached::Deny),
            (v4, v4, Cached::Ask, Cached::Ask),
            (v4, v4, Cached::Table, Cached::Ask),
            (v4, v4, Cached::Service, Cached::Ask),
            // Left alone, the cluster's own load balancer would choose anew.
            (v4, v4, Cached::Excluded, Cached::Ask),
        ] {
            assert_eq!(
                through(&addr(dialled), &addr(endpoint), known),
                verdict,
                "{dialled} {endpoint}"
            );
        }
    }
}
