//! What one agent exports to Prometheus: `/metrics` at `--health-port`. `docs/metrics.md` documents each name. A node is
//! always in one of four `stages`, and the time in each is counted.

use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use elastic_node::Status;
use elastic_rendezvous::time::Time;
use elastic_store::metered::CallObserver;
use elastic_store::tls::MutualTls;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Metric, Registry};
use tokio::sync::watch;

use crate::machine::gpu_watch::GpuState;
use crate::run::progress::GoodputObserver;
use crate::workers::group::GroupState;
use crate::workers::watchdog::Steps;

mod gpus;
mod stages;

use gpus::GpuMetrics;
use stages::{Ended, Seen, Stage, Stages};

type Labels = Vec<(&'static str, String)>;
type Timings = Family<Labels, Histogram, fn() -> Histogram>;
type Seconds = Gauge<f64, AtomicU64>;

pub(crate) struct Metrics {
    registry: Registry,
    stages: Mutex<Stages>,
    rounds: Family<Labels, Counter>,
    forming: Histogram,
    recovery: Timings,
    stage_seconds: Family<Labels, Counter<f64, AtomicU64>>,
    round: Gauge,
    nodes: Gauge,
    world_size: Gauge,
    restarts: Gauge,
    leading: Gauge,
    workers: Gauge,
    steps: Family<Labels, Gauge>,
    step_ages: Family<Labels, Seconds>,
    margin: Family<Labels, Seconds>,
    goodput: Family<Labels, Gauge<f64, AtomicU64>>,
    calls: Family<Labels, Counter>,
    call_times: Timings,
    gpus: GpuMetrics,
    certificate_end: Family<Labels, Gauge>,
    tls: Option<MutualTls>,
}

/// Registers a metric that begins with nothing.
fn register<M: Metric + Clone + Default>(registry: &mut Registry, name: &str, help: &str) -> M {
    let metric = M::default();
    registry.register(name, help, metric.clone());
    metric
}

fn round_buckets() -> Histogram {
    Histogram::new(exponential_buckets(0.005, 2.0, 18))
}

fn call_buckets() -> Histogram {
    Histogram::new(exponential_buckets(0.0005, 2.0, 14))
}

impl Metrics {
    /// Those of this job's agent on this node, before it has joined; and of the certificates by which it speaks with
    /// others.
    pub(crate) fn new(job: &str, node: &str, tls: Option<MutualTls>) -> Arc<Metrics> {
        let labels = [("job", job), ("node", node)].map(|(name, value)| (name.into(), value.to_owned().into()));
        let mut registry = Registry::with_prefix_and_labels("elastic_agent", labels.into_iter());
        let forming = round_buckets();
        let recovery: Timings = Family::new_with_constructor(round_buckets);
        let call_times: Timings = Family::new_with_constructor(call_buckets);
        registry.register("round_forming_seconds", "Time from a round's forming to its running", forming.clone());
        registry.register("recovery_seconds", "Time without running workers before a round", recovery.clone());
        registry.register("store_request_seconds", "Time that requests to the store took", call_times.clone());
        let r = &mut registry;
        Arc::new(Metrics {
            stages: Mutex::new(Stages::new(elastic_store::clock::now())),
            rounds: register(r, "rounds", "Rounds in which workers ran here, by what had changed"),
            stage_seconds: register(
                r,
                "stage_seconds",
                "Time that the node spent waiting, forming, starting and running",
            ),
            round: register(r, "round", "Number of the current round"),
            nodes: register(r, "round_nodes", "Nodes of the current round"),
            world_size: register(r, "round_world_size", "Workers of the current round"),
            restarts: register(r, "round_restarts", "Restarts charged to the job"),
            leading: register(r, "leading", "1 while this agent leads the job"),
            workers: register(r, "workers", "Workers that run here"),
            steps: register(r, "worker_step", "Newest step that a worker reported"),
            step_ages: register(r, "worker_step_age_seconds", "Time since a worker first reported its newest step"),
            margin: register(
                r,
                "fence_margin_seconds",
                "Time until the guard kills the workers unless the lease is renewed",
            ),
            goodput: register(r, "goodput_ratio", "Share of the job's time that went into steps that count, 0 to 1"),
            calls: register(r, "store_requests", "Requests to the store, by kind and outcome"),
            forming,
            recovery,
            call_times,
            gpus: GpuMetrics::registered(r),
            certificate_end: register(
                r,
                "peer_certificate_expiry_timestamp_seconds",
                "When the certificate that this agent shows to others ends",
            ),
            tls,
            registry,
        })
    }

    /// Hears of the agent's requests to the store.
    pub(crate) fn observer(self: &Arc<Metrics>) -> CallObserver {
        let metrics = Arc::clone(self);
        Arc::new(move |call, ok, took| {
            let outcome = if ok { "ok" } else { "error" };
            metrics.calls.get_or_create(&vec![("call", call.to_owned()), ("outcome", outcome.to_owned())]).inc();
            metrics.call_times.get_or_create(&vec![("call", call.to_owned())]).observe(took.as_secs_f64());
        })
    }

    /// Hears of the job's goodput, if this node is the one that exports it.
    pub(crate) fn goodput_observer(self: &Arc<Metrics>) -> GoodputObserver {
        let metrics = Arc::clone(self);
        Arc::new(move |goodput| match goodput {
            Some(goodput) => {
                metrics.goodput.get_or_create(&Vec::new()).set(goodput);
            }
            None => metrics.goodput.clear(),
        })
    }

    /// Follows the round and the workers for as long as the agent runs.
    pub(crate) async fn follow(
        self: Arc<Metrics>,
        mut status: watch::Receiver<Status>,
        mut group: watch::Receiver<GroupState>,
    ) {
        loop {
            self.see(elastic_store::clock::now(), &status.borrow_and_update(), &group.borrow_and_update());
            let open = tokio::select! {
                changed = status.changed() => changed.is_ok(),
                changed = group.changed() => changed.is_ok(),
            };
            if !open {
                return;
            }
        }
    }

    fn stages(&self) -> MutexGuard<'_, Stages> {
        self.stages.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn see(&self, now: Time, status: &Status, group: &GroupState) {
        for ended in self.stages().step(now, &Seen::of(status, group)) {
            match ended {
                Ended::Forming(took) => self.forming.observe(took.as_secs_f64()),
                Ended::Recovery(change, took) => {
                    let labels = vec![("change", change.to_owned())];
                    self.rounds.get_or_create(&labels).inc();
                    self.recovery.get_or_create(&labels).observe(took.as_secs_f64());
                }
            }
        }
    }

    /// The OpenMetrics text format, as things are now.
    pub(super) fn render(
        &self,
        now: Time,
        status: &Status,
        group: &GroupState,
        steps: &Steps,
        gpus: &[GpuState],
    ) -> String {
        self.see(now, status, group);
        self.gpus.set(gpus);
        let number = |value: u64| i64::try_from(value).unwrap_or(i64::MAX);
        if let Some(round) = status.round.as_ref().map(|round| &round.value) {
            self.round.set(number(round.number));
            self.nodes.set(i64::from(round.group_world_size));
            self.world_size.set(i64::from(round.world_size));
            self.restarts.set(i64::from(round.restarts));
        }
        self.leading.set(i64::from(status.leading));
        self.workers.set(number(group.running() as u64));
        self.steps.clear();
        self.step_ages.clear();
        for worker in &group.workers {
            let Some((step, at)) = steps(worker.local_rank) else { continue };
            let labels = vec![("local_rank", worker.local_rank.to_string()), ("rank", worker.rank.to_string())];
            self.steps.get_or_create(&labels).set(number(step));
            self.step_ages.get_or_create(&labels).set(now.since(at).as_secs_f64());
        }
        self.margin.clear();
        if let Some(fence) = group.fence {
            self.margin.get_or_create(&Vec::new()).set(fence.since(now).as_secs_f64());
        }
        if let Some(tls) = &self.tls {
            self.certificate_end.get_or_create(&Vec::new()).set(number(tls.good_until()));
        }
        let stages = self.stages();
        for stage in Stage::ALL {
            let counted = self.stage_seconds.get_or_create(&vec![("stage", stage.name().to_owned())]);
            let spent = stages.spent(stage, now).as_secs_f64();
            counted.inc_by((spent - counted.get()).max(0.0));
        }
        drop(stages);
        let mut text = String::new();
        // Writing to a string does not fail.
        let _ = encode(&mut text, &self.registry);
        text
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::machine::nvml::{GpuHealth, GpuMemory};

    #[test]
    fn dashboard_and_alerts_ask_for_nothing_that_is_not_served() {
        // Given an agent that has something to say in each family: without a series a family is not shown at all,
        let metrics = Metrics::new("digits", "a", None);
        let label = |name, value: &str| vec![(name, value.to_owned())];
        metrics.observer()("read", true, Duration::from_millis(1));
        metrics.rounds.get_or_create(&label("change", "first")).inc();
        metrics.recovery.get_or_create(&label("change", "first")).observe(1.0);
        metrics.stage_seconds.get_or_create(&label("stage", "running")).inc_by(1.0);
        metrics.steps.get_or_create(&label("rank", "0")).set(1);
        metrics.step_ages.get_or_create(&label("rank", "0")).set(1.0);
        metrics.margin.get_or_create(&Vec::new()).set(1.0);
        metrics.certificate_end.get_or_create(&Vec::new()).set(1);
        let all = GpuHealth {
            utilization: Some(75),
            memory: Some(GpuMemory::default()),
            temperature: Some(40),
            power: Some(1),
            uncorrected_errors: Some(0),
            ..GpuHealth::default()
        };
        metrics.gpus.set(&[GpuState { index: 0, uuid: None, health: Some(all) }]);
        let mut served = String::new();
        encode(&mut served, &metrics.registry).unwrap();

        // then each metric that a query or a variable of the dashboard names is there, of the kind that it is taken for.
        let text = include_str!("../../../../deploy/grafana/agents.json");
        let dashboard: serde_json::Value = serde_json::from_str(text).expect("the dashboard is JSON");
        assert!(dashboard["panels"].as_array().is_some_and(|panels| panels.len() >= 10), "{dashboard}");
        let words = |text: &'static str| text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
        let mut names: Vec<&str> = words(text).filter(|name| name.starts_with("elastic_")).collect();
        assert!(names.len() >= 14, "{names:?}");
        // The other alerts are on the coordinator's metrics.
        let alerts = include_str!("../../../../deploy/prometheus/alerts.yaml");
        names.extend(words(alerts).filter(|name| name.starts_with("elastic_agent_")));
        for name in names {
            let histogram = name.strip_suffix("_bucket").or(name.strip_suffix("_sum"));
            let (family, kind) = match (histogram, name.strip_suffix("_total")) {
                (Some(family), _) => (family, "histogram"),
                (_, Some(family)) => (family, "counter"),
                _ => (name, "gauge"),
            };
            assert!(served.contains(&format!("# TYPE {family} {kind}\n")), "{name} is no {kind} in\n{served}");
        }
    }
}
