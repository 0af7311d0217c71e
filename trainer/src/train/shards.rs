//! Where the optimizer's numbers are sharded: how ranks come to one state, and how a whole state is put together.
//!
//! When a round begins, the ranks tell what each holds. Those that have the sums of a step that another has done, do it
//! too. Then each gets what it lacks: the parameters, and the optimizer's numbers that it owns in this round. It keeps
//! what it owned before until all have theirs. So a death at any moment takes one of two owners.

use std::ops::Range;

use elastic_collective::{CollectiveError, Group, list_ranks};
use tracing::warn;

use super::TrainError;
use super::replicas::{self, Verdict};
use crate::checkpoint::snapshot::LastStep;
use crate::engine::owners::{Cut, Move, Share, moves};
use crate::engine::state::{Places, State, all_of};

/// Words of [`Told`] on the way.
pub(super) const WORDS: usize = 6 + 2 * SHARES;
/// The most shares that a rank tells of.
const SHARES: usize = 4;

/// How a rank's part of the state is cut.
#[derive(Debug, Clone)]
pub(super) struct Sharding {
    pub(super) cut: Cut,
    /// Whose numbers are here: those of one share, or of more while not all ranks are known to have theirs of the next.
    pub(super) shares: Vec<Share>,
    /// Whether all parameters are those of the state's step, not only those that are owned.
    pub(super) fresh: bool,
    /// Whether a whole state is to be put together before the next step.
    pub(super) assembles: bool,
}

impl Sharding {
    /// Nothing is here.
    pub(super) fn none(cut: Cut) -> Sharding {
        Sharding { cut, shares: Vec::new(), fresh: false, assembles: false }
    }

    /// Everything is here.
    pub(super) fn is_whole(&mut self) {
        (self.shares, self.fresh) = (vec![Share::WHOLE], true);
    }
}

/// These shares and a new one: no more than a rank can tell of, the oldest go first.
pub(super) fn with(mut shares: Vec<Share>, new: Share) -> Vec<Share> {
    if !shares.contains(&new) {
        shares.push(new);
    }
    shares.drain(..shares.len().saturating_sub(SHARES));
    shares
}

/// What a rank holds, as it tells the others.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Told {
    /// The step of its state, if it has one that counts.
    pub(super) step: Option<u64>,
    /// The step after that, if it has its sums.
    pub(super) summed: Option<u64>,
    pub(super) shares: Vec<Share>,
    pub(super) fresh: bool,
    pub(super) last: Option<LastStep>,
}

impl Told {
    pub(super) fn words(&self) -> [u64; WORDS] {
        // One more than the step: 0 is nothing.
        let counted = |step: Option<u64>| step.map_or(0, |step| step + 1);
        let (round, ranks, loss) = self.last.map_or((0, 0, 0.0), |last| (last.round, last.world_size, last.loss));
        let (step, summed, fresh) = (counted(self.step), counted(self.summed), u64::from(self.fresh));
        let before = [step, summed, fresh, round, u64::from(ranks), u64::from(loss.to_bits())];
        let shares = self.shares.iter().filter(|_| self.step.is_some());
        let shares = shares.flat_map(|share| [share.world_size, share.rank].map(u64::from));
        let mut words = [0; WORDS];
        words.iter_mut().zip(before.into_iter().chain(shares)).for_each(|(word, said)| *word = said);
        words
    }

    pub(super) fn heard(words: &[u64; WORDS]) -> Told {
        let [step, summed, fresh, round, ranks, loss, shares @ ..] = words;
        let share = |share: &[u64]| Share { world_size: share[0] as u32, rank: share[1] as u32 };
        let last = LastStep { round: *round, world_size: *ranks as u32, loss: f32::from_bits(*loss as u32) };
        Told {
            step: step.checked_sub(1),
            summed: summed.checked_sub(1),
            // Of no ranks: there is none.
            shares: shares.chunks(2).map(share).filter(|share| share.world_size > 0).collect(),
            fresh: *fresh > 0,
            last: Some(last).filter(|last| last.world_size > 0),
        }
    }

    /// What is left of it where the ranks continue from this step.
    pub(super) fn settle(&mut self, step: u64) {
        if self.step == Some(step) {
            return;
        }
        let reaches = self.reaches(step);
        *self = Told { step: Some(step).filter(|_| reaches), summed: None, fresh: false, last: None, ..self.clone() };
        if !reaches {
            self.shares.clear();
        }
    }

    /// Whether it has, or can have, its part of the state of this step.
    pub(super) fn reaches(&self, step: u64) -> bool {
        self.step == Some(step) || self.step.is_some() && self.step < Some(step) && self.summed == Some(step)
    }
}

