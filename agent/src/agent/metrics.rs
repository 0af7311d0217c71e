//! What Prometheus is told of one agent: `/metrics` at `--health-port`. `docs/metrics.md` documents each name.
//!
//! A node is always in one of four states, and the time in each is counted:
//!
//! ```text
//!   waiting ──▶ forming ──▶ starting ──▶ running ──▶ forming …
//! ```
//!
//! `Stages` follows the states, purely: it is shown the round and the workers whenever one of both changes, and says
//! how long a rendezvous and a recovery took.

use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use elastic_coordinator::job::{RoundRecord, RoundState};
use elastic_coordinator::node::Status;
use elastic_coordinator::store::metered::CallObserver;
use elastic_coordinator::time::Time;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;
use tokio::sync::watch;

use crate::machine::gpu_watch::GpuState;
use crate::workers::group::GroupState;
use crate::workers::watchdog::Steps;

mod gpus;

use gpus::GpuMetrics;

type Labels = Vec<(&'static str, String)>;
type Timings = Family<Labels, Histogram, fn() -> Histogram>;
type Seconds = Gauge<f64, AtomicU64>;

/// What a node is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// It has no place in a round: it joins, or is a spare.
    Waiting,
    /// A round is forming.
    Forming,
    /// Its round runs, and its workers are being started.
    Starting,
    /// Its workers run.
    Running,
}

impl Stage {
    const ALL: [Stage; 4] = [Stage::Waiting, Stage::Forming, Stage::Starting, Stage::Running];

    fn name(self) -> &'static str {
        match self {
            Stage::Waiting => "waiting",
            Stage::Forming => "forming",
            Stage::Starting => "starting",
            Stage::Running => "running",
        }
    }

    fn of(seen: &Seen) -> Stage {
        match seen.round.map(|round| round.state) {
            Some(RoundState::Forming) => Stage::Forming,
            None | Some(RoundState::Running) if seen.workers_run => Stage::Running,
            Some(RoundState::Running) if seen.is_member => Stage::Starting,
            _ => Stage::Waiting,
        }
    }
}

/// The part of a round's record that tells one change of the group from another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct RoundSeen {
    number: u64,
    state: RoundState,
    nodes: u32,
    restarts: u32,
}

impl From<&RoundRecord> for RoundSeen {
    fn from(round: &RoundRecord) -> RoundSeen {
        let RoundRecord { number, state, group_world_size: nodes, restarts, .. } = *round;
        RoundSeen { number, state, nodes, restarts }
    }
}

/// What is seen at one time.
#[derive(Debug, Clone, Copy)]
struct Seen {
    round: Option<RoundSeen>,
    /// This node has a place in the round.
    is_member: bool,
    /// A worker of the round runs here.
    workers_run: bool,
}

impl Seen {
    fn of(status: &Status, group: &GroupState) -> Seen {
        let round = status.round.as_ref().map(|round| RoundSeen::from(&round.value));
        let workers_run = group.workers.iter().any(|worker| worker.exit.is_none());
        Seen {
            round,
            is_member: status.credentials.is_some() || status.membership.is_some(),
            // TorchElastic's protocol shows no records of rounds.
            workers_run: workers_run && round.is_none_or(|round| round.number == group.round),
        }
    }
}

/// How a round differs from the one in which this node's workers ran before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RoundChange {
    /// They did not run before.
    First,
    /// A worker failed: the job was charged a restart.
    Restart,
    /// There are more nodes.
    Growth,
    /// There are fewer nodes.
    Shrinkage,
    /// As many nodes: one took another's place, or the operator asked for a round.
    Other,
}

impl RoundChange {
    fn between(before: Option<RoundSeen>, after: RoundSeen) -> RoundChange {
        match before {
            None => RoundChange::First,
            Some(before) if after.restarts > before.restarts => RoundChange::Restart,
            Some(before) if after.nodes > before.nodes => RoundChange::Growth,
            Some(before) if after.nodes < before.nodes => RoundChange::Shrinkage,
            Some(_) => RoundChange::Other,
        }
    }

    fn name(self) -> &'static str {
        match self {
            RoundChange::First => "first",
            RoundChange::Restart => "restart",
            RoundChange::Growth => "growth",
            RoundChange::Shrinkage => "shrinkage",
            RoundChange::Other => "other",
        }
    }
}

/// What has just ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ended {
    /// A round formed in this time.
    Forming(Duration),
    /// Workers run again, after this time without training; the first time, since the agent began.
    Recovery(RoundChange, Duration),
}

/// The states of a node, one after the other.
#[derive(Debug)]
struct Stages {
    stage: Stage,
    since: Time,
    /// Time spent in each stage before the present one.
    spent: [Duration; 4],
    /// When the present round began to form.
    forming: Option<(u64, Time)>,
    /// The newest round in which workers ran here.
    ran: Option<RoundSeen>,
    /// Since when no workers run, or not in the newest round; `None` while they do.
    idle: Option<Time>,
}

