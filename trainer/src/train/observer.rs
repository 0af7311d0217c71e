//! What hears of a training, and changes nothing in it.

use std::collections::BTreeMap;
use std::time::Instant;

use serde::Serialize;

/// Something that has happened. The trace (`--trace`) has the same events.
#[derive(Debug, Serialize)]
#[non_exhaustive]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event<'a> {
    /// A worker group begins after this many steps.
    Begin {
        /// Its round.
        round: u64,
        /// Steps done before.
        step: u64,
        /// Its ranks.
        world_size: u32,
        /// This process.
        pid: u32,
        /// What carries sums of gradients between ranks, if there are several: `tcp` or `nccl`.
        collectives: &'a str,
        /// How often NCCL has failed, since the oldest of the ranks began.
        nccl_failures: u64,
    },
    /// The parameters have moved.
    Step {
        /// In this round.
        round: u64,
        /// Counted from 1.
        step: u64,
        /// Counted from 0.
        epoch: u64,
        /// First place in the epoch's order.
        first: u64,
        /// The place after the last.
        end: u64,
        /// Mean loss of the step's samples, before the step.
        loss: f32,
        /// Ranks that shared it.
        world_size: u32,
        /// Samples that could not be read, with `--unreadable skip`.
        #[serde(skip_serializing_if = "Option::is_none")]
        skipped: Option<u64>,
    },
    /// The model was evaluated on held-out samples.
    Evaluated {
        /// In this round.
        round: u64,
        /// Steps done before.
        step: u64,
        /// Held-out samples, with those that were skipped.
        samples: u64,
        /// Their mean loss.
        loss: f64,
        /// The means of the model's metrics, by name.
        metrics: BTreeMap<&'a str, f64>,
        /// Samples that could not be read, with `--unreadable skip`.
        #[serde(skip_serializing_if = "Option::is_none")]
        skipped: Option<u64>,
    },
    /// A checkpoint is the point to resume from.
    Committed {
        /// The round that saved it.
        round: u64,
        /// Steps it contains.
        step: u64,
        /// Its manifest.
        path: &'a str,
    },
}

/// Hears what happens to a training: see [`Elastic::observer`](crate::Elastic::observer).
///
/// It hears the same on each rank, but of commits only on rank 0. A step that was done again after a failure is heard
/// of again, in a later round.
pub trait Observer {
    /// Hears of an event, at the time `now`. The training continues when this returns.
    fn see(&mut self, event: &Event<'_>, now: Instant);
}
