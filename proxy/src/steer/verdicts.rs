//! What the kernel is told, so that it decides by itself.

use std::collections::HashMap;
use std::net::IpAddr;
use std::os::fd::AsFd as _;
use std::sync::{Arc, Mutex, PoisonError};

use adit_common::{Addr, Cached, Destination, NOBODY, Range, Verdict, VerdictKey};
use ipnet::IpNet;

use super::error::at;
use super::{Maps, SteerError, sys};
use crate::identity::SpiffeId;

/// The maps of destinations, ranges and verdicts.
#[derive(Clone)]
pub struct VerdictMaps {
    maps: Arc<Maps>,
}

impl VerdictMaps {
    pub(super) fn new(maps: Arc<Maps>) -> Self {
        Self { maps }
    }

    /// The destinations that the kernel knows.
    pub fn destinations(&self) -> Result<HashMap<Addr, Destination>, SteerError> {
        sys::entries(self.maps.destinations.as_fd()).map_err(at("reading destinations"))
    }

    /// Tells what is known of an address.
    pub fn set_destination(&self, destination: Destination) -> Result<(), SteerError> {
        sys::update(self.maps.destinations.as_fd(), &destination.addr, &destination, 0)
            .map_err(at("entering a destination"))
    }

    /// Forgets what is known of an address.
    pub fn remove_destination(&self, addr: Addr) -> Result<(), SteerError> {
        sys::delete(self.maps.destinations.as_fd(), &addr).map_err(at("removing a destination"))
    }

    /// The keys of all verdicts.
    pub fn verdicts(&self) -> Result<HashMap<VerdictKey, Verdict>, SteerError> {
        sys::entries(self.maps.verdicts.as_fd()).map_err(at("reading verdicts"))
    }

    /// Enters a verdict.
    pub fn set_verdict(&self, key: VerdictKey, verdict: Cached) -> Result<(), SteerError> {
        let verdict = Verdict {
            key,
            verdict: verdict as u32,
        };
        sys::update(self.maps.verdicts.as_fd(), &key, &verdict, 0).map_err(at("entering a verdict"))
    }

    /// Removes a verdict.
    pub fn remove_verdict(&self, key: VerdictKey) -> Result<(), SteerError> {
        sys::delete(self.maps.verdicts.as_fd(), &key).map_err(at("removing a verdict"))
    }

    /// The ranges that the kernel knows.
    pub fn ranges(&self) -> Result<HashMap<Range, u32>, SteerError> {
        sys::entries(self.maps.ranges.as_fd()).map_err(at("reading ranges"))
    }

    /// Tells what holds of the addresses of a range of which nothing else is known.
    pub fn set_range(&self, range: Range, verdict: Cached) -> Result<(), SteerError> {
        sys::update(self.maps.ranges.as_fd(), &range, &(verdict as u32), 0).map_err(at("entering a range"))
    }

    /// Forgets a range.
    pub fn remove_range(&self, range: Range) -> Result<(), SteerError> {
        sys::delete(self.maps.ranges.as_fd(), &range).map_err(at("removing a range"))
    }
}

/// A network as the map of ranges holds it.
pub fn range(net: IpNet) -> Range {
    let (before, network): (u32, IpAddr) = match net {
        IpNet::V4(v4) => (96, v4.network().into()),
        IpNet::V6(v6) => (0, v6.network().into()),
    };
    Range {
        prefix_len: before + u32::from(net.prefix_len()),
        addr: network.into(),
    }
}

/// The numbers by which verdicts know identities. A number is never given to another identity.
pub(super) struct SourceNumbers(Mutex<Numbers>);

struct Numbers {
    known: HashMap<SpiffeId, u32>,
    next: u32,
}

impl SourceNumbers {
    /// Numbers above those that pods of a process before this one have, whose identities nobody knows.
    pub(super) fn above(taken: Option<u32>) -> Self {
        Self(Mutex::new(Numbers {
            known: HashMap::new(),
            next: taken.unwrap_or(NOBODY) + 1,
        }))
    }

    pub(super) fn of(&self, identity: &SpiffeId) -> u32 {
        let mut numbers = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let next = numbers.next;
        let number = *numbers.known.entry(identity.clone()).or_insert(next);
        if number == next {
            numbers.next += 1;
        }
        number
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_of_ipv4_lies_among_the_mapped_addresses() {
        let of = |text: &str| range(text.parse().unwrap());
        let v4: IpAddr = "10.1.0.0".parse().unwrap();
        assert_eq!(
            of("10.1.2.3/16"),
            Range {
                prefix_len: 112,
                addr: v4.into()
            }
        );
        assert_eq!(of("0.0.0.0/0").prefix_len, 96);
        assert_eq!(of("fd00::/8").prefix_len, 8);
    }

    #[test]
    fn an_identity_keeps_its_number_and_shares_it_with_none_before_it() {
        let id = |name: &str| SpiffeId::parse(&format!("spiffe://a/ns/b/sa/{name}")).unwrap();
        for (taken, first) in [(None, 1), (Some(NOBODY), 1), (Some(7), 8)] {
            let numbers = SourceNumbers::above(taken);
            assert_eq!(numbers.of(&id("x")), first);
            assert_eq!(numbers.of(&id("y")), first + 1);
            assert_eq!(numbers.of(&id("x")), first);
        }
    }
}
