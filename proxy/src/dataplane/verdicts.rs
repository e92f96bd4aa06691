//! What the kernel is to decide by itself, and how it comes to know it.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::net::IpAddr;
use std::sync::Arc;

use adit_common::{ANY_PORT, Addr, Cached, Destination, NOBODY, Range, VerdictKey};
use ipnet::{IpNet, Ipv4Net, Ipv6Net};

use crate::identity::SpiffeId;
use crate::mesh::{Changes, Mesh, Place, Protocol, SameNode, Workload};
use crate::node::{LocalPod, LocalPods};
use crate::policy::{self, compile};
use crate::steer::{ServiceMaps, SteerError, VerdictMaps, range};

use super::dependents::Dependents;
use super::services::{self, Lists, Services};

/// The most ports of one destination whose verdicts are told apart; beyond that they are asked.
const MAX_PORTS: usize = 64;

/// The kernel's verdicts: what it has been told, so that only differences are told.
pub struct Verdicts {
    maps: VerdictMaps,
    told: Told,
    services: Services,
    /// The pods for which all is told; none where something may be missing.
    complete: Option<Arc<HashMap<Arc<str>, Arc<LocalPod>>>>,
    /// Which services depend on a workload or an address.
    dependents: Dependents,
}

/// What the kernel holds.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Told {
    pub(super) destinations: HashMap<Addr, Destination>,
    /// By slot.
    tables: HashMap<u32, Table>,
    ranges: HashMap<Range, Cached>,
}

/// The verdicts of one destination, by source and port.
type Table = BTreeMap<(u32, u16), Cached>;

impl Verdicts {
    /// Takes over what the kernel holds already: until the first [`Verdicts::publish`] everything is asked.
    pub fn take_over(maps: VerdictMaps, services: ServiceMaps) -> Result<Self, SteerError> {
        let mut told = Told {
            destinations: maps.destinations()?,
            ..Told::default()
        };
        for destination in told.destinations.values_mut() {
            destination.verdict = Cached::Ask as u32;
            maps.set_destination(*destination)?;
        }
        for key in maps.verdicts()?.into_keys() {
            maps.remove_verdict(key)?;
        }
        for (range, verdict) in maps.ranges()? {
            told.ranges.insert(range, Cached::from_u32(verdict));
        }
        Ok(Self {
            maps,
            told,
            services: Services::take_over(services)?,
            complete: None,
            dependents: Dependents::default(),
        })
    }

    /// Takes over anew, once somebody else may have changed what the kernel holds.
    pub fn reclaim(&mut self) -> Result<(), SteerError> {
        *self = Self::take_over(self.maps.clone(), self.services.maps())?;
        Ok(())
    }

    /// Tells the kernel what follows from the mesh for the enrolled pods. What becomes different is asked while it
    /// changes. Where a map has no more room, what has no place in it is asked, and the log says so.
    ///
    /// `changes` are those of the mesh since the last call; without them all is looked at.
    pub fn publish(&mut self, mesh: &Mesh, pods: &LocalPods, changes: Option<&Changes>) -> Result<(), SteerError> {
        let all = pods.all();
        let enrolled: Vec<Enrolled<'_>> = all.values().map(|pod| Enrolled::of(pod)).collect();
        // After a failure nobody knows what the kernel holds.
        let complete = self.complete.take().filter(|known| Arc::ptr_eq(known, &all));
        match changes.filter(|changes| complete.is_some() && is_elsewhere(changes, &enrolled)) {
            Some(changes) => self.publish_some(mesh, &enrolled, changes)?,
            None => {
                self.dependents = Dependents::of(mesh);
                self.publish_all(mesh, &enrolled)?;
            }
        }
        self.complete = Some(all);
        Ok(())
    }

