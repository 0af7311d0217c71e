//! Evaluation on held-out samples during training: on all ranks, each sample once.
//!
//! The held-out samples are cut as an epoch is: into pieces as large as a step, each into the same logical shards. So
//! the sums have the same bits for every number of ranks, and a round that forms waits for a piece at most.

use std::time::Instant;

use elastic_collective::Group;
use elastic_collective::tree::Node;

use super::observer::Event;
use super::{LEAVE, QUIESCE, Run, TrainError, Trainer, vote_to_end};
use crate::data::{Data, Order, Schedule, StepSamples};
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
        let pieces = Schedule::of_epochs(held_out.samples(), self.run.schedule.batch, 1);
        let mut sums = vec![0.0; 1 + self.run.model.metrics().len()];
        for piece in 0..pieces.total_steps() {
            self.hear()?;
            if self.membership.stop.interrupts(Instant::now()) {
                return Err(TrainError::Stopped);
            }
            let Evaluated { sums: found, votes } = self.evaluate_piece(group, nodes, held_out, pieces, piece)?;
            // A GPU has no metrics.
            sums.truncate(found.len());
            sums.iter_mut().zip(found).for_each(|(sum, found)| *sum += f64::from(found));
            if votes & (QUIESCE | LEAVE) != 0 {
                return Ok(votes);
            }
        }
        let samples = held_out.samples();
        let units = (samples * held_out.unit().of_a_sample) as f64;
        let mut means = sums.iter().map(|sum| sum / units);
        let loss = means.next().unwrap_or_default();
        let metrics = self.run.model.metrics().iter().copied().zip(means).collect();
        let round = self.membership.config.round;
        self.history.tell(&Event::Evaluated { round, step, samples, loss, metrics });
        self.evaluated = Some(step);
        Ok(0)
    }

    /// Sums the losses and metrics of a piece over the ranks.
    fn evaluate_piece(
        &mut self,
        group: &mut Group,
        nodes: &[Node],
        held_out: &dyn Data<Batch = M::Batch>,
        pieces: Schedule,
        piece: u64,
    ) -> Result<Evaluated, TrainError> {
        let Trainer { run, held, membership, .. } = self;
        let step = held.state.step;
        let epoch = run.schedule.batch_after(step - 1).epoch;
        let interruption = Interruption::new(membership.stop, membership.config.round);
        let task = GradientTask {
            model: run.model,
            parameters: held.state.parameters(),
            work: Work::Evaluation,
            data: held_out,
            order: &Order::in_turn(run.settings.seed, pieces.samples),
            batch: StepSamples { step, epoch, ..pieces.batch_after(piece) },
            next: None,
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
