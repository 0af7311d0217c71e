//! The request to stop, or to change to a later round, which everything that waits checks.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::CollectiveError;

/// The longest time between two checks of the flag, so that a stop is noticed within a tenth of a second.
pub const GLANCE: Duration = Duration::from_millis(50);

/// From a stop signal to SIGKILL, unless the agent says otherwise.
const GRACE: Duration = Duration::from_secs(10);

/// What of a grace is left unused: an agent counts it from a little earlier.
const MARGIN: Duration = Duration::from_millis(500);

/// Raised, and not by a signal.
const BY_HAND: usize = usize::MAX;

/// A flag that is raised once, and the round that is forming, if any.
#[derive(Debug, Clone, Default)]
pub struct Stop {
    /// The signal that raised it, [`BY_HAND`], or 0.
    raised: Arc<AtomicUsize>,
    /// Whether signals end the process.
    released: Arc<AtomicBool>,
    forming: Arc<Mutex<Option<Forming>>>,
    leaving: Arc<Mutex<Leaving>>,
}

/// How a raised flag ends the work under way.
#[derive(Debug, Default)]
struct Leaving {
    /// When it was first seen to be raised.
    since: Option<Instant>,
    /// From then to SIGKILL, as far as the agent has said.
    grace: Option<Duration>,
    /// Whether the step under way may end by itself.
    lets_finish: bool,
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
        stop.listen().map(|()| stop)
    }

    /// Has SIGTERM and SIGINT raise this flag.
    pub fn listen(&self) -> std::io::Result<()> {
        for signal in [signal_hook::consts::SIGTERM, signal_hook::consts::SIGINT] {
            signal_hook::flag::register_conditional_default(signal, self.released.clone())?;
            signal_hook::flag::register_usize(signal, self.raised.clone(), signal as usize)?;
        }
        Ok(())
    }

    /// Has later signals end the process at once, as they do by default. It is called when everything is saved.
    pub fn release_signals(&self) {
        self.released.store(true, Ordering::Relaxed);
    }

    /// Raises it.
    pub fn raise(&self) {
        let _ = self.raised.compare_exchange(0, BY_HAND, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// Whether it is raised.
    pub fn is_raised(&self) -> bool {
        self.raised.load(Ordering::Relaxed) != 0
    }

    /// The number of the signal that has raised it, if one has.
    pub fn signal(&self) -> Option<u8> {
        u8::try_from(self.raised.load(Ordering::Relaxed)).ok().filter(|signal| *signal > 0)
    }

    /// Notes how long after the stop signal SIGKILL follows.
    pub fn grants(&self, grace: Duration) {
        self.leaving().grace = Some(grace);
    }

    /// Says whether the step under way may end by itself once the flag is raised.
    pub fn lets_finish(&self, lets: bool) {
        self.leaving().lets_finish = lets;
    }

    /// Whether what is under way is to be given up, since the flag is raised. A step that may end by itself has half of
    /// the grace for that. The other half is for saving what there is then.
    pub fn interrupts(&self, now: Instant) -> bool {
        if !self.is_raised() {
            return false;
        }
        let mut leaving = self.leaving();
        let since = *leaving.since.get_or_insert(now);
        !leaving.lets_finish || now.saturating_duration_since(since) >= leaving.grace.unwrap_or(GRACE) / 2
    }

    /// Whether what is under way when the flag is raised may end by itself.
    pub fn may_finish(&self) -> bool {
        self.leaving().lets_finish
    }

    /// Fails where a step of this round is to be given up: at a stop, and when a later round forms, once the time for
    /// the step under way is over.
    pub fn check(&self, round: u64, now: Instant) -> Result<(), CollectiveError> {
        if self.interrupts(now) {
            return Err(CollectiveError::Stopped);
        }
        match self.forming_after(round).filter(|forming| now >= forming.give_up) {
            Some(forming) => Err(CollectiveError::Superseded { round: forming.round }),
            None => Ok(()),
        }
    }

    /// What is left of the grace; all of it before the flag is raised.
    pub fn left(&self, now: Instant) -> Duration {
        let Leaving { since, grace, .. } = *self.leaving();
        let used = since.map_or(Duration::ZERO, |since| now.saturating_duration_since(since));
        grace.unwrap_or(GRACE).saturating_sub(used + MARGIN)
    }

    fn leaving(&self) -> MutexGuard<'_, Leaving> {
        self.leaving.lock().unwrap_or_else(PoisonError::into_inner)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_has_half_of_the_grace_and_a_save_what_is_left() {
        let (stop, now) = (Stop::default(), Instant::now());
        let at = |seconds: u64| now + Duration::from_secs(seconds);
        stop.grants(Duration::from_secs(20));
        stop.lets_finish(true);
        assert!(!stop.interrupts(at(0)));
        stop.raise();
        // Counted from the first look after the signal
        assert!(!stop.interrupts(at(5)) && !stop.interrupts(at(14)) && stop.interrupts(at(15)));
        assert_eq!(stop.left(at(15)), Duration::from_millis(9500));
        assert_eq!(stop.left(at(60)), Duration::ZERO);
        stop.lets_finish(false);
        assert!(stop.interrupts(at(5)), "what is no step ends at once");
        assert_eq!(stop.signal(), None);
    }
}
