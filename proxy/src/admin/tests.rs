//! The admin page over real sockets.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::oneshot;
use tokio::time::timeout;

use super::*;
use crate::telemetry::{NoCertificates, TelemetrySettings};

const DEADLINE: Duration = Duration::from_secs(20);

struct Page {
    address: SocketAddr,
    readiness: Readiness,
    quits: Arc<AtomicU32>,
    _stop: oneshot::Sender<()>,
}

async fn page(listener: AdminListener) -> Page {
    let settings = TelemetrySettings {
        access_log: None,
        ..TelemetrySettings::default()
    };
    let quits = Arc::new(AtomicU32::new(0));
    let counter = Arc::clone(&quits);
    let readiness = Readiness::new();
    let sections = StateSections::default()
        .with("pods", || json!(["a"]))
        .with("versions", || json!({"adit": "1"}));
    let state = AdminState {
        telemetry: Telemetry::new(settings, Arc::new(NoCertificates)).unwrap(),
        readiness: readiness.clone(),
        sections: Arc::new(sections),
        quit: Arc::new(move || {
            counter.fetch_add(1, Ordering::Relaxed);
        }),
    };
    let address = listener.local_addr().unwrap();
    let (stop, stopped) = oneshot::channel();
    tokio::spawn(serve(listener, state, async { drop(stopped.await) }));
    Page {
        address,
        readiness,
        quits,
        _stop: stop,
    }
}

async fn any_port() -> AdminListener {
    AdminListener::bind("127.0.0.1:0".parse().unwrap()).await.unwrap()
}

impl Page {
    /// Sends a request with these header lines; gives back status and body.
    async fn ask(&self, line: &str, headers: &str) -> (u16, String) {
        let mut stream = TcpStream::connect(self.address).await.unwrap();
        let request = format!("{line} HTTP/1.1\r\n{headers}Connection: close\r\nContent-Length: 0\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        timeout(DEADLINE, stream.read_to_string(&mut answer))
            .await
            .unwrap()
            .unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
    }

    async fn get(&self, path: &str) -> (u16, String) {
        self.ask(&format!("GET {path}"), "Host: localhost\r\n").await
    }
}

#[tokio::test]
async fn readiness_names_what_is_pending() {
    let page = page(any_port().await).await;
    assert_eq!(page.get("/healthz/ready").await, (200, "ready\n".into()));
    let first = page.readiness.pending("mesh file");
    let _second = page.readiness.pending("certificates of shop/cart\nforged: ready");
    assert_eq!(
        page.get("/healthz/ready").await,
        (503, "mesh file\ncertificates of shop/cart forged: ready\n".into())
    );
    first.done();
    assert_eq!(page.get("/healthz/ready").await.0, 503);
    assert_eq!(page.get("/healthz/live").await, (200, "live\n".into()));
}

#[tokio::test]
async fn metrics_come_in_the_form_that_is_asked_for() {
    let page = page(any_port().await).await;
    let (status, plain) = page.get("/metrics").await;
    assert_eq!(status, 200);
    assert!(
        plain.contains("\nadit_build_info{version=\"") && !plain.contains("# EOF"),
        "{plain}"
    );
    let accept = "Host: localhost\r\nAccept: application/openmetrics-text;version=1.0.0,text/plain;q=0.5\r\n";
    assert!(page.ask("GET /metrics", accept).await.1.ends_with("# EOF\n"));
}

#[tokio::test]
async fn the_state_is_json_whole_or_in_part() {
    let page = page(any_port().await).await;
    let (status, text) = page.get("/debug/state").await;
    let value: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(
        (status, value),
        (200, json!({"pods": ["a"], "versions": {"adit": "1"}}))
    );
    let (_, text) = page.get("/debug/state?section=pods").await;
    assert_eq!(serde_json::from_str::<serde_json::Value>(&text).unwrap(), json!(["a"]));
    let (status, text) = page.get("/debug/state?section=keys").await;
    assert_eq!(
        (status, text.as_str()),
        (404, "no such section; there are pods, versions\n")
    );
}

#[tokio::test]
async fn only_a_post_from_this_host_quits() {
    let page = page(any_port().await).await;
    assert_eq!(page.get("/quit").await.0, 405);
    for headers in [
        "Host: evil.example\r\n",
        "Host: localhost\r\nOrigin: http://evil.example\r\n",
        "Host: localhost\r\nOrigin: null\r\n",
        "Host: localhost\r\nSec-Fetch-Site: cross-site\r\n",
        "Host: localhost\r\nHost: evil.example\r\n",
    ] {
        let (status, _) = page.ask("POST /quit", headers).await;
        assert!(matches!(status, 400 | 403), "{headers}: {status}");
    }
    assert_eq!(
        page.ask("POST http://evil.example/quit", "Host: localhost\r\n").await.0,
        403
    );
    assert_eq!(page.quits.load(Ordering::Relaxed), 0);
    assert_eq!(
        page.ask("POST /quit", "Host: 127.0.0.1:15000\r\n").await,
        (202, "draining\n".into())
    );
    assert_eq!(page.quits.load(Ordering::Relaxed), 1);
}

#[tokio::test]
async fn other_hosts_names_are_refused_everywhere() {
    let page = page(any_port().await).await;
    for path in ["/", "/metrics", "/healthz/ready", "/debug/state", "/nothing"] {
        assert_eq!(
            page.ask(&format!("GET {path}"), "Host: evil.example:15000\r\n").await.0,
            403,
            "{path}"
        );
    }
    assert_eq!(page.get("/nothing").await.0, 404);
}

#[tokio::test]
async fn an_address_that_others_reach_is_refused() {
    for address in ["0.0.0.0:0", "192.0.2.1:0", "[::]:0"] {
        let error = AdminListener::bind(address.parse().unwrap()).await.unwrap_err();
        assert!(matches!(error, AdminError::NotLoopback(_)), "{address}: {error}");
    }
}

#[tokio::test]
async fn an_address_in_use_is_named() {
    let first = any_port().await;
    let address = first.local_addr().unwrap();
    let error = AdminListener::bind(address).await.unwrap_err();
    assert!(error.to_string().contains(&address.to_string()), "{error}");
}

#[tokio::test]
async fn a_request_that_trickles_in_is_cut_off_and_frees_its_place() {
    let page = page(any_port().await.with_limits(1, Duration::from_millis(300))).await;
    let mut slow = TcpStream::connect(page.address).await.unwrap();
    let trickle = async {
        loop {
            if slow.write_all(b"G").await.is_err() {
                return;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    // The only place is taken until the slow one is cut off; whoever comes before is turned away at once.
    let turned_away = async {
        let mut early = TcpStream::connect(page.address).await.unwrap();
        let mut answer = Vec::new();
        // The end, or a reset.
        let _ = timeout(DEADLINE, early.read_to_end(&mut answer)).await.unwrap();
        assert!(answer.is_empty(), "{answer:?}");
    };
    let ((), ()) = tokio::join!(turned_away, async { timeout(DEADLINE, trickle).await.unwrap() });
    assert_eq!(page.get("/healthz/live").await.0, 200);
}
