//! Steps on this machine's CPUs, on as many threads as are asked for.

mod overlap;

use super::gradient::{GradientTask, GradientThreads};
use super::state::State;
use super::{Advance, Engine, EngineError, Evaluated, Ranks, Reduced, TaskError};
use crate::model::clip::clipped;
use crate::model::{Model, Tensor};
use crate::settings::Settings;
use crate::vectors::first_not_finite;

/// It works on the loop's state.
pub(super) struct OnHost<M: Model> {
    threads: GradientThreads<M>,
    /// The loss's and the gradient's sum over all ranks.
    sum: Vec<f32>,
    /// Numbers that are summed over the ranks at once.
    bucket: usize,
    /// What the threads hand out of the sums of their parts.
    outboxes: Vec<Vec<f32>>,
}

impl<M: Model> OnHost<M> {
    pub(super) fn new(settings: &Settings, model: &M) -> Result<OnHost<M>, TaskError> {
        let bucket = settings.bucket();
        let sum = vec![0.0; model.parameters() + 1];
        let bucket = if bucket == 0 { sum.len() } else { bucket };
        let threads = GradientThreads::new(settings.threads, settings.shards, model)?;
        Ok(OnHost { threads, sum, bucket, outboxes: Vec::new() })
    }
}

impl<M: Model> Engine<M> for OnHost<M> {
    fn kind(&self) -> Option<String> {
        None
    }

    fn take(&mut self, _: &State) -> Result<(), EngineError> {
        Ok(())
    }

    fn reduce(&mut self, task: &GradientTask<'_, M>, ranks: Ranks<'_>) -> Result<Reduced, EngineError> {
        task.begin(ranks.nodes, self.threads.pool.threads(), false);
        let votes = match (ranks.group.world_size(), ranks.nodes) {
            (1, &[root]) => {
                let sum = task.sum_under(root, &mut self.threads);
                task.interruption.result()?;
                self.threads.recycle(std::mem::replace(&mut self.sum, sum));
                (ranks.vote)()
            }
            _ if self.bucket < self.sum.len() => self.sum_in_buckets(task, ranks)?,
            _ => {
                let Ranks { group, nodes, vote } = ranks;
                let mut sums =
                    nodes.iter().map(|&node| task.sum_under(node, &mut self.threads)).collect::<Vec<_>>().into_iter();
                task.interruption.result()?;
                if let Some(first) = sums.next() {
                    self.threads.recycle(std::mem::replace(&mut self.sum, first));
                }
                let rest: Vec<&[f32]> = sums.as_slice().iter().map(Vec::as_slice).collect();
                let votes = group.ordered_sum(task.shards, &rest, &mut self.sum, vote())?;
                sums.for_each(|sum| self.threads.recycle(sum));
                votes
            }
        };
        Ok(Reduced { loss: self.sum[0], votes })
    }

    fn evaluate(&mut self, task: &GradientTask<'_, M>, ranks: Ranks<'_>) -> Result<Evaluated, EngineError> {
        let Ranks { group, nodes, vote } = ranks;
        task.begin(nodes, self.threads.pool.threads(), false);
        let mut parts: Vec<Vec<f32>> = nodes.iter().map(|&node| task.sum_under(node, &mut self.threads)).collect();
        task.interruption.result()?;
        // A rank without nodes has room for the sum.
        let mut sums = if parts.is_empty() { vec![0.0; task.length()] } else { parts.remove(0) };
        let mut votes = vote();
        if group.world_size() > 1 {
            let rest: Vec<&[f32]> = parts.iter().map(Vec::as_slice).collect();
            votes = group.ordered_sum(task.shards, &rest, &mut sums, votes)?;
        }
        parts.into_iter().for_each(|part| self.threads.recycle(part));
        Ok(Evaluated { sums, votes })
    }

    fn advance(&mut self, state: &mut State, along: &Advance<'_>) -> Result<(), EngineError> {
        let &Advance { optimizer, tensors, mean, clip, .. } = along;
        let gradient = &self.sum[1..];
        if let Some(number) = first_not_finite(gradient) {
            return Err(EngineError::NotFinite { step: state.step + 1, tensor: Tensor::name_at(tensors, number) });
        }
        let scale = clip.map_or(mean, |most| clipped(gradient, tensors, mean, most));
        let stride = along.stride(state.step, scale);
        state.advance(&mut self.threads.pool, optimizer, &stride, tensors, gradient);
        Ok(())
    }

    fn checksum(&mut self, state: &State) -> Result<u64, EngineError> {
        Ok(crc32c::crc32c(bytemuck::cast_slice(&state.flat)).into())
    }

    fn give(&mut self, _: &mut State) -> Result<(), EngineError> {
        Ok(())
    }
}
