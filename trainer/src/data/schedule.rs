//! Which samples a step trains on: pure arithmetic on the step's number.
//!
//! The number of committed steps is the data's only state. So each sample of an epoch is in exactly one committed step,
//! whatever the ranks did in between.

use std::ops::Range;

/// How steps, batches and epochs fit together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Schedule {
    /// Samples in an epoch.
    pub samples: u64,
    /// Samples in a step, over all ranks. The last step of an epoch takes what is left.
    pub batch: u64,
    steps: u64,
}

/// A step's samples: places `first..end` of `epoch` in the epoch's order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepSamples {
    /// The step, counted from 1.
    pub step: u64,
    /// The epoch, counted from 0.
    pub epoch: u64,
    /// The first place.
    pub first: u64,
    /// The place after the last.
    pub end: u64,
}

impl Schedule {
    /// So many whole epochs.
    pub const fn of_epochs(samples: u64, batch: u64, epochs: u64) -> Schedule {
        Schedule { samples, batch, steps: samples.div_ceil(batch) * epochs }
    }

    /// Steps in an epoch.
    pub fn steps_per_epoch(&self) -> u64 {
        self.samples.div_ceil(self.batch)
    }

    /// So many steps, however many epochs these are. The last one may end early.
    pub const fn of_steps(samples: u64, batch: u64, steps: u64) -> Schedule {
        Schedule { samples, batch, steps }
    }

    /// Steps in all.
    pub fn total_steps(&self) -> u64 {
        self.steps
    }

    /// Epochs in all, the last one perhaps in part.
    pub fn epochs(&self) -> u64 {
        self.epochs_of(self.steps)
    }

    /// Epochs that so many steps visit, the last one perhaps in part.
    pub fn epochs_of(&self, steps: u64) -> u64 {
        steps.div_ceil(self.steps_per_epoch())
    }

    /// The batch of the step that follows `done` steps.
    pub fn batch_after(&self, done: u64) -> StepSamples {
        let first = done % self.steps_per_epoch() * self.batch;
        let end = self.samples.min(first + self.batch);
        StepSamples { step: done + 1, epoch: done / self.steps_per_epoch(), first, end }
    }
}

impl StepSamples {
    /// Samples in the batch.
    pub fn samples(&self) -> u64 {
        self.end - self.first
    }

    /// The places of logical shard `shard` of `shards`. Shards differ by at most one sample, and may be empty.
    pub fn shard(&self, shard: u32, shards: u32) -> Range<u64> {
        let at = |number: u32| self.first + self.samples() * u64::from(number) / u64::from(shards);
        at(shard)..at(shard + 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_last_batch_of_an_epoch_takes_what_is_left() {
        let schedule = Schedule::of_epochs(10, 4, 2);
        let batches: Vec<_> = (0..schedule.total_steps()).map(|done| schedule.batch_after(done)).collect();
        let places: Vec<_> = batches.iter().map(|b| (b.epoch, b.first, b.end)).collect();
        assert_eq!(places, [(0, 0, 4), (0, 4, 8), (0, 8, 10), (1, 0, 4), (1, 4, 8), (1, 8, 10)]);
        let epochs = |steps| schedule.epochs_of(steps);
        assert_eq!([1, 3, 4, 6, 7].map(epochs), [1, 1, 2, 2, 3], "a part of an epoch counts");
    }

    proptest! {
        #[test]
        fn shards_tile_the_batch(first in 0u64..1000, samples in 0u64..300, shards in 1u32..40) {
            let batch = StepSamples { step: 1, epoch: 0, first, end: first + samples };
            let places: Vec<u64> = (0..shards).flat_map(|shard| batch.shard(shard, shards)).collect();
            prop_assert_eq!(places, (first..first + samples).collect::<Vec<_>>());
        }

        /// A history: in each life some steps are done; the last few may be lost before they are committed.
        #[test]
        fn committed_steps_hold_each_sample_of_an_epoch_once(
            samples in 1u64..200, batch in 1u64..50, epochs in 1u64..4,
            lives in prop::collection::vec((1u64..20, 0u64..20), 0..30),
        ) {
            let schedule = Schedule::of_epochs(samples, batch, epochs);
            let mut trained = vec![0u32; (samples * epochs) as usize];
            let mut committed = 0;
            let finish = (schedule.total_steps(), 0);
            for (done, lost) in lives.into_iter().chain([finish]) {
                let reached = schedule.total_steps().min(committed + done);
                let kept = committed.max(reached.saturating_sub(lost));
                for step in committed..kept {
                    let batch = schedule.batch_after(step);
                    for place in batch.first..batch.end {
                        trained[(batch.epoch * samples + place) as usize] += 1;
                    }
                }
                committed = kept;
            }
            prop_assert!(trained.iter().all(|&times| times == 1), "{:?}", trained);
        }
    }
}
