//! Readiness, metrics and state over HTTP, on loopback.
//!
//! Whoever reaches the page may read it and stop the proxy, so it is for this host alone: the listener is refused other
//! addresses, peers must be on loopback, and a web page in a browser of this host gets nowhere. Metrics and readiness alone
//! may be served elsewhere, to be scraped; and readiness at a Unix socket, by which a probe asks one process rather than
//! whichever of a node's has the address.

mod ask;
mod guard;
mod listener;
mod peers;
mod readiness;
mod state;

use std::future::Future;
use std::io;
use std::sync::Arc;

use axum::Router;
use axum::extract::{Query, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::middleware;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use serde::Deserialize;

use crate::telemetry::{Exposition, Telemetry};

pub(crate) use ask::ask;
pub use listener::{AdminError, AdminListener};
pub use peers::Peer;
pub(crate) use peers::{Peers, Place, TooMany, Warnings};
pub use readiness::{Pending, Readiness};
pub use state::StateSections;

/// What the admin page shows and does.
#[derive(Clone)]
pub struct AdminState {
    /// Metrics.
    pub telemetry: Arc<Telemetry>,
    /// What start-up still waits for.
    pub readiness: Readiness,
    /// The parts of the state query.
    pub sections: Arc<StateSections>,
    /// Begins the drain; called on the admin page's runtime, must not block.
    pub quit: Arc<dyn Fn() + Send + Sync>,
}

/// Serves the admin page until `shutdown` is ready; requests under way are answered first.
pub async fn serve(
    listener: AdminListener,
    state: AdminState,
    shutdown: impl Future<Output = ()> + Send + 'static,
) -> io::Result<()> {
    axum::serve(listener, router(state))
        .with_graceful_shutdown(shutdown)
        .await
}

/// Serves metrics and readiness, to anybody, until `shutdown` is ready.
pub async fn serve_metrics(
    listener: AdminListener,
    state: AdminState,
    shutdown: impl Future<Output = ()> + Send + 'static,
) -> io::Result<()> {
    axum::serve(listener, metrics_router(state))
        .with_graceful_shutdown(shutdown)
        .await
}

/// Serves readiness at a Unix socket, for good.
pub async fn serve_probes(listener: tokio::net::UnixListener, state: AdminState) -> io::Result<()> {
    axum::serve(listener, health_router().with_state(state)).await
}

fn health_router() -> Router<AdminState> {
    Router::new()
        .route("/healthz/ready", get(ready))
        .route("/healthz/live", get(async || "live\n"))
}

fn metrics_router(state: AdminState) -> Router {
    health_router().route("/metrics", get(metrics)).with_state(state)
}

fn router(state: AdminState) -> Router {
    health_router()
        .route("/", get(index))
        .route("/metrics", get(metrics))
        .route("/debug/state", get(debug_state))
        .route("/quit", post(quit))
        .layer(middleware::from_fn(guard::only_this_host))
        .with_state(state)
}

async fn index() -> &'static str {
    "adit\n\n\
     GET  /healthz/ready   200 when ready, else 503 and what is pending\n\
     GET  /healthz/live    200 as long as this process answers\n\
     GET  /metrics         Prometheus metrics\n\
     GET  /debug/state     pods, certificates, services, policies and open connections; ?section=NAME for one\n\
     POST /quit            drain, then exit\n"
}

async fn ready(State(state): State<AdminState>) -> Response {
    readiness_page(&state.readiness)
}

/// 200 when ready, else 503 and what is pending.
pub(crate) fn readiness_page(readiness: &Readiness) -> Response {
    let pending = readiness.items();
    if pending.is_empty() {
        return "ready\n".into_response();
    }
    // Each item on a line of its own, whatever it quotes.
    let page: String = pending
        .iter()
        .map(|item| item.replace(char::is_control, " ") + "\n")
        .collect();
    (StatusCode::SERVICE_UNAVAILABLE, page).into_response()
}

async fn metrics(State(state): State<AdminState>, headers: HeaderMap) -> Response {
    let (exposition, content_type) = exposition(&headers);
    aside(move || {
        (
            [(header::CONTENT_TYPE, content_type)],
            state.telemetry.metrics(exposition),
        )
            .into_response()
    })
    .await
}

/// The form of metrics that a request asks for, and its content type.
pub(crate) fn exposition(headers: &HeaderMap) -> (Exposition, &'static str) {
    let accept = headers
        .get(header::ACCEPT)
        .and_then(|accept| accept.to_str().ok())
        .unwrap_or_default();
    if accept.contains("application/openmetrics-text") {
        (
            Exposition::OpenMetrics,
            "application/openmetrics-text; version=1.0.0; charset=utf-8",
        )
    } else {
        (Exposition::Prometheus, "text/plain; version=0.0.4; charset=utf-8")
    }
}

#[derive(Debug, Deserialize)]
struct StateQuery {
    section: Option<String>,
}

async fn debug_state(State(state): State<AdminState>, Query(query): Query<StateQuery>) -> Response {
    aside(move || {
        let value = match &query.section {
            None => state.sections.all(),
            Some(name) => match state.sections.one(name) {
                Some(value) => value,
                None => {
                    let known = state.sections.names().collect::<Vec<_>>().join(", ");
                    return (StatusCode::NOT_FOUND, format!("no such section; there are {known}\n")).into_response();
                }
            },
        };
        ([(header::CONTENT_TYPE, "application/json")], format!("{value:#}\n")).into_response()
    })
    .await
}

async fn quit(State(state): State<AdminState>) -> Response {
    tracing::info!("asked to stop on the admin page");
    (state.quit)();
    (StatusCode::ACCEPTED, "draining\n").into_response()
}

/// Makes a page on a thread where taking long holds up nobody.
async fn aside(page: impl FnOnce() -> Response + Send + 'static) -> Response {
    tokio::task::spawn_blocking(page).await.unwrap_or_else(|error| {
        tracing::error!(%error, "a page of the admin server failed");
        (StatusCode::INTERNAL_SERVER_ERROR, "failed; the log says more\n").into_response()
    })
}

#[cfg(test)]
mod tests;
