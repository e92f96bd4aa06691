//! Kubernetes events about objects: limited in rate, aggregated, and never in the way of who has something to say.

mod backlog;
#[cfg(test)]
mod tests;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::api::events::v1::{Event as ApiEvent, EventSeries};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use k8s_openapi::jiff::Timestamp;
use kube::api::{Api, Patch, PatchParams, PostParams};
use kube::{Client, Error};
use serde_json::json;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tracing::{debug, warn};

use backlog::{Backlog, Outcome, Write};

/// How many occurrences may wait for the task that writes; what comes on top is dropped and counted.
const QUEUE: usize = 1024;
/// The longest pause after the API did not answer; the first is a second.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);
/// How long one request may take.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

/// Something that happened to an object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    /// The object.
    pub regarding: Regarding,
    /// Whether somebody should do something about it.
    pub warning: bool,
    /// Why it happened, one word in upper camel case.
    pub reason: &'static str,
    /// What was being done, one word in upper camel case.
    pub action: &'static str,
    /// The text for the reader; cut after 1,024 bytes, which is the API's limit.
    pub note: String,
}

impl Event {
    /// An event about something in order.
    pub fn normal(regarding: Regarding, reason: &'static str, action: &'static str, note: String) -> Self {
        Self {
            regarding,
            warning: false,
            reason,
            action,
            note,
        }
    }

    /// An event about something that somebody should look at.
    pub fn warning(regarding: Regarding, reason: &'static str, action: &'static str, note: String) -> Self {
        Self {
            warning: true,
            ..Self::normal(regarding, reason, action, note)
        }
    }
}

/// The object that an event is about.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Regarding {
    /// Such as `v1` or `security.istio.io/v1`.
    pub api_version: &'static str,
    /// Such as `Pod`.
    pub kind: &'static str,
    /// Empty for an object that has none.
    pub namespace: Arc<str>,
    /// Its name.
    pub name: Arc<str>,
    /// Its uid, so that one that comes again under the name is told apart; may be empty.
    pub uid: Arc<str>,
}

impl Regarding {
    /// A pod.
    pub fn pod(namespace: &str, name: &str, uid: &str) -> Self {
        Self {
            api_version: "v1",
            kind: "Pod",
            namespace: namespace.into(),
            name: name.into(),
            uid: uid.into(),
        }
    }

    /// A node. `kubectl describe node` looks for its events by the name as uid.
    pub fn node(name: &str) -> Self {
        Self {
            api_version: "v1",
            kind: "Node",
            namespace: "".into(),
            name: name.into(),
            uid: name.into(),
        }
    }
}

impl fmt::Display for Regarding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &*self.namespace {
            "" => write!(f, "{} {}", self.kind, self.name),
            namespace => write!(f, "{} {namespace}/{}", self.kind, self.name),
        }
    }
}

/// Who reports.
#[derive(Debug, Clone)]
pub struct Reporter {
    /// The kind of program, such as `mesh.adit/node`.
    pub controller: &'static str,
    /// Which of them, such as the node's name.
    pub instance: Arc<str>,
}

/// How many events went which way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counts {
    /// Events made in the API.
    pub written: u64,
    /// Occurrences that only raised the count of an event, or will.
    pub repeated: u64,
    /// Occurrences lost: over the limits, or refused by the API.
    pub dropped: u64,
}

#[derive(Debug, Default)]
struct Counters {
    written: AtomicU64,
    repeated: AtomicU64,
    dropped: AtomicU64,
}

/// The way to events, for everybody in the process. Clones are one; the task behind ends with the last.
#[derive(Debug, Clone)]
pub struct Events {
    queue: Option<mpsc::Sender<Event>>,
    counters: Arc<Counters>,
}

impl Events {
    /// Starts the task that writes, on the current runtime.
    pub fn start(client: Client, reporter: Reporter) -> Self {
        let (queue, occurrences) = mpsc::channel(QUEUE);
        let counters = Arc::<Counters>::default();
        let writer = Writer {
            client,
            reporter,
            counters: Arc::clone(&counters),
        };
        tokio::spawn(writer.run(occurrences));
        Self {
            queue: Some(queue),
            counters,
        }
    }

    /// Events that nobody writes: each counts as dropped.
    pub fn silent() -> Self {
        Self {
            queue: None,
            counters: Arc::default(),
        }
    }

