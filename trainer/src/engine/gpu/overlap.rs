//! NCCL's sum over the ranks during the backward pass.
//!
//! ```text
//! the GPU's stream   … last shard's pass: │ forward │ back: last layer │ … │ first layer │
//! NCCL's stream                                                        │ sum │ sum │ sum │ the last
//! ```
//!
//! The host asks for the whole pass, with a mark behind each bucket of the gradient, and then goes from mark to mark:
//! when the GPU is at one, the bucket before it is summed. A mark waits for nothing but this rank's own computing, so
//! it always comes. See the same on CPUs in `host::overlap`.

use std::ops::Range;

use elastic_collective::tree::Node;
use elastic_cuda::{CudaError, CudaSlice, CudaViewMut, Gpu, Mark};

use super::OnGpu;
use crate::engine::gradient::GradientTask;
use crate::engine::{EngineError, Ranks};
use crate::model::Model;

/// A part of the gradient that is summed over the ranks at once.
pub(super) struct Bucket {
    place: Range<usize>,
    /// Where the GPU has finished it.
    mark: Mark,
}

/// So many numbers in buckets of a size, the end first; in one if that is 0.
pub(super) fn cut(gpu: &Gpu, numbers: usize, size: usize) -> Result<Vec<Bucket>, CudaError> {
    let size = if size == 0 { numbers } else { size };
    let ends = (0..numbers.div_ceil(size)).map(|number| numbers - number * size);
    ends.map(|end| Ok(Bucket { place: end.saturating_sub(size)..end, mark: gpu.mark()? })).collect()
}

impl<M: Model> OnGpu<'_, M> {
    /// Sums over ranks on GPUs. Where this fails the GPU may still be at the gradient; what is asked of it afterwards
    /// waits for that by itself.
    pub(super) fn sum_over_nccl(&mut self, task: &GradientTask<'_, M>, ranks: Ranks<'_>) -> Result<u32, EngineError> {
        let Ranks { group, nodes, vote } = ranks;
        // Those of the sum before.
        self.spare.append(&mut self.sums);
        let lengths = self.buckets.iter().map(|bucket| bucket.place.len());
        self.nccl.make_room(&self.gpu, group, task.shards, lengths)?;
        self.ask_for(task, nodes)?;
        let OnGpu { nccl, gpu, sums, sum, buckets, .. } = self;
        let mut votes = None;
        for Bucket { place, mark } in buckets {
            gpu.wait_for(mark)?;
            if votes.is_none() {
                // No rank's timeout for a sum runs before all ranks have come this far.
                votes = Some(nccl.exchange(group, vote())?);
            }
            nccl.sum(gpu, group, task.shards, sums, sum, place.clone())?;
        }
        Ok(votes.unwrap_or_default())
    }

    /// Asks for the sums of this rank's nodes, and sets the marks.
    fn ask_for(&mut self, task: &GradientTask<'_, M>, nodes: &[Node]) -> Result<(), EngineError> {
        let Some((&last, before)) = nodes.split_last() else {
            let OnGpu { gpu, buckets, .. } = self;
            return Ok(buckets.iter().try_for_each(|bucket| gpu.set(&bucket.mark))?);
        };
        for &node in before {
            let sum = self.sum_under(task, node)?;
            self.sums.push(sum);
        }
        // All of the last but its last piece. What is added to that one, outermost first.
        let mut waiting = Vec::new();
        for node in last.before_last() {
            waiting.push(self.sum_under(task, node)?);
        }
        let mut samples = std::mem::take(&mut self.samples);
        task.samples_of(last.end - 1, &mut samples);
        let piece = samples.chunks(task.largest_piece()).next_back().unwrap_or_default();
        let before = &samples[..samples.len() - piece.len()];
        if !before.is_empty() {
            waiting.push(self.sum_of(task, before)?);
        }

        let mut gradient = self.room()?;
        let OnGpu { gpu, passes, state, buckets, .. } = self;
        let [parameters, ..] = state.parts();
        let mut handed = HandOut { gpu, whole: gradient.len(), left: buckets, waiting: &waiting };
        if piece.is_empty() {
            gpu.clear(&mut gradient)?;
        } else {
            let done = &mut |end: CudaViewMut<'_, f32>| handed.reached(end);
            let told = (buckets.len() > 1).then(|| (buckets[0].place.len(), done as _));
            passes.run(gpu, parameters, (task, piece), &mut gradient, told)?;
        }
        handed.reached(gradient.as_view_mut())?;
        self.samples = samples;
        self.spare.append(&mut waiting);
        self.sums.push(gradient);
        Ok(())
    }
}

/// The sum of a rank's last node on its way out. It is made where the gradient of the last piece is.
struct HandOut<'a> {
    gpu: &'a Gpu,
    /// Its length, and those of its buckets that are not handed out yet.
    whole: usize,
    left: &'a [Bucket],
    /// What is added to the last gradient, outermost first.
    waiting: &'a [CudaSlice<f32>],
}

impl HandOut<'_> {
    /// The last gradient is final from here to its end.
    fn reached(&mut self, mut end: CudaViewMut<'_, f32>) -> Result<(), CudaError> {
        let (gpu, from) = (self.gpu, self.whole - end.len());
        while let [Bucket { place, mark }, left @ ..] = self.left
            && place.start >= from
        {
            let mut piece = end.slice_mut(place.start - from..place.end - from);
            let mut waiting = self.waiting.iter().rev();
            waiting.try_for_each(|sum| gpu.add_part(&mut piece, &sum.slice(place.clone())))?;
            gpu.set(mark)?;
            self.left = left;
        }
        Ok(())
    }
}
