//! The roots and all else that trust rests on, kept up to date.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, SystemTime};

use arc_swap::{ArcSwap, Guard};
use rustls_pki_types::CertificateDer;
use tokio::sync::watch;
use tokio::task::spawn_blocking;
use tokio::time::{MissedTickBehavior, interval};

use super::compose::{Before, Parts, Snapshot, Sources};
use super::crl::Crl;
use super::given::{Files, Given};
use super::learnt::Learnt;
use super::path::{Check, Purpose, Role, unix};
use super::peer::{PeerChain, Verdict};
use super::root::{Digest, Root, sha256};
use super::settings::TrustSettings;
use super::status::{CrlStatus, RootSource, RootStatus, TrustStatus};
use crate::identity::chain::identity;
use crate::identity::{CertificateError, SpiffeId, TrustDomain, chain};

/// Which roots peers are verified against. Cheap to clone; handshakes look at its current snapshot without a lock.
#[derive(Clone)]
pub struct Trust(Arc<Shared>);

struct Shared {
    settings: TrustSettings,
    /// Whether changes are logged.
    told: bool,
    aliases: Arc<[TrustDomain]>,
    snapshot: ArcSwap<Snapshot>,
    /// Counts what connections that are open may not survive.
    generation: watch::Sender<u64>,
    /// Held while files are read.
    files: Mutex<Files>,
    state: Mutex<State>,
    chains: Mutex<Chains>,
}

#[derive(Default)]
struct State {
    looked: bool,
    learnt: Learnt,
    given: Given,
    /// Roots of other domains, as the source of certificates has them.
    federated: Vec<(TrustDomain, Vec<Arc<Root>>)>,
    home: Force,
    foreign: Vec<(TrustDomain, Force)>,
    /// Those that have been distrusted, so that their keys are known when no source names them any more.
    barred: Vec<Arc<Root>>,
}

/// The roots of one domain that handshakes are verified against, and those that once were.
#[derive(Default)]
struct Force {
    roots: Vec<Arc<Root>>,
    retired: Vec<Arc<Root>>,
}

#[derive(Default)]
struct Chains {
    known: HashMap<Digest, Weak<PeerChain>>,
    /// When those that are gone are looked for.
    sweep_at: usize,
}

impl Trust {
    /// Reads the files once; those that cannot be used are logged, and give nothing.
    pub fn new(settings: TrustSettings) -> Self {
        Self::made(settings, true)
    }

    fn made(settings: TrustSettings, told: bool) -> Self {
        let trust = Self(Arc::new(Shared {
            told,
            aliases: settings.aliases.clone().into(),
            snapshot: ArcSwap::default(),
            generation: watch::Sender::new(0),
            files: Mutex::new(Files::new(&settings)),
            state: Mutex::default(),
            chains: Mutex::default(),
            settings,
        }));
        trust.look();
        trust
    }

    /// Trust in these roots, and no others. For certificates that no store holds.
    pub(in crate::identity) fn of(roots: &[Root]) -> Self {
        let trust = Self::made(TrustSettings::default(), false);
        trust.learn(roots, Duration::MAX);
        trust
    }

    /// Why the list of what is distrusted cannot be used, where no state of it ever could: it is not known then whom to
    /// keep out.
    pub fn without_distrust(&self) -> Option<String> {
        lock(&self.0.files).without_distrust()
    }

