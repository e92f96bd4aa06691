//! One set of labels and its counters; and the table that finds it for a connection.
//!
//! Istio's metrics carry some twenty-five labels. They are put together once for each pair of workloads; after that a
//! connection finds its counters by the records' addresses in memory.

use std::collections::{HashMap, HashSet};
use std::ptr;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use prometheus_client::encoding::{EncodeLabel, EncodeLabelSet, LabelSetEncoder};

use super::flags::ResponseFlag;
use super::reporter_name;
use crate::dataplane::record::{Connection, Path, Peer, Reporter};
use crate::identity::SpiffeId;
use crate::mesh::{Service, Workload};

/// Combinations of records that are remembered; all are forgotten when there are more.
const MAX_ROUTES: usize = 4096;
/// How long a series outlives its workload.
const GRACE: Duration = Duration::from_secs(600);
/// Istio's word for what is not known.
const UNKNOWN: &str = "unknown";
/// In place of a workload's name, where there are too many series.
const OVERFLOW: &str = "overflow";

/// The counters of one set of labels.
#[derive(Debug)]
pub(super) struct Series {
    pub(super) labels: Labels,
    pub(super) opened: AtomicU64,
    pub(super) sent: AtomicU64,
    pub(super) received: AtomicU64,
    pub(super) closed: [AtomicU64; ResponseFlag::ALL.len()],
    pub(super) failed: [AtomicU64; ResponseFlag::ALL.len()],
}

/// What tells one series from another.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Labels {
    reporter: Reporter,
    path: Path,
    source: PeerLabels,
    destination: PeerLabels,
    service: Option<ServiceLabels>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
