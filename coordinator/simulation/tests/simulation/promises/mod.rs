//! What the system promises, checked after every event by one who sees everything.

mod agreement;
mod budget;
mod calls;
mod exclusion;
mod fencing;
mod knowledge;
mod one_group;
mod one_result;
mod pause;
mod replicas;

use elastic_rendezvous::job::{Desired, FailureClass, Keys, NodeId, RoundRecord, Versioned};
use elastic_rendezvous::time::Time;
use elastic_rendezvous::{Credentials, End, Leader, Start};
use elastic_store::embedded::mvcc::Mvcc;
use elastic_store::{Event, Revision, Txn};

use crate::dice::SECOND;
use crate::process::Process;
use crate::scenario::Scenario;

/// For so long after everything works again a call may still be under way that was sent before.
const SETTLING: u64 = 10 * SECOND;

/// A promise that was broken.
#[derive(Debug, Clone)]
pub(crate) struct Breach {
    pub(crate) promise: &'static str,
    pub(crate) what: String,
}

pub(crate) struct Promises {
    pub(crate) breach: Option<Breach>,
    /// Since when everything works again.
    pub(crate) healed: Option<u64>,
    agreement: agreement::Agreement,
    budget: budget::Budget,
    result: one_result::OneResult,
    pause: pause::Pause,
    exclusion: exclusion::Exclusion,
    replicas: replicas::Replicas,
    calls: calls::Calls,
    /// History was lost then, and someone may still act on what is not true any more. Until no one can, what is written
    /// keeps no promise.
    lost_at: Option<u64>,
    /// The leader whose last transaction was the first part of a decision.
    evicting: Option<Revision>,
}

impl Promises {
    pub(crate) fn new(scenario: &Scenario) -> Promises {
        Promises {
            breach: None,
            healed: None,
            agreement: agreement::Agreement::new(scenario.fixed(), scenario.nodes(), scenario.spec.nodes_per_replica),
            budget: budget::Budget::new(scenario.spec.clone()),
            result: one_result::OneResult::new(scenario.clash),
            pause: pause::Pause::new(&scenario.spec.timings),
            exclusion: exclusion::Exclusion::new(scenario),
            replicas: replicas::Replicas::new(scenario.spec.nodes_per_replica),
            calls: calls::Calls::default(),
            lost_at: None,
            evicting: None,
        }
    }

    pub(crate) fn broken(&self) -> bool {
        self.breach.is_some()
    }

    pub(crate) fn breach(&mut self, promise: &'static str, what: String) {
        self.breach.get_or_insert(Breach { promise, what });
    }

    fn hold(&mut self, promise: &'static str, checked: Result<(), String>) {
        if let Err(what) = checked {
            self.breach(promise, what);
        }
    }

    /// After every event.
    pub(crate) fn check(&mut self, now: u64, processes: &[Process]) {
        if let Some(lost) = self.lost_at {
            let knows = |process: &Process| process.before && (process.alive || process.tree.is_some());
            if now < lost + SETTLING || processes.iter().any(knows) {
                return;
            }
            self.lost_at = None;
        }
        let checked = one_group::check(processes);
        self.hold("one group at work", checked);
        if self.budget.prompt {
            let checked = self.pause.check(now, processes);
            self.hold("pause", checked);
        }
    }

    /// Workers are being started.
    pub(crate) fn started(&mut self, _now: u64, p: usize, processes: &[Process], start: &Start) {
        if self.lost_at.is_some() {
            return;
        }
        let checked = one_group::starts(&processes[p]);
        self.hold("one group at work", checked);
        let checked = self.agreement.started(&processes[p].id(), start);
        self.hold("agreement", checked);
    }

    /// Something was written to the store.
    pub(crate) fn written(&mut self, now: u64, keys: &Keys, events: &[Event], mvcc: &Mvcc) {
        for group in events.chunk_by(|a, b| a.revision() == b.revision()) {
            for event in group {
                if event.key() == keys.desired() {
                    // A job that starts again deletes it.
                    let desired = match event {
                        Event::Put(kv) => Versioned::<Desired>::parse(kv).map(|desired| desired.value),
                        Event::Delete { .. } => Ok(Desired::default()),
                    };
                    self.exclusion.desired_written(now, desired.unwrap_or_default());
                }
                if let Event::Put(kv) = event
                    && kv.key == keys.round()
                {
                    match Versioned::<RoundRecord>::parse(kv) {
                        Ok(round) => self.round_written(now, keys, &round, mvcc),
                        Err(problem) => self.breach("agreement", problem),
                    }
                }
            }
            self.budget.nodes_written(now, keys, group);
            self.result.nodes_written(keys, group);
        }
    }

