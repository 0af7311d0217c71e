//! The sum over the ranks during the backward pass.
//!
//! ```text
//! computing threads   … last shard's pass: │ forward │ back: last layer … first layer │
//! this thread's peer                                    sum │ sum │ sum │ sum          │ the last, with the votes
//! ```
//!
//! A gradient is final from its end on, a layer after the other. As soon as a bucket of it is, on all of this rank's
//! threads, the group sums that bucket. The idea is that of PyTorch's `DistributedDataParallel` (Li et al., "PyTorch
//! distributed", 2020).

use std::sync::mpsc::{Receiver, RecvError, Sender, channel};
use std::thread;

use elastic_collective::tree::Node;
use elastic_collective::{CollectiveError, Group};

use super::{OnHost, over};
use crate::engine::gradient::{GradientTask, add_parts, parts_of};
use crate::engine::{EngineError, Ranks};
use crate::model::Model;

/// What is summed over the ranks, a bucket at a time.
struct Sums<'a, 'o> {
    group: &'a mut Group,
    to_owners: bool,
    shards: u32,
    /// Where the sum is made, unless this rank has one node alone: then it is made in what that node's first part hands
    /// out.
    first: Option<&'a mut [f32]>,
    /// The sums of the nodes between the first and the last.
    done: &'a [Vec<f32>],
    /// The last node, its parts, and the channels that their buckets come through, the end of the gradient first.
    last: Option<Node>,
    parts: &'a [Node],
    inboxes: Vec<Receiver<&'o mut [f32]>>,
    /// Asks for this rank's vote, and receives it.
    ask: Sender<()>,
    vote: Receiver<u32>,
}

impl<M: Model> OnHost<M> {
    /// Sums the gradient of `task` over the ranks. Returns the votes.
    pub(super) fn sum_in_buckets(&mut self, task: &GradientTask<'_, M>, ranks: Ranks<'_>) -> Result<u32, EngineError> {
        let Ranks { group, nodes, vote } = ranks;
        let to_owners = self.cut.is_some();
        let OnHost { threads, sum, bucket, outboxes, .. } = self;
        let (last, before) = nodes.split_last().map_or((None, nodes), |(&last, before)| (Some(last), before));
        let mut done = before.iter().map(|&node| task.sum_under(node, threads)).collect::<Vec<_>>().into_iter();
        let parts = last.map_or(Vec::new(), |last| parts_of(last, threads.pool.threads()));
        outboxes.resize_with(parts.len(), Vec::new);
        let in_outbox = last.is_some() && before.is_empty();
        if in_outbox {
            std::mem::swap(sum, &mut outboxes[0]);
        } else if let Some(first) = done.next() {
            threads.recycle(std::mem::replace(sum, first));
        }

        let (bucket, length) = (*bucket, task.model.parameters() + 1);
        let votes = thread::scope(|scope| {
            // In here, so that a panic ends what waits for them.
            let (senders, inboxes): (Vec<_>, Vec<_>) = parts.iter().map(|_| channel()).unzip();
            let ((ask, asked), (answer, answers)) = (channel(), channel());
            let (shards, done, parts) = (task.shards, done.as_slice(), &parts);
            let first = (!in_outbox).then_some(&mut sum[..]);
            let sums = Sums { group, to_owners, shards, first, done, last, parts, inboxes, ask, vote: answers };
            let summing = thread::Builder::new().name("sums".into());
            let summing = summing.spawn_scoped(scope, move || sums.run(length, bucket)).map_err(EngineError::Thread)?;
            task.sum_from_back(parts, threads, outboxes, bucket, |part, numbers| {
                // The receiver is gone where a sum has failed.
                let _ = senders[part].send(numbers);
            });
            // A gradient that was given up is not handed out to its end.
            drop(senders);
            // As late as possible: when the last bucket is to be summed. After a failed sum no thread asks.
            if asked.recv().is_ok() {
                let _ = answer.send(vote());
            }
            Ok(summing.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?)
        });
        if in_outbox {
            std::mem::swap(sum, &mut outboxes[0]);
        }
        done.for_each(|sum| threads.recycle(sum));
        task.interruption.result()?;
        votes
    }
}

