//! Reading a piece: what is damaged is left out, a panic becomes an error, and the time is noted.

use std::borrow::Cow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tracing::{debug, warn};

use super::{Feed, Piece};
use crate::data::SampleError;
use crate::engine::TaskError;
use crate::engine::gradient::Work;

/// Batches are read ahead where reading one takes this long. To hand one over takes some microseconds.
const SLOW: Duration = Duration::from_micros(50);
/// At most so many skipped samples are warned of; the others are logged at debug.
const NAMED: u64 = 20;

/// How long reading takes.
#[derive(Default)]
pub(super) struct Pace {
    nanoseconds: AtomicU64,
    reads: AtomicU64,
    slow: AtomicBool,
}

impl Pace {
    fn took(&self, time: Duration) {
        self.nanoseconds.fetch_add(time.as_nanos() as u64, Ordering::Relaxed);
        self.reads.fetch_add(1, Ordering::Relaxed);
    }

    /// Whether the last reads were slow: those since the last call, if there were any.
    pub(super) fn is_slow(&self) -> bool {
        let reads = self.reads.swap(0, Ordering::Relaxed);
        if let Some(mean) = self.nanoseconds.swap(0, Ordering::Relaxed).checked_div(reads) {
            self.slow.store(Duration::from_nanos(mean) >= SLOW, Ordering::Relaxed);
        }
        self.slow.load(Ordering::Relaxed)
    }
}

impl<B: Default + Send> Feed<'_, B> {
    /// Reads a piece into `batch`. Returns its samples: those that could be read.
    pub(super) fn read<'s>(&self, piece: &Piece<'s>, batch: &mut B) -> Result<Cow<'s, [u64]>, TaskError> {
        let begun = Instant::now();
        let mut left = piece.samples.clone();
        while !left.is_empty() {
            match self.try_to_read(piece, &left, batch) {
                Ok(()) => break,
                Err(error) if self.skips && error.is_damaged() && left.contains(&error.sample()) => {
                    let (step, sample, cause) = (piece.batch.step, error.sample(), error.cause());
                    if self.logged.fetch_add(1, Ordering::Relaxed) < NAMED {
                        warn!("step {step} skips sample {sample}: {cause}");
                    } else {
                        debug!("step {step} skips sample {sample}: {cause}");
                    }
                    left.to_mut().retain(|sample| *sample != error.sample());
                }
                Err(error) => return Err(error.into()),
            }
        }
        self.pace[piece.work as usize].took(begun.elapsed());
        Ok(left)
    }

    fn try_to_read(&self, piece: &Piece<'_>, samples: &[u64], batch: &mut B) -> Result<(), SampleError> {
        let mut read = |samples: &[u64]| {
            catch_unwind(AssertUnwindSafe(|| {
                let data = match piece.work {
                    Work::Gradient => Some(self.data),
                    Work::Evaluation => self.data.held_out(),
                };
                let Some(data) = data else { unreachable!("only what is held out is evaluated") };
                data.read(samples, &self.step(piece, samples), batch)
            }))
        };
        read(samples).unwrap_or_else(|panic| {
            // One of several: which is known when it is read alone.
            let alone = |sample: &&u64| read(std::slice::from_ref(sample)).is_err();
            let sample = samples.iter().find(alone).or(samples.first()).copied().unwrap_or_default();
            let said = panic.downcast_ref::<String>().map(String::as_str);
            let said = said.or_else(|| panic.downcast_ref().copied()).unwrap_or("of an unknown kind");
            Err(SampleError::panicked(sample, said))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reading_is_slow_by_the_mean_of_a_step() {
        let pace = Pace::default();
        assert!(!pace.is_slow());
        pace.took(SLOW * 3);
        pace.took(Duration::ZERO);
        assert_eq!((pace.is_slow(), pace.is_slow()), (true, true));
        pace.took(SLOW * 3);
        (0..3).for_each(|_| pace.took(Duration::ZERO));
        assert_eq!((pace.is_slow(), pace.is_slow()), (false, false));
    }
}
