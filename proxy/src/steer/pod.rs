//! The enrolled pods: their entries in the maps, their listeners, their instances of the socket lookup.

use std::collections::{BTreeSet, HashMap};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd, RawFd};
use std::sync::{MutexGuard, PoisonError};

use adit_common::{Addr, AddrKey, Destination, Exclusion, Listener, MAX_PODS, NOBODY, Pod, PodFlags, listener_index};

use super::error::at;
use super::exclusions;
use super::{SK_LOOKUP, SteerError, Steering, sys};
use crate::identity::SpiffeId;
use crate::mesh::Exclusions;

/// What steering must know of a pod.
#[derive(Debug)]
pub struct PodSteering<'a> {
    /// The pod's namespace and name, for the log's scope.
    pub namespace: &'a str,
    /// See there.
    pub name: &'a str,
    /// The pod's network namespace.
    pub netns: BorrowedFd<'a>,
    /// The cookie of that namespace.
    pub cookie: u64,
    /// Whose connections the pod's are to the kernel's verdicts; none: nobody's.
    pub identity: Option<&'a SpiffeId>,
    /// Whether the pod's connections within the node take the proxy.
    pub same_node_encrypted: bool,
    /// What of its traffic is left alone.
    pub exclusions: Option<&'a Exclusions>,
    /// Where connects are captured whatever is excluded: where it is tested that they are.
    pub kept: &'a [SocketAddr],
    /// The pod's addresses.
    pub addresses: &'a [IpAddr],
    /// The pod's `net.ipv4.ip_local_port_range`.
    pub local_ports: [u16; 2],
    /// The listeners, made in the pod's namespace. None: whatever the pod dials or is sent is refused.
    pub listeners: Option<ListenerFds<'a>>,
}

/// A pod's listeners.
#[derive(Debug, Clone, Copy)]
pub struct ListenerFds<'a> {
    /// For the pod's own captured connections.
    pub outbound: BorrowedFd<'a>,
    /// For tunnels.
    pub hbone: BorrowedFd<'a>,
    /// For plaintext from outside the mesh.
    pub plaintext: BorrowedFd<'a>,
}

/// The numbers by which verdicts know a pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PodPlace {
    /// As a destination. The listeners have their places by it, too.
    pub slot: u32,
    /// Its identity, as a source.
    pub source: u32,
}

/// A pod that is steered, by this process or by one before it.
pub(super) struct HeldPod {
    pub(super) entry: Pod,
    pub(super) extra_addresses: Vec<AddrKey>,
    /// Its entries among those of what is left alone.
    pub(super) exclusions: HashMap<Exclusion, u32>,
    /// The link of the pod's socket lookup.
    pub(super) lookup: Option<OwnedFd>,
    /// The id of the program that this process has put into the link.
    pub(super) program: u32,
    /// Whether this process has asked for it.
    pub(super) claimed: bool,
}

/// The pods that are steered, by the cookies of their network namespaces.
#[derive(Default)]
pub(super) struct HeldPods {
    pub(super) by_cookie: HashMap<u64, HeldPod>,
    pub(super) slots: Slots,
}

impl Steering {
    /// Steers a pod. One that is steered already, by this process or by one before it, is never let go in between:
    /// first its listeners, then its socket lookup, then its entry are replaced. Established connections are not
    /// touched.
    ///
    /// # Errors
    ///
    /// A pod that was not steered before is as it was; one that was is steered as before, or to nobody.
    pub fn attach_pod(&self, pod: &PodSteering<'_>) -> Result<PodPlace, SteerError> {
        let mut pods = self.held_pods();
        let before = pods.by_cookie.remove(&pod.cookie);
        let is_new = before.is_none();
        let mut held = match before {
            Some(held) => held,
            None => HeldPod::new(pods.slots.take()?),
        };
        let done = self.put_pod(pod, &mut held);
        pods.by_cookie.insert(pod.cookie, held);
        if done.is_err() && is_new {
            self.release_held(&mut pods, pod.cookie);
        }
        done
    }

    /// Lets a pod go: connects first, then what comes in. Established connections are not touched.
    pub fn release_pod(&self, cookie: u64) {
        self.release_held(&mut self.held_pods(), cookie);
    }

