//! The state that a worker holds, and the engine that computes the next one. Where states come from is in `loading` and
//! `rounds`.

use elastic_collective::{Group, GroupConfig};
use tracing::warn;

use super::replicas::{self, Verdict};
use super::shards::Sharding;
use super::{Run, TrainError};
use crate::checkpoint::manifest::Position;
use crate::checkpoint::snapshot::{LastStep, SnapshotHeader};
use crate::engine::owners::Cut;
use crate::engine::state::State;
use crate::engine::{Engine, EngineError};
use crate::model::Model;
use crate::settings::Settings;

/// A worker's state.
pub(super) struct Held<'a, M: Model> {
    pub(super) engine: Box<dyn Engine<M> + 'a>,
    /// The engine's own copy may have newer numbers.
    pub(super) state: State,
    pub(super) holding: Holding,
    /// Where the optimizer's numbers are sharded.
    pub(super) sharding: Option<Sharding>,
    /// How many samples were left out of the step that was summed last, if they may be.
    pub(super) skipped: Option<u64>,
    /// How its last step was done, if one was.
    pub(super) last: Option<LastStep>,
}

/// What a worker's state is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Holding {
    /// Room for one, or half of one from a peer.
    Nothing,
    /// One from the agent's memory, where a dead worker left it. The ranks have not yet agreed on it.
    Rescued,
    /// One that the ranks agreed on, or a later one.
    Reached,
}

impl<'a, M: Model> Held<'a, M> {
    pub(super) fn nothing(engine: Box<dyn Engine<M> + 'a>, model: &M, settings: &Settings) -> Held<'a, M> {
        let state = State::room(model.parameters(), &settings.optimizer());
        let sharding = Cut::of(settings, model.parameters()).map(Sharding::none);
        Held { engine, state, holding: Holding::Nothing, sharding, skipped: None, last: None }
    }

    /// Whether there is a state: where it is cut, this rank's part.
    pub(super) fn holds(&self) -> bool {
        self.holding != Holding::Nothing
    }

    /// Brings the numbers up to the state's step.
    pub(super) fn give(&mut self) -> Result<(), EngineError> {
        self.engine.give(&mut self.state)
    }

    /// Has the engine take over the state, which comes from elsewhere, and is whole.
    pub(super) fn taken(&mut self, holding: Holding, last: Option<LastStep>) -> Result<(), EngineError> {
        self.engine.take(&self.state)?;
        self.sharding.iter_mut().for_each(Sharding::is_whole);
        (self.holding, self.last) = (holding, last);
        Ok(())
    }

    /// What a snapshot of it says.
    pub(super) fn header(&self, run: &Run<'_, M>, config: &GroupConfig) -> SnapshotHeader {
        let next = run.schedule.batch_after(self.state.step);
        SnapshotHeader {
            round: config.round,
            world_size: config.world_size,
            step: self.state.step,
            done: self.last,
            data: Position {
                epoch: next.epoch,
                cursor: next.first,
                samples: run.schedule.samples,
                seed: run.settings.seed,
                global_batch: run.schedule.batch,
                shards: run.settings.shards.get(),
            },
        }
    }

    /// Has all ranks hold the same state of `step`, from those that hold it: how many lacked it. Of those that hold it,
    /// what most have counts ([`replicas`]).
    pub(super) fn share(&mut self, group: &mut Group, step: u64, holds: &[bool]) -> Result<usize, TrainError> {
        if holds.len() < 2 {
            return Ok(0);
        }
        let rank = group.rank() as usize;
        let holder = holds[rank];
        let own = if holder { self.engine.checksum(&self.state)? } else { 0 };
        // A round of 0 ranks: no rank here did the step; it was loaded.
        let done = self.last.unwrap_or(LastStep { round: 0, world_size: 0, loss: 0.0 });
        let told = [own, done.round, u64::from(done.world_size), u64::from(done.loss.to_bits())];
        let all = group.gather(told)?;
        let sums: Vec<Option<u64>> = all.iter().zip(holds).map(|([sum, ..], holds)| holds.then_some(*sum)).collect();
        let right = match replicas::judge(&sums) {
            Verdict::Same => None,
            Verdict::Most(right) => Some(right),
            Verdict::Split => return Err(TrainError::Split { step, sums: replicas::named(&sums) }),
        };
        if let Some(right) = &right
            && (rank == 0 || holder && !right[rank])
        {
            warn!("{}", replicas::warning(step, &replicas::wrong(&sums, right), &sums));
        }
        let holds = right.as_deref().unwrap_or(holds);
        let (holder, lacking) = (holds[rank], holds.iter().filter(|&&holds| !holds).count());
        if lacking == 0 {
            return Ok(0);
        }
        let theirs: Vec<_> = all.iter().zip(holds).filter(|(_, holds)| **holds).map(|(told, _)| *told).collect();
        // Of two ranks that hold the step, one may have loaded it. Only one that did it knows how it was done.
        let Some(&[sum, round, world_size, loss]) = theirs.iter().max_by_key(|[_, _, world_size, _]| *world_size > 0)
        else {
            return Err(TrainError::Damaged { step });
        };
        // Until all of it is here, this rank holds no state.
        self.holding = if holder { Holding::Reached } else { Holding::Nothing };
        self.give()?;
        group.spread(holds, bytemuck::cast_slice_mut(&mut self.state.flat))?;
        if !holder {
            self.engine.take(&self.state)?;
        }
        if self.engine.checksum(&self.state)? != sum {
            return Err(TrainError::Damaged { step });
        }
        self.state.step = step;
        self.holding = Holding::Reached;
        let done = LastStep { round, world_size: world_size as u32, loss: f32::from_bits(loss as u32) };
        self.last = Some(done).filter(|done| done.world_size > 0);
        Ok(lacking)
    }
}
