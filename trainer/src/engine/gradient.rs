//! A rank's share of a step: the gradients of its shards, added as far as it owns the tree.

#![deny(clippy::disallowed_methods, clippy::disallowed_types)]

use std::convert::Infallible;
use std::iter;
use std::num::{NonZeroU32, NonZeroUsize};

use elastic_collective::tree::Node;

use super::TaskError;
use super::feed::{Feed, Piece};
use super::interruption::Interruption;
use super::thread_pool::ThreadPool;
use crate::data::{Order, StepSamples};
use crate::model::{Gradient, Model, Sums};
use crate::vectors::add;

/// What the gradient of a step depends on.
pub struct GradientTask<'a, M: Model> {
    /// The model.
    pub model: &'a M,
    /// Its parameters.
    pub parameters: &'a [f32],
    /// What is computed of them.
    pub work: Work,
    /// Where batches come from.
    pub feed: &'a Feed<'a, M::Batch>,
    /// The order of what is trained on.
    pub order: &'a Order,
    /// The step's samples.
    pub batch: StepSamples,
    /// What is computed after it, to be read ahead.
    pub later: Vec<(Work, StepSamples)>,
    /// Logical shards in the step.
    pub shards: u32,
    /// Samples that the model sees at once, at most; all of a shard's if there is no bound.
    pub micro_batch: Option<NonZeroUsize>,
    /// Asked before each piece.
    pub interruption: &'a Interruption<'a>,
}

/// What is summed over a step's samples.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Work {
    /// The loss, and after it the gradient.
    Gradient,
    /// The loss, and after it the model's metrics.
    Evaluation,
}

/// The threads that compute, each with buffers of its own.
pub struct GradientThreads<M: Model> {
    /// The threads.
    pub pool: ThreadPool,
    all_buffers: Vec<ThreadBuffers<M>>,
}

/// A thread's room for work, kept from step to step.
struct ThreadBuffers<M: Model> {
    batch: M::Batch,
    replica: M::Replica,
    samples: Vec<u64>,
    spare: Vec<Vec<f32>>,
}

impl<M: Model> GradientThreads<M> {
    /// So many threads, the caller's among them, for steps of so many shards: each computes at least one of them.
    pub fn new(threads: NonZeroUsize, shards: NonZeroU32, model: &M) -> Result<GradientThreads<M>, TaskError> {
        let buffers = |_| {
            let replica = model.replica().map_err(TaskError::model("make a replica"))?;
            Ok(ThreadBuffers { batch: M::Batch::default(), replica, samples: Vec::new(), spare: Vec::new() })
        };
        let most = threads.get().min(shards.get() as usize);
        let all_buffers = (0..most).map(buffers).collect::<Result<_, TaskError>>()?;
        Ok(GradientThreads { pool: ThreadPool::new(threads), all_buffers })
    }

    /// Takes a sum back for later use.
    pub fn recycle(&mut self, sum: Vec<f32>) {
        self.all_buffers[0].spare.push(sum);
    }
}

