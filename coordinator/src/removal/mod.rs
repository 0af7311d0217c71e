//! Deleting the records of a job that has ended: the one place that does so, for `elasticctl delete` and for the
//! coordinator's retention. Checkpoint files are not touched.
//!
//! Once the records are gone, nothing tells agents of the same id that others were there: they begin at once. So a job
//! is deleted only when no one of it can be at work:
//!
//! 1. It has ended, and no node has a key but those that are done.
//! 2. Each member of its last round is gone. Its port says so where it refuses; where the host does not answer, the
//!    member is past its fence point at the latest `takeover_delay` after the end.
//! 3. The deletion is one transaction, guarded by `round` and `leader` as read and by no key under `nodes/`: a node that
//!    came meanwhile, or a job that began again, keeps everything.
//!
//! No lease is revoked and no agent is asked to do anything.

use std::collections::BTreeMap;
use std::time::Duration;

use elastic_proto::pulse::Found;
use futures::StreamExt;

use crate::nodes::members;
use elastic_node::dial;
use elastic_rendezvous::job::overview::{Job, Overview};
use elastic_rendezvous::job::{Endpoint, Fate, JobId, Keys, NodeId, Phase, RoundState};
use elastic_store::tls::MutualTls;
use elastic_store::{Guard, KeyValue, Op, OpResult, Revision, Store, StoreError, Txn};

/// How often a deletion is tried again that another write overtook.
const TRIES: usize = 5;

/// How long a port that gives no clear answer is asked again: an agent that ends holds it for a moment.
const PATIENCE: Duration = Duration::from_secs(1);

const ASKED_AT_ONCE: usize = 64;

/// Keys of done nodes that one transaction deletes: well below etcd's 128 operations, and each has a guard too.
const BATCH: usize = 50;

/// How much clocks of two machines may differ where the time since a job's end is taken from them. It matters only
/// where a host does not answer.
const CLOCKS: Duration = Duration::from_secs(3600);

/// Why a job was not deleted. Every message says what to do.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum RemovalError {
    /// The store fails.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// No such job, or no longer.
    #[error("there is no job {job}: nothing to delete")]
    NoSuchJob { job: JobId },
    /// It continues.
    #[error(
        "job {job} is {state}: only a job that has ended can be deleted. `elasticctl close {job}` ends it; delete it \
         when its agents have left"
    )]
    NotEnded { job: JobId, state: RoundState },
    /// It has ended, but some agents are still there.
    #[error(
        "job {job} has ended, but agents of it are still there: {nodes}. Wait until they have left, or stop them, then \
         delete it"
    )]
    Agents { job: JobId, nodes: String },
    /// It has ended, but hosts do not answer, so that workers may be at work there.
    #[error(
        "job {job} has ended, but workers may still run on: {nodes}. The ports of these agents do not answer from \
         here. {when}"
    )]
    Unconfirmed { job: JobId, nodes: String, when: String },
    /// Another version's.
    #[error("job {job} is left alone: {refusal}")]
    OtherVersion { job: JobId, refusal: String },
    /// Its records changed since it was chosen.
    #[error("job {job} was changed meanwhile: look at it again")]
    Changed { job: JobId },
}

/// Which job to delete.
#[derive(Debug, Clone)]
pub struct Target<'a> {
    /// Prefix of all jobs' keys.
    pub prefix: &'a str,
    /// The job.
    pub job: &'a JobId,
    /// The mod revision of `round` that it was chosen by; another one now is [`RemovalError::Changed`]. `None`: whatever
    /// is there.
    pub chosen: Option<Revision>,
    /// Milliseconds since the Unix epoch, here and now.
    pub now_ms: u64,
    /// How its agents' ports are asked.
    pub tls: Option<&'a MutualTls>,
}

