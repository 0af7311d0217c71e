//! The node's step: takes an input, then does whatever is due. What news of the round means is in `rounds.rs`, joining
//! in `join.rs`.

use std::time::Duration;

use super::own_key::Reading;
use super::timers::Timer;
use super::{Call, Command, End, GroupReport, Leave, Member, MemberInput, MemberOutput, Mode, Outcome, Workers};
use crate::Word;
use crate::job::{Endpoint, Failure, FailureClass, NodeRecord, Phase, Versioned};
use crate::kv::{Event, OpResult, Revision, StoreError, Txn, TxnResult, WatchUpdate};
use crate::time::Time;

/// Longest pause before a failed call is tried again for the first time; each failure after it doubles it.
const RETRY: Duration = Duration::from_millis(300);

/// Longest pause of all, also where only a person can help.
pub(super) const LONGEST: Duration = Duration::from_secs(2);

pub(super) type Out = Vec<MemberOutput>;

impl Member {
    /// Takes an input and says what is to be done.
    ///
    /// It may be called at any time: what is not due yet is not done.
    pub fn step(&mut self, now: Time, input: MemberInput) -> Vec<MemberOutput> {
        let mut out = Out::new();
        if self.mode == Mode::Over {
            return out;
        }
        match input {
            MemberInput::Tick => {}
            MemberInput::Answered { call, sent, result } => self.answered(now, call, sent, result, &mut out),
            MemberInput::Leased { sent, result } => self.granted(now, sent, result, &mut out),
            MemberInput::Renewed { sent, lease, result } => self.renewed(now, sent, lease, result, &mut out),
            MemberInput::Watched(update) => self.watched(now, update, &mut out),
            MemberInput::Word { sent, term, word } => self.heard(now, sent, term, word),
            MemberInput::LeaderDead(term) => {
                if self.leadership.is_of(term) {
                    self.leadership.dead_term = Some(term);
                    self.campaign_soon(now);
                }
            }
            MemberInput::Agent(report) => self.reported(now, report, &mut out),
        }
        self.settle(now, &mut out);
        out
    }

    fn reported(&mut self, now: Time, report: GroupReport, out: &mut Out) {
        match report {
            GroupReport::Started(round) => {
                if self.mode == Mode::Starting(round) {
                    self.mode = Mode::Running(round);
                }
            }
            GroupReport::Ended { round, outcome } => self.ended(round, outcome, out),
            GroupReport::Stopped { master } => self.stopped(now, master),
            GroupReport::Quiesced { master, whole } => self.quiesced(master, whole),
            GroupReport::Finished { round, finished } => self.finished = finished.then_some(round),
            GroupReport::Drain => self.drain(now, out),
            GroupReport::Concluded => {}
        }
    }

    fn answered(&mut self, now: Time, call: Call, sent: Time, result: Result<TxnResult, StoreError>, out: &mut Out) {
        self.calls.retain(|under_way| *under_way != call);
        let result = match result {
            Ok(result) => result,
            Err(error) => return self.failed(now, call, error, out),
        };
        if call != Call::Join {
            self.told = None;
        }
        self.failures = 0;
        self.answered_in = now.since(sent);
        self.store_answered(now);
        if matches!(call, Call::Own | Call::Campaign) {
            self.let_in(now, out);
        }
        match call {
            Call::Join => self.job_read(now, &result, out),
            // Whatever came of it, the job is read next.
            Call::Begin => self.timers.stop(Timer::Retry),
            Call::Own if result.succeeded => {
                self.own.wrote(result.revision);
                self.open_pulse(out);
                self.prove_lease();
                self.read_round_and_leader(now, &result, out);
                self.prove(sent);
            }
            Call::Own | Call::ReadBack => self.own_key_read(now, sent, &result, out),
            Call::Seat => self.seat_read(now, sent, &result, out),
            Call::Campaign if result.succeeded => {
                let value = self.leader_record();
                let won = Versioned { value, created: result.revision, modified: result.revision };
                self.leader_is(now, Some(won), result.revision, out);
            }
            Call::Campaign => {
                let leader = result.results.first().and_then(OpResult::value);
                self.leader_read(now, leader, result.revision, out);
            }
        }
    }

