//! Publishing a checkpoint: moving the job's resume point, under the fence.

use std::collections::BTreeMap;

use serde::de::DeserializeOwned;
use tokio::sync::watch;

use crate::Status;
use elastic_rendezvous::Credentials;
use elastic_rendezvous::job::{
    Checkpoint, Keys, NodeId, NodeRecord, Phase, RankRecord, RoundRecord, RoundState, Sealed, Versioned, to_json,
};
use elastic_store::{Guard, KeyValue, Op, OpResult, Revision, Store, StoreError, Txn, TxnResult};

/// Tries while the round moves or an outcome is unknown.
const TRIES: u32 = 8;

/// Why a checkpoint was not published.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
pub enum CommitError {
    /// This node is no member of the current round: whatever it wrote must not count.
    #[error("this node is not a member of the current round, so step {0} is not published")]
    Fenced(u64),
    /// The job has a newer checkpoint, or another of the same step.
    #[error("the job already has a checkpoint of step {published}, so step {step} is not published")]
    NotNewer { step: u64, published: u64 },
    /// No node could continue from it.
    #[error("{0}")]
    Unfit(String),
    /// The record under `checkpoint` is not ours.
    #[error("{0}")]
    Foreign(String),
    /// The round kept moving.
    #[error("the round kept changing, so step {0} is not published: offer it again")]
    Unsettled(u64),
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl CommitError {
    /// Whether the same checkpoint may be published later: the store is away or full, or the node has no place for now.
    pub fn may_pass(&self) -> bool {
        matches!(self, CommitError::Store(_) | CommitError::Unsettled(_) | CommitError::Fenced(_))
    }
}

/// The highest step that is taken. Readers of JSON round larger numbers, and no later step could ever be published.
const LAST_STEP: u64 = (1 << 53) - 1;

/// Whether a job could continue from `checkpoint`, as far as its record tells.
fn check(checkpoint: &Checkpoint) -> Result<(), CommitError> {
    let Checkpoint { step, path, .. } = checkpoint;
    if *step > LAST_STEP {
        return Err(CommitError::Unfit(format!("step {step} is not published: steps end at {LAST_STEP}")));
    }
    if !path.starts_with('/') || path.contains(char::is_control) {
        let why = "give its absolute path, in printable characters, as every node sees it";
        return Err(CommitError::Unfit(format!("the checkpoint at {path:?} is not published: {why}")));
    }
    Ok(())
}

/// Whether a member of `credentials.round` may still publish: while that round runs, or the next forms after it.
fn may_commit(credentials: &Credentials) -> bool {
    let current = &credentials.current.value;
    match current.state {
        RoundState::Running => current.number == credentials.round,
        RoundState::Forming => current.sealed.is_some_and(|sealed| sealed.number == credentials.round),
        _ => false,
    }
}

/// The transaction that publishes `checkpoint`, guarded by the node's key, the round, and the pointer as last read.
pub fn commit_txn(keys: &Keys, credentials: &Credentials, checkpoint: &Checkpoint, pointer: Revision) -> Txn {
    Txn::of([Op::put(keys.checkpoint(), to_json(checkpoint))]).guarded([
        Guard::created(keys.node(&credentials.node), credentials.created),
        Guard::modified(keys.round(), credentials.current.modified),
        Guard::modified(keys.checkpoint(), pointer),
    ])
}

/// Publishes a checkpoint as the job's resume point. The step only grows.
///
/// An unknown outcome is read back, so `Ok` means that it is published, and [`CommitError::Fenced`] that it never will
/// be by this call.
pub async fn commit(
    store: &dyn Store,
    keys: &Keys,
    status: &watch::Receiver<Status>,
    mut checkpoint: Checkpoint,
) -> Result<(), CommitError> {
    check(&checkpoint)?;
    let step = checkpoint.step;
    for _ in 0..TRIES {
        let credentials = status.borrow().credentials.clone().filter(may_commit);
        let Some(credentials) = credentials else { return Err(CommitError::Fenced(step)) };
        checkpoint.round = credentials.round;
        let read = store.txn(Txn::of([Op::get(keys.checkpoint()), Op::get(keys.round())])).await?;
        let value = |at: usize| read.results.get(at).and_then(OpResult::value);
        if publish(store, keys, &credentials, &checkpoint, value(0)).await? {
            return Ok(());
        }
        let behind = value(1).is_some_and(|round| round.mod_revision > credentials.current.modified);
        if behind {
            wait_for_news(status.clone(), credentials.current.modified).await;
        }
    }
    Err(CommitError::Unsettled(step))
}

/// One try. Whether it is published; if not, a guard did not hold or the outcome is unknown: look again.
async fn publish(
    store: &dyn Store,
    keys: &Keys,
    credentials: &Credentials,
    checkpoint: &Checkpoint,
    pointer: Option<&KeyValue>,
) -> Result<bool, CommitError> {
    let pointer = pointer.map(Versioned::<Checkpoint>::parse).transpose().map_err(CommitError::Foreign)?;
    if let Some(pointer) = &pointer {
        if pointer.value == *checkpoint {
            return Ok(true);
        }
        if pointer.value.step >= checkpoint.step {
            return Err(CommitError::NotNewer { step: checkpoint.step, published: pointer.value.step });
        }
    }
    let pointer = pointer.map_or(Revision::NONE, |pointer| pointer.modified);
    match store.txn(commit_txn(keys, credentials, checkpoint, pointer)).await {
        Ok(result) => Ok(result.succeeded),
        Err(error) if error.outcome_unknown() => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Waits a moment for the node to learn of a round newer than `known`.
async fn wait_for_news(mut status: watch::Receiver<Status>, known: Revision) {
    const MOMENT: std::time::Duration = std::time::Duration::from_secs(1);
    let newer = status.wait_for(|status| status.round.as_ref().is_none_or(|round| round.modified > known));
    // If nothing comes the next try will say what is wrong.
    let _ = tokio::time::timeout(MOMENT, newer).await;
}

/// What a node may still publish when its part in the job ends, and its workers are gone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LastWord {
    /// What is newer than this, if anything is committed.
    After(Option<Checkpoint>),
    /// Nothing: why not, for people.
    Nothing(String),
}

/// Whether a member of the last sealed round, `seat`, may still publish although its workers are gone: the job has
/// failed, or is being left, and no round was sealed after that one.
fn may_commit_last(round: &RoundRecord, seat: Sealed) -> bool {
    match round.state {
        RoundState::Failed | RoundState::Running => round.sealed == Some(seat),
        RoundState::Forming => match round.sealed {
            Some(sealed) => sealed == seat,
            // All of its members have left.
            None => round.number == seat.number + 1,
        },
        RoundState::Succeeded | RoundState::Closed => false,
    }
}

fn leaves(phase: Phase) -> bool {
    matches!(phase, Phase::Draining | Phase::Stopped)
}

/// Which of the last round's members that are still there publishes at its end: the one with the lowest ranks. No one
/// if the job has not failed and one of them continues.
fn last_publisher(failed: bool, there: &[(NodeId, u32, Phase)]) -> Option<&NodeId> {
    if !failed && !there.iter().all(|(.., phase)| leaves(*phase)) {
        return None;
    }
    there.iter().min_by_key(|(_, rank, _)| *rank).map(|(node, ..)| node)
}

/// Looks whether `node`, whose part in the job ends and whose last place was in the round `seat`, is the one that
/// publishes what is left. The node's key must still be there.
///
/// Each looks for the next member that is there among those with lower ranks, and no further.
pub async fn last_word(store: &dyn Store, keys: &Keys, node: &NodeId, seat: Sealed) -> Result<LastWord, CommitError> {
    let nothing = |why: &str| Ok(LastWord::Nothing(why.to_owned()));
    let rank_key = |node: &NodeId| keys.rank(seat.number, seat.plan, node);
    let reads = [Op::get(keys.round()), Op::get(keys.checkpoint()), Op::get(rank_key(node))];
    let read = store.txn(Txn::of(reads)).await?;
    let Some(round) = record::<RoundRecord>(&read, 0)? else { return nothing("the job's `round` key is gone") };
    if !may_commit_last(&round, seat) {
        return nothing("the job has gone on without this node");
    }
    let pointer = record::<Checkpoint>(&read, 1)?;
    let failed = round.state == RoundState::Failed;
    let mut rank = record::<RankRecord>(&read, 2)?;
    // A rank key of an earlier build does not say who is before.
    while let Some(before) = rank.as_ref().and_then(|rank| rank.before.clone()) {
        let read = store.txn(Txn::of([Op::get(keys.node(&before)), Op::get(rank_key(&before))])).await?;
        match record::<NodeRecord>(&read, 0)? {
            Some(there) if failed || leaves(there.phase) => {
                return Ok(LastWord::Nothing(format!("{before} is there to save it")));
            }
            Some(_) => return nothing(OTHERS_GO_ON),
            None => rank = record::<RankRecord>(&read, 1)?,
        }
    }
    if failed && rank.is_some_and(|rank| rank.group_rank == 0) {
        return Ok(LastWord::After(pointer));
    }
    match last_publisher(failed, &members(store, keys, seat).await?) {
        Some(first) if first == node => Ok(LastWord::After(pointer)),
        Some(first) => Ok(LastWord::Nothing(format!("{first} is there to save it"))),
        None => nothing(OTHERS_GO_ON),
    }
}

/// Why nothing is saved where the job is not over.
const OTHERS_GO_ON: &str = "other nodes continue the job and hold its state";

/// A transaction's record at this place of its reads, if the key is there.
fn record<T: DeserializeOwned>(read: &TxnResult, at: usize) -> Result<Option<T>, CommitError> {
    let value = read.results.get(at).and_then(OpResult::value);
    let record = value.map(Versioned::<T>::parse).transpose().map_err(CommitError::Foreign)?;
    Ok(record.map(|record| record.value))
}

/// All members of a round that are still there, with their group ranks and what they say.
async fn members(store: &dyn Store, keys: &Keys, seat: Sealed) -> Result<Vec<(NodeId, u32, Phase)>, CommitError> {
    let ranks = keys.ranks(seat.number, seat.plan);
    let read = store.txn(Txn::of([Op::range(keys.nodes()), Op::range(&ranks)])).await?;
    let values = |at: usize| read.results.get(at).map(OpResult::values).unwrap_or_default();
    let under = |kv: &KeyValue, prefix: &str| kv.key.strip_prefix(prefix).map(NodeId::from_text);
    let mut phases = BTreeMap::new();
    for kv in values(0) {
        let record = Versioned::<NodeRecord>::parse(kv).map_err(CommitError::Foreign)?.value;
        phases.extend(under(kv, &keys.nodes()).map(|node| (node, record.phase)));
    }
    let mut members = Vec::new();
    for kv in values(1) {
        let record = Versioned::<RankRecord>::parse(kv).map_err(CommitError::Foreign)?.value;
        let there = under(kv, &ranks).and_then(|node| phases.get_key_value(&node));
        members.extend(there.map(|(node, phase)| (node.clone(), record.group_rank, *phase)));
    }
    Ok(members)
}

/// Publishes the last checkpoint of a node whose part in the job ends, under the same guards as [`commit`].
pub async fn commit_last(
    store: &dyn Store,
    keys: &Keys,
    node: &NodeId,
    seat: Sealed,
    mut checkpoint: Checkpoint,
) -> Result<(), CommitError> {
    check(&checkpoint)?;
    let step = checkpoint.step;
    checkpoint.round = seat.number;
    for _ in 0..TRIES {
        let reads = [Op::get(keys.checkpoint()), Op::get(keys.round()), Op::get(keys.node(node))];
        let read = store.txn(Txn::of(reads)).await?;
        let value = |at: usize| read.results.get(at).and_then(OpResult::value);
        let (Some(round), Some(own)) = (value(1), value(2)) else { return Err(CommitError::Fenced(step)) };
        let current = Versioned::<RoundRecord>::parse(round).map_err(CommitError::Foreign)?;
        if !may_commit_last(&current.value, seat) {
            return Err(CommitError::Fenced(step));
        }
        let (created, round) = (own.create_revision, seat.number);
        let credentials = Credentials { node: node.clone(), created, round, current };
        if publish(store, keys, &credentials, &checkpoint, value(0)).await? {
            return Ok(());
        }
    }
    Err(CommitError::Unsettled(step))
}

#[cfg(test)]
mod tests {
    use super::*;
    use elastic_rendezvous::job::samples;

    fn round(state: RoundState, number: u64, sealed: Option<Sealed>) -> RoundRecord {
        RoundRecord { sealed, ..samples::round(number, state) }
    }

    #[test]
    fn a_checkpoint_that_no_node_could_go_on_from_is_refused() {
        for (step, path, fit) in [
            (0, "/shared/step-0/manifest.json", true),
            (LAST_STEP, "/größe", true),
            (LAST_STEP + 1, "/a", false),
            (u64::MAX, "/a", false),
            (1, "", false),
            (1, "step-1/manifest.json", false),
            (1, "./a", false),
            (1, "/a\u{1b}[2J", false),
            (1, "/a\nb", false),
        ] {
            let checkpoint = Checkpoint { step, path: path.to_owned(), digest: String::new(), round: 1 };
            assert_eq!(check(&checkpoint).is_ok(), fit, "{step} {path:?}");
        }
    }

    #[test]
    fn only_the_last_sealed_rounds_members_have_a_last_word() {
        let seat = Sealed { number: 3, plan: Revision(30), nodes: 2 };
        let other_plan = Sealed { plan: Revision(31), ..seat };
        let next = Sealed { number: 4, plan: Revision(40), nodes: 2 };
        for (state, number, sealed, may) in [
            (RoundState::Failed, 3, Some(seat), true),
            (RoundState::Failed, 4, Some(seat), true),
            (RoundState::Running, 3, Some(seat), true),
            (RoundState::Forming, 4, Some(seat), true),
            (RoundState::Forming, 4, None, true),
            (RoundState::Forming, 5, None, false),
            (RoundState::Failed, 5, None, false),
            (RoundState::Running, 4, Some(next), false),
            (RoundState::Failed, 4, Some(next), false),
            (RoundState::Failed, 3, Some(other_plan), false),
            (RoundState::Succeeded, 3, Some(seat), false),
            (RoundState::Closed, 3, Some(seat), false),
        ] {
            assert_eq!(may_commit_last(&round(state, number, sealed), seat), may, "{state} {number} {sealed:?}");
        }
    }

    #[test]
    fn the_first_that_is_there_publishes_and_none_does_while_others_train() {
        use Phase::{Draining, Failed, Running, Stopped, Waiting};
        let nodes = ["a", "b", "c"].map(|name| NodeId::new(name, "1"));
        for (failed, phases, first) in [
            (true, [Some(Failed), Some(Waiting), Some(Waiting)], Some("a:1")),
            (true, [None, Some(Failed), Some(Waiting)], Some("b:1")),
            (true, [None, None, None], None),
            (false, [Some(Stopped), Some(Draining), Some(Draining)], Some("a:1")),
            (false, [None, Some(Draining), None], Some("b:1")),
            (false, [Some(Stopped), Some(Running), None], None),
            (false, [Some(Draining), Some(Waiting), Some(Draining)], None),
        ] {
            let there =
                [2, 1, 0].into_iter().filter_map(|rank| Some((nodes[rank].clone(), rank as u32, phases[rank]?)));
            let there: Vec<_> = there.collect();
            let found = last_publisher(failed, &there).map(ToString::to_string);
            assert_eq!(found.as_deref(), first, "{failed} {phases:?}");
        }
    }
}
