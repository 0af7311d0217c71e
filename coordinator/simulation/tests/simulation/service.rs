//! The store as a service: calls that take time, fail or lose their answers, and watches. The real [`Mvcc`] holds what
//! is stored.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use elastic_rendezvous::time::Time;
use elastic_rendezvous::{Call, Credentials};
use elastic_store::embedded::mvcc::{Limits, Mvcc, Record, Span};
use elastic_store::{Event, LeaseId, Revision, Scope, StoreError, Txn, TxnResult, WatchUpdate};

use crate::clock::Clock;
use crate::restores::Backup;

/// Who asks the store.
#[derive(Debug, Clone)]
pub(crate) enum Asker {
    Member(Call),
    Leader(Revision),
    /// A worker's commit reads the pointer first.
    CommitRead(Credentials),
    Commit(Credentials),
    Operator,
}

#[derive(Debug, Clone)]
pub(crate) enum Request {
    Txn(Txn),
    Grant(Duration),
    Renew(LeaseId),
    Revoke(LeaseId),
}

impl Request {
    pub(crate) fn is_write(&self) -> bool {
        match self {
            Request::Txn(txn) => txn.is_write(),
            _ => true,
        }
    }
}

#[derive(Debug, Clone)]
pub(crate) enum Answer {
    Txn(Result<TxnResult, StoreError>),
    Granted(Result<LeaseId, StoreError>),
    Renewed(LeaseId, Result<bool, StoreError>),
    Revoked,
}

pub(crate) fn unavailable() -> StoreError {
    StoreError::Unavailable { endpoints: "store".into(), cause: "simulated".into() }
}

pub(crate) fn unknown() -> StoreError {
    StoreError::Unknown { endpoints: "store".into(), cause: "simulated".into() }
}

/// The answer of a call that failed.
pub(crate) fn failure(request: &Request, error: StoreError) -> Answer {
    match request {
        Request::Txn(_) => Answer::Txn(Err(error)),
        Request::Grant(_) => Answer::Granted(Err(error)),
        Request::Renew(lease) => Answer::Renewed(*lease, Err(error)),
        Request::Revoke(_) => Answer::Revoked,
    }
}

pub(crate) struct Watch {
    pub(crate) process: usize,
    pub(crate) life: u32,
    /// Of a leader's watch: its term.
    pub(crate) term: Option<Revision>,
    scope: Scope,
    next: Revision,
    /// From where its process asks again when the store comes back: after the last that it was sent.
    pub(crate) asked: Revision,
    /// When the last update arrives: the next one does not overtake it.
    pub(crate) free_at: u64,
    /// Broken until then.
    pub(crate) broken_until: u64,
    pub(crate) waiting: bool,
    pub(crate) over: bool,
}

pub(crate) struct Service {
    pub(crate) mvcc: Mvcc,
    clock: Clock,
    pub(crate) up: bool,
    /// How long it was down in all: its leases do not age meanwhile.
    paused: u64,
    down_since: u64,
    pub(crate) watches: Vec<Watch>,
    /// Calls whose caller still waits.
    pub(crate) open: BTreeSet<u64>,
    pub(crate) expiry_at: u64,
    pub(crate) told: Revision,
    pub(crate) backups: Vec<Backup>,
    /// The newest revision that each process has seen, and whose client has found that the store went back.
    pub(crate) seen: BTreeMap<usize, Revision>,
    pub(crate) lost_to: BTreeSet<usize>,
    /// The id of the next lease; none: as the store chooses.
    pub(crate) next_lease: Option<i64>,
}

impl Service {
    pub(crate) fn new(clock: Clock) -> Service {
        Service {
            mvcc: Mvcc::new(Limits::default(), LeaseId(1)),
            clock,
            up: true,
            paused: 0,
            down_since: 0,
            watches: Vec::new(),
            open: BTreeSet::new(),
            expiry_at: u64::MAX,
            told: Revision(1),
            backups: Vec::new(),
            seen: BTreeMap::new(),
            lost_to: BTreeSet::new(),
            next_lease: None,
        }
    }

    /// How long its clock has run.
    pub(crate) fn clock_at(&self, now: u64) -> u64 {
        let up = if self.up { now } else { self.down_since };
        up - self.paused
    }

    /// Is up from now on, with a clock that has run so long.
    pub(crate) fn start_clock(&mut self, now: u64, clock_at: u64) {
        (self.up, self.paused) = (true, now - clock_at);
    }