impl Stages {
    fn new(now: Time) -> Stages {
        Stages {
            stage: Stage::Waiting,
            since: now,
            spent: [Duration::ZERO; 4],
            forming: None,
            ran: None,
            idle: Some(now),
        }
    }

    /// Takes note of what is seen now, and returns what has just ended.
    fn step(&mut self, now: Time, seen: &Seen) -> Vec<Ended> {
        let stage = Stage::of(seen);
        let mut ended = Vec::new();
        if let Some(round) = seen.round {
            match round.state {
                RoundState::Forming if self.forming.is_none_or(|(number, _)| number != round.number) => {
                    self.forming = Some((round.number, now));
                }
                RoundState::Running => {
                    if let Some((_, began)) = self.forming.take().filter(|(number, _)| *number == round.number) {
                        ended.push(Ended::Forming(now.since(began)));
                    }
                }
                _ => {}
            }
            if stage == Stage::Running {
                // A round that came and went between two looks counts as well: its number is new.
                let is_next = self.ran.is_none_or(|ran| ran.number != round.number);
                if is_next {
                    let idle = self.idle.unwrap_or(now);
                    ended.push(Ended::Recovery(RoundChange::between(self.ran, round), now.since(idle)));
                }
                (self.ran, self.idle) = (Some(round), None);
            }
        }
        if stage != Stage::Running {
            self.idle.get_or_insert(now);
        }
        if stage != self.stage {
            self.spent[self.stage as usize] += now.since(self.since);
            (self.stage, self.since) = (stage, now);
        }
        ended
    }

    /// Time spent in a stage until now.
    fn spent(&self, stage: Stage, now: Time) -> Duration {
        let current = if stage == self.stage { now.since(self.since) } else { Duration::ZERO };
        self.spent[stage as usize] + current
    }
}

/// All metrics of an agent.
pub struct Metrics {
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
    calls: Family<Labels, Counter>,
    call_times: Timings,
    gpus: GpuMetrics,
}

fn round_buckets() -> Histogram {
    Histogram::new(exponential_buckets(0.005, 2.0, 18))
}

fn call_buckets() -> Histogram {
    Histogram::new(exponential_buckets(0.0005, 2.0, 14))
}

impl Metrics {
    /// Those of this job's agent on this node, before it has joined.
    pub fn new(job: &str, node: &str) -> Arc<Metrics> {
        let labels = [("job", job), ("node", node)].map(|(name, value)| (name.into(), value.to_owned().into()));
        let mut registry = Registry::with_prefix_and_labels("elastic_agent", labels.into_iter());
        let forming = round_buckets();
        let recovery: Timings = Family::new_with_constructor(round_buckets);
        let call_times: Timings = Family::new_with_constructor(call_buckets);
        macro_rules! register {
            ($name:literal, $help:literal) => {{
                let metric = Default::default();
                registry.register($name, $help, Clone::clone(&metric));
                metric
            }};
        }
        registry.register("round_forming_seconds", "Time from a round's forming to its running", forming.clone());
        registry.register("recovery_seconds", "Time without running workers before a round", recovery.clone());
        registry.register("store_request_seconds", "Time that requests to the store took", call_times.clone());
        Arc::new(Metrics {
            stages: Mutex::new(Stages::new(Time::now())),
            rounds: register!("rounds", "Rounds in which workers ran here, by what had changed"),
            stage_seconds: register!(
                "stage_seconds",
                "Time that the node spent waiting, forming, starting and running"
            ),
            round: register!("round", "Number of the current round"),
            nodes: register!("round_nodes", "Nodes of the current round"),
            world_size: register!("round_world_size", "Workers of the current round"),
            restarts: register!("round_restarts", "Restarts charged to the job"),
            leading: register!("leading", "1 while this agent leads the job"),
            workers: register!("workers", "Workers that run here"),
            steps: register!("worker_step", "Newest step that a worker reported"),
            step_ages: register!("worker_step_age_seconds", "Time since a worker first reported its newest step"),
            margin: register!(
                "fence_margin_seconds",
                "Time until the guard kills the workers unless the lease is renewed"
            ),
            calls: register!("store_requests", "Requests to the store, by kind and outcome"),
            forming,
            recovery,
            call_times,
            gpus: GpuMetrics::registered(&mut registry),
            registry,
        })
    }

    /// Hears of the agent's requests to the store.
    pub fn observer(self: &Arc<Metrics>) -> CallObserver {
        let metrics = Arc::clone(self);
        Arc::new(move |call, ok, took| {
            let outcome = if ok { "ok" } else { "error" };
            metrics.calls.get_or_create(&vec![("call", call.to_owned()), ("outcome", outcome.to_owned())]).inc();
            metrics.call_times.get_or_create(&vec![("call", call.to_owned())]).observe(took.as_secs_f64());
        })
    }

