//! How a node's part ends: by the job's end, by a planned leave, by an eviction.

use super::step::Out;
use super::timers::Timer;
use super::{Command, End, Lease, Leave, Member, MemberOutput, Mode, Workers};
use crate::job::{Phase, RoundState};
use crate::time::Time;

impl Member {
    pub(super) fn end(&mut self, end: End, out: &mut Out) {
        if matches!(self.mode, Mode::Ending(_)) {
            return;
        }
        if matches!(end, End::StoreLost(_)) {
            self.kill(out);
        } else {
            self.stop(out);
        }
        self.mode = Mode::Ending(end);
    }

    /// Begins a planned leave, or hurries one.
    ///
    /// The others hear it first, and this node's workers get their signal when the next round is forming: peers whose
    /// connections break before they know why would count as failed. Where no one answers, the workers are not kept
    /// waiting.
    pub(super) fn drain(&mut self, now: Time, out: &mut Out) {
        if self.leave != Leave::No {
            self.leave = Leave::Hurried;
            self.timers.set(Timer::Leave, now);
            return self.kill(out);
        }
        let alone = self.round.as_ref().is_none_or(|round| round.value.group_world_size < 2);
        self.leave_by(if alone { now } else { now + self.spec.timings.margin });
        match self.mode {
            Mode::Starting(round) | Mode::Running(round) | Mode::Failed(round, _) => {
                self.say_leaving(out);
                self.mode = Mode::Leaving(round, None);
            }
            Mode::Waiting(Some(forming)) if self.workers != Workers::None => {
                self.mode = Mode::Leaving(forming.saturating_sub(1), Some(forming));
            }
            Mode::WarmingUp(round) => self.mode = Mode::Leaving(round.saturating_sub(1), Some(round)),
            Mode::Ending(_) => {}
            Mode::Evicted(_) => self.mode = Mode::Ending(End::Drained),
            _ => self.end(End::Drained, out),
        }
    }

    /// Makes this a planned leave: while workers run, `at` is when they are stopped even if no round is forming; then,
    /// when the node goes even if no one has taken its place.
    pub(super) fn leave_by(&mut self, at: Time) {
        if self.leave == Leave::No {
            self.leave = Leave::Asked;
        }
        self.timers.set(Timer::Leave, at);
    }

    pub(super) fn say_leaving(&self, out: &mut Out) {
        if matches!(self.workers, Workers::Alive(_) | Workers::Quiescing(_)) {
            out.push(Command::Leaving(self.spec.timings.drain_grace).into());
        }
    }

    /// This incarnation is out. It joins again as another, unless it was leaving anyway.
    pub(super) fn evicted(&mut self, reason: String, out: &mut Out) {
        if matches!(self.mode, Mode::Ending(_)) {
            return;
        }
        self.kill(out);
        self.mode = if self.leave != Leave::No { Mode::Ending(End::Drained) } else { Mode::Evicted(reason) };
    }

    /// Whether nothing but its last word is left: it is to end, and no worker lives.
    pub(super) fn is_finished(&self) -> bool {
        self.workers == Workers::None && matches!(self.mode, Mode::Ending(_) | Mode::Evicted(_))
    }

    /// Says its last word.
    pub(super) fn finish(&mut self, out: &mut Out) {
        let word = match &self.mode {
            Mode::Ending(end) => MemberOutput::End(end.clone()),
            Mode::Evicted(reason) => MemberOutput::Rejoin(reason.clone()),
            _ => return,
        };
        self.part(word, out);
    }

    fn part(&mut self, finish: MemberOutput, out: &mut Out) {
        self.mode = Mode::Over;
        out.push(Command::Fence(None).into());
        out.push(MemberOutput::Pulse(None));
        if self.leadership.own_term.take().is_some() {
            out.push(MemberOutput::StopLeading);
        }
        out.extend(self.lease.id().map(MemberOutput::Revoke));
        self.lease = Lease::None;
        out.push(finish);
    }

    /// A leader stays until the next round is sealed, or no one is left to seal one for: handing over takes longer. Any
    /// other node goes once the store holds its word that it has stopped.
    pub(super) fn leave_when_due(&mut self, now: Time, out: &mut Out) {
        let Mode::Leaving(_, forming) = self.mode else { return };
        let due = self.is_due(Timer::Leave, now);
        if self.workers != Workers::None {
            if forming.is_some() || due {
                self.stop(out);
            }
            return;
        }
        let told = forming.is_some_and(|forming| self.own.says(Phase::Stopped, forming));
        let over = self.round.as_ref().is_some_and(|round| {
            let round = &round.value;
            forming.is_some_and(|forming| {
                round.number >= forming && (round.state != RoundState::Forming || round.sealed.is_none())
            })
        });
        if over || due || (told && self.leadership.own_term.is_none()) {
            self.part(MemberOutput::End(End::Drained), out);
        }
    }
}
