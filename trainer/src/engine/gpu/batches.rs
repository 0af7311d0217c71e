//! Batches, each of which is read while the GPU is at the one before: the next piece of a step, and behind its last one
//! the first of the next step. A read that begins only when the GPU is done makes the GPU wait.

use std::collections::VecDeque;

use elastic_collective::tree::Node;
use tracing::debug;

use crate::data::{SampleError, StepSamples};
use crate::engine::gradient::{GradientTask, Work};
use crate::model::Model;

/// The batch that is computed, and the one after it.
#[derive(Debug, Default)]
pub(super) struct Batches<B> {
    now: B,
    next: B,
    /// What `next` holds, if it is read.
    read: Option<Piece>,
    /// What this rank computes from now on.
    upcoming: VecDeque<Piece>,
}

/// Samples that are computed at once.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Piece {
    work: Work,
    batch: StepSamples,
    samples: Vec<u64>,
}

impl Piece {
    /// Whether it is these samples of a task.
    fn is_of<M: Model>(&self, task: &GradientTask<'_, M>, samples: &[u64]) -> bool {
        (self.work, self.batch, &self.samples[..]) == (task.work, task.batch, samples)
    }
}

impl<B> Batches<B> {
    /// A step begins, in which this rank computes these nodes. What is expected is what the next step begins with if
    /// this rank has the same nodes then. It may have others, or the step may have to be done again.
    pub(super) fn expect<M: Model<Batch = B>>(&mut self, task: &GradientTask<'_, M>, nodes: &[Node]) {
        self.upcoming.clear();
        let shards = || nodes.iter().flat_map(|node| node.first..node.end);
        let mut samples = Vec::new();
        let mut pieces_of = |batch: StepSamples, shard| {
            task.samples_at(batch, shard, &mut samples);
            let piece = |samples: &[u64]| Piece { work: task.work, batch, samples: samples.to_vec() };
            samples.chunks(task.largest_piece()).map(piece).collect::<Vec<_>>()
        };
        self.upcoming.extend(shards().flat_map(|shard| pieces_of(task.batch, shard)));
        let first = task.next.and_then(|next| shards().find_map(|shard| pieces_of(next, shard).into_iter().next()));
        self.upcoming.extend(first);
    }

    /// The batch of these samples of the step. It is read now if it was not before.
    pub(super) fn take<M: Model<Batch = B>>(
        &mut self,
        task: &GradientTask<'_, M>,
        samples: &[u64],
    ) -> Result<&B, SampleError> {
        if self.read.take().is_some_and(|read| read.is_of(task, samples)) {
            std::mem::swap(&mut self.now, &mut self.next);
        } else {
            debug!("a batch of {} samples was not read before it was needed", samples.len());
            task.data.read(samples, &task.step_of(task.batch, samples), &mut self.now)?;
        }
        Ok(&self.now)
    }

    /// Reads what comes after these samples, if that is known. What cannot be read is read again when it is needed.
    pub(super) fn read_after<M: Model<Batch = B>>(
        &mut self,
        task: &GradientTask<'_, M>,
        samples: &[u64],
    ) -> Option<&B> {
        while self.upcoming.pop_front().is_some_and(|piece| !piece.is_of(task, samples)) {}
        let next = self.upcoming.front()?;
        task.data.read(&next.samples, &task.step_of(next.batch, &next.samples), &mut self.next).ok()?;
        self.read = Some(next.clone());
        Some(&self.next)
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;
    use std::sync::Mutex;

    use elastic_collective::stop::Stop;

    use super::*;
    use crate::Step;
    use crate::data::{Data, Order};
    use crate::engine::interruption::Interruption;
    use crate::model::{Gradient, Tensor};

    /// A batch is its samples, and each read of one is written down.
    #[derive(Default)]
    struct Samples(Mutex<Vec<Vec<u64>>>);

    impl Data for Samples {
        type Batch = Vec<u64>;

        fn samples(&self) -> u64 {
            40
        }

        fn read(&self, samples: &[u64], _: &Step<'_>, batch: &mut Vec<u64>) -> Result<(), SampleError> {
            self.0.lock().unwrap().push(samples.to_vec());
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

    #[test]
    fn each_batch_is_read_once_and_while_the_one_before_is_computed() {
        let (order, data) = (Order::new(1, 40), Samples::default());
        let (mut batches, stop) = (Batches::default(), Stop::default());
        let step = |number: u64| StepSamples { step: number + 1, epoch: 0, first: 10 * number, end: 10 * number + 10 };
        // Shards 1 to 3 of four; then, after a change of ranks, the first alone.
        let nodes = [vec![Node { first: 1, end: 2 }, Node { first: 2, end: 4 }], vec![Node { first: 0, end: 1 }]];
        let (mut computed, mut unread) = (Vec::new(), 0);
        for (number, nodes) in [(0, &nodes[0]), (1, &nodes[0]), (2, &nodes[1]), (3, &nodes[1])] {
            let task = GradientTask {
                model: &Nothing,
                parameters: &[],
                work: Work::Gradient,
                data: &data,
                order: &order,
                batch: step(number),
                next: (number < 3).then(|| step(number + 1)),
                shards: 4,
                micro_batch: NonZeroUsize::new(2),
                interruption: &Interruption::new(&stop, 0),
            };
            batches.expect(&task, nodes);
            for shard in nodes.iter().flat_map(|node| node.first..node.end) {
                let mut samples = Vec::new();
                task.samples_at(task.batch, shard, &mut samples);
                for piece in samples.chunks(2) {
                    let before = data.0.lock().unwrap().len();
                    assert_eq!(batches.take(&task, piece).unwrap(), piece);
                    unread += data.0.lock().unwrap().len() - before;
                    computed.push(piece.to_vec());
                    batches.read_after(&task, piece);
                }
            }
        }
        assert_eq!(unread, 2, "the first of all, and the first after the change");
        let read = data.0.into_inner().unwrap();
        assert_eq!(read.len(), computed.len() + 1, "what the change made useless was read in vain");
        assert!(computed.iter().all(|piece| read.iter().filter(|read| *read == piece).count() == 1));
    }
}
