//! What is trusted at a moment, put together from all sources.

use std::sync::Arc;
use std::time::SystemTime;

use rustls_pki_types::TrustAnchor;

use super::crl::Crl;
use super::distrust::Distrust;
use super::root::{Digest, Root};
use super::settings::CrlPolicy;
use crate::identity::TrustDomain;

/// How many retired roots are remembered for connections that rest on them.
const MAX_RETIRED: usize = 64;

/// What handshakes look at. Immutable.
#[derive(Debug, Default)]
pub(in crate::identity) struct Snapshot {
    home: Anchors,
    foreign: Vec<(TrustDomain, Anchors)>,
    aliases: Arc<[TrustDomain]>,
    pub(super) distrust: Distrust,
    pub(super) crls: Arc<[Arc<Crl>]>,
    pub(super) crl_policy: CrlPolicy,
}

/// The roots of one trust domain.
#[derive(Debug, Default, Clone)]
pub(super) struct Anchors {
    /// Those in force, then those that are retired.
    all: Vec<TrustAnchor<'static>>,
    current: usize,
    retired: Vec<Arc<Root>>,
    /// The subjects of those that are distrusted.
    barred: Vec<Box<str>>,
    fingerprints: Vec<Digest>,
}

impl Anchors {
    pub(super) fn current(&self) -> &[TrustAnchor<'static>] {
        &self.all[..self.current]
    }

    pub(super) fn with_retired(&self) -> &[TrustAnchor<'static>] {
        &self.all
    }

    /// Of the roots in force.
    pub(super) fn fingerprints(&self) -> &[Digest] {
        &self.fingerprints
    }

    pub(super) fn retired(&self) -> &[Arc<Root>] {
        &self.retired
    }

    /// `known` are the roots of all sources of the domain; `before` are its anchors until now.
    fn compose<'a>(
        known: impl Iterator<Item = &'a Arc<Root>>,
        before: Before<'_>,
        distrust: &Distrust,
        now: SystemTime,
    ) -> Self {
        let mut roots: Vec<&Arc<Root>> = Vec::new();
        let mut barred = Vec::new();
        for root in known {
            if distrust.has_root(root) {
                barred.push(root.subject.clone());
            } else if now < root.not_after && !roots.iter().any(|one| one.fingerprint == root.fingerprint) {
                roots.push(root);
            }
        }
        let in_force = |root: &Root| roots.iter().any(|one| one.fingerprint == root.fingerprint);
        let mut retired: Vec<Arc<Root>> = Vec::new();
        for root in before.retired.iter().chain(before.in_force) {
            let known = |one: &Arc<Root>| one.fingerprint == root.fingerprint;
            if !in_force(root) && !distrust.has_root(root) && !retired.iter().any(known) {
                retired.push(Arc::clone(root));
            }
        }
        let surplus = retired.len().saturating_sub(MAX_RETIRED);
        retired.drain(..surplus);
        let all = roots.iter().copied().chain(&retired).map(|root| root.anchor.clone());
        Self {
            all: all.collect(),
            current: roots.len(),
            fingerprints: roots.iter().map(|root| root.fingerprint).collect(),
            retired,
            barred,
        }
    }
}

/// What a domain's anchors were before.
#[derive(Debug, Clone, Copy)]
pub(super) struct Before<'a> {
    pub(super) in_force: &'a [Arc<Root>],
    pub(super) retired: &'a [Arc<Root>],
}

/// The sources of one domain, as they are now and as they were when last composed.
#[derive(Debug)]
pub(super) struct Sources<'a> {
    pub(super) roots: Vec<Arc<Root>>,
    pub(super) before: Before<'a>,
}

/// What a snapshot consists of.
#[derive(Debug)]
pub(super) struct Parts<'a> {
    pub(super) home: Sources<'a>,
    pub(super) foreign: Vec<(TrustDomain, Sources<'a>)>,
    pub(super) aliases: Arc<[TrustDomain]>,
    pub(super) distrust: Distrust,
    pub(super) crls: Arc<[Arc<Crl>]>,
    pub(super) crl_policy: CrlPolicy,
}

impl Snapshot {
    /// Puts it together.
    pub(super) fn compose(parts: Parts<'_>, now: SystemTime) -> Self {
        let mut distrust = parts.distrust;
        let known = |sources: &Sources<'_>| {
            let before = sources.before.in_force.iter().chain(sources.before.retired);
            sources.roots.iter().chain(before).cloned().collect::<Vec<_>>()
        };
        let everything: Vec<_> = std::iter::once(&parts.home)
            .chain(parts.foreign.iter().map(|(_, sources)| sources))
            .flat_map(known)
            .collect();
        distrust.resolve(everything.iter().map(|root| &**root));
        let anchors = |sources: &Sources<'_>| Anchors::compose(sources.roots.iter(), sources.before, &distrust, now);
        Self {
            home: anchors(&parts.home),
            foreign: parts
                .foreign
                .iter()
                .map(|(domain, sources)| (domain.clone(), anchors(sources)))
                .collect(),
            aliases: parts.aliases,
            crls: parts.crls,
            crl_policy: parts.crl_policy,
            distrust,
        }
    }

    /// The roots of a peer's trust domain; none if nobody of that domain is accepted. `home` is our own.
    pub(super) fn anchors(&self, home: &TrustDomain, domain: &str) -> Option<&Anchors> {
        if domain == home.as_str() || self.is_alias(domain) {
            return Some(&self.home);
        }
        self.foreign
            .iter()
            .find(|(name, _)| name.as_str() == domain)
            .map(|(_, anchors)| anchors)
    }

    /// Those of our own trust domain.
    pub(super) fn home(&self) -> &Anchors {
        &self.home
    }

    /// Those of others.
    pub(super) fn foreign(&self) -> &[(TrustDomain, Anchors)] {
        &self.foreign
    }

    /// Those of one other.
    pub(super) fn anchors_of(&self, domain: &TrustDomain) -> Option<&Anchors> {
        self.foreign
            .iter()
            .find(|(name, _)| name == domain)
            .map(|(_, anchors)| anchors)
    }

    /// Whether this is another name of our own trust domain.
    pub(super) fn is_alias(&self, domain: &str) -> bool {
        self.aliases.iter().any(|alias| alias.as_str() == domain)
    }

    /// Whether paths have to be looked into, beyond that they lead to a root.
    pub(super) fn looks_into_paths(&self) -> bool {
        !self.distrust.is_empty() || !self.crls.is_empty() || self.crl_policy == CrlPolicy::Strict
    }

    /// The subjects of those roots of the domain that are distrusted.
    pub(super) fn barred<'a>(&'a self, home: &TrustDomain, domain: &str) -> impl Iterator<Item = &'a str> + use<'a> {
        let anchors = self.anchors(home, domain);
        anchors
            .into_iter()
            .flat_map(|anchors| anchors.barred.iter().map(|subject| &**subject))
    }
}
