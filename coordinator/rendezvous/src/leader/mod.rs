//! The leader as a machine: keeps its [`View`] up to date, carries out [`decide`]'s verdicts as guarded transactions,
//! one at a time.

mod admission;
mod load;
#[cfg(test)]
mod tests;
mod transactions;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use super::decide::{Decision, Eviction, Stale, Verdict, decide};
use super::roster::Contact;
use super::seats::Seat;
use super::view::Former;
use super::view::View;
use crate::job::{Checkpoint, Endpoint, JobSecret, Keys, NodeId, RoundRecord, RoundState, Spec};
use crate::kv::{Event, Guard, Op, Revision, Scope, StoreError, Txn, TxnResult, WatchUpdate};
use crate::time::Time;

pub use self::admission::Demand;

/// The inputs of a leader.
#[derive(Debug, Clone)]
pub enum LeaderInput {
    /// Its term begins, or time has passed.
    Tick,
    /// The answer to its transaction.
    Answered {
        /// When the transaction was sent.
        sent: Time,
        /// The answer.
        result: Result<TxnResult, StoreError>,
    },
    /// News from a watch that it asked for.
    Watched(WatchUpdate),
    /// A member opened its pulse stream.
    Opened(NodeId),
    /// A member was heard.
    Heard {
        /// Which.
        node: NodeId,
        /// The newest probe that it has seen.
        probe: u64,
        /// When the newest word was sent that it has seen.
        echo: Option<Time>,
    },
    /// A member's stream ended. Only a hint.
    Closed(NodeId),
    /// A node's death is confirmed.
    Dead(NodeId),
}

/// What a leader wants done.
#[derive(Debug, Clone, PartialEq)]
pub enum LeaderOutput {
    /// Run this transaction and answer with [`LeaderInput::Answered`]. There is never more than one under way.
    Txn(Txn),
    /// Watch this and report with [`LeaderInput::Watched`].
    Watch(Scope, Revision),
    /// Ask every member for a pulse that carries this number.
    Probe(u64),
    /// Find out whether this node is dead: its stream ended, or its key is gone. Report only a confirmed death.
    Suspect(NodeId, Endpoint),
    /// The term is over: another leads. Nothing follows.
    Deposed,
    /// The term is over: for this reason the store tells it nothing more. Nothing follows. Anyone who holds the
    /// `leader` key must let go of it, or no one leads.
    Broken(StoreError),
    /// A line for the log.
    Say(String),
    /// A line for the log that asks somebody to do something.
    Warn(String),
}

/// The leader's word to a member, as its pulse carries it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Word {
    /// The current round's number.
    pub round: u64,
    /// The mod revision of its record.
    pub revision: Revision,
    /// Whether it runs.
    pub running: bool,
    /// How long ago the leader last proved that it leads and that this is the round.
    pub proof_age: Duration,
    /// Every member of the round was heard at most this long ago.
    pub all_heard: Option<Duration>,
}

/// Operation under way.
#[derive(Debug, Clone)]
enum Doing {
    /// Reading the whole job.
    Load,
    /// Evicting, then writing the round as forming; `rest` holds what follows, the record last.
    Form { record: RoundRecord, evict: Vec<Eviction>, quick: bool, rest: VecDeque<Txn> },
    /// Writing rank keys; `rest` holds what follows, the `running` record last.
    Seal { record: RoundRecord, seats: Vec<Seat>, rest: VecDeque<Txn> },
    /// Writing the result, and deleting done nodes' keys.
    Finish { record: RoundRecord, swept: Vec<NodeId> },
    /// Turning nodes away.
    Refuse { nodes: Vec<NodeId> },
    /// Deleting keys that no one needs any more.
    Prune(Stale),
    /// Deleting what done nodes left behind a final state.
    Sweep { swept: Vec<NodeId> },
    /// Proving that it still leads.
    Prove,
    /// Putting a damaged record right.
    Mend,
}

/// Pause before a transaction is tried again after the store failed.
const RETRY: Duration = Duration::from_millis(200);

/// Writes in a row whose guards may fail before there is a pause.
const MOST_VAIN: u32 = 3;

