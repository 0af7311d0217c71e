//! What news of the round mean to a node, and how it finds its place.

use super::step::Out;
use super::timers::Timer;
use super::{Call, Command, End, Leave, Member, Mode, Start, Workers};
use crate::job::{RankRecord, RoundRecord, RoundState, Sealed, Versioned};
use crate::kv::{Op, OpResult, Revision, Txn, TxnResult};
use crate::time::Time;

/// Looking up the node's seat, once for each sealed round.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct SeatLookup {
    /// The sealed round whose seat was looked up last, by its running record's plan.
    known: Option<(u64, Revision)>,
    /// The sealed round whose seat is being looked up.
    asked: Option<Sealed>,
}

impl Member {
    pub(super) fn round_read(&mut self, now: Time, round: Result<Versioned<RoundRecord>, String>, out: &mut Out) {
        let round = match round {
            Ok(round) => round,
            // As good as deleted: no one can form or end a round any more.
            Err(problem) => return self.end(End::StoreLost(problem), out),
        };
        // mutant old_news: known.modified >= round.modified => false
        if self.round.as_ref().is_some_and(|known| known.modified >= round.modified) {
            return;
        }
        if self.round.as_ref().is_some_and(|known| known.created != round.created) {
            let why = "the job's records were removed, and its id was used for a new job: this node's job is gone";
            return self.end(End::StoreLost(why.to_owned()), out);
        }
        if self.round.as_ref().is_some_and(|known| !round.value.may_follow(&known.value)) {
            let why = "the job's rounds went back: the store was restored from a backup";
            return self.end(End::StoreLost(format!("store lost: {why}")), out);
        }
        if self.round.as_ref().is_some_and(|known| known.value.generation != round.value.generation) {
            // Cut off, it missed the job's failure. It joins like anyone else: the flags may be others now.
            return self.evicted("the job failed and was started again meanwhile".to_owned(), out);
        }
        let known = self.round.as_ref().map(|known| known.value.stage());
        if known != Some(round.value.stage()) {
            self.stage_since = known.map(|_| now);
        }
        self.round = Some(round.clone());
        match round.value.state {
            RoundState::Forming => self.round_forms(now, &round.value, out),
            RoundState::Running => self.round_runs(&round.value, out),
            RoundState::Succeeded => self.end(End::Succeeded, out),
            RoundState::Closed => self.end(End::Closed, out),
            RoundState::Failed => self.end(End::Failed(round.value.cause, round.value.reason), out),
        }
    }

    /// No one deletes the `round` key while the job has nodes: it is written over, and its create revision
    /// tells one life of the id from another that began on an emptied store.
    pub(super) fn round_gone(&mut self, out: &mut Out) {
        let why = "the job's `round` key was deleted: was the store emptied or the job removed by hand?";
        self.end(End::StoreLost(why.to_owned()), out);
    }

    /// Whether this node had its last seat in this round: a restored store may have another plan of its number.
    fn had_seat_in(&self, sealed: Option<Sealed>) -> bool {
        sealed.is_some_and(|sealed| self.seat.known == Some((sealed.number, sealed.plan)))
    }

    fn round_forms(&mut self, now: Time, round: &RoundRecord, out: &mut Out) {
        match self.mode {
            Mode::Starting(own) | Mode::Running(own) | Mode::Done(own) | Mode::Failed(own, _) => {
                if !self.had_seat_in(round.sealed) {
                    return self.left_behind(out);
                }
                if round.leaving.contains(&self.setup.record.name) {
                    self.leave_by(now);
                    self.say_leaving(out);
                    self.mode = Mode::Leaving(own, Some(round.number));
                } else {
                    self.mode = Mode::Waiting(Some(round.number));
                }
                // mutant a_pause_lets_workers_rest: round.paused => false
                if round.paused && !matches!(self.mode, Mode::Leaving(..)) {
                    self.stop_for_pause(round, out);
                } else {
                    self.say_forming(round, out);
                    self.quiesce(out);
                }
            }
            Mode::Leaving(own, None) => {
                if self.had_seat_in(round.sealed) {
                    self.say_forming(round, out);
                    self.mode = Mode::Leaving(own, Some(round.number));
                } else {
                    self.left_behind(out);
                }
            }
            // Everybody of the last round counts as gone, this node too: it stopped, and its key went with its lease. It
            // comes as a newcomer, and those need no workers.
            Mode::Waiting(Some(_)) if round.sealed.is_none() => {
                self.stop(out);
                self.mode = Mode::Waiting(None);
                self.own.lost_track();
            }
            Mode::Waiting(Some(asked)) if asked == round.number && round.leaving.contains(&self.setup.record.name) => {
                self.leave_by(now);
                self.mode = Mode::Leaving(asked.saturating_sub(1), Some(asked));
            }
            // mutant who_rests_is_not_paused: round.paused => false
            Mode::Waiting(_) | Mode::WarmingUp(_) if round.paused && self.workers != Workers::None => {
                if let Mode::WarmingUp(_) = self.mode {
                    self.mode = Mode::Waiting(None);
                }
                self.stop_for_pause(round, out);
                self.own.lost_track();
            }
            // Its agent may have started workers ahead of its first place. It gets none before they are gone.
            Mode::Waiting(None) if round.paused && self.setup.record.warms_up => {
                self.workers = Workers::Dismissed;
                out.push(Command::Stop(self.spec.timings.drain_grace).into());
            }
            // A new plan may have been made because this node was evicted, and it has nothing to write that would tell.
            Mode::Waiting(Some(asked)) if asked == round.number => self.own.lost_track(),
            // A seat in the sealed round, if there is one, is looked up first.
            _ => {}
        }
    }