    /// A newcomer waits for its place for as long as the store answers: no leader gives it one without. A node that had
    /// one waits for the store, because the job is its own.
    pub(super) fn store_answered(&mut self, now: Time) {
        self.timers.set(Timer::Patience, now + self.spec.timings.join_timeout);
    }

    /// A call failed: what may be repeated is, after a pause.
    fn failed(&mut self, now: Time, call: Call, error: StoreError, out: &mut Out) {
        if matches!(call, Call::Own) {
            self.own.lost_track();
        }
        match &error {
            StoreError::Lost { .. } => {
                // A node that ends for another reason still asks, but seldom.
                self.timers.set(Timer::Retry, now + LONGEST);
                return self.end(End::StoreLost(error.to_string()), out);
            }
            StoreError::LeaseGone => self.lease_lost(now),
            error if !error.is_transient() && self.joining.is_some() => {
                return self.end(End::StoreLost(error.to_string()), out);
            }
            _ => {}
        }
        let pause = self.trouble(&error, out);
        // mutant a_failed_call_is_repeated_at_once: now + pause => now
        self.timers.set(Timer::Retry, now + pause);
    }

    /// Tells of a call that failed; how long to pause before the next. Pauses grow and differ, so that all the nodes of a
    /// job do not ask a store that has just come back at once.
    pub(super) fn trouble(&mut self, error: &StoreError, out: &mut Out) -> Duration {
        self.refused |= matches!(error, StoreError::Denied { .. });
        let longest = LONGEST.min(self.spec.timings.renewal());
        let pause = if error.is_transient() {
            self.say_once(format!("{error}; trying again"), out);
            (RETRY * (1 << self.failures.min(4))).min(longest)
        } else {
            let line =
                "Workers run on while they may, and no node is replaced; trying again. A password file is read again";
            self.warn_once(format!("{error}. {line}"), out);
            longest
        };
        self.failures += 1;
        pause / 2 + self.jitter(pause / 2)
    }

    /// Warns, unless it has said the same before.
    pub(super) fn warn_once(&mut self, line: String, out: &mut Out) {
        if self.warned.insert(line.clone()) {
            out.push(MemberOutput::Warn(line));
        }
    }

    /// Says a thing that would otherwise be said at every try.
    pub(super) fn say_once(&mut self, line: String, out: &mut Out) {
        if self.told.as_ref() != Some(&line) {
            out.push(Command::Say(line.clone()).into());
            self.told = Some(line);
        }
    }

    fn watched(&mut self, now: Time, update: WatchUpdate, out: &mut Out) {
        match update {
            WatchUpdate::Events(events) => {
                for event in events {
                    self.event(now, event, out);
                }
            }
            WatchUpdate::Snapshot { revision, .. } if self.joining.is_some() => self.round_moved(now, revision),
            // It may mean a deletion, and does not name the key: read both.
            WatchUpdate::Snapshot { .. } => self.own.lost_track(),
            WatchUpdate::Broken(error) => self.end(End::StoreLost(error.to_string()), out),
        }
    }

    fn event(&mut self, now: Time, event: Event, out: &mut Out) {
        if event.key() == self.setup.keys.evicted(&self.id()) {
            // A node that has no workers and waits would not look at its own key otherwise.
            self.own.lost_track();
            return;
        }
        if event.key() == self.setup.keys.leader() {
            let revision = event.revision();
            let leader = match &event {
                Event::Put(kv) => Some(kv),
                Event::Delete { .. } => None,
            };
            self.leader_read(now, leader, revision, out);
        } else if event.key() == self.setup.keys.round() {
            if self.joining.is_some() {
                return self.round_moved(now, event.revision());
            }
            match &event {
                Event::Put(kv) => self.round_read(now, Versioned::parse(kv), out),
                Event::Delete { .. } => self.round_gone(out),
            }
        }
    }