/// A term of leadership.
#[derive(Debug, Clone)]
pub struct Leader {
    node: NodeId,
    keys: Keys,
    term: Revision,
    /// Added to its clock, gives milliseconds since the Unix epoch: for the history that people read.
    epoch_ms: u64,
    elected: Time,
    former: Option<Former>,
    view: Option<View>,
    /// Where training resumes.
    checkpoint: Option<Checkpoint>,
    /// The mod revision of the record that says so.
    pointer: Revision,
    /// The mod revision of the record that says what the operator desires.
    desired_at: Revision,
    /// The job's spec as the leading node knows it, in case its record is damaged.
    known_spec: Option<Spec>,
    /// What members prove that they know.
    secret: Option<JobSecret>,
    /// Puts a damaged record right.
    mend: Option<Txn>,
    next_event: u64,
    /// Whether the last line of history has a number, so that the next one's is not taken. Written by hand, it may have
    /// none.
    history_counts: bool,
    /// The store's revision at which the view was read; older news is no news.
    loaded: Revision,
    /// A read older than this tells less than a watch has told already, so the job is read again.
    behind: Revision,
    /// The newest write of the round, its own or another's, that the watch told of.
    round_news: Revision,
    /// News that came while the view was being read. The read may be older than they are, and no watch repeats them.
    meanwhile: Vec<Event>,
    /// Whether the view must be read (again) before the next decision.
    stale: bool,
    watching: bool,
    /// When the last transaction was sent whose guards held.
    proof: Option<Time>,
    doing: Option<Doing>,
    retry_at: Option<Time>,
    /// Writes in a row whose guards did not hold.
    vain: u32,
    wake: Option<Time>,
    /// Contacts made before the view was read.
    early: BTreeMap<NodeId, Contact>,
    /// Something came since the last decision that may change it.
    undecided: bool,
    last_reason: String,
    /// What was warned of: once is enough.
    warned: BTreeSet<String>,
    /// Members that did not open a stream to this leader were dialled.
    called: bool,
    over: bool,
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
            former: None,
            view: None,
            checkpoint: None,
            pointer: Revision::NONE,
            desired_at: Revision::NONE,
            known_spec: None,
            secret: None,
            mend: None,
            next_event: 0,
            history_counts: true,
            loaded: Revision::NONE,
            behind: Revision::NONE,
            round_news: Revision::NONE,
            meanwhile: Vec::new(),
            stale: true,
            watching: false,
            proof: None,
            doing: None,
            retry_at: None,
            vain: 0,
            wake: None,
            early: BTreeMap::new(),
            undecided: false,
            last_reason: String::new(),
            warned: BTreeSet::new(),
            called: false,
            over: false,
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