/// Deletes a job's keys; how many there were. After an unknown outcome it is worth another try.
pub async fn remove(store: &dyn Store, target: &Target<'_>) -> Result<i64, RemovalError> {
    let mut keys = 0;
    for _ in 0..TRIES {
        let (job, _) = clear(store, target).await?;
        let guards = guards(&job);
        // Keys of done nodes hang on no lease, so the last guard would wait for them for ever.
        let done: Vec<_> = job.nodes.iter().collect();
        let mut overtaken = false;
        for batch in done.chunks(BATCH) {
            let unchanged = batch.iter().map(|(node, record)| Guard::modified(job.keys.node(node), record.modified));
            let ops: Vec<Op> = batch.iter().map(|(node, _)| Op::delete(job.keys.node(node))).collect();
            let result = store.txn(Txn::of(ops).guarded(guards.iter().cloned().chain(unchanged))).await?;
            overtaken |= !result.succeeded;
            keys += deleted(&result.results);
        }
        if overtaken {
            continue;
        }
        let all = Txn::of([Op::delete_prefix(job.keys.root())]);
        let nobody = Guard::empty(job.keys.nodes());
        let result = store.txn(all.guarded(guards.into_iter().chain([nobody]))).await?;
        if result.succeeded {
            return Ok(keys + deleted(&result.results));
        }
    }
    Err(RemovalError::Changed { job: target.job.clone() })
}

/// How many keys [`remove`] would delete now. Nothing is written.
pub async fn check(store: &dyn Store, target: &Target<'_>) -> Result<i64, RemovalError> {
    let (_, keys) = clear(store, target).await?;
    Ok(i64::try_from(keys).unwrap_or(i64::MAX))
}

/// Reads a job, which may be deleted if the guards hold, and counts its keys. Asks its nodes' ports.
async fn clear(store: &dyn Store, target: &Target<'_>) -> Result<(Job, usize), RemovalError> {
    let id = target.job;
    let keys = Keys::new(target.prefix, id);
    let (values, _) = store.range(keys.root()).await?;
    let job = Overview::of(target.prefix, &values).jobs.remove(id);
    let job = job.filter(|job| job.round.is_some()).ok_or_else(|| RemovalError::NoSuchJob { job: id.clone() })?;
    let changed = |chosen| job.round.as_ref().is_some_and(|round| round.modified != chosen);
    if target.chosen.is_some_and(changed) {
        return Err(RemovalError::Changed { job: id.clone() });
    }
    let suspects = suspects(id, &job, &values)?;
    let asked = futures::stream::iter(suspects.ask).map(|(node, peer)| async move {
        let found = dial::find(&peer, &node, target.tls, PATIENCE).await;
        (node, found)
    });
    let answers: Vec<(NodeId, Found)> = asked.buffer_unordered(ASKED_AT_ONCE).collect().await;
    confirm(id, &job, answers, suspects.nameless, target.now_ms)?;
    Ok((job, values.len()))
}

fn guards(job: &Job) -> Vec<Guard> {
    let round = job.round.as_ref().map_or(Revision::NONE, |round| round.modified);
    let leader = job.leader.as_ref().map_or(job.vacant, |leader| leader.modified);
    vec![Guard::modified(job.keys.round(), round), Guard::modified(job.keys.leader(), leader)]
}

fn deleted(results: &[OpResult]) -> i64 {
    let one = |result: &OpResult| if let OpResult::Deleted(keys) = result { *keys } else { 0 };
    results.iter().map(one).sum()
}

/// Who may still be there, of an ended job.
#[derive(Debug, PartialEq, Eq)]
struct Suspects {
    /// Members whose ports can be asked.
    ask: BTreeMap<NodeId, Endpoint>,
    /// Members that no record names any more.
    nameless: u32,
}

