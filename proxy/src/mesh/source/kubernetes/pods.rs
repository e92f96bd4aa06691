//! The pods as they are known, which of them are in the mesh, and whose an address is.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;

use super::error::DecodeError;
use super::objects;
use super::strings::Strings;
use crate::identity::TrustDomain;
use crate::mesh::{PodDetails, Protocol, SameNode, Workload};

/// A pod as it is known.
pub(super) struct Pod {
    /// What it is in the mesh, if its namespace is known.
    pub(super) workload: Arc<Workload>,
    facts: Facts,
    /// In which list it was last.
    list: u32,
}

/// What of a pod is not to be seen from its workload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Facts {
    /// Whether its own label wants it in the mesh; none where it says nothing.
    pub(super) mode: Option<bool>,
    pub(super) captured: bool,
    pub(super) host_network: bool,
    pub(super) finished: bool,
    pub(super) deleting: bool,
    pub(super) created: i64,
}

impl Facts {
    /// Whether labels want it in the mesh: its own goes before its namespace's.
    fn is_labelled(&self, namespace: Option<bool>) -> bool {
        self.mode.or(namespace).unwrap_or_default()
    }

    /// How it is reached. `own` where it is to be captured here, or may be anywhere; a pod of another node is in the mesh
    /// only once it is captured there: before, nobody would answer a tunnel.
    pub(super) fn protocol(&self, namespace: Option<bool>, own: bool) -> Protocol {
        let can_be = self.is_labelled(namespace) && !self.host_network && !self.finished;
        match can_be && (own || self.captured) {
            true => Protocol::Hbone,
            false => Protocol::Plain,
        }
    }
}

impl Pod {
    pub(super) fn new(
        pod: objects::Pod,
        list: u32,
        trust_domain: &TrustDomain,
        strings: &mut Strings,
    ) -> Result<Self, DecodeError> {
        let namespace = strings.share(&pod.namespace);
        let identity = strings.identity(trust_domain, &namespace, &pod.service_account);
        let facts = Facts {
            mode: pod.mode,
            captured: pod.captured,
            host_network: pod.host_network,
            finished: pod.finished,
            deleting: pod.deleting,
            created: pod.created,
        };
        let workload = Workload {
            uid: pod.uid.into(),
            name: pod.name.into(),
            identity: identity.map_err(|error| DecodeError::Identity(error.to_string()))?,
            namespace,
            node: strings.share(&pod.node),
            addresses: pod.addresses,
            ports: std::collections::BTreeMap::new(),
            protocol: Protocol::Plain,
            same_node: SameNode::Direct,
            labels: pod.labels,
            zone: strings.share(""),
            policies: Vec::new(),
            // Slices say whether a pod elsewhere is an endpoint: its own turns change nothing here.
            ready: pod.ready || pod.details.is_none(),
            exclusions: (!pod.exclusions.is_empty()).then(|| Arc::new(pod.exclusions)),
            netns: None,
            pod: pod.details.map(Arc::new),
        };
        Ok(Self {
            workload: Arc::new(workload),
            facts,
            list,
        })
    }

    /// Makes the workload what follows from the pod and from what it depends on.
    pub(super) fn derive(
        &mut self,
        namespace: Option<Option<bool>>,
        own: bool,
        zone: Option<Arc<str>>,
        policies: Vec<Arc<str>>,
    ) {
        let namespace = namespace.flatten();
        let protocol = self.facts.protocol(namespace, own);
        let zone = zone.unwrap_or_else(|| "".into());
        let labelled = self.facts.is_labelled(namespace);
        let known = &self.workload;
        let same_details = known.pod.as_ref().is_none_or(|pod| pod.labelled == labelled);
        if known.protocol == protocol && known.zone == zone && known.policies == policies && same_details {
            return;
        }
        let workload = Arc::make_mut(&mut self.workload);
        workload.protocol = protocol;
        workload.zone = zone;
        workload.policies = policies;
        if let Some(details) = &mut workload.pod {
            let details: &mut PodDetails = Arc::make_mut(details);
            details.labelled = labelled;
        }
    }
}

