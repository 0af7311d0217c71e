//! Evaluation on held-out samples during training: on all ranks, each sample once.
//!
//! The held-out samples are cut as an epoch is: into pieces as large as a step, each into the same logical shards. So
//! the sums have the same bits for every number of ranks, and a round that forms waits for a piece at most.

use std::iter::once;
use std::time::Instant;

use elastic_collective::Group;
use elastic_collective::tree::Node;

use super::observer::Event;
use super::{LEAVE, QUIESCE, Run, TrainError, Trainer, skipped, vote_to_end};
use crate::data::{Data, Schedule, StepSamples};
use crate::engine::gradient::{GradientTask, Work};
use crate::engine::interruption::Interruption;
use crate::engine::{Evaluated, Ranks};
use crate::model::Model;

impl<M: Model> Trainer<'_, M> {
    /// Has all ranks of a round know what rank 0, which keeps the record, has evaluated.
    pub(super) fn agree_on_evaluated(&mut self, group: &mut Group) -> Result<(), TrainError> {
        if self.run.settings.eval_every.is_some() {
            let all = group.gather([self.evaluated.unwrap_or_default()])?;
            self.evaluated = all.first().map(|[step]| *step).filter(|step| *step > 0);
        }
        Ok(())
    }

    /// Evaluates the present step, if that is due. Returns the ranks' votes: where they are to end the round, the next
    /// one begins with the evaluation.
    pub(super) fn evaluate(&mut self, group: &mut Group, nodes: &[Node]) -> Result<u32, TrainError> {
        let step = self.held.state.step;
        let Some(held_out) = held_out(&self.run, step).filter(|_| self.evaluated != Some(step)) else {
            return Ok(0);
        };
        let mut sums = vec![0.0; 1 + self.run.model.metrics().len()];
        let mut left_out = None;
        let pieces: Vec<_> = pieces(&self.run, step).collect();
        for number in 0..pieces.len() {
            self.hear()?;
            if self.membership.stop.interrupts(Instant::now()) {
                return Err(TrainError::Stopped);
            }
            let Evaluated { sums: found, votes } = self.evaluate_piece(group, nodes, &pieces[number..])?;
            let skipped = skipped(self.run.feed, group)?;
            left_out = skipped.map(|skipped| left_out.unwrap_or_default() + skipped);
            // A GPU has no metrics.
            sums.truncate(found.len());
            sums.iter_mut().zip(found).for_each(|(sum, found)| *sum += f64::from(found));
            if votes & (QUIESCE | LEAVE) != 0 {
                return Ok(votes);
            }
        }
        let samples = held_out.samples();
        let read = samples - left_out.unwrap_or_default();
        if read == 0 {
            return Err(TrainError::NothingRead { step, what: "the held-out" });
        }
        let units = (read * held_out.unit().of_a_sample) as f64;
        let mut means = sums.iter().map(|sum| sum / units);
        let loss = means.next().unwrap_or_default();
        let metrics = self.run.model.metrics().iter().copied().zip(means).collect();
        let round = self.membership.config.round;
        self.history.tell(&Event::Evaluated { round, step, samples, loss, metrics, skipped: left_out });
        self.evaluated = Some(step);
        Ok(0)
    }

    /// Sums the losses and metrics of the first of these pieces over the ranks.
    fn evaluate_piece(
        &mut self,
        group: &mut Group,
        nodes: &[Node],
        pieces: &[(Work, StepSamples)],
    ) -> Result<Evaluated, TrainError> {
        let Trainer { run, held, membership, .. } = self;
        let step = held.state.step;
        let later = pieces[1..].iter().copied().chain(course(run, step));
        let interruption = Interruption::new(membership.stop, membership.config.round);
        let task = GradientTask {
            model: run.model,
            parameters: held.state.parameters(),
            work: Work::Evaluation,
            feed: run.feed,
            order: &run.order,
            batch: pieces[0].1,
            later: later.take(run.feed.most()).collect(),
            shards: run.settings.shards.get(),
            micro_batch: run.settings.micro_batch,
            interruption: &interruption,
        };
        let vote = &mut || vote_to_end(membership);
        Ok(held.engine.evaluate(&task, Ranks { group, nodes, vote })?)
    }
}

/// The held-out samples, if the model is to be evaluated on them after `step` steps.
fn held_out<'a, M: Model>(run: &Run<'a, M>, step: u64) -> Option<&'a dyn Data<Batch = M::Batch>> {
    let every = run.settings.eval_every?.get();
    let is_due = step > 0 && (step.is_multiple_of(every) || step == run.schedule.total_steps());
    run.data.held_out().filter(|_| is_due)
}

/// The pieces of the held-out samples, if the model is to be evaluated on them after `step` steps.
fn pieces<'r, M: Model>(run: &'r Run<'_, M>, step: u64) -> impl Iterator<Item = (Work, StepSamples)> + 'r {
    held_out(run, step).into_iter().flat_map(move |held_out| {
        let pieces = Schedule::of_epochs(held_out.samples(), run.schedule.batch, 1);
        let epoch = run.schedule.batch_after(step - 1).epoch;
        let piece = move |done| (Work::Evaluation, StepSamples { step, epoch, ..pieces.batch_after(done) });
        (0..pieces.total_steps()).map(piece)
    })
}

/// All that is computed after `done` steps and their evaluation.
pub(super) fn course<'r, M: Model>(run: &'r Run<'_, M>, done: u64) -> impl Iterator<Item = (Work, StepSamples)> + 'r {
    let step = |done| once((Work::Gradient, run.schedule.batch_after(done))).chain(pieces(run, done + 1));
    (done..run.schedule.total_steps()).flat_map(step)
}