    fn put_pod(&self, pod: &PodSteering<'_>, held: &mut HeldPod) -> Result<PodPlace, SteerError> {
        let maps = &self.maps;
        let slot = held.entry.slot;
        let mut flags = exclusions::flags(pod.exclusions);
        if self.log.covers(pod.namespace, pod.name) {
            flags = flags.with(PodFlags::LOG);
        }
        if pod.same_node_encrypted {
            flags = flags.with(PodFlags::SAME_NODE_ENCRYPTED);
        }
        let of_family = |v4: bool| pod.addresses.iter().copied().filter(move |ip| ip.is_ipv4() == v4);
        let first = |v4: bool| of_family(v4).next().map(Addr::from).unwrap_or_default();
        let others: Vec<AddrKey> = of_family(true)
            .skip(1)
            .chain(of_family(false).skip(1))
            .map(|ip| AddrKey {
                netns: pod.cookie,
                addr: ip.into(),
            })
            .collect();
        if !others.is_empty() {
            flags = flags.with(PodFlags::MORE_ADDRESSES);
        }
        for kind in [Listener::Outbound, Listener::Hbone, Listener::Plaintext] {
            let index = listener_index(slot, kind);
            let Some(listeners) = pod.listeners else {
                // That there was none is an error of this kind of map.
                let _ = sys::delete(maps.listeners.as_fd(), &index);
                continue;
            };
            let value: RawFd = match kind {
                Listener::Outbound => listeners.outbound,
                Listener::Hbone => listeners.hbone,
                Listener::Plaintext => listeners.plaintext,
            }
            .as_raw_fd();
            sys::update(maps.listeners.as_fd(), &index, &value, 0).map_err(at("entering a pod's listener"))?;
        }
        let stale: Vec<AddrKey> = held
            .extra_addresses
            .extract_if(.., |key| !others.contains(key))
            .collect();
        for key in others {
            sys::update(maps.addrs.as_fd(), &key, &1_u8, 0).map_err(at("entering a pod's address"))?;
            if !held.extra_addresses.contains(&key) {
                held.extra_addresses.push(key);
            }
        }
        maps.exclude(pod.cookie, pod.exclusions, pod.kept, &mut held.exclusions)?;
        // What comes in is steered before connects are captured: a captured connect must find its listener.
        self.put_lookup(pod, slot, flags, held)?;
        let entry = Pod {
            v4: first(true),
            v6: first(false),
            slot,
            flags,
            local_ports: pod.local_ports,
            seed: fastrand::u32(..),
            source: pod.identity.map_or(NOBODY, |identity| self.sources.of(identity)),
            reserved: 0,
        };
        sys::update(maps.pods.as_fd(), &pod.cookie, &entry, 0).map_err(at("entering a pod"))?;
        held.entry = entry;
        held.claimed = true;
        for key in &stale {
            sys::delete(maps.addrs.as_fd(), key).map_err(at("removing a pod's address"))?;
        }
        Ok(PodPlace {
            slot,
            source: entry.source,
        })
    }

    /// Puts a new instance of the socket lookup into the pod's link, or makes the link.
    fn put_lookup(
        &self,
        pod: &PodSteering<'_>,
        slot: u32,
        flags: PodFlags,
        held: &mut HeldPod,
    ) -> Result<(), SteerError> {
        let failed = |error| SteerError::Attach {
            program: SK_LOOKUP.name,
            target: "the pod's network namespace",
            error,
        };
        let program = self.load_lookup(pod.cookie, slot, flags)?;
        if let Some(link) = &held.lookup
            && is_on(link, pod.netns)
        {
            sys::update_link(link.as_fd(), program.as_fd()).map_err(failed)?;
        } else {
            let new = sys::link(program.as_fd(), pod.netns, SK_LOOKUP.attach).map_err(failed)?;
            if let Some(old) = held.lookup.replace(new) {
                // Detached already, most likely.
                let _ = sys::detach_link(old.as_fd());
            }
        }
        held.program = sys::object_id(program.as_fd()).map_err(failed)?;
        if let (Some(pins), Some(link)) = (&self.pins, &held.lookup) {
            pins.ensure_pod(pod.cookie, link)?;
        }
        Ok(())
    }

    fn load_lookup(&self, cookie: u64, slot: u32, flags: PodFlags) -> Result<OwnedFd, SteerError> {
        let constants: [(&str, &[u8]); 3] = [
            ("ADIT_NETNS", &cookie.to_ne_bytes()),
            ("ADIT_SLOT", &slot.to_ne_bytes()),
            ("ADIT_FLAGS", &flags.0.to_ne_bytes()),
        ];
        let mut lookup = self.lookup.lock().unwrap_or_else(PoisonError::into_inner);
        lookup.instantiate(HashMap::from(constants))
    }

