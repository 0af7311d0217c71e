//! A thread that writes checkpoints while training goes on, and all that touches their folder on the way. Not for what a
//! durable checkpoint is good for: that is [`crate::saving`]'s.
//!
//! ```text
//!    training                  two frames                       the thread
//!    offer ─── copy ──▶ idle ──────────────▶ queued ──▶ being written ──▶ idle
//!    ended ◀──────────────────────────────────────────── durable, or why not
//! ```
//!
//! Nothing here waits for a disk but the thread. If it is still busy when the next snapshot is offered, that one waits in
//! the second frame; a third takes the place of the second, which is older and nobody has begun with. So memory is
//! bounded, what is written next is always the newest, and a file system that hangs costs checkpoints but no step.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use elastic_proto::worker::Checkpoint;
use tracing::info;

use super::disk::Disk;
use super::frames::Frames;
use super::retention::Retention;
use super::snapshot::{Frame, Snapshot};
use super::{CheckpointError, Checkpoints};

/// What has become of an offer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Offer {
    /// It will be written.
    Taken,
    /// It will be written in place of this older step, which will not.
    Overtook(u64),
    /// It is in memory, and will not be written.
    Kept,
    /// There is no room: the frames' memory is not there yet, or a disk hangs.
    NoRoom,
}

/// What the thread and its owner share.
#[derive(Debug, Default)]
struct Desk {
    /// Whether the folder takes files, once that is known.
    prepared: Option<Result<(), CheckpointError>>,
    queued: Option<Frame>,
    writing: Option<Writing>,
    /// What is committed, if older ones may go for it.
    prune: Option<Checkpoint>,
    pruning: bool,
    ended: VecDeque<Result<Checkpoint, CheckpointError>>,
    /// Nobody offers any more.
    closed: bool,
}

/// A frame on its way to being filled, and what becomes of it then.
#[derive(Debug)]
pub struct Room {
    /// The frame.
    pub frame: Frame,
    /// Whether it will be written.
    write: bool,
    /// The step that waited for the disk in it.
    overtaken: Option<u64>,
}

impl Room {
    /// One that is only to be in memory.
    pub(super) fn to_keep(frame: Frame) -> Room {
        Room { frame, write: false, overtaken: None }
    }
}

/// A write under way.
#[derive(Debug, Clone, Copy)]
pub struct Writing {
    /// Of this step.
    pub step: u64,
    /// When it began.
    pub since: Instant,
}

#[derive(Debug, Default)]
struct Shared {
    desk: Mutex<Desk>,
    changed: Condvar,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Desk> {
        self.desk.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change<T>(&self, change: impl FnOnce(&mut Desk) -> T) -> T {
        let result = change(&mut self.lock());
        self.changed.notify_all();
        result
    }
}

/// The thread's owner. Dropping it ends the thread after the write that is under way, without waiting for that.
#[derive(Debug)]
pub struct Writer {
    shared: Arc<Shared>,
    frames: Frames,
    folder: PathBuf,
}

impl Writer {
    /// Starts the thread, which prepares the folder; waits for that, for at most `patience`.
    pub fn start<D: Disk + Send + 'static>(
        checkpoints: Checkpoints<D>,
        retention: Retention,
        frames: Frames,
        patience: Duration,
    ) -> Result<Writer, CheckpointError> {
        let (folder, shared) = (checkpoints.folder().to_owned(), Arc::new(Shared::default()));
        let writer = Writer { shared: shared.clone(), frames: frames.clone(), folder };
        let work = move || run(checkpoints, &retention, &frames, &shared);
        std::thread::Builder::new().name("checkpoints".into()).spawn(work).map_err(CheckpointError::Thread)?;
        let desk = writer.shared.lock();
        let waiting = |desk: &mut Desk| desk.prepared.is_none();
        let waited = writer.shared.changed.wait_timeout_while(desk, patience, waiting);
        let prepared = waited.unwrap_or_else(PoisonError::into_inner).0.prepared.take();
        let silent = || Err(CheckpointError::Silent { folder: writer.folder.clone(), waited: patience });
        prepared.unwrap_or_else(silent).map(|()| writer)
    }

    /// What it writes from.
    pub fn frames(&self) -> &Frames {
        &self.frames
    }

    /// Where it writes.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Copies a snapshot, to be written as soon as the disk is done with the one before.
    pub fn offer(&self, snapshot: &Snapshot<'_>) -> Offer {
        let Some(mut room) = self.room(true) else { return Offer::NoRoom };
        room.frame.fill(snapshot);
        self.take_in(room)
    }

