//! The cluster as far as it is known, and the mesh that follows from it, kept up object by object.

mod policies;
mod ranges;
mod services;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::net::IpAddr;
use std::sync::Arc;

use super::api::Object;
use super::error::DecodeError;
use super::follow::Event;
use super::hook::{PolicyConversion, PolicyKind, named};
use super::kind::Kind;
use super::objects;
use super::pods::{Claim, Pod, Pods};
use super::services::Slice;
use super::settings::{KubernetesSettings, View};
use super::strings::Strings;
use crate::mesh::{self, Mesh, Unlisted};
use ipnet::IpNet;

/// An object that is kept: which one it is of those of its name, and in which list it was last.
struct Kept<T> {
    uid: String,
    list: u32,
    value: T,
}

/// What is known of the cluster.
pub(super) struct State {
    settings: KubernetesSettings,
    view: View,
    mesh: Mesh,
    strings: Strings,
    policies: Box<dyn PolicyConversion>,
    /// How many lists of each kind have begun.
    lists: HashMap<Kind, u32>,
    /// The kinds of which a first list is whole.
    whole: HashSet<Kind>,
    namespaces: HashMap<Arc<str>, Kept<Option<bool>>>,
    nodes: HashMap<Arc<str>, Kept<Vec<IpNet>>>,
    /// Where the addresses of services lie, by the name of the object that says so.
    service_ranges: HashMap<Arc<str>, Kept<Vec<IpNet>>>,
    /// An address of the cluster that is known not to lie where they should.
    stray: Option<IpAddr>,
    pods: Pods,
    services: HashMap<Arc<str>, Kept<objects::Service>>,
    /// By the service's `namespace/name`, then the slice's name.
    slices: HashMap<Arc<str>, BTreeMap<String, Kept<Slice>>>,
    /// Which service a slice is of, by its own `namespace/name`.
    slice_owner: HashMap<Arc<str>, Arc<str>>,
    policy_objects: HashMap<(PolicyKind, String, String), u32>,
    /// What has to be made anew before the mesh is whole again.
    stale: Stale,
}

#[derive(Default)]
struct Stale {
    services: HashSet<Arc<str>>,
    ranges: bool,
    policies: bool,
    /// The workloads of all pods.
    pods: bool,
    /// Whether anything has changed at all.
    any: bool,
}

impl State {
    pub(super) fn new(settings: KubernetesSettings, view: View, policies: Box<dyn PolicyConversion>) -> Self {
        let cluster_domain = settings.cluster_domain.as_str().into();
        let mesh = Mesh::empty(settings.trust_domain.clone(), cluster_domain, Unlisted::Awaited);
        Self {
            settings,
            view,
            mesh,
            strings: Strings::default(),
            policies,
            lists: HashMap::new(),
            whole: HashSet::new(),
            namespaces: HashMap::new(),
            nodes: HashMap::new(),
            service_ranges: HashMap::new(),
            stray: None,
            pods: Pods::default(),
            services: HashMap::new(),
            slices: HashMap::new(),
            slice_owner: HashMap::new(),
            policy_objects: HashMap::new(),
            stale: Stale::default(),
        }
    }

    /// Whether each kind that is followed has been heard of in whole.
    pub(super) fn is_whole(&self) -> bool {
        let kinds: &[Kind] = match self.view {
            View::Node(_) => &Kind::ALL,
            View::Authority => &Kind::PLACEMENT,
        };
        kinds.iter().all(|kind| self.whole.contains(kind))
    }

    /// Takes account of an event. An object that cannot be read is passed over, and the log says so; what was known of it
    /// stays.
    pub(super) fn apply(&mut self, event: Event) {
        match event {
            Event::ListBegins(kind) => *self.lists.entry(kind).or_default() += 1,
            Event::Set(kind, objects) => {
                for object in objects {
                    if let Err(error) = self.set(kind, object) {
                        tracing::error!("one of the {} cannot be read and is passed over: {error}", kind.name());
                    }
                }
            }
            Event::Gone(kind, object) => {
                if let Err(error) = self.gone(kind, object) {
                    tracing::error!("which of the {} is gone cannot be read: {error}", kind.name());
                }
            }
            Event::ListEnds(kind) => self.list_ends(kind),
        }
    }