struct PeerLabels {
    workload: Option<WorkloadLabels>,
    principal: Option<SpiffeId>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct WorkloadLabels {
    name: Box<str>,
    namespace: Arc<str>,
    canonical_service: Box<str>,
    canonical_revision: Box<str>,
    region: Box<str>,
    zone: Arc<str>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct ServiceLabels {
    hostname: Arc<str>,
    name: Arc<str>,
    namespace: Arc<str>,
}

/// A connection's records by their addresses in memory. Those of identities differ with each handshake: they go by value.
#[derive(Debug, PartialEq, Eq, Hash)]
struct RouteKey {
    reporter: Reporter,
    path: Path,
    source: usize,
    destination: usize,
    service: usize,
    source_identity: Option<SpiffeId>,
    destination_identity: Option<SpiffeId>,
}

/// The series of a route. Keeps the records alive, so that no other record comes to lie at their addresses.
struct Route {
    series: Arc<Series>,
    _source: Option<Arc<Workload>>,
    _destination: Option<Arc<Workload>>,
    _service: Option<Arc<Service>>,
}

/// All series, in bounded number.
pub(super) struct SeriesTable {
    inner: Mutex<Inner>,
    max_series: usize,
}

#[derive(Default)]
struct Inner {
    routes: HashMap<RouteKey, Route>,
    series: HashMap<Labels, Arc<Series>>,
    /// Since when a series' workload has been gone.
    missing: HashMap<Labels, Instant>,
}

impl SeriesTable {
    pub(super) fn new(max_series: usize) -> Self {
        Self {
            inner: Mutex::default(),
            max_series,
        }
    }

    /// The series in which a connection is counted.
    pub(super) fn resolve(&self, connection: &Connection) -> Arc<Series> {
        let key = RouteKey::of(connection);
        let mut inner = self.lock();
        if let Some(route) = inner.routes.get(&key) {
            return Arc::clone(&route.series);
        }
        let mut labels = Labels::of(connection);
        if inner.series.len() >= self.max_series && !inner.series.contains_key(&labels) {
            labels = labels.into_overflow();
        }
        let series = match inner.series.get(&labels) {
            Some(series) => Arc::clone(series),
            None => {
                let series = Arc::new(Series::new(labels.clone()));
                inner.series.insert(labels, Arc::clone(&series));
                series
            }
        };
        if inner.routes.len() >= MAX_ROUTES {
            inner.routes.clear();
        }
        let route = Route {
            series: Arc::clone(&series),
            _source: connection.source.workload.clone(),
            _destination: connection.destination.workload.clone(),
            _service: connection.service.clone(),
        };
        inner.routes.insert(key, route);
        series
    }

    /// All series.
    pub(super) fn all(&self) -> Vec<Arc<Series>> {
        self.lock().series.values().cloned().collect()
    }

    /// Drops each series that names a workload which has been gone for the grace period and has no open connection.
    /// Also lets go of all records of earlier states of the mesh.
    pub(super) fn forget_missing<'a>(&self, existing: impl IntoIterator<Item = &'a Arc<Workload>>, now: Instant) {
        let existing: HashSet<(&str, &str)> = existing
            .into_iter()
            .map(|workload| (&*workload.namespace, workload_name(workload)))
            .collect();
        let mut inner = self.lock();
        let Inner {
            routes,
            series,
            missing,
        } = &mut *inner;
        routes.clear();
        let mut still_missing = HashMap::new();
        series.retain(|labels, series| {
            if labels
                .workloads()
                .all(|workload| existing.contains(&(&*workload.namespace, &*workload.name)))
            {
                return true;
            }
            let since = missing.get(labels).copied().unwrap_or(now);
            // Besides this table only open connections hold a series.
            if now.saturating_duration_since(since) >= GRACE && Arc::strong_count(series) == 1 {
                return false;
            }
            still_missing.insert(labels.clone(), since);
            true
        });
        *missing = still_missing;
    }

    /// A panic elsewhere does not make the table wrong.
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Series {
    fn new(labels: Labels) -> Self {
        Self {
            labels,
            opened: AtomicU64::default(),
            sent: AtomicU64::default(),
            received: AtomicU64::default(),
            closed: Default::default(),
            failed: Default::default(),
        }
    }
}

impl RouteKey {
    fn of(connection: &Connection) -> Self {
        let address = |peer: &Peer| {
            peer.workload
                .as_ref()
                .map_or(0, |workload| Arc::as_ptr(workload).addr())
        };
        Self {
            reporter: connection.reporter,
            path: connection.path,
            source: address(&connection.source),
            destination: address(&connection.destination),
            service: connection
                .service
                .as_deref()
                .map_or(0, |service| ptr::from_ref(service).addr()),
            source_identity: connection.source.identity.clone(),
            destination_identity: connection.destination.identity.clone(),
        }
    }
}

impl Labels {
    fn of(connection: &Connection) -> Self {
        Self {
            reporter: connection.reporter,
            path: connection.path,
            source: PeerLabels::of(&connection.source),
            destination: PeerLabels::of(&connection.destination),
            service: connection.service.as_deref().map(|service| ServiceLabels {
                hostname: Arc::clone(&service.hostname),
                name: Arc::clone(&service.name),
                namespace: Arc::clone(&service.namespace),
            }),
        }
    }

    /// The series in which all are counted that came too late to have their own.
    fn into_overflow(self) -> Self {
        let overflow = || PeerLabels {
            workload: Some(WorkloadLabels {
                name: OVERFLOW.into(),
                namespace: UNKNOWN.into(),
                canonical_service: UNKNOWN.into(),
                canonical_revision: UNKNOWN.into(),
                region: UNKNOWN.into(),
                zone: UNKNOWN.into(),
            }),
            principal: None,
        };
        Self {
            source: overflow(),
            destination: overflow(),
            service: None,
            ..self
        }
    }

    fn workloads(&self) -> impl Iterator<Item = &WorkloadLabels> {
        [&self.source, &self.destination]
            .into_iter()
            .filter_map(|peer| peer.workload.as_ref())
            .filter(|workload| &*workload.name != OVERFLOW)
    }
}

impl PeerLabels {
    fn of(peer: &Peer) -> Self {
        let workload = peer.workload.as_deref().map(|workload| WorkloadLabels {
            name: workload_name(workload).into(),
            namespace: Arc::clone(&workload.namespace),
            canonical_service: workload.canonical_name().into(),
            canonical_revision: workload.canonical_revision().into(),
            region: workload
                .labels
                .get("topology.kubernetes.io/region")
                .map_or(UNKNOWN, String::as_str)
                .into(),
            zone: if workload.zone.is_empty() {
                UNKNOWN.into()
            } else {
                Arc::clone(&workload.zone)
            },
        });
        Self {
            workload,
            principal: peer.identity.clone(),
        }
    }
}

/// The name that a pod's whole set shares: its Deployment's, StatefulSet's, DaemonSet's or Job's, as far as the labels
/// that Kubernetes puts on pods tell; else its own. Keeps metrics from growing with each new pod.
pub fn workload_name(workload: &Workload) -> &str {
    let name = &*workload.name;
    let label = |key: &str| workload.labels.get(key).map(String::as_str);
    let without_last = || name.rsplit_once('-').map_or(name, |(set, _)| set);
    if let Some(hash) = label("pod-template-hash") {
        // <deployment>-<hash>-<random>
        return without_last()
            .strip_suffix(hash)
            .and_then(|set| set.strip_suffix('-'))
            .unwrap_or(name);
    }
    if let Some(job) = label("batch.kubernetes.io/job-name").or_else(|| label("job-name")) {
        return job;
    }
    // Both DaemonSets and StatefulSets have it; the rest of the name is a random word or a number.
    if label("controller-revision-hash").is_some() {
        return without_last();
    }
    name
}

/// A series' labels together with those that differ among its counters.
pub(super) struct LabelSet<'a> {
    pub(super) labels: &'a Labels,
    pub(super) cluster: &'a str,
    pub(super) flag: ResponseFlag,
}

impl EncodeLabelSet for LabelSet<'_> {
    fn encode(&self, encoder: &mut LabelSetEncoder<'_>) -> std::fmt::Result {
        const SOURCE: PeerKeys = PeerKeys {
            workload: "source_workload",
            canonical_service: "source_canonical_service",
            canonical_revision: "source_canonical_revision",
            namespace: "source_workload_namespace",
            principal: "source_principal",
            app: "source_app",
            version: "source_version",
            cluster: "source_cluster",
            region: "source_region",
            zone: "source_zone",
        };
        const DESTINATION: PeerKeys = PeerKeys {
            workload: "destination_workload",
            canonical_service: "destination_canonical_service",
            canonical_revision: "destination_canonical_revision",
            namespace: "destination_workload_namespace",
            principal: "destination_principal",
            app: "destination_app",
            version: "destination_version",
            cluster: "destination_cluster",
            region: "destination_region",
            zone: "destination_zone",
        };
        let mut put = |key: &str, value: &str| (key, value).encode(encoder.encode_label());
        let labels = self.labels;
        put("reporter", reporter_name(labels.reporter))?;
        SOURCE.encode(&labels.source, self.cluster, &mut put)?;
        DESTINATION.encode(&labels.destination, self.cluster, &mut put)?;
        let service = labels.service.as_ref();
        put(
            "destination_service",
            service.map_or(UNKNOWN, |service| &service.hostname),
        )?;
        put(
            "destination_service_name",
            service.map_or(UNKNOWN, |service| &service.name),
        )?;
        put(
            "destination_service_namespace",
            service.map_or(UNKNOWN, |service| &service.namespace),
        )?;
        put("request_protocol", "tcp")?;
        put("response_flags", self.flag.as_str())?;
        put(
            "connection_security_policy",
            if labels.path == Path::Hbone {
                "mutual_tls"
            } else {
                "none"
            },
        )?;
        put("path", labels.path.as_str())
    }
}

