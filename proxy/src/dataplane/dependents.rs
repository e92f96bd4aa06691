//! What is to be looked at anew when something in the mesh changes.

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;
use std::sync::Arc;

use adit_common::{Addr, Destination};

use super::services::{self, Lists};
use super::verdicts::{elsewhere, unplaced};
use crate::mesh::{Changes, Mesh, Place, Service, ServiceEndpoint};

/// What a service depends on.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Cause {
    Workload(Arc<str>),
    Address(IpAddr),
}

/// The services by what they depend on: an endpoint that comes, goes, or is reached otherwise changes what becomes of
/// their connections though they themselves stay as they are.
#[derive(Debug, Default)]
pub(super) struct Dependents(HashMap<Cause, HashSet<Arc<str>>>);

impl Dependents {
    pub(super) fn of(mesh: &Mesh) -> Self {
        let mut dependents = Self::default();
        for service in mesh.services() {
            dependents.add(service);
        }
        dependents
    }

    fn add(&mut self, service: &Service) {
        let name = name(service);
        for cause in service.endpoints.iter().flat_map(causes) {
            self.0.entry(cause).or_default().insert(Arc::clone(&name));
        }
    }

    fn remove(&mut self, service: &Service) {
        let name = name(service);
        for cause in service.endpoints.iter().flat_map(causes) {
            if let Some(services) = self.0.get_mut(&cause) {
                services.remove(&name);
                if services.is_empty() {
                    self.0.remove(&cause);
                }
            }
        }
    }

    /// What holds now of each address that the changes may touch (nothing where none is known), and the lists of those that
    /// are services'.
    pub(super) fn wanted(
        &mut self,
        mesh: &Mesh,
        place: Option<&Place<'_>>,
        changes: &Changes,
    ) -> (HashMap<Addr, Option<Destination>>, Lists) {
        for (before, now) in &changes.services {
            before.iter().for_each(|service| self.remove(service));
            now.iter().for_each(|service| self.add(service));
        }
        let mut names: HashSet<&Arc<str>> = HashSet::new();
        let addresses = changes.addresses.iter().map(|address| Cause::Address(*address));
        for cause in changes
            .uids()
            .map(|uid| Cause::Workload(Arc::clone(uid)))
            .chain(addresses)
        {
            names.extend(self.0.get(&cause).into_iter().flatten());
        }
        let mut touched: HashSet<IpAddr> = changes
            .addresses
            .iter()
            .chain(&changes.service_addresses)
            .copied()
            .collect();
        let dependent = names.into_iter().filter_map(|name| mesh.service_by_name(name));
        let changed = changes.services.iter().filter_map(|(_, now)| now.as_ref());
        touched.extend(dependent.chain(changed).flat_map(|service| &service.addresses));

        let (mut wanted, mut lists) = (HashMap::new(), Lists::new());
        for ip in touched {
            let addr = Addr::from(ip);
            let destination = match mesh.service_by_addr(ip) {
                Some(service) => {
                    let (verdict, of_service) = services::verdict(mesh, service, ip, place);
                    lists.extend(of_service);
                    Some(unplaced(addr, verdict))
                }
                None => elsewhere(mesh, ip),
            };
            wanted.insert(addr, destination);
        }
        (wanted, lists)
    }
}

fn name(service: &Service) -> Arc<str> {
    format!("{}/{}", service.namespace, service.name).into()
}

fn causes(endpoint: &ServiceEndpoint) -> impl Iterator<Item = Cause> {
    let (uid, address) = match endpoint {
        ServiceEndpoint::Workload(uid) => (Some(uid), None),
        ServiceEndpoint::Resolved(resolved) => (resolved.workload.as_ref(), Some(resolved.address)),
    };
    let uid = uid.map(|uid| Cause::Workload(Arc::clone(uid)));
    uid.into_iter().chain(address.map(Cause::Address))
}

#[cfg(test)]
mod tests {
    use super::super::verdicts;
    use super::*;
    use crate::mesh::{
        MeshParts, Protocol, Readiness, ResolvedEndpoint, ServicePort, TargetPort, TrafficDistribution, test_parts,
        test_workload,
    };
    use crate::node::CAPTURE_TEST;

