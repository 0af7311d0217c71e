//! What is trained: parameters chosen so that a run takes long enough to watch and to disturb.

use std::path::Path;

use elastic_models::Digits;
use elastic_trainer::data::{Data, Order, Schedule};

/// The trainer's own default: the samples' order follows from it.
const SEED: u64 = 0;

#[derive(Debug, Clone)]
pub(crate) struct Training {
    hidden: &'static str,
    batch: u64,
    epochs: u64,
    checkpoint_every: u64,
    pub(crate) schedule: Schedule,
    pub(crate) order: Order,
}

impl Training {
    /// The training; `quick` is small enough for a test.
    pub(crate) fn new(quick: bool, epochs: Option<u64>) -> anyhow::Result<Training> {
        let (hidden, batch, usual, checkpoint_every) =
            if quick { ("256,128", 96, 20, 20) } else { ("1024,512", 192, 22, 25) };
        let epochs = epochs.unwrap_or(usual);
        let samples = Digits::load(None, true)?.train.samples();
        let schedule = Schedule::of_epochs(samples, batch, epochs);
        Ok(Training { hidden, batch, epochs, checkpoint_every, schedule, order: Order::new(SEED, samples) })
    }

    /// The trainer's arguments, for a run that keeps its files in `folder`.
    pub(crate) fn arguments(&self, folder: &Path) -> Vec<String> {
        let path = |name: &str| folder.join(name).display().to_string();
        let mut arguments: Vec<String> = ["digits", "--shifts", "--shards=12"].map(str::to_owned).into();
        arguments.extend([
            format!("--hidden={}", self.hidden),
            format!("--batch={}", self.batch),
            format!("--epochs={}", self.epochs),
            format!("--seed={SEED}"),
            format!("--checkpoint-dir={}", path(CHECKPOINTS)),
            format!("--checkpoint-every={}", self.checkpoint_every),
            format!("--trace={}", path(TRACE)),
        ]);
        arguments
    }

    pub(crate) fn describe(&self) -> String {
        let Training { epochs, schedule: Schedule { samples, .. }, .. } = self;
        let network = self.hidden.replace(',', "-");
        let steps = self.schedule.total_steps();
        format!("{samples} images of digits, network 64-{network}-10, {epochs} epochs, {steps} steps")
    }
}

/// Names in a run's folder.
pub(crate) const CHECKPOINTS: &str = "checkpoints";
pub(crate) const TRACE: &str = "trace.jsonl";
