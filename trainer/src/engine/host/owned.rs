//! Steps of sharded numbers: each rank has the sum of what it owns, and moves that alone.
//!
//! ```text
//! sum to owners ─▶ commit: all say that they have theirs ─▶ each moves what it owns ─▶ gather the parameters
//! ```
//!
//! Until the commit, no rank has changed anything. A rank that has passed it knows that every other rank has its sums,
//! and can do the step too, whichever rank dies then.

use std::ops::Range;

use elastic_collective::Group;
use elastic_collective::tree::SumPlan;

use super::OnHost;
use crate::engine::owners::{Cut, Share};
use crate::engine::state::State;
use crate::engine::{Advance, EngineError};
use crate::model::clip::{block_at, squares};
use crate::model::{Model, Tensor};
use crate::vectors::first_not_finite;

/// A sum that owners have, before its step is done.
pub(super) struct Summed {
    pub(super) step: u64,
    /// The squares of the whole gradient, where it is clipped.
    pub(super) squares: Vec<f64>,
}

impl<M: Model> OnHost<M> {
    /// Returns the loss, when all ranks have their sums of the step, and all of these are finite.
    pub(super) fn commit_sum(
        &mut self,
        cut: Cut,
        group: &mut Group,
        step: u64,
        along: &Advance<'_>,
    ) -> Result<f32, EngineError> {
        let &Advance { tensors, clip, .. } = along;
        let (loss, gradient) = (self.sum[0], &self.sum[1..]);
        let share = Share { world_size: group.world_size(), rank: group.rank() };
        let squares = clip.map_or(Ok(Vec::new()), |_| all_squares(cut, share, gradient, tensors, group))?;
        let flaw = cut.chunks(share).into_iter().find_map(|chunk| {
            let start = chunk.start;
            first_not_finite(&gradient[chunk]).map(|number| start + number)
        });
        self.summed = Some(Summed { step, squares });
        // One more than the number: 0 is nothing.
        let all = group.gather([u64::from(loss.to_bits()), flaw.map_or(0, |number| number as u64 + 1)])?;
        if let Some(number) = all.iter().filter_map(|[_, flaw]| flaw.checked_sub(1)).min() {
            return Err(EngineError::NotFinite { step, tensor: Tensor::name_at(tensors, number as usize) });
        }
        // The loss is before the first parameter, in the first rank's chunk.
        Ok(all.first().map_or(loss, |[loss, _]| f32::from_bits(*loss as u32)))
    }
}

/// The squares of the gradient. Each rank adds up those of its chunks, and all get the others'.
fn all_squares(
    cut: Cut,
    share: Share,
    gradient: &[f32],
    tensors: &[Tensor],
    group: &mut Group,
) -> Result<Vec<f64>, EngineError> {
    let block = |place: usize| block_at(cut.parameters, place);
    let mut all = vec![0.0; block(cut.parameters)];
    for chunk in cut.chunks(share) {
        all[block(chunk.start)..block(chunk.end)].copy_from_slice(&squares(gradient, chunk, tensors));
    }
    for (Range { start, end }, ends) in cut.buckets(share.world_size) {
        let bytes = |chunk: &usize| (block(start + chunk) - block(start)) * size_of::<f64>();
        let ends: Vec<usize> = ends.iter().map(bytes).collect();
        group.share(&ends, bytemuck::cast_slice_mut(&mut all[block(start)..block(end)]))?;
    }
    Ok(all)
}

/// Sends the parameters that this rank has moved to all but their second owner, which has moved them too.
pub(super) fn gather(cut: Cut, state: &mut State, group: &mut Group) -> Result<(), EngineError> {
    let world_size = group.world_size();
    let plan = SumPlan { world_size, shards: 1, elements: 0 };
    for (bucket, ends) in cut.buckets(world_size) {
        let ends: Vec<usize> = ends.iter().map(|end| end * size_of::<f32>()).collect();
        let goes = |from: usize, to: usize| plan.second(from as u32) != to as u32;
        group.share_where(&ends, goes, bytemuck::cast_slice_mut(&mut state.flat[bucket]))?;
    }
    Ok(())
}