    /// A read's first two results are the round and the leader.
    fn read_round_and_leader(&mut self, now: Time, result: &TxnResult, out: &mut Out) {
        let leader = result.results.get(1).and_then(OpResult::value);
        self.leader_read(now, leader, result.revision, out);
        self.round_of(now, result, out);
    }

    /// A read's first result is the round. An older one than is known, at a revision at which that was there, is of a
    /// store that went back in history.
    pub(super) fn round_of(&mut self, now: Time, result: &TxnResult, out: &mut Out) {
        let Some(round) = result.results.first().and_then(OpResult::value) else { return self.round_gone(out) };
        let known = self.round.as_ref().map_or(Revision::NONE, |known| known.modified);
        // mutant a_node_does_not_notice_a_restore: round.mod_revision < known && known <= result.revision => false
        if round.mod_revision < known && known <= result.revision {
            let lost = StoreError::went_back(&round.key, round.mod_revision, known);
            return self.end(End::StoreLost(lost.to_string()), out);
        }
        self.round_read(now, Versioned::parse(round), out);
    }

    fn own_key_read(&mut self, now: Time, sent: Time, result: &TxnResult, out: &mut Out) {
        let reading = self.own.take(result);
        self.open_pulse(out);
        self.prove_lease();
        self.read_round_and_leader(now, result, out);
        match reading {
            Reading::Here => self.prove(sent),
            Reading::Gone => {}
            Reading::Evicted(tombstone) if tombstone.drained => {
                out.push(Command::Say(tombstone.reason).into());
                self.end(End::Drained, out);
            }
            Reading::Evicted(tombstone) if tombstone.refused => self.end(End::Refused(tombstone.reason), out),
            Reading::Evicted(tombstone) => self.evicted(tombstone.reason, out),
            Reading::Foreign(problem) => self.end(End::StoreLost(problem), out),
        }
    }

    /// At `sent` the round as now known was current, and this node was not evicted.
    pub(super) fn prove(&mut self, sent: Time) {
        self.proofs.round = self.proofs.round.max(sent);
        self.validated = self.round.as_ref().map_or(Revision::NONE, |round| round.modified);
        let timings = &self.spec.timings;
        // A member whose workers have ended may begin to warm up others, which have a fence point at once.
        let newcomer = self.workers == Workers::None && !matches!(self.mode, Mode::Waiting(Some(_)));
        let next = if newcomer { timings.lease_ttl } else { timings.renewal() * 2 };
        self.timers.set(Timer::Prove, self.proofs.round + next);
    }

    fn heard(&mut self, now: Time, sent: Time, term: Revision, word: Word) {
        self.leadership.heard = now;
        let Some(round) = &self.round else { return };
        if !self.leadership.is_of(term) {
            return;
        }
        if word.revision > round.modified {
            // The watch is behind: the store will tell.
            self.timers.set(Timer::Prove, now);
        } else if word.revision == round.modified && word.revision == self.validated {
            // mutant proven_by_the_answer: sent.minus(word.proof_age) => now
            self.proofs.round = self.proofs.round.max(sent.minus(word.proof_age));
            if self.workers != Workers::None {
                self.timers.set(Timer::Prove, self.proofs.round + self.spec.timings.renewal() * 2);
            }
            if let Some(age) = word.all_heard.filter(|_| word.running) {
                self.proofs.held = self.proofs.held.max(sent.minus(age));
            }
        }
    }

    fn ended(&mut self, round: u64, outcome: Outcome, out: &mut Out) {
        if self.workers != Workers::Alive(round) {
            return;
        }
        match (&self.mode, outcome) {
            (Mode::Starting(_) | Mode::Running(_), Outcome::Done) => self.mode = Mode::Done(round),
            (Mode::Starting(_) | Mode::Running(_), Outcome::Failed(failure)) => {
                let told_to_stop = failure.class == FailureClass::Signalled;
                self.mode = Mode::Failed(round, failure);
                if told_to_stop {
                    // The other workers have perhaps got it too, and save. They have time until it is known what
                    // this was: a failure, or a leave of this node, which has a grace of its own.
                    return;
                }
                return self.quiesce(out);
            }
            // It leaves, and was asked to before: this exit is no failure.
            _ => {}
        }
        self.stop(out);
    }

