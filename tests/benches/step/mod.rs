//! Runs the trainer's step of one worker without the training loop. The benchmark times it with these models.

use elastic_tests::prelude::*;
use std::num::{NonZeroU32, NonZeroUsize};

use elastic_collective::tree::Node;
use elastic_models::{Rows, gpt::Size, gpt::Tokens};
use elastic_trainer::data::{Data, Order, StepSamples};
use elastic_trainer::engine::feed::Feed;
use elastic_trainer::engine::gradient::{GradientTask, GradientThreads, Work};
use elastic_trainer::engine::interruption::Interruption;
use elastic_trainer::model::{AdamW, Model, Optimizer, Stride};
use elastic_trainer::random::unit;
use elastic_trainer::{SampleError, Settings, State, Step, Stop};

pub(crate) const MLP: [usize; 4] = [784, 512, 512, 10];
/// GPTs, with their names and the sequences in a step.
pub(crate) const GPTS: [(&str, Size, usize); 2] = [
    ("GPT 0.9 M", Size { vocabulary: 512, context: 64, layers: 4, heads: 4, width: 128 }, 16),
    ("GPT 4.9 M", Size { vocabulary: 512, context: 128, layers: 6, heads: 8, width: 256 }, 8),
];

type Make<B> = dyn Fn(u64, &mut B) + Sync;

/// The samples of a step, one shard for each thread. They are made only once, since PyTorch's side has a tensor ready.
pub(crate) struct Shards<B>(Box<Make<B>>);

impl<B> Shards<B> {
    /// `make` makes a shard's samples from the shard's number, if the batch has none yet.
    pub(crate) fn new(make: impl Fn(u64, &mut B) + Sync + 'static) -> Shards<B> {
        Shards(Box::new(make))
    }
}

impl Shards<Rows> {
    /// Shards for the perceptron, each of `samples` samples.
    pub(crate) fn mlp(samples: usize) -> Shards<Rows> {
        Shards::new(move |shard, batch: &mut Rows| {
            if batch.labels.is_empty() {
                let inputs = (0..samples * MLP[0]).map(|i| unit(shard << 40 | i as u64)).collect();
                *batch = Rows { inputs, labels: (0..samples).map(|i| (i % MLP[3]) as u8).collect() };
            }
        })
    }
}

impl Shards<Tokens> {
    /// Shards for a GPT of this size, each of `sequences` sequences.
    pub(crate) fn gpt(size: Size, sequences: usize) -> Shards<Tokens> {
        let Size { vocabulary, context, .. } = size;
        Shards::new(move |shard, batch: &mut Tokens| {
            let tokens = |salt: u64| -> Vec<u32> {
                let key = (2 * shard + salt) << 40;
                (0..sequences * context).map(|i| (unit(key | i as u64) * vocabulary as f32) as u32).collect()
            };
            if batch.inputs.is_empty() {
                *batch = Tokens::new(context, tokens(0), tokens(1));
            }
        })
    }
}

impl<B: Default + Send> Data for Shards<B> {
    type Batch = B;

    fn samples(&self) -> u64 {
        64
    }

    fn read(&self, samples: &[u64], _: &Step<'_>, batch: &mut B) -> Result<(), SampleError> {
        (self.0)(samples[0], batch);
        Ok(())
    }
}

/// The trainer's own step of one worker, without its loop.
pub(crate) struct Run<M: Model> {
    model: M,
    data: Shards<M::Batch>,
    settings: Settings,
    rule: Optimizer,
    state: State,
    threads: GradientThreads<M>,
}

impl<M: Model> Run<M> {
    /// A run on `threads` threads.
    pub(crate) fn new(threads: usize, model: M, data: Shards<M::Batch>) -> Run<M> {
        let shards = NonZeroU32::new(threads as u32).expect("a thread");
        let threads =
            GradientThreads::new(NonZeroUsize::new(threads).expect("a thread"), shards, &model).expect("replicas");
        let first = model.init(1).expect("first parameters");
        let rule = Optimizer::AdamW(AdamW::new(0.1));
        Run { settings: Settings::default(), state: State::new(first, &rule), rule, data, threads, model }
    }

    /// The mean time of a step, in milliseconds, over `steps` steps.
    pub(crate) fn time(&mut self, steps: usize) -> f64 {
        let begun = Instant::now();
        (0..steps).for_each(|_| self.step());
        begun.elapsed().as_secs_f64() * 1e3 / steps as f64
    }

    fn step(&mut self) {
        let shards = self.threads.pool.threads() as u32;
        let stop = Stop::default();
        let task = GradientTask {
            model: &self.model,
            parameters: self.state.parameters(),
            work: Work::Gradient,
            feed: &Feed::new(&self.data, &self.settings),
            order: &Order::new(0, self.data.samples()),
            batch: StepSamples { step: 1, epoch: 0, first: 0, end: u64::from(shards) },
            later: Vec::new(),
            shards,
            micro_batch: None,
            interruption: &Interruption::new(&stop, 0),
        };
        let sum = task.sum_under(Node::root(shards), &mut self.threads);
        let tensors = self.model.tensors();
        let stride = Stride { step: self.state.step + 1, rate: 1e-4, mean: 1e-3, scale: 1e-3 };
        self.state.advance(&mut self.threads.pool, &self.rule, &stride, tensors, &sum[1..]);
        self.threads.recycle(sum);
    }
}