impl<M: Model> GradientTask<'_, M> {
    /// The summed loss of the shards under `node`, and after it their summed gradient. Each thread takes a part of the
    /// tree: who computes a shard does not change its bits.
    pub fn sum_under(&self, node: Node, threads: &mut GradientThreads<M>) -> Vec<f32> {
        let GradientThreads { pool, all_buffers } = threads;
        let parts = parts_of(node, pool.threads());
        let mut sums = vec![Vec::new(); parts.len()];
        let shares = parts.iter().zip(&mut *all_buffers).zip(&mut sums).collect();
        pool.each(shares, |((&part, buffers), sum)| *sum = self.sum_of(part, buffers));

        if parts.len() > 1 {
            let piece = pool.piece(self.length());
            let mut cut: Vec<_> = sums.iter_mut().map(|sum| sum.chunks_mut(piece)).collect();
            let mut next = || -> Vec<&mut [f32]> { cut.iter_mut().filter_map(Iterator::next).collect() };
            let pieces = std::iter::from_fn(|| Some(next()).filter(|sums| !sums.is_empty())).collect();
            pool.each(pieces, |mut sums| add_parts(node, &parts, &mut sums));
        }
        // Each buffer goes back to its thread. Else one thread's would pile up while another makes new ones.
        let others = sums.split_off(1);
        all_buffers[1..].iter_mut().zip(others).for_each(|(buffers, sum)| buffers.spare.push(sum));
        sums.swap_remove(0)
    }

    /// As [`sum_under`](Self::sum_under), by one thread.
    fn sum_of(&self, node: Node, buffers: &mut ThreadBuffers<M>) -> Vec<f32> {
        let take = |buffers: &mut ThreadBuffers<M>, shard: Node| Ok::<_, Infallible>(self.leaf(shard.first, buffers));
        let add = |buffers: &mut ThreadBuffers<M>, mut sum: Vec<f32>, more: Vec<f32>| {
            add(&mut sum, &more);
            buffers.spare.push(more);
            Ok(sum)
        };
        let Ok(sum) = node.sum(buffers, &|_| false, &take, &add);
        sum
    }

    /// Writes the numbers of a shard's samples, in order.
    pub(crate) fn samples_of(&self, shard: u32, samples: &mut Vec<u64>) {
        self.samples_at((self.work, self.batch), shard, samples);
    }

    fn samples_at(&self, (work, batch): (Work, StepSamples), shard: u32, samples: &mut Vec<u64>) {
        samples.clear();
        samples.extend(batch.shard(shard, self.shards).map(|place| match work {
            Work::Gradient => self.order.sample(batch.epoch, place),
            Work::Evaluation => place,
        }));
    }

    /// Begins the step on a rank that computes these nodes on so many threads: tells the feed what it needs. If the
    /// calling thread `helps`, it has time to read ahead.
    pub(crate) fn begin(&self, nodes: &[Node], threads: usize, helps: bool) {
        let of_node = |at, node| self.pieces_under(at, node, threads);
        let pieces = |at: (Work, StepSamples)| nodes.iter().flat_map(move |&node| of_node(at, node));
        let now = iter::once((self.work, self.batch)).flat_map(pieces);
        self.feed.begin(helps, now, self.later.iter().copied().flat_map(pieces));
    }

    /// What is computed under a node, in the order in which so many threads need it.
    fn pieces_under(&self, at: (Work, StepSamples), node: Node, threads: usize) -> Vec<Piece<'static>> {
        let (work, batch) = at;
        let pieces_of = |shard: u32| {
            let mut samples = Vec::new();
            self.samples_at(at, shard, &mut samples);
            let piece = |samples: &[u64]| Piece { work, batch, samples: samples.to_vec().into() };
            samples.chunks(self.largest_piece()).map(piece).collect::<Vec<_>>()
        };
        let parts = parts_of(node, threads);
        let mut parts: Vec<_> = parts.iter().map(|part| (part.first..part.end).flat_map(pieces_of)).collect();
        let turn = || Some(parts.iter_mut().filter_map(Iterator::next).collect()).filter(|t: &Vec<_>| !t.is_empty());
        iter::from_fn(turn).flatten().collect()
    }

    /// Samples that are computed at once, at most.
    pub(crate) fn largest_piece(&self) -> usize {
        self.micro_batch.map_or(usize::MAX, NonZeroUsize::get)
    }

    fn leaf(&self, shard: u32, buffers: &mut ThreadBuffers<M>) -> Vec<f32> {
        self.samples_of(shard, &mut buffers.samples);
        let samples = std::mem::take(&mut buffers.samples);
        let mut sum = self.room(buffers);
        if samples.is_empty() {
            sum.fill(0.0);
        }
        self.pieces_of(&samples, buffers, &mut sum);
        buffers.samples = samples;
        sum
    }

    /// Writes the sum of samples that are computed a piece at a time; nothing where there are none.
    fn pieces_of(&self, samples: &[u64], buffers: &mut ThreadBuffers<M>, sum: &mut [f32]) {
        for (number, samples) in samples.chunks(self.largest_piece()).enumerate() {
            if self.interruption.is_due() {
                return;
            }
            if number == 0 {
                self.piece(samples, buffers, sum, &mut |_| ());
                continue;
            }
            let mut more = self.room(buffers);
            self.piece(samples, buffers, &mut more, &mut |_| ());
            add(sum, &more);
            buffers.spare.push(more);
        }
    }

    /// Writes what is summed of samples that are computed at once. Whether it could, which it says, the
    /// [`Interruption`] knows too.
    fn piece(
        &self,
        samples: &[u64],
        buffers: &mut ThreadBuffers<M>,
        sum: &mut [f32],
        done: &mut dyn FnMut(&[f32]),
    ) -> bool {
        let ThreadBuffers { batch, replica, .. } = buffers;
        let (loss, numbers) = sum.split_at_mut(1);
        let mut compute = || -> Result<Option<f32>, TaskError> {
            let piece = self.piece_of(samples);
            let Some(left) = self.feed.take(&piece, batch, self.interruption)? else { return Ok(None) };
            if left.is_empty() {
                numbers.fill(0.0);
                return Ok(Some(0.0));
            }
            let step = self.feed.step(&piece, &left);
            let loss = match self.work {
                Work::Gradient => {
                    let gradient = &mut Gradient::new(numbers, done);
                    let computed = self.model.gradient(&step, self.parameters, batch, replica, gradient);
                    computed.map_err(TaskError::model(format!("compute the gradient of step {}", step.number())))
                }
                Work::Evaluation => {
                    let what = format!("evaluate step {}", step.number());
                    let computed = self.model.evaluate(&step, self.parameters, batch, replica);
                    let computed = computed.and_then(|Sums { loss, metrics }| {
                        if metrics.len() != numbers.len() {
                            Err(format!("it has {} metrics, and sums {}", numbers.len(), metrics.len()))?;
                        }
                        numbers.copy_from_slice(&metrics);
                        Ok(loss)
                    });
                    computed.map_err(TaskError::model(what))
                }
            };
            loss.map(Some)
        };
        let computed = compute().unwrap_or_else(|error| {
            self.interruption.fail(error);
            None
        });
        loss[0] = computed.unwrap_or_default();
        computed.is_some()
    }

    /// These samples of the step.
    pub(crate) fn piece_of<'s>(&self, samples: &'s [u64]) -> Piece<'s> {
        Piece { work: self.work, batch: self.batch, samples: samples.into() }
    }

    /// For a sum. What a model forgets to write is not a number in a process's first step, which fails.
    fn room(&self, buffers: &mut ThreadBuffers<M>) -> Vec<f32> {
        let mut room = buffers.spare.pop().unwrap_or_default();
        room.resize(self.length(), f32::NAN);
        room
    }

    /// How many numbers are summed.
    pub(crate) fn length(&self) -> usize {
        match self.work {
            Work::Gradient => self.model.parameters() + 1,
            Work::Evaluation => self.model.metrics().len() + 1,
        }
    }

    /// As [`sum_under`](Self::sum_under) of a node with these [parts](parts_of), but handed out in pieces of `size`
    /// numbers, the end of the flat slice first: each as soon as the last shard's pass has left it behind. A thread
    /// hands out its own part's, by `give`: the part, and the numbers.
    ///
    /// # Panics
    /// With other than one of `outboxes` for each part, or a `size` of 0.
    pub(crate) fn sum_from_back<'o>(
        &self,
        parts: &[Node],
        threads: &mut GradientThreads<M>,
        outboxes: &'o mut [Vec<f32>],
        size: usize,
        give: impl Fn(usize, &'o mut [f32]) + Sync,
    ) {
        assert_eq!(parts.len(), outboxes.len(), "an outbox for each part");
        let GradientThreads { pool, all_buffers } = threads;
        let shares = parts.iter().zip(all_buffers).zip(outboxes).enumerate().collect();
        pool.each(shares, |(number, ((&part, buffers), outbox))| {
            self.part_from_back(part, buffers, outbox, size, |numbers| give(number, numbers));
        });
    }

    fn part_from_back<'o>(
        &self,
        node: Node,
        buffers: &mut ThreadBuffers<M>,
        outbox: &'o mut Vec<f32>,
        size: usize,
        give: impl FnMut(&'o mut [f32]),
    ) {
        // The sums of all but the last shard's last piece. They are added to that piece, outermost first.
        let mut sums: Vec<Vec<f32>> = node.before_last().iter().map(|&node| self.sum_of(node, buffers)).collect();
        self.samples_of(node.end - 1, &mut buffers.samples);
        let samples = std::mem::take(&mut buffers.samples);
        let last = samples.chunks(self.largest_piece()).next_back().unwrap_or_default();
        let before = &samples[..samples.len() - last.len()];
        if !before.is_empty() {
            let mut sum = self.room(buffers);
            self.pieces_of(before, buffers, &mut sum);
            sums.push(sum);
        }

        if self.interruption.is_due() {
            buffers.samples = samples;
            buffers.spare.append(&mut sums);
            return;
        }
        let mut gradient = self.room(buffers);
        let adds = !sums.is_empty();
        if let Some(innermost) = sums.pop() {
            buffers.spare.push(std::mem::replace(outbox, innermost));
        }
        outbox.resize(gradient.len(), 0.0);
        let mut handed = HandOut { whole: gradient.len(), size, left: outbox, adds, sums: &sums, give };
        let whole = if last.is_empty() {
            gradient.fill(0.0);
            true
        } else {
            self.piece(last, buffers, &mut gradient, &mut |end| handed.reached(end))
        };
        if whole {
            handed.reached(&gradient);
        }
        buffers.samples = samples;
        buffers.spare.push(gradient);
        buffers.spare.append(&mut sums);
    }
}