    fn stopped(&mut self, now: Time, master: Option<Endpoint>) {
        self.workers = Workers::None;
        if self.leave == Leave::Asked {
            self.timers.set(Timer::Leave, now + self.spec.timings.margin * 2);
        }
        if master.is_some() {
            self.master = master;
        }
    }

    fn quiesced(&mut self, master: Option<Endpoint>, whole: bool) {
        // Told to stop meanwhile, they will.
        if matches!(self.workers, Workers::Quiescing(_) | Workers::WarmingUp) {
            self.workers = if whole { Workers::Quiesced } else { Workers::Short };
            self.master = master.or(self.master.take());
        }
    }

    /// Lets workers quiesce, which takes a round that forms, or stops them.
    pub(super) fn quiesce(&mut self, out: &mut Out) {
        if let Workers::Alive(round) = self.workers {
            self.workers = Workers::Quiescing(round);
            out.push(Command::Quiesce(self.spec.timings.stop_grace).into());
        }
    }

    /// Stops workers, politely first.
    pub(super) fn stop(&mut self, out: &mut Out) {
        let round = match self.workers {
            Workers::Alive(round) | Workers::Quiescing(round) => Some(round),
            Workers::Quiesced | Workers::Short | Workers::WarmingUp => None,
            Workers::None | Workers::Stopping(_) | Workers::Dismissed | Workers::Killed => return,
        };
        self.workers = Workers::Stopping(round);
        let timings = &self.spec.timings;
        let paused = self.round.as_ref().is_some_and(|round| round.value.paused);
        let grace = if paused || self.leave != Leave::No { timings.drain_grace } else { timings.stop_grace };
        out.push(Command::Stop(grace).into());
    }

    /// Kills workers at once.
    pub(super) fn kill(&mut self, out: &mut Out) {
        if !matches!(self.workers, Workers::None | Workers::Killed) {
            self.workers = Workers::Killed;
            out.push(Command::Kill.into());
        }
    }

    pub(super) fn call(&mut self, call: Call, txn: Txn, out: &mut Out) {
        if !self.calls.contains(&call) {
            self.calls.push(call);
            out.push(MemberOutput::Txn(call, txn));
        }
    }

    /// Does what is due.
    fn settle(&mut self, now: Time, out: &mut Out) {
        self.fence_check(now, out);
        self.leave_when_due(now, out);
        self.return_when_warm();
        if self.is_due(Timer::Join, now) || self.is_due(Timer::Patience, now) {
            self.give_up_joining(out);
        }
        // This comes last, since each of the steps above may end it.
        if self.is_finished() {
            return self.finish(out);
        }
        if !self.has_lost_its_store() {
            self.ask_for_what_is_due(now, out);
        }
        let fence = self.fence_point();
        if fence != self.fence {
            self.fence = fence;
            // The fence comes before a start in the same batch.
            out.insert(0, Command::Fence(fence).into());
        }
    }

    fn ask_for_what_is_due(&mut self, now: Time, out: &mut Out) {
        if self.timers.get(Timer::Retry).is_none_or(|at| now >= at) {
            self.timers.stop(Timer::Retry);
            if self.mode == Mode::Joining {
                self.join(now, out);
                self.campaign(now, out);
            } else if self.joining.is_none() {
                self.keep_own_key(now, out);
                self.look_up_seat(out);
                self.campaign(now, out);
            }
        }
        self.keep_lease(now, out);
    }

    /// Whether it only ends its workers, and asks the store for nothing more: every call would fail as the last one did.
    pub(super) fn has_lost_its_store(&self) -> bool {
        matches!(self.mode, Mode::Ending(End::StoreLost(_)))
    }

