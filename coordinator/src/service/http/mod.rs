//! What a replica serves over HTTP: `/live`, `/ready`, `/metrics`, and where that is asked for the JSON API, the same
//! over gRPC, and the page.
//! What it reads comes from memory: however many ask, the store is not asked. What it changes, it asks of the store as
//! `elasticctl` does.

mod access;
mod api;
mod grpc;
pub mod hosts;
mod messages;
mod operations;
mod page;
mod problem;
pub mod users;
mod watching;

use std::sync::Arc;

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use tokio::net::TcpListener;

use super::Shared;
use crate::operator::Operator;
use elastic_store::followed::Followed;
use elastic_store::listener::{Port, Share};
use elastic_store::tls::ServerSettings;
use hosts::Hosts;
use users::Users;

/// To whom the port shows what.
pub enum Shown {
    /// How this process does, and the jobs' metrics, to anyone who reaches it.
    Monitoring,
    /// The jobs' records too, among them what failed workers wrote, to anyone who calls it by these names.
    Jobs(Hosts),
    /// These to users alone, who may also change jobs.
    Users(Followed<Users>),
}

/// What the port serves.
pub struct Site {
    /// What is read.
    pub shared: Arc<Shared>,
    /// What changes jobs.
    pub operator: Operator,
    /// To whom.
    pub shown: Shown,
}

/// Answers until it is dropped; with settings for TLS over TLS alone.
pub async fn serve(listener: TcpListener, site: Site, tls: Option<ServerSettings>) {
    let site = Arc::new(site);
    let monitoring = Router::new()
        .route("/live", get(async || "the process runs\n"))
        .route("/ready", get(ready))
        .route("/metrics", get(metrics));
    let router = match site.shown {
        Shown::Monitoring => monitoring.fallback(async || {
            (StatusCode::NOT_FOUND, "here are /live, /ready and /metrics; --http-jobs adds the page and /v1/jobs\n")
        }),
        Shown::Jobs(_) | Shown::Users(_) => {
            monitoring.nest("/v1", api::router(&site)).merge(grpc::router(&site)).merge(page::router())
        }
    };
    let port = Port::new(listener, Share::Monitors);
    let router = router.with_state(site);
    match tls {
        None => port.serve_http(router).await,
        Some(tls) => port.serve_https(router, tls).await,
    }
}

async fn ready(State(site): State<Arc<Site>>) -> Response {
    match site.shared.unready() {
        None => "ready to lead\n".into_response(),
        Some(why) => (StatusCode::SERVICE_UNAVAILABLE, format!("{why}\n")).into_response(),
    }
}

async fn metrics(State(site): State<Arc<Site>>) -> Response {
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    ([(header::CONTENT_TYPE, kind)], site.shared.render()).into_response()
}
