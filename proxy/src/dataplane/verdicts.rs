//! What the kernel is to decide by itself, and how it comes to know it.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use adit_common::{ANY_PORT, Addr, Cached, Destination, NOBODY, Range, VerdictKey};
use arc_swap::ArcSwap;
use ipnet::{IpNet, Ipv4Net, Ipv6Net};

use crate::identity::SpiffeId;
use crate::mesh::{Changes, Mesh, Place, PortRange, Protocol, SameNode, Workload};
use crate::node::{CAPTURE_TEST, LocalPod, LocalPods};
use crate::policy::{self, compile};
use crate::steer::{ServiceMaps, SteerError, VerdictMaps, range};

use super::dependents::Dependents;
use super::services::{self, Lists, Services};

/// The most ports of one destination whose verdicts are told apart; beyond that they are asked.
const MAX_PORTS: usize = 64;
/// How many ports that a pod excludes are told apart. Few: each is a row for each identity on the node, and whoever writes
/// a pod's annotations must not use up the room for all.
const MAX_EXCLUDED: usize = 8;

/// The kernel's verdicts: what it has been told, so that only differences are told.
pub struct Verdicts {
    maps: VerdictMaps,
    told: Told,
    services: Services,
    unplaced: Arc<ArcSwap<Unplaced>>,
    /// The pods for which all is told; none where something may be missing.
    complete: Option<Arc<HashMap<Arc<str>, Arc<LocalPod>>>>,
    /// Which services depend on a workload or an address.
    dependents: Dependents,
}

/// What the kernel's maps have no room for: the proxy decides instead.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Unplaced {
    /// Addresses.
    pub destinations: usize,
    /// Ranges of addresses.
    pub ranges: usize,
    /// Pods whose verdicts have no room.
    pub verdicts: usize,
    /// Ports of services.
    pub services: usize,
}