/// Hands out a part's sum in pieces.
struct HandOut<'a, 'o, F> {
    /// Its length, and that of a piece.
    whole: usize,
    size: usize,
    /// What is not handed out yet: the front.
    left: &'o mut [f32],
    /// Whether `left` already holds a sum that the last gradient is added to.
    adds: bool,
    /// What is added to that, outermost first.
    sums: &'a [Vec<f32>],
    give: F,
}

impl<'o, F: FnMut(&'o mut [f32])> HandOut<'_, 'o, F> {
    /// The last gradient is final from here to its end.
    fn reached(&mut self, end: &[f32]) {
        let from = self.whole - end.len();
        loop {
            let start = self.left.len().saturating_sub(self.size);
            if self.left.is_empty() || start < from {
                return;
            }
            let (left, piece) = std::mem::take(&mut self.left).split_at_mut(start);
            let place = start..start + piece.len();
            let last = &end[place.start - from..place.end - from];
            match self.adds {
                true => add(piece, last),
                false => piece.copy_from_slice(last),
            }
            self.sums.iter().rev().for_each(|sum| add(piece, &sum[place.clone()]));
            self.left = left;
            (self.give)(piece);
        }
    }
}

/// The parts of the tree under `node` that so many threads take, left to right; fewer where there are fewer shards.
pub(crate) fn parts_of(node: Node, threads: usize) -> Vec<Node> {
    match node.children() {
        Some((left, right)) if threads > 1 => {
            [parts_of(left, threads / 2), parts_of(right, threads - threads / 2)].concat()
        }
        _ => vec![node],
    }
}

