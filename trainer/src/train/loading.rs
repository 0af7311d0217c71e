//! The first state of a run when no rank holds one: from disk, or the model's own.
//!
//! Every rank that reaches the committed checkpoint reads its share of it, and all have the rest from one another.
//! Reading may take longer than peers are waited for: while a thread reads, the ranks tell each other that they still
//! do.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use elastic_collective::Group;
use elastic_proto::worker::Checkpoint;
use tracing::{debug, info};

use super::held::Holding;
use super::{TrainError, Trainer};
use crate::checkpoint::disk::Host;
use crate::checkpoint::manifest::Manifest;
use crate::checkpoint::{CheckpointError, Checkpoints, Loaded};
use crate::engine::state::State;
use crate::model::Model;

/// How often ranks tell each other that they still read: fractions of the time that peers are waited for.
const TELLS: u32 = 8;
/// And no more seldom.
const TELL_TIME: Duration = Duration::from_millis(200);

/// What a rank says of its reading.
const READS: u64 = 0;
const DONE: u64 = 1;
const FAILED: u64 = 2;

/// What this rank has found on disk.
enum Found {
    /// What the job has committed, not read yet.
    Committed(PathBuf, Box<Manifest>),
    /// The newest in the folder, read.
    Newest(Box<Loaded>),
}

/// Bytes that have been read so far.
type BytesRead = Arc<AtomicU64>;

impl<M: Model> Trainer<'_, M> {
    /// No rank holds a state: all take the checkpoint's, or the first one.
    pub(super) fn begin(&mut self, group: &mut Group) -> Result<(), TrainError> {
        let first = self.run.model.init(self.run.settings.seed);
        let (made, parameters) = (first.len(), self.run.model.parameters());
        if made != parameters {
            return Err(TrainError::Unusable(format!("it makes {made} first parameters instead of {parameters}")));
        }
        self.held.state = State::new(first);
        if !self.membership.begins_afresh() {
            self.load(group)?;
        }
        Ok(self.held.taken(Holding::Reached, None)?)
    }

    /// Takes in the checkpoint to begin with, if there is one. With an agent only the committed one will do; without,
    /// rank 0's newest whole one.
    fn load(&mut self, group: &mut Group) -> Result<(), TrainError> {
        let committed = self.membership.committed().cloned();
        let folder = self.run.settings.checkpoint_dir.clone().filter(|_| self.membership.leads());
        let wanted = committed.clone();
        let (found, all) = read(group, move |progress| find(wanted.as_ref(), folder.as_deref(), progress))?;
        let failed = |step| move |cause| TrainError::Resume { step, cause };
        let found = match (found, &committed) {
            (Ok(found), _) => found,
            // Somebody else reaches it.
            (Err(error), Some(_)) if all.contains(&DONE) => {
                debug!(%error, "the other ranks read this one's part of the checkpoint");
                None
            }
            (Err(cause), Some(committed)) => return Err(failed(committed.step)(cause)),
            (Err(cause), None) => return Err(cause.into()),
        };
        let rank = group.rank() as usize;
        let readers: Vec<usize> = (0..all.len()).filter(|&rank| all[rank] == DONE).collect();
        let share = readers.iter().position(|&reader| reader == rank).map(|index| (index, readers.len()));
        let mut step = 0;
        let mut part = 0..0;
        if let Some(found) = found {
            let manifest = match &found {
                Found::Committed(_, manifest) => manifest,
                Found::Newest(loaded) => &loaded.manifest,
            };
            step = manifest.step;
            let theirs = &manifest.settings;
            if *theirs != self.run.words || manifest.state_bytes != size_of_val(&self.held.state.flat[..]) as u64 {
                return Err(TrainError::OtherSettings { step, theirs: theirs.clone(), ours: self.run.words.clone() });
            }
            match (found, share) {
                (Found::Newest(loaded), _) => {
                    (part, self.held.state.flat) = (0..loaded.manifest.state_bytes, loaded.state)
                }
                (Found::Committed(path, manifest), Some(share)) => {
                    let mut flat = std::mem::take(&mut self.held.state.flat);
                    let read = read(group, move |progress| {
                        let checkpoints = Checkpoints::new(Host, &path);
                        let on_read = |bytes| note(progress, bytes);
                        let part = checkpoints.load_share(&path, &manifest, share, &mut flat, on_read)?;
                        Ok((part, flat))
                    });
                    let read = read.and_then(|(read, _)| read.map_err(failed(step)));
                    (part, self.held.state.flat) = read.inspect_err(|_| {
                        // A state that comes in another round needs the room.
                        self.held.state = State::room(self.run.model.parameters());
                    })?;
                }
                (Found::Committed(..), None) => {}
            }
        } else if committed.is_some() {
            // The others tell each other that they read, and every rank must take part in that.
            read(group, |_| Ok(()))?.0.map_err(failed(0))?;
        }
        self.take_shares(group, step, part.start as usize..part.end as usize)
    }

    /// All have each other's parts of the state of `step`, if that is one.
    fn take_shares(&mut self, group: &mut Group, step: u64, part: Range<usize>) -> Result<(), TrainError> {
        let all = group.gather([step, part.len() as u64])?;
        let step = all.iter().map(|[step, _]| *step).max().unwrap_or_default();
        if step == 0 {
            return Ok(());
        }
        let ends = all.iter().scan(0, |end, [_, length]| {
            *end += *length as usize;
            Some(*end)
        });
        let ends: Vec<usize> = ends.collect();
        group.share(&ends, bytemuck::cast_slice_mut(&mut self.held.state.flat))?;
        self.held.state.step = step;
        if !self.held.state.is_finite() {
            return Err(TrainError::NotFinite { step });
        }
        info!(step, readers = all.iter().filter(|[_, length]| *length > 0).count(), "resumed from a checkpoint");
        if let Some(saving) = self.keeper.saving() {
            saving.resumed(step);
        }
        Ok(())
    }
}

