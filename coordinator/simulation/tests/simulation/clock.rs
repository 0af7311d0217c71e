//! Clocks of different rates and zeros: each host's, and the store's.

use std::time::Duration;

use elastic_rendezvous::time::Time;

/// One machine's clock: what it reads at a moment of the world's time, in nanoseconds.
#[derive(Clone, Copy)]
pub(crate) struct Clock {
    /// What it read at the world's beginning.
    pub(crate) zero: u64,
    /// Parts per million that it runs fast.
    pub(crate) fast: i64,
}

impl Clock {
    pub(crate) fn reads(&self, world: u64) -> Time {
        let drift = world as i128 * i128::from(self.fast) / 1_000_000;
        Time::ZERO + Duration::from_nanos((i128::from(self.zero) + i128::from(world) + drift) as u64)
    }

    /// The first moment at which the clock reads at least `time`; the beginning if that lies before it.
    pub(crate) fn when(&self, time: Time) -> u64 {
        let passed = time.as_duration().as_nanos() as i128 - i128::from(self.zero);
        let mut world = (passed * 1_000_000 / (1_000_000 + i128::from(self.fast))).max(0) as u64;
        while self.reads(world) < time {
            world += 1;
        }
        world
    }

    /// The world's length of a duration on this clock.
    pub(crate) fn lasts(&self, duration: Duration) -> u64 {
        (duration.as_nanos() as i128 * 1_000_000 / (1_000_000 + i128::from(self.fast))) as u64
    }
}
