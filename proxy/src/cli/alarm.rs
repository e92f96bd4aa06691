//! Certificates that cannot be had, told to the operator before connections fail, and again while it lasts.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use tokio::time::Instant;

use crate::identity::{CertStore, IdentityState, IdentityStatus};
use crate::mesh::source::kubernetes::events::{Event, Events, Regarding};

/// How often the certificates are looked at.
const LOOK_EVERY: Duration = Duration::from_secs(10);
/// How often what lasts is told again.
const AGAIN_EVERY: Duration = Duration::from_secs(600);
/// A renewal that fails is nobody's worry before this part of the certificate's life is left.
const WORRY_BELOW: f64 = 0.25;
/// An identity without a certificate is none before so many attempts: a pod may be younger than what the CA knows.
const WORRY_AFTER: u32 = 4;
/// An authority that has been away for so long is why identities have no certificate.
const WORRY_AWAY: Duration = Duration::from_secs(30);
/// How many identities are named.
const NAMED: usize = 3;

/// What is wrong with an identity.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Alarm {
    /// Its certificate is served, ends soon, and cannot be renewed.
    Expiring,
    /// It has none that is valid, so its connections fail.
    Missing,
}

impl Alarm {
    const ALL: [Self; 2] = [Self::Expiring, Self::Missing];

    /// `away`: the authority has been for long enough to worry about whoever has no certificate.
    fn of(status: &IdentityStatus, away: bool, now: SystemTime) -> Option<Self> {
        match status.state {
            IdentityState::Expired => Some(Self::Missing),
            IdentityState::Failed if away || status.failures >= WORRY_AFTER => Some(Self::Missing),
            // It was not asked for this one, and will not be soon.
            IdentityState::Pending if away => Some(Self::Missing),
            IdentityState::Stale => {
                let (from, to) = (status.not_before?, status.not_after?);
                let life = to.duration_since(from).unwrap_or_default();
                let left = to.duration_since(now).unwrap_or_default();
                (left < life.mul_f64(WORRY_BELOW)).then_some(Self::Expiring)
            }
            IdentityState::Pending | IdentityState::Failed | IdentityState::Valid => None,
        }
    }

    /// The reason of its event.
    fn reason(self) -> &'static str {
        match self {
            Self::Expiring => "CertificateExpiring",
            Self::Missing => "CertificateMissing",
        }
    }

    /// What is said of those that have it.
    fn text(self, having: &[&IdentityStatus]) -> String {
        let named: Vec<_> = having.iter().take(NAMED).map(|status| status.id.as_str()).collect();
        let more = match having.len().saturating_sub(NAMED) {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        let why = having.iter().find_map(|status| status.last_error.as_deref());
        let what = match self {
            Self::Expiring => "the certificate ends soon and cannot be renewed",
            Self::Missing => "there is no valid certificate, so connections fail",
        };
        format!("{}{more}: {what}: {}", named.join(", "), why.unwrap_or("not known why"))
    }
}

/// What was told, and when last.
#[derive(Debug, Default)]
struct Told(BTreeMap<Alarm, (usize, Instant)>);

impl Told {
    /// What is to be said now: of an alarm, with its text, or `None` for it if it is over.
    fn take(
        &mut self,
        all: &[IdentityStatus],
        away: bool,
        now: SystemTime,
        at: Instant,
    ) -> Vec<(Alarm, Option<String>)> {
        let mut say = Vec::new();
        for alarm in Alarm::ALL {
            let having: Vec<_> = all
                .iter()
                .filter(|status| Alarm::of(status, away, now) == Some(alarm))
                .collect();
            let before = self.0.get(&alarm);
            if having.is_empty() {
                if before.is_some() {
                    self.0.remove(&alarm);
                    say.push((alarm, None));
                }
            } else if before.is_none_or(|(count, told)| having.len() > *count || at >= *told + AGAIN_EVERY) {
                self.0.insert(alarm, (having.len(), at));
                say.push((alarm, Some(alarm.text(&having))));
            }
        }
        say
    }
}