    fn endpoint(rng: &mut fastrand::Rng) -> ServiceEndpoint {
        let uid: Arc<str> = format!("shop/w{}", rng.u8(0..8)).into();
        if rng.bool() {
            return ServiceEndpoint::Workload(uid);
        }
        ServiceEndpoint::Resolved(ResolvedEndpoint {
            workload: rng.bool().then_some(uid),
            address: format!("10.0.0.{}", rng.u8(1..10)).parse().unwrap(),
            readiness: [Readiness::Ready, Readiness::Draining, Readiness::NotReady][rng.usize(0..3)],
            node: "n1".into(),
            zone: "".into(),
            ports: [(80, 8080)].into(),
        })
    }

    /// A mesh that differs from the one before in about every third part.
    fn parts(rng: &mut fastrand::Rng, before: &MeshParts) -> MeshParts {
        let mut parts = test_parts();
        parts.cluster_ranges = vec!["10.0.0.0/29".parse().unwrap()];
        for n in 0..8 {
            let (name, uid) = (format!("w{n}"), format!("shop/w{n}"));
            if rng.u8(0..3) > 0 {
                parts
                    .workloads
                    .extend(before.workloads.iter().find(|known| *known.uid == *uid).cloned());
            } else if rng.u8(0..4) > 0 {
                let mut workload = test_workload("shop", &name, &format!("10.0.0.{}", n + 1 + rng.u8(0..2)));
                workload.ready = rng.bool();
                if rng.bool() {
                    workload.protocol = Protocol::Plain;
                }
                parts.workloads.push(workload);
            }
        }
        for n in 0..4 {
            let name: Arc<str> = format!("s{n}").into();
            if rng.u8(0..3) > 0 {
                parts
                    .services
                    .extend(before.services.iter().find(|known| known.name == name).cloned());
            } else if rng.u8(0..4) > 0 {
                parts.services.push(Service {
                    hostname: Arc::clone(&name),
                    name,
                    namespace: "shop".into(),
                    addresses: vec![format!("10.96.0.{n}").parse().unwrap()],
                    ports: vec![ServicePort {
                        port: 80,
                        target: TargetPort::Number(8080),
                    }],
                    distribution: TrafficDistribution::Any,
                    affinity: rng.u8(0..4) == 0,
                    endpoints: (0..rng.usize(0..3)).map(|_| endpoint(rng)).collect(),
                });
            }
        }
        parts
    }

    #[test]
    fn what_follows_from_changes_is_what_follows_from_all() {
        let mut rng = fastrand::Rng::with_seed(11);
        let mut known = test_parts();
        known.cluster_ranges = vec!["10.0.0.0/29".parse().unwrap()];
        let mut before = Mesh::build(known.clone()).unwrap();
        let mut dependents = Dependents::of(&before);
        let (mut destinations, mut lists) = (HashMap::new(), Lists::new());
        let place = Place { node: "n1", zone: "" };
        for round in 0..2_000 {
            let next = parts(&mut rng, &known);
            // Two of them may have one address.
            let Ok(mesh) = Mesh::build(next.clone()) else {
                continue;
            };
            let (changed, changed_lists) = dependents.wanted(&mesh, Some(&place), &mesh.changes_since(&before));
            lists.retain(|key, _| !changed.contains_key(&key.addr));
            lists.extend(changed_lists);
            for (addr, destination) in changed {
                match destination {
                    Some(destination) => drop(destinations.insert(addr, destination)),
                    None => drop(destinations.remove(&addr)),
                }
            }
            let (mut all, _) = verdicts::wanted(&mesh, &[]);
            // Those do not depend on the mesh.
            for test in CAPTURE_TEST {
                all.destinations.remove(&test.ip().into());
            }
            // Without pods there is no place; only the services' verdicts depend on it.
            let services = services::wanted(&mesh, Some(&place));
            for (addr, verdict) in services.addresses {
                all.destinations.insert(addr, unplaced(addr, verdict));
            }
            assert_eq!(destinations, all.destinations, "round {round}");
            assert_eq!(lists, services.lists, "round {round}");
            (before, known) = (mesh, next);
        }
    }
}
