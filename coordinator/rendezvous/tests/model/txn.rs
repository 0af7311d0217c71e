//! What the store does with a transaction that arrives: guards, then effects. Who sends one, and when, is in `steps`.

use crate::rules::{Mutation, Rules};
use crate::state::{
    Body, Flaw, Id, LeaderKey, Office, Order, Phase, Pointer, RankKey, Rev, Round, State, Term, Tombstone, Txn,
};

/// Whether all guards of `txn` hold. A guard that fails once fails for ever, since revisions never return.
pub(crate) fn passes(rules: &Rules, state: &State, txn: &Txn) -> bool {
    let round = state.round.map_or(Rev::NONE, |round| round.modified) == txn.round;
    let office = |term: Term| state.leader.is_some_and(|leader| in_office(rules, leader, term));
    match txn.body {
        Body::Form { term, .. } | Body::Ranks { term, .. } | Body::Fail { term } => office(term) && round,
        Body::Run { term, pointer, .. } => {
            let round = round || rules.broken(Mutation::SealWithoutRoundGuard);
            let pointer = pointer == state.pointer.modified || rules.broken(Mutation::SealWithoutPointerGuard);
            office(term) && round && pointer
        }
        Body::Commit { key, pointer, .. } => {
            let own = state.keys[txn.from.at()] == Some(key) || rules.broken(Mutation::CommitWithoutKeyGuard);
            let round = round || rules.broken(Mutation::CommitWithoutRoundGuard);
            let pointer = pointer == state.pointer.modified || rules.broken(Mutation::CommitWithoutPointerGuard);
            own && round && pointer
        }
    }
}

fn in_office(rules: &Rules, leader: LeaderKey, term: Term) -> bool {
    match rules.broken(Mutation::CreateRevisionGuard) {
        true => leader.create == term.create,
        false => leader.modified == term.modified,
    }
}

/// Carries out a transaction whose guards hold.
pub(crate) fn commit(rules: &Rules, state: &mut State, txn: Txn) {
    let rev = state.next_rev();
    match txn.body {
        Body::Form { term, number, evict, confirmed } => {
            let current = note_sender(state, term);
            form(state, number, rev);
            if let Some(id) = evict {
                state.keys[id.at()] = None;
                state.tombstones[id.at()] = Some(Tombstone { confirmed, late: !current });
                state.evicted[id.at()] = true;
            }
            if current {
                state.office = Office { plan: rev, planned: Order::default(), landed: false };
            }
        }
        Body::Ranks { term, order } => {
            let current = note_sender(state, term);
            let plan = if rules.broken(Mutation::NoPlan) { Rev::NONE } else { txn.round };
            for (rank, node) in order.iter().enumerate() {
                state.ranks.retain(|key| (key.plan, key.node) != (plan, node));
                state.ranks.push(RankKey { plan, node, rank: rank as u8 });
            }
            if current && (state.office.plan, state.office.planned) == (txn.round, order) {
                state.office.landed = true;
            }
        }
        Body::Run { term, number, plan, order, step, .. } => {
            note_sender(state, term);
            run(
                state,
                Round {
                    number,
                    phase: Phase::Running,
                    modified: rev,
                    plan,
                    members: order,
                    resume: step,
                    inherited: false,
                },
            );
        }
        Body::Fail { term } => {
            note_sender(state, term);
            if let Some(round) = &mut state.round {
                round.phase = Phase::Failed;
                round.modified = rev;
            }
        }
        Body::Commit { step, number, .. } => {
            commit_checkpoint(state, txn.from, Pointer { modified: rev, step }, number)
        }
    }
}

/// Marks a decision by a node that is not the leader in office; returns whether it is.
fn note_sender(state: &mut State, term: Term) -> bool {
    let current = state.leader.is_some_and(|leader| leader.modified == term.modified);
    if !current {
        state.mark(Flaw::DeposedDecided);
    }
    current
}

fn form(state: &mut State, number: u8, rev: Rev) {
    let old = state.round;
    if old.is_none_or(|old| old.number < number) {
        state.ranks.clear();
    }
    if old.is_some_and(|old| number < old.number) || number <= state.newest_run {
        state.mark(Flaw::NumberNotNew);
    }
    state.round = Some(Round {
        number,
        phase: Phase::Forming,
        modified: rev,
        plan: rev,
        members: old.map(|old| old.members).unwrap_or_default(),
        resume: 0,
        inherited: old.is_some_and(|old| old.inherited && old.phase == Phase::Forming),
    });
}

fn run(state: &mut State, running: Round) {
    if state.round.is_some_and(|old| old.phase == Phase::Running && old.number == running.number) {
        state.mark(Flaw::RunningRewritten);
    }
    if running.number <= state.newest_run {
        state.mark(Flaw::NumberNotNew);
    }
    if running.resume != state.pointer.step {
        state.mark(Flaw::ResumeNotNewest);
    }
    state.newest_run = state.newest_run.max(running.number);
    state.round = Some(running);
}

fn commit_checkpoint(state: &mut State, writer: Id, pointer: Pointer, number: u8) {
    if state.evicted[writer.at()] {
        state.mark(Flaw::EvictedCommitted);
    }
    if number != state.newest_run {
        state.mark(Flaw::OutsiderCommitted);
    }
    if pointer.step <= state.pointer.step {
        state.mark(Flaw::StepNotGrown);
    }
    state.pointer = pointer;
}
