//! What a replica serves over plain HTTP: `/live`, `/ready`, `/metrics`, and where that is asked for the JSON API and
//! the page. All of it only reads, from memory: however many ask, the store is not asked.

mod api;
mod page;

use std::sync::Arc;

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use tokio::net::TcpListener;

use super::Shared;
use crate::listener::{Port, Share};

/// What whoever reaches the port may read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shown {
    /// How this process does, and the jobs' metrics.
    Monitoring,
    /// The jobs' records too, among them what failed workers wrote.
    Jobs,
}

/// Answers until it is dropped.
pub async fn serve(listener: TcpListener, shared: Arc<Shared>, shown: Shown) {
    let monitoring = Router::new()
        .route("/live", get(async || "the process runs\n"))
        .route("/ready", get(ready))
        .route("/metrics", get(metrics));
    let router = match shown {
        Shown::Monitoring => monitoring.fallback(async || {
            (StatusCode::NOT_FOUND, "here are /live, /ready and /metrics; --http-jobs adds the page and /v1/jobs\n")
        }),
        Shown::Jobs => monitoring.nest("/v1", api::router()).merge(page::router()),
    };
    Port::new(listener, Share::Monitors).serve_http(router.with_state(shared)).await;
}

async fn ready(State(shared): State<Arc<Shared>>) -> Response {
    match shared.unready() {
        None => "ready to lead\n".into_response(),
        Some(why) => (StatusCode::SERVICE_UNAVAILABLE, format!("{why}\n")).into_response(),
    }
}

async fn metrics(State(shared): State<Arc<Shared>>) -> Response {
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    ([(header::CONTENT_TYPE, kind)], shared.render()).into_response()
}
