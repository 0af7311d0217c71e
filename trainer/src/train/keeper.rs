//! Keeps copies of the state: in the agent's memory, which outlives this worker, and on disk. When a checkpoint counts
//! is decided in [`crate::train::saving`].
//!
//! On CPUs a copy is made while the next step's gradient is computed. The state does not change until the optimizer
//! runs, and the optimizer waits for the copy. From a GPU the numbers first go to memory of their own, and the
//! optimizer waits only for that; they are copied from there beside as many steps as it takes. Where the state is cut,
//! all ranks stop until the optimizer's numbers have crossed the network.
//!
//! The first worker of each node keeps snapshots in its agent's memory. One is enough, since all workers hold or get
//! the same state, and nodes fail as a whole. Rank 0 is such a worker, and writes every so many snapshots to disk.

use std::io;
use std::panic;
use std::path::{self, Path};
use std::thread::{self, JoinHandle};

use elastic_collective::{Group, GroupConfig};
use tracing::{info, warn};

use super::agent_memory::AgentMemory;
use super::held::{Held, Holding};
use super::membership::Membership;
use super::saving::Saving;
use super::{Run, TrainError};
use crate::agent::Agent;
use crate::checkpoint::disk::Host;
use crate::checkpoint::folder_lock::FolderLock;
use crate::checkpoint::sharded_write::{self, Next, ShardedWrite, Share};
use crate::checkpoint::snapshot::{Layout, SnapshotHeader};
use crate::checkpoint::snapshot_slots::{Rescued, SnapshotSlots};
use crate::checkpoint::writer::{ReservedSlot, WriteMode, Writer};
use crate::checkpoint::{CheckpointError, Checkpoints, SavingJob};
use crate::engine::{EngineError, HostCopy};
use crate::model::Model;
use crate::settings::{Environment, Settings};

/// What keeps a worker's state.
pub(super) struct Keeper {
    layout: Layout,
    /// The job that saves, as its folder knows it.
    job: String,
    /// `LOCAL_RANK`.
    local_rank: u32,
    /// Whether no store keeps two jobs of this name apart.
    unnamed: bool,
    /// On rank 0, where nothing else keeps two runs out of one folder.
    lock: Option<FolderLock>,
    /// The beginning of a command line that saves what is in the agent's memory; `--dir` follows.
    rescue: Vec<String>,
    /// Room for copies of the state, in the agent's memory once it was asked for that; else, on rank 0, in its own.
    slots: Option<SnapshotSlots>,
    agent_memory: AgentMemory,
    disk: Disk,
    /// Its part in checkpoints that several nodes write in this round.
    sharded: Option<ShardedWrite>,
    /// The last step whose state was copied.
    copied: u64,
    /// A copy is due at once: the last one was under way when it was due.
    copy_soon: bool,
    /// The next copy goes to disk, whichever step it is of.
    save_soon: bool,
    /// A copy that is made beside steps. It ends with the round.
    background_copy: Option<BackgroundCopy>,
}

/// What a worker writes to disk.
enum Disk {
    Nothing,
    /// Shares of checkpoints.
    Shares(Writer),
    /// Checkpoints, on rank 0.
    Checkpoints(Saving),
}

/// A copy of the loop's own numbers, on its way.
pub(super) struct Copying {
    reserved: ReservedSlot,
    header: SnapshotHeader,
    /// The numbers are there already: they came from several ranks.
    is_assembled: bool,
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
        Some(Copying { reserved, header, is_assembled: true }) => reserved.slot.seal_during(header, work),
        Some(Copying { reserved, header, .. }) => reserved.slot.fill_during(header, state, work),
        None => work(),
    }
}

impl Keeper {
    pub(super) fn new(layout: Layout, job: String, environment: &Environment, rescue: Vec<String>) -> Keeper {
        Keeper {
            layout,
            job,
            local_rank: environment.local_rank,
            unnamed: environment.unnamed,
            lock: None,
            rescue,
            slots: None,
            agent_memory: AgentMemory::Unasked,
            disk: Disk::Nothing,
            sharded: None,
            copied: 0,
            copy_soon: false,
            save_soon: false,
            background_copy: None,
        }
    }

    /// The job that saves, as its folder knows it.
    pub(super) fn job(&self) -> &str {
        &self.job
    }

    /// What saves checkpoints, on rank 0.
    pub(super) fn saving(&mut self) -> Option<&mut Saving> {
        if let Disk::Checkpoints(saving) = &mut self.disk { Some(saving) } else { None }
    }

