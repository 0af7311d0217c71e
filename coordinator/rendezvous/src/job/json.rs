//! Jobs as programs read them: what `elasticctl -o json` prints and the coordinator's HTTP API answers. The records in
//! them have their stored form (`docs/protocol.md`).

use serde_json::{Value, json};

use super::overview::{Job, Overview};
use super::{EventRecord, JobId, LeaderRecord, ProgressRecord, Versioned};

/// The summaries of all jobs that have begun, by id.
pub fn jobs(overview: &Overview) -> Value {
    overview.jobs.iter().filter(|(_, job)| job.round.is_some()).map(|(id, job)| summary(id, job)).collect()
}

/// One job in a list: its state, its current round, how many nodes it has and may have, who leads it, how far it
/// has come.
pub fn summary(id: &JobId, job: &Job) -> Value {
    let (min, max) = job.range().unzip();
    json!({
        "job": id.to_string(),
        "protocol": job.protocol.as_ref().map(|protocol| protocol.version),
        "state": job.state(),
        "round": job.round.as_ref().map(|round| &round.value),
        "min_nodes": min,
        "max_nodes": max,
        "nodes": job.nodes.len(),
        "spares": job.spares().count(),
        "leader": job.leader.as_ref().map(leader),
        "progress": job.progress.as_ref().map(progress),
    })
}

fn progress(record: &ProgressRecord) -> Value {
    let mut value = json!(record);
    value["goodput"] = json!(record.goodput());
    value
}

fn leader(leader: &Versioned<LeaderRecord>) -> Value {
    json!({
        "node": leader.value.node,
        "peer": leader.value.peer,
        "coordinator": leader.value.coordinator,
        "release": leader.value.release,
        "term": leader.modified,
    })
}

/// Everything about one job but its history: the [`summary`], in which `nodes` is the list of them.
pub fn job(id: &JobId, job: &Job) -> Value {
    let waiting = job.waiting();
    let nodes: Vec<Value> = job
        .nodes
        .iter()
        .map(|(node, record)| {
            let waits = waiting.of(node).map(|waits| waits.to_string());
            json!({ "id": node, "record": record.value, "rank": job.rank(node), "waits": waits })
        })
        .collect();
    let mut value = summary(id, job);
    value["spec"] = json!(job.spec);
    value["desired"] = json!(job.desired.as_ref().map(|desired| &desired.value));
    value["checkpoint"] = json!(job.checkpoint.as_ref().map(|at| &at.value));
    value["nodes"] = json!(nodes);
    value["evicted"] = job.evicted.iter().map(|(node, stone)| json!({ "node": node, "record": stone })).collect();
    value
}

/// A line of a job's history, with its number.
pub fn event(number: u64, event: &EventRecord) -> Value {
    let mut value = json!(event);
    value["number"] = json!(number);
    value
}
