//! Who connects, and how many connections each has: whatever one host opens, there is room for the others.

use std::collections::HashMap;
use std::fmt;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use thiserror::Error;

/// How long nothing is said after a warning.
const SILENCE: Duration = Duration::from_secs(10);

/// Whoever is behind an address, as limits have it: of IPv4 the address, of IPv6 its /64, because a host may have all
/// addresses of one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Peer(IpAddr);

impl Peer {
    /// The peer at an address. One of IPv4 is the same however a socket for both shows it.
    pub fn at(address: IpAddr) -> Self {
        Self(match address.to_canonical() {
            IpAddr::V6(address) if !address.is_loopback() => {
                let network = u128::from(address) & (u128::MAX << 64);
                Ipv6Addr::from(network).into()
            }
            other => other,
        })
    }

    pub(crate) fn is_loopback(self) -> bool {
        self.0.is_loopback()
    }
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            IpAddr::V6(network) if !network.is_loopback() => write!(f, "{network}/64"),
            address => address.fmt(f),
        }
    }
}

/// Whose limit is reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub(crate) enum TooMany {
    #[error("{peer} has {limit}")]
    OfPeer { peer: Peer, limit: usize },
    #[error("all together have {0}")]
    All(usize),
}

/// Counts what peers have. Clones share the count.
#[derive(Debug, Clone)]
pub(crate) struct Peers {
    limit: usize,
    counts: Arc<Mutex<Counts>>,
}

#[derive(Debug, Default)]
struct Counts {
    all: usize,
    of_peers: HashMap<Peer, usize>,
}

impl Peers {
    /// For so many of all peers together.
    pub(crate) fn new(limit: usize) -> Self {
        Self {
            limit,
            counts: Arc::default(),
        }
    }

    /// Counts one more of a peer that may have `limit`, until what is returned is dropped.
    pub(crate) fn add(&self, peer: Peer, limit: usize) -> Result<Place, TooMany> {
        let mut counts = self.lock();
        if counts.of_peers.get(&peer).is_some_and(|count| *count >= limit) {
            return Err(TooMany::OfPeer { peer, limit });
        }
        if counts.all >= self.limit {
            return Err(TooMany::All(self.limit));
        }
        counts.all += 1;
        *counts.of_peers.entry(peer).or_default() += 1;
        drop(counts);
        Ok(Place {
            peer,
            peers: self.clone(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, Counts> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One that is counted.
#[derive(Debug)]
pub(crate) struct Place {
    peer: Peer,
    peers: Peers,
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut counts = self.peers.lock();
        counts.all -= 1;
        if let Some(count) = counts.of_peers.get_mut(&self.peer) {
            *count -= 1;
            if *count == 0 {
                counts.of_peers.remove(&self.peer);
            }
        }
    }
}

/// Says when a warning is due: whoever can make one must not fill the log.
#[derive(Debug, Default)]
pub(crate) struct Warnings {
    last: Option<Instant>,
    left_out: u64,
}

impl Warnings {
    /// Something is to be warned of. How many warnings before were left out, if this one is not.
    pub(crate) fn due(&mut self, now: Instant) -> Option<u64> {
        if self
            .last
            .is_some_and(|last| now.saturating_duration_since(last) < SILENCE)
        {
            self.left_out += 1;
            return None;
        }
        self.last = Some(now);
        Some(std::mem::take(&mut self.left_out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peer(address: &str) -> Peer {
        Peer::at(address.parse().unwrap())
    }

    #[test]
    fn an_ipv6_host_is_its_64_and_an_ipv4_host_its_address_however_it_is_written() {
        for (one, other, same) in [
            ("10.0.0.1", "10.0.0.1", true),
            ("10.0.0.1", "10.0.0.2", false),
            ("10.0.0.1", "::ffff:10.0.0.1", true),
            ("::ffff:10.0.0.1", "::ffff:10.0.0.2", false),
            ("2001:db8:0:1::1", "2001:db8:0:1:ffff::9", true),
            ("2001:db8:0:1::1", "2001:db8:0:2::1", false),
            ("::1", "::2", false),
        ] {
            assert_eq!(peer(one) == peer(other), same, "{one} {other}");
        }
        for (address, shown, loopback) in [
            ("::ffff:10.0.0.1", "10.0.0.1", false),
            ("2001:db8:0:1::1", "2001:db8:0:1::/64", false),
            ("::1", "::1", true),
            ("::2", "::/64", false),
            ("::ffff:127.0.0.2", "127.0.0.2", true),
        ] {
            let peer = peer(address);
            assert_eq!((peer.to_string().as_str(), peer.is_loopback()), (shown, loopback));
        }
    }

    #[test]
    fn a_peer_has_only_so_many_and_all_together_too_and_what_is_dropped_is_free() {
        let peers = Peers::new(3);
        let [one, two, three] = ["10.0.0.1", "10.0.0.2", "10.0.0.3"].map(peer);
        let mut held = vec![peers.add(one, 2).unwrap(), peers.add(one, 2).unwrap()];
        let full = TooMany::OfPeer { peer: one, limit: 2 };
        assert_eq!(peers.add(one, 2).err(), Some(full));
        held.push(peers.add(two, 2).unwrap());
        assert_eq!(peers.add(three, 2).err(), Some(TooMany::All(3)));
        // Refused ones leave nothing behind.
        assert_eq!(peers.lock().of_peers.len(), 2);
        drop(held);
        assert!(peers.add(one, 2).is_ok());
        let counts = peers.lock();
        assert!(counts.of_peers.is_empty() && counts.all == 0);
    }

    #[test]
    fn warnings_come_once_in_a_while_and_say_how_many_were_left_out() {
        let (mut warnings, start) = (Warnings::default(), Instant::now());
        for (seconds, expected) in [
            (0, Some(0)),
            (1, None),
            (9, None),
            (10, Some(2)),
            (19, None),
            (20, Some(1)),
            (60, Some(0)),
        ] {
            assert_eq!(
                warnings.due(start + Duration::from_secs(seconds)),
                expected,
                "{seconds}"
            );
        }
    }
}
