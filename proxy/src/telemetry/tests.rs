//! Telemetry as the data plane and the operator see it, and the records that its tests share.

use std::collections::BTreeMap;
use std::sync::Mutex;

use super::*;
use crate::dataplane::record::{How, Party, Peer, Phase};
use crate::identity::SpiffeId;
use crate::mesh::{Protocol, SameNode, Service, TrafficDistribution};

pub(super) fn workload(namespace: &str, name: &str, account: &str) -> Workload {
    Workload {
        uid: format!("uid-{namespace}-{name}").into(),
        name: name.into(),
        namespace: namespace.into(),
        identity: identity(namespace, account),
        node: "n1".into(),
        addresses: Vec::new(),
        ports: BTreeMap::new(),
        protocol: Protocol::Hbone,
        same_node: SameNode::Direct,
        labels: BTreeMap::new(),
        zone: "".into(),
        policies: Vec::new(),
        ready: true,
        exclusions: None,
        netns: None,
        pod: None,
    }
}

fn identity(namespace: &str, account: &str) -> SpiffeId {
    SpiffeId::parse(&format!("spiffe://cluster.local/ns/{namespace}/sa/{account}")).unwrap()
}

/// From `shop/cart-1` to the service `pay/bank`, in a tunnel.
pub(super) fn connection(id: u64) -> Connection {
    Connection {
        id,
        opened: SystemTime::UNIX_EPOCH,
        reporter: Reporter::Source,
        path: Path::Hbone,
        source: Peer {
            addr: Some("10.0.0.1:40000".parse().unwrap()),
            workload: Some(workload("shop", "cart-1", "cart").into()),
            identity: Some(identity("shop", "cart")),
        },
        destination: Peer {
            addr: Some("10.1.0.1:80".parse().unwrap()),
            workload: Some(workload("pay", "bank-1", "bank").into()),
            identity: Some(identity("pay", "bank")),
        },
        service: Some(
            Service {
                name: "bank".into(),
                namespace: "pay".into(),
                hostname: "bank.pay.svc.cluster.local".into(),
                addresses: Vec::new(),
                ports: Vec::new(),
                distribution: TrafficDistribution::Any,
                affinity: false,
                endpoints: Vec::new(),
            }
            .into(),
        ),
        author: None,
        tunnel: None,
        certificate_serial: None,
        sent: 0.into(),
        received: 0.into(),
    }
}

pub(super) fn end(by: Party, phase: Phase, how: How) -> End {
    End {
        by,
        phase,
        how,
        duration: Duration::ZERO,
        measured: None,
    }
}

#[derive(Clone, Default)]
struct Sink(Arc<Mutex<Vec<u8>>>);

impl Write for Sink {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

struct OneCertificate;

impl CertificateView for OneCertificate {
    fn statuses(&self) -> Vec<CertificateStatus> {
        let now = SystemTime::now();
        [
            (CertificateState::Valid, 100),
            (CertificateState::Valid, 5000),
            (CertificateState::Failing, 10),
        ]
        .map(|(state, seconds)| CertificateStatus {
            identity: identity("shop", "cart"),
            state,
            serial: Some("0a".into()),
            issuer: None,
            root: None,
            not_before: Some(now),
            not_after: Some(now + Duration::from_secs(seconds)),
            next_refresh: None,
            last_error: None,
            pods: 1,
        })
        .into()
    }

    fn ca_calls(&self) -> Vec<(&'static str, u64)> {
        vec![("success", 3), ("unavailable", 1)]
    }

    fn ca_latency(&self) -> Option<Histogram> {
        Some(Histogram::new([1.0]))
    }

