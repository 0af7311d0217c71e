//! The first state of a run when no rank holds one: from disk, or the model's own.
//!
//! The ranks decide together. Each says which checkpoint it can reach: the one that the job has committed, or, where
//! the store names none, the newest that it finds itself. The newest of all counts, and the ranks that reach that very
//! one read a share of it each; all have the rest from one another. So nodes need not share a folder: perhaps only the
//! node of an earlier rank 0 has what that saved. A copy that turns out to be damaged is left out, and the ranks decide
//! again. Only where no rank has found any checkpoint, the run begins at step 0.
//!
//! Reading may take longer than peers are waited for: while a thread reads, the ranks tell each other that they still
//! do.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use elastic_collective::identity::{RunIdentity, listed};
use elastic_collective::{CollectiveError, Group};
use tracing::{info, warn};

use super::held::Holding;
use super::{Run, TrainError, Trainer};
use crate::checkpoint::disk::Host;
use crate::checkpoint::looking::{Found, Search};
use crate::checkpoint::manifest::Manifest;
use crate::checkpoint::{CheckpointError, Checkpoints};
use crate::engine::TaskError;
use crate::engine::state::State;
use crate::model::{Model, Tensor};
use crate::vectors::first_not_finite;

/// How often ranks tell each other that they still read: fractions of the time that peers are waited for.
const TELLS: u32 = 8;
/// And no more seldom.
const TELL_TIME: Duration = Duration::from_millis(200);

/// What a rank says of its reading.
const READS: u64 = 0;
const DONE: u64 = 1;
const FAILED: u64 = 2;

/// Bytes that have been read so far.
type BytesRead = Arc<AtomicU64>;

/// What this rank knows of checkpoints.
struct Own {
    search: Search,
    /// What is wrong with one.
    flaw: Option<CheckpointError>,
}

/// What the ranks have found together.
enum Agreed {
    /// A checkpoint of this step, which these ranks reach.
    Read { step: u64, readers: Vec<usize> },
    /// None. Whether one is there that cannot be read.
    Nothing { flawed: bool },
}

