//! Batches on their way from the data to what computes them. Where reading takes long, threads of their own read them
//! ahead.
//!
//! ```text
//! readers              read step 7, piece 3 │ read step 8, piece 1 │ read step 8, piece 2 │ …
//! computing threads    step 7: piece 1      │ piece 2              │ piece 3              │ step 8: piece 1 …
//! ```
//!
//! A step's number fixes which samples it has, and what is drawn at random for them. So a batch that was read ahead
//! holds what it would hold if it was read when it is needed. A change of ranks makes some of them useless, and these
//! are dropped. A thread that needs a batch that no reader has begun reads it itself.

mod reading;

use std::borrow::Cow;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, Scope};
use std::time::Duration;

use tracing::{debug, warn};

use self::reading::Pace;
use super::TaskError;
use super::gradient::Work;
use super::interruption::Interruption;
use crate::data::{Data, StepSamples};
use crate::settings::{Settings, Unreadable};
use crate::step::Step;

/// A thread that waits for a reader looks this often whether its step is still wanted.
const LOOK: Duration = Duration::from_millis(10);

/// Samples that are computed at once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Piece<'s> {
    pub(crate) work: Work,
    pub(crate) batch: StepSamples,
    pub(crate) samples: Cow<'s, [u64]>,
}

/// Where the batches of a training come from.
pub struct Feed<'a, B> {
    data: &'a dyn Data<Batch = B>,
    seed: u64,
    skips: bool,
    readers: usize,
    /// Whether readers read; if it is not said, where reading is slow.
    ahead: Option<bool>,
    queue: Mutex<Queue<B>>,
    /// There is something to read, or room for it.
    to_read: Condvar,
    /// Something was read.
    read: Condvar,
    /// How long reading takes for each kind of [`Work`].
    pace: [Pace; 2],
    /// Samples of the present step that were left out.
    skipped: AtomicU64,
    /// Skipped samples that were logged.
    logged: AtomicU64,
}

#[derive(Default)]
struct Queue<B> {
    closed: bool,
    /// Whether the readers read.
    runs: bool,
    /// What is needed, in order.
    slots: VecDeque<Slot<B>>,
    /// Batches that are read now, and those that were read and wait.
    reading: usize,
    ready: usize,
    spare: Vec<B>,
}

struct Slot<B> {
    piece: Piece<'static>,
    state: State<B>,
}

enum State<B> {
    Waiting,
    Reading,
    /// The batch, and its samples: those that could be read; none after an error.
    Read(B, Option<Vec<u64>>),
}

/// Ends the readers, at the latest when each has read what it is at.
pub(crate) struct Readers<'f, 'a, B>(&'f Feed<'a, B>);

impl<B> Drop for Readers<'_, '_, B> {
    fn drop(&mut self) {
        self.0.lock().closed = true;
        self.0.to_read.notify_all();
    }
}

impl<'a, B: Default + Send> Feed<'a, B> {
    /// Of this data, without readers until they are [started](Self::start).
    pub fn new(data: &'a dyn Data<Batch = B>, settings: &Settings) -> Feed<'a, B> {
        Feed {
            data,
            seed: settings.seed,
            skips: settings.unreadable == Unreadable::Skip,
            readers: settings.readers.unwrap_or(settings.threads.get()),
            ahead: settings.readers.map(|count| count > 0),
            queue: Mutex::default(),
            to_read: Condvar::new(),
            read: Condvar::new(),
            pace: <[Pace; 2]>::default(),
            skipped: AtomicU64::new(0),
            logged: AtomicU64::new(0),
        }
    }

    /// Starts the readers. They end when what is returned is dropped.
    pub(crate) fn start<'f, 's>(&'f self, scope: &'s Scope<'s, '_>) -> Readers<'f, 'a, B>
    where
        'f: 's,
    {
        for number in 0..self.readers {
            let reader = Builder::new().name(format!("read-{number}")).spawn_scoped(scope, || self.serve());
            if let Err(cause) = reader {
                warn!(%cause, "{number} threads read samples instead of {}", self.readers);
                break;
            }
        }
        Readers(self)
    }

    /// What is trained on.
    pub(crate) fn data(&self) -> &'a dyn Data<Batch = B> {
        self.data
    }

    /// Batches that are read and wait, at most.
    pub(crate) fn most(&self) -> usize {
        (2 * self.readers).max(1)
    }

    /// Whether samples that cannot be read are left out.
    pub(crate) fn skips(&self) -> bool {
        self.skips
    }

    /// How many were left out since [`begin`](Self::begin).
    pub(crate) fn skipped(&self) -> u64 {
        self.skipped.load(Ordering::Relaxed)
    }