    fn ca_away(&self) -> Option<Duration> {
        Some(Duration::from_secs(7))
    }
}

fn telemetry() -> (Arc<Telemetry>, Sink) {
    let sink = Sink::default();
    let telemetry = Telemetry::with_output(
        TelemetrySettings::default(),
        Arc::new(OneCertificate),
        Box::new(sink.clone()),
    )
    .unwrap();
    (telemetry, sink)
}

/// The value of the one sample whose line begins so and has all of these labels.
fn sample(page: &str, name: &str, labels: &[&str]) -> Option<f64> {
    let mut lines = page.lines().filter(|line| {
        line.strip_prefix(name).is_some_and(|rest| rest.starts_with(['{', ' ']))
            && labels.iter().all(|label| line.contains(label))
    });
    let line = lines.next()?;
    assert_eq!(lines.next(), None, "{name} {labels:?} is ambiguous");
    line.rsplit_once(' ').unwrap().1.parse().ok()
}

#[test]
fn bytes_of_a_long_connection_show_while_it_lasts_and_are_counted_once() {
    let (telemetry, _) = telemetry();
    let connection = Arc::new(connection(1));
    telemetry.opened(&connection);
    let bytes = |kind: &str| {
        sample(
            &telemetry.metrics(Exposition::OpenMetrics),
            &format!("istio_tcp_{kind}_bytes_total"),
            &[],
        )
        .unwrap()
    };
    assert_eq!((bytes("sent"), bytes("received")), (0.0, 0.0));
    connection.sent.store(100, Ordering::Relaxed);
    connection.received.store(7, Ordering::Relaxed);
    assert_eq!((bytes("sent"), bytes("received")), (100.0, 7.0));
    assert_eq!((bytes("sent"), bytes("received")), (100.0, 7.0));
    connection.sent.store(150, Ordering::Relaxed);
    telemetry.closed(&connection, &end(Party::Source, Phase::Relay, How::Fin));
    assert_eq!((bytes("sent"), bytes("received")), (150.0, 7.0));
}

#[test]
fn a_connection_is_opened_and_closed_or_failed() {
    let (telemetry, sink) = telemetry();
    let carried = Arc::new(connection(1));
    telemetry.opened(&carried);
    let page = telemetry.metrics(Exposition::Prometheus);
    let open = |page: &str| {
        sample(
            page,
            "adit_connections_open",
            &["reporter=\"source\"", "path=\"hbone\""],
        )
    };
    assert_eq!((open(&page), telemetry.open_connections()), (Some(1.0), 1));
    telemetry.closed(&carried, &end(Party::Source, Phase::Relay, How::Fin));
    telemetry.closed(
        &connection(2),
        &end(Party::Proxy, Phase::Decide, How::Policy("r".into())),
    );
    telemetry.closed(&connection(3), &end(Party::Proxy, Phase::Identity, How::Timeout));
    let page = telemetry.metrics(Exposition::Prometheus);
    assert_eq!((open(&page), telemetry.open_connections()), (Some(0.0), 0));
    let count = |kind: &str, flag: &str| {
        let name = format!("istio_tcp_connections_{kind}_total");
        sample(&page, &name, &[&format!("response_flags=\"{flag}\"")])
    };
    assert_eq!(count("opened", "-"), Some(1.0));
    assert_eq!(count("closed", "-"), Some(1.0));
    assert_eq!(count("failed", "DENY"), Some(1.0));
    assert_eq!(count("failed", "IDENTITY_ERROR"), Some(1.0));
    assert_eq!(count("failed", "-"), None);
    telemetry.flush(Duration::from_secs(20));
    let log = String::from_utf8(sink.0.lock().unwrap().clone()).unwrap();
    assert_eq!(log.lines().count(), 3, "{log}");
}

#[test]
fn a_series_has_istios_labels() {
    let (telemetry, _) = telemetry();
    telemetry.opened(&Arc::new(connection(1)));
    let page = telemetry.metrics(Exposition::OpenMetrics);
    let line = page
        .lines()
        .find(|line| line.starts_with("istio_tcp_connections_opened_total{"))
        .unwrap();
    for label in [
        "reporter=\"source\"",
        "source_workload=\"cart-1\"",
        "source_canonical_service=\"cart-1\"",
        "source_canonical_revision=\"latest\"",
        "source_workload_namespace=\"shop\"",
        "source_principal=\"spiffe://cluster.local/ns/shop/sa/cart\"",
        "source_app=\"cart-1\"",
        "source_version=\"latest\"",
        "source_cluster=\"Kubernetes\"",
        "source_region=\"unknown\"",
        "source_zone=\"unknown\"",
        "destination_workload=\"bank-1\"",
        "destination_workload_namespace=\"pay\"",
        "destination_principal=\"spiffe://cluster.local/ns/pay/sa/bank\"",
        "destination_service=\"bank.pay.svc.cluster.local\"",
        "destination_service_name=\"bank\"",
        "destination_service_namespace=\"pay\"",
        "request_protocol=\"tcp\"",
        "response_flags=\"-\"",
        "connection_security_policy=\"mutual_tls\"",
    ] {
        assert!(line.contains(label), "{label} is not in {line}");
    }
}

#[test]
fn a_hostile_name_cannot_forge_a_sample() {
    let (telemetry, _) = telemetry();
    let mut connection = connection(1);
    let evil = "x\"} 1\nistio_tcp_connections_opened_total{reporter=\"evil\\";
    connection.source.workload = Some(workload("shop", evil, "cart").into());
    telemetry.opened(&Arc::new(connection));
    for exposition in [Exposition::OpenMetrics, Exposition::Prometheus] {
        let page = telemetry.metrics(exposition);
        let lines = page
            .lines()
            .filter(|line| line.starts_with("istio_tcp_connections_opened_total{"))
            .count();
        assert_eq!(lines, 1, "{page}");
    }
}

#[test]
fn certificates_show_the_one_that_expires_first() {
    let (telemetry, _) = telemetry();
    let page = telemetry.metrics(Exposition::OpenMetrics);
    let expiry = |state: &str| {
        sample(
            &page,
            "adit_certificate_expiry_seconds",
            &[&format!("state=\"{state}\"")],
        )
    };
    assert!((90.0..=100.0).contains(&expiry("valid").unwrap()), "{page}");
    assert!((1.0..=10.0).contains(&expiry("failing").unwrap()), "{page}");
    assert_eq!(expiry("pending"), None);
    assert_eq!(sample(&page, "adit_certificates", &["state=\"valid\""]), Some(2.0));
    assert_eq!(sample(&page, "adit_ca_calls_total", &["result=\"success\""]), Some(3.0));
    assert!(!telemetry.certificates().as_array().unwrap().is_empty());
}

#[test]
fn handshakes_and_dry_runs_are_counted() {
    let (telemetry, sink) = telemetry();
    telemetry.handshake(Reporter::Destination, Duration::from_millis(3));
    telemetry.would_deny(&connection(1), "deny: a/b rule 1");
    let page = telemetry.metrics(Exposition::OpenMetrics);
    assert_eq!(
        sample(&page, "adit_handshake_seconds_count", &["reporter=\"destination\""]),
        Some(1.0)
    );
    assert_eq!(
        sample(&page, "adit_policy_dry_run_denials_total", &["reporter=\"source\""]),
        Some(1.0)
    );
    telemetry.flush(Duration::from_secs(20));
    assert!(
        String::from_utf8(sink.0.lock().unwrap().clone())
            .unwrap()
            .contains(" dry-run ")
    );
}

#[test]
fn live_connections_are_told_in_the_order_of_their_opening() {
    let (telemetry, _) = telemetry();
    for id in [20, 3, 11] {
        telemetry.opened(&Arc::new(connection(id)));
    }
    let live = telemetry.live_connections();
    let ids: Vec<_> = live
        .as_array()
        .unwrap()
        .iter()
        .map(|connection| connection["id"].as_u64().unwrap())
        .collect();
    assert_eq!(ids, [3, 11, 20]);
    assert_eq!(live[0]["source"]["workload"], "shop/cart-1");
}

/// The documentation names every metric, and no metric that does not exist.
#[test]
fn the_documentation_names_every_metric() {
    const DOC: &str = include_str!("../../../docs/metrics.md");
    let (telemetry, _) = telemetry();
    let page = telemetry.metrics(Exposition::Prometheus);
    let names: Vec<&str> = page
        .lines()
        .filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next())
        .collect();
    assert!(names.len() > 15, "{page}");
    for name in &names {
        assert!(DOC.contains(&format!("| `{name}` |")), "docs/metrics.md lacks {name}");
    }
    for row in DOC.lines().filter(|line| {
        ["| `istio_", "| `adit_", "| `process_"]
            .iter()
            .any(|p| line.starts_with(p))
    }) {
        let name = row.split('`').nth(1).unwrap();
        assert!(
            names.contains(&name),
            "docs/metrics.md has {name}, which does not exist"
        );
    }
}

#[test]
fn alerts_name_metrics_that_there_are_and_say_what_to_do() {
    const RULES: &str = include_str!("../../../deploy/alerts.yaml");
    const EXPLAINED: &str = include_str!("../../../docs/metrics.md");
    let rules: serde_json::Value = serde_saphyr::from_str(RULES).unwrap();
    let groups = rules["groups"].as_array().unwrap().iter();
    let rules: Vec<_> = groups.flat_map(|group| group["rules"].as_array().unwrap()).collect();
    assert!(rules.len() >= 9);
    for rule in rules {
        let expression = rule["expr"].as_str().unwrap();
        let words = expression.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
        let metrics: Vec<_> = words.filter(|word| word.starts_with("adit_")).collect();
        assert!(!metrics.is_empty(), "{expression}");
        for metric in metrics {
            assert!(
                EXPLAINED.contains(&format!("`{metric}`")),
                "{metric} is not in docs/metrics.md"
            );
        }
        let description = rule["annotations"]["description"].as_str().unwrap();
        assert!(description.len() > 100, "{description}");
        assert!(rule["labels"]["severity"].is_string() && rule["annotations"]["summary"].is_string());
    }
}
