//! In which order ranks add what they have: the shards', or whichever is quickest. Not for how either is done.

use std::fmt;

use clap::ValueEnum;

use super::{CollectiveError, Group};

/// In which order the gradients of a step are added.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum SumOrder {
    /// The shards' own: a sum has the same bits for every number of ranks.
    #[default]
    Fixed,
    /// Any: first each rank's own, then theirs, by the quickest all-reduce. All ranks get the same bits, but for another
    /// number of ranks they are others.
    Any,
}

impl fmt::Display for SumOrder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            SumOrder::Fixed => "fixed",
            SumOrder::Any => "any",
        })
    }
}

impl Group {
    /// Adds the shards' buffers in this order and writes the sum into `sum`, the same on all ranks. `partials` are the sums
    /// of this rank's [`cover`](super::tree::cover), in its order. With a `vote` on all ranks the answer has each bit that
    /// any of them set; without, on all ranks, it is 0.
    ///
    /// # Panics
    /// When `partials` do not fit the rank's cover or the length of `sum`.
    pub fn sum(
        &mut self,
        order: SumOrder,
        shards: u32,
        partials: &[&[f32]],
        sum: &mut [f32],
        vote: Option<u32>,
    ) -> Result<u32, CollectiveError> {
        if order == SumOrder::Fixed {
            return self.ordered_sum(shards, partials, sum, vote.unwrap_or_default());
        }
        match partials.split_first() {
            Some((first, _)) => sum.copy_from_slice(first),
            // There are more ranks than shards.
            None => sum.fill(0.0),
        }
        for partial in partials.iter().skip(1) {
            sum.iter_mut().zip(*partial).for_each(|(sum, more)| *sum += more);
        }
        self.all_reduce(sum)?;
        let Some(vote) = vote else { return Ok(0) };
        Ok(self.gather([u64::from(vote)])?.iter().fold(0, |votes, [vote]| votes | *vote as u32))
    }
}
