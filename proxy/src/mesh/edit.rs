//! One state of the mesh made of another, and what tells one from the other.

use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;

use super::snapshot::index_policies;
use super::{Mesh, MeshError, Node, Policy, Service, Workload};

/// Something as it was before and as it is; none where it was not, or is no more.
pub type Change<T> = (Option<Arc<T>>, Option<Arc<T>>);

/// What two states of the mesh differ in.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Changes {
    /// The workloads.
    pub workloads: Vec<Change<Workload>>,
    /// The services.
    pub services: Vec<Change<Service>>,
    /// The addresses that have come to stand for another workload, or for another state of it.
    pub addresses: Vec<IpAddr>,
    /// The same of services' addresses.
    pub service_addresses: Vec<IpAddr>,
    /// Whether policies differ.
    pub policies: bool,
    /// Whether it is known otherwise where the cluster's addresses lie.
    pub ranges: bool,
}

impl Changes {
    /// The uids of the workloads that differ.
    pub fn uids(&self) -> impl Iterator<Item = &Arc<str>> {
        let states = self
            .workloads
            .iter()
            .filter_map(|(before, now)| now.as_ref().or(before.as_ref()));
        states.map(|workload| &workload.uid)
    }

    /// Whether a workload is there no more.
    pub fn has_lost_workloads(&self) -> bool {
        self.workloads.iter().any(|(_, now)| now.is_none())
    }

    /// Whether a workload is, or was, on that node.
    pub fn touch_node(&self, node: &str) -> bool {
        let states = self.workloads.iter().flat_map(|(before, now)| before.iter().chain(now));
        states.into_iter().any(|workload| &*workload.node == node)
    }
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
                    if let Some(known) = on.iter_mut().find(|known| known.uid == workload.uid) {
                        *known = Arc::clone(workload);
                    }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mesh::snapshot::tests::{parts, service, workload};

    #[test]
    fn what_differs_between_two_states_is_told_and_nothing_else() {
        let mut first = parts();
        for n in 0..100 {
            first
                .workloads
                .push(workload("shop", &format!("w{n}"), &format!("10.0.0.{n}")));
        }
        first.services.push(service("shop", "s", "10.96.0.1", &["shop/w1"]));
        let before = Mesh::build(first).unwrap();
        let mut now = before.clone();
        assert_eq!(now.changes_since(&before), Changes::default());

        let mut moved = workload("shop", "w7", "10.0.0.7");
        moved.node = "n2".into();
        let moved = Arc::new(moved);
        now.set_workload(&moved);
        now.set_address("10.0.0.7".parse().unwrap(), Some(&moved));
        now.remove_workload("shop/w8");
        now.remove_service("shop/s");
        let changes = now.changes_since(&before);
        let mut uids: Vec<&str> = changes.uids().map(|uid| &**uid).collect();
        uids.sort_unstable();
        assert_eq!(uids, ["shop/w7", "shop/w8"]);
        assert!(changes.has_lost_workloads() && changes.touch_node("n1") && changes.touch_node("n2"));
        assert!(!changes.touch_node("n3") && !changes.policies && !changes.ranges);
        assert_eq!(
            (
                changes.addresses.len(),
                changes.services.len(),
                changes.service_addresses.len()
            ),
            (2, 1, 1)
        );
        assert_eq!(
            (now.local_workloads("n1").count(), now.local_workloads("n2").count()),
            (98, 1)
        );
        assert!(now.workload_by_addr("10.0.0.8".parse().unwrap()).is_none());
        assert!(before.workload_by_addr("10.0.0.8".parse().unwrap()).is_some());
    }
}
