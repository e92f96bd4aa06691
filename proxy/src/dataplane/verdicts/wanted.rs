//! What the kernel is to be told: what follows from the mesh for the enrolled pods.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::net::IpAddr;

use adit_common::{ANY_PORT, Addr, Cached, Destination, NOBODY, Range};
use ipnet::{IpNet, Ipv4Net, Ipv6Net};

use crate::dataplane::services::{self, Lists};
use crate::identity::SpiffeId;
use crate::mesh::{Changes, Mesh, Place, PortRange, Protocol, SameNode, Workload};
use crate::node::{CAPTURE_TEST, LocalPod};
use crate::policy::{self, compile};
use crate::steer::range;

/// The most ports of one destination whose verdicts are told apart; beyond that they are asked.
const MAX_PORTS: usize = 64;
/// How many ports that a pod excludes are told apart. Few: each is a row for each identity on the node, and whoever writes
/// a pod's annotations must not use up the room for all.
const MAX_EXCLUDED: usize = 8;

/// What the kernel holds, or is to hold.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(in crate::dataplane) struct Told {
    pub(in crate::dataplane) destinations: HashMap<Addr, Destination>,
    /// By slot.
    pub(super) tables: HashMap<u32, Table>,
    pub(super) ranges: HashMap<Range, Cached>,
}

/// The verdicts of one destination, by source and port.
pub(super) type Table = BTreeMap<(u32, u16), Cached>;

/// An enrolled pod, as far as verdicts go.
#[derive(Clone, Copy)]
pub(in crate::dataplane) struct Enrolled<'a> {
    /// As it was when it was enrolled.
    workload: &'a Workload,
    identity: &'a SpiffeId,
    netns: u64,
    slot: u32,
    source: u32,
}

impl<'a> Enrolled<'a> {
    pub(super) fn of(pod: &'a LocalPod) -> Self {
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
pub(in crate::dataplane) fn wanted(mesh: &Mesh, enrolled: &[Enrolled<'_>]) -> (Told, Lists) {
    let mut wanted = Told {
        ranges: ranges(mesh.cluster_ranges()),
        ..Told::default()
    };
    for test in CAPTURE_TEST {
        let addr = test.ip().into();
        wanted.destinations.insert(addr, unplaced(addr, Cached::Ask));
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
pub(in crate::dataplane) fn elsewhere(mesh: &Mesh, ip: IpAddr) -> Option<Destination> {
    let verdict = match mesh.workload_by_addr(ip)?.protocol {
        Protocol::Plain => Cached::Allow,
        Protocol::Hbone => Cached::Ask,
    };
    // Of what lies in a range it is known already that it is asked.
    let is_known = verdict == Cached::Ask && mesh.cluster_ranges().iter().any(|range| range.contains(&ip));
    (!is_known).then(|| unplaced(ip.into(), verdict))
}

pub(in crate::dataplane) fn unplaced(addr: Addr, verdict: Cached) -> Destination {
    Destination {
        addr,
        verdict: verdict as u32,
        slot: u32::MAX,
        netns: 0,
    }
}

/// Whether changes are about none of the enrolled pods, and nothing that holds of all destinations.
pub(super) fn is_elsewhere(changes: &Changes, enrolled: &[Enrolled<'_>]) -> bool {
    let uids: HashSet<&str> = enrolled.iter().map(|pod| &*pod.workload.uid).collect();
    let own: HashSet<&IpAddr> = enrolled.iter().flat_map(|pod| &pod.workload.addresses).collect();
    let addresses = changes.addresses.iter().chain(&changes.service_addresses);
    !changes.policies
        && !changes.ranges
        && !changes.uids().any(|uid| uids.contains(&**uid))
        && !addresses.into_iter().any(|address| own.contains(address))
}

/// Where this node's pods are. None where there are none, or the mesh has them at different places.
pub(super) fn place<'a>(mesh: &'a Mesh, enrolled: &[Enrolled<'a>]) -> Option<Place<'a>> {
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
