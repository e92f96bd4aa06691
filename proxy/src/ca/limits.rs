//! How much one caller may ask for, so that whatever it does there is room for the others.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use thiserror::Error;

use super::token::Caller;
use crate::admin::Peer;

/// Callers remembered at once; those that have been idle are forgotten first.
const MAX_CALLERS: usize = 20_000;

/// What one node may ask for, and all together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LimitSettings {
    /// Requests a second of one node, in the long run.
    pub rate: u32,
    /// Requests of one node at once after it was quiet.
    pub burst: u32,
    /// Requests of one node that are under way.
    pub in_flight: u32,
    /// Requests of all callers that are under way, those among them that nobody has authenticated yet.
    pub all_in_flight: usize,
    /// Those that nobody has authenticated yet, beyond what each address has for itself.
    pub unauthenticated: usize,
    /// What each address has of those for itself, so that others cannot keep it out.
    pub unauthenticated_of_address: usize,
    /// Requests from one address, or one /64 of IPv6, that are under way, whoever makes them.
    pub of_address: usize,
    /// Connections of one address, or one /64 of IPv6.
    pub connections_of_address: usize,
}

impl Default for LimitSettings {
    fn default() -> Self {
        Self {
            rate: 100,
            burst: 1000,
            in_flight: 256,
            all_in_flight: 8192,
            unauthenticated: 2048,
            unauthenticated_of_address: 16,
            of_address: 512,
            connections_of_address: 128,
        }
    }
}

/// Why a call is turned away, which is good, but too much now.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Overload {
    /// The caller's own.
    #[error("{who} asks too often: {rate} requests a second are granted, {burst} at once; try again later")]
    Rate {
        /// The caller.
        who: String,
        /// The limit.
        rate: u32,
        /// The limit.
        burst: u32,
    },
    /// The caller's own.
    #[error("{who} has {limit} requests under way, which is the limit; try again when they are answered")]
    InFlight {
        /// The caller.
        who: String,
        /// The limit.
        limit: u32,
    },
    /// Of whoever is behind an address.
    #[error("{limit} requests from {address} are under way, which is the limit; try again later")]
    Address {
        /// Where they come from.
        address: Peer,
        /// The limit.
        limit: usize,
    },
    /// Of all whom nobody has authenticated yet.
    #[error(
        "the CA has {0} requests under way whose callers are not authenticated yet, which is its limit; try again later"
    )]
    Unauthenticated(usize),
    /// Everybody's.
    #[error("the CA has {0} requests under way, which is its limit; try again later")]
    Busy(usize),
}

impl Overload {
    /// The limit in one word, for metrics.
    pub(super) fn word(&self) -> &'static str {
        match self {
            Self::Rate { .. } => "rate",
            Self::InFlight { .. } => "in_flight",
            Self::Address { .. } => "address",
            Self::Unauthenticated(_) => "unauthenticated",
            Self::Busy(_) => "busy",
        }
    }
}

/// Keeps callers to their limits.
pub(super) struct Limits {
    settings: LimitSettings,
    under_way: Mutex<UnderWay>,
    callers: Mutex<HashMap<String, Use>>,
}

/// Requests under way.
#[derive(Default)]
struct UnderWay {
    all: usize,
    /// Those that nobody has authenticated yet, beyond what each peer has for itself.
    pooled: usize,
    of_peers: HashMap<Peer, OfPeer>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct OfPeer {
    all: usize,
    unauthenticated: usize,
}

impl UnderWay {
    fn enter(&mut self, settings: &LimitSettings, peer: Peer) -> Result<(), Overload> {
        let of_peer = self.of_peers.get(&peer).copied().unwrap_or_default();
        let pooled = of_peer.unauthenticated >= settings.unauthenticated_of_address;
        if self.all >= settings.all_in_flight {
            return Err(Overload::Busy(settings.all_in_flight));
        }
        if of_peer.all >= settings.of_address {
            let (address, limit) = (peer, settings.of_address);
            return Err(Overload::Address { address, limit });
        }
        if pooled && self.pooled >= settings.unauthenticated {
            return Err(Overload::Unauthenticated(settings.unauthenticated));
        }
        self.all += 1;
        self.pooled += usize::from(pooled);
        let of_peer = self.of_peers.entry(peer).or_default();
        of_peer.all += 1;
        of_peer.unauthenticated += 1;
        Ok(())
    }

    /// One of the peer's requests is authenticated.
    fn authenticate(&mut self, settings: &LimitSettings, peer: Peer) {
        if let Some(of_peer) = self.of_peers.get_mut(&peer) {
            of_peer.unauthenticated -= 1;
            self.pooled -= usize::from(of_peer.unauthenticated >= settings.unauthenticated_of_address);
        }
    }