    pub(crate) fn time(&self, now: u64) -> Time {
        self.clock.reads(self.clock_at(now))
    }

    pub(crate) fn next_expiry(&self) -> Option<u64> {
        self.mvcc.next_expiry().filter(|_| self.up).map(|at| self.clock.when(at) + self.paused)
    }

    pub(crate) fn apply(&mut self, now: u64, request: &Request) -> Answer {
        let time = self.time(now);
        match request {
            Request::Txn(txn) => Answer::Txn(self.mvcc.apply(time, txn)),
            Request::Grant(ttl) => {
                let id = self.next_lease.map(LeaseId);
                self.next_lease.iter_mut().for_each(|next| *next += 1);
                let granted = self.mvcc.grant(time, id, *ttl).map(|(lease, _)| lease);
                Answer::Granted(granted.map_err(|_| unavailable()))
            }
            Request::Renew(lease) => Answer::Renewed(*lease, Ok(self.mvcc.keep_alive(time, *lease).is_some())),
            Request::Revoke(lease) => {
                // Its client does not care whether it was there.
                let _ = self.mvcc.revoke(time, *lease);
                Answer::Revoked
            }
        }
    }

    pub(crate) fn go_down(&mut self, now: u64) {
        if self.up {
            self.up = false;
            self.down_since = now;
        }
    }

    /// Comes back: as etcd after an election with all leases extended, or with all of them gone.
    pub(crate) fn come_up(&mut self, now: u64, leases_lost: bool) {
        if self.up {
            return;
        }
        self.up = true;
        self.paused += now - self.down_since;
        let time = self.time(now);
        for lease in self.mvcc.leases() {
            if leases_lost {
                let _ = self.mvcc.revoke(time, lease);
            } else {
                self.mvcc.keep_alive(time, lease);
            }
        }
    }

    pub(crate) fn forget_history(&mut self) {
        let newest = self.mvcc.revision();
        let _ = self.mvcc.compact(newest);
    }

    pub(crate) fn watch(&mut self, process: usize, life: u32, term: Option<Revision>, scope: Scope, from: Revision) {
        self.watches.push(Watch {
            process,
            life,
            term,
            scope,
            next: from,
            asked: from,
            free_at: 0,
            broken_until: 0,
            waiting: false,
            over: false,
        });
    }

    /// The changes that a watch has not received yet.
    pub(crate) fn news(&mut self, watch: usize) -> Option<WatchUpdate> {
        let revision = self.mvcc.revision();
        let watch = &mut self.watches[watch];
        if watch.next > revision {
            return None;
        }
        let from = std::mem::replace(&mut watch.next, revision.next());
        let update = match self.mvcc.events(&Span::from(&watch.scope), from) {
            Ok(events) => WatchUpdate::Events(events.map(Event::from).collect()),
            Err(_) => WatchUpdate::Snapshot { revision, values: self.mvcc.snapshot(&watch.scope) },
        };
        watch.asked = match &update {
            WatchUpdate::Events(events) => events.last()?.revision().next(),
            _ => watch.next,
        };
        Some(update)
    }

    /// Whether no update of a watch is still under way: one from before all worked again may take seconds.
    pub(crate) fn has_sent_all_news(&self, now: u64) -> bool {
        self.watches.iter().all(|watch| watch.free_at <= now)
    }

    /// The store restarts on other data: each process asks for what follows the last that it was sent.
    pub(crate) fn ask_again(&mut self) {
        self.watches.iter_mut().for_each(|watch| watch.next = watch.asked);
    }

    /// Everything that was written since the last call, and whether that is not only what was there before.
    pub(crate) fn written(&mut self, root: &str) -> (Vec<Event>, bool) {
        let from = self.told.next();
        self.told = self.mvcc.revision();
        if from > self.told {
            return (Vec::new(), false);
        }
        let span = Span::prefix(root.as_bytes());
        let Ok(events) = self.mvcc.events(&span, from) else { return (Vec::new(), false) };
        let mut changed = false;
        let events = events.map(|event| {
            let value = |record: &Option<Arc<Record>>| record.as_ref().map(|record| record.value.clone());
            changed |= value(&event.record) != value(&event.prev);
            Event::from(event)
        });
        (events.collect(), changed)
    }
}