    /// A frame to copy a snapshot to. The thread has nothing to do with it until it is [taken in](Self::take_in).
    pub fn room(&self, write: bool) -> Option<Room> {
        if let Some(frame) = self.frames.take() {
            return Some(Room { frame, write, overtaken: None });
        }
        // What waits for the disk is written all the same, only newer.
        let frame = self.shared.lock().queued.take()?;
        let overtaken = Some(frame.step());
        Some(Room { frame, write: true, overtaken })
    }

    /// Takes in a frame that was filled.
    pub fn take_in(&self, room: Room) -> Offer {
        let Room { frame, write, overtaken } = room;
        if !write {
            self.frames.put(frame);
            return Offer::Kept;
        }
        let older = self.shared.change(|desk| desk.queued.replace(frame));
        let overtaken = older.as_ref().map(Frame::step).or(overtaken);
        if let Some(older) = older {
            self.frames.put(older);
        }
        overtaken.map_or(Offer::Taken, Offer::Overtook)
    }

    /// The outcome of a write that nobody has heard of yet: it is durable, or why not.
    pub fn ended(&self) -> Option<Result<Checkpoint, CheckpointError>> {
        self.shared.lock().ended.pop_front()
    }

    /// Removes what a commit has made superfluous, when there is time.
    pub fn prune(&self, committed: Checkpoint) {
        self.shared.change(|desk| desk.prune = Some(committed));
    }

    /// The write that is under way, if one is.
    pub fn writing(&self) -> Option<Writing> {
        self.shared.lock().writing
    }

    /// Snapshots that are being written or wait for it, or whose outcome nobody has heard of yet.
    pub fn under_way(&self) -> usize {
        let desk = self.shared.lock();
        usize::from(desk.queued.is_some()) + usize::from(desk.writing.is_some()) + desk.ended.len()
    }

    /// The newest step among those that wait, are being written, or are durable and nobody has heard of it yet.
    pub fn newest(&self) -> Option<u64> {
        let desk = self.shared.lock();
        let durable = desk.ended.iter().flatten().map(|checkpoint| checkpoint.step);
        let under_way = desk.queued.as_ref().map(Frame::step).into_iter().chain(desk.writing.map(|write| write.step));
        under_way.chain(durable).max()
    }

    /// Whether there is nothing to do, and room.
    pub fn is_idle(&self) -> bool {
        self.frames.wait(Duration::ZERO) && self.shared.lock().is_idle()
    }

    /// Waits until a write has ended or there is nothing to do, for at most `time`.
    pub fn wait(&self, time: Duration) {
        let deadline = Instant::now() + time;
        self.frames.wait(time);
        let time = deadline.saturating_duration_since(Instant::now());
        let waiting = |desk: &mut Desk| desk.ended.is_empty() && !desk.is_idle();
        // What has become of it is asked for afterwards, whichever it was.
        let _ = self.shared.changed.wait_timeout_while(self.shared.lock(), time, waiting);
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.shared.change(|desk| desk.closed = true);
    }
}

impl Desk {
    fn is_idle(&self) -> bool {
        self.queued.is_none() && self.writing.is_none() && self.prune.is_none() && !self.pruning
    }

    /// What to do next. Room is made before more is written.
    fn next(&mut self) -> Option<Task> {
        if self.closed {
            return Some(Task::End);
        }
        if let Some(committed) = self.prune.take() {
            self.pruning = true;
            return Some(Task::Prune(committed));
        }
        let frame = self.queued.take()?;
        self.writing = Some(Writing { step: frame.step(), since: Instant::now() });
        Some(Task::Write(frame))
    }
}

enum Task {
    Prune(Checkpoint),
    Write(Frame),
    End,
}

/// The thread.
fn run<D: Disk>(mut checkpoints: Checkpoints<D>, retention: &Retention, frames: &Frames, shared: &Shared) {
    let prepared = checkpoints.prepare();
    let usable = prepared.is_ok();
    shared.change(|desk| desk.prepared = Some(prepared));
    if !usable {
        return;
    }
    loop {
        let task = {
            let mut desk = shared.lock();
            loop {
                match desk.next() {
                    Some(task) => break task,
                    None => desk = shared.changed.wait(desk).unwrap_or_else(PoisonError::into_inner),
                }
            }
        };
        match task {
            Task::End => return,
            Task::Prune(committed) => {
                if let Err(error) = checkpoints.note_commit(&committed) {
                    info!(step = committed.step, %error, "cannot leave word of the commit");
                }
                for (path, error) in checkpoints.prune(&committed, retention) {
                    info!(path = %path.display(), %error, "cannot remove an old checkpoint");
                }
                shared.change(|desk| desk.pruning = false);
            }
            Task::Write(frame) => {
                let result = checkpoints.save(&frame);
                frames.put(frame);
                shared.change(|desk| {
                    desk.writing = None;
                    desk.ended.push_back(result);
                });
            }
        }
    }
}
