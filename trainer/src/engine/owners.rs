//! Which ranks keep which of the optimizer's numbers, where these are sharded, and what moves when the ranks change.
//! Nothing here knows of networks: all ranks compute the same of the same.
//!
//! A gradient is summed in buckets, and each rank completes a chunk of each. The rank keeps the optimizer's numbers of
//! its chunks, and so does a [second](SumPlan::second) owner, half of the ranks further. Of all ranks but one, every
//! chunk has an owner.

#![deny(clippy::disallowed_methods, clippy::disallowed_types)]

use std::collections::BTreeSet;
use std::ops::Range;

use elastic_collective::tree::{GRAIN, SumPlan};

use crate::settings::{OptimizerState, Settings};

/// How a gradient is cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Cut {
    pub(crate) parameters: usize,
    /// Numbers that are summed at once. The first number of what is summed is the loss.
    pub(crate) bucket: usize,
}

/// What one rank of a world owns. The only rank of its world owns everything.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Share {
    pub(crate) world_size: u32,
    pub(crate) rank: u32,
}

/// Numbers that go from one rank to another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Move {
    pub(crate) from: usize,
    pub(crate) to: usize,
    /// Among the parameters.
    pub(crate) range: Range<usize>,
}

impl Share {
    /// Everything.
    pub(crate) const WHOLE: Share = Share { world_size: 1, rank: 0 };

    /// The rank whose chunks it owns as their second owner.
    pub(crate) fn first_of_second(self) -> u32 {
        let Share { world_size, rank } = self;
        (rank + world_size - world_size / 2) % world_size
    }
}

impl Cut {
    /// That of a gradient with so many parameters, if the settings ask for shards of what the optimizer keeps.
    pub(crate) fn of(settings: &Settings, parameters: usize) -> Option<Cut> {
        let all = parameters + 1;
        let bucket = if settings.bucket() == 0 { all } else { settings.bucket().next_multiple_of(GRAIN).min(all) };
        let shards = settings.optimizer_state == OptimizerState::Sharded && !settings.optimizer().kept().is_empty();
        shards.then_some(Cut { parameters, bucket })
    }

    /// The buckets, the end of the parameters first: their places among the parameters, and the ends of the ranks'
    /// chunks in each.
    pub(crate) fn buckets(self, world_size: u32) -> impl Iterator<Item = (Range<usize>, Vec<usize>)> {
        let length = self.parameters + 1;
        (0..length.div_ceil(self.bucket)).map(move |number| {
            let end = length - number * self.bucket;
            let start = end.saturating_sub(self.bucket);
            let plan = SumPlan { world_size, shards: 1, elements: end - start };
            // The loss is no parameter.
            let place = |number: usize| number.saturating_sub(1);
            let first = place(start);
            let ends = (0..world_size).map(|rank| place(start + plan.owned_chunk(rank).end) - first).collect();
            (first..place(end), ends)
        })
    }

    /// What a rank's sums complete, in order.
    pub(crate) fn chunks(self, Share { world_size, rank }: Share) -> Vec<Range<usize>> {
        let rank = rank as usize;
        let chunk = |(bucket, ends): (Range<usize>, Vec<usize>)| {
            let start = rank.checked_sub(1).map_or(0, |before| ends[before]);
            bucket.start + start..bucket.start + ends[rank]
        };
        let mut chunks: Vec<_> = self.buckets(world_size).map(chunk).filter(|chunk| !chunk.is_empty()).collect();
        chunks.reverse();
        chunks
    }

    /// The same of the chunks that it owns as their second owner.
    pub(crate) fn second_chunks(self, share: Share) -> Vec<Range<usize>> {
        if share.world_size == 1 {
            return Vec::new();
        }
        self.chunks(Share { rank: share.first_of_second(), ..share })
    }

    /// All that these shares own.
    pub(crate) fn owned(self, shares: &[Share]) -> Vec<Range<usize>> {
        let of = |&share: &Share| [self.chunks(share), self.second_chunks(share)].concat();
        joined(shares.iter().flat_map(of).collect())
    }
}

/// The same numbers as ranges in order that do not touch.
fn joined(mut ranges: Vec<Range<usize>>) -> Vec<Range<usize>> {
    ranges.sort_by_key(|range| range.start);
    let mut joined: Vec<Range<usize>> = Vec::new();
    for range in ranges.into_iter().filter(|range| !range.is_empty()) {
        match joined.last_mut() {
            Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
            _ => joined.push(range),
        }
    }
    joined
}