    fn publish_all(&mut self, mesh: &Mesh, enrolled: &[Enrolled<'_>]) -> Result<(), SteerError> {
        let (mut wanted, lists) = wanted(mesh, enrolled);
        let told: Vec<Addr> = self.told.destinations.keys().copied().collect();
        let changing = self.services.changing(&lists);
        self.withdraw_services(&told, &wanted, &changing)?;
        self.withdraw(&told, &wanted)?;
        self.tell_ranges(&wanted.ranges)?;
        for slot in self.tell_tables(&wanted.tables)? {
            for destination in wanted.destinations.values_mut().filter(|known| known.slot == slot) {
                destination.verdict = Cached::Ask as u32;
            }
        }
        self.tell_destinations(&wanted.destinations)?;
        self.services.tell(lists)?;
        self.tell_services(&wanted.destinations)
    }

    /// The same for what has changed, where that is about none of the enrolled pods.
    fn publish_some(&mut self, mesh: &Mesh, enrolled: &[Enrolled<'_>], changes: &Changes) -> Result<(), SteerError> {
        let (wanted, lists) = self.dependents.wanted(mesh, place(mesh, enrolled).as_ref(), changes);
        let addrs: Vec<Addr> = wanted.keys().copied().collect();
        let changing = self.services.changing_among(&addrs, &lists);
        let wanted = Told {
            destinations: wanted
                .into_iter()
                .filter_map(|(addr, wanted)| Some((addr, wanted?)))
                .collect(),
            ..Told::default()
        };
        self.withdraw_services(&addrs, &wanted, &changing)?;
        self.withdraw(&addrs, &wanted)?;
        self.tell_destinations(&wanted.destinations)?;
        self.services.tell_among(&addrs, lists)?;
        self.tell_services(&wanted.destinations)
    }

    /// What does not lead to a list. Services come last: what is known of their endpoints is there when these are named.
    fn tell_destinations(&mut self, wanted: &HashMap<Addr, Destination>) -> Result<(), SteerError> {
        let others = wanted.values().filter(|destination| !leads_to_list(destination));
        others
            .copied()
            .try_for_each(|destination| self.set_destination(destination))
    }

    fn tell_services(&mut self, wanted: &HashMap<Addr, Destination>) -> Result<(), SteerError> {
        let services = wanted.values().filter(|destination| leads_to_list(destination));
        services
            .copied()
            .try_for_each(|destination| self.set_destination(destination))
    }

    fn set_destination(&mut self, destination: Destination) -> Result<(), SteerError> {
        if self.told.destinations.get(&destination.addr) != Some(&destination) {
            self.maps.set_destination(destination)?;
            self.told.destinations.insert(destination.addr, destination);
        }
        Ok(())
    }

    /// Of these addresses, services whose endpoints are not to stay as they are take the proxy while they change: nobody is
    /// sent to an endpoint of which no more is known than of a stranger.
    fn withdraw_services(&mut self, addrs: &[Addr], wanted: &Told, changing: &HashSet<Addr>) -> Result<(), SteerError> {
        for addr in addrs {
            let Some(told) = self.told.destinations.get_mut(addr) else {
                continue;
            };
            let stays = wanted.destinations.get(addr) == Some(told) && !changing.contains(addr);
            if leads_to_list(told) && !stays {
                told.verdict = Cached::Ask as u32;
                self.maps.set_destination(*told)?;
            }
        }
        Ok(())
    }

    /// Of these addresses, takes back what is not to stay as it is.
    fn withdraw(&mut self, addrs: &[Addr], wanted: &Told) -> Result<(), SteerError> {
        for addr in addrs {
            let Some(told) = self.told.destinations.get_mut(addr) else {
                continue;
            };
            let Some(next) = wanted.destinations.get(addr) else {
                self.maps.remove_destination(*addr)?;
                self.told.destinations.remove(addr);
                continue;
            };
            if told != next || self.told.tables.get(&told.slot) != wanted.tables.get(&told.slot) {
                *told = Destination {
                    verdict: Cached::Ask as u32,
                    ..*next
                };
                self.maps.set_destination(*told)?;
            }
        }
        Ok(())
    }

    /// What permits goes before what asks is taken away, and comes after what asks is there.
    fn tell_ranges(&mut self, wanted: &HashMap<Range, Cached>) -> Result<(), SteerError> {
        let unwanted = |told: &HashMap<Range, Cached>, verdict| -> Vec<Range> {
            let stays = |range| wanted.get(range) == Some(&verdict);
            let of_kind = told.iter().filter(|(range, told)| **told == verdict && !stays(*range));
            of_kind.map(|(range, _)| *range).collect()
        };
        for range in unwanted(&self.told.ranges, Cached::Allow) {
            self.maps.remove_range(range)?;
            self.told.ranges.remove(&range);
        }
        for verdict in [Cached::Ask, Cached::Allow] {
            for (range, _) in wanted.iter().filter(|(_, wanted)| **wanted == verdict) {
                if self.told.ranges.get(range) != Some(&verdict) {
                    self.maps.set_range(*range, verdict)?;
                    self.told.ranges.insert(*range, verdict);
                }
            }
        }
        for range in unwanted(&self.told.ranges, Cached::Ask) {
            self.maps.remove_range(range)?;
            self.told.ranges.remove(&range);
        }
        Ok(())
    }

    /// Makes the tables those wanted. Gives the slots whose tables found no room.
    fn tell_tables(&mut self, wanted: &HashMap<u32, Table>) -> Result<Vec<u32>, SteerError> {
        let none = Table::new();
        let slots: Vec<u32> = self.told.tables.keys().copied().collect();
        for slot in slots {
            let Some(told) = self.told.tables.get_mut(&slot) else {
                continue;
            };
            let next = wanted.get(&slot).unwrap_or(&none);
            let unwanted: Vec<_> = told.keys().filter(|key| !next.contains_key(key)).copied().collect();
            for (source, port) in unwanted {
                self.maps.remove_verdict(key(source, slot, port))?;
                told.remove(&(source, port));
            }
            if told.is_empty() {
                self.told.tables.remove(&slot);
            }
        }
        let mut full = Vec::new();
        for (slot, table) in wanted {
            let told = self.told.tables.entry(*slot).or_default();
            for ((source, port), verdict) in table {
                if told.get(&(*source, *port)) == Some(verdict) {
                    continue;
                }
                match self.maps.set_verdict(key(*source, *slot, *port), *verdict) {
                    Ok(()) => drop(told.insert((*source, *port), *verdict)),
                    Err(error) => {
                        tracing::warn!("the verdicts of a pod (slot {slot}) stay with the proxy: {error}");
                        full.push(*slot);
                        break;
                    }
                }
            }
        }
        Ok(full)
    }
}

fn key(source: u32, slot: u32, port: u16) -> VerdictKey {
    VerdictKey {
        source,
        slot,
        port: port.into(),
    }
}

/// An enrolled pod, as far as verdicts go.
#[derive(Clone, Copy)]
pub(super) struct Enrolled<'a> {
    /// As it was when it was enrolled.
    workload: &'a Workload,
    identity: &'a SpiffeId,
    netns: u64,
    slot: u32,
    source: u32,
}

impl<'a> Enrolled<'a> {
    fn of(pod: &'a LocalPod) -> Self {
        Self {
            workload: pod.workload(),
            identity: pod.identity(),
            netns: pod.netns().cookie(),
            slot: pod.slot(),
            source: pod.source(),
        }
    }
}

/// What the kernel is to hold, and the lists of services' endpoints.
pub(super) fn wanted(mesh: &Mesh, enrolled: &[Enrolled<'_>]) -> (Told, Lists) {
    let mut wanted = Told {
        ranges: ranges(mesh.cluster_ranges()),
        ..Told::default()
    };
    for workload in mesh.workloads() {
        for ip in &workload.addresses {
            if let Some(destination) = elsewhere(mesh, *ip) {
                wanted.destinations.insert(destination.addr, destination);
            }
        }
    }
    let services = services::wanted(mesh, place(mesh, enrolled).as_ref());
    for (addr, verdict) in services.addresses {
        wanted.destinations.insert(addr, unplaced(addr, verdict));
    }
    let mut sources: Vec<(u32, Option<&SpiffeId>)> =
        enrolled.iter().map(|pod| (pod.source, Some(pod.identity))).collect();
    sources.push((NOBODY, None));
    sources.sort_unstable_by_key(|(number, _)| *number);
    sources.dedup_by_key(|(number, _)| *number);
    for pod in enrolled {
        let (verdict, table) = verdicts(mesh, pod, &sources);
        for ip in &pod.workload.addresses {
            let destination = Destination {
                addr: (*ip).into(),
                netns: pod.netns,
                slot: pod.slot,
                verdict: verdict as u32,
            };
            // An address that is another's by now is not let through to this pod.
            let owns = mesh
                .workload_by_addr(*ip)
                .is_some_and(|owner| owner.uid == pod.workload.uid);
            if owns {
                wanted.destinations.insert((*ip).into(), destination);
            }
        }
        if !table.is_empty() {
            wanted.tables.insert(pod.slot, table);
        }
    }
    (wanted, services.lists)
}

/// What holds of an address by the workload that has it, if that is not one of the enrolled pods.
pub(super) fn elsewhere(mesh: &Mesh, ip: IpAddr) -> Option<Destination> {
    let verdict = match mesh.workload_by_addr(ip)?.protocol {
        Protocol::Plain => Cached::Allow,
        Protocol::Hbone => Cached::Ask,
    };
    // Of what lies in a range it is known already that it is asked.
    let is_known = verdict == Cached::Ask && mesh.cluster_ranges().iter().any(|range| range.contains(&ip));
    (!is_known).then(|| unplaced(ip.into(), verdict))
}

pub(super) fn unplaced(addr: Addr, verdict: Cached) -> Destination {
    Destination {
        addr,
        verdict: verdict as u32,
        slot: u32::MAX,
        netns: 0,
    }
}

fn leads_to_list(destination: &Destination) -> bool {
    destination.verdict == Cached::Service as u32
}

/// Whether changes are about none of the enrolled pods, and nothing that holds of all destinations.
fn is_elsewhere(changes: &Changes, enrolled: &[Enrolled<'_>]) -> bool {
    let uids: HashSet<&str> = enrolled.iter().map(|pod| &*pod.workload.uid).collect();
    let own: HashSet<&IpAddr> = enrolled.iter().flat_map(|pod| &pod.workload.addresses).collect();
    let addresses = changes.addresses.iter().chain(&changes.service_addresses);
    !changes.policies
        && !changes.ranges
        && !changes.uids().any(|uid| uids.contains(&**uid))
        && !addresses.into_iter().any(|address| own.contains(address))
}

/// Where this node's pods are. None where there are none, or the mesh has them at different places.
fn place<'a>(mesh: &'a Mesh, enrolled: &[Enrolled<'a>]) -> Option<Place<'a>> {
    let current = |pod: &Enrolled<'a>| {
        let workload = mesh.workload_by_uid(&pod.workload.uid);
        Place::of(workload.map_or(pod.workload, |workload| &**workload))
    };
    let mut places = enrolled.iter().map(current);
    let first = places.next()?;
    places.all(|place| place == first).then_some(first)
}

/// The verdicts on connections to one pod.
fn verdicts(mesh: &Mesh, pod: &Enrolled<'_>, sources: &[(u32, Option<&SpiffeId>)]) -> (Cached, Table) {
    let current = mesh.workload_by_uid(&pod.workload.uid).filter(|workload| {
        workload.identity == *pod.identity
            && workload.protocol == Protocol::Hbone
            && workload.same_node == SameNode::Direct
    });
    // It is about to leave, or to be enrolled anew; or its connections are to take the proxy.
    let Some(workload) = current else {
        return (Cached::Ask, Table::new());
    };
    let ids: Vec<Option<&SpiffeId>> = sources.iter().map(|(_, id)| *id).collect();
    let compiled = compile(mesh.policies(), workload, &ids, MAX_PORTS);
    let told = |verdict| match verdict {
        policy::Cached::Allow => Cached::Allow,
        policy::Cached::Deny => Cached::Deny,
        policy::Cached::Ask => Cached::Ask,
    };
    let table: Table = compiled
        .entries
        .iter()
        .map(|entry| {
            (
                (sources[entry.source].0, entry.port.unwrap_or(ANY_PORT)),
                told(entry.verdict),
            )
        })
        .collect();
    let verdict = match told(compiled.default) {
        Cached::Ask if !table.is_empty() => Cached::Table,
        verdict => verdict,
    };
    (verdict, table)
}

/// What holds of addresses of which nothing is known by themselves: within the cluster they are asked. Of a family of
/// which the cluster's ranges are not known, all are.
fn ranges(cluster: &[IpNet]) -> HashMap<Range, Cached> {
    let mut ranges = HashMap::new();
    if cluster.is_empty() {
        return ranges;
    }
    let knows = |v4: bool| cluster.iter().any(|range| range.addr().is_ipv4() == v4);
    let outside = |v4| if knows(v4) { Cached::Allow } else { Cached::Ask };
    ranges.insert(range(Ipv4Net::default().into()), outside(true));
    ranges.insert(range(Ipv6Net::default().into()), outside(false));
    ranges.extend(cluster.iter().map(|net| (range(*net), Cached::Ask)));
    ranges
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outside_the_clusters_ranges_nothing_is_asked() {
        let net = |text: &str| text.parse::<IpNet>().unwrap();
        let of = |text: &str| range(net(text));
        assert!(ranges(&[]).is_empty());
        let known = ranges(&[net("10.0.0.0/8")]);
        assert_eq!(known.get(&of("10.0.0.0/8")), Some(&Cached::Ask));
        assert_eq!(known.get(&of("0.0.0.0/0")), Some(&Cached::Allow));
        assert_eq!(known.get(&of("::/0")), Some(&Cached::Ask));
        let both = ranges(&[net("10.0.0.0/8"), net("fd00::/8")]);
        assert_eq!(both.get(&of("::/0")), Some(&Cached::Allow));
    }
}