impl<M: Model> Trainer<'_, M> {
    /// No rank holds a state: all take the checkpoint's, or the first one.
    pub(super) fn begin(&mut self, group: &mut Group) -> Result<(), TrainError> {
        // What this rank may hold is of no use, but its room is.
        self.held.give()?;
        if self.held.is_cut() {
            self.held.state = State::room(self.run.model.parameters(), &self.run.optimizer);
        }
        if !self.load(group)? {
            let Run { model, init, settings, .. } = &self.run;
            let first = match init {
                Some(file) => file.parameters(model.tensors())?,
                None => model.init(settings.seed).map_err(TaskError::model("make its first parameters"))?,
            };
            let (made, parameters) = (first.len(), self.run.model.parameters());
            if made != parameters {
                let cause = format!("it makes {made} first parameters instead of {parameters}");
                return Err(TrainError::Unusable(cause));
            }
            if let Some(place) = first_not_finite(&first) {
                let tensor = Tensor::name_at(self.run.model.tensors(), place);
                return Err(TrainError::Unusable(format!("its first parameters in tensor {tensor} are not finite")));
            }
            self.held.state = State::new(first, &self.run.optimizer);
        }
        Ok(self.held.taken(Holding::Reached, None)?)
    }

    /// Takes in the checkpoint to begin with, if there is one.
    fn load(&mut self, group: &mut Group) -> Result<bool, TrainError> {
        let search = Search {
            committed: self.membership.committed().cloned(),
            folder: self.run.settings.checkpoint_dir.clone(),
            job: self.membership.agent.is_some().then(|| self.keeper.job().to_owned()),
            resume: self.run.settings.resume.clone(),
            begins: self.membership.begins(),
            bad: BTreeSet::new(),
        };
        let mut own = Own { search, flaw: None };
        loop {
            let of_thread = own.search.clone();
            let (found, _) = read(group, move |_| of_thread.look())?;
            let found = match found {
                Ok(found) => found,
                Err(error @ CheckpointError::Occupied { .. }) => return Err(error.into()),
                Err(error) => {
                    own.flaw.get_or_insert(error);
                    None
                }
            };
            match agree(group, found.as_ref(), own.flaw.is_some())? {
                Agreed::Read { step, readers } => {
                    if self.read_agreed(group, found, &mut own, (step, &readers))? {
                        return Ok(true);
                    }
                }
                Agreed::Nothing { flawed } => {
                    let cause = own.flaw.unwrap_or(CheckpointError::Elsewhere);
                    return match (own.search.committed, cause) {
                        (Some(committed), cause) => Err(TrainError::Resume { step: committed.step, cause }),
                        (None, _) if !flawed => Ok(false),
                        (None, cause @ CheckpointError::NotThere { .. }) => Err(cause.into()),
                        (None, cause) => Err(CheckpointError::NoneWhole { cause: Box::new(cause) }.into()),
                    };
                }
            }
        }
    }

    /// Reads the checkpoint that the ranks have agreed on. Returns whether all have it then.
    fn read_agreed(
        &mut self,
        group: &mut Group,
        found: Option<Found>,
        own: &mut Own,
        (step, readers): (u64, &[usize]),
    ) -> Result<bool, TrainError> {
        let place = readers.iter().position(|reader| *reader == group.rank() as usize);
        let found = found.filter(|_| place.is_some());
        if let Some(Found { manifest, .. }) = &found {
            self.check_own(manifest)?;
        }
        let (part, all) = self.read_part(group, found.as_ref(), (place.unwrap_or_default(), readers.len()))?;
        if let (Ok(part), true) = (&part, all) {
            let lengths = group.gather([part.end - part.start])?;
            let ends = lengths.iter().scan(0, |end, [length]| {
                *end += *length as usize;
                Some(*end)
            });
            let ends: Vec<usize> = ends.collect();
            group.share(&ends, bytemuck::cast_slice_mut(&mut self.held.state.flat))?;
            return self.resumed(step).map(|()| true);
        }
        // Each rank whose share was right reads all of its own copy, since two ranks may have the same file.
        let (whole, _) = self.read_part(group, found.as_ref().filter(|_| part.is_ok()), (0, 1))?;
        let read = part.and(whole);
        let holds: Vec<bool> =
            group.gather([u64::from(found.is_some() && read.is_ok())])?.iter().map(|[holds]| *holds > 0).collect();
        if let Err(error) = read {
            warn!(%error, "left out a damaged checkpoint");
            own.search.bad.extend(found.map(|found| found.path));
            own.flaw = Some(error);
        }
        if !holds.contains(&true) {
            return Ok(false);
        }
        group.spread(&holds, bytemuck::cast_slice_mut(&mut self.held.state.flat))?;
        self.resumed(step).map(|()| true)
    }

    /// Reads a share of a checkpoint into its place, if this rank has one: the bytes of it. And whether all ranks could
    /// read theirs.
    fn read_part(
        &mut self,
        group: &mut Group,
        found: Option<&Found>,
        share: (usize, usize),
    ) -> Result<(Result<Range<u64>, CheckpointError>, bool), TrainError> {
        let (mut flat, found) = (std::mem::take(&mut self.held.state.flat), found.cloned());
        let read = read(group, move |progress| {
            let Some(Found { path, manifest }) = found else { return Ok((0..0, flat)) };
            let on_read = |bytes| note(progress, bytes);
            let part = Checkpoints::new(Host, &path).load_share(&path, &manifest, share, &mut flat, on_read)?;
            Ok((part, flat))
        });
        let read = read.map(|(read, all)| {
            let part = read.map(|(part, flat)| {
                self.held.state.flat = flat;
                part
            });
            (part, all.iter().all(|word| *word == DONE))
        });
        if self.held.state.flat.is_empty() {
            // A state that comes from others needs the room.
            self.held.state = State::room(self.run.model.parameters(), &self.run.optimizer);
        }
        read
    }

    /// Fails where a checkpoint is another run's.
    fn check_own(&self, manifest: &Manifest) -> Result<(), TrainError> {
        let Manifest { step, settings, .. } = manifest;
        let step = *step;
        let differences = self.run.identity.differences(&RunIdentity::parse(settings));
        let left = self.run.settings.not_meant(&differences);
        if !left.is_empty() {
            // Of a model that is named by a checksum, the tensors say more.
            let is_other_model = left.iter().any(|one| one.name == "model");
            let tensors = if is_other_model { self.check_tensors(manifest) } else { Ok(()) };
            return tensors.and(Err(TrainError::OtherSettings { step, differences: left }));
        }
        if !differences.is_empty() {
            info!(step, "continues a checkpoint with {}, as --change says", listed(&differences));
        }
        self.check_tensors(manifest)
    }

    fn check_tensors(&self, manifest: &Manifest) -> Result<(), TrainError> {
        let Manifest { step, tensors, state_bytes, .. } = manifest;
        let own = State::entries(self.run.model.tensors(), &self.run.optimizer);
        let bytes = size_of_val(&self.held.state.flat[..]) as u64;
        if *tensors == own && *state_bytes == bytes {
            return Ok(());
        }
        let differ = tensors.iter().zip(&own).find(|(theirs, ours)| theirs != ours);
        let cause = match differ {
            Some((theirs, ours)) => {
                format!(
                    "{} of shape {:?} instead of {} of shape {:?}",
                    theirs.name, theirs.shape, ours.name, ours.shape
                )
            }
            None => format!("{} tensors of {state_bytes} bytes instead of {} of {bytes}", tensors.len(), own.len()),
        };
        Err(TrainError::OtherTensors { step: *step, cause })
    }

    /// The state of `step` is here, and the same on all ranks.
    fn resumed(&mut self, step: u64) -> Result<(), TrainError> {
        self.held.state.step = step;
        if let Some(number) = first_not_finite(&self.held.state.flat) {
            return Err(TrainError::not_finite(&self.held.state, self.run.model.tensors(), number));
        }
        info!(step, "resumed from a checkpoint");
        if let Some(saving) = self.keeper.saving() {
            saving.resumed(step);
        }
        Ok(())
    }
}

/// Has all ranks agree on the newest checkpoint that any of them has found.
fn agree(group: &mut Group, found: Option<&Found>, flawed: bool) -> Result<Agreed, CollectiveError> {
    let [step, round, checksum] = found.map_or([0; 3], |Found { manifest, .. }| {
        // A manifest's checksum holds for all that it says, its files' checksums too. One more than the step: 0 is
        // nothing.
        let checksum = u64::from_str_radix(&manifest.crc32c, 16).unwrap_or_default();
        [manifest.step + 1, manifest.round, checksum]
    });
    let all = group.gather([step, round, checksum, u64::from(flawed)])?;
    let named = |[step, round, checksum, _]: &[u64; 4]| [*step, *round, *checksum];
    let newest = all.iter().map(named).max().unwrap_or_default();
    let Some(step) = newest[0].checked_sub(1) else {
        return Ok(Agreed::Nothing { flawed: all.iter().any(|[.., flawed]| *flawed > 0) });
    };
    Ok(Agreed::Read { step, readers: (0..all.len()).filter(|rank| named(&all[*rank]) == newest).collect() })
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

#[cfg(test)]
mod tests {
    use super::*;
    use elastic_collective::stop::Stop;
    use elastic_collective::{GroupConfig, Patience};

    /// Two ranks, and rank 0 reads: what both come to.
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
