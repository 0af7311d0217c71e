//! Checkpoints that the workers of several nodes write together: a share each of the one file.
//!
//! ```text
//! share   which bytes a share has, how it is written, how all of them become a checkpoint
//! votes   when all shares are durable, and what follows if one never is
//!
//! <folder>/.shared-<nonce>                                        a worker that finds rank 0's file shares the folder
//! <folder>/step-00000120-r3/rank0-of-1.safetensors.<nonce>.tmp    all write to it, each its own chunks
//! <folder>/step-00000120-r3/<nonce>.1.crc                         what share 1's writer has written, for rank 0
//! ```
//!
//! The first worker of each node holds the same snapshot. Those that see the same folder write a share each. To find
//! out which do, rank 0 puts a file there whose name no other writer can guess. A worker that finds the file shares the
//! folder, whatever the folder's path is on its node.
//!
//! The nonce is the round's: a writer that was left behind by its round, or by rank 0's patience, writes to a name, or
//! a file without one, that no other writer uses.

mod share;
mod votes;

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::path::Path;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use elastic_collective::{CollectiveError, Group};
use tracing::{info, warn};

use super::Checkpoints;
use super::disk::Host;
pub(crate) use share::{EndedShare, Share};
use votes::ShareVotes;
pub(crate) use votes::{BEGIN, Next};

/// How long a folder may take to show whether it is shared: one that takes longer is not.
const LOOK_TIME: Duration = Duration::from_secs(2);

/// Puts something into rank 0's folder that other nodes can look for: the nonce that they look by, or 0 where that
/// cannot be done.
pub(crate) fn offer(folder: &Path) -> u64 {
    // Keys of hash maps are random.
    let nonce = RandomState::new().build_hasher().finish() | 1;
    match in_time(folder, move |mut checkpoints| checkpoints.mark_shared(nonce)) {
        Some(Ok(())) => nonce,
        _ => 0,
    }
}

/// Whether this is rank 0's folder.
pub(crate) fn sees(folder: &Path, nonce: u64) -> bool {
    in_time(folder, move |checkpoints| checkpoints.is_shared(nonce)).unwrap_or(false)
}

/// Does something to a folder that may hang.
fn in_time<T: Send + 'static>(folder: &Path, act: impl FnOnce(Checkpoints<Host>) -> T + Send + 'static) -> Option<T> {
    let (told, tells) = mpsc::channel();
    let checkpoints = Checkpoints::new(Host, folder);
    let work = move || drop(told.send(act(checkpoints)));
    thread::Builder::new().name("folder".into()).spawn(work).ok()?;
    tells.recv_timeout(LOOK_TIME).ok()
}

/// One worker's part in the checkpoints that are written together in a round.
pub(crate) struct ShardedWrite {
    votes: ShareVotes,
    share: Share,
    /// When this worker's part began; votes are timed from there.
    since: Instant,
    /// The step of the checkpoint that was begun last.
    step: u64,
    /// Whether that step's state is to be copied now.
    begins: bool,
    /// Whether there was no room for the copy.
    lacked: bool,
    failures: u32,
}

impl ShardedWrite {
    /// Comes to know, with all ranks, which of them write a share: those that see rank 0's `folder`, at most so many.
    /// None where this rank is not among them, or alone.
    pub(crate) fn agree(
        group: &mut Group,
        nonce: u64,
        sees: bool,
        folder: Option<&Path>,
        most: usize,
    ) -> Result<Option<ShardedWrite>, CollectiveError> {
        let rank = group.rank() as usize;
        let all = group.gather([u64::from(sees)])?;
        if let Some(folder) = folder.filter(|_| rank == 0) {
            // If the folder hangs now, that does not matter any more.
            let _ = in_time(folder, |mut checkpoints| checkpoints.unmark_shared());
        }
        let mut writers: Vec<usize> =
            all.iter().zip(0..).filter(|([sees], _)| *sees > 0).map(|(_, rank)| rank).collect();
        writers.truncate(most);
        let count = writers.len();
        let Some(index) = writers.iter().position(|writer| *writer == rank).filter(|_| count > 1) else {
            return Ok(None);
        };
        if rank == 0 {
            info!(round = group.round(), "{count} nodes share the checkpoint folder: each writes its share");
        }
        let (votes, share, since) = (ShareVotes::new(rank == 0), Share { nonce, index, count }, Instant::now());
        Ok(Some(ShardedWrite { votes, share, since, step: 0, begins: false, lacked: false, failures: 0 }))
    }

    /// This worker's share.
    pub(crate) fn share(&self) -> Share {
        self.share
    }

    /// The share of this step's checkpoint that is to be written, if one is begun just now.
    pub(crate) fn begins(&mut self) -> Option<Share> {
        std::mem::take(&mut self.begins).then_some(self.share)
    }

    /// There is no room for it.
    pub(crate) fn no_room(&mut self) {
        self.lacked = true;
        self.votes.wrote(false);
    }

    /// Whether there was none for the checkpoint that was begun last. Asked once.
    pub(crate) fn had_no_room(&mut self) -> bool {
        std::mem::take(&mut self.lacked)
    }

    /// Rank 0: a checkpoint is due. Whether it must write that one alone; else one begins as soon as it can.
    pub(crate) fn want(&mut self) -> bool {
        self.votes.want()
    }

    /// Takes in what has become of the share.
    pub(crate) fn take_in(&mut self, ended: Option<EndedShare>) {
        // A slow write may be of an earlier round.
        let Some(ended) = ended.filter(|ended| (ended.step, ended.share) == (self.step, self.share)) else { return };
        self.votes.wrote(ended.result.is_ok());
        if let Err(error) = ended.result {
            self.failures += 1;
            if self.failures.is_power_of_two() {
                warn!(failures = self.failures, "{error}; rank 0 writes all of this checkpoint");
            }
        }
    }

    /// This rank's votes on checkpoints, which go with the next step's sum.
    pub(crate) fn vote(&self) -> u32 {
        self.votes.vote()
    }

    /// Hears the votes of `step`, which was just done.
    pub(crate) fn heard(&mut self, votes: u32, step: u64) -> Next {
        let next = self.votes.heard(votes, self.since.elapsed());
        if next == Next::Begin {
            (self.begins, self.step) = (true, step);
        }
        next
    }
}