    /// Keeps up with files and time, for ever.
    pub async fn follow(self) {
        let mut due = interval(self.0.settings.look_every);
        due.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            due.tick().await;
            let trust = self.clone();
            // It has panicked, and has said so.
            let _ = spawn_blocking(move || trust.look()).await;
        }
    }

    /// Looks whether files have changed, and whether roots have had their time. Blocks.
    pub fn look(&self) {
        let given = {
            let mut files = lock(&self.0.files);
            files.look();
            files.given()
        };
        let mut state = lock(&self.0.state);
        // Nothing is open before the first look.
        let first = !std::mem::replace(&mut state.looked, true);
        let worse = !first && (given.distrust != state.given.distrust || !given.has_same_lists(&state.given));
        state.given = given;
        for root in state.learnt.sweep(self.now()) {
            tracing::info!(
                root = %root.subject, fingerprint = %root.name(),
                "the CA names this root no more, and nothing signed under it can be valid: it is dropped"
            );
        }
        self.publish(&mut state, worse);
    }

    /// Takes in the roots that an answer of the CA's names, which came with a certificate of this lifetime.
    pub(in crate::identity) fn learn(&self, roots: &[Root], lifetime: Duration) {
        let mut state = lock(&self.0.state);
        if state.learnt.take_in(roots, lifetime, self.now()) {
            self.publish(&mut state, false);
        }
    }

    /// Takes in the roots of other trust domains that the source of certificates has: all of them, in the place of those
    /// that it had before.
    pub(in crate::identity) fn federate(&self, domains: Vec<(TrustDomain, Vec<Root>)>) {
        let shared = |roots: Vec<Root>| roots.into_iter().map(Arc::new).collect();
        let domains: Vec<(_, Vec<_>)> = domains
            .into_iter()
            .map(|(domain, roots)| (domain, shared(roots)))
            .collect();
        let mut state = lock(&self.0.state);
        if !are_the_same(&state.federated, &domains) {
            state.federated = domains;
            self.publish(&mut state, false);
        }
    }

    /// What is trusted now.
    pub(in crate::identity) fn snapshot(&self) -> Guard<Arc<Snapshot>> {
        self.0.snapshot.load()
    }

    /// Counts the changes that open connections may not survive.
    pub fn generation(&self) -> u64 {
        *self.0.generation.borrow()
    }

    /// Told of each change that open connections may not survive.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.0.generation.subscribe()
    }

    /// The identity under our own trust domain's name, where it bears an alias of it.
    pub fn canonical(&self, home: &TrustDomain, id: &SpiffeId) -> SpiffeId {
        let is_alias = self.0.aliases.iter().any(|alias| alias.as_str() == id.trust_domain());
        if !is_alias || id.trust_domain() == home.as_str() {
            return id.clone();
        }
        SpiffeId::new(home, id.namespace(), id.service_account()).unwrap_or_else(|_| id.clone())
    }

    /// Remembers the chain that a peer has proven in a handshake that began at `generation`.
    pub(in crate::identity) fn remember(
        &self,
        chain: &[CertificateDer<'_>],
        home: &TrustDomain,
        role: Role,
        generation: u64,
    ) -> Result<Arc<PeerChain>, CertificateError> {
        let leaf = chain.first().ok_or(CertificateError::Empty)?;
        let mut bytes = Vec::with_capacity(chain.iter().map(|der| der.len() + 8).sum::<usize>() + 1);
        for der in chain {
            bytes.extend_from_slice(&der.len().to_le_bytes());
            bytes.extend_from_slice(der);
        }
        bytes.push(role as u8);
        let digest = sha256(&bytes);
        if let Some(known) = lock(&self.0.chains).known.get(&digest).and_then(Weak::upgrade) {
            return Ok(known);
        }
        let id = self.canonical(home, &identity(&chain::parse(leaf)?)?);
        let remembered = Arc::new(PeerChain {
            certificates: chain.iter().map(|der| der.clone().into_owned()).collect(),
            digest,
            role,
            home: home.clone(),
            at: unix(self.now()),
            id,
            trust: self.clone(),
            verdict: Mutex::new(Verdict {
                generation,
                fault: None,
            }),
        });
        let mut chains = lock(&self.0.chains);
        if chains.known.len() >= chains.sweep_at {
            chains.known.retain(|_, chain| chain.strong_count() > 0);
            chains.known.shrink_to_fit();
            chains.sweep_at = 2 * chains.known.len() + 64;
        }
        chains.known.insert(remembered.digest, Arc::downgrade(&remembered));
        Ok(remembered)
    }

    /// Whether a connection may go on that rests on this chain: nothing has become known against it. Cheap unless
    /// there was a change since it was last asked for.
    pub(super) fn recheck(&self, chain: &PeerChain) -> Result<(), Arc<str>> {
        let generation = self.generation();
        let mut verdict = lock(&chain.verdict);
        if verdict.generation != generation {
            *verdict = Verdict {
                generation,
                fault: self.fault(chain),
            };
        }
        match &verdict.fault {
            None => Ok(()),
            Some(fault) => Err(Arc::clone(fault)),
        }
    }

    fn fault(&self, chain: &PeerChain) -> Option<Arc<str>> {
        let (leaf, rest) = chain.certificates.split_first()?;
        let check = Check {
            snapshot: &self.snapshot(),
            home: &chain.home,
            role: chain.role,
            purpose: Purpose::Live,
            at: chain.at,
        };
        let fault = check.verify(leaf, rest).err()?;
        Some(format!("the certificate of {}: {fault}", chain.id).into())
    }

    /// Everything, for a reader.
    pub fn status(&self) -> TrustStatus {
        let snapshot = self.0.snapshot.load_full();
        let state = lock(&self.0.state);
        let show = |root: &Root, domain: Option<&TrustDomain>, source, leaving, in_force: &[Digest]| RootStatus {
            trust_domain: domain.map(ToString::to_string),
            fingerprint: root.name(),
            subject: root.subject.to_string(),
            not_before: root.not_before,
            not_after: root.not_after,
            source,
            leaving,
            in_force: in_force.contains(&root.fingerprint),
        };
        let home = snapshot.home().fingerprints();
        let mut roots: Vec<_> = state
            .learnt
            .all()
            .map(|(root, named)| show(root, None, RootSource::Ca, !named, home))
            .collect();
        roots.extend(
            state
                .given
                .home
                .iter()
                .map(|root| show(root, None, RootSource::File, false, home)),
        );
        let foreign = [
            (RootSource::Ca, &state.federated),
            (RootSource::File, &state.given.foreign),
        ];
        for (source, domains) in foreign {
            for (domain, given) in domains {
                let in_force = snapshot
                    .anchors_of(domain)
                    .map(|anchors| anchors.fingerprints())
                    .unwrap_or_default();
                roots.extend(
                    given
                        .iter()
                        .map(|root| show(root, Some(domain), source, false, in_force)),
                );
            }
        }
        let crl = |crl: &Arc<Crl>| CrlStatus {
            issuer: crl.issuer_name.to_string(),
            this_update: crl.this_update,
            next_update: crl.next_update,
            revoked: crl.len(),
        };
        TrustStatus {
            roots,
            retired: state.home.retired.len()
                + state
                    .foreign
                    .iter()
                    .map(|(_, force)| force.retired.len())
                    .sum::<usize>(),
            aliases: self.0.aliases.iter().map(ToString::to_string).collect(),
            distrusted: state.given.distrust.names(),
            crls: state.given.crls.iter().map(crl).collect(),
            crl_policy: self.0.settings.crl_policy.as_str(),
            errors: state.given.errors.clone(),
            peer_chains: lock(&self.0.chains)
                .known
                .values()
                .filter(|chain| chain.strong_count() > 0)
                .count(),
        }
    }

    fn now(&self) -> SystemTime {
        (self.0.settings.now)()
    }

    /// Puts a new snapshot in force; `worse` if connections that are open may not survive it.
    fn publish(&self, state: &mut State, worse: bool) {
        let home: Vec<_> = state
            .learnt
            .all()
            .map(|(root, _)| root)
            .chain(&state.given.home)
            .cloned()
            .collect();
        let foreign = state.foreign_roots();
        let nothing = Force::default();
        let force = |domain: &TrustDomain| {
            let found = state.foreign.iter().find(|(name, _)| name == domain);
            found.map_or(&nothing, |(_, force)| force)
        };
        let mut distrust = state.given.distrust.clone();
        distrust.resolve(state.barred.iter().map(|root| &**root));
        let parts = Parts {
            home: state.home.sources(home.clone()),
            foreign: foreign
                .iter()
                .map(|(domain, roots)| (domain.clone(), force(domain).sources(roots.clone())))
                .collect(),
            aliases: Arc::clone(&self.0.aliases),
            distrust,
            crls: Arc::clone(&state.given.crls),
            crl_policy: self.0.settings.crl_policy,
        };
        let snapshot = Snapshot::compose(parts, self.now());
        let told = self.0.told;
        let own = state.home.renewed(&home, snapshot.home(), "our own trust domain", told);
        let mut others = Vec::new();
        for ((domain, anchors), (_, given)) in snapshot.foreign().iter().zip(&foreign) {
            others.push((
                domain.clone(),
                force(domain).renewed(given, anchors, domain.as_str(), told),
            ));
        }
        let all = home.iter().chain(foreign.iter().flat_map(|(_, roots)| roots));
        let barred = all
            .chain(state.home.all())
            .chain(state.foreign.iter().flat_map(|(_, force)| force.all()));
        let mut barred: Vec<_> = barred
            .filter(|root| snapshot.distrust.has_root(root))
            .cloned()
            .collect();
        barred.extend(state.barred.drain(..).filter(|root| snapshot.distrust.has_root(root)));
        barred.sort_by_key(|root| root.fingerprint);
        barred.dedup_by_key(|root| root.fingerprint);
        (state.home, state.foreign, state.barred) = (own, others, barred);
        self.0.snapshot.store(Arc::new(snapshot));
        if worse {
            tracing::warn!(
                distrusted = state.given.distrust.len(),
                revocation_lists = state.given.crls.len(),
                "what is distrusted or revoked has changed: open connections that rest on it end"
            );
            self.0.generation.send_modify(|generation| *generation += 1);
        }
    }
}

