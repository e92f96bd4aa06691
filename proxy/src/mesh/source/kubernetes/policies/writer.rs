//! Puts what there is to say about policies on the objects: a condition in their status, and an event.
//!
//! One program of the cluster does this, not every node's. Several at a time do no harm: who finds the condition as it
//! is to be writes nothing, and only who wrote it makes an event.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::jiff::{Timestamp, Unit};
use kube::api::{Api, ApiResource, DynamicObject, Patch, PatchParams};
use kube::{Client, Error};
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio::time::Instant;
use tracing::{debug, warn};

use super::object::API_VERSION;
use super::report::{Report, State};
use super::{Conversion, PolicyConversion, PolicyKind};
use crate::mesh::source::kubernetes::api::Object;
use crate::mesh::source::kubernetes::events::{Event, Events, Regarding};
use crate::mesh::source::kubernetes::follow::{self, Follower};
use crate::mesh::source::kubernetes::health::Health;
use crate::mesh::source::kubernetes::hook::named;
use crate::mesh::source::kubernetes::kind::Kind;

/// How often a write is tried against changes that come in between.
const ATTEMPTS: usize = 4;
/// How long after a failure the reports that could not be written are tried again.
const RETRY: Duration = Duration::from_secs(10);
/// A policy's object: its kind, namespace and name.
type Named = (PolicyKind, Arc<str>, Arc<str>);

/// The namespace and name of an object of a kind.
type Name = (Arc<str>, Arc<str>);

/// Watches both kinds of policies in all namespaces and puts on each object what became of it, for as long as the future is
/// polled. It may be dropped at any time: what is not written yet is found again.
pub async fn report_policies(client: Client, root_namespace: &str, events: Events) {
    let (told, heard) = mpsc::channel(64);
    let health = Health::new(None);
    let [first, second] =
        Kind::POLICIES.map(|kind| Follower::new(client.clone(), kind, told.clone(), health.clone()).run());
    tokio::join!(first, second, report(client, root_namespace, events, heard));
}

async fn report(client: Client, root_namespace: &str, events: Events, mut heard: mpsc::Receiver<follow::Event>) {
    let mut known = Known {
        conversion: Conversion::reporting(root_namespace),
        waiting: HashMap::new(),
        listed: HashMap::new(),
    };
    let mut retry_at = Instant::now();
    loop {
        tokio::select! {
            event = heard.recv() => match event {
                None => return,
                Some(event) => known.apply(event),
            },
            () = tokio::time::sleep_until(retry_at), if !known.waiting.is_empty() => {}
        }
        while let Ok(event) = heard.try_recv() {
            known.apply(event);
        }
        for report in known.conversion.take_reports() {
            let metadata = &report.metadata;
            let named = (report.kind, Arc::clone(&metadata.namespace), Arc::clone(&metadata.name));
            known.waiting.insert(named, report);
        }
        let mut failed = HashMap::new();
        for (named, report) in known.waiting.drain() {
            if let Err(error) = write(&client, &report, &events).await {
                let (kind, namespace, name) = (named.0.as_str(), &named.1, &named.2);
                warn!(kind, %namespace, %name, %error, "a policy's status was not written, trying again");
                failed.insert(named, report);
            }
        }
        known.waiting = failed;
        retry_at = Instant::now() + RETRY;
    }
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

/// What is known of the objects, and the reports on them that wait to be written.
struct Known {
    conversion: Conversion,
    waiting: HashMap<Named, Report>,
    /// What a list that is under way has named so far.
    listed: HashMap<PolicyKind, HashSet<Name>>,
}

impl Known {
    fn apply(&mut self, event: follow::Event) {
        match event {
            follow::Event::ListBegins(kind) => {
                if let Some(kind) = kind.policy() {
                    self.listed.insert(kind, HashSet::new());
                }
            }
            follow::Event::Set(kind, objects) => {
                for object in objects {
                    if let (Some(kind), Object::Json(object)) = (kind.policy(), object) {
                        self.set(kind, *object);
                    }
                }
            }
            follow::Event::Gone(kind, object) => {
                if let (Some(kind), Object::Json(object)) = (kind.policy(), object)
                    && let Ok((namespace, name)) = named(&object)
                {
                    self.remove(kind, namespace, name);
                }
            }
            follow::Event::ListEnds(kind) => {
                let Some(kind) = kind.policy() else { return };
                let listed = self.listed.remove(&kind).unwrap_or_default();
                for known in self.conversion.names(kind) {
                    if !listed.contains(&known) {
                        self.remove(kind, &known.0, &known.1);
                    }
                }
            }
        }
    }

    fn set(&mut self, kind: PolicyKind, object: Value) {
        if let (Some(listed), Ok((namespace, name))) = (self.listed.get_mut(&kind), named(&object)) {
            listed.insert((namespace.into(), name.into()));
        }
        self.conversion.set(kind, object);
    }

    fn remove(&mut self, kind: PolicyKind, namespace: &str, name: &str) {
        self.conversion.remove(kind, namespace, name);
        self.waiting.remove(&(kind, namespace.into(), name.into()));
    }
}
