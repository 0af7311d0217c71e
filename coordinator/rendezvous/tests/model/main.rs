//! An exhaustive safety model of the rendezvous protocol, and what breaks when one guard is removed. It tests the
//! protocol itself, and shares no code with the implementation. See `docs/model.md`.

mod fence;
mod former;
mod properties;
mod rules;
mod search;
mod state;
mod steps;
mod trace;
mod txn;

use stateright::{Model, Property};

use properties as p;
use rules::{Mutation, Rules, Start};
use state::{State, Troubles};
use steps::Step;

/// The protocol under [`Rules`], for the checker.
#[derive(Clone)]
pub(crate) struct Protocol {
    rules: Rules,
}

impl Model for Protocol {
    type State = State;
    type Action = Step;

    fn init_states(&self) -> Vec<State> {
        vec![self.rules.initial()]
    }

    fn actions(&self, state: &State, steps: &mut Vec<Step>) {
        steps::enabled(&self.rules, state, steps);
    }

    fn next_state(&self, state: &State, step: Step) -> Option<State> {
        Some(steps::apply(&self.rules, state, step))
    }

    fn format_action(&self, step: &Step) -> String {
        step.to_string()
    }

    fn properties(&self) -> Vec<Property<Protocol>> {
        properties::all()
    }
}