    /// Says that it happened. Never waits: what the queue cannot take is dropped and counted.
    pub fn emit(&self, event: Event) {
        let taken = self.queue.as_ref().is_some_and(|queue| queue.try_send(event).is_ok());
        if !taken {
            self.counters.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// How many events went which way.
    pub fn counts(&self) -> Counts {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Counts {
            written: load(&self.counters.written),
            repeated: load(&self.counters.repeated),
            dropped: load(&self.counters.dropped),
        }
    }
}

struct Writer {
    client: Client,
    reporter: Reporter,
    counters: Arc<Counters>,
}

impl Writer {
    async fn run(self, mut occurrences: mpsc::Receiver<Event>) {
        let mut backlog = Backlog::new(Instant::now());
        let mut pause = Duration::ZERO;
        let mut not_before = Instant::now();
        loop {
            let due = backlog.next_at(Instant::now()).map(|at| at.max(not_before));
            tokio::select! {
                biased;
                occurrence = occurrences.recv() => match occurrence {
                    // Whoever had something to say is gone, and so is the process.
                    None => return,
                    Some(event) => self.take(&mut backlog, event),
                },
                () = wait_until(due) => {
                    let Some((id, write)) = backlog.next(Instant::now()) else { continue };
                    let outcome = self.write(&write).await;
                    pause = match outcome {
                        Outcome::Unanswered => (pause * 2).clamp(Duration::from_secs(1), LONGEST_PAUSE),
                        _ => Duration::ZERO,
                    };
                    not_before = Instant::now() + pause;
                    match (&outcome, &write) {
                        (Outcome::Written, Write::Create { .. }) => add(&self.counters.written, 1),
                        (Outcome::Refused, Write::Create { .. }) => add(&self.counters.dropped, 1),
                        _ => {}
                    }
                    backlog.done(&id, &write, outcome, Instant::now());
                }
            }
        }
    }

    fn take(&self, backlog: &mut Backlog, event: Event) {
        use backlog::Taken;
        match backlog.take(event, Instant::now(), Timestamp::now()) {
            Taken::New => {}
            Taken::Repeated => add(&self.counters.repeated, 1),
            Taken::Full => add(&self.counters.dropped, 1),
        }
    }

    async fn write(&self, write: &Write) -> Outcome {
        let (regarding, result) = match write {
            Write::Create {
                event,
                name,
                count,
                first,
                last,
            } => {
                let body = self.body(event, name, *count, *first, *last);
                let api = self.api(&event.regarding);
                let request = async { api.create(&PostParams::default(), &body).await.map(drop) };
                (&event.regarding, timely(request).await)
            }
            Write::Count {
                regarding,
                name,
                count,
                last,
            } => {
                let series = json!({"series": {"count": count, "lastObservedTime": MicroTime(*last)}});
                let api = self.api(regarding);
                let patch = Patch::Merge(&series);
                let request = async { api.patch(name, &PatchParams::default(), &patch).await.map(drop) };
                (regarding, timely(request).await)
            }
        };
        match result {
            Some(Ok(())) => Outcome::Written,
            // Too many requests and faults of the server pass; every other answer stays what it is.
            Some(Err(Error::Api(status))) if status.code != 429 && status.code < 500 => {
                debug!(%regarding, code = status.code, reason = %status.message, "event refused by the Kubernetes API");
                Outcome::Refused
            }
            Some(Err(error)) => {
                warn!(%regarding, %error, "event not written, trying again; is the Kubernetes API reachable?");
                Outcome::Unanswered
            }
            None => {
                warn!(%regarding, "event not written, the Kubernetes API did not answer in time; trying again");
                Outcome::Unanswered
            }
        }
    }

    /// Events live in their object's namespace; those of objects without one in `default`.
    fn api(&self, regarding: &Regarding) -> Api<ApiEvent> {
        Api::namespaced(self.client.clone(), namespace_of(regarding))
    }

    fn body(&self, event: &Event, name: &str, count: i32, first: Timestamp, last: Timestamp) -> ApiEvent {
        let Regarding {
            api_version,
            kind,
            namespace,
            name: object,
            uid,
        } = &event.regarding;
        let present = |text: &Arc<str>| Some(text.to_string()).filter(|text| !text.is_empty());
        ApiEvent {
            metadata: ObjectMeta {
                name: Some(name.to_owned()),
                namespace: Some(namespace_of(&event.regarding).to_owned()),
                ..ObjectMeta::default()
            },
            event_time: Some(MicroTime(first)),
            action: Some(event.action.to_owned()),
            reason: Some(event.reason.to_owned()),
            note: Some(cut(&event.note, 1024).to_owned()),
            type_: Some(if event.warning { "Warning" } else { "Normal" }.to_owned()),
            reporting_controller: Some(self.reporter.controller.to_owned()),
            reporting_instance: Some(cut(&self.reporter.instance, 128).to_owned()),
            regarding: Some(ObjectReference {
                api_version: Some((*api_version).to_owned()),
                kind: Some((*kind).to_owned()),
                namespace: present(namespace),
                name: present(object),
                uid: present(uid),
                ..ObjectReference::default()
            }),
            series: (count > 1).then_some(EventSeries {
                count,
                last_observed_time: MicroTime(last),
            }),
            ..ApiEvent::default()
        }
    }
}

fn add(counter: &AtomicU64, count: u64) {
    counter.fetch_add(count, Ordering::Relaxed);
}

fn namespace_of(regarding: &Regarding) -> &str {
    match &*regarding.namespace {
        "" => "default",
        namespace => namespace,
    }
}

/// The text, or as much of it as there is room for, in whole characters.
fn cut(text: &str, most: usize) -> &str {
    &text[..text.floor_char_boundary(most)]
}

async fn wait_until(due: Option<Instant>) {
    match due {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}

async fn timely<T>(request: impl Future<Output = Result<T, Error>>) -> Option<Result<T, Error>> {
    tokio::time::timeout(REQUEST_TIMEOUT, request).await.ok()
}