impl Sums<'_, '_> {
    fn run(self, length: usize, bucket: usize) -> Result<u32, CollectiveError> {
        let Sums { group, to_owners, shards, first, done, last, parts, inboxes, ask, vote } = self;
        let (count, mut votes) = (length.div_ceil(bucket), 0);
        let mut first = first.map(|first| first.rchunks_mut(bucket));
        for number in 0..count {
            let arrived: Result<Vec<&mut [f32]>, RecvError> = inboxes.iter().map(Receiver::recv).collect();
            // A channel that is closed means that a computing thread has panicked; its panic is raised where it is
            // joined.
            let Ok(mut arrived) = arrived else { return Ok(votes) };
            if let Some(last) = last {
                add_parts(last, parts, &mut arrived);
            }
            let own = if number + 1 == count {
                // As with the buckets.
                let Ok(own) = ask.send(()).map_err(|_| RecvError).and_then(|()| vote.recv()) else { return Ok(votes) };
                own
            } else {
                0
            };
            let done = done.iter().filter_map(|sum| sum.rchunks(bucket).nth(number));
            // The other parts are added into the first.
            let mut last = arrived.into_iter().next();
            let first = first.as_mut().map_or_else(|| last.take(), Iterator::next);
            let Some(sum) = first else { unreachable!("a rank without nodes has room for the sum") };
            let rest: Vec<&[f32]> = done.chain(last.as_deref()).collect();
            votes |= over(group, to_owners, shards, &rest, sum, own)?;
        }
        Ok(votes)
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::num::NonZeroUsize;
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;
    use crate::Step;
    use crate::data::{Data, Order, SampleError, StepSamples};
    use crate::engine::feed::Feed;
    use crate::engine::gradient::Work;
    use crate::engine::interruption::Interruption;
    use crate::engine::{Engine, Reduced};
    use crate::model::{Gradient, Rule, Tensor};
    use crate::random::{mix, unit};
    use crate::settings::Settings;
    use elastic_collective::stop::Stop;
    use elastic_collective::tree::nodes_of;
    use elastic_collective::{GroupConfig, Patience};

    /// Its gradient shows in its last bits in which order it was added, and is reported in steps of some length.
    struct Rough {
        tensors: [Tensor; 1],
        told: usize,
    }

    impl Rough {
        fn new(count: usize, told: usize) -> Rough {
            Rough {
                tensors: [Tensor {
                    name: "rough".into(),
                    shape: vec![count],
                    range: 0..count,
                    rule: Rule::of_shape(&[count]),
                }],
                told,
            }
        }
    }

    impl Model for Rough {
        type Batch = Vec<u64>;
        type Replica = ();

        fn tensors(&self) -> &[Tensor] {
            &self.tensors
        }

        fn init(&self, _seed: u64) -> crate::Result<Vec<f32>> {
            Ok(vec![0.0; self.parameters()])
        }

        fn replica(&self) -> crate::Result<()> {
            Ok(())
        }

        fn gradient(
            &self,
            _: &Step<'_>,
            _parameters: &[f32],
            batch: &Vec<u64>,
            (): &mut (),
            gradient: &mut Gradient<'_>,
        ) -> crate::Result<f32> {
            // What is not told of yet may hold anything.
            gradient.fill(f32::NAN);
            for end in (1..=gradient.len()).rev() {
                let key = batch.iter().fold(end as u64, |key, sample| mix(key) ^ sample);
                gradient[end - 1] = unit(key) - 0.5;
                if self.told > 0 && end % self.told == 0 {
                    gradient.is_final_from(end - 1);
                }
            }
            Ok(unit(batch[0]))
        }
    }

    struct Numbers;

    impl Data for Numbers {
        type Batch = Vec<u64>;

        fn samples(&self) -> u64 {
            1000
        }

        fn read(&self, samples: &[u64], _: &Step<'_>, batch: &mut Vec<u64>) -> Result<(), SampleError> {
            batch.clear();
            batch.extend(samples);
            Ok(())
        }
    }

    #[derive(Debug, Clone, Copy)]
    struct Case {
        ranks: u32,
        threads: usize,
        readers: usize,
        bucket: usize,
        shards: u32,
        samples: u64,
        micro_batch: usize,
    }

    fn config(rank: u32, world_size: u32, master_port: u16) -> GroupConfig {
        let (job, master_addr, settings) = ("test".to_owned(), "127.0.0.1".to_owned(), String::new());
        GroupConfig { job, round: 1, rank, world_size, master_addr, master_port, agent_store: false, settings }
    }

    /// Runs `work` as each rank of a world.
    fn world<T: Send>(ranks: u32, work: impl Fn(Group) -> T + Sync) -> Vec<T> {
        // Free when asked, and rank 0 listens there at once.
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let time = Duration::from_secs(20);
        std::thread::scope(|scope| {
            let rank = |rank| {
                let work = &work;
                let form = move || {
                    let patience = Patience { form: time, operation: time };
                    Group::form(&config(rank, ranks, port), patience, Stop::default()).unwrap()
                };
                scope.spawn(move || work(form()))
            };
            let threads: Vec<_> = (0..ranks).map(rank).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    /// Sums a few steps as one rank. Bits of the sums, and the votes.
    fn sums(case: Case, model: &Rough, group: &mut Group) -> Result<Vec<(Vec<u32>, u32)>, EngineError> {
        let Case { threads, readers, bucket, shards, samples, micro_batch, .. } = case;
        let threads = NonZeroUsize::new(threads).unwrap();
        let settings = Settings { threads, readers: Some(readers), ..Settings::default() };
        let feed = Feed::new(&Numbers, &settings);
        let nodes = nodes_of(group.rank(), group.world_size(), shards);
        let mut engine = OnHost::new(&settings, model).unwrap();
        engine.bucket = if bucket == 0 { engine.sum.len() } else { bucket };
        let (order, stop) = (Order::new(7, Numbers.samples()), Stop::default());
        let of = |step| StepSamples { step: step + 1, epoch: 0, first: step * samples, end: (step + 1) * samples };
        let mut step = |step: u64| {
            let batch = of(step);
            let (micro_batch, later) = (NonZeroUsize::new(micro_batch), vec![(Work::Gradient, of(step + 1))]);
            let interruption = &Interruption::new(&stop, 1);
            let task = GradientTask {
                model,
                parameters: &[],
                work: Work::Gradient,
                feed: &feed,
                order: &order,
                batch,
                later,
                shards,
                micro_batch,
                interruption,
            };
            let vote = 1 << group.rank();
            let Reduced { votes, .. } = engine.reduce(&task, Ranks { group, nodes: &nodes, vote: &mut || vote })?;
            Ok((engine.sum.iter().map(|number| number.to_bits()).collect(), votes))
        };
        thread::scope(|scope| {
            let _readers = feed.start(scope);
            (0..3).map(&mut step).collect()
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]
        #[test]
        fn bits_do_not_depend_on_buckets_ranks_or_threads(
            ranks in 2u32..5, threads in 1usize..4, readers in 0usize..3, bucket in 1usize..80, shards in 1u32..9,
            samples in 1u64..40, micro_batch in 0usize..5, count in 1usize..200, told in 0usize..20,
        ) {
            let case = Case { ranks, threads, readers, bucket, shards, samples, micro_batch };
            let model = Rough::new(count, told);
            let alone = Case { ranks: 1, threads: 1, readers: 0, bucket: 0, ..case };
            let expected = world(1, |mut group| sums(alone, &model, &mut group).unwrap());
            let found = world(ranks, |mut group| {
                let sums = sums(case, &model, &mut group).unwrap();
                group.leave();
                sums
            });
            for sums in found {
                for ((sum, votes), (expected, _)) in sums.iter().zip(&expected[0]) {
                    prop_assert_eq!(sum, expected);
                    prop_assert_eq!(*votes, (1 << ranks) - 1, "every vote reaches every rank");
                }
            }
        }
    }

    #[test]
    fn a_lost_peer_is_the_steps_error() {
        let case = Case { ranks: 3, threads: 2, readers: 1, bucket: 10, shards: 8, samples: 30, micro_batch: 0 };
        let model = Rough::new(500, 3);
        let errors = world(case.ranks, |mut group| {
            if group.rank() == 2 {
                return None; // Its sockets close, as by a SIGKILL.
            }
            let error = sums(case, &model, &mut group).unwrap_err();
            // Keeps its sockets until all have named the right one.
            Some((error, group))
        });
        for (error, _group) in errors.into_iter().flatten() {
            let EngineError::Collective(CollectiveError::PeerLost { rank: 2, .. }) = error else { panic!("{error}") };
        }
    }
}
