//! A node's own key: bringing what the store holds to what the node wants to say, through unknown outcomes, lost leases
//! and evictions.

use crate::job::{Keys, NodeRecord, Phase, Tombstone, Versioned, to_json};
use crate::kv::{Guard, LeaseId, Op, OpResult, Revision, Txn, TxnResult};

/// What is known of the own key.
#[derive(Debug, Clone)]
pub(super) struct OwnKey {
    key: String,
    tombstone: String,
    round: String,
    leader: String,
    /// Since when the key exists; `None`: it does not, as far as known.
    created: Option<Revision>,
    /// Its last write, as far as known. Writes are guarded by it: one whose outcome was unknown may still happen long
    /// after it was read back, and must not undo a newer one.
    modified: Revision,
    /// What it holds, and on which lease.
    held: Option<(NodeRecord, Option<LeaseId>)>,
    writing: Option<(NodeRecord, Option<LeaseId>)>,
    /// An outcome is unknown: read before writing again.
    unsure: bool,
}

/// What the store said about the own key.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Reading {
    /// The key is as known, or as now adopted.
    Here,
    /// The key is absent without a tombstone: it went with its lease, and may be claimed again.
    Gone,
    /// This incarnation was evicted.
    Evicted(Tombstone),
    /// A record is not one of ours.
    Foreign(String),
}

impl OwnKey {
    pub(super) fn new(keys: &Keys, record: &NodeRecord) -> OwnKey {
        let id = record.id();
        OwnKey {
            key: keys.node(&id),
            tombstone: keys.evicted(&id),
            round: keys.round(),
            leader: keys.leader(),
            created: None,
            modified: Revision::NONE,
            held: None,
            writing: None,
            unsure: false,
        }
    }

    pub(super) fn created(&self) -> Option<Revision> {
        self.created
    }

    /// Whether the store is known to hold a record of this phase and round.
    pub(super) fn says(&self, phase: Phase, round: u64) -> bool {
        let said = |(record, _): &(NodeRecord, _)| record.phase == phase && record.round == Some(round);
        self.created.is_some() && self.is_idle() && self.held.as_ref().is_some_and(said)
    }

    /// Whether the store is known to hold a newcomer's word: that it wants a place in any round.
    pub(super) fn is_newcomers(&self) -> bool {
        let newcomers = |(record, _): &(NodeRecord, _)| record.phase == Phase::Waiting && record.round.is_none();
        self.created.is_some() && self.held.as_ref().is_some_and(newcomers)
    }

    /// Whether the store is known to hold the key on this lease.
    pub(super) fn hangs_on(&self, lease: LeaseId) -> bool {
        self.created.is_some() && self.held.as_ref().is_some_and(|(_, on)| *on == Some(lease))
    }

    pub(super) fn is_unsure(&self) -> bool {
        self.unsure
    }

    /// The write that is due, if the store does not hold `record` on `lease` already.
    ///
    /// `done` hangs on no lease, so that it outlives the agent.
    pub(super) fn write(&mut self, record: &NodeRecord, lease: LeaseId) -> Option<Txn> {
        let wanted = (record.clone(), (record.phase != Phase::Done).then_some(lease));
        let held = self.created.is_some() && self.held.as_ref() == Some(&wanted);
        (!held && self.is_idle()).then(|| self.put(wanted))
    }

    /// The same record once more. It proves that this node was not evicted, and the leader sees a sign of life. A node
    /// does this while the leader's pulse does not reach it.
    pub(super) fn touch(&mut self) -> Option<Txn> {
        if self.created.is_none() || !self.is_idle() {
            return None;
        }
        let held = self.held.clone()?;
        Some(self.put(held))
    }

    fn is_idle(&self) -> bool {
        !self.unsure && self.writing.is_none()
    }

    fn put(&mut self, wanted: (NodeRecord, Option<LeaseId>)) -> Txn {
        let mut guards = vec![Guard::modified(&self.key, self.modified)];
        if self.created.is_none() {
            // mutant reclaimed_in_spite_of_a_tombstone: guards.push(Guard::absent(&self.tombstone)) => {}
            guards.push(Guard::absent(&self.tombstone));
        }
        let put = Op::Put { key: self.key.clone(), value: to_json(&wanted.0), lease: wanted.1 };
        self.writing = Some(wanted);
        let reads = self.reads();
        let then = [reads[0].clone(), reads[1].clone(), put];
        Txn::of(then).guarded(guards).or_else(reads)
    }

    /// Reads the round, the leader and the own key.
    pub(super) fn read(&self) -> Txn {
        Txn::of(self.reads())
    }

    fn reads(&self) -> [Op; 4] {
        [Op::get(&self.round), Op::get(&self.leader), Op::get(&self.key), Op::get(&self.tombstone)]
    }

    /// A write succeeded.
    pub(super) fn wrote(&mut self, revision: Revision) {
        self.created = self.created.or(Some(revision));
        self.modified = revision;
        self.held = self.writing.take();
    }

    /// A write's outcome is unknown, or its lease was gone.
    pub(super) fn lost_track(&mut self) {
        self.writing = None;
        self.unsure = true;
    }

    /// Takes in what [`OwnKey::read`], or the else-branch of a write, has read of the own key.
    pub(super) fn take(&mut self, result: &TxnResult) -> Reading {
        self.writing = None;
        self.unsure = false;
        let value = |at: usize| result.results.get(at).and_then(OpResult::value);
        let forget = |own: &mut OwnKey| {
            own.created = None;
            own.modified = Revision::NONE;
            own.held = None;
        };
        if let Some(tombstone) = value(3) {
            forget(self);
            return match Versioned::<Tombstone>::parse(tombstone) {
                Ok(tombstone) => Reading::Evicted(tombstone.value),
                Err(problem) => Reading::Foreign(problem),
            };
        }
        let Some(kv) = value(2) else {
            forget(self);
            return Reading::Gone;
        };
        match Versioned::<NodeRecord>::parse(kv) {
            Ok(record) => {
                self.created = Some(kv.create_revision);
                self.modified = kv.mod_revision;
                self.held = Some((record.value, kv.lease));
                Reading::Here
            }
            Err(problem) => Reading::Foreign(problem),
        }
    }

    /// The lease behind the key is gone, and the key with it or soon.
    pub(super) fn lease_lost(&mut self) {
        if self.writing.is_none() {
            self.unsure = true;
        }
    }
}
