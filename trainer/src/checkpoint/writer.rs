//! A thread that writes checkpoints while training continues, and all that touches their folder on the way.
//! `train::saving` decides what happens to a durable checkpoint.
//!
//! ```text
//!    training                  two slots                       the thread
//!    reserve ─ copy ──▶ idle ──────────────▶ queued ──▶ being written ──▶ idle
//!    ended ◀──────────────────────────────────────────── durable, or why not
//! ```
//!
//! A slot that has only a share written here stays in hand until all shares are durable, or one will never be: then the
//! checkpoint is completed, or all of it written. (On other nodes than rank 0's it is idle again at once.)
//!
//! Nothing here waits for a disk but the thread. If it is still busy when the next snapshot comes, that one waits in
//! the second slot. A third snapshot overwrites the second one, which is older, and whose write has not begun. So
//! memory is bounded, the newest snapshot is always written next, and a file system that hangs costs checkpoints but no
//! step.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use elastic_proto::worker::Checkpoint;
use tracing::info;

use super::disk::Disk;
use super::retention::Retention;
use super::sharded_write::{EndedShare, Share};
use super::snapshot::Slot;
use super::snapshot_slots::SnapshotSlots;
use super::{CheckpointError, Checkpoints};

/// What happens to a slot on its way to disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WriteMode {
    /// All of it is written.
    Whole,
    /// This share of it is.
    Share(Share),
    /// All shares are durable: it becomes a checkpoint.
    Complete(Share),
    /// It is given up.
    Cancel,
}

/// What the thread and its owner share.
#[derive(Debug, Default)]
struct Queue {
    /// Whether the folder takes files, once that is known.
    prepared: Option<Result<(), CheckpointError>>,
    queued: Option<Slot>,
    /// A slot whose share is to be written, or what follows from that.
    sharing: Option<(Slot, WriteMode)>,
    /// Its share is written.
    held: Option<Slot>,
    /// What is to follow once the share that is being written is.
    verdict: Option<WriteMode>,
    ended_share: Option<EndedShare>,
    writing: Option<Writing>,
    /// What is committed, if older ones may go for it.
    prune: Option<Checkpoint>,
    pruning: bool,
    ended: VecDeque<Result<Checkpoint, CheckpointError>>,
    /// The owner is gone.
    closed: bool,
}

/// A slot on its way to being filled, and what happens to it then.
#[derive(Debug)]
pub struct ReservedSlot {
    /// The slot.
    pub slot: Slot,
    /// What happens to it.
    mode: Option<WriteMode>,
    /// The step that waited for the disk in it.
    overtaken: Option<u64>,
}

impl ReservedSlot {
    /// One that is only to be in memory.
    pub fn in_memory(slot: Slot) -> ReservedSlot {
        ReservedSlot { slot, mode: None, overtaken: None }
    }

    /// One whose share is to be written.
    pub fn for_share(slot: Slot, share: Share) -> ReservedSlot {
        ReservedSlot { slot, mode: Some(WriteMode::Share(share)), overtaken: None }
    }

    /// Whether it is to be written.
    pub fn is_to_write(&self) -> bool {
        self.mode.is_some()
    }

    /// Whether a share is to be written.
    pub fn is_to_share(&self) -> bool {
        matches!(self.mode, Some(WriteMode::Share(_)))
    }
}

/// A write under way.
#[derive(Debug, Clone, Copy)]
pub struct Writing {
    /// Of this step.
    pub step: u64,
    /// When it began.
    pub since: Instant,
    /// Whether it is a share.
    is_share: bool,
}

#[derive(Debug, Default)]
struct Shared {
    queue: Mutex<Queue>,
    changed: Condvar,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change<T>(&self, change: impl FnOnce(&mut Queue) -> T) -> T {
        let result = change(&mut self.lock());
        self.changed.notify_all();
        result
    }
}

/// The thread's owner. Dropping it ends the thread after the write that is under way, without waiting for that.
#[derive(Debug)]
pub struct Writer {
    shared: Arc<Shared>,
    slots: SnapshotSlots,
    folder: PathBuf,
}