impl fmt::Display for Unplaced {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            destinations,
            ranges,
            verdicts,
            services,
        } = self;
        write!(
            f,
            "{destinations} addresses, {ranges} ranges, the verdicts of {verdicts} pods, {services} ports of services"
        )
    }
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
            unplaced: Arc::default(),
            complete: None,
            dependents: Dependents::default(),
        })
    }

    /// Takes over anew, once somebody else may have changed what the kernel holds.
    pub fn reclaim(&mut self) -> Result<(), SteerError> {
        let unplaced = Arc::clone(&self.unplaced);
        *self = Self::take_over(self.maps.clone(), self.services.maps())?;
        self.unplaced = unplaced;
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
        let done = match changes.filter(|changes| complete.is_some() && is_elsewhere(changes, &enrolled)) {
            Some(changes) => self.publish_some(mesh, &enrolled, changes)?,
            None => false,
        };
        if !done {
            self.dependents = Dependents::of(mesh);
            self.publish_all(mesh, &enrolled)?;
        }
        // Where something has no place, all is to be placed anew.
        self.complete = (**self.unplaced.load() == Unplaced::default()).then_some(all);
        Ok(())
    }

    fn publish_all(&mut self, mesh: &Mesh, enrolled: &[Enrolled<'_>]) -> Result<(), SteerError> {
        let (mut wanted, lists) = wanted(mesh, enrolled);
        let mut unplaced = Unplaced::default();
        // What lies in a new range may be forgotten by itself only once the range is asked.
        unplaced.ranges += self.ask_ranges(&wanted.ranges)?;
        let told: Vec<Addr> = self.told.destinations.keys().copied().collect();
        let changing = self.services.changing(&lists);
        self.withdraw_services(&told, &wanted, &changing)?;
        self.withdraw(&told, &wanted)?;
        let full = self.tell_tables(&wanted.tables)?;
        unplaced.verdicts = full.len();
        for slot in full {
            for destination in wanted.destinations.values_mut().filter(|known| known.slot == slot) {
                destination.verdict = Cached::Ask as u32;
            }
        }
        // Services last: what is known of their endpoints is there when these are named. What may be permitted anyway
        // before those, should there be no room for all.
        let mut destinations: Vec<Destination> = wanted.destinations.into_values().collect();
        destinations.sort_by_key(|destination| match Cached::from_u32(destination.verdict) {
            Cached::Service => 2,
            Cached::Allow if destination.netns == 0 => 1,
            _ => 0,
        });
        let of_services = destinations.partition_point(|known| !leads_to_list(known));
        let (others, services) = destinations.split_at(of_services);
        let mut asked = self.set_destinations(others, &mut unplaced);
        unplaced.services = self.services.tell(lists)?;
        asked |= self.set_destinations(services, &mut unplaced);
        if asked || unplaced.ranges > 0 {
            // Nothing is permitted by a range that may hold what has no place of its own to be asked.
            wanted.ranges.retain(|_, verdict| *verdict != Cached::Allow);
            self.ask_ranges(&wanted.ranges)?;
        }
        unplaced.ranges += self.allow_ranges(&wanted.ranges)?;
        self.note(unplaced);
        Ok(())
    }

    /// The same for what has changed, where that is about none of the enrolled pods. False where something of it has
    /// found no place: then all is to be placed anew.
    fn publish_some(&mut self, mesh: &Mesh, enrolled: &[Enrolled<'_>], changes: &Changes) -> Result<bool, SteerError> {
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
        // Services last: what is known of their endpoints is there when these are named.
        let (services, others): (Vec<_>, Vec<_>) = wanted.destinations.into_values().partition(leads_to_list);
        let mut unplaced = Unplaced::default();
        self.set_destinations(&others, &mut unplaced);
        unplaced.services = self.services.tell_among(&addrs, lists)?;
        self.set_destinations(&services, &mut unplaced);
        Ok(unplaced == Unplaced::default())
    }

    /// What had no place at the last time.
    pub fn unplaced(&self) -> Arc<ArcSwap<Unplaced>> {
        Arc::clone(&self.unplaced)
    }

    fn note(&self, unplaced: Unplaced) {
        let before = self.unplaced.swap(Arc::new(unplaced));
        if *before == unplaced {
            return;
        }
        if unplaced == Unplaced::default() {
            tracing::info!("the kernel's maps have room for everything again");
        } else {
            tracing::warn!("the kernel's maps have no room for {unplaced}: the proxy decides on these connections");
        }
    }

    /// Enters these, as far as there is room. Whether any has found none that was not to be permitted anyway.
    fn set_destinations(&mut self, destinations: &[Destination], unplaced: &mut Unplaced) -> bool {
        let mut asked = false;
        for destination in destinations {
            if let Err(error) = self.set_destination(*destination) {
                tracing::debug!("{error}: {:?}", IpAddr::from(destination.addr));
                unplaced.destinations += 1;
                asked |= destination.verdict != Cached::Allow as u32;
            }
        }
        asked
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
                // Without memory to replace it, it goes.
                if self.maps.set_destination(*told).is_err() {
                    self.maps.remove_destination(*addr)?;
                    self.told.destinations.remove(addr);
                }
            }
        }
        Ok(())
    }

    /// Takes away what permits and is not wanted, then enters what asks. Gives how many ranges found no room.
    fn ask_ranges(&mut self, wanted: &HashMap<Range, Cached>) -> Result<usize, SteerError> {
        for range in self.unwanted_ranges(wanted, Cached::Allow) {
            self.maps.remove_range(range)?;
            self.told.ranges.remove(&range);
        }
        Ok(self.set_ranges(wanted, Cached::Ask))
    }

    /// Enters what permits, then takes away what asks and is not wanted. Gives how many ranges found no room.
    fn allow_ranges(&mut self, wanted: &HashMap<Range, Cached>) -> Result<usize, SteerError> {
        let full = self.set_ranges(wanted, Cached::Allow);
        for range in self.unwanted_ranges(wanted, Cached::Ask) {
            self.maps.remove_range(range)?;
            self.told.ranges.remove(&range);
        }
        Ok(full)
    }

    fn unwanted_ranges(&self, wanted: &HashMap<Range, Cached>, verdict: Cached) -> Vec<Range> {
        let told = self.told.ranges.iter().filter(|(_, told)| **told == verdict);
        let unwanted = told.filter(|(range, _)| wanted.get(*range) != Some(&verdict));
        unwanted.map(|(range, _)| *range).collect()
    }

    fn set_ranges(&mut self, wanted: &HashMap<Range, Cached>, verdict: Cached) -> usize {
        let mut full = 0;
        for (range, _) in wanted.iter().filter(|(_, wanted)| **wanted == verdict) {
            if self.told.ranges.get(range) == Some(&verdict) {
                continue;
            }
            match self.maps.set_range(*range, verdict) {
                Ok(()) => drop(self.told.ranges.insert(*range, verdict)),
                Err(error) => {
                    tracing::debug!("{error}: {range:?}");
                    full += 1;
                }
            }
        }
        full
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
                        tracing::debug!("the verdicts of a pod (slot {slot}) stay with the proxy: {error}");
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
    for test in CAPTURE_TEST {
        let addr = test.ip().into();
        let asked = Destination {
            addr,
            verdict: Cached::Ask as u32,
            slot: u32::MAX,
            netns: 0,
        };
        wanted.destinations.insert(addr, asked);
    }
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
            if owns(mesh, pod, enrolled, *ip) {
                wanted.destinations.insert((*ip).into(), destination);
            }
        }
        if !table.is_empty() {
            wanted.tables.insert(pod.slot, table);
        }
    }
    (wanted, services.lists)
}

