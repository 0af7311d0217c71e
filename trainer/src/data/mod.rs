//! Training data: what the samples are, in which order they are visited, and how a step's batch is cut into shards.

#![deny(clippy::disallowed_methods, clippy::disallowed_types)]

pub(crate) mod digits;
pub(crate) mod markov;
mod order;
mod schedule;

pub use digits::{Digits, Images};
pub use markov::Markov;
pub use order::Order;
pub use schedule::{Schedule, StepSamples};

/// What the trainer needs to know of the samples of an epoch. Any rank may ask for any of them, so all ranks must have
/// the same.
pub trait Data: Sync {
    /// The model's [`Model::Batch`](crate::Model::Batch).
    type Batch;

    /// The number of samples. They are numbered from 0.
    fn samples(&self) -> u64;

    /// Replaces the contents of `batch` with these samples, in this order.
    fn read(&self, samples: &[u64], batch: &mut Self::Batch);

    /// What distinguishes this data from other data, in words. Only workers and checkpoints with the same words train
    /// together: data that is read from files should name a checksum of them.
    fn describe(&self) -> String {
        format!("({} samples)", self.samples())
    }

    /// What the loss is the mean of.
    fn unit(&self) -> Unit {
        Unit { name: "samples", of_a_sample: 1 }
    }

    /// The mean loss that no model is expected to go below, where that is known.
    fn reachable_loss(&self) -> Option<f64> {
        None
    }
}

/// What the loss is the mean of, and what a step's work is counted in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Unit {
    /// Several of them.
    pub name: &'static str,
    /// How many of them a sample has.
    pub of_a_sample: u64,
}