    /// The mesh as it follows from all that is known, where that has changed since the last call.
    pub(super) fn take_changed(&mut self) -> Option<Mesh> {
        if !std::mem::take(&mut self.stale.any) {
            return None;
        }
        if std::mem::take(&mut self.stale.policies) {
            self.remake_policies();
        }
        if std::mem::take(&mut self.stale.pods) {
            self.remake_pods(|_| true);
        }
        for name in std::mem::take(&mut self.stale.services) {
            self.remake_service(&name);
        }
        if std::mem::take(&mut self.stale.ranges) {
            self.remake_ranges();
        }
        Some(self.mesh.clone())
    }

    fn list(&self, kind: Kind) -> u32 {
        self.lists.get(&kind).copied().unwrap_or_default()
    }

    fn set(&mut self, kind: Kind, object: Object) -> Result<(), DecodeError> {
        let list = self.list(kind);
        let bytes = match object {
            Object::Protobuf(bytes) => bytes,
            Object::Json(object) => return self.set_policy(kind, *object, list),
        };
        let node = match &self.view {
            View::Node(name) => Some(name.as_str()),
            View::Authority => None,
        };
        let view = objects::View {
            label: &self.settings.enrolment,
            node,
        };
        match kind {
            Kind::Namespaces => {
                let namespace = objects::namespace(bytes, view)?;
                self.set_namespace(namespace, list);
            }
            Kind::Nodes => self.set_node(objects::node(bytes)?, list),
            Kind::Pods => {
                let pod = objects::pod(bytes, view)?;
                self.set_pod(pod, list)?;
            }
            Kind::ServiceRanges => self.set_service_range(objects::service_range(bytes)?, list),
            Kind::Services => self.set_service(objects::service(bytes)?, list),
            Kind::EndpointSlices => self.set_slice(objects::slice(bytes)?, list),
            Kind::AuthorizationPolicies | Kind::PeerAuthentications => {}
        }
        Ok(())
    }

    fn gone(&mut self, kind: Kind, object: Object) -> Result<(), DecodeError> {
        let bytes = match object {
            Object::Protobuf(bytes) => bytes,
            Object::Json(object) => {
                if let Some(kind) = kind.policy() {
                    let (namespace, name) = named(&object)?;
                    self.remove_policy(kind, namespace, name);
                }
                return Ok(());
            }
        };
        let objects::Named { namespace, name, uid } = objects::named(bytes)?;
        match kind {
            Kind::Pods => self.remove_pod(&uid),
            Kind::Namespaces if is_same(&self.namespaces, &name, &uid) => self.remove_namespace(&name),
            Kind::Nodes if is_same(&self.nodes, &name, &uid) => self.remove_node(&name),
            Kind::ServiceRanges if is_same(&self.service_ranges, &name, &uid) => self.remove_service_range(&name),
            Kind::Services => {
                let key = format!("{namespace}/{name}");
                if is_same(&self.services, &key, &uid) {
                    self.remove_service(&key);
                }
            }
            Kind::EndpointSlices => self.remove_slice(&namespace, &name, Some(&uid)),
            _ => {}
        }
        Ok(())
    }

