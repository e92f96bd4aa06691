//! The cluster as far as it is known, and the mesh that follows from it, kept up object by object.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;
use serde_json::Value;

use super::api::Object;
use super::error::DecodeError;
use super::follow::Event;
use super::hook::{PolicyConversion, PolicyKind};
use super::kind::Kind;
use super::objects;
use super::pods::{self, Claim, Pod, Pods};
use super::services::{self, Slice};
use super::settings::{KubernetesSettings, View};
use super::strings::Strings;
use crate::mesh::{self, Mesh, Unlisted};

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
    /// Whether anything has changed at all.
    any: bool,
}

impl State {
    pub(super) fn new(settings: KubernetesSettings, view: View, policies: Box<dyn PolicyConversion>) -> Self {
        let mesh = Mesh::empty(settings.trust_domain.clone(), settings.cluster_domain.as_str().into())
            .with_unlisted(Unlisted::Awaited);
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
        for name in std::mem::take(&mut self.stale.services) {
            self.remake_service(&name);
        }
        if std::mem::take(&mut self.stale.ranges) {
            self.mesh.set_cluster_ranges(self.cluster_ranges());
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
                if let Some(kind) = policy_kind(kind) {
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
                let Some(kind) = policy_kind(kind) else { return };
                let of_kind = self.policy_objects.iter().filter(|((known, _, _), _)| *known == kind);
                let gone: Vec<_> = of_kind
                    .filter(|(_, seen)| **seen != list)
                    .map(|(key, _)| key.clone())
                    .collect();
                for (kind, namespace, name) in gone {
                    self.remove_policy(kind, &namespace, &name);
                }
                self.policies.synced(kind);
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

    fn set_pod(&mut self, pod: objects::Pod, list: u32) -> Result<(), DecodeError> {
        // Where the agent is not, a pod that has ended is nobody's peer any more.
        if pod.finished && pod.details.is_none() {
            self.remove_pod(&pod.uid);
            return Ok(());
        }
        let pod = Pod::new(pod, list, &self.settings.trust_domain, &mut self.strings)?;
        let uid = Arc::clone(&pod.workload.uid);
        // Of an address that changes hands both must be known.
        let mut touched: Vec<IpAddr> = pod.workload.addresses.clone();
        let known = self.pods.insert(pod);
        if let Some(known) = &known {
            touched.extend(
                known
                    .addresses
                    .iter()
                    .filter(|address| !touched.contains(address))
                    .collect::<Vec<_>>(),
            );
        }
        self.remake_pod(&uid, &touched);
        Ok(())
    }

    fn remove_pod(&mut self, uid: &str) {
        let Some(pod) = self.pods.remove(uid) else { return };
        self.stale.any |= self.mesh.workload_by_uid(uid).is_some();
        self.mesh.remove_workload(uid);
        self.settle(&pod.workload.addresses);
    }

    /// Makes the workloads of these pods anew.
    fn remake_pods(&mut self, which: impl Fn(&Pod) -> bool) {
        // While the first lists come in, all is made at their end.
        let uids: Vec<Arc<str>> = self
            .pods
            .iter()
            .filter(|pod| which(pod))
            .map(|pod| Arc::clone(&pod.workload.uid))
            .collect();
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
        let workload = Arc::clone(&pod.workload);
        let was = self.mesh.workload_by_uid(uid);
        match mode {
            // Its namespace will tell whether it is to be in the mesh: until then nobody knows.
            None => {
                self.stale.any |= was.is_some();
                self.mesh.remove_workload(uid);
            }
            Some(_) if was == Some(&workload) => {}
            Some(_) => {
                self.stale.any = true;
                self.mesh.set_workload(&workload);
            }
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

    fn set_service(&mut self, service: objects::Service, list: u32) {
        let key = self.strings.share(&format!("{}/{}", service.namespace, service.name));
        self.mark_service(&key);
        let kept = Kept {
            uid: service.uid.clone(),
            list,
            value: service,
        };
        self.services.insert(key, kept);
    }

    fn remove_service(&mut self, key: &str) {
        self.services.remove(key);
        let key = self.strings.share(key);
        self.mark_service(&key);
    }

    fn set_slice(&mut self, slice: objects::Slice, list: u32) {
        let own = self.strings.share(&format!("{}/{}", slice.namespace, slice.name));
        if slice.service.is_empty() {
            return self.remove_slice(&slice.namespace, &slice.name, None);
        }
        let owner = self.strings.share(&format!("{}/{}", slice.namespace, slice.service));
        if self.slice_owner.get(&own).is_some_and(|known| *known != owner) {
            self.remove_slice(&slice.namespace, &slice.name, None);
        }
        let (name, uid) = (slice.name.clone(), slice.uid.clone());
        let value = Slice::new(slice, &mut self.strings);
        let slices = self.slices.entry(Arc::clone(&owner)).or_default();
        let before = slices.get(&name).map(|known| &known.value);
        let differs = before != Some(&value);
        slices.insert(name, Kept { uid, list, value });
        self.slice_owner.insert(own, Arc::clone(&owner));
        if differs {
            self.mark_service(&owner);
        }
    }

    /// Removes a slice, where it is the one of that uid.
    fn remove_slice(&mut self, namespace: &str, name: &str, uid: Option<&str>) {
        let own = format!("{namespace}/{name}");
        let Some(owner) = self.slice_owner.get(own.as_str()).cloned() else {
            return;
        };
        let Some(slices) = self.slices.get_mut(&owner) else {
            return;
        };
        if slices
            .get(name)
            .is_some_and(|known| uid.is_some_and(|uid| known.uid != uid))
        {
            return;
        }
        slices.remove(name);
        if slices.is_empty() {
            self.slices.remove(&owner);
        }
        self.slice_owner.remove(own.as_str());
        self.mark_service(&owner);
    }

    fn mark_service(&mut self, key: &Arc<str>) {
        self.stale.services.insert(Arc::clone(key));
        self.stale.any = true;
    }

    fn remake_service(&mut self, key: &Arc<str>) {
        let service = self.services.get(key).filter(|known| !known.value.addresses.is_empty());
        let Some(Kept { value: service, .. }) = service else {
            return self.mesh.remove_service(key);
        };
        let slices = self.slices.get(key).into_iter().flat_map(|slices| slices.values());
        let slices = slices.map(|kept| &kept.value);
        let service = services::resolve(service, slices, &self.settings.cluster_domain, &mut self.strings);
        if self.mesh.service_by_name(key).is_none_or(|known| **known != service) {
            self.mesh.set_service(&Arc::new(service));
        }
    }

    fn set_policy(&mut self, kind: Kind, object: Value, list: u32) -> Result<(), DecodeError> {
        let Some(kind) = policy_kind(kind) else { return Ok(()) };
        let (namespace, name) = named(&object)?;
        self.policy_objects
            .insert((kind, namespace.to_owned(), name.to_owned()), list);
        let changed = self.policies.set(kind, object);
        self.stale.policies |= changed;
        self.stale.any |= changed;
        Ok(())
    }

    fn remove_policy(&mut self, kind: PolicyKind, namespace: &str, name: &str) {
        self.policy_objects
            .remove(&(kind, namespace.to_owned(), name.to_owned()));
        let changed = self.policies.remove(kind, namespace, name);
        self.stale.policies |= changed;
        self.stale.any |= changed;
    }

    fn remake_policies(&mut self) {
        if let Err(error) = self.mesh.set_policies(self.policies.policies()) {
            tracing::error!("{error}; the policies stay as they were");
        }
        self.remake_pods(|pod| pod.workload.pod.is_some());
    }

    /// Where the cluster's addresses lie: as the settings say, and as the nodes do.
    fn cluster_ranges(&self) -> Vec<IpNet> {
        let mut ranges = self.settings.cluster_ranges.clone();
        ranges.extend(self.nodes.values().flat_map(|node| &node.value));
        ranges.sort_unstable();
        ranges.dedup();
        pods::merged(ranges)
    }
}

fn is_same<T>(kept: &HashMap<Arc<str>, Kept<T>>, key: &str, uid: &str) -> bool {
    kept.get(key).is_some_and(|known| known.uid == uid)
}

fn missing<T>(kept: &HashMap<Arc<str>, Kept<T>>, list: u32) -> Vec<Arc<str>> {
    let missing = kept.iter().filter(|(_, known)| known.list != list);
    missing.map(|(key, _)| Arc::clone(key)).collect()
}

fn policy_kind(kind: Kind) -> Option<PolicyKind> {
    match kind {
        Kind::AuthorizationPolicies => Some(PolicyKind::AuthorizationPolicy),
        Kind::PeerAuthentications => Some(PolicyKind::PeerAuthentication),
        _ => None,
    }
}

fn named(object: &Value) -> Result<(&str, &str), DecodeError> {
    let text = |field: &'static str| object["metadata"][field].as_str().ok_or(DecodeError::Lacks(field));
    Ok((text("namespace")?, text("name")?))
}
