//! Metrics and the access log.

mod access;
mod certificates;
mod flags;
mod line;
mod live;
mod metrics;
mod process;
mod series;
mod writer;

use std::io::{self, Write};
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant, SystemTime};

use arc_swap::ArcSwap;
use prometheus_client::encoding::{prometheus_text, text};
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use crate::dataplane::record::{Connection, End, Observer, Path, Reporter};
use crate::dataplane::{DirectConnections, Unplaced};
use crate::mesh::Workload;
use crate::mesh::source::StatusHandle;
use crate::node::Outcomes;
use crate::steer::Namespaces;
use live::LiveTable;
use series::SeriesTable;
use writer::LineWriter;

pub use access::{access_line, dry_run_line};
pub use certificates::{CertificateState, CertificateStatus, CertificateView, NoCertificates};
pub use flags::ResponseFlag;
pub use line::{LogFormat, Record, Rfc3339};
pub use series::workload_name;

/// What telemetry needs to know.
#[derive(Debug, Clone)]
pub struct TelemetrySettings {
    /// The form of the access log; none where it is off.
    pub access_log: Option<LogFormat>,
    /// The cluster's name, for the `*_cluster` labels.
    pub cluster_id: String,
    /// The greatest number of different label sets; further ones are counted together.
    pub max_series: usize,
}

impl Default for TelemetrySettings {
    fn default() -> Self {
        Self {
            access_log: Some(LogFormat::Logfmt),
            cluster_id: "Kubernetes".into(),
            max_series: 8192,
        }
    }
}

/// Which text form metrics are given in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exposition {
    /// OpenMetrics 1.0.
    OpenMetrics,
    /// Prometheus' own, 0.0.4.
    Prometheus,
}

/// The metrics of a registry as text.
pub fn encode(registry: &Registry, exposition: Exposition) -> String {
    let mut page = String::with_capacity(64 * 1024);
    let result = match exposition {
        Exposition::OpenMetrics => text::encode(&mut page, registry),
        Exposition::Prometheus => prometheus_text::encode(&mut page, registry),
    };
    if result.is_err() {
        tracing::error!("metrics could not be encoded; the page is incomplete");
    }
    page
}

/// Everything that is counted and logged of the connections of this node.
pub struct Telemetry {
    core: Arc<Core>,
    registry: Registry,
}

/// What the data path touches; shared with the registry, which reads it.
struct Core {
    cluster_id: String,
    series: SeriesTable,
    live: LiveTable,
    open: PerKind<AtomicI64>,
    dry_run_denials: [AtomicU64; 2],
    handshake: [Histogram; 2],
    /// Connections that were refused because their pod had as many as it may have.
    no_place: AtomicU64,
    /// What captures pods, and was found missing or replaced, and put right.
    repairs: AtomicU64,
    log: Option<LineWriter>,
    certificates: Arc<dyn CertificateView>,
    /// Those of which the kernel tells only the end by itself.
    direct: OnceLock<Arc<DirectConnections>>,
    /// What the kernel's maps have no room for.
    unplaced: OnceLock<Arc<ArcSwap<Unplaced>>>,
    /// Which the kernel alone counts.
    startup: OnceLock<Namespaces>,
    /// How this node's pods stand.
    pods: OnceLock<Outcomes>,
    /// How the source of truth is doing.
    source: OnceLock<StatusHandle>,
    started: SystemTime,
}

type PerKind<T> = [[T; 4]; 2];

impl Telemetry {
    /// Starts counting, and the thread that writes the access log to standard output. Fails only where that thread
    /// cannot be had.
    pub fn new(settings: TelemetrySettings, certificates: Arc<dyn CertificateView>) -> io::Result<Arc<Self>> {
        Self::with_output(settings, certificates, Box::new(io::stdout()))
    }

    /// [`Telemetry::new`], with the access log going elsewhere.
    pub fn with_output(
        settings: TelemetrySettings,
        certificates: Arc<dyn CertificateView>,
        output: Box<dyn Write + Send>,
    ) -> io::Result<Arc<Self>> {
        let log = settings
            .access_log
            .map(|format| LineWriter::spawn(format, output))
            .transpose()?;
        let core = Arc::new(Core {
            cluster_id: settings.cluster_id,
            series: SeriesTable::new(settings.max_series),
            live: LiveTable::default(),
            open: Default::default(),
            dry_run_denials: Default::default(),
            handshake: [metrics::handshake_histogram(), metrics::handshake_histogram()],
            no_place: AtomicU64::new(0),
            repairs: AtomicU64::new(0),
            log,
            certificates,
            direct: OnceLock::new(),
            unplaced: OnceLock::new(),
            startup: OnceLock::new(),
            pods: OnceLock::new(),
            source: OnceLock::new(),
            started: SystemTime::now(),
        });
        let mut registry = Registry::default();
        registry.register_collector(Box::new(metrics::Metrics(Arc::clone(&core))));
        Ok(Arc::new(Self { core, registry }))
    }

    /// Counts and shows these too.
    pub fn watch_direct(&self, direct: Arc<DirectConnections>) {
        // Told once, at start.
        let _ = self.core.direct.set(direct);
    }