struct PeerKeys {
    workload: &'static str,
    canonical_service: &'static str,
    canonical_revision: &'static str,
    namespace: &'static str,
    principal: &'static str,
    app: &'static str,
    version: &'static str,
    cluster: &'static str,
    region: &'static str,
    zone: &'static str,
}

impl PeerKeys {
    fn encode(
        &self,
        peer: &PeerLabels,
        cluster: &str,
        put: &mut impl FnMut(&str, &str) -> std::fmt::Result,
    ) -> std::fmt::Result {
        let known = peer.workload.as_ref();
        let revision = known.map_or(UNKNOWN, |workload| &workload.canonical_revision);
        let service = known.map_or(UNKNOWN, |workload| &workload.canonical_service);
        put(self.workload, known.map_or(UNKNOWN, |workload| &workload.name))?;
        put(self.canonical_service, service)?;
        put(self.canonical_revision, revision)?;
        put(self.namespace, known.map_or(UNKNOWN, |workload| &workload.namespace))?;
        put(
            self.principal,
            peer.principal.as_ref().map_or(UNKNOWN, SpiffeId::as_str),
        )?;
        put(self.app, service)?;
        put(self.version, revision)?;
        put(self.cluster, if known.is_some() { cluster } else { UNKNOWN })?;
        put(self.region, known.map_or(UNKNOWN, |workload| &workload.region))?;
        put(self.zone, known.map_or(UNKNOWN, |workload| &workload.zone))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::tests::{connection, workload};

    #[test]
    fn pods_of_one_set_share_a_name() {
        for (pod, labels, expected) in [
            ("cart-7d9f-x2x4z", &[("pod-template-hash", "7d9f")][..], "cart"),
            ("cart-7d9f", &[("pod-template-hash", "7d9f")], "cart-7d9f"),
            ("db-0", &[("controller-revision-hash", "db-5f")], "db"),
            ("agent-abcde", &[("controller-revision-hash", "5f")], "agent"),
            ("sum-abcde", &[("job-name", "sum")], "sum"),
            ("alone-1", &[], "alone-1"),
        ] {
            let mut workload = workload("shop", pod, "cart");
            workload.labels = labels
                .iter()
                .map(|(key, value)| ((*key).into(), (*value).into()))
                .collect();
            assert_eq!(workload_name(&workload), expected, "{pod}");
        }
    }

    #[test]
    fn the_same_records_lead_to_the_same_series_and_so_do_equal_ones() {
        let table = SeriesTable::new(100);
        let first = connection(1);
        let series = table.resolve(&first);
        assert!(Arc::ptr_eq(&series, &table.resolve(&first)));
        // The mesh was read again: the same workloads, other records.
        assert!(Arc::ptr_eq(&series, &table.resolve(&connection(2))));
        let mut other = connection(3);
        other.path = Path::Local;
        assert!(!Arc::ptr_eq(&series, &table.resolve(&other)));
        assert_eq!(table.all().len(), 2);
    }

    #[test]
    fn series_and_routes_are_bounded() {
        let table = SeriesTable::new(3);
        for n in 0..2 * MAX_ROUTES {
            let mut connection = connection(0);
            connection.source.workload = Some(workload("shop", &format!("pod-{n}"), "cart").into());
            table.resolve(&connection);
        }
        let inner = table.lock();
        assert_eq!(inner.series.len(), 4, "three of their own and one for all others");
        assert!(inner.routes.len() <= MAX_ROUTES);
    }

    #[test]
    fn a_series_outlives_its_workload_by_the_grace_period_and_its_connections() {
        let table = SeriesTable::new(100);
        let start = Instant::now();
        let held = table.resolve(&connection(1));
        let workloads = [workload("shop", "cart-1", "cart"), workload("pay", "bank-1", "bank")].map(Arc::new);
        table.forget_missing(&workloads, start);
        table.forget_missing(&workloads, start + 9 * GRACE);
        assert_eq!(table.all().len(), 1, "both workloads exist");
        table.forget_missing(&workloads[..1], start + 10 * GRACE);
        assert_eq!(table.all().len(), 1, "just gone");
        table.forget_missing(&workloads[..1], start + 11 * GRACE);
        assert_eq!(table.all().len(), 1, "a connection is open");
        drop(held);
        table.forget_missing(&workloads, start + 12 * GRACE);
        table.forget_missing(&workloads[..1], start + 13 * GRACE);
        assert_eq!(table.all().len(), 1, "it came back in between");
        table.forget_missing(&workloads[..1], start + 14 * GRACE);
        assert_eq!(table.all().len(), 0);
    }
}
