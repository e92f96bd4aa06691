//! What the kernel is to decide by itself, and how it comes to know it.

mod wanted;

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use adit_common::{Addr, Cached, Destination, Range, VerdictKey};
use arc_swap::ArcSwap;

use crate::mesh::{Changes, Mesh};
use crate::node::{LocalPod, LocalPods};
use crate::steer::{ServiceMaps, SteerError, VerdictMaps};

use super::dependents::Dependents;
use super::services::Services;
use wanted::{Enrolled, Table, Told, is_elsewhere, place};
pub(super) use wanted::{elsewhere, unplaced, wanted};

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

fn leads_to_list(destination: &Destination) -> bool {
    destination.verdict == Cached::Service as u32
}
