//! Copies of the state: to the agent's memory, which outlives this worker, and from there to disk. When a
//! checkpoint counts is decided in [`crate::train::saving`].
//!
//! On CPUs a copy is made while the next step's gradient is computed. The state does not change until the optimizer
//! runs, and the optimizer waits for the copy. From a GPU the numbers first go to memory of their own, and the
//! optimizer waits only for that; they are copied from there beside as many steps as it takes.
//!
//! The first worker of each node keeps snapshots in its agent's memory. One is enough, since all workers hold the same
//! state, and nodes fail as a whole. Rank 0 is such a worker, and writes every so many snapshots to disk.

use std::io;
use std::panic;
use std::path::{self, Path};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use elastic_collective::Group;
use elastic_collective::stop::Stop;
use elastic_proto::worker::Checkpoint;
use tracing::{info, warn};

use super::agent_memory::AgentMemory;
use super::saving::Saving;
use super::{Holding, TrainError, Trainer};
use crate::checkpoint::disk::Host;
use crate::checkpoint::manifest::Position;
use crate::checkpoint::sharded_write::{self, Next, ShardedWrite, Share};
use crate::checkpoint::snapshot::{Layout, SnapshotHeader};
use crate::checkpoint::snapshot_slots::{Rescued, SnapshotSlots};
use crate::checkpoint::writer::{ReservedSlot, WriteMode, Writer};
use crate::checkpoint::{CheckpointError, Checkpoints, SavingJob};
use crate::engine::state::State;
use crate::engine::{EngineError, HostCopy};
use crate::model::Model;

/// A copy of the loop's own numbers, on its way.
pub(super) struct Copying {
    reserved: ReservedSlot,
    header: SnapshotHeader,
}

/// A copy of numbers that do not change, made during later steps.
pub(super) struct BackgroundCopy {
    thread: JoinHandle<Result<ReservedSlot, EngineError>>,
}

impl BackgroundCopy {
    fn start(mut reserved: ReservedSlot, header: SnapshotHeader, numbers: HostCopy) -> io::Result<BackgroundCopy> {
        let work = move || {
            // If the numbers do not come, the slot keeps its old snapshot.
            reserved.slot.fill(&header, numbers.numbers()?);
            Ok(reserved)
        };
        Ok(BackgroundCopy { thread: thread::Builder::new().name("snapshot".into()).spawn(work)? })
    }

    fn end(self) -> Result<ReservedSlot, EngineError> {
        self.thread.join().unwrap_or_else(|panicked| panic::resume_unwind(panicked))
    }
}

/// Does `work`, which does not change the state, and makes the copy meanwhile.
pub(super) fn during<T>(copying: Option<&mut Copying>, state: &[f32], work: impl FnOnce() -> T) -> T {
    match copying {
        Some(Copying { reserved, header }) => reserved.slot.fill_during(header, state, work),
        None => work(),
    }
}

