//! Time as a value: pure modules take it as an argument, drivers read the clock (`elastic_store::clock`).
//! A [`Time`] says nothing on another machine; what people read is a [`date`].

pub mod date;

use std::fmt;
use std::ops::{Add, Sub};
use std::time::Duration;

/// A reading of one machine's CLOCK_BOOTTIME (or of a simulated clock).
///
/// The boot-time clock also counts suspended time, so a lease that expired while a laptop slept has expired here too. The
/// monotonic clock stops in suspend.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Time(Duration);

impl Time {
    /// The clock's zero.
    pub const ZERO: Time = Time(Duration::ZERO);

    /// The time at which the clock reads `since_zero`. Drivers read the clock; decisions are given the result.
    pub const fn from_zero(since_zero: Duration) -> Time {
        Time(since_zero)
    }

    /// A time this many milliseconds after zero: for tests and simulations.
    pub const fn from_millis(ms: u64) -> Time {
        Time(Duration::from_millis(ms))
    }

    /// Time passed since `earlier`; zero if it lies ahead.
    pub fn since(self, earlier: Time) -> Duration {
        self.0.saturating_sub(earlier.0)
    }

    /// This time moved back, not before zero.
    pub fn minus(self, by: Duration) -> Time {
        Time(self.0.saturating_sub(by))
    }

    /// Milliseconds since zero.
    pub const fn as_millis(self) -> u64 {
        self.0.as_millis() as u64
    }

    /// Duration since zero.
    pub const fn as_duration(self) -> Duration {
        self.0
    }
}

impl Add<Duration> for Time {
    type Output = Time;
    fn add(self, by: Duration) -> Time {
        Time(self.0.saturating_add(by))
    }
}

impl Sub for Time {
    type Output = Duration;
    fn sub(self, earlier: Time) -> Duration {
        self.since(earlier)
    }
}

impl fmt::Debug for Time {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.3}s", self.0.as_secs_f64())
    }
}
