//! Puts what there is to say about policies on the objects: a condition in their status, and an event.
//!
//! One program of the cluster does this, not every node's. Several at a time do no harm: who finds the condition as it
//! is to be writes nothing, and only who wrote it makes an event.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use k8s_openapi::jiff::{Timestamp, Unit};
use kube::api::{Api, ApiResource, DynamicObject, ListParams, Patch, PatchParams, WatchEvent, WatchParams};
use kube::{Client, Error};
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio::time::Instant;
use tracing::{debug, warn};

use super::object::API_VERSION;
use super::report::{Report, State};
use super::{Conversion, PolicyConversion, PolicyKind};
use crate::mesh::source::kubernetes::events::{Event, Events, Regarding};

/// The pause before an API that did not answer, or has no such kind, is asked again: first, and at most.
const PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// How often a write is tried against changes that come in between.
const ATTEMPTS: usize = 4;
/// How long after a failure the reports that could not be written are tried again.
const RETRY: Duration = Duration::from_secs(10);
/// For how long one watch is held, in seconds; the API allows less than 295 for such requests.
const WATCH_SECONDS: u32 = 290;

/// Watches both kinds of policies in all namespaces and puts on each object what became of it, for as long as the future is
/// polled. It may be dropped at any time: what is not written yet is found again.
pub async fn report_policies(client: Client, root_namespace: &str, events: Events) {
    let (changes, mut heard) = mpsc::channel(64);
    let watches = [PolicyKind::AuthorizationPolicy, PolicyKind::PeerAuthentication]
        .map(|kind| follow(client.clone(), kind, changes.clone()));
    let writing = async {
        let mut conversion = Conversion::reporting(root_namespace);
        let mut waiting: HashMap<(PolicyKind, Arc<str>, Arc<str>), Report> = HashMap::new();
        let mut retry_at = Instant::now();
        loop {
            tokio::select! {
                change = heard.recv() => match change {
                    None => return,
                    Some(change) => change.apply(&mut conversion, &mut waiting),
                },
                () = tokio::time::sleep_until(retry_at), if !waiting.is_empty() => {}
            }
            while let Ok(change) = heard.try_recv() {
                change.apply(&mut conversion, &mut waiting);
            }
            for report in conversion.take_reports() {
                let metadata = &report.metadata;
                let named = (report.kind, Arc::clone(&metadata.namespace), Arc::clone(&metadata.name));
                waiting.insert(named, report);
            }
            let mut failed = HashMap::new();
            for (named, report) in waiting.drain() {
                if let Err(error) = write(&client, &report, &events).await {
                    let (kind, namespace, name) = (named.0.as_str(), &named.1, &named.2);
                    warn!(kind, %namespace, %name, %error, "a policy's status was not written, trying again");
                    failed.insert(named, report);
                }
            }
            waiting = failed;
            retry_at = Instant::now() + RETRY;
        }
    };
    let [first, second] = watches;
    tokio::join!(first, second, writing);
}

/// The kind as the API's client knows it.
fn resource(kind: PolicyKind) -> ApiResource {
    let (group, version) = API_VERSION.split_once('/').unwrap_or(("", API_VERSION));
    ApiResource {
        group: group.to_owned(),
        version: version.to_owned(),
        api_version: API_VERSION.to_owned(),
        kind: kind.as_str().to_owned(),
        plural: kind.plural().to_owned(),
    }
}

/// Writes the condition where it is not there yet, and says so by an event where the policy is not enforced as written.
async fn write(client: &Client, report: &Report, events: &Events) -> Result<(), Error> {
    let metadata = &report.metadata;
    let api: Api<DynamicObject> = Api::namespaced_with(client.clone(), &metadata.namespace, &resource(report.kind));
    for _ in 0..ATTEMPTS {
        let Some(object) = found(api.get_opt(&metadata.name).await)? else {
            return Ok(());
        };
        let stale = object.metadata.uid.as_deref() != Some(&*metadata.uid)
            || object
                .metadata
                .generation
                .is_some_and(|generation| generation > metadata.generation);
        // A report on what the object is now is on its way.
        if stale {
            return Ok(());
        }
        let existing = object.data.pointer("/status/conditions").and_then(Value::as_array);
        let now = Timestamp::now().round(Unit::Second).unwrap_or_default().to_string();
        let Some(conditions) = report.conditions(existing.map_or(&[], Vec::as_slice), &now) else {
            return Ok(());
        };
        // The list is written whole, so not over a change that has not been seen.
        let patch = json!({
            "metadata": {"resourceVersion": object.metadata.resource_version},
            "status": {"conditions": conditions},
        });
        let patched = api
            .patch_status(&metadata.name, &PatchParams::default(), &Patch::Merge(&patch))
            .await;
        match patched {
            Ok(_) => {
                announce(report, events);
                return Ok(());
            }
            Err(Error::Api(status)) if status.code == 409 => continue,
            // The object is gone, or its definition has no status to write; the next look tells which.
            Err(Error::Api(status)) if status.code == 404 => {
                if found(api.get_opt(&metadata.name).await)?.is_some() {
                    announce(report, events);
                }
                return Ok(());
            }
            Err(error) => return Err(error),
        }
    }
    debug!(name = %metadata.name, "a policy's status changes too often to be written now");
    Ok(())
}

