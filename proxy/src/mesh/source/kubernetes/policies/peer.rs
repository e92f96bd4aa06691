//! `PeerAuthentication`: where plaintext is refused. It becomes policies that deny what has no proven identity.
//!
//! A pod's mode is that of the oldest object whose selector selects it, in its namespace; where that leaves it unset, of the
//! namespace's oldest without a selector; then of the root namespace's; else plaintext is taken. Ports have their
//! own modes in objects with a selector only.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::Deserialize;
use serde_json::{Map, Value};

use super::object::{Metadata, Object, Selection, present};
use super::report::{Finding, Report};
use crate::mesh::source::kubernetes::hook::PolicyKind;
use crate::mesh::{Action, Clause, Match, Policy, Rule, Scope, StringMatch};

/// Before the object's name in a policy's. No object's name has an underscore, so no other policy is named alike.
const PREFIX: &str = "peerauthentication_";

/// What is to become of plaintext.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    /// What the wider scope says.
    Unset,
    /// It is refused.
    Strict,
    /// It is taken.
    Permissive,
}

/// An object as understood.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Peer {
    pub(super) metadata: Metadata,
    pub(super) selection: Selection,
    mode: Mode,
    ports: BTreeMap<u16, Mode>,
    findings: Vec<Finding>,
    effect: Option<&'static str>,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
struct Spec {
    /// Read apart, by [`Selection::of`]; named here so that it is not among the others.
    #[serde(rename = "selector")]
    _selector: Option<Value>,
    mtls: Option<Mtls>,
    port_level_mtls: Option<BTreeMap<String, Option<Mtls>>>,
    #[serde(flatten)]
    other: Map<String, Value>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Mtls {
    mode: Option<String>,
    #[serde(flatten)]
    other: Map<String, Value>,
}

impl Peer {
    /// Reads an object. One with a fault counts as strict throughout.
    pub(super) fn read(object: &Object) -> Self {
        let mut peer = Self {
            metadata: object.metadata.clone(),
            selection: Selection::of(&object.spec),
            mode: Mode::Unset,
            ports: BTreeMap::new(),
            findings: Vec::new(),
            effect: None,
        };
        let read = match &object.spec {
            Value::Null => Ok(Spec::default()),
            spec => Spec::deserialize(spec),
        };
        let whole = match read {
            Err(error) => peer.fault(Finding::Shape(error.to_string())),
            Ok(spec) => peer.take(spec),
        };
        if let Selection::Invalid(reason) = &peer.selection {
            peer.findings.push(Finding::Selector(reason.clone()));
        }
        if whole.is_none() || matches!(peer.selection, Selection::Invalid(_)) {
            peer.mode = Mode::Strict;
            peer.ports.clear();
            peer.effect = Some("Until it is mended, plaintext is refused as by STRICT on every port");
        }
        peer
    }

    fn take(&mut self, spec: Spec) -> Option<()> {
        let unknown = present(&spec.other).next().map(ToOwned::to_owned);
        if let Some(field) = unknown {
            self.fault(Finding::Shape(format!("{field} is not known")))?;
        }
        self.mode = self.mode_of(spec.mtls)?;
        let ports = spec.port_level_mtls.unwrap_or_default();
        if !ports.is_empty() && self.selection == Selection::All {
            self.fault(Finding::PortsWithoutSelector)?;
        }
        for (port, mtls) in ports {
            let mode = self.mode_of(mtls)?;
            match port.parse() {
                Ok(number) if number > 0 => self.ports.insert(number, mode),
                _ => self.fault(Finding::Port(port))?,
            };
        }
        Some(())
    }

    fn mode_of(&mut self, mtls: Option<Mtls>) -> Option<Mode> {
        let mtls = mtls.unwrap_or_default();
        let unknown = present(&mtls.other).next().map(ToOwned::to_owned);
        if let Some(field) = unknown {
            return self.fault(Finding::Shape(format!("{field} is not known")));
        }
        match mtls.mode.as_deref() {
            None | Some("" | "UNSET") => Some(Mode::Unset),
            Some("STRICT") => Some(Mode::Strict),
            Some("PERMISSIVE") => Some(Mode::Permissive),
            Some("DISABLE") => {
                if !self.findings.contains(&Finding::Disable) {
                    self.findings.push(Finding::Disable);
                }
                Some(Mode::Permissive)
            }
            Some(mode) => self.fault(Finding::Mode(mode.to_owned())),
        }
    }

    fn fault<T>(&mut self, finding: Finding) -> Option<T> {
        self.findings.push(finding);
        None
    }

    /// Whether connections fare alike under both.
    pub(super) fn decides_alike(&self, other: &Self) -> bool {
        let of = |peer: &Self| (peer.mode, peer.ports.clone(), peer.metadata.creation_timestamp.clone());
        of(self) == of(other) && self.selection == other.selection
    }

    /// What to say about it, given the older object that decides in its stead.
    pub(super) fn report(&self, older: Option<&Peer>) -> Report {
        let mut findings = self.findings.clone();
        let mut effect = self.effect;
        if let Some(older) = older {
            let Metadata { namespace, name, .. } = &older.metadata;
            findings.push(Finding::Superseded(format!("{namespace}/{name}")));
            effect = Some("It has no effect");
        }
        Report {
            kind: PolicyKind::PeerAuthentication,
            metadata: self.metadata.clone(),
            findings,
            effect,
        }
    }