impl Writer {
    /// Starts the thread, which prepares the folder; waits for that, for at most `patience`.
    pub fn start<D: Disk + Send + 'static>(
        checkpoints: Checkpoints<D>,
        retention: Retention,
        slots: SnapshotSlots,
        patience: Duration,
    ) -> Result<Writer, CheckpointError> {
        let writer = Writer::spawn(checkpoints, Some(retention), slots)?;
        let queue = writer.shared.lock();
        let waiting = |queue: &mut Queue| queue.prepared.is_none();
        let waited = writer.shared.changed.wait_timeout_while(queue, patience, waiting);
        let prepared = waited.unwrap_or_else(PoisonError::into_inner).0.prepared.take();
        let silent = || Err(CheckpointError::Silent { folder: writer.folder.clone(), waited: patience });
        prepared.unwrap_or_else(silent).map(|()| writer)
    }

    /// Starts a thread that writes shares of checkpoints to a folder that rank 0 has prepared.
    pub fn helping<D: Disk + Send + 'static>(
        checkpoints: Checkpoints<D>,
        slots: SnapshotSlots,
    ) -> Result<Writer, CheckpointError> {
        Writer::spawn(checkpoints, None, slots)
    }

    fn spawn<D: Disk + Send + 'static>(
        checkpoints: Checkpoints<D>,
        retention: Option<Retention>,
        slots: SnapshotSlots,
    ) -> Result<Writer, CheckpointError> {
        let (folder, shared) = (checkpoints.folder().to_owned(), Arc::new(Shared::default()));
        let writer = Writer { shared: shared.clone(), slots: slots.clone(), folder };
        let work = move || run(checkpoints, retention.as_ref(), &slots, &shared);
        std::thread::Builder::new().name("checkpoints".into()).spawn(work).map_err(CheckpointError::Thread)?;
        Ok(writer)
    }

    /// What it writes from.
    pub fn slots(&self) -> &SnapshotSlots {
        &self.slots
    }

    /// Where it writes.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// A slot to copy a snapshot to, unless the slots' memory is not there yet, or a disk hangs. The thread has nothing
    /// to do with it until it is [taken in](Self::take_in); it is written as soon as the disk has finished the one
    /// before.
    pub fn reserve(&self, write: bool) -> Option<ReservedSlot> {
        if let Some(slot) = self.slots.take() {
            return Some(ReservedSlot { slot, mode: write.then_some(WriteMode::Whole), overtaken: None });
        }
        // No slot is idle. The snapshot that waits for the disk gives way to a newer one.
        let slot = self.shared.lock().queued.take()?;
        let overtaken = Some(slot.step());
        Some(ReservedSlot { slot, mode: Some(WriteMode::Whole), overtaken })
    }

    /// The idle slot that already has the state of this step, to be written again.
    pub(crate) fn again(&self, step: u64) -> Option<ReservedSlot> {
        let slot = self.slots.take_step(step)?;
        Some(ReservedSlot { slot, mode: Some(WriteMode::Whole), overtaken: None })
    }

    /// Takes in a slot that was filled. Returns the older step that is not written because of it, if there is one.
    pub fn take_in(&self, reserved: ReservedSlot) -> Option<u64> {
        let ReservedSlot { slot, mode, overtaken } = reserved;
        let Some(mode) = mode else {
            self.slots.put(slot);
            return None;
        };
        if mode != WriteMode::Whole {
            // A share that an earlier round has left unwritten is superfluous.
            let older = self.shared.change(|queue| queue.sharing.replace((slot, mode)));
            older.into_iter().for_each(|(older, _)| self.slots.put(older));
            return None;
        }
        let older = self.shared.change(|queue| queue.queued.replace(slot));
        let overtaken = older.as_ref().map(Slot::step).or(overtaken);
        if let Some(older) = older {
            self.slots.put(older);
        }
        overtaken
    }

    /// The outcome of a write, not yet reported: it is durable, or why not.
    pub fn ended(&self) -> Option<Result<Checkpoint, CheckpointError>> {
        self.shared.lock().ended.pop_front()
    }

    /// The outcome of a share, not yet reported.
    pub fn ended_share(&self) -> Option<EndedShare> {
        self.shared.lock().ended_share.take()
    }

    /// What happens to the slot that has a share written, or being written: it is completed, or written whole, if
    /// nothing newer waits for that. Nothing, if there is none.
    pub fn decide(&self, mode: WriteMode) {
        let superfluous = self.shared.change(|queue| {
            let newer = queue.queued.is_some() && mode == WriteMode::Whole || mode == WriteMode::Cancel;
            match (queue.held.take(), &mut queue.sharing) {
                (Some(slot), _) if newer => return Some(slot),
                (Some(slot), _) => queue.sharing = Some((slot, mode)),
                // The thread has not begun with it.
                (None, Some((slot, todo @ WriteMode::Share(_)))) => {
                    let step = slot.step();
                    if let WriteMode::Share(share) = *todo {
                        let result = Err(CheckpointError::GivenUp { step });
                        queue.ended_share = Some(EndedShare { step, share, result });
                    }
                    *todo = mode;
                    return queue.sharing.take_if(|(_, todo)| *todo == WriteMode::Cancel).map(|(slot, _)| slot);
                }
                (None, _) => queue.verdict = queue.writing.filter(|writing| writing.is_share).map(|_| mode),
            }
            None
        });
        superfluous.into_iter().for_each(|slot| self.slots.put(slot));
    }

    /// Removes what a commit has made superfluous, when there is time.
    pub fn prune(&self, committed: Checkpoint) {
        self.shared.change(|queue| queue.prune = Some(committed));
    }

    /// The write that is under way, if one is.
    pub fn writing(&self) -> Option<Writing> {
        self.shared.lock().writing
    }

    /// Snapshots that are being written or wait for it, or whose outcome is not yet reported.
    pub fn under_way(&self) -> usize {
        let queue = self.shared.lock();
        queue.slots().count() + usize::from(queue.writing.is_some()) + queue.ended.len()
    }

    /// The newest step among those that wait, are being written, or are durable and not yet reported.
    pub fn newest(&self) -> Option<u64> {
        let queue = self.shared.lock();
        let durable = queue.ended.iter().flatten().map(|checkpoint| checkpoint.step);
        queue.slots().map(Slot::step).chain(queue.writing.map(|write| write.step)).chain(durable).max()
    }

    /// Whether there is nothing to do, and room.
    pub fn is_idle(&self) -> bool {
        self.slots.wait(Duration::ZERO) && self.shared.lock().is_idle()
    }

    /// Waits until a write has ended or there is nothing to do, for at most `time`.
    pub fn wait(&self, time: Duration) {
        let deadline = Instant::now() + time;
        self.slots.wait(time);
        let time = deadline.saturating_duration_since(Instant::now());
        let waiting = |queue: &mut Queue| queue.ended.is_empty() && !queue.is_idle();
        // What has become of it is asked for afterwards, whichever it was.
        let _ = self.shared.changed.wait_timeout_while(self.shared.lock(), time, waiting);
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.shared.change(|queue| queue.closed = true);
    }
}