    /// One of the peer's requests, which was authenticated, has ended.
    fn leave(&mut self, peer: Peer) {
        self.all -= 1;
        if let Some(of_peer) = self.of_peers.get_mut(&peer) {
            of_peer.all -= 1;
            if of_peer.all == 0 {
                self.of_peers.remove(&peer);
            }
        }
    }
}

/// What a caller has used of its share.
struct Use {
    /// Requests that it may still make at once.
    left: f64,
    at: Instant,
    in_flight: u32,
}

impl Use {
    /// What is left by now.
    fn refill(&mut self, settings: &LimitSettings, now: Instant) {
        let since: Duration = now.saturating_duration_since(self.at);
        let more = since.as_secs_f64() * f64::from(settings.rate);
        self.left = (self.left + more).min(f64::from(settings.burst));
        self.at = self.at.max(now);
    }
}

impl Limits {
    pub(super) fn new(settings: LimitSettings) -> Self {
        Self {
            settings,
            under_way: Mutex::default(),
            callers: Mutex::default(),
        }
    }

    /// Before anything is done for a request.
    pub(super) fn enter(&self, peer: Option<IpAddr>) -> Result<Entered<'_>, Overload> {
        let peer = Peer::at(peer.unwrap_or(IpAddr::from([0; 4])));
        self.under_way().enter(&self.settings, peer)?;
        Ok(Entered {
            limits: self,
            peer,
            authenticated: false,
        })
    }

    /// Before anything is done for a caller that is known to be who it says, whose request entered.
    pub(super) fn admit<'a>(
        &'a self,
        mut entered: Entered<'a>,
        caller: &Caller,
        now: Instant,
    ) -> Result<Admitted<'a>, Overload> {
        entered.authenticate();
        let (who, settings) = (share_of(caller), &self.settings);
        let mut callers = self.lock();
        if callers.len() >= MAX_CALLERS && !callers.contains_key(&who) {
            callers.retain(|_, used| {
                used.refill(settings, now);
                used.in_flight > 0 || used.left < f64::from(settings.burst)
            });
        }
        let used = callers.entry(who.clone()).or_insert_with(|| Use {
            left: f64::from(settings.burst),
            at: now,
            in_flight: 0,
        });
        used.refill(settings, now);
        if used.in_flight >= settings.in_flight {
            let limit = settings.in_flight;
            return Err(Overload::InFlight { who, limit });
        }
        if used.left < 1.0 {
            let (rate, burst) = (settings.rate, settings.burst);
            return Err(Overload::Rate { who, rate, burst });
        }
        used.left -= 1.0;
        used.in_flight += 1;
        drop(callers);
        Ok(Admitted {
            limits: self,
            who,
            _entered: entered,
        })
    }

    fn under_way(&self) -> MutexGuard<'_, UnderWay> {
        self.under_way.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Use>> {
        self.callers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whose share a call counts against: the account's on the node, so that nobody can use up another's.
fn share_of(caller: &Caller) -> String {
    match (&caller.node, &caller.pod) {
        (Some(node), _) => format!("{} on {}", caller.account, node.name),
        (None, Some(pod)) => format!("{} in {}", caller.account, pod.name),
        (None, None) => caller.account.to_string(),
    }
}

/// A request under way.
pub(super) struct Entered<'a> {
    limits: &'a Limits,
    peer: Peer,
    authenticated: bool,
}

impl Entered<'_> {
    fn authenticate(&mut self) {
        if !std::mem::replace(&mut self.authenticated, true) {
            self.limits.under_way().authenticate(&self.limits.settings, self.peer);
        }
    }
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        // What ends without it is no longer in the pool either.
        self.authenticate();
        self.limits.under_way().leave(self.peer);
    }
}

/// A caller's request under way.
pub(super) struct Admitted<'a> {
    limits: &'a Limits,
    who: String,
    _entered: Entered<'a>,
}

