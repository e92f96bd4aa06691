//! The page of metrics: what is counted, under which names.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::metrics::histogram::Histogram;

use super::certificates::CertificateState;
use super::flags::ResponseFlag;
use super::process::ProcessFigures;
use super::series::{LabelSet, Series};
use super::{Core, PATHS, REPORTERS, reporter_name};
use crate::identity::{RootSource, RootStatus};
use crate::node::{Outcome, Outcomes};

/// Seconds: from a handshake on one machine to one that is near its deadline.
const HANDSHAKE_BUCKETS: [f64; 12] = [
    0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 2.5, 10.0,
];

pub(super) fn handshake_histogram() -> Histogram {
    Histogram::new(HANDSHAKE_BUCKETS)
}

/// Reads the core at each scrape.
pub(super) struct Metrics(pub(super) Arc<Core>);

impl fmt::Debug for Metrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Metrics")
    }
}

impl Collector for Metrics {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let mut page = Page(encoder);
        self.connections(&mut page)?;
        self.handshakes(&mut page)?;
        self.certificates(&mut page)?;
        self.trust(&mut page)?;
        self.pods(&mut page)?;
        self.process(&mut page)
    }
}

impl Metrics {
    fn connections(&self, page: &mut Page<'_>) -> fmt::Result {
        let all = self.0.series.all();
        type PerFlag = fn(&Series) -> &[AtomicU64; ResponseFlag::ALL.len()];
        type Single = fn(&Series) -> &AtomicU64;
        let singles: [(&str, &str, Single); 3] = [
            ("istio_tcp_connections_opened", "Connections established.", |series| {
                &series.opened
            }),
            (
                "istio_tcp_sent_bytes",
                "Bytes from clients to servers, of open connections too.",
                |series| &series.sent,
            ),
            (
                "istio_tcp_received_bytes",
                "Bytes from servers to clients, of open connections too.",
                |series| &series.received,
            ),
        ];
        for (name, help, counter) in singles {
            page.counters(
                name,
                help,
                all.iter().map(|series| {
                    let value = counter(series).load(Ordering::Relaxed);
                    (self.labels(series, ResponseFlag::None), value)
                }),
            )?;
        }
        let per_flag: [(&str, &str, PerFlag); 2] = [
            (
                "istio_tcp_connections_closed",
                "Established connections that have ended.",
                |series| &series.closed,
            ),
            (
                "istio_tcp_connections_failed",
                "Connections refused or not established.",
                |series| &series.failed,
            ),
        ];
        for (name, help, counters) in per_flag {
            page.counters(
                name,
                help,
                all.iter().flat_map(|series| {
                    ResponseFlag::ALL.into_iter().filter_map(|flag| {
                        let value = counters(series)[flag as usize].load(Ordering::Relaxed);
                        (value > 0).then(|| (self.labels(series, flag), value))
                    })
                }),
            )?;
        }
        let open = REPORTERS
            .into_iter()
            .flat_map(|reporter| PATHS.map(|path| (reporter, path)));
        page.gauges(
            "adit_connections_open",
            "Connections open now.",
            open.map(|(reporter, path)| {
                let value = self.0.open[reporter as usize][path as usize].load(Ordering::Relaxed);
                (
                    [("reporter", reporter_name(reporter)), ("path", path.as_str())],
                    value as f64,
                )
            }),
        )?;
        page.counters(
            "adit_policy_dry_run_denials",
            "Connections that a policy in dry-run mode would have refused.",
            REPORTERS.map(|reporter| {
                let value = self.0.dry_run_denials[reporter as usize].load(Ordering::Relaxed);
                ([("reporter", reporter_name(reporter))], value)
            }),
        )?;
        page.counter(
            "adit_connections_over_limit",
            "Connections refused because their pod had as many as are carried for one pod.",
            self.0.no_place.load(Ordering::Relaxed),
        )?;
        let direct = self.0.direct.get();
        let losses = direct.and_then(|direct| direct.losses().ok()).unwrap_or_default();
        for (name, help, value) in [
            (
                "adit_direct_ends_late",
                "Ends of direct connections that the kernel had no room to tell at once.",
                losses.late_ends,
            ),
            (
                "adit_direct_ends_lost",
                "Direct connections that were found gone without a word of the kernel's on their end.",
                direct.map_or(0, |direct| direct.lost()),
            ),
            (
                "adit_refusals_unlogged",
                "Connections that the kernel refused by policy and did not tell one by one.",
                losses.untold_refusals,
            ),
            (
                "adit_flows_full",
                "Connections that found no room among those on their way: refused, or taken for a stranger's.",
                losses.flows_full,
            ),
            (
                "adit_direct_unrecorded",
                "Direct connections that the kernel had no memory to record.",
                losses.unrecorded,
            ),
        ] {
            page.counter(name, help, value)?;
        }
        let unplaced = self
            .0
            .unplaced
            .get()
            .map(|unplaced| **unplaced.load())
            .unwrap_or_default();
        page.gauges(
            "adit_unplaced",
            "What the kernel's maps have no room for; the proxy decides instead.",
            [
                ("destinations", unplaced.destinations),
                ("ranges", unplaced.ranges),
                ("verdicts", unplaced.verdicts),
                ("services", unplaced.services),
            ]
            .map(|(what, count)| ([("what", what)], count as f64)),
        )?;
        let startup = self.0.startup.get().and_then(|namespaces| namespaces.counts().ok());
        let startup = startup.unwrap_or_default();
        page.counter(
            "adit_startup_refused",
            "Connects that were refused: nobody had looked at their pod yet.",
            startup.refused,
        )?;
        page.counter(
            "adit_startup_passed",
            "Connects that passed although nobody had looked at their pod yet.",
            startup.passed,
        )?;
        let lost = self.0.log.as_ref().map_or(0, |log| log.lost());
        page.counter(
            "adit_access_log_lost",
            "Lines of the access log that could not be written.",
            lost,
        )
    }