#[track_caller]
fn holds(name: &str, rules: Rules, reached: &[&'static str]) {
    search::holds(name, Protocol { rules }, reached);
}

/// One of the tests below searches the same rules with all guards, and finds no violation. So the missing guard makes
/// the difference.
#[track_caller]
fn breaks(mutation: Mutation, property: &'static str, rules: Rules) {
    let model = Protocol { rules: Rules { mutation: Some(mutation), ..rules } };
    search::breaks(&format!("{mutation:?}"), model, property);
}

const NONE: Troubles = Rules::RUNNING.troubles;

/// From nothing: campaigns, joins, a crash, a lost lease, a leader that changes while round 1 forms.
const BIRTH: Rules = Rules {
    start: Start::Nothing,
    nodes: 2,
    troubles: Troubles { crashes: 1, lapses: 1, evictions: 1, handovers: 1, ..NONE },
    ..Rules::RUNNING
};

/// Round 1 runs. A member is lost, confirmed or not. A newcomer may take its place. A leader may hand over.
const LOSS: Rules =
    Rules { troubles: Troubles { crashes: 1, lapses: 1, evictions: 1, handovers: 1, ..NONE }, ..Rules::RUNNING };

/// Three rounds, so that two members can be lost one after the other, and a place can be read too late to start on.
const THREE_ROUNDS: Rules =
    Rules { last_round: 3, troubles: Troubles { crashes: 1, lapses: 1, evictions: 1, ..NONE }, ..Rules::RUNNING };

/// The job is full with two nodes, so the third is a spare that a plan may hold and the next plan not.
const FULL: Rules =
    Rules { max_nodes: 2, troubles: Troubles { crashes: 2, lapses: 1, evictions: 2, ..NONE }, ..Rules::RUNNING };

/// Leaders that give up transactions, and send others while the first ones may still arrive.
const IMPATIENT: Rules =
    Rules { in_flight: 2, troubles: Troubles { crashes: 1, lapses: 1, evictions: 1, ..NONE }, ..Rules::RUNNING };

/// Members commit checkpoints while one of them is evicted and the round moves on.
const COMMITS: Rules = Rules {
    nodes: 2,
    in_flight: 2,
    troubles: Troubles { lapses: 1, evictions: 1, commits: 3, ..NONE },
    ..Rules::RUNNING
};

/// The job fails for good, and a newcomer begins a new generation.
const REBIRTH: Rules = Rules { troubles: Troubles { lapses: 1, evictions: 1, failures: 1, ..NONE }, ..Rules::RUNNING };

#[test]
fn birth() {
    holds("birth", BIRTH, &[p::FIRST_ROUND, p::TAKEN_OVER]);
}

#[test]
fn loss() {
    holds("loss", LOSS, &[p::REFORMED, p::UNCONFIRMED, p::GROWTH, p::TAKEN_OVER, p::RECLAIMED]);
}

#[test]
#[ignore = "half a minute of a core: make model"]
fn deep_three_rounds() {
    holds("three rounds", THREE_ROUNDS, &[p::REFORMED, p::UNCONFIRMED, p::GROWTH, p::TAKEN_OVER, p::RECLAIMED]);
}

#[test]
fn full() {
    holds("full", FULL, &[p::SPARE, p::REFORMED, p::TAKEN_OVER]);
}

#[test]
fn impatient() {
    holds("impatient", IMPATIENT, &[p::REFORMED, p::UNCONFIRMED, p::GROWTH]);
}

#[test]
fn commits() {
    holds("commits", COMMITS, &[p::COMMITTED, p::UNCONFIRMED, p::RECLAIMED]);
}

#[test]
fn rebirth() {
    holds("rebirth", REBIRTH, &[p::GENERATION]);
}

#[test]
#[ignore = "minutes: for a change of the protocol"]
fn deep() {
    let commits = Troubles { crashes: 1, commits: 2, ..COMMITS.troubles };
    holds("deep commits", Rules { nodes: 3, troubles: commits, ..COMMITS }, &[p::COMMITTED, p::UNCONFIRMED]);
    let impatient = Troubles { evictions: 2, handovers: 1, ..IMPATIENT.troubles };
    holds("deep impatient", Rules { troubles: impatient, ..IMPATIENT }, &[p::REFORMED, p::GROWTH]);
    let rebirth = Troubles { lapses: 2, commits: 1, ..REBIRTH.troubles };
    holds("deep rebirth", Rules { troubles: rebirth, ..REBIRTH }, &[p::GENERATION]);
}

#[test]
fn rank_keys_without_a_plan_give_two_rank_zeros() {
    breaks(Mutation::NoPlan, p::AGREEMENT, FULL);
}

#[test]
fn a_plan_that_a_new_leader_takes_over_keeps_its_predecessors_ranks() {
    breaks(Mutation::PlanInherited, p::RANKS, FULL);
}

#[test]
fn a_plan_that_is_recomposed_lets_a_late_batch_change_its_ranks() {
    breaks(Mutation::PlanRecomposed, p::RANKS, IMPATIENT);
}

#[test]
fn a_guard_by_create_revision_lets_a_deposed_leader_decide() {
    breaks(Mutation::CreateRevisionGuard, p::ONE_DECIDER, LOSS);
    breaks(Mutation::CreateRevisionGuard, p::ONE_GROUP, FULL);
}

#[test]
fn sealing_at_once_overtakes_a_frozen_node() {
    breaks(Mutation::SealAtOnce, p::ONE_GROUP, LOSS);
}

#[test]
fn newcomers_are_no_substitute_for_members() {
    breaks(Mutation::OneWaitingSet, p::ONE_GROUP, LOSS);
}

#[test]
fn a_lost_key_is_not_a_lost_node() {
    breaks(Mutation::AbsentIsGone, p::ONE_GROUP, LOSS);
}

#[test]
fn a_late_seal_rewrites_a_running_round() {
    breaks(Mutation::SealWithoutRoundGuard, p::WRITTEN_ONCE, IMPATIENT);
    breaks(Mutation::SealWithoutRoundGuard, p::AGREEMENT, IMPATIENT);
}

#[test]
fn a_seal_without_the_pointer_guard_resumes_from_the_past() {
    breaks(Mutation::SealWithoutPointerGuard, p::RESUME, COMMITS);
}

#[test]
fn without_a_tombstone_the_evicted_come_back() {
    breaks(Mutation::NoTombstone, p::EVICTED, COMMITS);
}

#[test]
fn a_commit_without_its_guards_escapes_the_fence() {
    breaks(Mutation::CommitWithoutKeyGuard, p::EVICTED, COMMITS);
    breaks(Mutation::CommitWithoutRoundGuard, p::OUTSIDER, COMMITS);
    breaks(Mutation::CommitWithoutPointerGuard, p::STEP_GROWS, COMMITS);
}

#[test]
fn a_start_on_a_place_read_before_the_fence_point_is_too_late() {
    breaks(Mutation::StartPastFence, p::ONE_GROUP, THREE_ROUNDS);
}

#[test]
fn a_new_generation_that_does_not_wait_overtakes_the_old_one() {
    // No lease is lost here: the eviction alone leaves a member at work without a key.
    let rules = Rules { troubles: Troubles { lapses: 0, ..REBIRTH.troubles }, ..REBIRTH };
    breaks(Mutation::GenerationAtOnce, p::ONE_GROUP, rules);
}
