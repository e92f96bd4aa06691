//! One state of the mesh made of another, and what tells one from the other.

use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;

use super::snapshot::index_policies;
use super::{Mesh, MeshError, Node, Policy, Service, Workload};

/// What two states of the mesh differ in.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Changes {
    /// The workloads, each as it was before and as it is.
    pub workloads: Vec<(Option<Arc<Workload>>, Option<Arc<Workload>>)>,
    /// The services, each as it was before and as it is.
    pub services: Vec<(Option<Arc<Service>>, Option<Arc<Service>>)>,
    /// The addresses that have come to stand for another workload, or for another state of it.
    pub addresses: Vec<IpAddr>,
    /// The same of services' addresses.
    pub service_addresses: Vec<IpAddr>,
    /// Whether policies differ.
    pub policies: bool,
    /// Whether it is known otherwise where the cluster's addresses lie.
    pub ranges: bool,
}

impl Mesh {
    /// What has come to differ since `before`. Quick where this has come of `before` by few changes.
    pub fn changes_since(&self, before: &Self) -> Changes {
        Changes {
            workloads: pairs(self.workloads.differing(&before.workloads)),
            services: pairs(self.services.differing(&before.services)),
            addresses: keys(self.workloads_by_address.differing(&before.workloads_by_address)),
            service_addresses: keys(self.services_by_address.differing(&before.services_by_address)),
            policies: !Arc::ptr_eq(&self.policies, &before.policies),
            ranges: self.cluster_ranges != before.cluster_ranges,
        }
    }

    /// Puts a workload in the place of the one of its uid. Which addresses are its own is for [`Mesh::set_address`] to say.
    pub(super) fn set_workload(&mut self, workload: &Arc<Workload>) {
        let before = self.workloads.insert(Arc::clone(&workload.uid), Arc::clone(workload));
        if let Some(before) = before {
            if before.node == workload.node {
                self.change_node(&before.node, |on| {
                    let place = on.iter_mut().find(|known| known.uid == workload.uid);
                    place.map(|known| *known = Arc::clone(workload));
                });
                return;
            }
            self.change_node(&before.node, |on| on.retain(|known| known.uid != workload.uid));
        }
        self.change_node(&workload.node, |on| on.push(Arc::clone(workload)));
    }

    /// Takes a workload away, and with it the addresses that it has.
    pub(super) fn remove_workload(&mut self, uid: &str) {
        let Some(before) = self.workloads.remove(uid) else {
            return;
        };
        self.change_node(&before.node, |on| on.retain(|known| known.uid != before.uid));
        for address in &before.addresses {
            if self
                .workloads_by_address
                .get(address)
                .is_some_and(|owner| owner.uid == before.uid)
            {
                self.workloads_by_address.remove(address);
            }
        }
    }

    /// Says which workload an address stands for.
    pub(super) fn set_address(&mut self, address: IpAddr, owner: Option<&Arc<Workload>>) {
        match owner {
            Some(owner)
                if self
                    .workloads_by_address
                    .get(&address)
                    .is_some_and(|known| Arc::ptr_eq(known, owner)) => {}
            Some(owner) => drop(self.workloads_by_address.insert(address, Arc::clone(owner))),
            None => drop(self.workloads_by_address.remove(&address)),
        }
    }

    /// Puts a service in the place of the one of its name. Of two with one address the later has it.
    pub(super) fn set_service(&mut self, service: &Arc<Service>) {
        let name: Arc<str> = format!("{}/{}", service.namespace, service.name).into();
        self.remove_service(&name);
        for address in &service.addresses {
            self.services_by_address.insert(*address, Arc::clone(service));
        }
        self.services.insert(name, Arc::clone(service));
    }

    /// Takes the service of that `namespace/name` away.
    pub(super) fn remove_service(&mut self, name: &str) {
        let Some(before) = self.services.remove(name) else {
            return;
        };
        for address in &before.addresses {
            if self
                .services_by_address
                .get(address)
                .is_some_and(|owner| Arc::ptr_eq(owner, &before))
            {
                self.services_by_address.remove(address);
            }
        }
    }

    /// Puts a node in the place of the one of its name.
    pub(super) fn set_node(&mut self, node: Node) {
        self.nodes.insert(Arc::clone(&node.name), Arc::new(node));
    }

    /// Takes a node away.
    pub(super) fn remove_node(&mut self, name: &str) {
        self.nodes.remove(name);
    }

    /// Says where the cluster's addresses lie.
    pub(super) fn set_cluster_ranges(&mut self, ranges: Vec<IpNet>) {
        self.cluster_ranges = ranges;
    }

    /// Makes the policies these.
    pub(super) fn set_policies(&mut self, policies: Vec<Policy>) -> Result<(), MeshError> {
        self.policies = Arc::new(index_policies(policies)?);
        Ok(())
    }

    fn change_node(&mut self, node: &Arc<str>, change: impl FnOnce(&mut Vec<Arc<Workload>>)) {
        if node.is_empty() {
            return;
        }
        let mut on = self.workloads_by_node.remove(node).unwrap_or_default();
        change(&mut on);
        if !on.is_empty() {
            self.workloads_by_node.insert(Arc::clone(node), on);
        }
    }
}

type Differing<'a, K, V> = Vec<(&'a K, Option<&'a V>, Option<&'a V>)>;

fn pairs<K, V: Clone>(differing: Differing<'_, K, V>) -> Vec<(Option<V>, Option<V>)> {
    let pairs = differing.into_iter();
    pairs.map(|(_, before, now)| (before.cloned(), now.cloned())).collect()
}

fn keys<K: Copy, V>(differing: Differing<'_, K, V>) -> Vec<K> {
    differing.into_iter().map(|(key, _, _)| *key).collect()
}
