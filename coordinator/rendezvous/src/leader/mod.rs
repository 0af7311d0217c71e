//! The leader as a machine: keeps its [`View`] up to date, carries out [`decide`]'s verdicts as guarded transactions,
//! one at a time.

mod admission;
mod load;
mod messages;
mod state;
#[cfg(test)]
mod tests;
mod transactions;

use std::collections::BTreeMap;
use std::time::Duration;

use self::state::{Doing, Known, News, Read, Stage, Told};
use super::decide::{Decision, Verdict, decide};
use super::roster::Contact;
use super::view::{Former, View};
use crate::job::{JobSecret, Keys, NodeId, RoundState, Spec};
use crate::kv::{Guard, Op, Revision, StoreError, Txn, TxnResult};
use crate::time::Time;

pub use self::admission::Demand;
pub use self::messages::{LeaderInput, LeaderOutput, Word};

/// Pause before a transaction is tried again after the store failed.
const RETRY: Duration = Duration::from_millis(200);

/// Writes in a row whose guards may fail before there is a pause.
const MOST_VAIN: u32 = 3;

/// Writes in a row that the store may refuse for good, before the leader lets another one try.
const MOST_REFUSED: u32 = 3;

/// A term of leadership.
#[derive(Debug, Clone)]
pub struct Leader {
    node: NodeId,
    keys: Keys,
    term: Revision,
    /// Added to its clock, gives milliseconds since the Unix epoch: for the history that people read.
    epoch_ms: u64,
    elected: Time,
    /// When it last had a turn, and since when there was no pause between turns as long as a lease.
    looked: Time,
    awake: Time,
    former: Option<Former>,
    /// The round's stage as the leading node knows it, where it saw that begin, and when.
    seen: Option<((u64, RoundState, bool), Time)>,
    /// The job's spec as the leading node knows it, in case its record is damaged.
    known_spec: Option<Spec>,
    /// What members prove that they know.
    secret: Option<JobSecret>,
    stage: Stage,
    known: Known,
    news: News,
    read: Read,
    told: Told,
    /// When the last transaction was sent whose guards held.
    proof: Option<Time>,
    /// Writes in a row whose guards did not hold.
    vain: u32,
    /// Writes in a row that the store refused for good.
    refused: u32,
    /// Something came since the last decision that may change it.
    undecided: bool,
    /// Members that did not open a stream to this leader were dialled.
    called: bool,
}

impl Leader {
    /// A leader whose `leader` key was written at `term`.
    pub fn new(node: NodeId, keys: Keys, term: Revision, now: Time, epoch_ms: u64) -> Leader {
        Leader {
            node,
            keys,
            term,
            epoch_ms,
            elected: now,
            looked: now,
            awake: now,
            former: None,
            seen: None,
            known_spec: None,
            secret: None,
            stage: Stage::Idle { wake: None },
            known: Known::Contacts(BTreeMap::new()),
            news: News::default(),
            read: Read::default(),
            told: Told::default(),
            proof: None,
            vain: 0,
            refused: 0,
            undecided: false,
            called: false,
        }
    }

    /// A leader that knows the job's spec. Where the record is lost, it writes it again.
    #[must_use]
    pub fn knowing(self, spec: Spec) -> Leader {
        Leader { known_spec: Some(spec), ..self }
    }

    /// A leader that knows the job's secret, in case its record is lost.
    #[must_use]
    pub fn trusting(self, secret: Option<JobSecret>) -> Leader {
        Leader { secret, ..self }
    }

    /// A leader whose node saw the round come into its stage.
    #[must_use]
    pub fn seeing(self, seen: Option<((u64, RoundState, bool), Time)>) -> Leader {
        Leader { seen, ..self }
    }

    /// A leader that knows whom it follows.
    #[must_use]
    pub fn after(mut self, former: Option<Former>) -> Leader {
        if let Some(former) = former.as_ref().filter(|former| former.dead) {
            self.contact(former.node.clone(), |contact| contact.dead = true);
        }
        Leader { former, ..self }
    }

    /// The node that leads, or the coordinator's replica.
    pub fn node(&self) -> &NodeId {
        &self.node
    }