/// Whom to ask before a job is deleted, or why it is not.
///
/// Those who were in earlier rounds were waited for when the last one was sealed.
fn suspects(id: &JobId, job: &Job, values: &[KeyValue]) -> Result<Suspects, RemovalError> {
    let no_such_job = || RemovalError::NoSuchJob { job: id.clone() };
    let round = &job.round.as_ref().ok_or_else(no_such_job)?.value;
    if let Some(refusal) = job.refusal() {
        return Err(RemovalError::OtherVersion { job: id.clone(), refusal });
    }
    if !round.state.is_final() {
        return Err(RemovalError::NotEnded { job: id.clone(), state: round.state });
    }
    // What is there under `nodes/` and is not ours counts as a node: no one knows what it means.
    let is_done = |node: &NodeId| job.nodes.get(node).is_some_and(|node| node.value.phase == Phase::Done);
    let nodes = values.iter().filter_map(|kv| Keys::node_of(&job.keys.nodes(), &kv.key));
    let mut here: Vec<NodeId> = nodes.filter(|node| !is_done(node)).collect();
    // An agent that leads waits for others to leave. A coordinator only tidies up.
    let leader = job.leader.as_ref().filter(|leader| !leader.value.coordinator);
    here.extend(leader.map(|leader| leader.value.node.clone()).filter(|leader| !is_done(leader)));
    here.sort();
    here.dedup();
    if !here.is_empty() {
        return Err(RemovalError::Agents { job: id.clone(), nodes: listing(here) });
    }
    let mut ask: BTreeMap<NodeId, Endpoint> =
        job.nodes.iter().map(|(node, record)| (node.clone(), record.value.peer.clone())).collect();
    let mut nameless = 0;
    if let Some(sealed) = round.sealed {
        let members: Vec<_> = members(job).collect();
        nameless = sealed.nodes.saturating_sub(u32::try_from(members.len()).unwrap_or(u32::MAX));
        let alive = |node: &NodeId| job.evicted.get(node).is_none_or(|tombstone| tombstone.fate != Fate::Dead);
        let members = members.into_iter().filter(|(node, _)| alive(node));
        ask.extend(members.map(|(node, rank)| (node.clone(), rank.peer.clone())));
    }
    Ok(Suspects { ask, nameless })
}

/// Whether no one can be at work any more, by what the ports have answered and the time since the job's end.
fn confirm(
    id: &JobId,
    job: &Job,
    answers: Vec<(NodeId, Found)>,
    nameless: u32,
    now_ms: u64,
) -> Result<(), RemovalError> {
    let of = |wanted: Found| {
        let mut nodes: Vec<NodeId> =
            answers.iter().filter(|(_, found)| *found == wanted).map(|(node, _)| node.clone()).collect();
        nodes.sort();
        nodes
    };
    let here = of(Found::Here);
    if !here.is_empty() {
        return Err(RemovalError::Agents { job: id.clone(), nodes: listing(here) });
    }
    let silent = of(Found::Nobody);
    if silent.is_empty() && nameless == 0 {
        return Ok(());
    }
    let needed = job.spec.as_ref().map(|spec| spec.timings.takeover_delay.max(spec.timings.lease_ttl) + CLOCKS);
    let ended = job.ended_ms().map(|at| Duration::from_millis(now_ms.saturating_sub(at)));
    let when = match (needed, ended) {
        (Some(needed), Some(ended)) if ended >= needed => return Ok(()),
        (Some(needed), Some(ended)) => {
            let minutes = (needed - ended).as_secs().div_ceil(60);
            format!(
                "The job can be deleted in {minutes} minutes, or at once from where their ports say that they are gone"
            )
        }
        _ => {
            "Its `spec` or its history is missing, so waiting does not help: start these hosts; or, if none of the job's \
             agents runs, delete its keys with etcdctl"
                .to_owned()
        }
    };
    let mut nodes = listing(silent);
    if nameless > 0 {
        let and = if nodes.is_empty() { "" } else { ", and " };
        nodes = format!("{nodes}{and}{nameless} nodes whose records are lost");
    }
    Err(RemovalError::Unconfirmed { job: id.clone(), nodes, when })
}

/// At most ten names, for a message.
pub fn listing<T: ToString>(names: impl IntoIterator<Item = T>) -> String {
    const MOST: usize = 10;
    let names: Vec<String> = names.into_iter().map(|name| name.to_string()).collect();
    match names.len().saturating_sub(MOST) {
        0 => names.join(", "),
        more => format!("{} and {more} more", names[..MOST].join(", ")),
    }
}

#[cfg(test)]
mod tests;