    fn fence_check(&mut self, now: Time, out: &mut Out) {
        if !self.is_due(Timer::Fence, now) {
            return;
        }
        self.kill(out);
        if let Mode::Starting(round) | Mode::Running(round) = self.mode {
            let message = "its workers were killed at the fence point: neither store nor leader was heard in time";
            let failure = Failure::new(FailureClass::Lost, message);
            out.push(Command::Say(failure.message.clone()).into());
            self.mode = Mode::Failed(round, failure);
        }
    }

    /// What the own key should say; `None`: nothing new, while workers are being stopped.
    pub(super) fn wanted(&self) -> Option<NodeRecord> {
        let idle = self.workers == Workers::None;
        let at_rest = self.workers.are_at_rest();
        let (phase, round, failure) = match &self.mode {
            // mutant waiting_too_soon: at_rest => true
            Mode::Waiting(round) if at_rest => (Phase::Waiting, *round, None),
            // What it said to get its place remains until its workers run: the leader knows whom it gave one.
            Mode::Starting(round) => (Phase::Waiting, (!self.own.is_newcomers()).then_some(*round), None),
            Mode::Running(round) => (Phase::Running, Some(*round), None),
            Mode::Done(round) => (Phase::Done, Some(*round), None),
            Mode::Failed(round, failure) => (Phase::Failed, Some(*round), Some(failure.clone())),
            Mode::Leaving(_, Some(forming)) if idle => (Phase::Stopped, Some(*forming), None),
            Mode::WarmingUp(round) => (Phase::Stopped, Some(*round), None),
            Mode::Leaving(round, None) => (Phase::Draining, Some(*round), None),
            _ => return None,
        };
        let master = self.master.clone().filter(|_| phase == Phase::Waiting);
        let lacks_workers = at_rest && phase == Phase::Waiting && round.is_some() && self.lacks_workers();
        let replicas = self.spec.nodes_per_replica > 1;
        let stays = replicas && phase == Phase::Waiting && round.is_some() && !matches!(self.mode, Mode::Starting(_));
        let keeps_workers = stays && self.workers == Workers::Quiesced;
        let finished = phase == Phase::Running && round == self.finished;
        let record = self.setup.record.clone();
        Some(NodeRecord { phase, round, failure, master, lacks_workers, keeps_workers, finished, ..record })
    }

    fn keep_own_key(&mut self, now: Time, out: &mut Out) {
        let Some(lease) = self.lease.id() else { return };
        if self.calls.contains(&Call::Own) || self.calls.contains(&Call::ReadBack) {
            return;
        }
        if self.own.is_unsure() {
            let read = self.own.read();
            return self.call(Call::ReadBack, read, out);
        }
        let due = match self.wanted() {
            Some(record) => self.own.write(&record, lease),
            None => None,
        };
        let due = due.or_else(|| {
            let overdue = self.workers != Workers::None && self.is_due(Timer::Prove, now);
            overdue.then(|| self.own.touch()).flatten()
        });
        if let Some(txn) = due {
            self.call(Call::Own, txn, out);
        } else if self.is_due(Timer::Prove, now) {
            self.timers.set(Timer::Prove, now + RETRY);
            if self.workers != Workers::None && self.own.created().is_none() {
                // Its key went while workers are being stopped: an eviction, or only the lease.
                let read = self.own.read();
                self.call(Call::ReadBack, read, out);
            } else if self.is_idle() {
                self.timers.set(Timer::Prove, now + self.spec.timings.lease_ttl);
                let read = self.own.read();
                self.call(Call::ReadBack, read, out);
            }
        }
    }

    /// Whether it waits without workers and has nothing to write: only a read now and then tells it that it was evicted
    /// or refused, or that a restored store has not what it said last.
    pub(super) fn is_idle(&self) -> bool {
        let waits = matches!(self.mode, Mode::Waiting(_) | Mode::Done(_) | Mode::Failed(..));
        self.workers == Workers::None && waits && self.own.created().is_some()
    }
}
