//! What Prometheus reads: gauges out of the jobs' records at each scrape, counters out of their changes. The meaning
//! of each name is documented in `docs/metrics.md`.

use std::collections::BTreeMap;
use std::sync::atomic::AtomicU64;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;

use elastic_rendezvous::job::overview::{Change, Job, Overview};
use elastic_rendezvous::job::{Excluded, Fate, JobId, JobState, Phase, RoundState, Tombstone};
use elastic_rendezvous::time::Time;

type Labels = Vec<(&'static str, String)>;
type Timings = Family<Labels, Histogram, fn() -> Histogram>;

/// All of a replica's metrics.
pub struct Metrics {
    registry: Registry,
    jobs: Family<Labels, Gauge>,
    nodes: Family<Labels, Gauge>,
    excluded: Family<Labels, Gauge>,
    round: Family<Labels, Gauge>,
    world_size: Family<Labels, Gauge>,
    restarts: Family<Labels, Gauge>,
    checkpoint: Family<Labels, Gauge>,
    step: Family<Labels, Gauge>,
    loss: Family<Labels, Gauge<f64, AtomicU64>>,
    goodput: Family<Labels, Gauge<f64, AtomicU64>>,
    leading: Gauge,
    queue: Histogram,
    formed: Counter,
    ended: Family<Labels, Counter>,
    deleted: Counter,
    evictions: Family<Labels, Counter>,
    terms: Family<Labels, Counter>,
    forming: Histogram,
    calls: Family<Labels, Counter>,
    call_times: Timings,
    certificate_end: Family<Labels, Gauge>,
    /// Since when rounds are forming: their number, and when they were first seen so.
    begun: Mutex<BTreeMap<JobId, (u64, Time)>>,
}

fn call_buckets() -> Histogram {
    Histogram::new(exponential_buckets(0.0005, 2.0, 14))
}

impl Default for Metrics {
    fn default() -> Metrics {
        let mut registry = Registry::with_prefix("elastic");
        let forming = Histogram::new(exponential_buckets(0.005, 2.0, 18));
        let queue = Histogram::new(exponential_buckets(1.0, 4.0, 7));
        let call_times: Timings = Family::new_with_constructor(call_buckets);
        macro_rules! register {
            ($name:literal, $help:literal) => {{
                let metric = Default::default();
                registry.register($name, $help, Clone::clone(&metric));
                metric
            }};
        }
        registry.register("round_forming_seconds", "Time from a round's forming to its running", forming.clone());
        registry.register("leader_queue", "Notes that waited when a leader took them in", queue.clone());
        registry.register("store_request_seconds", "Time that requests to the store took", call_times.clone());
        let metrics = Metrics {
            jobs: register!("jobs", "Jobs by where they stand"),
            nodes: register!("job_nodes", "Nodes of a job by what they are doing"),
            excluded: register!("job_nodes_excluded", "Names of nodes that get no place in a job"),
            round: register!("job_round", "Number of a job's current round"),
            world_size: register!("job_world_size", "Workers of a job's current round, 0 while none runs"),
            restarts: register!("job_restarts", "Restarts charged to a job"),
            checkpoint: register!("job_checkpoint_step", "Step of a job's latest committed checkpoint"),
            step: register!("job_step", "Steps that a job's workers have reported"),
            loss: register!("job_loss", "Training loss that a job's workers have reported"),
            goodput: register!(
                "job_goodput_ratio",
                "Part of the time that went into steps that had not been done before"
            ),
            leading: register!("leading", "Jobs that this replica leads"),
            formed: register!("rounds_formed", "Rounds seen to begin running"),
            ended: register!("jobs_ended", "Jobs seen to end, by their result"),
            deleted: register!("jobs_deleted", "Ended jobs that this replica deleted"),
            evictions: register!("evictions", "Nodes seen to be evicted, by what was known of them"),
            terms: register!("leader_terms", "Terms of leadership seen to begin, by who leads"),
            calls: register!("store_requests", "Requests to the store, by kind and outcome"),
            certificate_end: register!(
                "peer_certificate_expiry_timestamp_seconds",
                "When the certificate that this replica shows to agents ends"
            ),
            forming,
            queue,
            call_times,
            registry,
            begun: Mutex::default(),
        };
        metrics.begin_at_zero();
        metrics
    }
}

impl Metrics {
    /// Shows counters before they have counted anything: else Prometheus takes the first event for the beginning, and
    /// sees no increase.
    fn begin_at_zero(&self) {
        for by in ["agent", "coordinator"] {
            drop(self.terms.get_or_create(&vec![("by", by.to_owned())]));
        }
        for fate in FATES {
            drop(self.evictions.get_or_create(&vec![("fate", fate.to_owned())]));
        }
        for state in [RoundState::Succeeded, RoundState::Failed, RoundState::Closed] {
            drop(self.ended.get_or_create(&vec![("state", state.to_string())]));
        }
        for call in ["read", "write", "watch", "grant", "keep_alive", "revoke"] {
            for outcome in ["ok", "error"] {
                drop(self.calls.get_or_create(&vec![("call", call.to_owned()), ("outcome", outcome.to_owned())]));
            }
        }
    }

    pub(super) fn saw(&self, now: Time, job: &JobId, change: &Change) {
        match change {
            Change::Term(leader) => {
                let by = if leader.value.coordinator { "coordinator" } else { "agent" };
                self.terms.get_or_create(&vec![("by", by.to_owned())]).inc();
            }
            Change::Evicted(_, tombstone) => {
                self.evictions.get_or_create(&vec![("fate", fate(tombstone).to_owned())]).inc();
            }
            Change::Round(round) => {
                let mut begun = self.begun.lock().unwrap_or_else(PoisonError::into_inner);
                match round.state {
                    // How long an operator pauses a job is not the time that forming a round takes.
                    RoundState::Forming if round.paused => drop(begun.remove(job)),
                    RoundState::Forming => {
                        if begun.get(job).is_none_or(|(number, _)| *number != round.number) {
                            begun.insert(job.clone(), (round.number, now));
                        }
                    }
                    RoundState::Running => {
                        self.formed.inc();
                        if let Some((_, since)) = begun.remove(job).filter(|(number, _)| *number == round.number) {
                            self.forming.observe(now.since(since).as_secs_f64());
                        }
                    }
                    ended => {
                        begun.remove(job);
                        self.ended.get_or_create(&vec![("state", ended.to_string())]).inc();
                    }
                }
            }
            Change::Leaderless | Change::Event(_) => {}
        }
    }

    pub(super) fn deleted(&self) {
        self.deleted.inc();
    }

    pub(super) fn leading(&self, jobs: usize) {
        self.leading.set(i64::try_from(jobs).unwrap_or(i64::MAX));
    }

    /// A leader takes in what waits for it: so many notes.
    pub(super) fn queued(&self, notes: usize) {
        self.queue.observe(notes as f64);
    }

    /// A request to the store was answered: its kind, whether it was carried out, and how long it took.
    pub fn called(&self, call: &str, ok: bool, took: Duration) {
        let outcome = if ok { "ok" } else { "error" };
        self.calls.get_or_create(&vec![("call", call.to_owned()), ("outcome", outcome.to_owned())]).inc();
        self.call_times.get_or_create(&vec![("call", call.to_owned())]).observe(took.as_secs_f64());
    }

    /// The text format, with the gauges as `overview` has them now, and when the replica's certificate ends, in
    /// seconds since 1970.
    pub(super) fn render(&self, overview: Option<&Overview>, certificate_end: Option<u64>) -> String {
        [&self.jobs, &self.nodes, &self.excluded, &self.round].into_iter().for_each(Family::clear);
        [&self.world_size, &self.restarts, &self.checkpoint, &self.step].into_iter().for_each(Family::clear);
        [&self.loss, &self.goodput].into_iter().for_each(Family::clear);
        for state in JobState::ALL {
            self.jobs.get_or_create(&vec![("state", state.to_string())]).set(0);
        }
        for (id, job) in overview.iter().flat_map(|overview| &overview.jobs) {
            self.job(id, job);
        }
        if let Some(end) = certificate_end {
            self.certificate_end.get_or_create(&Vec::new()).set(i64::try_from(end).unwrap_or(i64::MAX));
        }
        let mut text = String::new();
        // Writing to a string does not fail.
        let _ = encode(&mut text, &self.registry);
        text
    }

    fn job(&self, id: &JobId, job: &Job) {
        let Some(round) = job.round.as_ref().map(|round| &round.value) else { return };
        let of_job = || vec![("job", id.to_string())];
        self.jobs.get_or_create(&vec![("state", JobState::from(round).to_string())]).inc();
        self.round.get_or_create(&of_job()).set(i64::try_from(round.number).unwrap_or(i64::MAX));
        self.restarts.get_or_create(&of_job()).set(i64::from(round.restarts));
        let running = round.state == RoundState::Running;
        self.world_size.get_or_create(&of_job()).set(if running { i64::from(round.world_size) } else { 0 });
        if let Some(checkpoint) = &job.checkpoint {
            self.checkpoint.get_or_create(&of_job()).set(i64::try_from(checkpoint.value.step).unwrap_or(i64::MAX));
        }
        if let Some(progress) = &job.progress {
            self.step.get_or_create(&of_job()).set(i64::try_from(progress.step).unwrap_or(i64::MAX));
            for (family, value) in [(&self.loss, progress.loss), (&self.goodput, progress.goodput())] {
                if let Some(value) = value {
                    family.get_or_create(&of_job()).set(value);
                }
            }
        }
        for phase in [Phase::Waiting, Phase::Running, Phase::Done, Phase::Failed, Phase::Draining, Phase::Stopped] {
            let count = job.nodes.values().filter(|node| node.value.phase == phase).count();
            let labels = vec![("job", id.to_string()), ("phase", phase.to_string())];
            self.nodes.get_or_create(&labels).set(i64::try_from(count).unwrap_or(i64::MAX));
        }
        let by_operator = job.desired.as_ref().map_or(0, |desired| desired.value.exclude.len());
        let for_failures =
            round.faults.iter().filter(|faults| matches!(job.excluded(&faults.node), Some(Excluded::ForFailures(_))));
        for (by, count) in [("operator", by_operator), ("failures", for_failures.count())] {
            let labels = vec![("job", id.to_string()), ("by", by.to_owned())];
            self.excluded.get_or_create(&labels).set(i64::try_from(count).unwrap_or(i64::MAX));
        }
    }
}

const FATES: [&str; 5] = ["drained", "refused", "dead", "fenced", "unknown"];

fn fate(tombstone: &Tombstone) -> &'static str {
    match tombstone {
        Tombstone { drained: true, .. } => "drained",
        Tombstone { refused: true, .. } => "refused",
        Tombstone { fate: Fate::Dead, .. } => "dead",
        Tombstone { fate: Fate::Fenced, .. } => "fenced",
        Tombstone { fate: Fate::Unknown, .. } => "unknown",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use elastic_rendezvous::job::samples::overview;
    use elastic_rendezvous::job::{NodeId, RoundRecord, Versioned};
    use elastic_store::Revision;

    fn round(number: u64, state: &str) -> Change {
        let json = format!(r#"{{"number":{number},"generation":1,"state":"{state}","reason":"r"}}"#);
        Change::Round(Box::new(serde_json::from_str::<RoundRecord>(&json).unwrap()))
    }

    #[test]
    fn the_time_to_form_runs_from_the_first_forming_of_a_number() {
        let metrics = Metrics::default();
        let job = "J".parse().unwrap();
        metrics.saw(Time::from_millis(1000), &job, &round(2, "forming"));
        metrics.saw(Time::from_millis(2000), &job, &round(2, "forming"));
        metrics.saw(Time::from_millis(3000), &job, &round(2, "running"));
        let text = metrics.render(None, None);
        assert!(text.contains("elastic_round_forming_seconds_sum 2.0"), "{text}");
        assert!(text.contains("elastic_rounds_formed_total 1"), "{text}");
        assert!(text.contains(r#"elastic_jobs{state="running"} 0"#), "{text}");
    }

    #[test]
    fn a_pause_is_no_time_to_form() {
        let metrics = Metrics::default();
        let job = "J".parse().unwrap();
        let paused = Change::Round(Box::new(
            serde_json::from_str(r#"{"number":2,"generation":1,"state":"forming","paused":true,"reason":"r"}"#)
                .unwrap(),
        ));
        metrics.saw(Time::from_millis(1000), &job, &paused);
        metrics.saw(Time::from_millis(900_000), &job, &round(2, "forming"));
        metrics.saw(Time::from_millis(901_000), &job, &round(2, "running"));
        let text = metrics.render(None, None);
        assert!(text.contains("elastic_round_forming_seconds_sum 1.0"), "{text}");
    }

    #[test]
    fn names_that_get_no_place_are_counted_by_who_says_so() {
        let records = [
            (
                "J/round",
                r#"{"number":3,"generation":1,"state":"running","reason":"r","faults":[
                {"node":"a","failures":1},{"node":"b","exclusions":1,"excluded":{"round":2,"lasts_ms":300000}},
                {"node":"c","exclusions":1,"excluded":{"round":3,"lasts_ms":300000}}]}"#,
            ),
            ("J/desired", r#"{"exclude":["x","y"],"include":[{"node":"b","round":2},{"node":"c","round":2}]}"#),
        ];
        let overview = overview(&records);
        let text = Metrics::default().render(Some(&overview), None);
        for told in [r#"{job="J",by="operator"} 2"#, r#"{job="J",by="failures"} 1"#] {
            assert!(text.contains(&format!("elastic_job_nodes_excluded{told}")), "{text}");
        }
    }

    #[test]
    fn the_first_event_is_an_increase() {
        let metrics = Metrics::default();
        let counters = |text: String| -> BTreeMap<String, String> {
            let lines = text.lines().filter(|line| line.contains("_total")).filter_map(|line| line.rsplit_once(' '));
            lines.map(|(series, value)| (series.to_owned(), value.to_owned())).collect()
        };
        let before = counters(metrics.render(None, None));
        let tombstone = serde_json::from_str(r#"{"reason":"r","round":1,"fate":"unknown"}"#).unwrap();
        let job = "J".parse().unwrap();
        metrics.saw(Time::from_millis(1), &job, &Change::Evicted(NodeId::from_text("a:1"), tombstone));
        metrics.saw(Time::from_millis(1), &job, &round(1, "failed"));
        metrics.called("write", false, Duration::from_millis(1));
        let after = counters(metrics.render(None, None));
        let counted: Vec<_> = after.iter().filter(|(_, value)| *value != "0").collect();
        assert_eq!(counted.len(), 3, "{counted:?}");
        assert!(before.values().all(|value| value == "0"), "{before:?}");
        assert!(after.keys().eq(before.keys()), "{before:?} {after:?}");
    }

    #[test]
    fn dashboard_and_alerts_ask_for_nothing_that_is_not_served() {
        // Given a service that has seen a job, a leader and an eviction: a family without labels is not shown at all,
        let metrics = Metrics::default();
        let overview = overview(&[
            ("J/round", r#"{"number":1,"generation":1,"state":"running","reason":"r"}"#),
            (
                "J/progress",
                r#"{"generation":1,"round":1,"step":9,"loss":0.5,"furthest_step":9,"since_ms":0,"at_ms":1000,
                    "productive_ms":750}"#,
            ),
            ("J/checkpoint", r#"{"step":7,"path":"/c","digest":"d","round":1}"#),
        ]);
        let leader = serde_json::from_str(r#"{"node":"a:1","peer":{"host":"h","port":1}}"#).unwrap();
        let job: JobId = "J".parse().unwrap();
        metrics.saw(
            Time::from_millis(1),
            &job,
            &Change::Term(Versioned { value: leader, created: Revision(1), modified: Revision(1) }),
        );
        let node = NodeId::from_text("a:1");
        let tombstone = serde_json::from_str(r#"{"reason":"r","round":1,"fate":"dead"}"#).unwrap();
        metrics.saw(Time::from_millis(1), &job, &Change::Evicted(node, tombstone));
        metrics.called("get", true, Duration::from_millis(1));
        let served = metrics.render(Some(&overview), Some(1));

        // then each metric that the dashboard's queries or the alerts name is there.
        let is_served = |name: &str| {
            let family = ["_bucket", "_total"].iter().find_map(|end| name.strip_suffix(end)).unwrap_or(name);
            served.contains(&format!("# TYPE {family} "))
        };

        let dashboard = include_str!("../../../deploy/grafana/elastic.json");
        let dashboard: serde_json::Value = serde_json::from_str(dashboard).expect("the dashboard is JSON");
        let mut asked = Vec::new();
        expressions(&dashboard, &mut asked);
        // Comments there name none.
        let alerts = include_str!("../../../deploy/prometheus/alerts.yaml");
        assert!(alerts.contains("- alert: "), "no alerts");
        asked.push(alerts.to_owned());
        let names = asked.iter().flat_map(|text| text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_')));
        // What agents serve is checked in their own tests.
        let ours = |name: &&str| name.starts_with("elastic_") && !name.starts_with("elastic_agent_");
        let names: Vec<&str> = names.filter(ours).collect();
        assert!(names.len() >= 10, "{names:?}");
        let missing: Vec<_> = names.into_iter().filter(|name| !is_served(name)).collect();
        assert!(missing.is_empty(), "{missing:?} are not in\n{served}");
    }

    /// Every `expr` of a dashboard.
    fn expressions(value: &serde_json::Value, found: &mut Vec<String>) {
        if let Some(text) = value.get("expr").and_then(serde_json::Value::as_str) {
            found.push(text.to_owned());
        }
        let below: Vec<_> = match value {
            serde_json::Value::Array(items) => items.iter().collect(),
            serde_json::Value::Object(fields) => fields.values().collect(),
            _ => Vec::new(),
        };
        below.into_iter().for_each(|value| expressions(value, found));
    }
}
