//! The leader's transactions, and what their success changes in its view.

use std::collections::VecDeque;

use super::super::decide::{Eviction, Form, MOST_EVICTIONS, Stale};
use super::super::roster::{Evicted, SealedMember};
use super::super::seats::Seat;
use super::super::view::View;
use super::state::{Doing, Stage};
use super::{Leader, LeaderOutput};
use crate::job::{
    EventRecord, Failure, Fate, NodeId, Phase, RoundRecord, RoundState, Sealed, Tombstone, Versioned, history, to_json,
};
use crate::kv::{Guard, Op, Revision, Txn, TxnResult};
use crate::time::Time;

/// Most keys written or deleted by one transaction; etcd allows 128 operations, and a few go to the round and the
/// history.
const BATCH: usize = 100;

/// Most names in one line of history: etcd takes no record above 1.5 MiB.
const TOLD: usize = 100;

impl Leader {
    pub(super) fn form_txn(&self, now: Time, view: &View, form: Form, reason: &str) -> (Doing, Txn) {
        let old = &view.round.value;
        let record = RoundRecord {
            sealed: old.sealed.filter(|_| !form.afresh),
            restarts: old.restarts + u32::from(form.charge),
            advance: form.advance.unwrap_or_else(|| old.advance.clone()),
            faults: form.faults,
            leaving: view.drained_members(),
            paused: form.paused,
            begins_generation: old.begins_generation,
            ..RoundRecord::forming(form.number, old.generation, reason)
        };
        // The record is written once, and last, with the evictions that fit next to it: every node reads it each time
        // it is written.
        let first = form.evict.len().saturating_sub(1) / MOST_EVICTIONS * MOST_EVICTIONS;
        let (before, last) = form.evict.split_at(first);
        let evicting = |batch: &[Eviction]| self.guarded(self.evict_ops(view, batch)).guarded(self.silent(view, batch));
        let mut txns: VecDeque<Txn> = before.chunks(MOST_EVICTIONS).map(evicting).collect();
        let written = self.round_txn(now, &record, &form.evict, self.evict_ops(view, last));
        txns.push_back(written.guarded(self.silent(view, last)));
        let first = txns.pop_front().unwrap_or_default();
        (Doing::Form { record, evict: form.evict, quick: form.quick, rest: txns }, first)
    }

    pub(super) fn refuse_txn(&self, view: &View, evictions: &[Eviction]) -> (Doing, Txn) {
        let nodes = evictions.iter().map(|eviction| eviction.node.clone()).collect();
        let txn = self.guarded(self.evict_ops(view, evictions)).guarded(self.silent(view, evictions));
        // What is desired comes by another watch than the nodes do: who comes right after it was undrained may be known
        // before that is.
        let drains = evictions.iter().any(|eviction| eviction.drained);
        let txn = txn.guarded(drains.then(|| Guard::modified(self.keys.desired(), self.read.desired_at)));
        (Doing::Refuse { nodes }, txn)
    }

    /// Guards that hold if the evicted nodes have said nothing new. A node that is not known to be dead may have
    /// written since, and a watch can be late.
    fn silent(&self, view: &View, evictions: &[Eviction]) -> Vec<Guard> {
        let silent = |eviction: &Eviction| {
            let known = view.roster.node(&eviction.node).map(|present| present.modified);
            let known = known.or_else(|| view.strays.get(&eviction.node).copied()).unwrap_or(Revision::NONE);
            Guard::modified(self.keys.node(&eviction.node), known)
        };
        evictions.iter().filter(|eviction| eviction.fate != Fate::Dead).map(silent).collect()
    }

    fn evict_ops(&self, view: &View, evictions: &[Eviction]) -> Vec<Op> {
        let round = view.round.value.sealed.map_or(0, |sealed| sealed.number);
        // A tombstone that is there says more than another would: whether its agent must end.
        let stands =
            |eviction: &Eviction| view.roster.member(&eviction.node).is_some_and(|member| member.evicted.is_some());
        evictions
            .iter()
            .filter(|eviction| !stands(eviction))
            .flat_map(|eviction| {
                let tombstone = Tombstone {
                    round,
                    fate: eviction.fate,
                    reason: eviction.reason.clone(),
                    refused: eviction.refused,
                    drained: eviction.drained,
                };
                let (node, evicted) = (self.keys.node(&eviction.node), self.keys.evicted(&eviction.node));
                // mutant no_tombstone: Op::put(evicted, to_json(&tombstone)) => Op::get(evicted)
                [Op::delete(node), Op::put(evicted, to_json(&tombstone))]
            })
            .collect()
    }