    /// Removes what the list that ends now has not had.
    fn list_ends(&mut self, kind: Kind) {
        let list = self.list(kind);
        match kind {
            Kind::Namespaces => missing(&self.namespaces, list)
                .iter()
                .for_each(|name| self.remove_namespace(name)),
            Kind::Nodes => missing(&self.nodes, list)
                .iter()
                .for_each(|name| self.remove_node(name)),
            Kind::Pods => self.pods.missing(list).iter().for_each(|uid| self.remove_pod(uid)),
            Kind::ServiceRanges => {
                let gone = missing(&self.service_ranges, list);
                gone.iter().for_each(|name| self.remove_service_range(name));
            }
            Kind::Services => missing(&self.services, list)
                .iter()
                .for_each(|name| self.remove_service(name)),
            Kind::EndpointSlices => {
                let mut gone = Vec::new();
                for slice in self.slices.values().flat_map(|slices| slices.values()) {
                    if slice.list != list {
                        gone.push((Arc::clone(&slice.value.namespace), slice.value.name.clone()));
                    }
                }
                gone.iter()
                    .for_each(|(namespace, name)| self.remove_slice(namespace, name, None));
            }
            Kind::AuthorizationPolicies | Kind::PeerAuthentications => {
                let Some(kind) = kind.policy() else { return };
                let of_kind = self.policy_objects.iter().filter(|((known, _, _), _)| *known == kind);
                let gone: Vec<_> = of_kind
                    .filter(|(_, seen)| **seen != list)
                    .map(|(key, _)| key.clone())
                    .collect();
                for (kind, namespace, name) in gone {
                    self.remove_policy(kind, &namespace, &name);
                }
            }
        }
        if self.whole.insert(kind) {
            self.stale.any = true;
        }
        self.strings.forget_unused();
    }

    fn set_namespace(&mut self, namespace: objects::Namespace, list: u32) {
        let name = self.strings.share(&namespace.name);
        let before = self.namespaces.insert(
            Arc::clone(&name),
            Kept {
                uid: namespace.uid,
                list,
                value: namespace.mode,
            },
        );
        if before.is_none_or(|before| before.value != namespace.mode) {
            self.remake_pods(|pod| pod.workload.namespace == name);
        }
    }

    /// Its pods are not in the mesh without it.
    fn remove_namespace(&mut self, name: &str) {
        self.namespaces.remove(name);
        self.remake_pods(|pod| &*pod.workload.namespace == name);
    }

    fn set_node(&mut self, node: objects::Node, list: u32) {
        let name = self.strings.share(&node.name);
        let now = mesh::Node {
            name: Arc::clone(&name),
            zone: self.strings.share(&node.zone),
            addresses: node.addresses,
            ranges: node.pod_ranges.clone(),
        };
        let kept = Kept {
            uid: node.uid,
            list,
            value: node.pod_ranges,
        };
        let ranges = self.nodes.get(&name).map(|known| &known.value) != Some(&kept.value);
        self.stale.ranges |= ranges;
        self.stale.any |= ranges;
        self.nodes.insert(Arc::clone(&name), kept);
        let before = self.mesh.node(&name).cloned();
        if before.as_deref() == Some(&now) {
            return;
        }
        self.stale.any = true;
        self.mesh.set_node(now);
        if before.is_none_or(|before| self.mesh.node(&name).is_none_or(|now| now.zone != before.zone)) {
            self.remake_pods(|pod| pod.workload.node == name);
        }
    }

    fn remove_node(&mut self, name: &str) {
        self.nodes.remove(name);
        self.mesh.remove_node(name);
        self.stale.ranges = true;
        self.stale.any = true;
        self.remake_pods(|pod| &*pod.workload.node == name);
    }

    fn set_service_range(&mut self, range: objects::ServiceRange, list: u32) {
        let name = self.strings.share(&range.name);
        let kept = Kept {
            uid: range.uid,
            list,
            value: range.ranges,
        };
        let before = self.service_ranges.insert(Arc::clone(&name), kept);
        let differs = before.is_none_or(|before| {
            self.service_ranges
                .get(&name)
                .is_none_or(|now| now.value != before.value)
        });
        self.stale.ranges |= differs;
        self.stale.any |= differs;
    }

    fn remove_service_range(&mut self, name: &str) {
        self.service_ranges.remove(name);
        self.stale.ranges = true;
        self.stale.any = true;
    }

