//! `/live`, `/ready` and `/metrics`, over plain HTTP.

use std::sync::Arc;

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use tokio::net::TcpListener;

use super::Shared;
use crate::listener::{Port, Share};

/// Answers until it is dropped.
pub async fn serve(listener: TcpListener, shared: Arc<Shared>) {
    let router = Router::new()
        .route("/live", get(async || "the process runs\n"))
        .route("/ready", get(ready))
        .route("/metrics", get(metrics))
        .with_state(shared);
    Port::new(listener, Share::Monitors).serve_http(router).await;
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