impl Default for Trust {
    /// Trust in what the CA names, and nothing else.
    fn default() -> Self {
        Self::new(TrustSettings::default())
    }
}

impl fmt::Debug for Trust {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Trust").field(&self.0.settings).finish()
    }
}

/// Whether the same domains have the same roots, in the same order.
fn are_the_same(one: &[(TrustDomain, Vec<Arc<Root>>)], other: &[(TrustDomain, Vec<Arc<Root>>)]) -> bool {
    let known = |domains: &[(TrustDomain, Vec<Arc<Root>>)]| -> Vec<_> {
        let fingerprints = |roots: &[Arc<Root>]| roots.iter().map(|root| root.fingerprint).collect::<Vec<_>>();
        domains
            .iter()
            .map(|(domain, roots)| (domain.clone(), fingerprints(roots)))
            .collect()
    };
    known(one) == known(other)
}

impl State {
    /// The roots of each other domain, from whichever source.
    fn foreign_roots(&self) -> Vec<(TrustDomain, Vec<Arc<Root>>)> {
        let mut all = self.given.foreign.clone();
        for (domain, roots) in &self.federated {
            match all.iter_mut().find(|(name, _)| name == domain) {
                Some((_, known)) => known.extend(roots.iter().cloned()),
                None => all.push((domain.clone(), roots.clone())),
            }
        }
        all
    }
}