    fn set_pod(&mut self, pod: objects::Pod, list: u32) -> Result<(), DecodeError> {
        // Where the agent is not, a pod that has ended is nobody's peer any more.
        if pod.finished && pod.details.is_none() {
            self.remove_pod(&pod.uid);
            return Ok(());
        }
        let pod = Pod::new(pod, list, &self.settings.trust_domain, &mut self.strings)?;
        let uid = Arc::clone(&pod.workload.uid);
        pod.workload
            .addresses
            .iter()
            .for_each(|address| self.note_address(address));
        // Of an address that changes hands both must be known.
        let mut touched: Vec<IpAddr> = pod.workload.addresses.clone();
        let known = self.pods.insert(pod);
        if let Some(known) = &known {
            self.forget_addresses(&known.addresses, &touched);
            touched.extend(
                known
                    .addresses
                    .iter()
                    .filter(|address| !touched.contains(address))
                    .collect::<Vec<_>>(),
            );
        }
        match self.is_whole() {
            true => self.remake_pod(&uid, &touched),
            false => self.stale.pods = true,
        }
        Ok(())
    }

    fn remove_pod(&mut self, uid: &str) {
        let Some(pod) = self.pods.remove(uid) else { return };
        self.stale.any |= self.mesh.workload_by_uid(uid).is_some();
        self.mesh.remove_workload(uid);
        self.forget_addresses(&pod.workload.addresses, &[]);
        self.settle(&pod.workload.addresses);
    }

    /// Makes the workloads of these pods anew.
    fn remake_pods(&mut self, which: impl Fn(&Pod) -> bool) {
        if !self.is_whole() {
            // What they depend on comes in any order: all are made once it is there.
            self.stale.pods = true;
            return;
        }
        let which = self.pods.iter().filter(|pod| which(pod));
        let uids: Vec<Arc<str>> = which.map(|pod| Arc::clone(&pod.workload.uid)).collect();
        for uid in uids {
            let addresses = self
                .pods
                .get(&uid)
                .map(|pod| pod.workload.addresses.clone())
                .unwrap_or_default();
            self.remake_pod(&uid, &addresses);
        }
    }

    /// Makes a pod's workload anew, and says whose these addresses are.
    fn remake_pod(&mut self, uid: &str, touched: &[IpAddr]) {
        let Some(pod) = self.pods.get(uid) else { return };
        let mode = self.namespaces.get(&pod.workload.namespace).map(|known| known.value);
        let zone = self.mesh.node(&pod.workload.node).map(|node| Arc::clone(&node.zone));
        let policies = match &pod.workload.pod {
            Some(_) => self.policies.selecting(&pod.workload.namespace, &pod.workload.labels),
            None => Vec::new(),
        };
        let own = match &self.view {
            View::Node(name) => **name == *pod.workload.node,
            View::Authority => true,
        };
        let Some(pod) = self.pods.get_mut(uid) else { return };
        pod.derive(mode, own, zone, policies);
        let was = self.mesh.workload_by_uid(uid);
        match mode {
            // Its namespace will tell whether it is to be in the mesh: until then nobody knows.
            None => {
                self.stale.any |= was.is_some();
                self.mesh.remove_workload(uid);
            }
            Some(_) => match was {
                // Kept once.
                Some(was) if *was == pod.workload => pod.workload = Arc::clone(was),
                _ => {
                    self.stale.any = true;
                    self.mesh.set_workload(&pod.workload);
                }
            },
        }
        self.settle(touched);
    }

    /// Says whose these addresses are.
    fn settle(&mut self, addresses: &[IpAddr]) {
        for address in addresses {
            let claims = self
                .pods
                .claims(*address)
                .filter(|pod| self.mesh.workload_by_uid(&pod.workload.uid).is_some());
            let owner = claims
                .max_by_key(|pod| Claim::of(pod))
                .map(|pod| Arc::clone(&pod.workload));
            if self.mesh.workload_by_addr(*address) != owner.as_ref() {
                self.stale.any = true;
            }
            self.mesh.set_address(*address, owner.as_ref());
        }
    }
}

fn is_same<T>(kept: &HashMap<Arc<str>, Kept<T>>, key: &str, uid: &str) -> bool {
    kept.get(key).is_some_and(|known| known.uid == uid)
}

fn missing<T>(kept: &HashMap<Arc<str>, Kept<T>>, list: u32) -> Vec<Arc<str>> {
    let missing = kept.iter().filter(|(_, known)| known.list != list);
    missing.map(|(key, _)| Arc::clone(key)).collect()
}

#[cfg(test)]
mod tests;