/// Whether an address is the pod's: an address that is another's by now is not let through to this pod. One that was found
/// in its network namespace is its own before the mesh knows what addresses it has, if nobody else has it: its first
/// instruction may connect to a pod of this node, and is no stranger there.
fn owns(mesh: &Mesh, pod: &Enrolled<'_>, enrolled: &[Enrolled<'_>], ip: IpAddr) -> bool {
    if let Some(owner) = mesh.workload_by_addr(ip) {
        return owner.uid == pod.workload.uid;
    }
    let is_known = |address: &IpAddr| address.is_ipv4() == ip.is_ipv4() && pod.workload.addresses.contains(address);
    let others = |other: &Enrolled<'_>| other.netns != pod.netns && other.workload.addresses.contains(&ip);
    let listed = mesh.workload_by_uid(&pod.workload.uid);
    listed.is_some_and(|workload| !workload.addresses.iter().any(is_known))
        && mesh.cluster_ranges().iter().any(|range| range.contains(&ip))
        && mesh.service_by_addr(ip).is_none()
        && !enrolled.iter().any(others)
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
    let (Some(now), Some(enrolled)) = (&workload.exclusions, &pod.workload.exclusions) else {
        return (verdict, table);
    };
    // Those of which the pod's own programs know already: else they would take what is left alone for a stranger's.
    let known = now.inbound_ports.iter().flat_map(|range| {
        let enrolled = enrolled.inbound_ports.iter();
        enrolled.filter_map(|known| range.and(known))
    });
    leave_alone(verdict, table, sources, &known.collect::<Vec<_>>())
}

/// The same, with what a pod of this node dials left alone at these ports.
fn leave_alone(
    verdict: Cached,
    mut table: Table,
    sources: &[(u32, Option<&SpiffeId>)],
    ports: &[PortRange],
) -> (Cached, Table) {
    let count: usize = ports.iter().map(|range| range.ports().len()).sum();
    match count {
        0 => return (verdict, table),
        1..=MAX_EXCLUDED => {}
        _ => return (Cached::Ask, Table::new()),
    }
    for (source, _) in sources {
        if verdict != Cached::Table {
            table.insert((*source, ANY_PORT), verdict);
        }
        for port in ports.iter().flat_map(PortRange::ports) {
            table.insert((*source, port), Cached::Excluded);
        }
    }
    (Cached::Table, table)
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
    fn ports_that_a_pod_excludes_are_left_alone_and_at_others_holds_what_held() {
        let sources = [(0, None), (3, None)];
        let ports = |texts: &[&str]| {
            texts
                .iter()
                .map(|text| text.parse().unwrap())
                .collect::<Vec<PortRange>>()
        };
        let excluded = |verdict, table: &Table, texts: &[&str]| {
            let (verdict, table) = leave_alone(verdict, table.clone(), &sources, &ports(texts));
            let of = move |source, port| {
                let found = table.get(&(source, port)).or_else(|| table.get(&(source, ANY_PORT)));
                found.copied()
            };
            (verdict, of)
        };
        let none = Table::new();
        for before in [Cached::Allow, Cached::Deny, Cached::Ask] {
            let (verdict, of) = excluded(before, &none, &["9090", "8000-8001"]);
            assert_eq!(verdict, Cached::Table);
            for (port, expected) in [(9090, Cached::Excluded), (8001, Cached::Excluded), (8002, before)] {
                assert_eq!([of(0, port), of(3, port)], [Some(expected); 2], "{before:?} {port}");
            }
        }
        let told = Table::from([
            ((3, 9090), Cached::Deny),
            ((3, ANY_PORT), Cached::Allow),
            ((3, 80), Cached::Deny),
        ]);
        let (verdict, of) = excluded(Cached::Table, &told, &["9090"]);
        assert_eq!(verdict, Cached::Table);
        assert_eq!(
            [of(3, 9090), of(3, 80), of(3, 81), of(0, 81)],
            [Some(Cached::Excluded), Some(Cached::Deny), Some(Cached::Allow), None]
        );
        assert_eq!(excluded(Cached::Deny, &none, &[]).0, Cached::Deny);
        assert_eq!(excluded(Cached::Table, &told, &["20000-20100"]).0, Cached::Ask);
    }

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