    fn labels<'a>(&'a self, series: &'a Series, flag: ResponseFlag) -> LabelSet<'a> {
        LabelSet {
            labels: &series.labels,
            cluster: &self.0.cluster_id,
            flag,
        }
    }

    fn handshakes(&self, page: &mut Page<'_>) -> fmt::Result {
        let mut metric = page.0.encode_descriptor(
            "adit_handshake_seconds",
            "Time of TLS handshakes with tunnels' peers.",
            None,
            MetricType::Histogram,
        )?;
        for reporter in REPORTERS {
            let labels = [("reporter", reporter_name(reporter))];
            self.0.handshake[reporter as usize].encode(metric.encode_family(&labels)?)?;
        }
        Ok(())
    }

    fn certificates(&self, page: &mut Page<'_>) -> fmt::Result {
        let calls = self
            .0
            .certificates
            .ca_calls()
            .into_iter()
            .map(|(result, count)| ([("result", result)], count));
        page.counters("adit_ca_calls", "Requests to the certificate authority.", calls)?;
        if let Some(latency) = self.0.certificates.ca_latency() {
            let help = "Time of requests to the certificate authority.";
            let metric = page
                .0
                .encode_descriptor("adit_ca_call_seconds", help, None, MetricType::Histogram)?;
            latency.encode(metric)?;
        }
        let away = self.0.certificates.ca_away().unwrap_or_default();
        page.gauge(
            "adit_ca_away_seconds",
            "For how long the certificate authority has not answered.",
            Some(away.as_secs_f64()),
        )?;
        let statuses = self.0.certificates.statuses();
        let of_state = |state| statuses.iter().filter(move |status| status.state == state);
        page.gauges(
            "adit_certificates",
            "Identities of this node.",
            CertificateState::ALL.map(|state| ([("state", state.as_str())], of_state(state).count() as f64)),
        )?;
        let now = SystemTime::now();
        let soonest = CertificateState::ALL.into_iter().filter_map(|state| {
            let not_after = of_state(state).filter_map(|status| status.not_after).min()?;
            Some(([("state", state.as_str())], seconds_between(now, not_after)))
        });
        page.gauges(
            "adit_certificate_expiry_seconds",
            "Seconds until the first certificate expires.",
            soonest,
        )
    }

    fn trust(&self, page: &mut Page<'_>) -> fmt::Result {
        let trust = self.0.certificates.trust().unwrap_or_default();
        let of = |root: &RootStatus| root.trust_domain.as_ref().map_or("own", |_| "foreign");
        page.gauges(
            "adit_trust_roots",
            "Roots that peers are verified against.",
            ["own", "foreign"].into_iter().flat_map(|domain| {
                let all = trust
                    .roots
                    .iter()
                    .filter(move |root| root.in_force && of(root) == domain);
                RootSource::ALL.map(|source| {
                    let count = all.clone().filter(|root| root.source == source).count();
                    ([("domain", domain), ("source", source.as_str())], count as f64)
                })
            }),
        )?;
        page.gauge(
            "adit_trust_files_failing",
            "Bundles, lists of what is distrusted and revocation lists that cannot be used as they are.",
            Some(trust.errors.len() as f64),
        )?;
        let now = SystemTime::now();
        let soonest = trust
            .roots
            .iter()
            .filter(|root| root.in_force)
            .map(|root| root.not_after)
            .min();
        page.gauge(
            "adit_trust_root_expiry_seconds",
            "Seconds until the first root expires.",
            soonest.map(|soonest| seconds_between(now, soonest)),
        )?;
        let due = trust.crls.iter().filter_map(|crl| crl.next_update).min();
        page.gauge(
            "adit_crl_expiry_seconds",
            "Seconds until the first revocation list is out of date.",
            due.map(|due| seconds_between(now, due)),
        )
    }

