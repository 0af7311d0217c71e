//! What must hold in every state, and what must happen in some, so that the model is not empty.

use stateright::Property;

use crate::Protocol;
use crate::state::{Flaw, Phase, Rev, State};

pub(crate) const ONE_GROUP: &str = "one group is at work";
pub(crate) const AGREEMENT: &str = "workers of one round agree";
pub(crate) const RANKS: &str = "a running round has ranks 0 to world size - 1, one each";
pub(crate) const NUMBERS: &str = "numbers never repeat or fall";
pub(crate) const WRITTEN_ONCE: &str = "a running record is never rewritten";
pub(crate) const ONE_DECIDER: &str = "only the leader in office decides";
pub(crate) const EVICTED: &str = "an evicted node commits nothing";
pub(crate) const OUTSIDER: &str = "only the newest running round commits";
pub(crate) const STEP_GROWS: &str = "the checkpoint's step only grows";
pub(crate) const RESUME: &str = "a round resumes from the newest checkpoint";

pub(crate) const FIRST_ROUND: &str = "two nodes form round 1";
pub(crate) const REFORMED: &str = "a round forms again after a loss";
pub(crate) const UNCONFIRMED: &str = "a round forms after an unconfirmed loss";
pub(crate) const GROWTH: &str = "the group grows";
pub(crate) const TAKEN_OVER: &str = "a new leader finds a forming round with rank keys of its predecessor";
pub(crate) const RECLAIMED: &str = "a member at work reclaims its key";
pub(crate) const COMMITTED: &str = "a round resumes from a committed checkpoint";
pub(crate) const GENERATION: &str = "a new generation runs after a failure";
pub(crate) const SPARE: &str = "a spare waits while the round is full";

pub(crate) fn all() -> Vec<Property<Protocol>> {
    vec![
        Property::always(ONE_GROUP, |_, s: &State| pairs(s).all(|(a, b)| a.number == b.number)),
        Property::always(AGREEMENT, |_, s: &State| {
            let same = |(a, b): (&crate::state::Place, &crate::state::Place)| {
                (a.run, a.world, a.resume) == (b.run, b.world, b.resume) && a.rank != b.rank
            };
            pairs(s).filter(|(a, b)| a.number == b.number).all(same) && s.places().all(|p| p.rank < p.world)
        }),
        Property::always(RANKS, |_, s: &State| ranks_are_whole(s)),
        Property::always(NUMBERS, |_, s: &State| !s.has(Flaw::NumberNotNew)),
        Property::always(WRITTEN_ONCE, |_, s: &State| !s.has(Flaw::RunningRewritten)),
        Property::always(ONE_DECIDER, |_, s: &State| !s.has(Flaw::DeposedDecided)),
        Property::always(EVICTED, |_, s: &State| !s.has(Flaw::EvictedCommitted)),
        Property::always(OUTSIDER, |_, s: &State| !s.has(Flaw::OutsiderCommitted)),
        Property::always(STEP_GROWS, |_, s: &State| !s.has(Flaw::StepNotGrown)),
        Property::always(RESUME, |_, s: &State| !s.has(Flaw::ResumeNotNewest)),
        Property::sometimes(FIRST_ROUND, |_, s: &State| workers(s, 1) == 2),
        Property::sometimes(REFORMED, |_, s: &State| {
            workers(s, 2) > 0 && s.tombstones.iter().flatten().any(|t| t.confirmed)
        }),
        Property::sometimes(UNCONFIRMED, |_, s: &State| {
            workers(s, 2) > 0 && s.tombstones.iter().flatten().any(|t| !t.confirmed)
        }),
        Property::sometimes(GROWTH, |_, s: &State| workers(s, 2) == 3),
        Property::sometimes(TAKEN_OVER, |_, s: &State| {
            forming(s) && !s.ranks.is_empty() && s.leader.is_some() && s.office.plan == Rev::NONE
        }),
        Property::sometimes(RECLAIMED, |_, s: &State| {
            s.nodes.iter().zip(&s.keys).any(|(node, key)| node.work.is_some_and(|work| *key > Some(work.run)))
        }),
        Property::sometimes(COMMITTED, |_, s: &State| s.places().any(|place| place.resume > 0)),
        // Without crashes, only the end of a generation makes members leave.
        Property::sometimes(GENERATION, |m, s: &State| {
            let left = s.nodes[..2].iter().all(|node| !node.alive);
            m.rules.troubles.crashes == 0 && left && s.places().any(|place| place.number > 1)
        }),
        Property::sometimes(SPARE, |_, s: &State| {
            s.round.is_some_and(|r| r.phase == Phase::Running && r.members.len() == 2) && joined(s) == 3
        }),
    ]
}

fn pairs(state: &State) -> impl Iterator<Item = (&crate::state::Place, &crate::state::Place)> {
    state.places().enumerate().flat_map(|(i, a)| state.places().skip(i + 1).map(move |b| (a, b)))
}

fn workers(state: &State, number: u8) -> usize {
    state.places().filter(|place| place.number == number).count()
}

fn joined(state: &State) -> usize {
    state.keys.iter().flatten().count()
}

fn forming(state: &State) -> bool {
    state.round.is_some_and(|round| round.phase == Phase::Forming)
}

/// What the nodes of a running round find under the plan that it names.
fn ranks_are_whole(state: &State) -> bool {
    let Some(round) = state.round.filter(|round| round.phase == Phase::Running) else { return true };
    let mut ranks: Vec<u8> =
        state.ranks.iter().filter(|key| key.plan == round.plan || key.plan == Rev::NONE).map(|key| key.rank).collect();
    ranks.sort_unstable();
    ranks == (0..round.members.len() as u8).collect::<Vec<u8>>()
}