impl Queue {
    /// Those that wait for the thread, or for a decision.
    fn slots(&self) -> impl Iterator<Item = &Slot> {
        self.queued.iter().chain(&self.held).chain(self.sharing.iter().map(|(slot, _)| slot))
    }

    fn is_idle(&self) -> bool {
        self.slots().next().is_none() && self.writing.is_none() && self.prune.is_none() && !self.pruning
    }

    /// What to do next. Old checkpoints are removed before more is written: that makes room on the disk.
    fn next(&mut self) -> Option<Action> {
        if self.closed {
            return Some(Action::End);
        }
        if let Some(committed) = self.prune.take() {
            self.pruning = true;
            return Some(Action::Prune(committed));
        }
        // Others wait for a share.
        let sharing = self.sharing.take();
        let (slot, mode) = sharing.or_else(|| self.queued.take().map(|slot| (slot, WriteMode::Whole)))?;
        let is_share = matches!(mode, WriteMode::Share(_));
        self.writing = Some(Writing { step: slot.step(), since: Instant::now(), is_share });
        Some(Action::Write(Box::new(slot), mode))
    }
}

enum Action {
    Prune(Checkpoint),
    Write(Box<Slot>, WriteMode),
    End,
}

/// The thread.
fn run<D: Disk>(
    mut checkpoints: Checkpoints<D>,
    retention: Option<&Retention>,
    slots: &SnapshotSlots,
    shared: &Shared,
) {
    if retention.is_some() {
        let prepared = checkpoints.prepare();
        let usable = prepared.is_ok();
        shared.change(|queue| queue.prepared = Some(prepared));
        if !usable {
            return;
        }
    }
    loop {
        let action = {
            let mut queue = shared.lock();
            loop {
                match queue.next() {
                    Some(action) => break action,
                    None => queue = shared.changed.wait(queue).unwrap_or_else(PoisonError::into_inner),
                }
            }
        };
        match action {
            Action::End => {
                let left = shared.change(|queue| {
                    let sharing = queue.sharing.take().map(|(slot, _)| slot);
                    [queue.queued.take(), queue.held.take(), sharing]
                });
                return left.into_iter().flatten().for_each(|slot| slots.put(slot));
            }
            Action::Prune(committed) => {
                if let Err(error) = checkpoints.note_commit(&committed) {
                    info!(step = committed.step, %error, "cannot note the commit in the checkpoint folder");
                }
                for (path, error) in retention.map_or(Vec::new(), |keep| checkpoints.prune(&committed, keep)) {
                    info!(path = %path.display(), %error, "cannot remove an old checkpoint");
                }
                shared.change(|queue| queue.pruning = false);
            }
            Action::Write(slot, WriteMode::Share(share)) => {
                let (step, result) = (slot.step(), checkpoints.share(&slot, &share));
                let idle = shared.change(|queue| {
                    queue.writing = None;
                    queue.ended_share = Some(EndedShare { step, share, result });
                    match queue.verdict.take() {
                        Some(WriteMode::Cancel) => return Some(*slot),
                        _ if share.index > 0 => return Some(*slot),
                        Some(mode) => queue.sharing = Some((*slot, mode)),
                        None => queue.held = Some(*slot),
                    }
                    None
                });
                idle.into_iter().for_each(|slot| slots.put(slot));
            }
            Action::Write(slot, mode) => {
                let result = match mode {
                    WriteMode::Complete(share) => checkpoints.complete(&slot, &share),
                    _ => checkpoints.save(&slot),
                };
                slots.put(*slot);
                shared.change(|queue| {
                    queue.writing = None;
                    queue.ended.push_back(result);
                });
            }
        }
    }
}