    /// A leader that knows whom it follows.
    #[must_use]
    pub fn after(mut self, former: Option<Former>) -> Leader {
        if let Some(former) = former.as_ref().filter(|former| former.dead) {
            self.early.entry(former.node.clone()).or_default().dead = true;
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
        self.view.as_ref()
    }

    /// Whether a transaction is under way.
    pub fn is_busy(&self) -> bool {
        self.doing.is_some()
    }

    /// Whether its term is over: another leads.
    pub fn is_over(&self) -> bool {
        self.over
    }

    /// When it wants a [`LeaderInput::Tick`] at the latest.
    pub fn deadline(&self) -> Option<Time> {
        if self.doing.is_some() {
            return None;
        }
        // After a failed transaction nothing is done before the pause is over.
        let proof = self.view.as_ref().map(|view| self.proof_due(view));
        self.retry_at.or_else(|| [self.wake, proof].into_iter().flatten().min())
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
        if !self.over {
            self.undecided |= self.take_in(now, input, &mut out);
        }
        out
    }

    /// Decides, if something has come or it is time, and says what is to be done.
    pub fn act(&mut self, now: Time) -> Vec<LeaderOutput> {
        let mut out = Vec::new();
        let due = self.undecided || self.deadline().is_some_and(|at| now >= at);
        if due && !self.over {
            self.undecided = false;
            self.decide(now, &mut out);
        }
        out
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
                return match &mut self.view {
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
            LeaderInput::Closed(node) => self.suspect(&node, out),
            LeaderInput::Dead(node) => self.contact(node, |contact| contact.dead = true),
        }
        true
    }

    /// What it tells a member; nothing before it has loaded the job.
    pub fn word(&self, now: Time) -> Option<Word> {
        let view = self.view.as_ref()?;
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
            // mutant word_without_age: now.since(self.proof?) => Duration::ZERO
            proof_age: now.since(self.proof?),
            all_heard,
        })
    }

    fn contact(&mut self, node: NodeId, change: impl FnOnce(&mut Contact)) {
        match &mut self.view {
            Some(view) => view.roster.change_contact(&node, change),
            None => change(self.early.entry(node).or_default()),
        }
    }

    /// The newest probe.
    fn asked(&self) -> u64 {
        self.view.as_ref().and_then(|view| view.probe).map_or(0, |(number, _)| number)
    }

    /// Asks for the truth about a node that may have died.
    fn suspect(&self, node: &NodeId, out: &mut Vec<LeaderOutput>) {
        let Some(view) = &self.view else { return };
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
        self.wake = None;
        if self.doing.is_some() || self.retry_at.is_some_and(|at| now < at) {
            return;
        }
        self.retry_at = None;
        let read = self.view.as_ref().filter(|view| !self.stale && view.round.modified >= self.round_news);
        let Some(view) = read else {
            return self.start(Doing::Load, self.load_txn(), out);
        };
        if let Some(txn) = self.mend.take() {
            return self.start(Doing::Mend, txn, out);
        }
        // A member that has not come to a new leader by then may have died with the old one. No stream will tell of
        // that.
        let come_by = self.elected + view.spec.timings.beat() * 2;
        if !self.called && now >= come_by {
            self.called = true;
            self.suspect_unheard(out);
        }
        let Decision { verdict, reason, again } = decide(now, view);
        let again = again.into_iter().chain((!self.called).then_some(come_by)).min();
        let proof_due = now >= self.proof_due(view);
        let over = view.round.value.state.is_final();
        let sweep = over.then(|| self.sweep_txn(view)).flatten();
        // Every agent tells the job's end itself.
        if reason != self.last_reason && !over {
            let say = if view.damage().is_some() { LeaderOutput::Warn } else { LeaderOutput::Say };
            out.push(say(reason.clone()));
            self.last_reason.clone_from(&reason);
        }
        match verdict {
            Verdict::Wait => match sweep {
                Some((doing, txn)) => self.start(doing, txn, out),
                None if proof_due => {
                    let txn = self.guarded(vec![Op::get(self.keys.spec())]);
                    self.start(Doing::Prove, txn, out);
                }
                None => self.wake = again,
            },
            Verdict::Probe { report } => {
                let number = view.probe.map_or(1, |(number, _)| number + 1);
                if let Some(view) = &mut self.view {
                    view.probe = Some((number, report));
                }
                out.push(LeaderOutput::Probe(number));
                self.wake = again;
            }
            Verdict::Form(form) => {
                let (doing, txn) = self.form_txn(now, view, form, &reason);
                self.start(doing, txn, out);
            }
            Verdict::Seal(seats) => {
                let (doing, txn) = self.seal_txn(now, view, seats, &reason);
                self.start(doing, txn, out);
            }
            Verdict::Finish { state, cause } => {
                let (doing, txn) = self.finish_txn(now, view, state, cause, &reason);
                self.start(doing, txn, out);
            }
            Verdict::Refuse(evictions) => {
                let (doing, txn) = self.refuse_txn(view, &evictions);
                self.start(doing, txn, out);
            }
            Verdict::Prune(stale) => {
                let (doing, txn) = self.prune_txn(stale);
                self.start(doing, txn, out);
            }
        }
    }

    fn start(&mut self, doing: Doing, txn: Txn, out: &mut Vec<LeaderOutput>) {
        self.doing = Some(doing);
        out.push(LeaderOutput::Txn(txn));
    }

    /// Everything a leader writes is guarded by its term and by the round as it last read it.
    fn guarded(&self, then: Vec<Op>) -> Txn {
        let round = self.view.as_ref().map_or(Revision::NONE, |view| view.round.modified);
        Txn::of(then)
            .guarded([Guard::modified(self.keys.leader(), self.term), Guard::modified(self.keys.round(), round)])
    }

    fn answered(&mut self, now: Time, sent: Time, result: Result<TxnResult, StoreError>, out: &mut Vec<LeaderOutput>) {
        let Some(doing) = self.doing.take() else { return };
        let sealing = matches!(doing, Doing::Seal { .. });
        match result {
            Ok(result) if result.succeeded => {
                self.proof = Some(self.proof.map_or(sent, |old| old.max(sent)));
                if !matches!(doing, Doing::Load) {
                    self.vain = 0;
                }
                self.done(now, doing, &result, out);
            }
            Ok(_) if matches!(doing, Doing::Load) => {
                self.over = true;
                out.push(LeaderOutput::Deposed);
            }
            Ok(_) => {
                // Others may write again and again. What stays in the way must not be tried without a pause.
                self.vain += 1;
                if self.vain > MOST_VAIN {
                    self.retry_at = Some(now + RETRY);
                }
                self.reload(sealing);
            }
            Err(error) => {
                let mut pause = RETRY;
                if !error.is_transient() {
                    // Only a person can help.
                    pause = RETRY * 10;
                    self.warn(format!("leading is not possible, so no failure is handled: {error}"), out);
                }
                self.retry_at = Some(now + pause);
                self.reload(sealing);
            }
        }
    }

    /// Warns, unless it has said the same before.
    fn warn(&mut self, line: String, out: &mut Vec<LeaderOutput>) {
        if self.warned.insert(line.clone()) {
            out.push(LeaderOutput::Warn(line));
        }
    }

    /// Has everything read again: a guard did not hold, or an outcome is unknown. A plan that was begun to be sealed is
    /// given up, since some of its rank keys may be there.
    fn reload(&mut self, sealing: bool) {
        if let Some(view) = &mut self.view {
            // mutant plan_recomposed: !sealing => true
            view.planned_here &= !sealing;
        }
        self.stale = true;
    }
}
