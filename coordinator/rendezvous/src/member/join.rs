//! Joining a job: reading it, agreeing on its spec, beginning it or its next generation.

use std::time::Duration;

use super::step::{LONGEST, Out};
use super::timers::Timer;
use super::{Call, Command, End, Member, MemberOutput, Mode};
use crate::job::{JobProtocol, JobSecret, RoundRecord, RoundState, Sealed, Versioned, to_json};
use crate::kv::{Guard, KeyValue, Op, OpResult, Revision, Scope, Txn, TxnResult};
use crate::time::Time;

/// Pause between looks at a job that cannot be joined yet.
const AGAIN: Duration = Duration::from_millis(500);
/// A store is slow that takes this part of `lease_ttl` for an answer.
const SLOW: u32 = 10;

/// What a node knows of a job that it has not joined yet.
#[derive(Debug, Clone, Default)]
pub(super) struct Joining {
    /// The round at which a disagreeing newcomer found the job without nodes, and when.
    deserted: Option<(Revision, Time)>,
    /// The job has failed, and something was left under `nodes/`: until that is gone this node follows the round and the
    /// leader, and may lead.
    pub(super) leftovers: bool,
    /// The newest write of the round that its watch told of.
    round_news: Revision,
}

impl Member {
    pub(super) fn join(&mut self, now: Time, out: &mut Out) {
        if self.timers.get(Timer::Join).is_none() {
            self.timers.set(Timer::Join, now + self.setup.spec.timings.join_timeout);
        }
        if self.calls.contains(&Call::Begin) || self.timers.get(Timer::Look).is_some_and(|at| now < at) {
            return;
        }
        self.timers.stop(Timer::Look);
        let keys = &self.setup.keys;
        let read = [
            Op::get(keys.spec()),
            Op::get(keys.round()),
            Op::get(keys.desired()),
            Op::get(keys.leader()),
            Op::count(keys.nodes()),
            Op::get(keys.secret()),
        ];
        self.call(Call::Join, Txn::of(read), out);
    }

    pub(super) fn give_up_joining(&mut self, out: &mut Out) {
        let told = self.told.take().unwrap_or_else(|| "the job could not be joined".to_owned());
        let limit = self.spec.timings.join_timeout;
        self.end(End::StoreLost(format!("{told}: gave up after join_timeout ({limit:?})")), out);
    }

