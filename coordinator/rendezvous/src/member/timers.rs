//! A node's timers, by name: when it wants to be called, and whether it may wait for ever.

use std::collections::BTreeMap;

use super::{Call, Member, Mode, Workers};
use crate::time::Time;

/// What a node does when its time comes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Timer {
    /// Kills its workers: nothing proves any more that they may live.
    Fence,
    /// Gives up joining.
    Join,
    /// A newcomer gives up waiting for a place: the store has not answered for `join_timeout`.
    Patience,
    /// Looks again whether the job can be joined.
    Look,
    /// Continues after the pause behind a failed call.
    Retry,
    /// Asks for a lease, or renews it.
    Lease,
    /// Proves that it was not evicted and knows the current round.
    Prove,
    /// Campaigns for the lead.
    Campaign,
    /// Stops its workers, or goes, though no one has made room for its leave.
    Leave,
}

/// When each timer goes off that is set. [`Timer::Fence`] is never: it follows from what is proven.
#[derive(Debug, Clone)]
pub(super) struct Timers(BTreeMap<Timer, Time>);

impl Timers {
    /// A node's first: what it keeps alive is due at once, as soon as it has it.
    pub(super) fn new() -> Timers {
        Timers(BTreeMap::from([(Timer::Lease, Time::ZERO), (Timer::Prove, Time::ZERO)]))
    }

    pub(super) fn get(&self, timer: Timer) -> Option<Time> {
        self.0.get(&timer).copied()
    }

    pub(super) fn set(&mut self, timer: Timer, at: Time) {
        self.0.insert(timer, at);
    }

    pub(super) fn stop(&mut self, timer: Timer) {
        self.0.remove(&timer);
    }
}

impl Member {
    /// When a timer goes off; `None` while it is not set, or what it is for cannot be done now.
    ///
    /// Code that acts on a timer asks [`Member::is_due`]. So nothing is due without a deadline that tells of it, and
    /// something is done at each deadline.
    fn timer(&self, timer: Timer) -> Option<Time> {
        if self.mode == Mode::Over || (self.has_lost_its_store() && timer != Timer::Fence) {
            return None;
        }
        let under_way = |call| self.calls.contains(&call);
        let stopping = matches!(self.workers, Workers::Stopping(_) | Workers::Killed);
        let runs = match timer {
            Timer::Fence => return self.fence_point().filter(|_| self.workers != Workers::Killed),
            Timer::Join => self.mode == Mode::Joining,
            Timer::Patience => self.mode == Mode::Waiting(None) && self.workers == Workers::None,
            Timer::Look => self.mode == Mode::Joining && !under_way(Call::Join) && !under_way(Call::Begin),
            Timer::Retry => true,
            Timer::Lease => self.joining.as_ref().is_none_or(|joining| joining.leftovers) && !self.lease.is_awaited(),
            Timer::Prove => {
                let proves = self.workers != Workers::None || self.is_idle();
                proves && self.lease.id().is_some() && !under_way(Call::Own) && !under_way(Call::ReadBack)
            }
            Timer::Campaign => self.may_campaign() && !under_way(Call::Campaign),
            Timer::Leave => matches!(self.mode, Mode::Leaving(..)) && !stopping,
        };
        let at = self.timers.get(timer).filter(|_| runs)?;
        match timer {
            // What waits for the pause after a failed call is not due before.
            Timer::Look | Timer::Prove | Timer::Campaign => {
                Some(self.timers.get(Timer::Retry).map_or(at, |until| at.max(until)))
            }
            _ => Some(at),
        }
    }

    /// Whether a timer has gone off.
    pub(super) fn is_due(&self, timer: Timer, now: Time) -> bool {
        self.timer(timer).is_some_and(|at| now >= at)
    }

    /// When it wants a [`MemberInput::Tick`](super::MemberInput::Tick) at the latest.
    pub fn deadline(&self) -> Option<Time> {
        let set = self.timers.0.keys().copied().chain([Timer::Fence]);
        set.filter_map(|timer| self.timer(timer)).min()
    }

    /// Whether nothing would ever call it again: its part is not over, no timer is set, and nothing that it asked for is
    /// to be answered. Never true after a step; the simulation watches that.
    pub fn is_stuck(&self) -> bool {
        let ending = matches!(self.workers, Workers::Dismissed | Workers::Killed);
        let awaits = !self.calls.is_empty() || self.lease.is_awaited() || ending;
        self.is_finished() || (self.mode != Mode::Over && self.deadline().is_none() && !awaits)
    }
}