    /// The plan is the `forming` record's mod revision; rank keys lie under it, so those of another plan do not count.
    pub(super) fn seal_txn(&self, now: Time, view: &View, seats: Vec<Seat>, reason: &str) -> (Doing, Txn) {
        let old = &view.round.value;
        let plan = view.round.modified;
        let record = RoundRecord {
            state: RoundState::Running,
            sealed: Some(Sealed { number: old.number, plan, nodes: seats.len() as u32 }),
            group_world_size: seats.len() as u32,
            world_size: seats.iter().map(|seat| seat.rank.slots).sum(),
            master: seats.first().and_then(|seat| view.roster.node(&seat.node)?.record.master.clone()),
            members_only: seats
                .iter()
                .all(|seat| view.roster.node(&seat.node).is_some_and(|node| node.record.introduces)),
            restarts: old.restarts,
            advance: old.advance.clone(),
            faults: old.faults.clone(),
            // mutant seal_without_a_checkpoint: self.read.checkpoint.clone() => None
            checkpoint: self.read.checkpoint.clone(),
            ..RoundRecord::forming(old.number, old.generation, reason)
        };
        let mut rank_keys: Vec<Op> = seats
            .iter()
            .map(|seat| Op::put(self.keys.rank(old.number, plan, &seat.node), to_json(&seat.rank)))
            .collect();
        let last = rank_keys.split_off(rank_keys.len().saturating_sub(1) / BATCH * BATCH);
        let mut txns: VecDeque<Txn> = rank_keys.chunks(BATCH).map(|batch| self.guarded(batch.to_vec())).collect();
        let written = self.round_txn(now, &record, &[], last);
        let not_committed_since = Guard::modified(self.keys.checkpoint(), self.read.pointer);
        // mutant seal_without_the_pointers_guard: written.guarded([not_committed_since]) => written
        txns.push_back(written.guarded([not_committed_since]));
        let first = txns.pop_front().unwrap_or_default();
        (Doing::Seal { record, seats, rest: txns }, first)
    }

    /// Holds while the rank keys of a batch are there that was written at `revision`, before `left` others. Each batch is
    /// guarded by the one before it: a store may be restored between two.
    fn batch_written(&self, record: &RoundRecord, seats: &[Seat], left: usize, revision: Revision) -> Guard {
        let first = &seats[(seats.len().div_ceil(BATCH) - 1 - left) * BATCH];
        let plan = record.sealed.map_or(Revision::NONE, |sealed| sealed.plan);
        Guard::modified(self.keys.rank(record.number, plan, &first.node), revision)
    }

    pub(super) fn finish_txn(
        &self,
        now: Time,
        view: &View,
        state: RoundState,
        cause: Option<Failure>,
        reason: &str,
    ) -> (Doing, Txn) {
        let old = view.round.value.clone();
        let record =
            RoundRecord { state, cause, paused: false, begins_generation: false, reason: reason.to_owned(), ..old };
        let swept = swept(view);
        let txn = self.round_txn(now, &record, &[], self.sweep_ops(&swept));
        (Doing::Finish { record, swept }, txn)
    }

    /// What the transaction of the final state could not take.
    pub(super) fn sweep_txn(&self, view: &View) -> Option<(Doing, Txn)> {
        let swept = swept(view);
        let txn = (!swept.is_empty()).then(|| self.guarded(self.sweep_ops(&swept)))?;
        Some((Doing::Sweep { swept }, txn))
    }

    /// After a final state, the keys of done nodes have no lease that would end them.
    fn sweep_ops(&self, swept: &[NodeId]) -> Vec<Op> {
        swept.iter().map(|node| Op::delete(self.keys.node(node))).collect()
    }

    /// Deletes as many of these keys as fit; the rest stay stale and are deleted later.
    pub(super) fn prune_txn(&self, Stale { mut rounds, mut tombstones }: Stale) -> (Doing, Txn) {
        rounds.truncate(BATCH / 2);
        tombstones.truncate(BATCH - 2 * rounds.len());
        let of = |number: &u64| {
            [Op::delete_prefix(self.keys.ranks_of_round(*number)), Op::delete_prefix(self.keys.barriers(*number))]
        };
        let evicted = tombstones.iter().map(|node| Op::delete(self.keys.evicted(node)));
        let txn = self.guarded(rounds.iter().flat_map(of).chain(evicted).collect());
        (Doing::Prune(Stale { rounds, tombstones }), txn)
    }