    /// The term: the mod revision of the `leader` key.
    pub fn term(&self) -> Revision {
        self.term
    }

    /// What it knows, once loaded.
    pub fn view(&self) -> Option<&View> {
        self.known.view()
    }

    /// Whether a transaction is under way.
    pub fn is_busy(&self) -> bool {
        matches!(self.stage, Stage::Busy(_))
    }

    /// Whether its term is over: another leads.
    pub fn is_over(&self) -> bool {
        matches!(self.stage, Stage::Over)
    }

    /// When it wants a [`LeaderInput::Tick`] at the latest.
    pub fn deadline(&self) -> Option<Time> {
        match self.stage {
            Stage::Busy(_) | Stage::Over => None,
            Stage::Pausing { until } => Some(until),
            Stage::Idle { wake } => wake.into_iter().chain(self.known.view().map(|view| self.proof_due(view))).min(),
        }
    }

    /// Takes an input in, decides, and says what is to be done.
    pub fn step(&mut self, now: Time, input: LeaderInput) -> Vec<LeaderOutput> {
        let mut out = self.take(now, input);
        out.extend(self.act(now));
        out
    }

    /// Takes an input in, and says what is to be done at once. Decisions wait for [`Leader::act`]: one is enough for all
    /// that has come.
    pub fn take(&mut self, now: Time, input: LeaderInput) -> Vec<LeaderOutput> {
        let mut out = Vec::new();
        if !self.is_over() {
            self.undecided |= self.take_in(now, input, &mut out);
        }
        out
    }

    /// Decides, if something has come or it is time, and says what is to be done.
    pub fn act(&mut self, now: Time) -> Vec<LeaderOutput> {
        let mut out = Vec::new();
        self.look(now);
        let due = self.undecided || self.deadline().is_some_and(|at| now >= at);
        if due && !self.is_over() {
            self.undecided = false;
            self.decide(now, &mut out);
        }
        out
    }

    /// A process that was stopped, as with its whole machine, has heard of no member meanwhile: that says nothing of them.
    fn look(&mut self, now: Time) {
        let slept = self.known.view().is_some_and(|view| now.since(self.looked) >= view.spec.timings.lease_ttl);
        self.looked = now;
        if slept {
            self.awake = now;
            self.known.view_mut().into_iter().for_each(|view| view.awake = now);
        }
    }

    /// Takes an input in; whether something may follow from it. Nothing follows from a beat that answers no new probe:
    /// it only puts off what silence would lead to.
    fn take_in(&mut self, now: Time, input: LeaderInput, out: &mut Vec<LeaderOutput>) -> bool {
        match input {
            LeaderInput::Tick => {}
            LeaderInput::Answered { sent, result } => self.answered(now, sent, result, out),
            LeaderInput::Watched(update) => self.watched(now, update, out),
            LeaderInput::Opened(node) => {
                let asked = self.asked();
                let mut answered = 0;
                self.contact(node, |contact| {
                    contact.opened = Some(now);
                    contact.heard = Some(now);
                    answered = contact.probe;
                });
                if answered < asked {
                    // A probe sent before its stream was there did not reach it.
                    out.push(LeaderOutput::Probe(asked));
                }
            }
            LeaderInput::Heard { node, probe, echo } => {
                // No one has seen what was not sent yet.
                let probe = Some(probe).filter(|probe| *probe <= self.asked()).unwrap_or(0);
                let echo = echo.filter(|echo| *echo <= now);
                return match self.known.view_mut() {
                    Some(view) => view.roster.heard(&node, now, probe, echo),
                    None => {
                        self.contact(node, |contact| {
                            contact.heard = Some(now);
                            contact.echoed = contact.echoed.max(echo);
                        });
                        false
                    }
                };
            }
            // mutant a_broken_stream_says_nothing: self.suspect(&node, out) => {}
            LeaderInput::Closed(node) => self.suspect(&node, out),
            LeaderInput::Dead(node) => self.contact(node, |contact| contact.dead = true),
        }
        true
    }

