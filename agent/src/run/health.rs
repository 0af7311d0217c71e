//! The agent's health over HTTP, at `--health-port`. Beyond loopback the port speaks mutual TLS if the agent has
//! certificates. The coordinator and `elasticctl` show the health of the whole job.
//!
//! | path | answers |
//! |---|---|
//! | `/live` | 200 while the agent's main thread, which runs the protocol, answers |
//! | `/ready` | 200 while workers of a round run here, else 503 |
//! | `/metrics` | the same and more, for Prometheus; nothing before the agent has joined |
//! | `/` | what the agent knows, as JSON |
//!
//! The port answers before the agent waits for anything: until the store answers, the agent is live and not ready.

use std::net::SocketAddr;
use std::sync::Arc;

use anyhow::Context;
use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use elastic_node::Status;
use elastic_store::listener::{Port, Share, listen};
use elastic_store::tls::MutualTls;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::watch;

use super::metrics::Metrics;
use crate::machine::gpu_watch::GpuWatch;
use crate::workers::group::GroupState;
use crate::workers::watchdog::Steps;

/// What the health port reports.
pub(crate) struct Health {
    job: String,
    standing: watch::Sender<Standing>,
}

/// How far the agent has come.
enum Standing {
    /// It has not joined: what it does, or waits for.
    Before(String),
    /// It takes part.
    Joined(Arc<Joined>),
}

/// What is known of an agent that takes part.
pub(crate) struct Joined {
    pub node: String,
    pub status: watch::Receiver<Status>,
    pub group: watch::Receiver<GroupState>,
    /// The last step that each worker has reported.
    pub steps: Steps,
    pub metrics: Arc<Metrics>,
    pub gpus: GpuWatch,
}

impl Health {
    /// That of this job's agent, which has only begun.
    pub(crate) fn of(job: String) -> Arc<Health> {
        Arc::new(Health { job, standing: watch::Sender::new(Standing::Before("starting".to_owned())) })
    }

    /// Serves the health port at this address for as long as the agent runs. Others on this machine, such as a probe,
    /// need no certificate.
    pub(crate) fn tell(self: &Arc<Self>, at: SocketAddr, tls: Option<MutualTls>) -> anyhow::Result<()> {
        let listener = listen(at)
            .with_context(|| format!("cannot serve health at {at}; choose another port with --health-port"))?;
        let bound = listener.local_addr()?;
        tracing::info!(port = bound.port(), address = %bound.ip(), "serving health over HTTP");
        let tls = tls.filter(|_| !bound.ip().is_loopback());
        tokio::spawn(serve(listener, Arc::clone(self), tls));
        Ok(())
    }

    /// The agent has not joined, and does this, or waits for it.
    pub(crate) fn before(&self, doing: impl Into<String>) {
        self.standing.send_replace(Standing::Before(doing.into()));
    }

    /// The agent takes part from now on.
    pub(crate) fn joined(&self, joined: Joined) {
        tokio::spawn(Arc::clone(&joined.metrics).follow(joined.status.clone(), joined.group.clone()));
        self.standing.send_replace(Standing::Joined(Arc::new(joined)));
    }

    fn state(&self) -> Value {
        match &*self.standing.borrow() {
            Standing::Before(doing) => json!({ "job": self.job, "ready": false, "before": doing }),
            Standing::Joined(joined) => joined.state(&self.job),
        }
    }
}

impl Joined {
    fn state(&self, job: &str) -> Value {
        let now = elastic_store::clock::now();
        let status = self.status.borrow().clone();
        let group = self.group.borrow().clone();
        let workers: Vec<Value> = group
            .workers
            .iter()
            .map(|worker| {
                let mut value = json!(worker);
                if let Some((step, at)) = (self.steps)(worker.local_rank) {
                    value["step"] = json!(step);
                    value["step_age_ms"] = json!(now.since(at).as_millis() as u64);
                }
                value
            })
            .collect();
        let round = status.round.map(|round| round.value).map(|round| {
            json!({
                "number": round.number, "state": round.state, "reason": round.reason, "restarts": round.restarts,
                "group_world_size": round.group_world_size, "world_size": round.world_size,
            })
        });
        json!({
            "job": job, "node": self.node, "leading": status.leading, "ready": group.running() > 0, "round": round,
            "local_round": group.round, "workers": workers,
        })
    }
}

async fn serve(listener: TcpListener, health: Arc<Health>, tls: Option<MutualTls>) {
    let router = Router::new()
        .route("/live", get(is_live))
        .route("/ready", get(is_ready))
        .route("/metrics", get(metrics))
        .route("/", get(state))
        .with_state(health);
    let port = Port::new(listener, Share::Monitors);
    match tls {
        Some(tls) => port.serve_https(router, move || tls.server()).await,
        None => port.serve_http(router).await,
    }
}

async fn state(State(health): State<Arc<Health>>) -> Response {
    ([(header::CONTENT_TYPE, "application/json")], format!("{}\n", health.state())).into_response()
}

async fn metrics(State(health): State<Arc<Health>>) -> Response {
    let joined = match &*health.standing.borrow() {
        Standing::Before(_) => None,
        Standing::Joined(joined) => Some(Arc::clone(joined)),
    };
    let text = match joined {
        // What Prometheus takes for an answer without metrics.
        None => "# EOF\n".to_owned(),
        Some(joined) => {
            let gpus = joined.gpus.look().await;
            let Joined { status, group, steps, metrics, .. } = &*joined;
            metrics.render(elastic_store::clock::now(), &status.borrow(), &group.borrow(), steps, &gpus)
        }
    };
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    ([(header::CONTENT_TYPE, kind)], text).into_response()
}

async fn is_live(State(health): State<Arc<Health>>) -> String {
    match &*health.standing.borrow() {
        Standing::Before(doing) => format!("the agent runs, and has not joined yet: {doing}\n"),
        Standing::Joined(_) => "the agent runs\n".to_owned(),
    }
}

async fn is_ready(State(health): State<Arc<Health>>) -> Response {
    let why = match &*health.standing.borrow() {
        Standing::Before(doing) => format!("not joined yet: {doing}\n"),
        Standing::Joined(joined) if joined.group.borrow().running() > 0 => return "workers run\n".into_response(),
        Standing::Joined(_) => "no workers run here\n".to_owned(),
    };
    (StatusCode::SERVICE_UNAVAILABLE, why).into_response()
}