    fn key(&self) -> Arc<str> {
        format!("{}/{PREFIX}{}", self.metadata.namespace, self.metadata.name).into()
    }

    /// The policy that this object decides on, where `wider` is the mode where it leaves it unset; none where it refuses no
    /// plaintext.
    fn policy(&self, wider: Mode) -> Option<Policy> {
        let or = |mode, other| if mode == Mode::Unset { other } else { mode };
        let base = or(self.mode, wider);
        let ports = |strict: bool| {
            let those = move |mode| (or(mode, base) == Mode::Strict) == strict;
            let ports = self.ports.iter().filter(move |(_, mode)| those(**mode));
            ports.map(|(port, _)| *port).collect::<Vec<_>>()
        };
        let plaintext = Match {
            not_principals: vec![StringMatch::Presence],
            ..Match::default()
        };
        let conditions = match base {
            Mode::Strict => Match {
                not_destination_ports: ports(false),
                ..plaintext
            },
            _ => Match {
                destination_ports: Some(ports(true)).filter(|ports| !ports.is_empty())?,
                ..plaintext
            },
        };
        let clause = Clause {
            matches: vec![conditions],
        };
        let rule = Rule { clauses: vec![clause] };
        let name = format!("{PREFIX}{}", self.metadata.name);
        Some(Policy::new(
            &self.metadata.namespace,
            &name,
            Scope::Workload,
            Action::Deny,
            vec![rule],
        ))
    }
}

/// The objects of a namespace, in the order in which they decide.
#[derive(Debug, Default)]
pub(super) struct Peers(Vec<Peer>);

impl Peers {
    /// Takes an object in, in place of the one of its name.
    pub(super) fn set(&mut self, peer: Peer) {
        self.remove(&peer.metadata.name);
        let rank = |peer: &Peer| {
            (
                peer.metadata.creation_timestamp.clone(),
                Arc::clone(&peer.metadata.name),
            )
        };
        let at = self.0.partition_point(|other| rank(other) < rank(&peer));
        self.0.insert(at, peer);
    }

    /// Whether there was one of the name.
    pub(super) fn remove(&mut self, name: &str) -> bool {
        let before = self.0.len();
        self.0.retain(|peer| &*peer.metadata.name != name);
        self.0.len() < before
    }

    pub(super) fn get(&self, name: &str) -> Option<&Peer> {
        self.0.iter().find(|peer| &*peer.metadata.name == name)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The one without selector that decides for the namespace. One whose selector cannot be read may mean any pod: it
    /// is strict, and goes before.
    fn wide(&self) -> Option<&Peer> {
        let invalid = |peer: &&Peer| matches!(peer.selection, Selection::Invalid(_));
        let all = |peer: &&Peer| peer.selection == Selection::All;
        self.0.iter().find(invalid).or_else(|| self.0.iter().find(all))
    }

    fn selecting(&self) -> impl Iterator<Item = &Peer> {
        self.0
            .iter()
            .filter(|peer| matches!(peer.selection, Selection::Some(_)))
    }

    /// What to say about each.
    pub(super) fn reports(&self) -> impl Iterator<Item = Report> {
        self.0.iter().map(|peer| {
            let decides = self.wide().filter(|_| peer.selection == Selection::All);
            peer.report(decides.filter(|wide| wide.metadata.name != peer.metadata.name))
        })
    }
}

/// The modes that hold for a namespace: from the root namespace's objects and its own, which are the same there.
pub(super) struct Scoped<'a> {
    pub(super) root: Option<&'a Peers>,
    pub(super) own: Option<&'a Peers>,
}

impl<'a> Scoped<'a> {
    /// The object and mode for pods that no selector selects.
    fn wide(&self) -> (Option<&'a Peer>, Mode) {
        [self.own, self.root]
            .into_iter()
            .flatten()
            .filter_map(Peers::wide)
            .find(|peer| peer.mode != Mode::Unset)
            .map_or((None, Mode::Permissive), |peer| (Some(peer), peer.mode))
    }

    /// The policies of this namespace's objects.
    pub(super) fn policies(&self) -> Vec<Policy> {
        let Some(own) = self.own else {
            return Vec::new();
        };
        let (_, wider) = self.wide();
        let selecting = own.selecting().filter_map(|peer| peer.policy(wider));
        own.wide()
            .and_then(|peer| peer.policy(Mode::Unset))
            .into_iter()
            .chain(selecting)
            .collect()
    }

    /// The key of the policy for a pod of these labels.
    pub(super) fn key_for<'l>(&self, label: impl Fn(&str) -> Option<&'l str>) -> Option<Arc<str>> {
        let (wide, wider) = self.wide();
        let selects = |peer: &&Peer| match &peer.selection {
            Selection::Some(selector) => selector.selects(&label),
            _ => false,
        };
        // One that may mean any pod and is strict on every port leaves nothing to decide.
        let unclear = self
            .own
            .and_then(Peers::wide)
            .filter(|peer| matches!(peer.selection, Selection::Invalid(_)));
        if let Some(peer) = unclear {
            return Some(peer.key());
        }
        match self.own.and_then(|own| own.selecting().find(selects)) {
            Some(peer) => peer.policy(wider).map(|_| peer.key()),
            None => wide.filter(|_| wider == Mode::Strict).map(Peer::key),
        }
    }
}
