//! Which workers write a round's checkpoints together, and what each of them does about it between two steps. Not for what
//! follows from votes: that is [`crate::checkpoint::shares`].
//!
//! The first workers of nodes hold the same snapshots. Those that see the same folder write a share each. Rank 0 puts a
//! file with a name that nobody can guess there, and whoever finds it shares the folder, whatever it is called on its node.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::path::PathBuf;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use elastic_collective::Group;
use tracing::{info, warn};

use super::{TrainError, Trainer};
use crate::checkpoint::Checkpoints;
use crate::checkpoint::disk::Host;
use crate::checkpoint::frames::Frames;
use crate::checkpoint::part::Part;
use crate::checkpoint::shares::{Next, Shares};
use crate::checkpoint::snapshot::Layout;
use crate::checkpoint::writer::{How, Writer};
use crate::model::Model;
use crate::saving::Saving;
use crate::state::State;

/// How long a folder may take to show whether it is shared: one that takes longer is not.
const LOOK_TIME: Duration = Duration::from_secs(2);

/// A writer's part in this round.
pub(super) struct Sharing {
    shares: Shares,
    part: Part,
    /// Its clock's beginning.
    since: Instant,
    /// The step of the checkpoint that was begun last.
    step: u64,
    /// It is to be copied now.
    begins: bool,
    /// There was no room for the copy.
    lacked: bool,
    failures: u32,
}

impl Sharing {
    /// The share of this step's checkpoint that is to be written, if one is begun just now.
    pub(super) fn begins(&mut self) -> Option<Part> {
        std::mem::take(&mut self.begins).then_some(self.part)
    }

    /// There is no room for it.
    pub(super) fn no_room(&mut self) {
        self.lacked = true;
        self.shares.wrote(false);
    }
}

/// Does something to a folder that may hang.
fn in_time<T: Send + 'static>(folder: PathBuf, act: impl FnOnce(Checkpoints<Host>) -> T + Send + 'static) -> Option<T> {
    let (told, tells) = mpsc::channel();
    let work = move || drop(told.send(act(Checkpoints::new(Host, &folder))));
    thread::Builder::new().name("folder".into()).spawn(work).ok()?;
    tells.recv_timeout(LOOK_TIME).ok()
}

impl<M: Model> Trainer<'_, M> {
    /// Ends what was agreed in the round before. On rank 0, puts something into its folder that other nodes can look for:
    /// the number that they look by, or 0 where there is nothing to share.
    pub(super) fn offer_folder(&mut self) -> u64 {
        self.sharing = None;
        self.saving.iter().for_each(|saving| saving.decide(How::Whole));
        let nodes = self.assignment.as_ref().map_or(1, |place| place.group_world_size);
        let of_two = self.place.rank == 0 && nodes > 1 && self.chunks() > 1 && self.keeps_snapshots();
        let Some(folder) = self.settings.checkpoint_dir.clone().filter(|_| of_two) else { return 0 };
        // Keys of hash maps are random.
        let nonce = RandomState::new().build_hasher().finish() | 1;
        match in_time(folder, move |mut checkpoints| checkpoints.mark_shared(nonce)) {
            Some(Ok(())) => nonce,
            _ => 0,
        }
    }

    /// Comes to know, with all ranks, which of them share rank 0's folder.
    pub(super) fn find_writers(&mut self, group: &mut Group, nonce: u64) -> Result<(), TrainError> {
        if nonce == 0 {
            return Ok(());
        }
        let rank = self.place.rank as usize;
        let own = rank == 0 || self.may_help() && self.sees(nonce);
        let all = group.gather([u64::from(own)])?;
        if rank == 0
            && let Some(folder) = self.settings.checkpoint_dir.clone()
        {
            // Whether it hangs now plays no part any more.
            let _ = in_time(folder, |mut checkpoints| checkpoints.unmark_shared());
        }
        let mut writers: Vec<usize> =
            all.iter().zip(0..).filter(|([sees], _)| *sees > 0).map(|(_, rank)| rank).collect();
        writers.truncate(self.chunks());
        let count = writers.len();
        let Some(index) = writers.iter().position(|writer| *writer == rank).filter(|_| count > 1) else {
            return Ok(());
        };
        let (shares, part, since) = (Shares::new(rank == 0), Part { nonce, index, count }, Instant::now());
        self.sharing = Some(Sharing { shares, part, since, step: 0, begins: false, lacked: false, failures: 0 });
        if rank == 0 {
            info!(round = self.place.round, "{count} nodes share the checkpoint folder: each writes its share");
        }
        Ok(())
    }

    fn chunks(&self) -> usize {
        Layout::new(&self.place.job, &self.words, &State::entries(self.model.tensors())).chunks()
    }

    fn keeps_snapshots(&self) -> bool {
        self.frames.as_ref().is_some_and(Frames::are_kept)
    }

    /// Whether there is what it takes to write shares, on another rank than 0.
    fn may_help(&mut self) -> bool {
        let frames = self.frames.as_ref().filter(|frames| frames.are_kept());
        let (Some(folder), Some(frames)) = (&self.settings.checkpoint_dir, frames) else { return false };
        if self.helper.is_none() {
            self.helper = Writer::helping(Checkpoints::new(Host, folder), frames.clone())
                .inspect_err(|error| warn!(%error, "this worker writes no shares of checkpoints"))
                .ok();
        }
        self.helper.is_some()
    }

    fn sees(&self, nonce: u64) -> bool {
        let folder = self.settings.checkpoint_dir.clone();
        folder.and_then(|folder| in_time(folder, move |checkpoints| checkpoints.is_shared(nonce))).unwrap_or(false)
    }

    /// What is to be said of checkpoints in the next step's sum.
    pub(super) fn sharing_vote(&mut self) -> u32 {
        let Some(sharing) = &mut self.sharing else { return 0 };
        let ended = match (&self.saving, &self.helper) {
            (Some(saving), _) => saving.shared(),
            (None, helper) => helper.as_ref().and_then(Writer::shared),
        };
        // One of another round may have taken as long as that.
        if let Some(ended) = ended.filter(|ended| (ended.step, ended.part) == (sharing.step, sharing.part)) {
            sharing.shares.wrote(ended.result.is_ok());
            if let Err(error) = ended.result {
                sharing.failures += 1;
                if sharing.failures.is_power_of_two() {
                    warn!(failures = sharing.failures, "{error}; rank 0 writes all of this checkpoint");
                }
            }
        }
        let next = self.state.step + 1;
        let due = next.is_multiple_of(self.settings.checkpoint_every.get()) && next < self.schedule.total_steps();
        if self.place.rank == 0 && due && sharing.shares.want() {
            self.save_soon = true;
        }
        sharing.shares.vote()
    }

    /// Hears the votes of the step that was just done.
    pub(super) fn hear_shares(&mut self, votes: u32) -> Result<(), TrainError> {
        let Some(sharing) = &mut self.sharing else { return Ok(()) };
        let decide = |saving: &Option<Saving>, how| saving.iter().for_each(|saving| saving.decide(how));
        match sharing.shares.heard(votes, sharing.since.elapsed()) {
            Next::Nothing => {}
            Next::Begin => (sharing.begins, sharing.step) = (true, self.state.step),
            Next::Complete => decide(&self.saving, How::Complete(sharing.part)),
            // Without a copy there is nothing to write: the next one is due at once.
            Next::Alone if std::mem::take(&mut sharing.lacked) => self.save_soon |= sharing.shares.want(),
            Next::Alone => {
                // What is decided is for the frame.
                self.end_copy_beside()?;
                decide(&self.saving, How::Whole);
            }
        }
        Ok(())
    }
}
