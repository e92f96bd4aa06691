//! How much one caller may ask for, so that whatever it does there is room for the others.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use thiserror::Error;

use super::token::Caller;

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
    /// Requests from one address that are under way, whoever makes them.
    pub of_address: usize,
}

impl Default for LimitSettings {
    fn default() -> Self {
        Self {
            rate: 100,
            burst: 1000,
            in_flight: 256,
            all_in_flight: 8192,
            of_address: 512,
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
        address: IpAddr,
        /// The limit.
        limit: usize,
    },
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
    of_addresses: HashMap<IpAddr, usize>,
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
        let address = peer.unwrap_or(IpAddr::from([0; 4]));
        let (all, limit) = (self.settings.all_in_flight, self.settings.of_address);
        let mut under_way = self.under_way.lock().unwrap_or_else(PoisonError::into_inner);
        if under_way.all >= all {
            return Err(Overload::Busy(all));
        }
        let of_address = under_way.of_addresses.entry(address).or_default();
        if *of_address >= limit {
            return Err(Overload::Address { address, limit });
        }
        *of_address += 1;
        under_way.all += 1;
        drop(under_way);
        Ok(Entered { limits: self, address })
    }

    /// Before anything is done for a caller that is known to be who it says.
    pub(super) fn admit(&self, caller: &Caller, now: Instant) -> Result<Admitted<'_>, Overload> {
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
        Ok(Admitted { limits: self, who })
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
    address: IpAddr,
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        let mut under_way = self.limits.under_way.lock().unwrap_or_else(PoisonError::into_inner);
        under_way.all -= 1;
        if let Some(count) = under_way.of_addresses.get_mut(&self.address) {
            *count -= 1;
            if *count == 0 {
                under_way.of_addresses.remove(&self.address);
            }
        }
    }
}

/// A caller's request under way.
pub(super) struct Admitted<'a> {
    limits: &'a Limits,
    who: String,
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
        })
    }

    #[test]
    fn a_quiet_caller_has_its_burst_and_a_busy_one_its_rate() {
        let (limits, one, start) = (limits(), caller("a/b", "one"), Instant::now());
        let at = |ms| start + Duration::from_millis(ms);
        let ask = |ms| limits.admit(&one, at(ms)).map(drop);
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
        let _held = [limits.admit(&one, now), limits.admit(&one, now)].map(|admitted| admitted.ok().unwrap());
        assert_eq!(
            limits.admit(&one, now).err(),
            Some(Overload::InFlight {
                who: "a/b on one".into(),
                limit: 2
            })
        );
        // Another node; and another account that names the same node.
        assert!(limits.admit(&caller("a/b", "two"), now).is_ok());
        assert!(limits.admit(&caller("x/y", "one"), now).is_ok());
        drop(_held);
        assert!(limits.admit(&one, now).is_ok());
    }

    #[test]
    fn all_together_have_a_limit_too() {
        let limits = limits();
        let [one, two] = [1, 2].map(|number| IpAddr::from([10, 0, 0, number]));
        let mut held: Vec<_> = (0..3).map(|_| limits.enter(Some(one)).ok().unwrap()).collect();
        let full = Overload::Address { address: one, limit: 3 };
        assert_eq!(limits.enter(Some(one)).err(), Some(full));
        held.push(limits.enter(Some(two)).ok().unwrap());
        assert_eq!(limits.enter(Some(two)).err(), Some(Overload::Busy(4)));
        drop(held);
        assert!(limits.enter(Some(one)).is_ok());
        assert!(limits.under_way.lock().unwrap().of_addresses.is_empty());
    }

    #[test]
    fn callers_that_are_idle_are_forgotten() {
        let limits = Limits::new(LimitSettings::default());
        let start = Instant::now();
        for number in 0..MAX_CALLERS {
            let _ = limits.admit(&caller("a/b", &number.to_string()), start);
        }
        let _ = limits.admit(&caller("a/b", "late"), start + Duration::from_secs(60));
        assert_eq!(limits.lock().len(), 1);
    }
}
