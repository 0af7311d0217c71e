//! Time as a value: pure modules take it as an argument, drivers read it from one place.
//! A [`Time`] says nothing on another machine; what people read is a [`date`].

pub mod date;

use std::fmt;
use std::ops::{Add, Sub};
use std::time::Duration;

/// A reading of one machine's CLOCK_BOOTTIME (or of a simulated clock).
///
/// The boot-time clock continues during suspend, so a lease that lapsed while a laptop slept has lapsed here too; the
/// monotonic clock stops.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Time(Duration);

impl Time {
    /// The clock's zero.
    pub const ZERO: Time = Time(Duration::ZERO);

    /// Reads this machine's clock. Drivers call this; decisions are given its result.
    pub fn now() -> Time {
        let spec = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
        // The clock counts from boot, so neither part is negative.
        Time(Duration::new(spec.tv_sec as u64, spec.tv_nsec as u32))
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
