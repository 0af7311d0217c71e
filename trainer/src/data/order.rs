//! The order of an epoch's samples, as a pure function. It needs no memory, and any rank can ask for any place of any
//! epoch.
//!
//! A Feistel network permutes the smallest domain of 4^k numbers that holds all samples, and a number outside the
//! samples is sent through again until it falls inside ("cycle walking", Black and Rogaway, "Ciphers with arbitrary
//! finite domains", 2002). The domain is under four times the samples, so this takes under four turns on average.

use crate::random::mix;

/// Enough rounds that neighbours in an epoch are unrelated. This shuffles; it is no encryption.
const ROUNDS: u64 = 6;

/// The order in which each epoch visits its samples.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Order {
    seed: u64,
    samples: u64,
    /// Of the halves that the network permutes.
    half_bits: u32,
}

impl Order {
    /// An order over `samples` samples; another seed gives another order.
    pub fn new(seed: u64, samples: u64) -> Order {
        let bits = u64::BITS - samples.saturating_sub(1).leading_zeros();
        Order { seed, samples, half_bits: bits.div_ceil(2).max(1) }
    }

    /// The sample at `index` of `epoch`. Over `0..samples` it takes each sample once.
    ///
    /// # Panics
    /// When `index` is not below the number of samples.
    pub fn sample(&self, epoch: u64, index: u64) -> u64 {
        assert!(index < self.samples, "index {index} is outside an epoch of {} samples", self.samples);
        let key = mix(self.seed ^ mix(epoch));
        let mut place = index;
        loop {
            place = self.permute(key, place);
            if place < self.samples {
                return place;
            }
        }
    }

    fn permute(&self, key: u64, place: u64) -> u64 {
        let mask = (1u64 << self.half_bits) - 1;
        let (mut left, mut right) = (place >> self.half_bits, place & mask);
        for round in 0..ROUNDS {
            (left, right) = (right, left ^ (mix(key ^ (round << 56) ^ right) & mask));
        }
        (left << self.half_bits) | right
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn epoch(order: &Order, samples: u64, epoch: u64) -> Vec<u64> {
        (0..samples).map(|index| order.sample(epoch, index)).collect()
    }

    proptest! {
        #[test]
        fn every_epoch_visits_each_sample_once(seed: u64, samples in 1u64..3000, number in 0u64..1_000_000) {
            let mut visited = epoch(&Order::new(seed, samples), samples, number);
            visited.sort_unstable();
            prop_assert_eq!(visited, (0..samples).collect::<Vec<_>>());
        }

        #[test]
        fn seeds_and_epochs_give_different_orders(seed: u64, samples in 64u64..500) {
            let order = Order::new(seed, samples);
            prop_assert_ne!(epoch(&order, samples, 0), epoch(&order, samples, 1));
            prop_assert_ne!(epoch(&order, samples, 0), epoch(&Order::new(seed ^ 1, samples), samples, 0));
        }
    }

    #[test]
    fn places_are_filled_evenly() {
        // Given many epochs, when the samples at one place are counted, then none is preferred:
        // chi-squared with 15 degrees of freedom exceeds 37.7 once in a thousand seeds.
        let order = Order::new(7, 16);
        let mut counts = [0u32; 16];
        for number in 0..16_000 {
            counts[order.sample(number, 3) as usize] += 1;
        }
        let chi: f64 = counts.iter().map(|&count| (f64::from(count) - 1000.0).powi(2) / 1000.0).sum();
        assert!(chi < 37.7, "chi-squared {chi}, counts {counts:?}");
    }
}
