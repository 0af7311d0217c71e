//! A rank's share of a step: the gradients of its shards, added as far as it owns the tree. Not for its peers' shares.

#![deny(clippy::disallowed_methods, clippy::disallowed_types)]

use std::num::NonZeroUsize;

use crate::collective::tree::Node;
use crate::data::{Batch, Data, Order};
use crate::model::Model;

/// What the gradient of a step depends on.
pub struct Task<'a, M: Model> {
    /// The model.
    pub model: &'a M,
    /// Its parameters.
    pub parameters: &'a [f32],
    /// The samples.
    pub data: &'a dyn Data<Batch = M::Batch>,
    /// Their order.
    pub order: &'a Order,
    /// The step's samples.
    pub batch: Batch,
    /// Logical shards in the step.
    pub shards: u32,
    /// Samples that the model sees at once, at most; all of a shard's if there is no bound.
    pub micro_batch: Option<NonZeroUsize>,
}

/// A thread's room for work, kept from step to step.
#[derive(Debug, Default)]
pub struct Desk<B> {
    batch: B,
    samples: Vec<u64>,
    spare: Vec<Vec<f32>>,
}

impl<B> Desk<B> {
    /// Takes a buffer back for later use.
    pub fn recycle(&mut self, buffer: Vec<f32>) {
        self.spare.push(buffer);
    }
}

impl<M: Model> Task<'_, M> {
    /// The summed gradient of the shards under `node`, and the summed loss in one more element at the end. Halves of
    /// the tree go to halves of the desks, each on its thread: who computes a shard does not change its bits.
    ///
    /// # Panics
    /// Without a desk.
    pub fn sum_under(&self, node: Node, desks: &mut [Desk<M::Batch>]) -> Vec<f32> {
        let Some((left, right)) = node.children() else { return self.leaf(node.first, &mut desks[0]) };
        let (mut sum, more) = if desks.len() > 1 {
            let (here, there) = desks.split_at_mut(desks.len() / 2);
            std::thread::scope(|scope| {
                let other = scope.spawn(|| self.sum_under(right, there));
                let sum = self.sum_under(left, here);
                (sum, other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            })
        } else {
            (self.sum_under(left, desks), self.sum_under(right, desks))
        };
        sum.iter_mut().zip(&more).for_each(|(sum, more)| *sum += more);
        // Whence it came: else one desk's buffers would pile up while another makes new ones.
        desks[desks.len() / 2].recycle(more);
        sum
    }

    /// Writes the numbers of a shard's samples, in order.
    pub(crate) fn samples_of(&self, shard: u32, samples: &mut Vec<u64>) {
        samples.clear();
        let places = self.batch.shard(shard, self.shards);
        samples.extend(places.map(|place| self.order.sample(self.batch.epoch, place)));
    }

    /// Samples that are computed at once, at most.
    pub(crate) fn largest_piece(&self) -> usize {
        self.micro_batch.map_or(usize::MAX, NonZeroUsize::get)
    }

    fn leaf(&self, shard: u32, desk: &mut Desk<M::Batch>) -> Vec<f32> {
        let parameters = self.model.parameters();
        let mut buffer = desk.spare.pop().unwrap_or_default();
        buffer.resize(parameters + 1, 0.0);
        self.samples_of(shard, &mut desk.samples);
        if desk.samples.is_empty() {
            buffer.fill(0.0);
            return buffer;
        }
        let Desk { samples, batch, spare } = desk;
        let mut pieces = samples.chunks(self.largest_piece());
        let mut compute = |samples: &[u64], into: &mut [f32]| {
            self.data.read(samples, batch);
            into[parameters] = self.model.gradient(self.parameters, batch, &mut into[..parameters]);
        };
        if let Some(first) = pieces.next() {
            compute(first, &mut buffer);
        }
        if pieces.len() > 0 {
            let mut more = spare.pop().unwrap_or_default();
            more.resize(parameters + 1, 0.0);
            for piece in pieces {
                compute(piece, &mut more);
                buffer.iter_mut().zip(&more).for_each(|(sum, more)| *sum += more);
            }
            spare.push(more);
        }
        buffer
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Tensor;

    /// Its gradient is the samples' sum and their number; its batch remembers the largest that it was.
    struct Sum([Tensor; 1]);

    #[derive(Default)]
    struct Numbers(Vec<f32>, usize);

    impl Model for Sum {
        type Batch = Numbers;
        fn tensors(&self) -> &[Tensor] {
            &self.0
        }
        fn init(&self, _seed: u64) -> Vec<f32> {
            vec![0.0; 2]
        }
        fn gradient(&self, _: &[f32], batch: &mut Numbers, gradient: &mut [f32]) -> f32 {
            batch.1 = batch.1.max(batch.0.len());
            gradient.copy_from_slice(&[batch.0.iter().sum(), batch.0.len() as f32]);
            gradient[0] / 2.0
        }
    }

    struct Samples;

    impl Data for Samples {
        type Batch = Numbers;
        fn samples(&self) -> u64 {
            40
        }
        fn read(&self, samples: &[u64], batch: &mut Numbers) {
            batch.0.clear();
            batch.0.extend(samples.iter().map(|&sample| sample as f32));
        }
    }

    #[test]
    fn pieces_are_no_larger_than_the_micro_batch_and_none_is_left_out() {
        let model = Sum([Tensor { name: "sum".into(), shape: vec![2], range: 0..2, decays: false }]);
        let order = Order::new(1, 40);
        for (micro, threads, largest) in
            [(None, 1, 13), (Some(1), 1, 1), (Some(4), 3, 4), (Some(5), 2, 5), (Some(50), 1, 13)]
        {
            let mut desks: Vec<Desk<Numbers>> = (0..threads).map(|_| Desk::default()).collect();
            let task = Task {
                model: &model,
                parameters: &[],
                data: &Samples,
                order: &order,
                batch: Batch { epoch: 2, first: 0, end: 39 },
                shards: 3,
                micro_batch: micro.and_then(NonZeroUsize::new),
            };
            // Again: then there are buffers with something in them, and no more are made.
            let mut buffers = None;
            for _ in 0..3 {
                let sum = task.sum_under(Node::root(3), &mut desks);
                let expected: u64 = (0..39).map(|place| order.sample(2, place)).sum();
                assert_eq!(sum, [expected as f32, 39.0, expected as f32 / 2.0], "{micro:?}");
                desks[0].recycle(sum);
                let now: Vec<usize> = desks.iter().map(|desk| desk.spare.len()).collect();
                assert_eq!(*buffers.get_or_insert_with(|| now.clone()), now, "{micro:?}");
            }
            assert_eq!(desks.iter().map(|desk| desk.batch.1).max(), Some(largest), "{micro:?}");
        }
    }
}
