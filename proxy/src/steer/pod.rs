//! One enrolled pod: its entry in the maps, its listeners, its instance of the socket lookup.

use std::collections::HashMap;
use std::net::IpAddr;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd, RawFd};
use std::sync::{Arc, Mutex, PoisonError};

use adit_common::{Addr, AddrKey, Destination, Listener, MAX_PODS, NOBODY, Pod, PodFlags, listener_index};

use super::{Maps, SK_LOOKUP, SteerError, Steering, sys};
use crate::identity::SpiffeId;

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
    /// The pod's identity; none for a pod that takes part in no verdict.
    pub identity: Option<&'a SpiffeId>,
    /// Whether its connections within the node take the proxy too.
    pub same_node_encrypted: bool,
    /// The pod's addresses.
    pub addresses: &'a [IpAddr],
    /// The pod's `net.ipv4.ip_local_port_range`.
    pub local_ports: [u16; 2],
    /// The listeners, made in the pod's namespace: for outbound, tunnels and plaintext.
    pub outbound: BorrowedFd<'a>,
    /// See there.
    pub hbone: BorrowedFd<'a>,
    /// See there.
    pub plaintext: BorrowedFd<'a>,
}

/// A pod that is steered. Dropping this lets it go: connects first, then what comes in.
pub struct PodAttachment {
    maps: Arc<Maps>,
    slots: Arc<Slots>,
    slot: u32,
    source: u32,
    cookie: u64,
    addresses: Vec<Addr>,
    extra_addresses: Vec<AddrKey>,
    /// Holds the instance of the socket lookup.
    _lookup: Option<OwnedFd>,
}

impl PodAttachment {
    /// The pod's slot: its name as a destination of verdicts.
    pub fn slot(&self) -> u32 {
        self.slot
    }

    /// The number of the pod's identity among the sources of verdicts.
    pub fn source(&self) -> u32 {
        self.source
    }
}

impl Steering {
    /// Steers a pod. Established connections are not touched.
    pub fn attach_pod(&self, pod: &PodSteering<'_>) -> Result<PodAttachment, SteerError> {
        let known: Option<Pod> = sys::get(self.maps.pods.as_fd(), &pod.cookie).map_err(|error| SteerError::Map {
            doing: "looking for a pod",
            error,
        })?;
        if known.is_some() {
            return Err(SteerError::NetnsTaken);
        }
        let slot = self.slots.take()?;
        let mut flags = PodFlags::default();
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
        // From here on a failure undoes what was done, by the drop of the attachment.
        let mut attachment = PodAttachment {
            maps: Arc::clone(&self.maps),
            slots: Arc::clone(&self.slots),
            slot,
            source: pod.identity.map_or(NOBODY, |identity| self.sources.of(identity)),
            cookie: pod.cookie,
            addresses: pod.addresses.iter().copied().map(Addr::from).collect(),
            extra_addresses: others,
            _lookup: None,
        };
        let maps = &self.maps;
        let at = |doing| move |error| SteerError::Map { doing, error };
        for (kind, listener) in [
            (Listener::Outbound, pod.outbound),
            (Listener::Hbone, pod.hbone),
            (Listener::Plaintext, pod.plaintext),
        ] {
            let value: RawFd = listener.as_raw_fd();
            sys::update(maps.listeners.as_fd(), &listener_index(slot, kind), &value, 0)
                .map_err(at("entering a pod's listener"))?;
        }
        for key in &attachment.extra_addresses {
            sys::update(maps.addrs.as_fd(), key, &1_u8, 0).map_err(at("entering a pod's address"))?;
        }
        // What comes in is steered before connects are captured: a captured connect must find its listener.
        attachment._lookup = Some(self.load_lookup(pod, slot, flags)?);
        let entry = Pod {
            v4: first(true),
            v6: first(false),
            proxy_cgroup: self.proxy_cgroup,
            slot,
            flags,
            local_ports: pod.local_ports,
            seed: fastrand::u32(..),
            source: attachment.source,
            reserved: 0,
        };
        sys::update(maps.pods.as_fd(), &pod.cookie, &entry, 0).map_err(at("entering a pod"))?;
        Ok(attachment)
    }

    fn load_lookup(&self, pod: &PodSteering<'_>, slot: u32, flags: PodFlags) -> Result<OwnedFd, SteerError> {
        let constants: [(&str, &[u8]); 3] = [
            ("ADIT_NETNS", &pod.cookie.to_ne_bytes()),
            ("ADIT_SLOT", &slot.to_ne_bytes()),
            ("ADIT_FLAGS", &flags.0.to_ne_bytes()),
        ];
        let mut lookup = self.lookup.lock().unwrap_or_else(PoisonError::into_inner);
        let program = lookup.instantiate(HashMap::from(constants))?;
        sys::link(program.as_fd(), pod.netns, SK_LOOKUP.attach).map_err(|error| SteerError::Attach {
            program: SK_LOOKUP.name,
            target: "the pod's network namespace",
            error,
        })
    }
}

impl Drop for PodAttachment {
    fn drop(&mut self) {
        // Errors here could only say that an entry is gone already. The pod's addresses first: nobody is let through to
        // it any more, and another may have them by now.
        for addr in &self.addresses {
            let known: Option<Destination> = sys::get(self.maps.destinations.as_fd(), addr).ok().flatten();
            if known.is_some_and(|destination| destination.netns == self.cookie) {
                let _ = sys::delete(self.maps.destinations.as_fd(), addr);
            }
        }
        let _ = sys::delete(self.maps.pods.as_fd(), &self.cookie);
        self._lookup = None;
        for key in &self.extra_addresses {
            let _ = sys::delete(self.maps.addrs.as_fd(), key);
        }
        for kind in [Listener::Outbound, Listener::Hbone, Listener::Plaintext] {
            let _ = sys::delete(self.maps.listeners.as_fd(), &listener_index(self.slot, kind));
        }
        self.slots.give_back(self.slot);
    }
}

/// The places of the map of listeners, one for each pod.
#[derive(Default)]
pub(super) struct Slots {
    free: Mutex<FreeSlots>,
}

#[derive(Default)]
struct FreeSlots {
    returned: Vec<u32>,
    unused: u32,
}

impl Slots {
    fn take(&self) -> Result<u32, SteerError> {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(slot) = free.returned.pop() {
            return Ok(slot);
        }
        if free.unused == MAX_PODS {
            return Err(SteerError::TooManyPods(MAX_PODS));
        }
        free.unused += 1;
        Ok(free.unused - 1)
    }

    fn give_back(&self, slot: u32) {
        self.free
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .returned
            .push(slot);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_given_out_once_and_end_at_the_limit() {
        let slots = Slots::default();
        for expected in 0..MAX_PODS {
            assert_eq!(slots.take().unwrap(), expected);
        }
        assert!(matches!(slots.take(), Err(SteerError::TooManyPods(MAX_PODS))));
        slots.give_back(7);
        assert_eq!(slots.take().unwrap(), 7);
    }
}