    /// What it tells a node; nothing before it has loaded the job.
    pub fn word(&self, now: Time, node: &NodeId) -> Option<Word> {
        let view = self.known.view()?;
        // A member whose key was deleted gets no proof, so it looks at its key itself, and writes it again.
        let lacks_key = view.roster.member(node).is_some() && view.roster.node(node).is_none();
        let proof = if lacks_key { Time::ZERO } else { self.proof? };
        let round = &view.round.value;
        // The time a beat came in does not count: it may have been long under way, and its sender may follow a
        // successor by now.
        let oldest = view.roster.all_echoed();
        let all_heard = oldest
            .map(|oldest| oldest.map_or(Duration::ZERO, |echoed| now.since(echoed)))
            // Members whose rank keys are lost may be silent.
            .filter(|_| view.damage().is_none());
        Some(Word {
            round: round.number,
            revision: view.round.modified,
            running: round.state == RoundState::Running,
            // mutant word_without_age: now.since(proof) => Duration::ZERO
            proof_age: now.since(proof),
            all_heard,
        })
    }

    fn contact(&mut self, node: NodeId, change: impl FnOnce(&mut Contact)) {
        match &mut self.known {
            Known::Job(view) => view.roster.change_contact(&node, change),
            Known::Contacts(contacts) => change(contacts.entry(node).or_default()),
        }
    }

    /// The newest probe.
    fn asked(&self) -> u64 {
        self.known.view().and_then(|view| view.probe).map_or(0, |(number, _)| number)
    }

    /// Asks for the truth about a node that may have died.
    fn suspect(&self, node: &NodeId, out: &mut Vec<LeaderOutput>) {
        let Some(view) = self.known.view() else { return };
        let peer = match (view.roster.node(node), view.roster.member(node)) {
            (Some(present), _) => &present.record.peer,
            (None, Some(member)) => &member.rank.peer,
            (None, None) => return,
        };
        if *node != self.node && !view.confirmed_dead(node) {
            out.push(LeaderOutput::Suspect(node.clone(), peer.clone()));
        }
    }

    fn proof_due(&self, view: &View) -> Time {
        self.proof.unwrap_or(self.elected) + view.spec.timings.renewal()
    }

    /// Starts the next operation if none is under way.
    fn decide(&mut self, now: Time, out: &mut Vec<LeaderOutput>) {
        match self.stage {
            Stage::Busy(_) | Stage::Over => return,
            Stage::Pausing { until } if now < until => return,
            Stage::Pausing { .. } | Stage::Idle { .. } => self.stage = Stage::Idle { wake: None },
        }
        // mutant a_refused_leader_stays: self.refused >= MOST_REFUSED => false
        if self.refused >= MOST_REFUSED {
            self.refused = 0;
            let leader = self.keys.leader();
            let resign = Txn::of([Op::delete(&leader)]).guarded([Guard::modified(&leader, self.term)]);
            return self.start(Doing::Resign, resign, out);
        }
        let read = self.known.view().filter(|view| self.news.fresh && view.round.modified >= self.news.of_round);
        let Some(view) = read else {
            return self.start(Doing::Load, self.load_txn(), out);
        };
        if let Some(txn) = self.read.mend.take() {
            return self.start(Doing::Mend, txn, out);
        }
        // A member that has not come to a new leader by then may have died with the old one. No stream will tell of
        // that.
        let come_by = self.elected + view.spec.timings.beat() * 2;
        if !self.called && now >= come_by {
            self.called = true;
            self.suspect_unheard(out);
        }
        // Rank keys are not watched: only a read shows that they were restored.
        if now >= self.proof_due(view) && view.damage().is_some() {
            return self.start(Doing::Load, self.load_txn(), out);
        }
        let Decision { verdict, reason, again } = decide(now, view);
        let again = again.into_iter().chain((!self.called).then_some(come_by)).min();
        let proof_due = now >= self.proof_due(view);
        let over = view.round.value.state.is_final();
        let sweep = over.then(|| self.sweep_txn(view)).flatten();
        // Every agent tells the job's end itself.
        if reason != self.told.reason && !over {
            let say = if view.damage().is_some() { LeaderOutput::Warn } else { LeaderOutput::Say };
            out.push(say(reason.clone()));
            self.told.reason.clone_from(&reason);
        }
        let next = match verdict {
            Verdict::Wait => {
                let prove = || (Doing::Prove, self.guarded(vec![Op::get(self.keys.spec())]));
                sweep.or_else(|| proof_due.then(prove))
            }
            Verdict::Probe { report } => {
                let number = view.probe.map_or(1, |(number, _)| number + 1);
                if let Some(view) = self.known.view_mut() {
                    view.probe = Some((number, report));
                }
                out.push(LeaderOutput::Probe(number));
                None
            }
            Verdict::Form(form) => Some(self.form_txn(now, view, form, &reason)),
            Verdict::Seal(seats) => Some(self.seal_txn(now, view, seats, &reason)),
            Verdict::Finish { state, cause } => Some(self.finish_txn(now, view, state, cause, &reason)),
            Verdict::Refuse(evictions) => Some(self.refuse_txn(view, &evictions)),
            Verdict::Prune(stale) => Some(self.prune_txn(stale)),
        };
        match next {
            Some((doing, txn)) => self.start(doing, txn, out),
            None => self.stage = Stage::Idle { wake: again },
        }
    }

