//! What a GPT is trained on, and what it is evaluated on.

use std::fmt;

use elastic_trainer::{Data, SampleError, Step, Unit};

use crate::gpt::Tokens;

/// A source of windows of tokens.
type Source = Box<dyn Data<Batch = Tokens>>;

/// Windows to train on, and others to evaluate on.
pub struct Corpus {
    /// What the model is trained on.
    pub train: Source,
    /// What it is not trained on; there may be none.
    pub held_out: Source,
}

impl fmt::Debug for Corpus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (train, held_out) = (self.train.identity(), self.held_out.identity());
        f.debug_struct("Corpus").field("train", &train).field("held_out", &held_out).finish()
    }
}

impl Data for Corpus {
    type Batch = Tokens;

    fn samples(&self) -> u64 {
        self.train.samples()
    }

    fn read(&self, samples: &[u64], step: &Step<'_>, batch: &mut Tokens) -> Result<(), SampleError> {
        self.train.read(samples, step, batch)
    }

    fn identity(&self) -> String {
        self.train.identity()
    }

    fn unit(&self) -> Unit {
        self.train.unit()
    }

    fn held_out(&self) -> Option<&dyn Data<Batch = Tokens>> {
        Some(&*self.held_out).filter(|held_out| held_out.samples() > 0)
    }

    fn reachable_loss(&self) -> Option<f64> {
        self.train.reachable_loss()
    }
}
