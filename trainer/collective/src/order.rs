//! In which order the ranks add gradients: in the shards' order, or in the quickest.

use std::fmt;

use clap::ValueEnum;

use super::tree::shards_of;
use super::{CollectiveError, Group, pairwise};

/// In which order the gradients of a step are added.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum SumOrder {
    /// The order of the shards: a sum has the same bits for every number of ranks.
    #[default]
    Fixed,
    /// Any order: each rank adds its own shards, and the quickest all-reduce adds the ranks' sums. All ranks get the
    /// same bits, but another number of ranks gives other bits.
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
    /// Adds the shards' buffers in this order, which is the same on all ranks. `sum` and `rest` are as for
    /// [`ordered_sum`](Self::ordered_sum). Either all ranks have a `vote`, and the result is the bitwise OR of all
    /// votes; or none has, and the result is 0.
    ///
    /// # Panics
    /// When `rest` does not fit the rank's nodes or the length of `sum`.
    pub fn sum(
        &mut self,
        order: SumOrder,
        shards: u32,
        rest: &[&[f32]],
        sum: &mut [f32],
        vote: Option<u32>,
    ) -> Result<u32, CollectiveError> {
        if order == SumOrder::Fixed {
            return self.ordered_sum(shards, rest, sum, vote.unwrap_or_default());
        }
        if shards_of(self.rank(), self.world_size(), shards).is_empty() {
            sum.fill(0.0);
        }
        rest.iter().for_each(|more| pairwise::add(sum, more));
        self.all_reduce(sum)?;
        let Some(vote) = vote else { return Ok(0) };
        Ok(self.gather([u64::from(vote)])?.iter().fold(0, |votes, [vote]| votes | *vote as u32))
    }
}