    /// History was lost. What is promised holds again once no one is there who knew it, and then of what follows.
    pub(crate) fn history_lost(&mut self, now: u64) {
        self.lost_at = Some(now);
        self.forget();
    }

    fn forget(&mut self) {
        (self.budget.last, self.exclusion.last) = (None, None);
        self.agreement.forget();
        self.replicas.forget();
        self.result.forget();
    }

    fn round_written(&mut self, now: u64, keys: &Keys, round: &Versioned<RoundRecord>, mvcc: &Mvcc) {
        if self.lost_at.is_some() {
            let _ = self.result.round_written(&round.value, &[]);
            return self.forget();
        }
        let checked = self.budget.round_written(now, &round.value);
        self.hold("budget", checked);
        let checked = self.agreement.round_written(keys, round, mvcc);
        self.hold("agreement", checked);
        let (members, ranks) = (self.agreement.members(), self.agreement.ranks());
        let checked = self.replicas.round_written(&round.value, members, ranks);
        self.hold("replicas", checked);
        let checked = self.pause.round_written(now, &round.value);
        self.hold("pause", checked);
        let checked = self.exclusion.round_written(now, &round.value, self.agreement.members(), self.budget.prompt);
        self.hold("exclusion", checked);
        let checked = self.result.round_written(&round.value, self.agreement.members());
        self.hold("one result", checked);
    }

    /// A worker failed by itself.
    pub(crate) fn failed(&mut self, round: u64, class: FailureClass) {
        self.budget.failed(round, class);
    }

    /// A leader sends a transaction.
    pub(crate) fn leader_writes(&mut self, now: Time, keys: &Keys, leader: &Leader, txn: &Txn) {
        let checked = fencing::guarded(keys, leader.term(), txn);
        self.hold("fencing", checked);
        // What it learns after the first transaction of a decision comes too late for the last.
        let decided_before = self.evicting.take() == Some(leader.term());
        self.evicting = knowledge::only_evicts(keys, txn).then(|| leader.term());
        if let Some(view) = leader.view().filter(|_| self.lost_at.is_none() && !decided_before) {
            let checked = knowledge::acted_on(now, keys, view, txn);
            self.hold("budget", checked);
        }
    }

    /// The watch told a leader of these keys, and no one has written them since.
    pub(crate) fn leader_knows(&mut self, leader: &Leader, told: impl Iterator<Item = (NodeId, Revision)>) {
        if let Some(view) = leader.view().filter(|_| self.lost_at.is_none()) {
            let checked = knowledge::kept(view, told);
            self.hold("agreement", checked);
        }
    }

    /// A commit's guards held.
    pub(crate) fn committed(&mut self, by: &Credentials, evicted: bool, round: Option<Versioned<RoundRecord>>) {
        if self.lost_at.is_some() {
            return;
        }
        let checked = fencing::committed(by, evicted, round.as_ref());
        self.hold("fencing", checked);
    }

    /// An agent ends by itself.
    pub(crate) fn ended(&mut self, now: u64, process: &Process, end: &End) {
        let checked = self.result.ended(process, end, self.healed.is_some_and(|at| now > at + SETTLING));
        self.hold("one result", checked);
    }

    /// A record has changed, or one came or went.
    pub(crate) fn changed(&mut self, now: u64) {
        self.calls.changed(now);
    }

    /// A machine of this process calls the store.
    pub(crate) fn called(&mut self, now: u64, p: usize) {
        let checked = self.calls.called(now, p);
        self.hold("few calls while nothing happens", checked);
    }

    /// Whether faults of the seed let the leader see every failure at once.
    pub(crate) fn failures_are_seen_promptly(&mut self) {
        self.budget.prompt = true;
    }
}
