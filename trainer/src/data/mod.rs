//! Training data: what the samples are, in which order they are visited, and how a step's batch is cut into shards.

#![deny(clippy::disallowed_methods, clippy::disallowed_types)]

mod order;
mod schedule;

pub use order::Order;
pub use schedule::{Schedule, StepSamples};

use crate::{Error, Step, error};

/// What the trainer needs to know of the samples of an epoch. Any rank may ask for any of them, so all ranks must have
/// the same.
pub trait Data: Sync {
    /// The model's [`Model::Batch`](crate::Model::Batch).
    type Batch;

    /// The number of samples. They are numbered from 0.
    fn samples(&self) -> u64;

    /// Replaces the contents of `batch` with these samples, in this order. What is drawn at random, to augment them,
    /// comes from [`Step::random`], so that any rank draws the same.
    fn read(&self, samples: &[u64], step: &Step<'_>, batch: &mut Self::Batch) -> Result<(), SampleError>;

    /// What distinguishes this data from other data, in words. Only workers and checkpoints with the same words train
    /// together: data that is read from files should name a checksum of them.
    fn identity(&self) -> String {
        format!("({} samples)", self.samples())
    }

    /// What the loss is the mean of.
    fn unit(&self) -> Unit {
        Unit { name: "samples", of_a_sample: 1 }
    }

    /// Samples to evaluate the model on, which are not trained on: none unless told otherwise.
    fn held_out(&self) -> Option<&dyn Data<Batch = Self::Batch>> {
        None
    }

    /// The mean loss that no model is expected to go below, where that is known.
    fn reachable_loss(&self) -> Option<f64> {
        None
    }
}

/// A sample that cannot be read. It ends the worker, unless [`Settings::unreadable`](crate::Settings::unreadable) says
/// to skip it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("cannot read sample {sample}: {cause}{}", self.advice())]
pub struct SampleError {
    sample: u64,
    cause: String,
    kind: Kind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Damaged,
    Unavailable,
    Panicked,
}

impl SampleError {
    /// A sample that no worker and no restart can read, such as a damaged file: the job ends. With `--unreadable skip`
    /// the sample is left out, and then the equal bits need that it is damaged for each worker that may read it.
    pub fn damaged(sample: u64, cause: impl Into<Error>) -> SampleError {
        SampleError { sample, cause: error::with_causes(&*cause.into()), kind: Kind::Damaged }
    }

    /// A sample that is away for now, such as on a server that does not answer: the worker is started again, as often
    /// as the agent allows. It is never skipped, since other workers may be able to read it.
    pub fn unavailable(sample: u64, cause: impl Into<Error>) -> SampleError {
        SampleError { kind: Kind::Unavailable, ..SampleError::damaged(sample, cause) }
    }

    /// A sample at which [`Data::read`] panicked.
    pub(crate) fn panicked(sample: u64, said: &str) -> SampleError {
        SampleError { kind: Kind::Panicked, ..SampleError::damaged(sample, format!("the data panicked: {said}")) }
    }

    /// Whether a restart may read it.
    pub fn may_pass(&self) -> bool {
        self.kind == Kind::Unavailable
    }

    /// Whether it can be left out.
    pub(crate) fn is_damaged(&self) -> bool {
        self.kind == Kind::Damaged
    }

    pub(crate) fn sample(&self) -> u64 {
        self.sample
    }

    pub(crate) fn cause(&self) -> &str {
        &self.cause
    }

    fn advice(&self) -> &'static str {
        match self.kind {
            Kind::Damaged => "; repair it, or leave it out with --unreadable skip: each restart would meet it again",
            Kind::Unavailable => "",
            Kind::Panicked => "; correct the data: each restart would meet this again",
        }
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