    /// Has the next copy go to disk, whichever step it is of.
    pub(super) fn save_soon(&mut self) {
        self.save_soon = true;
    }

    /// Asks the agent for memory that outlives this worker, and takes up what an earlier worker has left there.
    /// Training also continues without that memory, but then resumes from a checkpoint when all workers die. On a node
    /// that keeps no snapshots in this round, it only looks for what is left.
    pub(super) fn find_memory<M: Model>(
        &mut self,
        settings: &Settings,
        membership: &mut Membership<'_>,
        held: &mut Held<'_, M>,
    ) -> Result<(), TrainError> {
        let may_ask = self.local_rank == 0 && settings.snapshot_every > 0;
        let keeps = settings.checkpoint_replicas.is_none_or(|nodes| membership.node() < nodes.get());
        let Some(agent) = membership.agent.as_mut().filter(|_| may_ask) else { return Ok(()) };
        let asks;
        (self.agent_memory, asks) = self.agent_memory.in_round(keeps, held.holds());
        if !asks {
            return Ok(());
        }
        let folder = settings.checkpoint_dir.as_ref().and_then(|folder| path::absolute(folder).ok());
        let folder = folder.as_deref().and_then(Path::to_str).filter(|_| !self.rescue.is_empty());
        let rescue = folder.map_or(Vec::new(), |folder| {
            self.rescue.iter().cloned().chain(["--dir".to_owned(), folder.to_owned()]).collect()
        });
        let file = agent.memory(self.layout.bytes(), rescue, membership.stop)?;
        let found = file.and_then(|file| {
            let found = if keeps {
                SnapshotSlots::kept(&self.layout, file).map(|(slots, rescued)| (Some(slots), rescued))
            } else {
                SnapshotSlots::look(&self.layout, file).map(|rescued| (None, rescued))
            };
            found.map_err(|error| error.to_string())
        });
        match found {
            Ok((slots, rescued)) => {
                self.slots = slots.or(self.slots.take());
                if let Some(Rescued { step, state, done }) = rescued.filter(|_| !held.holds()) {
                    info!(step, "found a snapshot in the agent's memory");
                    held.state = held.state.whole(step, state);
                    held.taken(Holding::Rescued, done)?;
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
    pub(super) fn give_memory_back(&mut self, agent: &mut Option<Agent>) -> Result<(), TrainError> {
        if !self.agent_memory.is_to_return() {
            return Ok(());
        }
        self.slots = self.slots.take().filter(|slots| !slots.are_kept());
        self.agent_memory = AgentMemory::Returned;
        if let Disk::Shares(_) = self.disk {
            self.disk = Disk::Nothing;
        }
        agent.as_mut().map_or(Ok(()), |agent| Ok(agent.forget()?))
    }

    /// Gives the agent's memory back, whatever is in it.
    pub(super) fn leave_memory(&mut self, agent: &mut Option<Agent>) -> Result<(), TrainError> {
        (self.agent_memory, _) = self.agent_memory.in_round(false, true);
        self.give_memory_back(agent)
    }

    /// Begins to save, on the rank that does: after `committed` steps.
    pub(super) fn begin_saving(
        &mut self,
        settings: &Settings,
        membership: &Membership<'_>,
        committed: u64,
    ) -> Result<(), TrainError> {
        let Some(folder) = settings.checkpoint_dir.as_ref().filter(|_| self.saving().is_none()) else {
            return Ok(());
        };
        let slots = match &self.slots {
            Some(slots) => slots.clone(),
            None => self.slots.insert(SnapshotSlots::own(&self.layout).map_err(CheckpointError::Memory)?).clone(),
        };
        let alone = membership.agent.is_none();
        let owner = SavingJob { job: self.job.clone(), beside_others: alone };
        let checkpoints = Checkpoints::new(Host, folder).owned_by(owner);
        let saving = Saving::start(checkpoints, settings.retention(), slots, committed)?;
        if (alone || self.unnamed) && self.lock.is_none() {
            self.lock = Some(FolderLock::take(folder)?);
        }
        self.disk = Disk::Checkpoints(saving);
        Ok(())
    }

    /// Ends saving, on a rank that has no part in it any more.
    pub(super) fn end_saving(&mut self) {
        if self.saving().is_some() {
            self.disk = Disk::Nothing;
        }
        self.slots = self.slots.take().filter(SnapshotSlots::are_kept);
    }

    /// Begins a copy of the present state where one is due and there is a slot for it. Returns what is to be made
    /// [`during`] the next gradient; none where the copy is made beside steps. Only rank 0 writes to disk; a disk that
    /// fails is warned of, and is no error.
    pub(super) fn begin_copy<M: Model>(
        &mut self,
        run: &Run<'_, M>,
        config: &GroupConfig,
        held: &mut Held<'_, M>,
        group: &mut Group,
    ) -> Result<Option<Copying>, TrainError> {
        let is_cut = held.is_cut();
        if is_cut && !held.sharding.as_ref().is_some_and(|sharding| sharding.assembles) {
            return Ok(None);
        }
        if self.background_copy.as_ref().is_some_and(|beside| beside.thread.is_finished()) {
            self.end_background_copy()?;
        }
        let step = held.state.step;
        let reserved = match self.sharded.as_mut().and_then(ShardedWrite::begins) {
            Some(share) => self.reserve_for_share(step, share),
            None => self.reserve(step, run.settings),
        };
        if is_cut {
            return self.assemble(run, config, held, group, reserved);
        }
        let Some(reserved) = reserved else { return Ok(None) };
        let numbers = held.engine.snapshot(&mut held.state)?;
        self.copied = step;
        let header = held.header(run, config);
        let Some(numbers) = numbers else { return Ok(Some(Copying { reserved, header, is_assembled: false })) };
        self.background_copy = Some(BackgroundCopy::start(reserved, header, numbers).map_err(CheckpointError::Thread)?);
        Ok(None)
    }

    /// Whether this rank is to copy the state of this step.
    pub(super) fn will_copy(&self, settings: &Settings, step: u64) -> bool {
        let every = settings.snapshot_every;
        let keeps = every > 0 && step.is_multiple_of(every) && self.kept_slots().is_some();
        let due = self.save_soon || self.sharded.is_none() && step.is_multiple_of(settings.checkpoint_every.get());
        keeps || due && matches!(self.disk, Disk::Checkpoints(_))
    }

    /// Puts the state together in the slots that ranks have reserved, this one or others.
    pub(super) fn assemble<M: Model>(
        &mut self,
        run: &Run<'_, M>,
        config: &GroupConfig,
        held: &Held<'_, M>,
        group: &mut Group,
        mut reserved: Option<ReservedSlot>,
    ) -> Result<Option<Copying>, TrainError> {
        let into = reserved.as_mut().map(|reserved| reserved.slot.open());
        if let Err(error) = held.assemble(group, into) {
            self.save_soon |= reserved.as_ref().is_some_and(ReservedSlot::is_to_write);
            self.slots.iter().zip(reserved).for_each(|(slots, reserved)| slots.put(reserved.slot));
            return Err(error);
        }
        let header = held.header(run, config);
        self.copied = if reserved.is_some() { header.step } else { self.copied };
        Ok(reserved.map(|reserved| Copying { reserved, header, is_assembled: true }))
    }

    /// A slot for a copy of this step's state, where one is due and there is room.
    fn reserve(&mut self, step: u64, settings: &Settings) -> Option<ReservedSlot> {
        let due = self.sharded.is_none() && step.is_multiple_of(settings.checkpoint_every.get());
        // The step that a round begins after may be on disk already.
        let is_new = self.saving().is_none_or(|saving| step > saving.newest());
        let write = (self.save_soon || due) && is_new;
        // While saving has no room the checkpoint stays due, and no copy is made in vain at each step.
        let waits = write && self.saving().is_some_and(|saving| !saving.has_room());
        let every = settings.snapshot_every;
        let due = due || write && !waits || self.copy_soon || every > 0 && step.is_multiple_of(every);
        if step == 0 || step == self.copied || !due {
            return None;
        }
        // Two copies at once would leave no whole snapshot after a kill.
        if self.background_copy.is_some() {
            (self.copy_soon, self.save_soon) = (true, write);
            return None;
        }
        self.copy_soon = false;
        let Some(saving) = self.saving() else {
            let slot = self.kept_slots().and_then(SnapshotSlots::take)?;
            self.save_soon = waits;
            return Some(ReservedSlot::in_memory(slot));
        };
        let reserved = saving.reserve(step, write);
        self.save_soon = if reserved.is_some() { waits } else { self.save_soon || write };
        reserved
    }

    /// A slot for a copy of this step's state, to write this worker's share of it.
    fn reserve_for_share(&mut self, step: u64, share: Share) -> Option<ReservedSlot> {
        let reserved = match &mut self.disk {
            _ if self.background_copy.is_some() => None,
            Disk::Checkpoints(saving) => saving.reserve_for_share(step, share),
            _ => self.slots.as_ref().and_then(SnapshotSlots::take).map(|slot| ReservedSlot::for_share(slot, share)),
        };
        if reserved.is_none() {
            self.sharded.iter_mut().for_each(ShardedWrite::no_room);
        }
        reserved
    }

    /// Takes in a copy that was made during a gradient. An error where the state in it is not finite.
    pub(super) fn end_copy(&mut self, copying: Option<Copying>) -> Result<(), TrainError> {
        copying.map_or(Ok(()), |Copying { reserved, .. }| self.take_in(reserved))
    }

    /// Waits for a copy that is made beside steps, if one is, and takes it in.
    pub(super) fn end_background_copy(&mut self) -> Result<(), TrainError> {
        let Some(beside) = self.background_copy.take() else { return Ok(()) };
        let reserved = beside.end()?;
        self.take_in(reserved)
    }

    fn take_in(&mut self, reserved: ReservedSlot) -> Result<(), TrainError> {
        let (step, flaw) = (reserved.slot.step(), reserved.slot.flaw());
        if let (Some(number), Some(slots)) = (flaw, &self.slots) {
            slots.put(reserved.slot);
            return Err(TrainError::NotFinite { step, tensor: self.layout.name_at(number) });
        }
        match (&mut self.disk, &self.slots) {
            (Disk::Checkpoints(saving), _) => saving.take_in(reserved),
            (Disk::Shares(helper), _) if reserved.is_to_share() => {
                helper.take_in(reserved);
            }
            (_, Some(slots)) => slots.put(reserved.slot),
            (_, None) => {}
        }
        Ok(())
    }

    /// Ends what was agreed in the round before. Where this rank `leads` several nodes, offers its folder to the other
    /// nodes: the number that they look by, or 0 where there is nothing to share.
    pub(super) fn offer_folder(&mut self, folder: Option<&Path>, leads: bool) -> u64 {
        self.sharded = None;
        self.decide(WriteMode::Whole);
        let offers = leads && self.layout.chunks() > 1 && self.kept_slots().is_some();
        folder.filter(|_| offers).map_or(0, sharded_write::offer)
    }

    /// Finds out, together with all ranks, which of them share rank 0's folder.
    pub(super) fn find_writers(
        &mut self,
        group: &mut Group,
        folder: Option<&Path>,
        nonce: u64,
    ) -> Result<(), TrainError> {
        if nonce == 0 {
            return Ok(());
        }
        let sees = |folder: &Path| self.may_help(folder) && sharded_write::sees(folder, nonce);
        let own = group.rank() == 0 || folder.is_some_and(sees);
        self.sharded = ShardedWrite::agree(group, nonce, own, folder, self.layout.chunks())?;
        Ok(())
    }

    /// The slots in the agent's memory.
    fn kept_slots(&self) -> Option<&SnapshotSlots> {
        self.slots.as_ref().filter(|slots| slots.are_kept())
    }

    /// Whether there is what it takes to write shares, on another rank than 0.
    fn may_help(&mut self, folder: &Path) -> bool {
        let Some(slots) = self.kept_slots().cloned() else { return false };
        if let Disk::Nothing = self.disk {
            match Writer::helping(Checkpoints::new(Host, folder), slots) {
                Ok(writer) => self.disk = Disk::Shares(writer),
                Err(error) => warn!(%error, "this worker writes no shares of checkpoints"),
            }
        }
        matches!(self.disk, Disk::Shares(_))
    }

    /// This rank's votes on checkpoints, which go with the next step's sum, after `step` steps.
    pub(super) fn share_vote<M: Model>(&mut self, run: &Run<'_, M>, leads: bool, step: u64) -> u32 {
        let Some(sharded) = &mut self.sharded else { return 0 };
        sharded.take_in(match &self.disk {
            Disk::Nothing => None,
            Disk::Shares(writer) => writer.ended_share(),
            Disk::Checkpoints(saving) => saving.writer().ended_share(),
        });
        let next = step + 1;
        let due = next.is_multiple_of(run.settings.checkpoint_every.get()) && next < run.schedule.total_steps();
        if leads && due && sharded.want() {
            self.save_soon = true;
        }
        sharded.vote()
    }

    /// Hears the votes of `step`, which was just done.
    pub(super) fn hear_share_votes(&mut self, votes: u32, step: u64) -> Result<(), TrainError> {
        let Some(sharded) = &mut self.sharded else { return Ok(()) };
        match sharded.heard(votes, step) {
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

    /// Decides on what is written in shares, on rank 0.
    pub(super) fn decide(&mut self, mode: WriteMode) {
        self.saving().into_iter().for_each(|saving| saving.writer().decide(mode));
    }
}