/// The furthest step that some rank has done, if the ranks have all numbers of its state.
pub(super) fn furthest(told: &[Told], cut: Cut) -> Option<u64> {
    let mut steps: Vec<u64> = told.iter().filter_map(|told| told.step).collect();
    steps.sort_unstable();
    steps.into_iter().rev().find(|&step| {
        let shares: Vec<Share> =
            told.iter().filter(|told| told.reaches(step)).flat_map(|told| told.shares.clone()).collect();
        cut.owned(&shares) == all_of(cut.parameters)
    })
}

/// A rank's checksums: of the parameters, of the optimizer's numbers of its chunks, and of those whose second owner it
/// is.
pub(super) fn checksums(state: &State, cut: Cut, share: Share) -> [u64; 3] {
    let [first, second] = [cut.chunks(share), cut.second_chunks(share)].map(|chunks| state.checksum_of(&chunks));
    [state.checksum().into(), first.into(), second.into()]
}

/// The ranks whose numbers count among those that hold a step. Rank 0 and the wrong ones warn of these.
pub(super) fn right(told: &[Told], sums: &[[u64; 3]], step: u64, rank: usize) -> Result<Vec<bool>, TrainError> {
    let mut right: Vec<bool> = told.iter().map(|told| told.step == Some(step)).collect();
    let of_parameters = |(right, told, sums): (&bool, &Told, &[u64; 3])| (*right && told.fresh).then_some(sums[0]);
    let all = || right.iter().zip(told).zip(sums).map(|((right, told), sums)| (right, told, sums));
    let parameters: Vec<Option<u64>> = all().map(of_parameters).collect();
    drop_wrong(&mut right, &parameters, step, rank)?;
    // Of each chunk, those that have it as its owner or second owner; the whole is a chunk too.
    let chunk_of = |share: Share, second: bool| match second {
        false => Some((share.world_size, share.rank)),
        true => (share.world_size > 1).then(|| (share.world_size, share.first_of_second())),
    };
    let mut chunks: Vec<(u32, u32)> =
        told.iter().filter_map(|told| told.shares.first()).filter_map(|share| chunk_of(*share, false)).collect();
    chunks.sort_unstable();
    chunks.dedup();
    for chunk in chunks {
        let sum = |rank: usize| {
            let share = *told[rank].shares.first().filter(|_| right[rank])?;
            let place = [false, true].into_iter().position(|second| chunk_of(share, second) == Some(chunk))?;
            Some(sums[rank][1 + place])
        };
        let sums: Vec<Option<u64>> = (0..told.len()).map(sum).collect();
        drop_wrong(&mut right, &sums, step, rank)?;
    }
    Ok(right)
}

fn drop_wrong(right: &mut [bool], sums: &[Option<u64>], step: u64, rank: usize) -> Result<(), TrainError> {
    match replicas::judge(sums) {
        Verdict::Same => Ok(()),
        Verdict::Split => Err(TrainError::Split { step, sums: replicas::named(sums) }),
        Verdict::Most(most) => {
            let wrong = replicas::wrong(sums, &most);
            if rank == 0 || wrong.contains(&rank) {
                warn!("{}", replicas::warning(step, &wrong, sums));
            }
            wrong.into_iter().for_each(|rank| right[rank] = false);
            Ok(())
        }
    }
}

/// What ranks have, and what moves: parameters, and the optimizer's numbers.
pub(super) struct Plan {
    parameters: Vec<Move>,
    kept: Vec<Move>,
}

impl Plan {
    /// So that each rank has all parameters, and what it owns in a world of these ranks.
    pub(super) fn to_reshard(told: &[Told], right: &[bool], cut: Cut) -> Result<Plan, usize> {
        let world_size = told.len() as u32;
        let owned = |(told, right): (&Told, &bool)| if *right { cut.owned(&told.shares) } else { Vec::new() };
        let kept: Vec<Vec<Range<usize>>> = told.iter().zip(right).map(owned).collect();
        let fresh: Vec<bool> = told.iter().zip(right).map(|(told, right)| *right && told.fresh).collect();
        let parameters = match fresh.contains(&true) {
            true => fresh.iter().map(|fresh| if *fresh { all_of(cut.parameters) } else { Vec::new() }).collect(),
            // What is owned has moved.
            false => kept.clone(),
        };
        let shares = (0..world_size).map(|rank| cut.owned(&[Share { world_size, rank }]));
        Ok(Plan {
            parameters: moves(&parameters, &vec![all_of(cut.parameters); told.len()])?,
            kept: moves(&kept, &shares.collect::<Vec<_>>())?,
        })
    }

    /// So that some ranks have the optimizer's numbers of all.
    pub(super) fn to_assemble(wants: &[bool], cut: Cut) -> Plan {
        let world_size = wants.len() as u32;
        let held: Vec<_> = (0..world_size).map(|rank| cut.owned(&[Share { world_size, rank }])).collect();
        let all = |wants: &bool| if *wants { all_of(cut.parameters) } else { Vec::new() };
        let kept = moves(&held, &wants.iter().map(all).collect::<Vec<_>>());
        let Ok(kept) = kept else { unreachable!("the ranks of a world own all") };
        Plan { parameters: Vec::new(), kept }
    }

