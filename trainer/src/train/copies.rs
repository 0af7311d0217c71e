//! Copies of the state: to the agent's memory, which outlives this worker, and from there to disk. Not for when a
//! checkpoint counts: that is [`crate::saving`]'s.
//!
//! A copy is made while the next step's gradient is computed: the state stands still until the optimizer changes it,
//! which waits for what is not copied yet. From a GPU the numbers come to memory of their own meanwhile, and that is all
//! the optimizer waits for; from there they are copied beside as many steps as it takes.
//!
//! One worker of each node keeps snapshots in its agent's memory, the first: all hold the same state, and nodes fail as
//! a whole. Rank 0 is one of them, and writes every so many to disk.

use std::io;
use std::panic;
use std::path::{self, Path};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use elastic_collective::stop::Stop;
use elastic_proto::worker::Checkpoint;
use tracing::{info, warn};

use super::sharing::Sharing;
use super::{TrainError, Trainer};
use crate::checkpoint::disk::Host;
use crate::checkpoint::frames::{Frames, Rescued};
use crate::checkpoint::manifest::{Entry, Position};
use crate::checkpoint::part::Part;
use crate::checkpoint::snapshot::{Done, Layout, Snapshot};
use crate::checkpoint::writer::Room;
use crate::checkpoint::{CheckpointError, Checkpoints, Owner};
use crate::engine::{EngineError, HostCopy};
use crate::model::Model;
use crate::saving::Saving;
use crate::state::State;

/// A copy of the loop's own numbers, on its way.
pub(super) struct Copying {
    room: Room,
    about: About,
}

/// A copy of numbers that stay as they are, on its way beside steps.
pub(super) struct CopyingBeside {
    thread: JoinHandle<Result<Room, EngineError>>,
}

impl CopyingBeside {
    fn start(mut room: Room, about: About, numbers: HostCopy) -> io::Result<CopyingBeside> {
        let work = move || {
            // Where they do not come, what is in the frame stays.
            room.frame.fill(&about.of(numbers.numbers()?));
            Ok(room)
        };
        Ok(CopyingBeside { thread: thread::Builder::new().name("snapshot".into()).spawn(work)? })
    }

    fn end(self) -> Result<Room, EngineError> {
        self.thread.join().unwrap_or_else(|panicked| panic::resume_unwind(panicked))
    }
}

/// What a snapshot says of a state.
struct About {
    job: String,
    round: u64,
    world_size: u32,
    step: u64,
    done: Option<Done>,
    settings: String,
    data: Position,
    tensors: Vec<Entry>,
}

impl About {
    fn of<'a>(&'a self, state: &'a [f32]) -> Snapshot<'a> {
        let About { job, round, world_size, step, done, settings, data, tensors } = self;
        let (round, world_size, step, done, data) = (*round, *world_size, *step, *done, *data);
        Snapshot { job, round, world_size, step, done, settings, data, tensors, state }
    }
}

/// Does `work`, which does not change the state, and makes the copy meanwhile.
pub(super) fn during<T>(copying: Option<&mut Copying>, state: &[f32], work: impl FnOnce() -> T) -> T {
    match copying {
        Some(Copying { room, about }) => room.frame.fill_during(&about.of(state), work),
        None => work(),
    }
}