/// Reads in a thread, until all ranks have done so. What it came to, and what each rank's did. A rank that reads
/// nothing for as long as peers are waited for has failed.
fn read<T: Send + 'static>(
    group: &mut Group,
    work: impl FnOnce(&BytesRead) -> Result<T, CheckpointError> + Send + 'static,
) -> Result<(Result<T, CheckpointError>, Vec<u64>), TrainError> {
    let (told, tells) = channel();
    let progress = BytesRead::default();
    let of_thread = progress.clone();
    let thread = thread::Builder::new().name("loading".into());
    // The receiver may be gone.
    let spawned = thread.spawn(move || drop(told.send(work(&of_thread))));
    spawned.map_err(CheckpointError::Thread)?;
    let patience = group.patience().operation;
    let pause = (patience / TELLS).min(TELL_TIME);
    let (mut result, mut last) = (None, (0, Instant::now()));
    loop {
        if result.is_none() {
            result = hear(&tells, pause);
            let read = progress.load(Ordering::Relaxed);
            if read != last.0 {
                last = (read, Instant::now());
            }
            group.watch()?;
            if result.is_none() && last.1.elapsed() >= patience {
                result = Some(Err(CheckpointError::Unread { waited: patience }));
            }
        }
        let own = match &result {
            None => READS,
            Some(Ok(_)) => DONE,
            Some(Err(_)) => FAILED,
        };
        let all: Vec<u64> = group.gather([own])?.into_iter().map(|[word]| word).collect();
        if !all.contains(&READS)
            && let Some(result) = result.take()
        {
            return Ok((result, all));
        }
    }
}

fn note(progress: &BytesRead, bytes: u64) {
    progress.fetch_add(bytes, Ordering::Relaxed);
}

/// The answer, if it comes in time.
fn hear<T>(tells: &Receiver<Result<T, CheckpointError>>, time: Duration) -> Option<Result<T, CheckpointError>> {
    match tells.recv_timeout(time) {
        Ok(result) => Some(result),
        Err(RecvTimeoutError::Timeout) => None,
        // It has panicked, and said why.
        Err(RecvTimeoutError::Disconnected) => Some(Err(CheckpointError::Unread { waited: time })),
    }
}

/// Looks for what this rank is to read. None where it is nothing.
fn find(
    committed: Option<&Checkpoint>,
    folder: Option<&Path>,
    progress: &BytesRead,
) -> Result<Option<Found>, CheckpointError> {
    let Some(committed) = committed else {
        let newest =
            folder.and_then(|folder| Checkpoints::new(Host, folder).newest_noting(&|bytes| note(progress, bytes)));
        return Ok(newest.map(|loaded| Found::Newest(Box::new(loaded))));
    };
    let path = PathBuf::from(&committed.path);
    let manifest = Checkpoints::new(Host, &path).about(&path, Some(&committed.digest))?;
    Ok(Some(Found::Committed(path, Box::new(manifest))))
}

#[cfg(test)]
mod tests {
    use super::*;
    use elastic_collective::stop::Stop;
    use elastic_collective::{GroupConfig, Patience};

    /// Two ranks, of which rank 0 reads: what both come to.
    fn by_two(
        reads: impl Fn(&BytesRead) -> Result<u8, CheckpointError> + Copy + Send + 'static,
    ) -> Vec<(bool, Vec<u64>)> {
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let rank = move |rank| {
            let (job, settings, master_addr) = (String::new(), String::new(), "127.0.0.1".to_owned());
            let (round, world_size, master_port, agent_store) = (1, 2, port, false);
            let config = GroupConfig { job, round, rank, world_size, master_addr, master_port, agent_store, settings };
            let patience = Patience { form: Duration::from_secs(20), operation: PATIENCE };
            let mut group = Group::form(&config, patience, Stop::default()).unwrap();
            let work = move |progress: &BytesRead| if rank == 0 { reads(progress) } else { Ok(0) };
            let (read, all) = read(&mut group, work).unwrap();
            group.leave();
            (read.is_ok(), all)
        };
        let threads: Vec<_> = (0..2).map(|number| thread::spawn(move || rank(number))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    }

    const PATIENCE: Duration = Duration::from_millis(600);

    #[test]
    fn reading_may_take_longer_than_peers_are_waited_for() {
        // A disk that gives a byte now and then
        let slow = |progress: &BytesRead| {
            for _ in 0..20 {
                thread::sleep(PATIENCE / 8);
                note(progress, 1);
            }
            Ok(0)
        };
        assert_eq!(by_two(slow), [(true, vec![DONE, DONE]), (true, vec![DONE, DONE])]);
    }

    #[test]
    fn a_disk_that_gives_nothing_is_given_up() {
        let hangs = |_: &BytesRead| {
            thread::sleep(100 * PATIENCE);
            Ok(0)
        };
        assert_eq!(by_two(hangs), [(false, vec![FAILED, DONE]), (true, vec![FAILED, DONE])]);
    }
}