    pub(super) fn job_read(&mut self, now: Time, result: &TxnResult, out: &mut Out) {
        let value = |at: usize| result.results.get(at).and_then(OpResult::value);
        let deserted = matches!(result.results.get(4), Some(OpResult::Count(0)));
        let ours = self.setup.spec.own_release();
        if let Some(refusal) = value(0).and_then(JobProtocol::of).and_then(|job| job.refuses(&ours)) {
            return self.job_of_another_protocol(refusal, value(1), deserted, out);
        }
        let read = (|| {
            let spec = value(0).map(Versioned::parse_spec).transpose()?;
            let round = value(1).map(Versioned::<RoundRecord>::parse).transpose()?;
            Ok::<_, String>((spec, round))
        })();
        let (spec, round) = match read {
            Ok(read) => read,
            Err(problem) => return self.end(End::Refused(problem), out),
        };
        let as_read = spec.as_ref().map_or(Revision::NONE, |spec| spec.modified);
        let Some((spec, round)) = spec.zip(round) else {
            return self.begin_job(as_read, out);
        };
        match round.value.state {
            RoundState::Succeeded => return self.end(End::Succeeded, out),
            RoundState::Closed => return self.end(End::Closed, out),
            // mutant generation_at_once: round.value.sealed => None
            RoundState::Failed if deserted => return self.begin_generation(&round, round.value.sealed, out),
            RoundState::Failed => return self.wait_for_leavers(now, result, value(3), out),
            _ => {}
        }
        if let Some(differs) = self.setup.spec.disagreement(&spec.value) {
            if deserted {
                return self.wait_for_deserted(now, &round, &differs.to_string(), out);
            }
            // What it says concerns only the leader, which warns of a record that no one can read. A node that speaks
            // TLS and one that does not are of no use to each other, whatever an operator has changed.
            if value(2).is_none() || self.setup.spec.peer_tls != spec.value.peer_tls {
                let why = format!("{differs}: start every agent of a job with the same flags");
                return self.end(End::Refused(why), out);
            }
            let line = format!("{differs}; an operator has changed the job, so its own values hold");
            out.push(Command::Say(line).into());
        }
        self.spec = spec.value;
        let follows = self.joining.take().is_some_and(|joining| joining.leftovers);
        self.mode = Mode::Waiting(None);
        if self.lease.id().is_none() {
            // Of those that a slow store keeps waiting, not all ask again at once.
            let slow = self.answered_in * SLOW >= self.spec.timings.lease_ttl;
            let pause = if slow { self.jitter(self.answered_in.min(LONGEST)) } else { Duration::ZERO };
            self.timers.set(Timer::Lease, now + pause);
        }
        self.told = None;
        let secret = secret_of(value(5), out);
        self.setup.record.introduces &= secret.is_some();
        self.secret.clone_from(&secret);
        out.push(MemberOutput::Secret(secret));
        let from = result.revision.next();
        if !follows {
            self.follow(from, out);
        }
        out.push(MemberOutput::Watch(Scope::Key(self.setup.keys.evicted(&self.id())), from));
        self.joined_at(now, result, round, value(3), out);
    }

    /// A job whose protocol this node does not speak. While it lives, nothing is touched: its records may mean what this
    /// node cannot know. Where it has ended, its result is known; and after a failure, once no one is left, the
    /// job begins again, by a protocol of this node's.
    fn job_of_another_protocol(&mut self, refusal: String, round: Option<&KeyValue>, deserted: bool, out: &mut Out) {
        let round = round.and_then(|round| Versioned::<RoundRecord>::parse(round).ok());
        match round.as_ref().map(|round| (round.value.state, round)) {
            Some((RoundState::Succeeded, _)) => self.end(End::Succeeded, out),
            Some((RoundState::Closed, _)) => self.end(End::Closed, out),
            Some((RoundState::Failed, round)) if deserted => self.begin_generation(round, round.value.sealed, out),
            _ => self.end(End::Refused(refusal), out),
        }
    }

    fn joined_at(
        &mut self,
        now: Time,
        result: &TxnResult,
        round: Versioned<RoundRecord>,
        leader: Option<&KeyValue>,
        out: &mut Out,
    ) {
        // One that it followed already.
        self.open_pulse(out);
        self.leader_read(now, leader, result.revision, out);
        if self.leadership.leader.is_none() {
            // No one's end is being raced for.
            self.timers.set(Timer::Campaign, now);
        }
        self.round_read(now, Ok(round), out);
    }

    /// Watches the round and the leader.
    fn follow(&self, from: Revision, out: &mut Out) {
        out.push(MemberOutput::Watch(Scope::Key(self.setup.keys.round()), from));
        out.push(MemberOutput::Watch(Scope::Key(self.setup.keys.leader()), from));
    }

    /// Waits until the last agents of a failed job have left.
    ///
    /// One of those that wait leads meanwhile. As the leader it deletes what done nodes left behind: no lease ends those
    /// keys, and a leader that died right after it wrote the result has not deleted them. And it alone looks often
    /// whether all are gone. The others see it by their watches.
    fn wait_for_leavers(&mut self, now: Time, result: &TxnResult, leader: Option<&KeyValue>, out: &mut Out) {
        let Some(joining) = &mut self.joining else { return };
        let overtaken = result.revision < joining.round_news;
        if !std::mem::replace(&mut joining.leftovers, true) {
            self.timers.set(Timer::Lease, now);
            self.follow(result.revision.next(), out);
        }
        self.leader_read(now, leader, result.revision, out);
        self.say_once("the job has failed; waiting for its last agents to leave before it starts again".into(), out);
        let pause = if self.leadership.own_term.is_some() { AGAIN } else { self.setup.spec.timings.renewal() };
        self.timers.set(Timer::Look, if overtaken { now } else { now + pause });
    }

