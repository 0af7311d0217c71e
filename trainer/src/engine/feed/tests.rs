//! What is read ahead, and when.

use std::num::NonZeroUsize;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::Instant;

use elastic_collective::stop::Stop;
use elastic_collective::tree::Node;

use super::*;
use crate::data::{Order, SampleError};
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

    fn gradient(&self, _: &Step<'_>, _: &[f32], _: &Vec<u64>, (): &mut (), _: &mut Gradient<'_>) -> crate::Result<f32> {
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