impl Drop for Admitted<'_> {
    fn drop(&mut self) {
        if let Some(used) = self.limits.lock().get_mut(&self.who) {
            used.in_flight = used.in_flight.saturating_sub(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::token::Bound;
    use super::*;

    fn caller(account: &str, node: &str) -> Caller {
        Caller {
            account: account.parse().unwrap(),
            pod: None,
            node: Some(Bound {
                name: node.into(),
                uid: String::new(),
            }),
        }
    }

    fn limits() -> Limits {
        Limits::new(LimitSettings {
            rate: 10,
            burst: 3,
            in_flight: 2,
            all_in_flight: 4,
            of_address: 3,
            ..LimitSettings::default()
        })
    }

    fn admit<'a>(limits: &'a Limits, caller: &Caller, now: Instant) -> Result<Admitted<'a>, Overload> {
        limits.admit(limits.enter(None)?, caller, now)
    }

    fn peer(number: u8) -> IpAddr {
        [10, 0, 0, number].into()
    }

    #[test]
    fn a_quiet_caller_has_its_burst_and_a_busy_one_its_rate() {
        let (limits, one, start) = (limits(), caller("a/b", "one"), Instant::now());
        let at = |ms| start + Duration::from_millis(ms);
        let ask = |ms| admit(&limits, &one, at(ms)).map(drop);
        for _ in 0..3 {
            assert!(ask(0).is_ok());
        }
        let Err(refused) = ask(0) else { panic!() };
        let said = refused.to_string();
        assert!(
            said.contains("a/b on one") && said.contains("10 requests a second") && said.contains("3 at once"),
            "{said}"
        );
        assert!(ask(99).is_err());
        assert!(ask(101).is_ok());
        assert!(ask(102).is_err());
        // However long it was quiet, and a clock that seems to go back gives nothing.
        for (ms, granted) in [
            (60_000, true),
            (60_000, true),
            (60_000, true),
            (60_000, false),
            (59_000, false),
        ] {
            assert_eq!(ask(ms).is_ok(), granted, "{ms}");
        }
    }

    #[test]
    fn one_callers_requests_take_nothing_from_another() {
        let (limits, now) = (limits(), Instant::now());
        let one = caller("a/b", "one");
        let _held = [(); 2].map(|()| admit(&limits, &one, now).ok().unwrap());
        assert_eq!(
            admit(&limits, &one, now).err(),
            Some(Overload::InFlight {
                who: "a/b on one".into(),
                limit: 2
            })
        );
        // Another node; and another account that names the same node.
        assert!(admit(&limits, &caller("a/b", "two"), now).is_ok());
        assert!(admit(&limits, &caller("x/y", "one"), now).is_ok());
        drop(_held);
        assert!(admit(&limits, &one, now).is_ok());
    }

    #[test]
    fn all_together_have_a_limit_too() {
        let limits = limits();
        let [one, two] = [1, 2].map(peer);
        let mut held: Vec<_> = (0..3).map(|_| limits.enter(Some(one)).ok().unwrap()).collect();
        let full = Overload::Address {
            address: Peer::at(one),
            limit: 3,
        };
        assert_eq!(limits.enter(Some(one)).err(), Some(full));
        held.push(limits.enter(Some(two)).ok().unwrap());
        assert_eq!(limits.enter(Some(two)).err(), Some(Overload::Busy(4)));
        drop(held);
        assert!(limits.enter(Some(one)).is_ok());
        assert!(limits.under_way().of_peers.is_empty());
    }

    #[test]
    fn whoever_is_not_authenticated_has_a_smaller_pool_and_leaves_each_address_its_own_and_all_callers_theirs() {
        let limits = Limits::new(LimitSettings {
            unauthenticated: 5,
            unauthenticated_of_address: 2,
            of_address: 6,
            all_in_flight: 20,
            ..LimitSettings::default()
        });
        let counted = || {
            let under_way = limits.under_way();
            (under_way.all, under_way.pooled)
        };
        let mut held = Vec::new();
        // How many of ten are let in, and why the others are not.
        for (from, granted, word) in [
            (peer(1), 6, "address"),
            (peer(2), 3, "unauthenticated"),
            (peer(3), 2, "unauthenticated"),
            ("2001:db8::1".parse().unwrap(), 2, "unauthenticated"),
            ("2001:db8::2".parse().unwrap(), 0, "unauthenticated"),
        ] {
            let (entered, refused): (Vec<_>, Vec<_>) =
                (0..10).map(|_| limits.enter(Some(from))).partition(Result::is_ok);
            assert_eq!(entered.len(), granted, "{from}");
            assert!(
                refused
                    .iter()
                    .all(|why| why.as_ref().is_err_and(|why| why.word() == word)),
                "{from}"
            );
            held.extend(entered.into_iter().filter_map(Result::ok));
        }
        assert_eq!(counted(), (13, 5));
        // Those that are authenticated take nothing of the pool, however many they are.
        let (one, now) = (caller("a/b", "one"), Instant::now());
        let known: Vec<_> = (0..6)
            .map(|_| {
                let entered = limits.enter(Some(peer(4))).unwrap();
                limits.admit(entered, &one, now).unwrap()
            })
            .collect();
        assert_eq!(counted(), (19, 5));
        // Turned away after it was authenticated, or ended before: nothing is left of either.
        drop(held);
        assert_eq!(counted(), (6, 0));
        drop(known);
        let under_way = limits.under_way();
        assert!(under_way.all == 0 && under_way.of_peers.is_empty());
    }

    #[test]
    fn callers_that_are_idle_are_forgotten() {
        let limits = Limits::new(LimitSettings::default());
        let start = Instant::now();
        for number in 0..MAX_CALLERS {
            let _ = admit(&limits, &caller("a/b", &number.to_string()), start);
        }
        let _ = admit(&limits, &caller("a/b", "late"), start + Duration::from_secs(60));
        assert_eq!(limits.lock().len(), 1);
    }
}