    pub(super) fn release_held(&self, pods: &mut HeldPods, cookie: u64) {
        let Some(pod) = pods.by_cookie.remove(&cookie) else {
            return;
        };
        // Errors here could only say that an entry is gone already. The pod's addresses first: nobody is let through to
        // it any more.
        self.forget_destinations(cookie, pod.addresses());
        let _ = sys::delete(self.maps.pods.as_fd(), &cookie);
        if let Some(link) = &pod.lookup {
            // A predecessor that drains may hold it too.
            let _ = sys::detach_link(link.as_fd());
        }
        if let Some(pins) = &self.pins
            && let Err(error) = pins.unpin_pod(cookie)
        {
            tracing::warn!("{error}");
        }
        for key in &pod.extra_addresses {
            let _ = sys::delete(self.maps.addrs.as_fd(), key);
        }
        for key in pod.exclusions.keys() {
            let _ = self.maps.exclude_no_more(key);
        }
        for kind in [Listener::Outbound, Listener::Hbone, Listener::Plaintext] {
            let _ = sys::delete(self.maps.listeners.as_fd(), &listener_index(pod.entry.slot, kind));
        }
        pods.slots.give_back(pod.entry.slot);
    }

    /// Forgets of these addresses that they are this pod's; another pod may have them by now.
    fn forget_destinations(&self, cookie: u64, addresses: impl Iterator<Item = Addr>) {
        let map = self.maps.destinations.as_fd();
        for addr in addresses {
            let known: Option<Destination> = sys::get(map, &addr).ok().flatten();
            if known.is_some_and(|destination| destination.netns == cookie) {
                let _ = sys::delete(map, &addr);
            }
        }
    }

    pub(super) fn held_pods(&self) -> MutexGuard<'_, HeldPods> {
        self.pods.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl HeldPod {
    fn new(slot: u32) -> Self {
        Self {
            entry: Pod { slot, ..Pod::default() },
            extra_addresses: Vec::new(),
            exclusions: HashMap::new(),
            lookup: None,
            program: 0,
            claimed: true,
        }
    }

    /// All addresses that the kernel has been told of.
    fn addresses(&self) -> impl Iterator<Item = Addr> {
        let first = [self.entry.v4, self.entry.v6]
            .into_iter()
            .filter(|addr| !addr.is_none());
        first.chain(self.extra_addresses.iter().map(|key| key.addr))
    }
}

/// Whether the link is attached to this network namespace.
pub(super) fn is_on(link: &OwnedFd, netns: BorrowedFd<'_>) -> bool {
    let inode = nix::sys::stat::fstat(netns).map(|stat| stat.st_ino);
    sys::link_info(link.as_fd()).is_ok_and(|info| inode == Ok(info.netns.into()))
}

/// The places of the map of listeners, one for each pod.
#[derive(Default)]
pub(super) struct Slots {
    taken: BTreeSet<u32>,
    /// No place below this is free.
    search_from: u32,
}

impl Slots {
    /// Takes the first that is free.
    fn take(&mut self) -> Result<u32, SteerError> {
        let free = (self.search_from..MAX_PODS).find(|slot| !self.taken.contains(slot));
        let slot = free.ok_or(SteerError::TooManyPods(MAX_PODS))?;
        self.taken.insert(slot);
        self.search_from = slot + 1;
        Ok(slot)
    }

    /// Notes a place as taken; false if it was already, or is none.
    pub(super) fn adopt(&mut self, slot: u32) -> bool {
        slot < MAX_PODS && self.taken.insert(slot)
    }

    fn give_back(&mut self, slot: u32) {
        self.taken.remove(&slot);
        self.search_from = self.search_from.min(slot);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_given_out_once_and_end_at_the_limit() {
        let mut slots = Slots::default();
        assert!(slots.adopt(3));
        assert!(!slots.adopt(3), "two pods cannot have one");
        assert!(!slots.adopt(MAX_PODS));
        for expected in (0..MAX_PODS).filter(|slot| *slot != 3) {
            assert_eq!(slots.take().unwrap(), expected);
        }
        assert!(matches!(slots.take(), Err(SteerError::TooManyPods(MAX_PODS))));
        slots.give_back(7);
        assert_eq!(slots.take().unwrap(), 7);
    }
}