/// What has to move so that each rank has what it wants, from what each has now; ranges are in order and do not touch.
/// Several holders each send a part. Fails with a number that is wanted and that no rank has.
pub(crate) fn moves(held: &[Vec<Range<usize>>], wanted: &[Vec<Range<usize>>]) -> Result<Vec<Move>, usize> {
    let bounds: BTreeSet<usize> =
        held.iter().chain(wanted).flatten().flat_map(|range| [range.start, range.end]).collect();
    let bounds: Vec<usize> = bounds.into_iter().collect();
    let between = |range: &Range<usize>| {
        bounds.partition_point(|bound| *bound < range.start)..bounds.partition_point(|bound| *bound < range.end)
    };
    // Of each stretch between two bounds: the ranks that have it.
    let mut holders: Vec<Vec<usize>> = vec![Vec::new(); bounds.len()];
    for (rank, held) in held.iter().enumerate() {
        held.iter().flat_map(between).for_each(|stretch| holders[stretch].push(rank));
    }
    let mut moves = Vec::new();
    for (to, wanted) in wanted.iter().enumerate() {
        for stretch in wanted.iter().flat_map(between) {
            let (start, length) = (bounds[stretch], bounds[stretch + 1] - bounds[stretch]);
            let holders = &holders[stretch];
            if holders.binary_search(&to).is_ok() {
                continue;
            }
            if holders.is_empty() {
                return Err(start);
            }
            let at = |part: usize| start + (length as u128 * part as u128 / holders.len() as u128) as usize;
            let parts =
                holders.iter().enumerate().map(|(part, &from)| Move { from, to, range: at(part)..at(part + 1) });
            moves.extend(parts.filter(|part| !part.range.is_empty()));
        }
    }
    Ok(moves)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::settings::OptimizerName;

    fn shares(world_size: u32) -> Vec<Share> {
        (0..world_size).map(|rank| Share { world_size, rank }).collect()
    }

    /// How many ranks have each number.
    fn counts(parameters: usize, held: &[Vec<Range<usize>>]) -> Vec<usize> {
        let mut counts = vec![0; parameters];
        held.iter().flatten().for_each(|range| counts[range.clone()].iter_mut().for_each(|count| *count += 1));
        counts
    }

    fn sizes() -> impl Strategy<Value = Cut> {
        (0usize..9000, 1usize..30).prop_map(|(parameters, bucket)| Cut { parameters, bucket: 256 * bucket })
    }

    proptest! {
        #[test]
        fn every_number_has_two_owners_and_a_completing_one(cut in sizes(), world_size in 1u32..12) {
            let chunks: Vec<_> = shares(world_size).into_iter().map(|share| cut.chunks(share)).collect();
            prop_assert!(counts(cut.parameters, &chunks).iter().all(|count| *count == 1), "one completes it");
            let owned: Vec<_> = shares(world_size).into_iter().map(|share| cut.owned(&[share])).collect();
            let wanted = world_size.min(2) as usize;
            prop_assert!(counts(cut.parameters, &owned).iter().all(|count| *count == wanted), "two keep it");
            for share in shares(world_size) {
                let first = Share { rank: share.first_of_second(), ..share };
                let plan = SumPlan { world_size, shards: 1, elements: 1 };
                prop_assert_eq!(plan.second(first.rank), share.rank);
            }
        }

        #[test]
        fn a_change_moves_what_each_lacks_from_one_that_has_it(
            cut in sizes(), before in 2u32..9, after in 1u32..9, dead in 0u32..9, newcomers_first in any::<bool>(),
        ) {
            // One of the ranks before has died, and the others, or as many as there is room for, have new ranks.
            let mut held: Vec<_> = shares(before).into_iter().map(|share| cut.owned(&[share])).collect();
            held.remove((dead % before) as usize);
            let whole = held.clone();
            held.resize((after as usize).max(held.len()), Vec::new());
            if newcomers_first {
                held.reverse();
            }
            let mut wanted: Vec<_> = shares(after).into_iter().map(|share| cut.owned(&[share])).collect();
            wanted.resize(held.len(), Vec::new());
            let moves = moves(&held, &wanted);
            let moves = moves.map_err(|number| TestCaseError::fail(format!("{number} is lost of {whole:?}")))?;
            for (rank, wanted) in wanted.iter().enumerate() {
                let mut got = counts(cut.parameters, std::slice::from_ref(&held[rank]));
                for Move { from, range, .. } in moves.iter().filter(|step| step.to == rank) {
                    let theirs = counts(cut.parameters, std::slice::from_ref(&held[*from]));
                    prop_assert!(range.clone().all(|number| theirs[number] == 1), "it has what it sends");
                    prop_assert!(range.clone().all(|number| got[number] == 0), "nothing comes twice");
                    got[range.clone()].iter_mut().for_each(|count| *count += 1);
                }
                prop_assert!(wanted.iter().cloned().flatten().all(|number| got[number] == 1), "rank {rank} lacks some");
            }
        }
    }

    #[test]
    fn an_optimizer_that_keeps_nothing_is_not_cut() {
        for (momentum, is_cut) in [(0.0, false), (0.9, true)] {
            let (optimizer, optimizer_state) = (OptimizerName::Sgd, OptimizerState::Sharded);
            let settings = Settings { optimizer, optimizer_state, momentum, ..Settings::default() };
            assert_eq!(Cut::of(&settings, 1000).is_some(), is_cut, "with momentum {momentum}");
        }
    }

    #[test]
    fn ranks_keep_a_part_that_shrinks_with_their_number() {
        let cut = Cut { parameters: 1 << 20, bucket: 1 << 18 };
        let share = |world_size| {
            let owned = cut.owned(&[Share { world_size, rank: 1 % world_size }]);
            owned.into_iter().map(|range| range.len()).sum::<usize>() as f64 / f64::from(1 << 20)
        };
        for (world_size, wanted) in [(1, 1.0), (2, 1.0), (4, 0.5), (8, 0.25)] {
            assert!((share(world_size) - wanted).abs() < 0.01, "{world_size}: {}", share(world_size));
        }
    }

    #[test]
    fn what_both_owners_take_with_them_is_missed() {
        let cut = Cut { parameters: 8000, bucket: 8192 };
        let mut held: Vec<_> = shares(4).into_iter().map(|share| cut.owned(&[share])).collect();
        let wanted = held.clone();
        (held[1], held[3]) = (Vec::new(), Vec::new());
        assert_eq!(moves(&held, &wanted), Err(cut.chunks(Share { world_size: 4, rank: 1 })[0].start));
        held[1] = wanted[1].clone();
        assert!(moves(&held, &wanted).is_ok());
    }
}