    /// Writes the round with its line of history, after what else belongs to it. An operator may write a line beside
    /// us: it then has our number, and everything is read again.
    fn round_txn(&self, now: Time, record: &RoundRecord, evictions: &[Eviction], mut then: Vec<Op>) -> Txn {
        let event = EventRecord {
            at_ms: self.epoch_ms + now.as_millis(),
            round: record.number,
            state: record.state,
            reason: record.reason.clone(),
            evicted: evictions.iter().take(TOLD).map(|eviction| eviction.node.clone()).collect(),
            asked_by: None,
        };
        then.push(Op::put(self.keys.round(), to_json(record)));
        let number = self.read.next_event;
        then.extend(history::write(&self.keys, number, &event));
        let unwritten = (!self.read.uncounted).then(|| history::unwritten(&self.keys, number));
        self.guarded(then).guarded(unwritten)
    }

    /// A transaction's guards held: takes its writes over into the view.
    pub(super) fn done(&mut self, now: Time, doing: Doing, result: &TxnResult, out: &mut Vec<LeaderOutput>) {
        let Some(view) = self.known.view_mut() else {
            return self.load(now, result, out);
        };
        match doing {
            Doing::Load => self.load(now, result, out),
            Doing::Form { record, evict, quick, mut rest } => {
                if let Some(txn) = rest.pop_front() {
                    return self.start(Doing::Form { record, evict, quick, rest }, txn, out);
                }
                if quick {
                    view.quick.spend(now, view.growth_refill());
                }
                let stage = |round: &RoundRecord| (round.number, round.paused);
                if stage(&record) != stage(&view.round.value) {
                    (view.since, view.begun) = (now, Some(now));
                }
                for eviction in evict {
                    view.tombstones.entry(eviction.node.clone()).or_insert(now);
                    view.roster.remove(&eviction.node);
                    let evicted = Evicted { at: now, fate: eviction.fate };
                    view.roster.change_member(&eviction.node, |member| _ = member.evicted.get_or_insert(evicted));
                }
                if record.sealed.is_none() {
                    view.stale_rounds.extend(view.round.value.sealed.map(|sealed| sealed.number));
                    view.roster.dissolve();
                }
                view.planned_here = true;
                view.faults = view.faults.read(now, &record.faults);
                self.wrote_round(record, result.revision);
            }
            Doing::Seal { record, seats, mut rest } => match rest.pop_front() {
                Some(mut txn) => {
                    let written = self.batch_written(&record, &seats, rest.len() + 1, result.revision);
                    // mutant a_round_s_parts_are_not_guarded: txn.when.push(written) => drop(written)
                    txn.when.push(written);
                    self.start(Doing::Seal { record, seats, rest }, txn, out);
                }
                None => {
                    view.stale_rounds.extend(view.round.value.sealed.map(|sealed| sealed.number));
                    (view.since, view.begun) = (now, Some(now));
                    view.roster.dissolve();
                    for Seat { node, rank } in seats {
                        let absent = view.roster.node(&node).is_none().then_some(now);
                        view.roster
                            .seat(&node, SealedMember { rank, started: false, absent, left: false, evicted: None });
                    }
                    self.wrote_round(record, result.revision);
                }
            },
            Doing::Finish { record, swept } => {
                view.since = now;
                swept.iter().for_each(|node| view.roster.remove(node));
                self.wrote_round(record, result.revision);
            }
            // The deletions come back through the watch; until then the same keys would be swept again.
            Doing::Refuse { nodes } => nodes.into_iter().for_each(|node| {
                view.roster.remove(&node);
                view.tombstones.entry(node).or_insert(now);
            }),
            Doing::Sweep { swept } => swept.iter().for_each(|node| view.roster.remove(node)),
            Doing::Prune(Stale { rounds, tombstones }) => {
                view.stale_rounds.retain(|round| !rounds.contains(round));
                view.tombstones.retain(|node, _| !tombstones.contains(node));
                tombstones.iter().for_each(|node| view.roster.forget(node));
            }
            Doing::Prove => self.spec_seen(result),
            Doing::Mend => {}
            Doing::Resign => {
                self.stage = Stage::Over;
                out.push(LeaderOutput::Deposed);
            }
        }
    }

    fn wrote_round(&mut self, record: RoundRecord, at: Revision) {
        self.read.next_event += 1;
        if let Some(view) = self.known.view_mut() {
            view.round = Versioned { value: record, created: view.round.created, modified: at };
        }
    }
}

/// The done nodes whose keys the next sweep deletes.
fn swept(view: &View) -> Vec<NodeId> {
    let done = view.roster.nodes().filter(|(_, present)| present.record.phase == Phase::Done);
    done.take(BATCH).map(|(node, _)| node.clone()).collect()
}
