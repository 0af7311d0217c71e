//! This machine's clocks: the only place where they are read for decisions and records.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use elastic_rendezvous::time::Time;
use rustix::time::{ClockId, clock_gettime};

/// CLOCK_BOOTTIME now.
pub fn now() -> Time {
    let spec = clock_gettime(ClockId::Boottime);
    // The clock counts from boot, so neither part is negative.
    Time::from_zero(Duration::new(spec.tv_sec as u64, spec.tv_nsec as u32))
}

/// Milliseconds from the Unix epoch to now on this host's wall clock; zero where the clock is set before it. For records
/// that people read, never for decisions.
pub fn epoch_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}