/// Adds the sums of the parts of `node`, in the order of the tree, into the first.
pub(crate) fn add_parts(node: Node, parts: &[Node], mut sums: &mut [&mut [f32]]) {
    let position = |part: Node| parts.iter().position(|&other| other == part);
    let take = |_: &mut &mut [&mut [f32]], part: Node| position(part).ok_or(part);
    let add = |sums: &mut &mut [&mut [f32]], left: usize, right: usize| {
        let (lower, upper) = sums.split_at_mut(right);
        add(lower[left], upper[0]);
        Ok(left)
    };
    let added = node.sum(&mut sums, &|part| position(part).is_some(), &take, &add);
    assert!(added.is_ok(), "the parts hold every shard");
}

#[cfg(test)]
mod tests {
    use elastic_collective::stop::Stop;

    use super::*;
    use crate::data::{Data, SampleError};
    use crate::model::{Rule, Tensor};
    use crate::settings::Settings;
    use crate::step::Step;

    /// Its gradient is the samples' sum and their number.
    struct Sum([Tensor; 1]);

    impl Model for Sum {
        type Batch = Vec<f32>;
        /// The largest batch.
        type Replica = usize;
        fn tensors(&self) -> &[Tensor] {
            &self.0
        }
        fn init(&self, _seed: u64) -> crate::Result<Vec<f32>> {
            Ok(vec![0.0; 2])
        }
        fn replica(&self) -> crate::Result<usize> {
            Ok(0)
        }
        fn gradient(
            &self,
            step: &Step<'_>,
            _: &[f32],
            batch: &Vec<f32>,
            largest: &mut usize,
            gradient: &mut Gradient<'_>,
        ) -> crate::Result<f32> {
            assert_eq!((step.number(), step.epoch(), step.samples().len()), (81, 2, batch.len()));
            *largest = batch.len().max(*largest);
            gradient.copy_from_slice(&[batch.iter().sum(), batch.len() as f32]);
            Ok(gradient[0] / 2.0)
        }
    }