    fn start(&mut self, doing: Doing, txn: Txn, out: &mut Vec<LeaderOutput>) {
        self.stage = Stage::Busy(Box::new(doing));
        out.push(LeaderOutput::Txn(txn));
    }

    /// Everything a leader writes is guarded by its term and by the round as it last read it.
    fn guarded(&self, then: Vec<Op>) -> Txn {
        let round = self.known.view().map_or(Revision::NONE, |view| view.round.modified);
        Txn::of(then)
            .guarded([Guard::modified(self.keys.leader(), self.term), Guard::modified(self.keys.round(), round)])
    }

    fn answered(&mut self, now: Time, sent: Time, result: Result<TxnResult, StoreError>, out: &mut Vec<LeaderOutput>) {
        let doing = match std::mem::replace(&mut self.stage, Stage::Idle { wake: None }) {
            Stage::Busy(doing) => *doing,
            other => {
                self.stage = other;
                return;
            }
        };
        let sealing = matches!(doing, Doing::Seal { .. });
        match result {
            Ok(result) if result.succeeded => {
                self.proof = Some(self.proof.map_or(sent, |old| old.max(sent)));
                if !matches!(doing, Doing::Load) {
                    (self.vain, self.refused) = (0, 0);
                }
                self.done(now, doing, &result, out);
            }
            Ok(_) if matches!(doing, Doing::Load | Doing::Resign) => {
                self.stage = Stage::Over;
                out.push(LeaderOutput::Deposed);
            }
            Ok(_) => {
                // Others may write again and again. What stays in the way must not be tried without a pause.
                self.vain += 1;
                if self.vain > MOST_VAIN {
                    self.stage = Stage::Pausing { until: now + RETRY };
                }
                self.reload(sealing);
            }
            Err(error) => {
                let mut pause = RETRY;
                if !error.is_transient() {
                    // Only a person can help.
                    pause = RETRY * 10;
                    // Or another leader: what this one asks for is wrong, or the store does not let this node.
                    let refuses = matches!(error, StoreError::Invalid(_) | StoreError::Denied { .. });
                    self.refused += u32::from(refuses && !matches!(doing, Doing::Load));
                    self.warn(format!("cannot lead the job, so no failure is handled: {error}"), out);
                }
                // mutant a_failed_write_is_repeated_at_once: now + pause => now
                self.stage = Stage::Pausing { until: now + pause };
                self.reload(sealing);
            }
        }
    }

    /// Warns, unless it has said the same before.
    fn warn(&mut self, line: String, out: &mut Vec<LeaderOutput>) {
        if self.told.warnings.insert(line.clone()) {
            out.push(LeaderOutput::Warn(line));
        }
    }

    /// Has everything read again: a guard did not hold, or an outcome is unknown. A plan that was begun to be sealed is
    /// given up, since some of its rank keys may be there.
    fn reload(&mut self, sealing: bool) {
        if let Some(view) = self.known.view_mut() {
            // mutant plan_recomposed: !sealing => true
            view.planned_here &= !sealing;
        }
        self.news.fresh = false;
    }
}
