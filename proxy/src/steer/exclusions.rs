//! What of pods' traffic the kernel is told to leave alone.

use std::collections::{HashMap, HashSet};
use std::net::SocketAddr;
use std::os::fd::AsFd as _;

use adit_common::{EXCLUDED, Excludable, Exclusion, ExclusionKind, HostPort, KEPT, PodFlags};
use ipnet::IpNet;

use super::error::at;
use super::verdicts::range;
use super::{Maps, SteerError, sys};
use crate::mesh::{Exclusions, PortRange};

/// What the pod's entry says of them.
pub(super) fn flags(exclusions: Option<&Exclusions>) -> PodFlags {
    let mut flags = PodFlags::default();
    if exclusions.is_some_and(Exclusions::has_outbound) {
        flags = flags.with(PodFlags::EXCLUDES_OUTBOUND);
    }
    if exclusions.is_some_and(|exclusions| !exclusions.inbound_ports.is_empty()) {
        flags = flags.with(PodFlags::EXCLUDES_INBOUND);
    }
    flags
}

/// The entries of the pod whose namespace has this cookie. Connects to `kept` are captured whatever is excluded.
fn wanted(cookie: u64, exclusions: Option<&Exclusions>, kept: &[SocketAddr]) -> Vec<(Exclusion, u32)> {
    let Some(exclusions) = exclusions else {
        return Vec::new();
    };
    let ports = |ranges: &[PortRange], kind| {
        let blocks: Vec<(u16, u32)> = ranges.iter().flat_map(PortRange::blocks).collect();
        blocks.into_iter().map(move |(first, bits)| Exclusion {
            prefix_len: Excludable::BITS_BEFORE + bits,
            of: Excludable::port(cookie, kind, HostPort(first)),
        })
    };
    let net = |net: IpNet| {
        let range = range(net);
        Exclusion {
            prefix_len: Excludable::BITS_BEFORE + range.prefix_len,
            of: Excludable {
                // The family is the range's own: all of IPv6 begins as the mapped form of IPv4 does not.
                kind: match net {
                    IpNet::V4(_) => ExclusionKind::OutboundV4,
                    IpNet::V6(_) => ExclusionKind::OutboundV6,
                } as u32,
                ..Excludable::outbound(cookie, range.addr)
            },
        }
    };
    // Those that are kept first: at no time are they excluded.
    let kept = kept.iter().filter(|_| exclusions.has_outbound());
    let kept = kept.map(|addr| (net(addr.ip().into()), KEPT));
    let nets = exclusions.outbound_cidrs.iter().map(|range| net(*range));
    let excluded = ports(&exclusions.inbound_ports, ExclusionKind::InboundPort)
        .chain(ports(&exclusions.outbound_ports, ExclusionKind::OutboundPort))
        .chain(nets);
    let mut entries: Vec<(Exclusion, u32)> = kept.collect();
    let known: HashSet<Exclusion> = entries.iter().map(|(key, _)| *key).collect();
    entries.extend(excluded.filter(|key| !known.contains(key)).map(|key| (key, EXCLUDED)));
    entries
}

impl Maps {
    /// Makes a pod's entries what follows from its exclusions; `held` are those that it has. What is captured anew goes
    /// first.
    pub(super) fn exclude(
        &self,
        cookie: u64,
        exclusions: Option<&Exclusions>,
        kept: &[SocketAddr],
        held: &mut HashMap<Exclusion, u32>,
    ) -> Result<(), SteerError> {
        let wanted = wanted(cookie, exclusions, kept);
        let keys: HashSet<Exclusion> = wanted.iter().map(|(key, _)| *key).collect();
        let stale: Vec<Exclusion> = held.keys().filter(|key| !keys.contains(key)).copied().collect();
        for key in stale {
            self.exclude_no_more(&key)?;
            held.remove(&key);
        }
        for (key, value) in wanted {
            if held.get(&key) != Some(&value) {
                sys::update(self.exclusions.as_fd(), &key, &value, 0).map_err(at("entering what a pod excludes"))?;
                held.insert(key, value);
            }
        }
        Ok(())
    }

    /// Removes an entry.
    pub(super) fn exclude_no_more(&self, key: &Exclusion) -> Result<(), SteerError> {
        sys::delete(self.exclusions.as_fd(), key).map_err(at("removing what a pod excluded"))
    }

    /// All entries, by the cookies of the pods' namespaces.
    pub(super) fn excluded_by_pod(&self) -> Result<HashMap<u64, HashMap<Exclusion, u32>>, SteerError> {
        let all = sys::entries(self.exclusions.as_fd()).map_err(at("reading what pods exclude"))?;
        let mut by_pod: HashMap<u64, HashMap<Exclusion, u32>> = HashMap::new();
        for (key, value) in all {
            let key: Exclusion = key;
            by_pod.entry(key.of.cookie()).or_default().insert(key, value);
        }
        Ok(by_pod)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn exclusions(annotations: &[(&str, &str)]) -> Exclusions {
        let mut exclusions = Exclusions::default();
        for (name, value) in annotations {
            exclusions
                .annotated(&format!("mesh.adit/exclude-{name}"), value)
                .unwrap();
        }
        exclusions
    }

    #[test]
    fn a_pod_without_exclusions_has_no_entry_and_no_flag() {
        let kept = ["198.51.100.1:15".parse().unwrap()];
        for none in [None, Some(&Exclusions::default())] {
            assert_eq!((wanted(7, none, &kept), flags(none)), (Vec::new(), PodFlags::default()));
        }
    }

    #[test]
    fn entries_are_the_prefixes_of_what_is_excluded_and_what_is_kept_comes_first() {
        let kept = ["198.51.100.1:15".parse().unwrap(), "[2001:db8::15]:15".parse().unwrap()];
        let all = exclusions(&[
            ("inbound-ports", "9090,8000-8010"),
            ("outbound-ports", "5432"),
            ("outbound-cidrs", "10.0.0.0/8,::/0,198.51.100.1"),
        ]);
        let entries = wanted(7, Some(&all), &kept);
        let told: Vec<(u32, u32, u32)> = entries
            .iter()
            .map(|(key, value)| (key.of.kind, key.prefix_len - Excludable::BITS_BEFORE, *value))
            .collect();
        let (inbound, outbound, v4, v6) = (1, 2, 3, 4);
        assert_eq!(
            told,
            [
                (v4, 128, KEPT),
                (v6, 128, KEPT),
                (inbound, 13, EXCLUDED),
                (inbound, 15, EXCLUDED),
                (inbound, 16, EXCLUDED),
                (inbound, 16, EXCLUDED),
                (outbound, 16, EXCLUDED),
                (v4, 104, EXCLUDED),
                (v6, 0, EXCLUDED),
            ]
        );
        assert!(entries.iter().all(|(key, _)| key.of.cookie() == 7));
        assert_eq!(
            flags(Some(&all)),
            PodFlags::EXCLUDES_OUTBOUND.with(PodFlags::EXCLUDES_INBOUND)
        );
        // Nothing that the pod dials is looked up where only what comes in is excluded.
        let inbound = exclusions(&[("inbound-ports", "9090")]);
        assert_eq!(wanted(7, Some(&inbound), &kept).len(), 1);
        assert_eq!(flags(Some(&inbound)), PodFlags::EXCLUDES_INBOUND);
    }
}