    /// Shows what the kernel's maps have no room for.
    pub fn watch_unplaced(&self, unplaced: Arc<ArcSwap<Unplaced>>) {
        // Told once, at start.
        let _ = self.core.unplaced.set(unplaced);
    }

    /// Shows how often pods connected that nobody had looked at yet.
    pub fn watch_startup(&self, namespaces: Namespaces) {
        // Told once, at start.
        let _ = self.core.startup.set(namespaces);
    }

    /// Counts what was not in its place, and has been put right.
    pub fn put_right(&self, count: usize) {
        self.core.repairs.fetch_add(count as u64, Ordering::Relaxed);
    }

    /// Shows how this node's pods stand.
    pub fn watch_pods(&self, outcomes: Outcomes) {
        // Told once, at start.
        let _ = self.core.pods.set(outcomes);
    }

    /// Shows how long nothing has been heard of the source of truth.
    pub fn watch_source(&self, status: StatusHandle) {
        // Told once, at start.
        let _ = self.core.source.set(status);
    }

    /// All metrics as text. Bytes of connections that are still open are counted up to now. Takes milliseconds where
    /// there are many; not for the data path's threads.
    pub fn metrics(&self, exposition: Exposition) -> String {
        self.core.announce_direct();
        self.core.live.count_bytes();
        encode(&self.registry, exposition)
    }

    /// The connections that are open now, in the order of their opening.
    pub fn live_connections(&self) -> serde_json::Value {
        self.core.announce_direct();
        let mut connections = self.core.live.connections();
        connections.sort_by_key(|connection| connection.id);
        let now = SystemTime::now();
        connections
            .iter()
            .map(|connection| access::live_json(connection, now))
            .collect()
    }

    /// How many connections this process carries now.
    pub fn open_connections(&self) -> usize {
        let carried = PATHS.into_iter().filter(|path| *path != Path::Direct);
        let open = carried.flat_map(|path| self.core.open.each_ref().map(|paths| &paths[path as usize]));
        open.map(|open| usize::try_from(open.load(Ordering::Relaxed)).unwrap_or(0))
            .sum()
    }

    /// The certificates of this node's identities, without their keys.
    pub fn certificates(&self) -> serde_json::Value {
        self.core
            .certificates
            .statuses()
            .iter()
            .map(CertificateStatus::to_json)
            .collect()
    }

    /// Drops the series of workloads that are no more. To be called when the mesh has changed, and every few minutes:
    /// a series stays for ten minutes after its workload, so that its last values are scraped.
    pub fn forget_missing<'a>(&self, existing: impl IntoIterator<Item = &'a Arc<Workload>>, now: Instant) {
        self.core.series.forget_missing(existing, now);
    }

    /// Waits until the access log's lines so far are written, or for `at_most`. For the end of the process. Blocks.
    pub fn flush(&self, at_most: Duration) {
        if let Some(log) = &self.core.log {
            log.flush(at_most);
        }
    }
}

impl Observer for Telemetry {
    fn opened(&self, connection: &Arc<Connection>) {
        let series = self.core.series.resolve(connection);
        series.opened.fetch_add(1, Ordering::Relaxed);
        self.core.open_gauge(connection).fetch_add(1, Ordering::Relaxed);
        self.core.live.insert(Arc::clone(connection), series);
    }

    fn closed(&self, connection: &Connection, end: &End) {
        let flag = ResponseFlag::of(end);
        match self.core.live.remove(connection.id) {
            Some(live) => {
                self.core.open_gauge(connection).fetch_sub(1, Ordering::Relaxed);
                live.finish().closed[flag as usize].fetch_add(1, Ordering::Relaxed);
            }
            None => {
                self.core.series.resolve(connection).failed[flag as usize].fetch_add(1, Ordering::Relaxed);
            }
        }
        if let Some(log) = &self.core.log {
            log.send(access_line(log.format(), SystemTime::now(), connection, end));
        }
    }

    fn would_deny(&self, connection: &Connection, rule: &str) {
        self.core.dry_run_denials[connection.reporter as usize].fetch_add(1, Ordering::Relaxed);
        if let Some(log) = &self.core.log {
            log.send(dry_run_line(log.format(), SystemTime::now(), connection, rule));
        }
    }

    fn no_place(&self) {
        self.core.no_place.fetch_add(1, Ordering::Relaxed);
    }

    fn handshake(&self, reporter: Reporter, took: Duration) {
        self.core.handshake[reporter as usize].observe(took.as_secs_f64());
    }
}

impl Core {
    fn announce_direct(&self) {
        if let Some(Err(error)) = self.direct.get().map(|direct| direct.announce()) {
            tracing::warn!("{error}; open direct connections are not shown");
        }
    }

    fn open_gauge(&self, connection: &Connection) -> &AtomicI64 {
        &self.open[connection.reporter as usize][connection.path as usize]
    }
}

/// The word for a reporter, in logs and metrics.
fn reporter_name(reporter: Reporter) -> &'static str {
    match reporter {
        Reporter::Source => "source",
        Reporter::Destination => "destination",
    }
}

/// Indexed by their discriminants.
const REPORTERS: [Reporter; 2] = [Reporter::Source, Reporter::Destination];
const PATHS: [Path; 4] = [Path::Hbone, Path::Plain, Path::Local, Path::Direct];

#[cfg(test)]
mod tests;
