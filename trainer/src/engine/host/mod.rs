//! Steps on this machine's CPUs, on as many threads as are asked for.

mod overlap;
mod owned;

use elastic_collective::{CollectiveError, Group};

use super::gradient::{GradientTask, GradientThreads};
use super::owners::Cut;
use super::state::State;
use super::{Advance, Engine, EngineError, Evaluated, Ranks, Reduced, TaskError};
use crate::model::clip::{clipped, squares};
use crate::model::{Model, Tensor};
use crate::settings::Settings;
use crate::vectors::first_not_finite;
use owned::Summed;

/// It works on the loop's state.
pub(super) struct OnHost<M: Model> {
    threads: GradientThreads<M>,
    /// The loss's and the gradient's sum over all ranks.
    sum: Vec<f32>,
    /// Numbers that are summed over the ranks at once.
    bucket: usize,
    /// What the threads hand out of the sums of their parts.
    outboxes: Vec<Vec<f32>>,
    /// How the sum is cut, where it goes only to its owners.
    cut: Option<Cut>,
    /// What is known of a sum that went only to its owners.
    summed: Option<Summed>,
}

impl<M: Model> OnHost<M> {
    pub(super) fn new(settings: &Settings, model: &M) -> Result<OnHost<M>, TaskError> {
        let sum = vec![0.0; model.parameters() + 1];
        let cut = Cut::of(settings, model.parameters());
        let bucket = cut.map_or(settings.bucket(), |cut| cut.bucket);
        let bucket = if bucket == 0 { sum.len() } else { bucket };
        let threads = GradientThreads::new(settings.threads, settings.shards, model)?;
        Ok(OnHost { threads, sum, bucket, outboxes: Vec::new(), cut, summed: None })
    }
}

impl<M: Model> Engine<M> for OnHost<M> {
    fn kind(&self) -> Option<String> {
        None
    }

    fn take(&mut self, _: &State) -> Result<(), EngineError> {
        self.summed = None;
        Ok(())
    }

    fn reduce(&mut self, task: &GradientTask<'_, M>, ranks: Ranks<'_>) -> Result<Reduced, EngineError> {
        self.summed = None;
        let Ranks { group, nodes, vote } = ranks;
        task.begin(nodes, self.threads.pool.threads(), false);
        let votes = match (group.world_size(), nodes) {
            (1, &[root]) => {
                let sum = task.sum_under(root, &mut self.threads);
                task.interruption.result()?;
                self.threads.recycle(std::mem::replace(&mut self.sum, sum));
                vote()
            }
            _ if self.bucket < self.sum.len() => self.sum_in_buckets(task, Ranks { group, nodes, vote })?,
            _ => {
                let mut sums =
                    nodes.iter().map(|&node| task.sum_under(node, &mut self.threads)).collect::<Vec<_>>().into_iter();
                task.interruption.result()?;
                if let Some(first) = sums.next() {
                    self.threads.recycle(std::mem::replace(&mut self.sum, first));
                }
                let rest: Vec<&[f32]> = sums.as_slice().iter().map(Vec::as_slice).collect();
                let votes = over(group, self.cut.is_some(), task.shards, &rest, &mut self.sum, vote())?;
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

    fn summed(&self) -> Option<u64> {
        self.summed.as_ref().map(|summed| summed.step)
    }

    fn commit(&mut self, group: &mut Group, step: u64, along: &Advance<'_>, loss: f32) -> Result<f32, EngineError> {
        let cut = self.cut.filter(|_| group.world_size() > 1);
        cut.map_or(Ok(loss), |cut| self.commit_sum(cut, group, step, along))
    }

    fn advance(&mut self, state: &mut State, along: &Advance<'_>) -> Result<(), EngineError> {
        let &Advance { optimizer, tensors, mean, clip, .. } = along;
        let gradient = &self.sum[1..];
        let all_squares = match self.summed.take() {
            // All ranks know that their parts are finite.
            Some(Summed { squares, .. }) => squares,
            None => {
                if let Some(number) = first_not_finite(gradient) {
                    let tensor = Tensor::name_at(tensors, number);
                    return Err(EngineError::NotFinite { step: state.step + 1, tensor });
                }
                clip.map_or(Vec::new(), |_| squares(gradient, 0..gradient.len(), tensors))
            }
        };
        let scale = clip.map_or(mean, |most| clipped(&all_squares, mean, most));
        let stride = along.stride(state.step, scale);
        state.advance(&mut self.threads.pool, optimizer, &stride, tensors, gradient);
        Ok(())
    }

    fn gather(&mut self, state: &mut State, group: &mut Group) -> Result<(), EngineError> {
        self.cut.map_or(Ok(()), |cut| owned::gather(cut, state, group))
    }

    fn checksum(&mut self, state: &State) -> Result<u64, EngineError> {
        Ok(crc32c::crc32c(bytemuck::cast_slice(&state.flat)).into())
    }

    fn give(&mut self, _: &mut State) -> Result<(), EngineError> {
        Ok(())
    }
}

/// The sum over ranks: to all of them, or to owners alone.
fn over(
    group: &mut Group,
    to_owners: bool,
    shards: u32,
    rest: &[&[f32]],
    sum: &mut [f32],
    vote: u32,
) -> Result<u32, CollectiveError> {
    if to_owners { group.sum_to_owners(shards, rest, sum, vote) } else { group.ordered_sum(shards, rest, sum, vote) }
}
