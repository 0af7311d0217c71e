//! Chance, from a seed.

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

/// A second, in the world's nanoseconds.
pub(crate) const SECOND: u64 = 1_000_000_000;
/// A millisecond.
pub(crate) const MS: u64 = 1_000_000;

/// A span of the world's time, for people.
pub(crate) fn seconds(span: u64) -> String {
    format!("{:.1} s", span as f64 / SECOND as f64)
}

#[derive(Clone)]
pub(crate) struct Dice(SmallRng);

impl Dice {
    pub(crate) fn new(seed: u64) -> Dice {
        Dice(SmallRng::seed_from_u64(seed))
    }

    /// A number in `low..high`; `low` if there is none.
    pub(crate) fn between(&mut self, low: u64, high: u64) -> u64 {
        if low < high { self.0.random_range(low..high) } else { low }
    }

    pub(crate) fn chance(&mut self, probability: f64) -> bool {
        self.0.random_bool(probability.clamp(0.0, 1.0))
    }

    pub(crate) fn pick<T: Clone>(&mut self, among: &[T]) -> Option<T> {
        if among.is_empty() { None } else { Some(among[self.between(0, among.len() as u64) as usize].clone()) }
    }

    /// Mostly short, seldom long: how networks and processes take their time.
    pub(crate) fn mostly(&mut self, usual: u64, seldom: u64) -> u64 {
        if self.chance(0.95) { self.between(usual / 10, usual) } else { self.between(usual, seldom) }
    }
}