    struct Samples;

    impl Data for Samples {
        type Batch = Vec<f32>;
        fn samples(&self) -> u64 {
            40
        }
        fn read(&self, samples: &[u64], step: &Step<'_>, batch: &mut Vec<f32>) -> Result<(), SampleError> {
            assert_eq!((step.number(), step.epoch(), step.samples()), (81, 2, samples));
            batch.clear();
            batch.extend(samples.iter().map(|&sample| sample as f32));
            Ok(())
        }
    }

    #[test]
    fn pieces_are_no_larger_than_the_micro_batch_and_none_is_left_out() {
        let model = Sum([Tensor { name: "sum".into(), shape: vec![2], range: 0..2, rule: Rule::of_shape(&[2]) }]);
        let (order, stop, shards) = (Order::new(1, 40), Stop::default(), NonZeroU32::new(3).unwrap());
        for (micro, threads, largest) in
            [(None, 1, 13), (Some(1), 1, 1), (Some(4), 3, 4), (Some(5), 2, 5), (Some(50), 1, 13)]
        {
            let mut threads = GradientThreads::new(NonZeroUsize::new(threads).unwrap(), shards, &model).unwrap();
            let task = GradientTask {
                model: &model,
                parameters: &[],
                work: Work::Gradient,
                feed: &Feed::new(&Samples, &Settings::default()),
                order: &order,
                batch: StepSamples { step: 81, epoch: 2, first: 0, end: 39 },
                later: Vec::new(),
                shards: 3,
                micro_batch: micro.and_then(NonZeroUsize::new),
                interruption: &Interruption::new(&stop, 0),
            };
            // Again: then there are buffers with something in them, and no more are made.
            let mut buffers = None;
            for _ in 0..3 {
                let sum = task.sum_under(Node::root(3), &mut threads);
                let expected: u64 = (0..39).map(|place| order.sample(2, place)).sum();
                assert_eq!(sum, [expected as f32 / 2.0, expected as f32, 39.0], "{micro:?}");
                threads.recycle(sum);
                let now: Vec<usize> = threads.all_buffers.iter().map(|buffers| buffers.spare.len()).collect();
                assert_eq!(*buffers.get_or_insert_with(|| now.clone()), now, "{micro:?}");
            }
            assert_eq!(threads.all_buffers.iter().map(|buffers| buffers.replica).max(), Some(largest), "{micro:?}");
        }
    }
}