    /// An operator paused the job: the workers may save as those of a node that leaves, and end. The node stays.
    fn stop_for_pause(&mut self, round: &RoundRecord, out: &mut Out) {
        self.say_leaving(out);
        self.say_forming(round, out);
        self.stop(out);
    }

    fn say_forming(&self, round: &RoundRecord, out: &mut Out) {
        if matches!(self.workers, Workers::Alive(_) | Workers::Quiescing(_)) {
            out.push(Command::Forming(round.number, round.reason.clone()).into());
        }
    }

    fn round_runs(&mut self, round: &RoundRecord, out: &mut Out) {
        let is_behind = match self.mode {
            Mode::Starting(_) | Mode::Running(_) | Mode::Done(_) | Mode::Failed(..) => !self.had_seat_in(round.sealed),
            Mode::Waiting(Some(_)) => !self.workers.are_at_rest(),
            _ => false,
        };
        if is_behind {
            self.left_behind(out);
        }
    }

    /// Whether workers of its last round have died, and new ones can be started before their place is known.
    pub(super) fn lacks_workers(&self) -> bool {
        self.setup.record.warms_up && matches!(self.workers, Workers::None | Workers::Short)
    }

    /// The other nodes continue meanwhile: new workers are started instead of those that have died.
    fn warm_up(&mut self, round: &RoundRecord, out: &mut Out) {
        self.mode = Mode::WarmingUp(round.number);
        self.workers = Workers::WarmingUp;
        let (restarts, grace) = (round.restarts, self.spec.timings.stop_grace);
        out.push(Command::WarmUp { round: round.number, restarts, grace }.into());
    }

    /// Its workers are warm, or cannot be warmed up and have ended: it wants a place.
    pub(super) fn return_when_warm(&mut self) {
        if matches!(self.mode, Mode::WarmingUp(_)) && self.workers.are_at_rest() {
            self.mode = Mode::Waiting(None);
        }
    }

    /// The group continued without this node: whatever it still has of the old round ends now, and its own key will
    /// tell whether it was evicted.
    fn left_behind(&mut self, out: &mut Out) {
        self.kill(out);
        self.mode = if self.leave != Leave::No { Mode::Ending(End::Drained) } else { Mode::Waiting(None) };
        self.own.lost_track();
    }

    /// Looks up its place in a sealed round it has not checked yet.
    pub(super) fn look_up_seat(&mut self, out: &mut Out) {
        let Some(sealed) = self.round.as_ref().and_then(|round| round.value.sealed) else { return };
        let looked = self.seat.known == Some((sealed.number, sealed.plan));
        let waiting = matches!(self.mode, Mode::Waiting(_)) && self.workers.are_at_rest();
        if looked || !waiting || self.own.created().is_none() {
            return;
        }
        let keys = &self.setup.keys;
        let rank = keys.rank(sealed.number, sealed.plan, &self.id());
        let txn = Txn::of([Op::get(keys.round()), Op::get(rank)]);
        if !self.calls.contains(&Call::Seat) {
            self.seat.asked = Some(sealed);
        }
        self.call(Call::Seat, txn, out);
    }

    pub(super) fn seat_read(&mut self, now: Time, sent: Time, result: &TxnResult, out: &mut Out) {
        // This is about the seat that was asked for, not about the round known by now: the watch may have been faster
        // than this answer.
        let asked = self.seat.asked.take();
        self.round_of(now, result, out);
        let Some(round) = self.round.clone() else { return };
        let Some(sealed) = round.value.sealed else { return };
        if asked != Some(sealed) || !matches!(self.mode, Mode::Waiting(_)) || !self.workers.are_at_rest() {
            // It moved on meanwhile: the next look-up is about the newer one.
            return;
        }
        let rank = match result.results.get(1).and_then(OpResult::value).map(Versioned::<RankRecord>::parse) {
            Some(Ok(rank)) => Some(rank.value),
            Some(Err(problem)) => return self.say_once(problem, out),
            None => None,
        };
        let looked = (sealed.number, sealed.plan);
        match (rank, round.value.state) {
            (Some(rank), RoundState::Running) => {
                self.proofs.round = self.proofs.round.max(sent);
                if !self.may_start(now) {
                    // Workers started now would be killed at once: renew first.
                    self.timers.set(Timer::Lease, now);
                    self.timers.set(Timer::Retry, now + self.spec.timings.beat() / 5);
                    return;
                }
                self.seat.known = Some(looked);
                self.mode = Mode::Starting(sealed.number);
                self.workers = Workers::Alive(sealed.number);
                self.prove(sent);
                out.push(
                    Command::Start(Box::new(Start {
                        round: round.value,
                        rank,
                        spec: self.spec.clone(),
                        secret: self.secret.clone(),
                    }))
                    .into(),
                );
            }
            (Some(_), _) => {
                self.seat.known = Some(looked);
                self.mode = Mode::Waiting(Some(round.value.number));
            }
            (None, _) => {
                self.seat.known = Some(looked);
                // Also where it waits for the round after this one: then it was in another plan of this one, before the
                // store was restored.
                if let Mode::Waiting(Some(_)) = self.mode {
                    if self.lacks_workers() && !round.value.paused && !round.value.state.is_final() {
                        return self.warm_up(&round.value, out);
                    }
                    // A node without a place needs no workers, whether they are at rest or not.
                    self.stop(out);
                    self.mode = Mode::Waiting(None);
                }
            }
        }
    }
}
