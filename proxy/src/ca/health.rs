//! What probes and Prometheus ask of the authority. Nothing on this page is secret and nothing can be done by it, so it is
//! served to the network.

use std::net::SocketAddr;
use std::sync::Arc;

use axum::Router;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use prometheus_client::registry::Registry;

use super::counts::Counts;
use super::status::Telling;
use crate::admin::{AdminError, AdminListener, Readiness, exposition, readiness_page};
use crate::telemetry::encode;

#[derive(Clone)]
struct Page {
    readiness: Readiness,
    registry: Arc<Registry>,
    telling: Telling,
}

/// Serves readiness and metrics until the process ends.
pub(super) async fn serve_health(
    address: SocketAddr,
    readiness: Readiness,
    counts: &Counts,
    telling: Telling,
) -> Result<(), AdminError> {
    let listener = AdminListener::bind_anywhere(address).await?;
    let router = router(readiness, counts, telling);
    tokio::spawn(async move {
        if let Err(error) = axum::serve(listener, router).await {
            tracing::error!(%error, "the health page is no longer served");
        }
    });
    tracing::info!(%address, "health page served");
    Ok(())
}

fn router(readiness: Readiness, counts: &Counts, telling: Telling) -> Router {
    Router::new()
        .route(
            "/healthz/ready",
            get(async |State(page): State<Page>| readiness_page(&page.readiness)),
        )
        .route("/healthz/live", get(async || "live\n"))
        .route("/metrics", get(metrics))
        .route(
            "/status",
            get(async |State(page): State<Page>| json(page.telling.status())),
        )
        .route(
            "/spiffe-bundle",
            get(async |State(page): State<Page>| json(page.telling.spiffe_bundle())),
        )
        .with_state(Page {
            readiness,
            registry: Arc::new(counts.registry()),
            telling,
        })
}

fn json(content: Option<String>) -> Response {
    match content {
        Some(content) => ([(header::CONTENT_TYPE, "application/json")], content).into_response(),
        None => (StatusCode::SERVICE_UNAVAILABLE, "the authority has no keys yet\n").into_response(),
    }
}

async fn metrics(State(page): State<Page>, headers: HeaderMap) -> Response {
    let (exposition, content_type) = exposition(&headers);
    (
        [(header::CONTENT_TYPE, content_type)],
        encode(&page.registry, exposition),
    )
        .into_response()
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpStream;

    use super::*;

    async fn get_page(address: SocketAddr, path: &str) -> String {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let request = format!("GET {path} HTTP/1.1\r\nHost: any.example\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        answer
    }

    #[tokio::test]
    async fn probes_and_prometheus_get_their_answers_under_any_host_name() {
        let (readiness, counts) = (Readiness::new(), Counts::default());
        let pending = readiness.pending("the watch of pods");
        let listener = AdminListener::bind_anywhere("127.0.0.1:0".parse().unwrap())
            .await
            .unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(axum::serve(listener, router(readiness, &counts, Telling::new(counts.clone()))).into_future());
        counts.issued(SystemTime::UNIX_EPOCH);
        counts.refused("not_on_node");

        let not_ready = get_page(address, "/healthz/ready").await;
        assert!(
            not_ready.starts_with("HTTP/1.1 503") && not_ready.contains("the watch of pods"),
            "{not_ready}"
        );
        pending.done();
        assert!(get_page(address, "/healthz/ready").await.starts_with("HTTP/1.1 200"));
        assert!(get_page(address, "/healthz/live").await.starts_with("HTTP/1.1 200"));
        for path in ["/status", "/spiffe-bundle"] {
            assert!(get_page(address, path).await.starts_with("HTTP/1.1 503"));
        }
        let metrics = get_page(address, "/metrics").await;
        assert!(metrics.contains("adit_ca_certificates_issued_total 1"), "{metrics}");
        assert!(
            metrics.contains("adit_ca_certificates_refused_total{reason=\"not_on_node\"} 1"),
            "{metrics}"
        );
    }
}