    /// So that those ranks that stay own everything, each as in a world of their own. None where none stays, or all do.
    pub(super) fn to_hand_over(stay: &[bool], cut: Cut) -> Option<Plan> {
        let (before, after) = (stay.len() as u32, stay.iter().filter(|stays| **stays).count() as u32);
        let held: Vec<_> = (0..before).map(|rank| cut.owned(&[Share { world_size: before, rank }])).collect();
        let later =
            |rank: &Option<u32>| rank.map_or(Vec::new(), |rank| cut.owned(&[Share { world_size: after, rank }]));
        let wanted: Vec<_> = places_of(stay).iter().map(later).collect();
        let kept = moves(&held, &wanted).ok().filter(|_| after > 0 && after < before)?;
        Some(Plan { parameters: Vec::new(), kept })
    }

    /// Whether nothing moves.
    pub(super) fn is_empty(&self) -> bool {
        self.parameters.is_empty() && self.kept.is_empty()
    }

    /// The ranks that something moves to.
    pub(super) fn receivers(&self) -> usize {
        let mut ranks: Vec<usize> = self.parameters.iter().chain(&self.kept).map(|step| step.to).collect();
        ranks.sort_unstable();
        ranks.dedup();
        ranks.len()
    }

    /// Moves it all, from a state to flat numbers that have these places.
    pub(super) fn carry_out(
        &self,
        group: &mut Group,
        from: &State,
        (to, places): (&mut [f32], &Places),
    ) -> Result<(), CollectiveError> {
        let rank = group.rank() as usize;
        let numbers = |moves: &[Move]| moves.iter().map(|step| step.range.len()).sum::<usize>();
        let total = size_of::<f32>() * (numbers(&self.parameters) + from.kinds() * numbers(&self.kept));
        // In an order that both ends have, and in which the places do not overlap.
        let in_order = |moves: &[Move]| {
            let mut moves = moves.to_vec();
            moves.sort_by_key(|step| step.range.start);
            moves
        };
        let (parameters, kept) = (in_order(&self.parameters), in_order(&self.kept));
        let kinds = (0..from.kinds()).flat_map(|kind| kept.iter().map(move |step| (Some(kind), step)));
        let all: Vec<_> = parameters.iter().map(|step| (None, step)).chain(kinds).collect();
        let out = all.iter().filter(|(_, step)| step.from == rank).map(|(kind, step)| {
            let place = kind.map_or(step.range.clone(), |kind| from.places().of(kind, &step.range));
            (step.to, bytemuck::cast_slice(&from.flat[place]))
        });
        let (mut rest, mut reached, mut into) = (to, 0, Vec::new());
        for (kind, step) in all.iter().filter(|(_, step)| step.to == rank) {
            let place = kind.map_or(step.range.clone(), |kind| places.of(kind, &step.range));
            let (piece, after) = rest[place.start - reached..].split_at_mut(place.len());
            (rest, reached) = (after, place.end);
            into.push((step.from, bytemuck::cast_slice_mut(piece)));
        }
        group.pass(total, out.collect(), into)
    }
}

/// The ranks of those that stay, when the others are gone.
pub(super) fn places_of(stay: &[bool]) -> Vec<Option<u32>> {
    let mut next = 0..;
    stay.iter().map(|stays| if *stays { next.next() } else { None }).collect()
}

/// All ranks hold a step, and its numbers differ.
pub(super) fn split(step: u64, sums: &[[u64; 3]]) -> TrainError {
    let sums: Vec<Option<u64>> = sums.iter().map(|[parameters, ..]| Some(*parameters)).collect();
    TrainError::Split { step, sums: replicas::named(&sums) }
}

/// What is said where a part is lost.
pub(super) fn gone(step: u64) -> String {
    format!("both owners of a part of the optimizer's numbers are gone after step {step}")
}

/// The ranks have all numbers of no step's state.
pub(super) fn lost(told: &[Told]) -> TrainError {
    let holders: Vec<usize> = (0..told.len()).filter(|&rank| told[rank].step.is_some()).collect();
    let step = told.iter().filter_map(|told| told.step).max().unwrap_or_default();
    TrainError::OwnersLost { step, ranks: list_ranks(&holders) }
}

/// Whether all ranks of a round, each with its own share, hold the same.
pub(super) fn agree(sums: &[[u64; 3]]) -> bool {
    let world_size = sums.len() as u32;
    let of_owners = |rank: u32| {
        let first = Share { world_size, rank }.first_of_second();
        world_size == 1 || sums[rank as usize][2] == sums[first as usize][1]
    };
    sums.iter().all(|[parameters, ..]| *parameters == sums[0][0]) && (0..world_size).all(of_owners)
}