    /// Follows the round and the workers for as long as the agent runs.
    pub async fn follow(
        self: Arc<Metrics>,
        mut status: watch::Receiver<Status>,
        mut group: watch::Receiver<GroupState>,
    ) {
        loop {
            self.see(Time::now(), &status.borrow_and_update(), &group.borrow_and_update());
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
                    let labels = vec![("change", change.name().to_owned())];
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
        let running = group.workers.iter().filter(|worker| worker.exit.is_none());
        self.workers.set(number(running.count() as u64));
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
    use super::*;
    use crate::machine::nvml::{GpuHealth, GpuMemory};

    fn round(number: u64, state: RoundState, nodes: u32, restarts: u32) -> Option<RoundSeen> {
        Some(RoundSeen { number, state, nodes, restarts })
    }

    fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    /// At these seconds this is seen: the round, whether this node is a member, whether its workers run. Then these
    /// things have just ended.
    type Look = (u64, Option<RoundSeen>, bool, bool, Vec<Ended>);

    #[test]
    fn rendezvous_and_recoveries_are_timed_and_told_apart() {
        use Ended::{Forming, Recovery};
        use RoundState::{Forming as F, Running as R};
        let looks: Vec<Look> = vec![
            (0, None, false, false, vec![]),
            (1, round(1, F, 0, 0), false, false, vec![]),
            (2, round(1, F, 0, 0), false, false, vec![]),
            (4, round(1, R, 2, 0), true, false, vec![Forming(seconds(3))]),
            (5, round(1, R, 2, 0), true, true, vec![Recovery(RoundChange::First, seconds(5))]),
            (9, round(1, R, 2, 0), true, true, vec![]),
            // A worker fails.
            (10, round(1, R, 2, 0), true, false, vec![]),
            (11, round(2, F, 2, 0), true, false, vec![]),
            (12, round(2, R, 2, 1), true, false, vec![Forming(seconds(1))]),
            (13, round(2, R, 2, 1), true, true, vec![Recovery(RoundChange::Restart, seconds(3))]),
            // A node joins, and the workers keep their processes.
            (20, round(3, F, 2, 1), true, true, vec![]),
            (21, round(3, R, 3, 1), true, false, vec![Forming(seconds(1))]),
            (22, round(3, R, 3, 1), true, true, vec![Recovery(RoundChange::Growth, seconds(2))]),
            // A node is lost, and nobody looks while the next round forms.
            (30, round(4, R, 2, 1), true, true, vec![Recovery(RoundChange::Shrinkage, seconds(0))]),
            // This node loses its place and gets one again.
            (40, round(5, R, 2, 1), false, false, vec![]),
            (45, round(6, R, 2, 1), true, true, vec![Recovery(RoundChange::Other, seconds(5))]),
        ];
        let mut stages = Stages::new(Time::ZERO);
        for (at, round, is_member, workers_run, ended) in looks {
            let seen = Seen { round, is_member, workers_run };
            assert_eq!(stages.step(Time::ZERO + seconds(at), &seen), ended, "at {at} s: {seen:?}");
        }
        let spent = Stage::ALL.map(|stage| stages.spent(stage, Time::ZERO + seconds(50)).as_secs());
        assert_eq!(spent, [1 + 5, 3 + 1 + 1, 1 + 1 + 1 + 1, 5 + 7 + 18 + 5], "waiting, forming, starting, running");
    }

    #[test]
    fn dashboard_and_alerts_ask_for_nothing_that_is_not_served() {
        // Given an agent that has something to say in each family: without a series a family is not shown at all,
        let metrics = Metrics::new("digits", "a");
        let label = |name, value: &str| vec![(name, value.to_owned())];
        metrics.observer()("read", true, Duration::from_millis(1));
        metrics.rounds.get_or_create(&label("change", "first")).inc();
        metrics.recovery.get_or_create(&label("change", "first")).observe(1.0);
        metrics.stage_seconds.get_or_create(&label("stage", "running")).inc_by(1.0);
        metrics.steps.get_or_create(&label("rank", "0")).set(1);
        metrics.step_ages.get_or_create(&label("rank", "0")).set(1.0);
        metrics.margin.get_or_create(&Vec::new()).set(1.0);
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
        let text = include_str!("../../../deploy/grafana/agents.json");
        let dashboard: serde_json::Value = serde_json::from_str(text).expect("the dashboard is JSON");
        assert!(dashboard["panels"].as_array().is_some_and(|panels| panels.len() >= 10), "{dashboard}");
        let words = |text: &'static str| text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
        let mut names: Vec<&str> = words(text).filter(|name| name.starts_with("elastic_")).collect();
        assert!(names.len() >= 14, "{names:?}");
        // The other alerts are on the coordinator's metrics.
        let alerts = include_str!("../../../deploy/prometheus/alerts.yaml");
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