impl Force {
    fn sources(&self, roots: Vec<Arc<Root>>) -> Sources<'_> {
        Sources {
            roots,
            before: Before {
                in_force: &self.roots,
                retired: &self.retired,
            },
        }
    }

    fn all(&self) -> impl Iterator<Item = &Arc<Root>> {
        self.roots.iter().chain(&self.retired)
    }

    /// What is in force from now on, and what has changed in it, for the log.
    fn renewed(&self, known: &[Arc<Root>], anchors: &super::compose::Anchors, domain: &str, told: bool) -> Self {
        let mut roots: Vec<Arc<Root>> = Vec::new();
        for fingerprint in anchors.fingerprints() {
            roots.extend(known.iter().find(|root| root.fingerprint == *fingerprint).cloned());
        }
        let lacks = |roots: &[Arc<Root>], root: &Root| !roots.iter().any(|one| one.fingerprint == root.fingerprint);
        for root in roots.iter().filter(|root| told && lacks(&self.roots, root)) {
            tracing::info!(root = %root.subject, fingerprint = %root.name(), "a root of {domain} is trusted from now on");
        }
        for root in self.roots.iter().filter(|root| told && lacks(&roots, root)) {
            tracing::warn!(
                root = %root.subject, fingerprint = %root.name(),
                "a root of {domain} is trusted no more by new connections"
            );
        }
        Self {
            roots,
            retired: anchors.retired().to_vec(),
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What is guarded stays whole even if a holder panicked.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