    /// The round was written while this node waits to join: it reads the job again.
    pub(super) fn round_moved(&mut self, now: Time, at: Revision) {
        if let Some(joining) = &mut self.joining {
            joining.round_news = joining.round_news.max(at);
            self.timers.set(Timer::Look, now);
        }
    }

    /// The first round of an id. `spec` is the revision of the spec that an earlier job left in the store. Without a
    /// round, that spec says nothing.
    fn begin_job(&mut self, spec: Revision, out: &mut Out) {
        let keys = &self.setup.keys;
        let round = RoundRecord::forming(1, 1, "the job begins");
        let txn = Txn::of([
            Op::put(keys.spec(), to_json(&self.setup.spec)),
            Op::put(keys.secret(), to_json(&self.setup.secret)),
            Op::put(keys.round(), to_json(&round)),
        ])
        .guarded([Guard::modified(keys.spec(), spec), Guard::absent(keys.round())]);
        self.call(Call::Begin, txn, out);
    }

    /// After a failure, or where a whole cluster died, the job's id begins again: numbers continue, restarts start at
    /// zero, the checkpoint stays.
    ///
    /// `sealed` is the round whose members may still be stopping, though their keys are gone: the leader waits for them
    /// as before any other round.
    fn begin_generation(&mut self, last: &Versioned<RoundRecord>, sealed: Option<Sealed>, out: &mut Out) {
        let keys = &self.setup.keys;
        let (number, generation) = (last.value.number + 1, last.value.generation + 1);
        let round = RoundRecord::forming(number, generation, RoundRecord::BEGINS_AGAIN);
        let round = RoundRecord { sealed, begins_generation: true, ..round };
        let txn = Txn::of([
            Op::put(keys.spec(), to_json(&self.setup.spec)),
            Op::put(keys.secret(), to_json(&self.setup.secret)),
            Op::put(keys.round(), to_json(&round)),
            Op::delete(keys.desired()),
            Op::delete_prefix(keys.evictions()),
        ])
        .guarded([Guard::modified(keys.round(), last.modified), Guard::empty(keys.nodes())]);
        self.call(Call::Begin, txn, out);
    }

    /// A job of other flags whose nodes are all gone: its last members may still be at work, cut off from the store,
    /// until the takeover delay is over.
    fn wait_for_deserted(&mut self, now: Time, round: &Versioned<RoundRecord>, differs: &str, out: &mut Out) {
        let Some(joining) = &mut self.joining else { return };
        let (revision, since) = *joining.deserted.get_or_insert((round.modified, now));
        if revision != round.modified {
            joining.deserted = Some((round.modified, now));
        } else if now.since(since) >= self.setup.spec.timings.takeover_delay {
            return self.begin_generation(round, None, out);
        }
        let delay = self.setup.spec.timings.takeover_delay;
        self.say_once(
            format!(
                "{differs}, and its nodes are gone: it starts again with the flags given here once takeover_delay \
                 ({delay:?}) is over"
            ),
            out,
        );
        self.timers.set(Timer::Look, now + AGAIN);
    }
}

/// Without the secret nothing that operators ask of agents is answered, and pulses prove nothing: no reason to stay away.
fn secret_of(kv: Option<&KeyValue>, out: &mut Out) -> Option<JobSecret> {
    let parsed = kv.map(Versioned::<JobSecret>::parse).transpose();
    let secret = parsed.unwrap_or_else(|problem| {
        out.push(MemberOutput::Warn(problem));
        None
    });
    secret.map(|secret| secret.value)
}