impl<M: Model> Trainer<'_, M> {
    /// Asks the agent for memory that outlives this worker, and takes up what an earlier worker has left there.
    /// Training also continues without that memory, but then resumes from a checkpoint when all workers die. On a node
    /// that keeps no snapshots in this round, it only looks for what is left.
    pub(super) fn find_memory(&mut self) -> Result<(), TrainError> {
        let may_ask = self.local_rank == 0 && self.settings.snapshot_every > 0;
        let node = self.assignment.as_ref().map_or(0, |assignment| assignment.group_rank);
        let keeps = self.settings.checkpoint_replicas.is_none_or(|nodes| node < nodes.get());
        let folder = self.settings.checkpoint_dir.as_ref().and_then(|folder| path::absolute(folder).ok());
        let folder = folder.as_deref().and_then(Path::to_str).filter(|_| !self.rescue.is_empty());
        let layout = self.layout();
        let Some(agent) = self.agent.as_mut().filter(|_| may_ask) else { return Ok(()) };
        let asks;
        (self.agent_memory, asks) = self.agent_memory.in_round(keeps, self.holding != Holding::Nothing);
        if !asks {
            return Ok(());
        }
        let rescue = folder.map_or(Vec::new(), |folder| {
            self.rescue.iter().cloned().chain(["--dir".to_owned(), folder.to_owned()]).collect()
        });
        let file = agent.memory(layout.bytes(), rescue, self.stop)?;
        let found = file.and_then(|file| {
            let found = if keeps {
                SnapshotSlots::kept(&layout, file).map(|(slots, rescued)| (Some(slots), rescued))
            } else {
                SnapshotSlots::look(&layout, file).map(|rescued| (None, rescued))
            };
            found.map_err(|error| error.to_string())
        });
        match found {
            Ok((slots, rescued)) => {
                self.slots = slots.or(self.slots.take());
                if let Some(Rescued { step, state, done }) = rescued.filter(|_| self.holding == Holding::Nothing) {
                    info!(step, "found a snapshot in the agent's memory");
                    self.state = State { step, flat: state };
                    self.engine.take(&self.state)?;
                    (self.holding, self.last) = (Holding::Rescued, done);
                }
            }
            Err(cause) if keeps => warn!(
                "the agent keeps no snapshots: {cause}; training continues, but if all workers die at once it resumes \
                 from a checkpoint"
            ),
            Err(_) => {}
        }
        Ok(())
    }

    /// Gives the agent's memory back where this round's snapshots are not kept in it, once the ranks agree on a state.
    pub(super) fn give_memory_back(&mut self) -> Result<(), TrainError> {
        if !self.agent_memory.is_to_return() {
            return Ok(());
        }
        self.slots = self.slots.take().filter(|slots| !slots.are_kept());
        (self.agent_memory, self.helper) = (AgentMemory::Returned, None);
        self.agent.as_mut().map_or(Ok(()), |agent| Ok(agent.forget()?))
    }

    /// Begins to save, on the rank that does: after `committed` steps.
    pub(super) fn begin_saving(&mut self, committed: u64) -> Result<(), TrainError> {
        let Some(folder) = self.settings.checkpoint_dir.as_ref().filter(|_| self.saving.is_none()) else {
            return Ok(());
        };
        let slots = match &self.slots {
            Some(slots) => slots.clone(),
            None => {
                let layout = self.layout();
                self.slots.insert(SnapshotSlots::own(&layout).map_err(CheckpointError::Memory)?).clone()
            }
        };
        let owner = SavingJob { job: self.group_config.job.clone(), beside_others: self.agent.is_none() };
        let checkpoints = Checkpoints::new(Host, folder).owned_by(owner);
        self.saving = Some(Saving::start(checkpoints, self.settings.retention(), slots, committed)?);
        Ok(())
    }

    /// Ends saving, on a rank that has no part in it any more.
    pub(super) fn end_saving(&mut self) {
        self.saving = None;
        self.slots = self.slots.take().filter(SnapshotSlots::are_kept);
    }

    /// Begins a copy of the present state where one is due and there is a slot for it. Returns what is to be made
    /// [`during`] the next gradient; none where the copy is made beside steps. Only rank 0 writes to disk; a disk that
    /// fails is warned of, and is no error.
    pub(super) fn begin_copy(&mut self) -> Result<Option<Copying>, TrainError> {
        if self.background_copy.as_ref().is_some_and(|beside| beside.thread.is_finished()) {
            self.end_background_copy()?;
        }
        let (step, every) = (self.state.step, self.settings.snapshot_every);
        if let Some(share) = self.sharded.as_mut().and_then(ShardedWrite::begins) {
            return self.begin_share(share);
        }
        let due = self.sharded.is_none() && step.is_multiple_of(self.settings.checkpoint_every.get());
        let write = self.save_soon || due;
        // While saving has no room the checkpoint stays due, and no copy is made in vain at each step.
        let waits = write && self.saving.as_ref().is_some_and(|saving| !saving.has_room());
        let due = due || write && !waits || self.copy_soon || every > 0 && step.is_multiple_of(every);
        if step == 0 || step == self.copied || !due {
            return Ok(None);
        }
        // Two copies at once would leave no whole snapshot after a kill.
        if self.background_copy.is_some() {
            (self.copy_soon, self.save_soon) = (true, write);
            return Ok(None);
        }
        self.copy_soon = false;
        let reserved = match &mut self.saving {
            Some(saving) => saving.reserve(step, write),
            None => self.kept_slots().and_then(SnapshotSlots::take).map(ReservedSlot::in_memory),
        };
        let Some(reserved) = reserved else {
            self.save_soon |= write && self.saving.is_some();
            return Ok(None);
        };
        self.save_soon = waits;
        self.copy_to(reserved)
    }

    /// The beginning of a copy of the present state.
    fn copy_to(&mut self, reserved: ReservedSlot) -> Result<Option<Copying>, TrainError> {
        let numbers = self.engine.snapshot(&mut self.state)?;
        self.copied = self.state.step;
        let header = self.header();
        let Some(numbers) = numbers else { return Ok(Some(Copying { reserved, header })) };
        self.background_copy = Some(BackgroundCopy::start(reserved, header, numbers).map_err(CheckpointError::Thread)?);
        Ok(None)
    }

    /// The beginning of a copy of the present state, of which this worker writes a share.
    fn begin_share(&mut self, share: Share) -> Result<Option<Copying>, TrainError> {
        let step = self.state.step;
        let reserved = match &mut self.saving {
            _ if self.background_copy.is_some() => None,
            Some(saving) => saving.reserve_for_share(step, share),
            None => {
                let slot = self.slots.as_ref().and_then(SnapshotSlots::take);
                slot.map(|slot| ReservedSlot::for_share(slot, share))
            }
        };
        let Some(reserved) = reserved else {
            self.sharded.iter_mut().for_each(ShardedWrite::no_room);
            return Ok(None);
        };
        self.copy_to(reserved)
    }

    /// Takes in a copy that was made during a gradient.
    pub(super) fn end_copy(&mut self, copying: Option<Copying>) {
        if let Some(Copying { reserved, .. }) = copying {
            self.take_in(reserved);
        }
    }

    /// Waits for a copy that is made beside steps, if one is, and takes it in.
    pub(super) fn end_background_copy(&mut self) -> Result<(), TrainError> {
        let Some(beside) = self.background_copy.take() else { return Ok(()) };
        let reserved = beside.end()?;
        self.take_in(reserved);
        Ok(())
    }

    fn take_in(&mut self, reserved: ReservedSlot) {
        match (&mut self.saving, &self.helper, &self.slots) {
            (Some(saving), ..) => saving.take_in(reserved),
            (None, Some(helper), _) if reserved.is_to_share() => drop(helper.take_in(reserved)),
            (None, _, Some(slots)) => slots.put(reserved.slot),
            (None, _, None) => {}
        }
    }

    /// Waits until the present state is committed.
    pub(super) fn save_last(&mut self, time: Duration, stop: &Stop) -> Result<(), String> {
        self.engine.give(&mut self.state).map_err(|error| error.to_string())?;
        let header = self.header();
        let Some(saving) = &mut self.saving else { return Ok(()) };
        let mut committed = Vec::new();
        let on_commit = |checkpoint: &Checkpoint| committed.push(checkpoint.clone());
        let result = saving.finish(&header, &self.state.flat, self.agent.as_mut(), time, stop, on_commit);
        committed.iter().for_each(|checkpoint| self.record_commit(checkpoint));
        result
    }

    /// Ends what was agreed in the round before. On rank 0, offers its folder to other nodes: the number that they look
    /// by, or 0 where there is nothing to share.
    pub(super) fn offer_folder(&mut self) -> u64 {
        self.sharded = None;
        self.decide(WriteMode::Whole);
        let nodes = self.assignment.as_ref().map_or(1, |assignment| assignment.group_world_size);
        let offers =
            self.group_config.rank == 0 && nodes > 1 && self.layout().chunks() > 1 && self.kept_slots().is_some();
        self.settings.checkpoint_dir.clone().filter(|_| offers).map_or(0, sharded_write::offer)
    }

    /// Finds out, together with all ranks, which of them share rank 0's folder.
    pub(super) fn find_writers(&mut self, group: &mut Group, nonce: u64) -> Result<(), TrainError> {
        if nonce == 0 {
            return Ok(());
        }
        let folder = self.settings.checkpoint_dir.clone();
        let sees = |folder| sharded_write::sees(folder, nonce);
        let own = self.group_config.rank == 0 || self.may_help() && folder.clone().is_some_and(sees);
        self.sharded = ShardedWrite::agree(group, nonce, own, folder, self.layout().chunks())?;
        Ok(())
    }

    /// The slots in the agent's memory.
    fn kept_slots(&self) -> Option<&SnapshotSlots> {
        self.slots.as_ref().filter(|slots| slots.are_kept())
    }

    /// Whether there is what it takes to write shares, on another rank than 0.
    fn may_help(&mut self) -> bool {
        let (Some(folder), Some(slots)) = (&self.settings.checkpoint_dir, self.kept_slots()) else { return false };
        if self.helper.is_none() {
            self.helper = Writer::helping(Checkpoints::new(Host, folder), slots.clone())
                .inspect_err(|error| warn!(%error, "this worker writes no shares of checkpoints"))
                .ok();
        }
        self.helper.is_some()
    }

    /// This rank's votes on checkpoints, which go with the next step's sum.
    pub(super) fn share_vote(&mut self) -> u32 {
        let Some(sharded) = &mut self.sharded else { return 0 };
        let writer = self.saving.as_ref().map(Saving::writer).or(self.helper.as_ref());
        sharded.take_in(writer.and_then(Writer::ended_share));
        let next = self.state.step + 1;
        let due = next.is_multiple_of(self.settings.checkpoint_every.get()) && next < self.schedule.total_steps();
        if self.group_config.rank == 0 && due && sharded.want() {
            self.save_soon = true;
        }
        sharded.vote()
    }

    /// Hears the votes of the step that was just done.
    pub(super) fn hear_share_votes(&mut self, votes: u32) -> Result<(), TrainError> {
        let Some(sharded) = &mut self.sharded else { return Ok(()) };
        match sharded.heard(votes, self.state.step) {
            Next::Nothing | Next::Begin => {}
            Next::Complete => {
                let share = sharded.share();
                self.decide(WriteMode::Complete(share));
            }
            // Without a copy there is nothing to write: the next one is due at once.
            Next::Alone if sharded.had_no_room() => self.save_soon |= sharded.want(),
            Next::Alone => {
                // The decision is about a slot that the writer has.
                self.end_background_copy()?;
                self.decide(WriteMode::Whole);
            }
        }
        Ok(())
    }

    pub(super) fn decide(&self, mode: WriteMode) {
        self.saving.iter().for_each(|saving| saving.writer().decide(mode));
    }

    fn layout(&self) -> Layout {
        Layout::new(&self.group_config.job, &self.words, &State::entries(self.model.tensors()))
    }

    fn header(&self) -> SnapshotHeader {
        let next = self.schedule.batch_after(self.state.step);
        SnapshotHeader {
            round: self.group_config.round,
            world_size: self.group_config.world_size,
            step: self.state.step,
            done: self.last,
            data: Position {
                epoch: next.epoch,
                cursor: next.first,
                samples: self.schedule.samples,
                seed: self.settings.seed,
                global_batch: self.schedule.batch,
                shards: self.settings.shards.get(),
            },
        }
    }
}
