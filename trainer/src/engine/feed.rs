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

use std::borrow::Cow;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, Scope};
use std::time::{Duration, Instant};

use tracing::{debug, warn};

use super::TaskError;
use super::gradient::Work;
use super::interruption::Interruption;
use crate::data::{Data, SampleError, StepSamples};
use crate::settings::{Settings, Unreadable};
use crate::step::Step;

/// Batches are read ahead where reading one takes this long. To hand one over takes some microseconds.
const SLOW: Duration = Duration::from_micros(50);
/// A thread that waits for a reader looks this often whether its step is still wanted.
const LOOK: Duration = Duration::from_millis(10);
/// So many skipped samples are warned of, so that a log is not full of them.
const NAMED: u64 = 20;

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
    ahead: Ahead,
    queue: Mutex<Queue<B>>,
    /// There is something to read, or room for it.
    to_read: Condvar,
    /// Something was read.
    read: Condvar,
    pace: Pace,
    /// Samples of the present step that were left out.
    skipped: AtomicU64,
    told: AtomicU64,
}

/// When to read ahead.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ahead {
    Never,
    IfSlow,
    Always,
}

/// How long reading took in the last step.
#[derive(Default)]
struct Pace {
    nanoseconds: AtomicU64,
    reads: AtomicU64,
}

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
    /// The batch, and its samples: those that could be read.
    Read(B, Result<Vec<u64>, TaskError>),
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
    pub(crate) fn new(data: &'a dyn Data<Batch = B>, settings: &Settings) -> Feed<'a, B> {
        let ahead = match settings.readers {
            None => Ahead::IfSlow,
            Some(0) => Ahead::Never,
            Some(_) => Ahead::Always,
        };
        let slots = VecDeque::new();
        Feed {
            data,
            seed: settings.seed,
            skips: settings.unreadable == Unreadable::Skip,
            readers: settings.readers.unwrap_or(settings.threads.get()),
            ahead,
            queue: Mutex::new(Queue { closed: false, runs: false, slots, reading: 0, ready: 0, spare: Vec::new() }),
            to_read: Condvar::new(),
            read: Condvar::new(),
            pace: Pace::default(),
            skipped: AtomicU64::new(0),
            told: AtomicU64::new(0),
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
        queue.runs = match self.ahead {
            Ahead::Never => false,
            Ahead::IfSlow => self.pace.is_slow().unwrap_or(queue.runs),
            Ahead::Always => true,
        };
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
                    break Some(left);
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
            Some(left) => Cow::Owned(left?),
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
        if let Some(Slot { state: State::Read(batch, Ok(left)), .. }) = queue.slots.front()
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
        let left = self.read(&piece, &mut batch).map(Cow::into_owned);
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

    /// Reads a piece into `batch`. Returns its samples: those that could be read.
    fn read<'s>(&self, piece: &Piece<'s>, batch: &mut B) -> Result<Cow<'s, [u64]>, TaskError> {
        let begun = Instant::now();
        let mut left = piece.samples.clone();
        while !left.is_empty() {
            match self.try_to_read(piece, &left, batch) {
                Ok(()) => break,
                Err(error) if self.skips && error.is_damaged() && left.contains(&error.sample()) => {
                    if self.told.fetch_add(1, Ordering::Relaxed) < NAMED {
                        warn!("step {} skips a sample: {error}", piece.batch.step);
                    } else {
                        debug!("step {} skips a sample: {error}", piece.batch.step);
                    }
                    left.to_mut().retain(|sample| *sample != error.sample());
                }
                Err(error) => return Err(error.into()),
            }
        }
        self.pace.took(begun.elapsed());
        Ok(left)
    }

    fn try_to_read(&self, piece: &Piece<'_>, samples: &[u64], batch: &mut B) -> Result<(), SampleError> {
        let data = match piece.work {
            Work::Gradient => Some(self.data),
            Work::Evaluation => self.data.held_out(),
        };
        let Some(data) = data else { unreachable!("only what is held out is evaluated") };
        let mut read = |samples: &[u64]| {
            let read = AssertUnwindSafe(|| data.read(samples, &self.step(piece, samples), batch));
            catch_unwind(read)
        };
        read(samples).unwrap_or_else(|panic| {
            // One of several: which is known when it is read alone.
            let alone = |sample: &&u64| read(std::slice::from_ref(sample)).is_err();
            let sample = samples.iter().find(alone).or(samples.first()).copied().unwrap_or_default();
            let said = panic.downcast_ref::<String>().map(String::as_str);
            let said = said.or_else(|| panic.downcast_ref().copied()).unwrap_or("of an unknown kind");
            Err(SampleError::panicked(sample, said))
        })
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

impl Pace {
    fn took(&self, time: Duration) {
        self.nanoseconds.fetch_add(time.as_nanos() as u64, Ordering::Relaxed);
        self.reads.fetch_add(1, Ordering::Relaxed);
    }

    /// Whether reads were slow since the last call, if there were any.
    fn is_slow(&self) -> Option<bool> {
        let reads = self.reads.swap(0, Ordering::Relaxed);
        let mean = self.nanoseconds.swap(0, Ordering::Relaxed).checked_div(reads)?;
        Some(Duration::from_nanos(mean) >= SLOW)
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;
    use std::sync::mpsc::{Receiver, Sender, channel};
    use std::thread;

    use elastic_collective::stop::Stop;
    use elastic_collective::tree::Node;

    use super::*;
    use crate::data::Order;
    use crate::engine::gradient::GradientTask;
    use crate::model::{Gradient, Model, Tensor};

    /// A batch is its samples, and each read of one is written down. A read of sample 39 waits for a word.
    struct Samples {
        reads: Mutex<Vec<Vec<u64>>>,
        word: Mutex<Receiver<()>>,
    }

    impl Samples {
        fn new() -> (Samples, Sender<()>) {
            let (sender, word) = channel();
            (Samples { reads: Mutex::default(), word: word.into() }, sender)
        }

        fn reads(&self) -> usize {
            self.reads.lock().unwrap().len()
        }
    }

    impl Data for Samples {
        type Batch = Vec<u64>;

        fn samples(&self) -> u64 {
            40
        }

        fn read(&self, samples: &[u64], _: &Step<'_>, batch: &mut Vec<u64>) -> Result<(), SampleError> {
            self.reads.lock().unwrap().push(samples.to_vec());
            if samples.contains(&39) {
                let _ = self.word.lock().unwrap().recv();
            }
            samples.clone_into(batch);
            Ok(())
        }
    }

    struct Nothing;

    impl Model for Nothing {
        type Batch = Vec<u64>;
        type Replica = ();

        fn tensors(&self) -> &[Tensor] {
            &[]
        }

        fn init(&self, _seed: u64) -> crate::Result<Vec<f32>> {
            Ok(Vec::new())
        }

        fn replica(&self) -> crate::Result<()> {
            Ok(())
        }

        fn gradient(
            &self,
            _: &Step<'_>,
            _: &[f32],
            _: &Vec<u64>,
            (): &mut (),
            _: &mut Gradient<'_>,
        ) -> crate::Result<f32> {
            Ok(0.0)
        }
    }

    fn step(number: u64) -> StepSamples {
        StepSamples { step: number + 1, epoch: 0, first: 10 * number, end: 10 * number + 10 }
    }

    fn piece(samples: &[u64]) -> Piece<'static> {
        Piece { work: Work::Gradient, batch: step(0), samples: samples.to_vec().into() }
    }

    fn settings(readers: usize) -> Settings {
        Settings { readers: Some(readers), ..Settings::default() }
    }

    fn wait_until(what: &str, condition: impl Fn() -> bool) {
        let begun = Instant::now();
        while !condition() {
            assert!(begun.elapsed() < Duration::from_secs(60), "waited in vain until {what}");
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// Takes what four steps need, the last two after a change of ranks. Returns all that was taken, and how often a
    /// read began while something was taken.
    fn four_steps(feed: &Feed<'_, Vec<u64>>, data: &Samples, threads: usize, helps: bool) -> (Vec<Vec<u64>>, usize) {
        let (order, stop) = (Order::new(1, 40), Stop::default());
        // Shards 1 to 3 of four; then, after a change of ranks, the first alone.
        let nodes = [vec![Node { first: 1, end: 2 }, Node { first: 2, end: 4 }], vec![Node { first: 0, end: 1 }]];
        let (mut taken, mut late, mut batch) = (Vec::new(), 0, Vec::new());
        for (number, nodes) in [(0, &nodes[0]), (1, &nodes[0]), (2, &nodes[1]), (3, &nodes[1])] {
            let task = GradientTask {
                model: &Nothing,
                parameters: &[],
                work: Work::Gradient,
                feed,
                order: &order,
                batch: step(number),
                later: (number + 1..4).map(|number| (Work::Gradient, step(number))).collect(),
                shards: 4,
                micro_batch: NonZeroUsize::new(2),
                interruption: &Interruption::new(&stop, 0),
            };
            task.begin(nodes, threads, helps);
            for shard in nodes.iter().flat_map(|node| node.first..node.end) {
                let mut samples = Vec::new();
                task.samples_of(shard, &mut samples);
                for piece in samples.chunks(2) {
                    let before = data.reads();
                    let left = feed.take(&task.piece_of(piece), &mut batch, task.interruption).unwrap().unwrap();
                    assert_eq!((&*left, &batch[..]), (piece, piece));
                    late += data.reads() - before;
                    taken.push(piece.to_vec());
                    if helps {
                        feed.help(|next| assert!(!next.is_empty()));
                    }
                }
            }
        }
        (taken, late)
    }

    #[test]
    fn a_thread_that_helps_reads_each_batch_once_while_the_one_before_is_computed() {
        let (data, word) = Samples::new();
        drop(word);
        let (taken, late) = four_steps(&Feed::new(&data, &settings(0)), &data, 1, true);
        assert_eq!(late, 2, "the first of all, and the first after the change");
        let reads = data.reads.into_inner().unwrap();
        assert_eq!(reads.len(), taken.len() + 1, "what the change made useless was read in vain");
        assert!(taken.iter().all(|piece| reads.iter().filter(|read| *read == piece).count() == 1));
    }

    #[test]
    fn readers_read_no_more_than_is_needed_and_what_a_change_makes_useless() {
        for (readers, threads) in [(1, 1), (2, 1), (3, 2)] {
            let (data, word) = Samples::new();
            drop(word);
            let feed = Feed::new(&data, &settings(readers));
            let (taken, _) = thread::scope(|scope| {
                let _readers = feed.start(scope);
                four_steps(&feed, &data, threads, false)
            });
            let (reads, needed) = (data.reads(), taken.len());
            assert!((needed..=needed + feed.most()).contains(&reads), "{reads} reads of {needed} pieces");
        }
    }

    #[test]
    fn as_many_batches_wait_as_two_for_each_reader() {
        let (data, _word) = Samples::new();
        let feed = Feed::new(&data, &settings(2));
        thread::scope(|scope| {
            let _readers = feed.start(scope);
            feed.begin(false, (0..30).map(|sample| piece(&[sample])), std::iter::empty());
            wait_until("there is no more room", || feed.lock().ready == 4);
            assert_eq!(feed.lock().reading, 0);
            let (mut batch, stop) = (Vec::new(), Stop::default());
            let interruption = Interruption::new(&stop, 0);
            feed.take(&piece(&[0]), &mut batch, &interruption).unwrap();
            wait_until("what was taken is followed by another", || feed.lock().ready == 4);
        });
    }

    #[test]
    fn a_read_that_hangs_does_not_hold_up_a_step_that_is_given_up() {
        let (data, word) = Samples::new();
        let feed = Feed::new(&data, &settings(1));
        thread::scope(|scope| {
            let _readers = feed.start(scope);
            feed.begin(false, std::iter::once(piece(&[39])), std::iter::empty());
            wait_until("a reader is at it", || data.reads() == 1);
            let stop = Stop::default();
            stop.raise();
            let (mut batch, interruption) = (Vec::new(), Interruption::new(&stop, 0));
            assert_eq!(feed.take(&piece(&[39]), &mut batch, &interruption), Ok(None));
            // The next step does not need it: the batch that comes too late is kept for another.
            feed.begin(false, std::iter::empty(), std::iter::empty());
            drop(word);
            wait_until("its batch is spare", || feed.lock().spare.len() == 1);
        });
    }

    #[test]
    fn reading_is_slow_by_the_mean_of_a_step() {
        let pace = Pace::default();
        assert_eq!(pace.is_slow(), None);
        pace.took(SLOW * 3);
        pace.took(Duration::ZERO);
        assert_eq!((pace.is_slow(), pace.is_slow()), (Some(true), None));
        pace.took(SLOW * 3);
        (0..3).for_each(|_| pace.took(Duration::ZERO));
        assert_eq!(pace.is_slow(), Some(false));
    }
}
