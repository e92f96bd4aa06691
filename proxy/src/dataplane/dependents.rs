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
