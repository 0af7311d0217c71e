//! A thread that writes checkpoints while training goes on, and all that touches their folder on the way. Not for what a
//! durable checkpoint is good for: that is [`crate::saving`]'s.
//!
//! ```text
//!    training                  two frames                       the thread
//!    offer ─── copy ──▶ idle ──────────────▶ queued ──▶ being written ──▶ idle
//!    ended ◀──────────────────────────────────────────── durable, or why not
//! ```
//!
//! A frame whose share alone is written here stays in hand until all shares are durable, or one will never be: then the
//! checkpoint is completed, or all of it written. (On other nodes than rank 0's it is idle again at once.)
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
use super::part::Part;
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

/// What becomes of a frame on its way to disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum How {
    /// All of it is written.
    Whole,
    /// This share of it is.
    Share(Part),
    /// All shares are durable: it becomes a checkpoint.
    Complete(Part),
    /// It is given up.
    Nothing,
}

/// A share that was written, or was not.
#[derive(Debug)]
pub struct Shared {
    /// Of which step.
    pub step: u64,
    /// Which one.
    pub part: Part,
    /// It is durable, or why not.
    pub result: Result<(), CheckpointError>,
}

/// What the thread and its owner share.
#[derive(Debug, Default)]
struct Desk {
    /// Whether the folder takes files, once that is known.
    prepared: Option<Result<(), CheckpointError>>,
    queued: Option<Frame>,
    /// Of which a share is to be written, or what follows from that.
    sharing: Option<(Frame, How)>,
    /// Its share is written.
    held: Option<Frame>,
    /// What is to follow once the share that is being written is.
    verdict: Option<How>,
    shared: Option<Shared>,
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
    /// What becomes of it.
    how: Option<How>,
    /// The step that waited for the disk in it.
    overtaken: Option<u64>,
}

impl Room {
    /// One that is only to be in memory.
    pub(super) fn to_keep(frame: Frame) -> Room {
        Room { frame, how: None, overtaken: None }
    }

    /// The same room, of which a share is to be written.
    pub fn to_share(self, part: Part) -> Room {
        Room { how: Some(How::Share(part)), ..self }
    }

    /// Whether a share is to be written.
    pub fn is_to_share(&self) -> bool {
        matches!(self.how, Some(How::Share(_)))
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
    share: bool,
}

#[derive(Debug, Default)]
struct Common {
    desk: Mutex<Desk>,
    changed: Condvar,
}

impl Common {
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
    common: Arc<Common>,
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
        let writer = Writer::spawn(checkpoints, Some(retention), frames)?;
        let desk = writer.common.lock();
        let waiting = |desk: &mut Desk| desk.prepared.is_none();
        let waited = writer.common.changed.wait_timeout_while(desk, patience, waiting);
        let prepared = waited.unwrap_or_else(PoisonError::into_inner).0.prepared.take();
        let silent = || Err(CheckpointError::Silent { folder: writer.folder.clone(), waited: patience });
        prepared.unwrap_or_else(silent).map(|()| writer)
    }