/// By what one pod's claim to an address goes before another's: the greater is the live one's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Claim<'a> {
    stays: bool,
    created: i64,
    /// So that it is defined, and the same everywhere.
    uid: &'a str,
}

impl<'a> Claim<'a> {
    pub(super) fn of(pod: &'a Pod) -> Self {
        Self {
            stays: !pod.facts.deleting,
            created: pod.facts.created,
            uid: &pod.workload.uid,
        }
    }
}

/// All pods, by uid and by address.
#[derive(Default)]
pub(super) struct Pods {
    by_uid: HashMap<Arc<str>, Pod>,
    /// Those that claim an address.
    by_address: HashMap<IpAddr, Claimants>,
}

/// Nearly always one.
enum Claimants {
    One(Arc<str>),
    Many(Vec<Arc<str>>),
}

/// What a pod was.
pub(super) struct Known {
    pub(super) addresses: Vec<IpAddr>,
}

impl Pods {
    pub(super) fn get(&self, uid: &str) -> Option<&Pod> {
        self.by_uid.get(uid)
    }

    pub(super) fn get_mut(&mut self, uid: &str) -> Option<&mut Pod> {
        self.by_uid.get_mut(uid)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Pod> {
        self.by_uid.values()
    }

    /// Puts a pod in the place of the one of its uid; gives what that was.
    pub(super) fn insert(&mut self, pod: Pod) -> Option<Known> {
        let uid = Arc::clone(&pod.workload.uid);
        let before = self.by_uid.get(&uid).map(|known| known.workload.addresses.clone());
        if before.as_ref() != Some(&pod.workload.addresses) {
            for address in before.iter().flatten() {
                self.unclaim(*address, &uid);
            }
            for address in &pod.workload.addresses {
                self.claim(*address, &uid);
            }
        }
        self.by_uid.insert(uid, pod);
        before.map(|addresses| Known { addresses })
    }

    pub(super) fn remove(&mut self, uid: &str) -> Option<Pod> {
        let pod = self.by_uid.remove(uid)?;
        for address in &pod.workload.addresses {
            self.unclaim(*address, uid);
        }
        Some(pod)
    }

    /// Those that claim the address.
    pub(super) fn claims(&self, address: IpAddr) -> impl Iterator<Item = &Pod> {
        let claimants = match self.by_address.get(&address) {
            None => &[][..],
            Some(Claimants::One(uid)) => std::slice::from_ref(uid),
            Some(Claimants::Many(uids)) => uids,
        };
        claimants.iter().filter_map(|uid| self.by_uid.get(uid))
    }

    /// The uids of those that were not in this list.
    pub(super) fn missing(&self, list: u32) -> Vec<Arc<str>> {
        let missing = self.by_uid.values().filter(|pod| pod.list != list);
        missing.map(|pod| Arc::clone(&pod.workload.uid)).collect()
    }

    fn claim(&mut self, address: IpAddr, uid: &Arc<str>) {
        match self.by_address.get_mut(&address) {
            None => drop(self.by_address.insert(address, Claimants::One(Arc::clone(uid)))),
            Some(Claimants::One(other)) if other == uid => {}
            Some(claimants @ Claimants::One(_)) => {
                let mut all = vec![Arc::clone(uid)];
                if let Claimants::One(other) = claimants {
                    all.push(Arc::clone(other));
                }
                *claimants = Claimants::Many(all);
            }
            Some(Claimants::Many(all)) if all.contains(uid) => {}
            Some(Claimants::Many(all)) => all.push(Arc::clone(uid)),
        }
    }

    fn unclaim(&mut self, address: IpAddr, uid: &str) {
        match self.by_address.get_mut(&address) {
            Some(Claimants::One(one)) if **one == *uid => drop(self.by_address.remove(&address)),
            Some(claimants @ Claimants::Many(_)) => {
                if let Claimants::Many(all) = claimants {
                    all.retain(|one| **one != *uid);
                    if let [last] = all.as_slice() {
                        *claimants = Claimants::One(Arc::clone(last));
                    }
                }
            }
            _ => {}
        }
    }
}
