//! Istio's `AuthorizationPolicy` and `PeerAuthentication` as the mesh's policies: their part that is about connections.
//!
//! Conversion is pure and keeps no object whole. Policies with a selector become policies of workload scope, which a
//! workload lists by [`Conversion::selecting`]; the others apply to their namespace, or, from the root namespace, to all.

mod authorization;
mod object;
mod peer;
mod report;
#[cfg(test)]
mod tests;
mod writer;

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use serde::Deserialize;
use serde_json::Value;
use tracing::{error, info, warn};

pub use object::Metadata;
pub use report::{CONDITION, Finding, Report, State};
pub use writer::report_policies;

use super::hook::{PolicyConversion, PolicyKind};
use crate::mesh::Policy;
use authorization::Converted;
use object::{Object, Selection};
use peer::{Peer, Peers, Scoped};

/// The objects of a cluster, as far as understood, and what follows from them.
#[derive(Debug)]
pub struct Conversion {
    root_namespace: Arc<str>,
    authorization: HashMap<Arc<str>, BTreeMap<Arc<str>, Authorization>>,
    peers: HashMap<Arc<str>, Peers>,
    reports: Reports,
}

#[derive(Debug)]
struct Authorization {
    converted: Converted,
    /// The policy's key, where its selector decides for whom it is.
    selecting: Option<Arc<str>>,
}

impl Conversion {
    /// No objects yet. Policies of the root namespace are for all namespaces.
    pub fn new(root_namespace: &str) -> Self {
        Self {
            root_namespace: root_namespace.into(),
            authorization: HashMap::new(),
            peers: HashMap::new(),
            reports: Reports::default(),
        }
    }

    /// The same, which also keeps what is new to say about objects, for [`Self::take_reports`].
    pub fn reporting(root_namespace: &str) -> Self {
        let mut conversion = Self::new(root_namespace);
        conversion.reports.kept = Some(HashMap::new());
        conversion
    }

    /// What there is to say about objects that has not been taken yet; of each object the latest.
    pub fn take_reports(&mut self) -> Vec<Report> {
        let kept = self.reports.kept.as_mut().map(std::mem::take);
        kept.unwrap_or_default().into_values().collect()
    }

    /// The keys of the policies of workload scope for a pod of a namespace, whose labels `label` gives by name: each once,
    /// in an order that stays.
    pub fn selecting<'l>(&self, namespace: &str, label: impl Fn(&str) -> Option<&'l str>) -> Vec<Arc<str>> {
        let everywhere = Some(&*self.root_namespace).filter(|root| *root != namespace);
        let mut keys = Vec::new();
        for namespace in everywhere.into_iter().chain([namespace]) {
            for authorization in self.authorization.get(namespace).into_iter().flat_map(BTreeMap::values) {
                if let (Selection::Some(selector), Some(key)) =
                    (&authorization.converted.selection, &authorization.selecting)
                    && selector.selects(&label)
                {
                    keys.push(Arc::clone(key));
                }
            }
        }
        keys.extend(self.scoped(namespace).key_for(label));
        keys
    }

    /// The namespaces and names of the objects that are known.
    fn names(&self, kind: PolicyKind) -> Vec<(Arc<str>, Arc<str>)> {
        let of_kind = self.reports.said.keys().filter(|(other, ..)| *other == kind);
        of_kind
            .map(|(_, namespace, name)| (Arc::clone(namespace), Arc::clone(name)))
            .collect()
    }

    fn scoped(&self, namespace: &str) -> Scoped<'_> {
        Scoped {
            root: self.peers.get(&self.root_namespace),
            own: self.peers.get(namespace),
        }
    }

    fn set_authorization(&mut self, object: &Object) -> bool {
        let Object { metadata, .. } = object;
        let converted = authorization::convert(object, &self.root_namespace);
        self.reports.note(Report {
            kind: PolicyKind::AuthorizationPolicy,
            metadata: metadata.clone(),
            findings: converted.findings.clone(),
            effect: converted.effect,
        });
        let selecting = match (&converted.selection, &converted.policy) {
            (Selection::Some(_), Some(policy)) => Some(Arc::clone(policy.key())),
            _ => None,
        };
        let of_namespace = self.authorization.entry(Arc::clone(&metadata.namespace)).or_default();
        let before = of_namespace.get(&metadata.name);
        let outcome = |converted: &Converted| (converted.policy.clone(), converted.selection.clone());
        let same = match before {
            Some(before) => outcome(&before.converted) == outcome(&converted),
            None => converted.policy.is_none(),
        };
        of_namespace.insert(Arc::clone(&metadata.name), Authorization { converted, selecting });
        !same
    }

    fn set_peer(&mut self, object: &Object) -> bool {
        let peer = Peer::read(object);
        let namespace = Arc::clone(&peer.metadata.namespace);
        let peers = self.peers.entry(Arc::clone(&namespace)).or_default();
        let same = peers
            .get(&peer.metadata.name)
            .is_some_and(|before| before.decides_alike(&peer));
        peers.set(peer);
        self.note_peers(&namespace);
        !same
    }

    /// What is said about one may follow from another of its namespace.
    fn note_peers(&mut self, namespace: &str) {
        for report in self.peers.get(namespace).into_iter().flat_map(Peers::reports) {
            self.reports.note(report);
        }
    }
}