    /// Starts a thread that writes shares of checkpoints to a folder that rank 0 has prepared.
    pub fn helping<D: Disk + Send + 'static>(
        checkpoints: Checkpoints<D>,
        frames: Frames,
    ) -> Result<Writer, CheckpointError> {
        Writer::spawn(checkpoints, None, frames)
    }

    fn spawn<D: Disk + Send + 'static>(
        checkpoints: Checkpoints<D>,
        retention: Option<Retention>,
        frames: Frames,
    ) -> Result<Writer, CheckpointError> {
        let (folder, common) = (checkpoints.folder().to_owned(), Arc::new(Common::default()));
        let writer = Writer { common: common.clone(), frames: frames.clone(), folder };
        let work = move || run(checkpoints, retention.as_ref(), &frames, &common);
        std::thread::Builder::new().name("checkpoints".into()).spawn(work).map_err(CheckpointError::Thread)?;
        Ok(writer)
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
            return Some(Room { frame, how: write.then_some(How::Whole), overtaken: None });
        }
        // What waits for the disk is written all the same, only newer.
        let frame = self.common.lock().queued.take()?;
        let overtaken = Some(frame.step());
        Some(Room { frame, how: Some(How::Whole), overtaken })
    }

    /// Takes in a frame that was filled.
    pub fn take_in(&self, room: Room) -> Offer {
        let Room { frame, how, overtaken } = room;
        let Some(how) = how else {
            self.frames.put(frame);
            return Offer::Kept;
        };
        if how != How::Whole {
            // One that an earlier round has left to be done is superfluous.
            let older = self.common.change(|desk| desk.sharing.replace((frame, how)));
            older.into_iter().for_each(|(older, _)| self.frames.put(older));
            return Offer::Taken;
        }
        let older = self.common.change(|desk| desk.queued.replace(frame));
        let overtaken = older.as_ref().map(Frame::step).or(overtaken);
        if let Some(older) = older {
            self.frames.put(older);
        }
        overtaken.map_or(Offer::Taken, Offer::Overtook)
    }

    /// The outcome of a write that nobody has heard of yet: it is durable, or why not.
    pub fn ended(&self) -> Option<Result<Checkpoint, CheckpointError>> {
        self.common.lock().ended.pop_front()
    }

    /// The outcome of a share that nobody has heard of yet.
    pub fn shared(&self) -> Option<Shared> {
        self.common.lock().shared.take()
    }

    /// What becomes of the frame of which a share is, or is being, written: it is completed, or written whole, if nothing
    /// newer waits for that. Nothing, if there is none.
    pub fn decide(&self, how: How) {
        let superfluous = self.common.change(|desk| {
            let newer = desk.queued.is_some() && how == How::Whole || how == How::Nothing;
            match (desk.held.take(), &mut desk.sharing) {
                (Some(frame), _) if newer => return Some(frame),
                (Some(frame), _) => desk.sharing = Some((frame, how)),
                // Nobody has begun with it.
                (None, Some((frame, todo @ How::Share(_)))) => {
                    let step = frame.step();
                    if let How::Share(part) = *todo {
                        let result = Err(CheckpointError::GivenUp { step });
                        desk.shared = Some(Shared { step, part, result });
                    }
                    *todo = how;
                    return desk.sharing.take_if(|(_, todo)| *todo == How::Nothing).map(|(frame, _)| frame);
                }
                (None, _) => desk.verdict = desk.writing.filter(|writing| writing.share).map(|_| how),
            }
            None
        });
        superfluous.into_iter().for_each(|frame| self.frames.put(frame));
    }

    /// Removes what a commit has made superfluous, when there is time.
    pub fn prune(&self, committed: Checkpoint) {
        self.common.change(|desk| desk.prune = Some(committed));
    }

    /// The write that is under way, if one is.
    pub fn writing(&self) -> Option<Writing> {
        self.common.lock().writing
    }

    /// Snapshots that are being written or wait for it, or whose outcome nobody has heard of yet.
    pub fn under_way(&self) -> usize {
        let desk = self.common.lock();
        let slots = [desk.queued.is_some(), desk.sharing.is_some(), desk.held.is_some(), desk.writing.is_some()];
        slots.into_iter().filter(|taken| *taken).count() + desk.ended.len()
    }

    /// The newest step among those that wait, are being written, or are durable and nobody has heard of it yet.
    pub fn newest(&self) -> Option<u64> {
        let desk = self.common.lock();
        let durable = desk.ended.iter().flatten().map(|checkpoint| checkpoint.step);
        let sharing = desk.sharing.as_ref().map(|(frame, _)| frame);
        let frames = [desk.queued.as_ref(), sharing, desk.held.as_ref()].into_iter().flatten().map(Frame::step);
        let under_way = frames.chain(desk.writing.map(|write| write.step));
        under_way.chain(durable).max()
    }

    /// Whether there is nothing to do, and room.
    pub fn is_idle(&self) -> bool {
        self.frames.wait(Duration::ZERO) && self.common.lock().is_idle()
    }

    /// Waits until a write has ended or there is nothing to do, for at most `time`.
    pub fn wait(&self, time: Duration) {
        let deadline = Instant::now() + time;
        self.frames.wait(time);
        let time = deadline.saturating_duration_since(Instant::now());
        let waiting = |desk: &mut Desk| desk.ended.is_empty() && !desk.is_idle();
        // What has become of it is asked for afterwards, whichever it was.
        let _ = self.common.changed.wait_timeout_while(self.common.lock(), time, waiting);
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.common.change(|desk| desk.closed = true);
    }
}

