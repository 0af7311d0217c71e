//! Whether the guard confirms in time that it kills the workers. A guard that is frozen does not, and must be killed
//! itself.

use std::time::Duration;

use elastic_rendezvous::time::Time;

/// The pause between looks, and how many looks may find nothing. An agent that was frozen with its guard, as by a
/// cgroup or a suspended machine, finds nothing once, however long this was.
const LOOK: Duration = Duration::from_millis(100);
const LOOKS: u32 = 10;

#[derive(Debug, Default)]
pub(super) struct Confirmation {
    /// When the guard was asked to kill. It must say that it does.
    asked: Option<Time>,
    /// When the guard must kill by itself, if something is there to kill.
    fence: Option<Time>,
    /// A fence point that had passed unconfirmed when a later one was set.
    passed: Option<Time>,
    looks: u32,
    looked: Option<Time>,
}

impl Confirmation {
    /// The guard was asked to kill.
    pub(super) fn ask(&mut self, now: Time) {
        self.asked.get_or_insert(now);
    }

    /// The guard must kill at `until`. `populated`: something may be there to kill.
    pub(super) fn fence(&mut self, now: Time, until: Option<Time>, populated: bool) {
        if populated && self.passed.is_none() {
            self.passed = self.fence.filter(|fence| *fence <= now);
        }
        self.fence = until;
        if self.due(now, populated).is_none() {
            (self.looks, self.looked) = (0, None);
        }
    }

    /// The guard said at `now` that it kills everything.
    pub(super) fn confirmed(&mut self, now: Time) {
        *self = Confirmation { fence: self.fence.filter(|fence| *fence > now), ..Confirmation::default() };
    }

    /// The guard said that nothing is there.
    pub(super) fn gone(&mut self) {
        self.passed = None;
    }

    fn due(&self, now: Time, populated: bool) -> Option<Time> {
        let fence = self.passed.or(self.fence.filter(|fence| *fence <= now)).filter(|_| populated);
        self.asked.into_iter().chain(fence).min()
    }

    /// When to look next, if nothing happens.
    pub(super) fn wake_at(&self, now: Time, populated: bool) -> Option<Time> {
        match self.due(now, populated) {
            Some(due) => Some(self.looked.unwrap_or(due) + LOOK),
            None => self.fence.filter(|_| populated),
        }
    }

    /// Looks at `now`. Returns whether the guard must be killed.
    pub(super) fn look(&mut self, now: Time, populated: bool) -> bool {
        if self.due(now, populated).is_none() || self.wake_at(now, populated).is_none_or(|at| at > now) {
            return false;
        }
        self.looked = Some(now);
        self.looks += 1;
        self.looks >= LOOKS
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ms: u64) -> Time {
        Time::from_millis(ms)
    }

    /// Looks whenever it is time, up to `until`. Returns when the guard must be killed.
    fn killed(confirmation: &mut Confirmation, from: u64, until: u64, populated: bool) -> Option<u64> {
        (from..until).find(|ms| confirmation.look(at(*ms), populated))
    }

    #[test]
    fn a_kill_that_is_not_confirmed_within_a_second_is_the_guards_end() {
        let mut asked = Confirmation::default();
        asked.ask(at(50));
        assert_eq!(asked.wake_at(at(50), false), Some(at(150)));
        assert_eq!(killed(&mut asked, 50, 5000, false), Some(1050), "whatever the guard was believed to have");
        let mut confirmed = Confirmation::default();
        confirmed.ask(at(50));
        assert_eq!(killed(&mut confirmed, 50, 1000, true), None);
        confirmed.confirmed(at(1000));
        assert_eq!((killed(&mut confirmed, 1000, 5000, true), confirmed.wake_at(at(5000), true)), (None, None));
    }

    #[test]
    fn a_fence_point_that_passes_unconfirmed_is_the_guards_end() {
        let mut fence = Confirmation::default();
        fence.fence(at(0), Some(at(400)), true);
        assert_eq!((fence.wake_at(at(0), true), fence.wake_at(at(0), false)), (Some(at(400)), None));
        assert_eq!(killed(&mut fence, 0, 5000, false), None, "nothing was there");
        assert_eq!(killed(&mut fence, 400, 5000, true), Some(1400));
        let mut moved = Confirmation::default();
        moved.fence(at(0), Some(at(400)), true);
        moved.fence(at(399), Some(at(5000)), true);
        assert_eq!(killed(&mut moved, 399, 5000, true), None, "it was moved in time");
    }

    #[test]
    fn a_fence_point_that_is_moved_too_late_still_waits_for_its_kill() {
        let late = || {
            let mut late = Confirmation::default();
            late.fence(at(0), Some(at(400)), true);
            late.fence(at(900), Some(at(90_000)), true);
            late
        };
        assert_eq!(killed(&mut late(), 900, 5000, true), Some(1800));
        let (mut confirmed, mut gone) = (late(), late());
        confirmed.confirmed(at(950));
        gone.gone();
        assert_eq!((killed(&mut confirmed, 950, 5000, true), killed(&mut gone, 950, 5000, true)), (None, None));
    }

    #[test]
    fn an_agent_that_was_frozen_with_its_guard_gives_it_the_same_time() {
        let mut asked = Confirmation::default();
        asked.ask(at(0));
        assert!(!asked.look(at(60_000), true), "one look, after a minute of nothing");
        assert_eq!(killed(&mut asked, 60_000, 70_000, true), Some(60_900));
    }
}