/// A definition that is gone has no objects.
fn found<T>(result: Result<Option<T>, Error>) -> Result<Option<T>, Error> {
    match result {
        Err(Error::Api(status)) if status.code == 404 => Ok(None),
        other => other,
    }
}

fn announce(report: &Report, events: &Events) {
    let reason = match report.state() {
        State::Accepted => return,
        State::PartlyApplied => "PolicyPartlyApplied",
        State::Ignored => "PolicyIgnored",
        State::Invalid => "PolicyInvalid",
    };
    let regarding = Regarding {
        api_version: API_VERSION,
        kind: report.kind.as_str(),
        namespace: Arc::clone(&report.metadata.namespace),
        name: Arc::clone(&report.metadata.name),
        uid: Arc::clone(&report.metadata.uid),
    };
    events.emit(Event::warning(regarding, reason, "Apply", report.message()));
}

enum Change {
    /// All objects of a kind, each as JSON.
    All(PolicyKind, Vec<Value>),
    Set(PolicyKind, Value),
    Gone(PolicyKind, String, String),
}

impl Change {
    fn apply(self, conversion: &mut Conversion, waiting: &mut HashMap<(PolicyKind, Arc<str>, Arc<str>), Report>) {
        match self {
            Self::Set(kind, object) => {
                conversion.set(kind, object);
            }
            Self::Gone(kind, namespace, name) => {
                conversion.remove(kind, &namespace, &name);
                waiting.remove(&(kind, namespace.into(), name.into()));
            }
            Self::All(kind, objects) => {
                let named = |object: &Value| {
                    let text = |field: &str| object["metadata"][field].as_str().unwrap_or_default().to_owned();
                    (text("namespace"), text("name"))
                };
                let there: std::collections::HashSet<_> = objects.iter().map(named).collect();
                for (namespace, name) in conversion.names(kind) {
                    let name = (namespace.to_string(), name.to_string());
                    if !there.contains(&name) {
                        conversion.remove(kind, &name.0, &name.1);
                    }
                }
                for object in objects {
                    conversion.set(kind, object);
                }
            }
        }
    }
}

/// Lists and watches a kind for good.
async fn follow(client: Client, kind: PolicyKind, changes: mpsc::Sender<Change>) {
    let api: Api<DynamicObject> = Api::all_with(client, &resource(kind));
    let mut pause = PAUSE;
    loop {
        match list_and_watch(&api, kind, &changes).await {
            Ok(()) => pause = PAUSE,
            // The kind is not defined in this cluster, or not yet.
            Err(Error::Api(status)) if status.code == 404 => {
                pause = LONGEST_PAUSE;
                if changes.send(Change::All(kind, Vec::new())).await.is_err() {
                    return;
                }
            }
            Err(error) => {
                warn!(kind = kind.as_str(), %error, "policies are not watched for reports, trying again");
                pause = (pause * 2).min(LONGEST_PAUSE);
            }
        }
        if changes.is_closed() {
            return;
        }
        tokio::time::sleep(pause.mul_f64(0.5 + fastrand::f64())).await;
    }
}

async fn list_and_watch(
    api: &Api<DynamicObject>,
    kind: PolicyKind,
    changes: &mpsc::Sender<Change>,
) -> Result<(), Error> {
    let json = |object: DynamicObject| serde_json::to_value(object).map_err(Error::SerdeError);
    let list = api.list(&ListParams::default()).await?;
    let mut version = list.metadata.resource_version.unwrap_or_default();
    let objects = list.items.into_iter().map(json).collect::<Result<_, _>>()?;
    let mut send = changes.send(Change::All(kind, objects)).await;
    while send.is_ok() {
        let params = WatchParams::default().timeout(WATCH_SECONDS);
        let mut events = std::pin::pin!(api.watch(&params, &version).await?);
        let mut heard = false;
        while let (Ok(()), Some(event)) = (&send, events.next().await) {
            heard = true;
            let change = match event? {
                WatchEvent::Bookmark(bookmark) => {
                    version = bookmark.metadata.resource_version;
                    continue;
                }
                // Too old a version, and whatever else: the list begins anew.
                WatchEvent::Error(_) => return Ok(()),
                WatchEvent::Added(object) | WatchEvent::Modified(object) => {
                    version = object.metadata.resource_version.clone().unwrap_or_default();
                    Change::Set(kind, json(object)?)
                }
                WatchEvent::Deleted(object) => {
                    let metadata = object.metadata;
                    version = metadata.resource_version.unwrap_or_default();
                    let (namespace, name) = (metadata.namespace, metadata.name);
                    Change::Gone(kind, namespace.unwrap_or_default(), name.unwrap_or_default())
                }
            };
            send = changes.send(change).await;
        }
        // A watch that ends at once would be asked for as fast as it ends.
        if !heard {
            tokio::time::sleep(PAUSE).await;
        }
    }
    Ok(())
}