    /// A step begins, or a part of an evaluation: this is what is computed in it from `now` on, in order, and what
    /// `later`. If the thread that computes `helps`, it reads ahead too.
    pub(crate) fn begin(
        &self,
        helps: bool,
        now: impl Iterator<Item = Piece<'static>>,
        later: impl Iterator<Item = Piece<'static>>,
    ) {
        self.skipped.store(0, Ordering::Relaxed);
        let mut queue = self.lock();
        queue.runs = self.ahead.unwrap_or_else(|| self.pace.each_ref().map(Pace::is_slow).contains(&true));
        let begun = |slot: &Slot<B>| !matches!(slot.state, State::Waiting);
        let mut old: Vec<Slot<B>> = std::mem::take(&mut queue.slots).into_iter().filter(begun).collect();
        if queue.runs || helps {
            queue.slots.extend(now.chain(later.take(self.most())).map(|piece| {
                let found = old.iter().position(|slot| slot.piece == piece);
                found.map_or(Slot { piece, state: State::Waiting }, |at| old.swap_remove(at))
            }));
        }
        let useless: Vec<B> = old.into_iter().filter_map(Slot::batch).collect();
        queue.ready -= useless.len();
        queue.spare.extend(useless);
        let runs = queue.runs;
        drop(queue);
        if runs {
            self.to_read.notify_all();
        }
    }

    /// Puts a piece into `batch`. Returns its samples: those that could be read; none where the step is given up while
    /// it waits.
    pub(crate) fn take<'s>(
        &self,
        piece: &Piece<'s>,
        batch: &mut B,
        interruption: &Interruption<'_>,
    ) -> Result<Option<Cow<'s, [u64]>>, TaskError> {
        let mut queue = self.lock();
        let ready = loop {
            let Some(at) = queue.slots.iter().position(|slot| slot.piece == *piece) else { break None };
            if matches!(queue.slots[at].state, State::Reading) {
                if interruption.is_due() {
                    return Ok(None);
                }
                queue = self.read.wait_timeout(queue, LOOK).unwrap_or_else(PoisonError::into_inner).0;
                continue;
            }
            match queue.slots.remove(at).map(|slot| slot.state) {
                Some(State::Read(mut read, left)) => {
                    std::mem::swap(batch, &mut read);
                    queue.spare.push(read);
                    queue.ready -= 1;
                    // What could not be read ahead may be readable now.
                    break left;
                }
                _ => {
                    debug!("a batch of {} samples was not read before it was needed", piece.samples.len());
                    break None;
                }
            }
        };
        let runs = queue.runs;
        drop(queue);
        if runs {
            self.to_read.notify_one();
        }
        let left = match ready {
            Some(left) => Cow::Owned(left),
            None => self.read(piece, batch)?,
        };
        self.skipped.fetch_add((piece.samples.len() - left.len()) as u64, Ordering::Relaxed);
        Ok(Some(left))
    }

    /// Reads what is needed next in this thread, if no reader is at it, and shows it.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))] // Only the thread that has a GPU has time for it.
    pub(crate) fn help(&self, show: impl FnOnce(&B)) {
        let mut queue = self.lock();
        if queue.slots.front().is_some_and(|first| matches!(first.state, State::Waiting))
            && let Some((piece, batch)) = queue.take_up()
        {
            drop(queue);
            queue = self.read_ahead(piece, batch);
        }
        if let Some(Slot { state: State::Read(batch, Some(left)), .. }) = queue.slots.front()
            && !left.is_empty()
        {
            show(batch);
        }
    }

    /// The step that a piece is of, as these of its samples see it.
    pub(crate) fn step<'s>(&self, piece: &Piece<'_>, samples: &'s [u64]) -> Step<'s> {
        let StepSamples { step, epoch, .. } = piece.batch;
        match piece.work {
            Work::Gradient => Step::new(self.seed, step, epoch, samples),
            Work::Evaluation => Step::evaluation(self.seed, step, epoch, samples),
        }
    }

    /// What a reader does.
    fn serve(&self) {
        let mut queue = self.lock();
        while !queue.closed {
            let has_room = queue.runs && queue.reading + queue.ready < self.most();
            queue = match has_room.then(|| queue.take_up()).flatten() {
                Some((piece, batch)) => {
                    drop(queue);
                    self.read_ahead(piece, batch)
                }
                None => self.to_read.wait(queue).unwrap_or_else(PoisonError::into_inner),
            };
        }
    }

    fn read_ahead(&self, piece: Piece<'static>, mut batch: B) -> MutexGuard<'_, Queue<B>> {
        let left = self.read(&piece, &mut batch).map(Cow::into_owned).ok();
        let mut queue = self.lock();
        queue.reading -= 1;
        let is_wanted = |slot: &&mut Slot<B>| matches!(slot.state, State::Reading) && slot.piece == piece;
        match queue.slots.iter_mut().find(is_wanted) {
            Some(slot) => {
                slot.state = State::Read(batch, left);
                queue.ready += 1;
            }
            None => queue.spare.push(batch),
        }
        self.read.notify_all();
        queue
    }
}

impl<B> Feed<'_, B> {
    fn lock(&self) -> MutexGuard<'_, Queue<B>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<B: Default> Queue<B> {
    /// The first piece that nothing reads yet, to be read now, and a batch for it.
    fn take_up(&mut self) -> Option<(Piece<'static>, B)> {
        let slot = self.slots.iter_mut().find(|slot| matches!(slot.state, State::Waiting))?;
        slot.state = State::Reading;
        self.reading += 1;
        Some((slot.piece.clone(), self.spare.pop().unwrap_or_default()))
    }
}

impl<B> Slot<B> {
    fn batch(self) -> Option<B> {
        if let State::Read(batch, _) = self.state { Some(batch) } else { None }
    }
}

#[cfg(test)]
mod tests;
