//! Which step a model or its data computes for, and random numbers that depend on nothing else.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

/// The step that a gradient or a batch is for: the same on every rank that computes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Step<'a> {
    seed: u64,
    number: u64,
    epoch: u64,
    samples: &'a [u64],
    trains: bool,
}

impl<'a> Step<'a> {
    /// Step `number` of a run with this `--seed`, in `epoch`, and the samples that are computed at once. The trainer
    /// makes the steps that it trains; this is for others, such as step 0 for first parameters, and for tests.
    pub const fn new(seed: u64, number: u64, epoch: u64, samples: &'a [u64]) -> Step<'a> {
        Step { seed, number, epoch, samples, trains: true }
    }

    /// An evaluation of held-out samples, after that step.
    pub const fn evaluation(seed: u64, number: u64, epoch: u64, samples: &'a [u64]) -> Step<'a> {
        Step { trains: false, ..Step::new(seed, number, epoch, samples) }
    }

    /// Whether the parameters will move by what is computed: in training, and not in an evaluation.
    pub fn trains(&self) -> bool {
        self.trains
    }

    /// The step's number, counted from 1. An evaluation has that of the step before it.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// The epoch, counted from 0.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// The batch's samples, in its order: some of the step's.
    pub fn samples(&self) -> &'a [u64] {
        self.samples
    }

    /// Random numbers for one sample in this step, for dropout or augmentation: the same from each call, on each rank,
    /// and when the step is done again. With other numbers for each seed, step and sample.
    pub fn random(&self, sample: u64) -> Random {
        self.stream(sample, 0)
    }

    /// As [`random`](Self::random), but another stream for each `purpose` above 0: a model and its data that both draw
    /// must not draw the same.
    pub fn stream(&self, sample: u64, purpose: u64) -> Random {
        let mut key = [0; 32];
        let words = [self.seed, self.number, sample, purpose];
        key.chunks_exact_mut(8).zip(words).for_each(|(bytes, word)| bytes.copy_from_slice(&word.to_le_bytes()));
        Random(ChaCha8Rng::from_seed(key))
    }
}

/// Random numbers that depend only on a key: ChaCha with 8 rounds (Bernstein, "ChaCha, a variant of Salsa20", 2008),
/// which encrypts a counter.
#[derive(Debug, Clone)]
pub struct Random(ChaCha8Rng);

impl Random {
    /// 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.0.next_u64()
    }

    /// A number in `[0, 1)`, with 24 random bits: exact in `f32`.
    pub fn unit(&mut self) -> f32 {
        (self.0.next_u32() >> 8) as f32 / (1u32 << 24) as f32
    }

    /// A whole number below `end`, each as likely to within one in 2^64 / `end`; 0 if `end` is 0.
    pub fn below(&mut self, end: u64) -> u64 {
        ((u128::from(self.bits()) * u128::from(end)) >> 64) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_numbers_depend_on_seed_step_sample_and_purpose_alone() {
        let draw = |seed, number, sample, purpose| {
            let samples = [sample];
            let mut random = Step::new(seed, number, 0, &samples).stream(sample, purpose);
            [random.bits(), random.bits()]
        };
        let first = draw(1, 2, 3, 0);
        // By another implementation of ChaCha. A job that is continued by a later build draws the same.
        assert_eq!(first, [0xcd28_0005_fbe3_7308, 0x111a_885b_ae91_c11a]);
        assert_eq!(draw(1, 2, 3, 0), first, "again");
        for other in [draw(2, 2, 3, 0), draw(1, 3, 3, 0), draw(1, 2, 4, 0), draw(1, 2, 3, 1), draw(3, 2, 1, 0)] {
            assert_ne!(other, first);
        }
        let (one, two) = (Step::new(1, 2, 0, &[3]), Step::new(1, 2, 9, &[5, 3, 7]));
        assert_eq!(one.random(3).bits(), two.random(3).bits(), "whatever else is computed with it");
    }

    #[test]
    fn numbers_are_uniform() {
        let mut random = Step::new(0, 1, 0, &[]).random(0);
        let (mut sum, mut counts) = (0.0, [0; 5]);
        for _ in 0..10_000 {
            let unit = random.unit();
            assert!((0.0..1.0).contains(&unit));
            sum += f64::from(unit);
            counts[random.below(5) as usize] += 1;
        }
        assert!((sum / 10_000.0 - 0.5).abs() < 0.02, "{sum}");
        assert!(counts.iter().all(|count| (1800..2200).contains(count)), "{counts:?}");
        assert_eq!(random.below(0), 0);
    }
}