/// Looks at the certificates for good, and tells of those that cannot be had: in the log, and as events of the node.
pub(super) async fn watch(certs: CertStore, node: String, events: Events) {
    let mut told = Told::default();
    loop {
        tokio::time::sleep(LOOK_EVERY).await;
        let away = certs.stats().away.is_some_and(|away| away >= WORRY_AWAY);
        for (alarm, text) in told.take(&certs.snapshot(), away, SystemTime::now(), Instant::now()) {
            let (reason, regarding) = (alarm.reason(), Regarding::node(&node));
            let event = match text {
                Some(text) => {
                    tracing::warn!("{reason}: {text}");
                    Event::warning(regarding, reason, "Renew", text)
                }
                None => {
                    tracing::info!("{reason} is over");
                    let text = format!("{reason} is over: the certificates in question are valid again, or gone");
                    Event::normal(regarding, "CertificatesRecovered", "Renew", text)
                }
            };
            events.emit(event);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::UNIX_EPOCH;

    use super::*;
    use crate::identity::SpiffeId;

    fn at(seconds: u64) -> SystemTime {
        UNIX_EPOCH + Duration::from_secs(seconds)
    }

    fn status(name: &str, state: IdentityState, not_after: u64, failures: u32) -> IdentityStatus {
        IdentityStatus {
            id: SpiffeId::parse(&format!("spiffe://cluster.local/ns/shop/sa/{name}")).unwrap(),
            state,
            serial: None,
            issuer: None,
            root: None,
            not_before: Some(at(0)),
            not_after: Some(at(not_after)),
            next_attempt: None,
            failures,
            last_error: (failures > 0).then(|| "the CA is away".to_owned()),
            pods: 1,
        }
    }

    #[test]
    fn a_worry_is_what_will_fail_or_fails() {
        for (state, failures, away, now, alarm) in [
            (IdentityState::Valid, 0, true, 999, None),
            (IdentityState::Pending, 0, false, 0, None),
            (IdentityState::Pending, 0, true, 0, Some(Alarm::Missing)),
            (IdentityState::Stale, 9, true, 700, None),
            (IdentityState::Stale, 1, false, 760, Some(Alarm::Expiring)),
            (IdentityState::Expired, 9, false, 1001, Some(Alarm::Missing)),
            (IdentityState::Failed, 3, false, 0, None),
            (IdentityState::Failed, 1, true, 0, Some(Alarm::Missing)),
            (IdentityState::Failed, 4, false, 0, Some(Alarm::Missing)),
        ] {
            assert_eq!(
                Alarm::of(&status("a", state, 1000, failures), away, at(now)),
                alarm,
                "{state:?} at {now}, away: {away}"
            );
        }
    }

    #[test]
    fn it_is_told_when_it_begins_grows_lasts_and_ends() {
        let mut told = Told::default();
        let begin = Instant::now();
        let failing = |count: usize| -> Vec<_> {
            let all = (0..count).map(|n| status(&format!("app-{n}"), IdentityState::Expired, 1000, 7));
            all.chain([status("fine", IdentityState::Valid, 9000, 0)]).collect()
        };
        let mut say = |count: usize, seconds: u64| {
            told.take(&failing(count), false, at(2000), begin + Duration::from_secs(seconds))
        };
        assert_eq!(say(0, 0), []);
        let first = say(1, 10);
        assert_eq!(first.len(), 1);
        let text = first[0].1.as_deref().unwrap();
        assert!(
            text.contains("sa/app-0: there is no valid certificate") && text.contains("the CA is away"),
            "{text}"
        );
        assert_eq!(say(1, 20), [], "told already");
        let more = say(5, 30);
        assert!(more[0].1.as_deref().unwrap().contains("app-2 and 2 more: "), "{more:?}");
        assert_eq!(say(3, 40), []);
        assert_eq!(say(3, 630).len(), 1, "it lasts");
        assert_eq!(say(0, 640), [(Alarm::Missing, None)]);
        assert_eq!(say(0, 650), []);
    }
}