impl PolicyConversion for Conversion {
    fn set(&mut self, kind: PolicyKind, object: Value) -> bool {
        match Object::deserialize(&object) {
            Ok(object) => match kind {
                PolicyKind::AuthorizationPolicy => self.set_authorization(&object),
                PolicyKind::PeerAuthentication => self.set_peer(&object),
            },
            // The API server gives every object a name and a namespace.
            Err(reason) => {
                error!(kind = kind.as_str(), %reason, "an object without proper metadata is passed over");
                false
            }
        }
    }

    fn remove(&mut self, kind: PolicyKind, namespace: &str, name: &str) -> bool {
        self.reports.forget(kind, namespace, name);
        match kind {
            PolicyKind::AuthorizationPolicy => {
                let Some(of_namespace) = self.authorization.get_mut(namespace) else {
                    return false;
                };
                let removed = of_namespace.remove(name);
                if of_namespace.is_empty() {
                    self.authorization.remove(namespace);
                }
                removed.is_some_and(|authorization| authorization.converted.policy.is_some())
            }
            PolicyKind::PeerAuthentication => {
                let removed = self.peers.get_mut(namespace).is_some_and(|peers| peers.remove(name));
                self.peers.retain(|_, peers| !peers.is_empty());
                self.note_peers(namespace);
                removed
            }
        }
    }

    fn policies(&self) -> Vec<Policy> {
        let authorization = self.authorization.values().flat_map(BTreeMap::values);
        let peers = self
            .peers
            .keys()
            .flat_map(|namespace| self.scoped(namespace).policies());
        authorization
            .filter_map(|authorization| authorization.converted.policy.clone())
            .chain(peers)
            .collect()
    }

    fn selecting(&self, namespace: &str, labels: &BTreeMap<String, String>) -> Vec<Arc<str>> {
        self.selecting(namespace, |label| labels.get(label).map(String::as_str))
    }
}

type Named = (PolicyKind, Arc<str>, Arc<str>);

/// The last that was said of each object.
#[derive(Debug, Default)]
struct Reports {
    said: HashMap<Named, Report>,
    kept: Option<HashMap<Named, Report>>,
}

impl Reports {
    fn note(&mut self, report: Report) {
        let Metadata { namespace, name, .. } = &report.metadata;
        let named = (report.kind, Arc::clone(namespace), Arc::clone(name));
        let before = self.said.get(&named);
        if before == Some(&report) {
            return;
        }
        // Of a change that is as good or bad as before the log has been told.
        if before.is_none_or(|before| before.findings != report.findings) {
            report.log();
        }
        if let Some(kept) = &mut self.kept {
            kept.insert(named.clone(), report.clone());
        }
        self.said.insert(named, report);
    }

    fn forget(&mut self, kind: PolicyKind, namespace: &str, name: &str) {
        let named = (kind, namespace.into(), name.into());
        self.said.remove(&named);
        if let Some(kept) = &mut self.kept {
            kept.remove(&named);
        }
    }
}

impl Report {
    fn log(&self) {
        let Metadata { namespace, name, .. } = &self.metadata;
        let (kind, state) = (self.kind.as_str(), self.state().as_str());
        match self.state() {
            State::Accepted => {}
            State::PartlyApplied | State::Ignored => info!(kind, %namespace, %name, state, "{}", self.message()),
            State::Invalid => warn!(kind, %namespace, %name, state, "{}", self.message()),
        }
    }
}
