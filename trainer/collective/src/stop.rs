//! The request to stop, or to change to a later round, which everything that waits checks.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The longest time between two checks of the flag, so that a stop is noticed within a tenth of a second.
pub const GLANCE: Duration = Duration::from_millis(50);

/// A flag that is raised once, and the round that is forming, if any.
#[derive(Debug, Clone, Default)]
pub struct Stop {
    raised: Arc<AtomicBool>,
    /// Whether signals end the process.
    released: Arc<AtomicBool>,
    forming: Arc<Mutex<Option<Forming>>>,
}

/// A round that is forming.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Forming {
    /// Its number.
    pub round: u64,
    /// When to give up the step under way. A step that has not ended by then never will: a peer is gone.
    pub give_up: Instant,
}

impl Stop {
    /// A flag that SIGTERM and SIGINT raise.
    pub fn on_signals() -> std::io::Result<Stop> {
        let stop = Stop::default();
        for signal in [signal_hook::consts::SIGTERM, signal_hook::consts::SIGINT] {
            signal_hook::flag::register_conditional_default(signal, stop.released.clone())?;
            signal_hook::flag::register(signal, stop.raised.clone())?;
        }
        Ok(stop)
    }

    /// Has later signals end the process at once, as they do by default. It is called when everything is saved.
    pub fn release_signals(&self) {
        self.released.store(true, Ordering::Relaxed);
    }

    /// Raises it.
    pub fn raise(&self) {
        self.raised.store(true, Ordering::Relaxed);
    }

    /// Whether it is raised.
    pub fn is_raised(&self) -> bool {
        self.raised.load(Ordering::Relaxed)
    }

    /// Notes that a round is forming, for which workers must have quiesced within `quiesce`. The first half of that
    /// time is for the step under way, which ends by itself if no peer is gone.
    pub fn forms(&self, round: u64, quiesce: Duration) {
        let forming = Forming { round, give_up: Instant::now() + quiesce / 2 };
        *self.forming.lock().unwrap_or_else(PoisonError::into_inner) = Some(forming);
    }

    /// The round that is forming, if it is later than `round`.
    pub fn forming_after(&self, round: u64) -> Option<Forming> {
        let forming = *self.forming.lock().unwrap_or_else(PoisonError::into_inner);
        forming.filter(|forming| forming.round > round)
    }
}