impl Desk {
    fn is_idle(&self) -> bool {
        let frames = [&self.queued, &self.held].into_iter().all(Option::is_none) && self.sharing.is_none();
        frames && self.writing.is_none() && self.prune.is_none() && !self.pruning
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
        // Others wait for a share.
        let sharing = self.sharing.take();
        let (frame, how) = sharing.or_else(|| self.queued.take().map(|frame| (frame, How::Whole)))?;
        let share = matches!(how, How::Share(_));
        self.writing = Some(Writing { step: frame.step(), since: Instant::now(), share });
        Some(Task::Write(Box::new(frame), how))
    }
}

enum Task {
    Prune(Checkpoint),
    Write(Box<Frame>, How),
    End,
}

/// The thread.
fn run<D: Disk>(mut checkpoints: Checkpoints<D>, retention: Option<&Retention>, frames: &Frames, common: &Common) {
    if retention.is_some() {
        let prepared = checkpoints.prepare();
        let usable = prepared.is_ok();
        common.change(|desk| desk.prepared = Some(prepared));
        if !usable {
            return;
        }
    }
    loop {
        let task = {
            let mut desk = common.lock();
            loop {
                match desk.next() {
                    Some(task) => break task,
                    None => desk = common.changed.wait(desk).unwrap_or_else(PoisonError::into_inner),
                }
            }
        };
        match task {
            Task::End => {
                let left = common.change(|desk| {
                    let sharing = desk.sharing.take().map(|(frame, _)| frame);
                    [desk.queued.take(), desk.held.take(), sharing]
                });
                return left.into_iter().flatten().for_each(|frame| frames.put(frame));
            }
            Task::Prune(committed) => {
                if let Err(error) = checkpoints.note_commit(&committed) {
                    info!(step = committed.step, %error, "cannot leave word of the commit");
                }
                for (path, error) in retention.map_or(Vec::new(), |keep| checkpoints.prune(&committed, keep)) {
                    info!(path = %path.display(), %error, "cannot remove an old checkpoint");
                }
                common.change(|desk| desk.pruning = false);
            }
            Task::Write(frame, How::Share(part)) => {
                let (step, result) = (frame.step(), checkpoints.share(&frame, &part));
                let idle = common.change(|desk| {
                    desk.writing = None;
                    desk.shared = Some(Shared { step, part, result });
                    match desk.verdict.take() {
                        Some(How::Nothing) => return Some(*frame),
                        _ if part.index > 0 => return Some(*frame),
                        Some(how) => desk.sharing = Some((*frame, how)),
                        None => desk.held = Some(*frame),
                    }
                    None
                });
                idle.into_iter().for_each(|frame| frames.put(frame));
            }
            Task::Write(frame, how) => {
                let result = match how {
                    How::Complete(part) => checkpoints.complete(&frame, &part),
                    _ => checkpoints.save(&frame),
                };
                frames.put(*frame);
                common.change(|desk| {
                    desk.writing = None;
                    desk.ended.push_back(result);
                });
            }
        }
    }
}