impl<M: Model> Trainer<'_, M> {
    /// Asks the agent for memory that outlives this worker, and takes up what one that was here before has left there.
    /// Without it, all goes on as well, but for what a death of all workers costs. On a node that keeps no snapshots in
    /// this round, it is only looked for what is left.
    pub(super) fn find_memory(&mut self) -> Result<(), TrainError> {
        let node = self.assignment.as_ref().map_or(0, |place| place.group_rank);
        let keeps = self.settings.checkpoint_replicas.is_none_or(|nodes| node < nodes.get());
        let begins = keeps && !self.asked_for_memory;
        let looks = !keeps && !self.looked_for_memory && !self.held;
        self.gives_back |= !keeps && (looks || self.asked_for_memory);
        let asks = self.local_rank == 0 && self.settings.snapshot_every > 0 && (begins || looks);
        let folder = self.settings.checkpoint_dir.as_ref().and_then(|folder| path::absolute(folder).ok());
        let folder = folder.as_deref().and_then(Path::to_str).filter(|_| !self.rescue.is_empty());
        let Some(agent) = self.agent.as_mut().filter(|_| asks) else { return Ok(()) };
        self.looked_for_memory = true;
        self.asked_for_memory |= keeps;
        let layout = Layout::new(&self.place.job, &self.words, &State::entries(self.model.tensors()));
        let rescue = folder.map_or(Vec::new(), |folder| {
            self.rescue.iter().cloned().chain(["--dir".to_owned(), folder.to_owned()]).collect()
        });
        let file = agent.memory(layout.bytes(), rescue, self.stop)?;
        let found = file.and_then(|file| {
            let found = if keeps {
                Frames::kept(&layout, file).map(|(frames, rescued)| (Some(frames), rescued))
            } else {
                Frames::look(&layout, file).map(|rescued| (None, rescued))
            };
            found.map_err(|error| error.to_string())
        });
        match found {
            Ok((frames, rescued)) => {
                self.frames = frames.or(self.frames.take());
                if let Some(Rescued { step, state, done }) = rescued.filter(|_| !self.held) {
                    info!(step, "found a snapshot in the agent's memory");
                    self.state = State { step, flat: state };
                    self.engine.take(&self.state)?;
                    (self.held, self.last, self.rescued) = (true, done, true);
                }
            }
            Err(cause) if keeps => warn!(
                "the agent keeps no snapshots: {cause}; training goes on, but where all workers die at once it resumes \
                 from a checkpoint"
            ),
            Err(_) => {}
        }
        Ok(())
    }

    /// Gives memory back to the agent that this round's snapshots are not kept in, once the ranks have agreed on a state.
    pub(super) fn give_memory_back(&mut self) -> Result<(), TrainError> {
        if !std::mem::take(&mut self.gives_back) || self.local_rank > 0 {
            return Ok(());
        }
        self.frames = self.frames.take().filter(|frames| !frames.are_kept());
        (self.asked_for_memory, self.helper) = (false, None);
        self.agent.as_mut().map_or(Ok(()), |agent| Ok(agent.forget()?))
    }

    /// Begins to save, on the rank that does: after `committed` steps.
    pub(super) fn begin_saving(&mut self, committed: u64) -> Result<(), TrainError> {
        let Some(folder) = self.settings.checkpoint_dir.as_ref().filter(|_| self.saving.is_none()) else {
            return Ok(());
        };
        let frames = match &self.frames {
            Some(frames) => frames.clone(),
            None => {
                let layout = Layout::new(&self.place.job, &self.words, &State::entries(self.model.tensors()));
                self.frames.insert(Frames::own(&layout).map_err(CheckpointError::Memory)?).clone()
            }
        };
        let owner = Owner { job: self.place.job.clone(), beside_others: self.agent.is_none() };
        let checkpoints = Checkpoints::new(Host, folder).owned_by(owner);
        self.saving = Some(Saving::start(checkpoints, self.settings.retention(), frames, committed)?);
        Ok(())
    }

    /// Ends saving, on a rank that has no part in it any more.
    pub(super) fn end_saving(&mut self) {
        self.saving = None;
        self.frames = self.frames.take().filter(Frames::are_kept);
    }

    /// Where a copy of the present state is due, and there is a frame for it, the beginning of one: what is to be made
    /// [`during`] the next gradient, unless it is made beside steps. What is to be on disk is on rank 0 alone; a disk that
    /// fails is warned of, no error.
    pub(super) fn begin_copy(&mut self) -> Result<Option<Copying>, TrainError> {
        if self.beside.as_ref().is_some_and(|beside| beside.thread.is_finished()) {
            self.end_copy_beside()?;
        }
        let (step, every) = (self.state.step, self.settings.snapshot_every);
        if let Some(part) = self.sharing.as_mut().and_then(Sharing::begins) {
            return self.begin_share(part);
        }
        let due = self.sharing.is_none() && step.is_multiple_of(self.settings.checkpoint_every.get());
        let write = self.save_soon || due;
        // While there is no place for what is to be on disk it stays due, and is not copied in vain at each step.
        let waits = write && self.saving.as_ref().is_some_and(|saving| !saving.has_room());
        let due = due || write && !waits || self.copy_soon || every > 0 && step.is_multiple_of(every);
        if step == 0 || step == self.copied || !due {
            return Ok(None);
        }
        // Two at once would leave none that is whole to whoever comes after a kill.
        if self.beside.is_some() {
            (self.copy_soon, self.save_soon) = (true, write);
            return Ok(None);
        }
        self.copy_soon = false;
        let frames = self.frames.as_ref().filter(|frames| frames.are_kept());
        let room = match &mut self.saving {
            Some(saving) => saving.room(step, write),
            None => frames.and_then(Frames::room),
        };
        let Some(room) = room else {
            self.save_soon |= write && self.saving.is_some();
            return Ok(None);
        };
        self.save_soon = waits;
        self.copy_to(room)
    }

    /// The beginning of a copy of the present state.
    fn copy_to(&mut self, room: Room) -> Result<Option<Copying>, TrainError> {
        let numbers = self.engine.snapshot(&mut self.state)?;
        self.copied = self.state.step;
        let about = self.about();
        let Some(numbers) = numbers else { return Ok(Some(Copying { room, about })) };
        self.beside = Some(CopyingBeside::start(room, about, numbers).map_err(CheckpointError::Thread)?);
        Ok(None)
    }

    /// The beginning of a copy of the present state, of which this worker writes a share.
    fn begin_share(&mut self, part: Part) -> Result<Option<Copying>, TrainError> {
        let step = self.state.step;
        let room = match &mut self.saving {
            _ if self.beside.is_some() => None,
            Some(saving) => saving.room_to_share(step, part),
            None => self.frames.as_ref().and_then(Frames::room).map(|room| room.to_share(part)),
        };
        let Some(room) = room else {
            self.sharing.iter_mut().for_each(Sharing::no_room);
            return Ok(None);
        };
        self.copy_to(room)
    }

    /// Takes in a copy that was made during a gradient.
    pub(super) fn end_copy(&mut self, copying: Option<Copying>) {
        if let Some(Copying { room, .. }) = copying {
            self.take_in(room);
        }
    }

    /// Waits for a copy that is made beside steps, if one is, and takes it in.
    pub(super) fn end_copy_beside(&mut self) -> Result<(), TrainError> {
        let Some(beside) = self.beside.take() else { return Ok(()) };
        let room = beside.end()?;
        self.take_in(room);
        Ok(())
    }

    fn take_in(&mut self, room: Room) {
        match (&mut self.saving, &self.helper, &self.frames) {
            (Some(saving), ..) => saving.take_in(room),
            (None, Some(helper), _) if room.is_to_share() => drop(helper.take_in(room)),
            (None, _, Some(frames)) => frames.put(room.frame),
            (None, _, None) => {}
        }
    }

    /// Waits until the present state is committed.
    pub(super) fn save_last(&mut self, time: Duration, stop: &Stop) -> Result<(), String> {
        self.engine.give(&mut self.state).map_err(|error| error.to_string())?;
        let about = self.about();
        let Some(saving) = &mut self.saving else { return Ok(()) };
        let mut committed = Vec::new();
        let on_commit = |checkpoint: &Checkpoint| committed.push(checkpoint.clone());
        let result = saving.finish(&about.of(&self.state.flat), self.agent.as_mut(), time, stop, on_commit);
        committed.iter().for_each(|checkpoint| self.record_commit(checkpoint));
        result
    }

    fn about(&self) -> About {
        let next = self.schedule.batch_after(self.state.step);
        About {
            job: self.place.job.clone(),
            round: self.place.round,
            world_size: self.place.world_size,
            step: self.state.step,
            done: self.last,
            settings: self.words.clone(),
            data: Position {
                epoch: next.epoch,
                cursor: next.first,
                samples: self.schedule.samples,
                seed: self.settings.seed,
                global_batch: self.schedule.batch,
                shards: self.settings.shards.get(),
            },
            tensors: State::entries(self.model.tensors()),
        }
    }
}
