//! Following one kind: a list, then a watch from its version on, then another from where that ended, for good.

use std::time::{Duration, Instant};

use kube::Client;
use tokio::sync::mpsc;
use tokio::time::sleep;

use super::api::{self, Object, Told, Watch};
use super::error::ApiError;
use super::health::Health;
use super::kind::Kind;

/// The waits after failures in a row: doubled each time, and each between half of it and the whole.
const FIRST_WAIT: Duration = Duration::from_millis(200);
const LONGEST_WAIT: Duration = Duration::from_secs(15);
/// A watch that has lasted so long has not failed at once.
const LASTING: Duration = Duration::from_secs(10);
/// How often a kind that the cluster does not have is asked for.
const ABSENT_WAIT: Duration = Duration::from_secs(20);
/// A kind that was there is taken to be gone once it has been missing for so long: an API server that starts may not know
/// its definitions yet.
const MISSING: Duration = Duration::from_secs(60);

/// What has become of a kind's objects, in order.
#[derive(Debug, PartialEq)]
pub(super) enum Event {
    /// A list begins: what is not in it until its end is gone.
    ListBegins(Kind),
    /// These are there, as they are now.
    Set(Kind, Vec<Object>),
    /// This one is gone.
    Gone(Kind, Object),
    /// The list is whole.
    ListEnds(Kind),
}

/// Follows a kind for as long as somebody listens.
pub(super) struct Follower {
    client: Client,
    kind: Kind,
    events: mpsc::Sender<Event>,
    health: Health,
    /// From where a watch may begin.
    version: Option<String>,
    wait: Duration,
    /// Whether its definition has been seen, and since when it has not.
    seen: bool,
    missing: Option<Instant>,
    /// For how long a watch may be silent.
    silence: Duration,
}

/// Nobody listens any more.
struct Unheard;

/// Why a stretch of following has ended.
enum End {
    Failed(ApiError),
    Unheard,
}

impl From<ApiError> for End {
    fn from(error: ApiError) -> Self {
        Self::Failed(error)
    }
}

impl From<Unheard> for End {
    fn from(Unheard: Unheard) -> Self {
        Self::Unheard
    }
}

impl Follower {
    pub(super) fn new(client: Client, kind: Kind, events: mpsc::Sender<Event>, health: Health) -> Self {
        health.heard(kind);
        Self {
            client,
            kind,
            events,
            health,
            version: None,
            wait: FIRST_WAIT,
            seen: false,
            missing: None,
            silence: api::SILENCE,
        }
    }

    pub(super) async fn run(mut self) {
        loop {
            let error = match self.stretch().await {
                Ok(()) => continue,
                Err(End::Unheard) => return,
                Err(End::Failed(error)) => error,
            };
            if error.is_expired() {
                tracing::debug!("{error}; listing them anew");
                self.version = None;
            } else if self.kind.is_optional() && error.is_absent() {
                self.version = None;
                if self.absent(&error).await.is_err() {
                    return;
                }
                sleep(jittered(ABSENT_WAIT)).await;
                continue;
            } else {
                self.health.failed(self.kind, &error);
            }
            sleep(jittered(self.wait)).await;
            self.wait = (self.wait * 2).min(LONGEST_WAIT);
        }
    }

    /// A list where it is needed, and a watch to its end.
    async fn stretch(&mut self) -> Result<(), End> {
        let version = match self.version.take() {
            Some(version) => version,
            None => self.list().await?,
        };
        let watch = api::watch(&self.client, self.kind, &version).await;
        // A failure leaves it where it was.
        self.version = Some(version);
        let began = Instant::now();
        let mut watch = watch?;
        self.health.heard(self.kind);
        self.health.well(self.kind);
        let ended = self.follow(&mut watch).await;
        if began.elapsed() >= LASTING {
            self.wait = FIRST_WAIT;
        }
        ended?;
        // One that ends at once, again and again, is no better than a failure.
        if began.elapsed() < LASTING {
            sleep(jittered(self.wait)).await;
            self.wait = (self.wait * 2).min(LONGEST_WAIT);
        }
        Ok(())
    }

    async fn list(&mut self) -> Result<String, End> {
        let (mut rest, mut begun) = (None, false);
        loop {
            let page = api::list(&self.client, self.kind, rest.as_deref()).await?;
            self.health.heard(self.kind);
            if !std::mem::replace(&mut begun, true) {
                self.seen = true;
                self.missing = None;
                self.tell(Event::ListBegins(self.kind)).await?;
            }
            self.tell(Event::Set(self.kind, page.items)).await?;
            if page.rest.is_none() {
                self.tell(Event::ListEnds(self.kind)).await?;
                return Ok(page.version);
            }
            rest = page.rest;
        }
    }

    async fn follow(&mut self, watch: &mut Watch) -> Result<(), End> {
        let malformed = |kind: Kind, reason| ApiError::Malformed {
            what: format!("watching {}", kind.name()),
            reason,
        };
        while let Some(told) = watch.next(self.silence).await? {
            self.health.heard(self.kind);
            for told in told {
                let version = match &told {
                    Told::Set(object) | Told::Gone(object) | Told::Bookmark(object) => object.version(),
                    Told::Failed { code, message } => {
                        return Err(End::Failed(ApiError::Refused {
                            what: format!("watching {}", self.kind.name()),
                            code: *code,
                            message: format!(": {message}"),
                        }));
                    }
                };
                let version = version.map_err(|reason| malformed(self.kind, reason))?;
                match told {
                    Told::Set(object) => self.tell(Event::Set(self.kind, vec![object])).await?,
                    Told::Gone(object) => self.tell(Event::Gone(self.kind, object)).await?,
                    Told::Bookmark(_) | Told::Failed { .. } => {}
                }
                self.version = Some(version);
            }
        }
        Ok(())
    }

    /// The cluster has no such definition: there are no objects.
    async fn absent(&mut self, error: &ApiError) -> Result<(), Unheard> {
        self.health.heard(self.kind);
        let since = *self.missing.get_or_insert_with(Instant::now);
        if self.seen && since.elapsed() < MISSING {
            self.health.failed(self.kind, error);
            return Ok(());
        }
        if std::mem::take(&mut self.seen) {
            tracing::warn!("{error}; there are no {} any more", self.kind.name());
        }
        self.health.well(self.kind);
        self.tell(Event::ListBegins(self.kind)).await?;
        self.tell(Event::ListEnds(self.kind)).await
    }

    async fn tell(&self, event: Event) -> Result<(), Unheard> {
        self.events.send(event).await.map_err(|_| Unheard)
    }
}

fn jittered(wait: Duration) -> Duration {
    wait.mul_f64(0.5 + fastrand::f64() / 2.0)
}

#[cfg(test)]
mod tests;