    fn pods(&self, page: &mut Page<'_>) -> fmt::Result {
        let pods = self.0.pods.get().map(Outcomes::all).unwrap_or_default();
        let standing = |capture| pods.iter().filter(move |pod| pod.capture == capture).count();
        page.gauges(
            "adit_pods",
            "Pods of this node.",
            Outcome::CAPTURES.map(|capture| ([("capture", capture)], standing(capture) as f64)),
        )?;
        page.counter(
            "adit_repairs",
            "What captures pods and was found missing or replaced, and put right.",
            self.0.repairs.load(Ordering::Relaxed),
        )?;
        let heard = self.0.source.get().and_then(|source| source.load().heard);
        page.gauge(
            "adit_source_age_seconds",
            "Seconds since the API server was last heard of.",
            heard.map(|heard| heard.elapsed().as_secs_f64()),
        )
    }

    fn process(&self, page: &mut Page<'_>) -> fmt::Result {
        page.gauges(
            "adit_build_info",
            "The version that runs.",
            [([("version", env!("CARGO_PKG_VERSION"))], 1.0)],
        )?;
        let figures = ProcessFigures::read();
        let start = seconds_between(UNIX_EPOCH, self.0.started);
        page.gauge(
            "process_start_time_seconds",
            "Start of the process, in seconds since 1970.",
            Some(start),
        )?;
        if let Some(seconds) = figures.cpu_seconds {
            let metric = page.0.encode_descriptor(
                "process_cpu_seconds",
                "CPU time used, of user and kernel.",
                None,
                MetricType::Counter,
            )?;
            ConstCounter::new(seconds).encode(metric)?;
        }
        for (name, help, value) in [
            (
                "process_resident_memory_bytes",
                "Resident memory.",
                figures.resident_bytes,
            ),
            ("process_threads", "Threads.", figures.threads),
            ("process_open_fds", "Open file descriptors.", figures.open_fds),
            ("process_max_fds", "File descriptors that may be open.", figures.max_fds),
        ] {
            page.gauge(name, help, value.map(|value| value as f64))?;
        }
        Ok(())
    }
}

/// From one time to another, negative where that lies earlier.
fn seconds_between(from: SystemTime, to: SystemTime) -> f64 {
    to.duration_since(from)
        .map_or_else(|error| -error.duration().as_secs_f64(), |time| time.as_secs_f64())
}

struct Page<'a>(DescriptorEncoder<'a>);

impl Page<'_> {
    /// A counter for each set of labels. The exposition formats add `_total` to the name.
    fn counters<L: EncodeLabelSet>(
        &mut self,
        name: &str,
        help: &str,
        values: impl IntoIterator<Item = (L, u64)>,
    ) -> fmt::Result {
        let mut metric = self.0.encode_descriptor(name, help, None, MetricType::Counter)?;
        for (labels, value) in values {
            ConstCounter::new(value).encode(metric.encode_family(&labels)?)?;
        }
        Ok(())
    }

    fn counter(&mut self, name: &str, help: &str, value: u64) -> fmt::Result {
        let metric = self.0.encode_descriptor(name, help, None, MetricType::Counter)?;
        ConstCounter::new(value).encode(metric)
    }

    fn gauges<L: EncodeLabelSet>(
        &mut self,
        name: &str,
        help: &str,
        values: impl IntoIterator<Item = (L, f64)>,
    ) -> fmt::Result {
        let mut metric = self.0.encode_descriptor(name, help, None, MetricType::Gauge)?;
        for (labels, value) in values {
            ConstGauge::new(value).encode(metric.encode_family(&labels)?)?;
        }
        Ok(())
    }

    fn gauge(&mut self, name: &str, help: &str, value: Option<f64>) -> fmt::Result {
        let metric = self.0.encode_descriptor(name, help, None, MetricType::Gauge)?;
        match value {
            Some(value) => ConstGauge::new(value).encode(metric),
            None => Ok(()),
        }
    }
}
