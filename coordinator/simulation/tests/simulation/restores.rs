//! The store, or a record, in an earlier state: a backup is restored, or somebody writes an old record again.

use std::collections::BTreeMap;

use elastic_rendezvous::job::{RoundRecord, Versioned};
use elastic_store::embedded::mvcc::Mvcc;
use elastic_store::{Event, KeyValue, Op, Revision, Scope, Txn, WatchUpdate};

use crate::dice::MS;
use crate::service::{Request, Service};
use crate::world::World;

/// Backups that are kept.
const MOST: usize = 12;

/// A copy of the store, and its clock's moment then.
#[derive(Clone)]
pub(crate) struct Backup {
    mvcc: Mvcc,
    clock_at: u64,
}

impl Service {
    pub(crate) fn back_up(&mut self, now: u64) {
        self.backups.push(Backup { mvcc: self.mvcc.clone(), clock_at: self.clock_at(now) });
        if self.backups.len() > MOST {
            self.backups.remove(0);
        }
    }

    /// A backup takes the store's place. Its leases have their whole time again. With `passes` its revision is beyond all
    /// that anyone has seen, as with `etcdutl snapshot restore --bump-revision`.
    fn restore(&mut self, now: u64, backup: usize, passes: bool) {
        let newest = self.mvcc.revision();
        self.backups.truncate(backup + 1);
        let Backup { mvcc, clock_at } = self.backups[backup].clone();
        self.mvcc = mvcc;
        self.start_clock(now, clock_at);
        // etcd chooses the ids of leases at random: none comes twice.
        self.next_lease.get_or_insert(1 << 40);
        let time = self.time(now);
        for lease in self.mvcc.leases() {
            self.mvcc.keep_alive(time, lease);
        }
        while passes && self.mvcc.revision() <= newest {
            let _ = self.mvcc.apply(time, &Txn::of([Op::put("/other", "")]));
        }
        self.told = self.mvcc.revision();
        self.ask_again();
        self.expiry_at = u64::MAX;
    }

    /// Notes a revision that a process has seen. Its client takes no store that is behind that.
    pub(crate) fn reached(&mut self, p: usize, revision: Revision) {
        let seen = self.seen.entry(p).or_default();
        *seen = (*seen).max(revision);
    }

    /// The same, of news.
    pub(crate) fn reached_by(&mut self, p: usize, update: &WatchUpdate) {
        match update {
            WatchUpdate::Events(events) => self.reached(p, events.last().map_or(Revision::NONE, Event::revision)),
            WatchUpdate::Snapshot { revision, .. } => self.reached(p, *revision),
            WatchUpdate::Broken(_) => {}
        }
    }

    /// Whether a process's client has found that the store went back. It stays so.
    pub(crate) fn is_lost_to(&mut self, p: usize) -> bool {
        if self.seen.get(&p).is_some_and(|seen| *seen > self.mvcc.revision()) {
            self.lost_to.insert(p);
        }
        self.lost_to.contains(&p)
    }
}

impl World {
    /// The store is restored from one of its backups.
    pub(crate) fn restore(&mut self) {
        let count = self.store.backups.len() as u64;
        if count == 0 {
            return;
        }
        let (backup, passes) = (self.dice.between(0, count) as usize, self.dice.chance(0.6));
        let newest = self.store.mvcc.revision();
        self.store.restore(self.now, backup, passes);
        let at = self.store.mvcc.revision();
        self.schedule(|| format!("the store is restored: it was at revision {newest}, and is at {at}"));
        if passes && self.dice.chance(0.5) {
            self.store.forget_history();
        }
        self.history_is_lost();
        for watch in 0..self.store.watches.len() {
            let soon = self.now + self.dice.between(50 * MS, 500 * MS);
            self.repair_watch(watch, soon);
        }
        for host in 0..self.hosts.len() {
            self.maybe_enter(host);
        }
        self.changed();
    }

    fn history_is_lost(&mut self) {
        self.processes.iter_mut().for_each(|process| process.before |= process.alive || process.tree.is_some());
        self.promises.history_lost(self.now);
    }

    /// Records as a backup holds them, where the store holds others on the same lease.
    fn old_records(&self, backup: usize) -> Vec<KeyValue> {
        let all = Scope::Prefix(self.keys.root().to_owned());
        let now: BTreeMap<String, KeyValue> =
            self.store.mvcc.snapshot(&all).into_iter().map(|kv| (kv.key.clone(), kv)).collect();
        let old = self.store.backups[backup].mvcc.snapshot(&all).into_iter();
        let differs =
            |old: &KeyValue| now.get(&old.key).is_some_and(|now| now.value != old.value && now.lease == old.lease);
        old.filter(differs).collect()
    }

    /// Somebody writes an earlier value of a record again: the round's with its rank keys, or another.
    pub(crate) fn write_again(&mut self, of_round: bool) {
        let count = self.store.backups.len() as u64;
        if count == 0 || !self.store.up {
            return;
        }
        let backup = self.dice.between(0, count) as usize;
        let mut records = self.old_records(backup);
        let round = self.keys.round();
        // Lines of history are no one's records, and their numbers tell who wrote first.
        records.retain(|kv| (kv.key == round) == of_round && !kv.key.starts_with(&self.keys.events()));
        let Some(kv) = self.dice.pick(&records) else { return };
        let mut ops = vec![Op::Put { key: kv.key.clone(), value: kv.value.clone(), lease: kv.lease }];
        if of_round {
            let (Some(now), Ok(old)) = (self.store_round(), Versioned::<RoundRecord>::parse(&kv)) else { return };
            if old.value.may_follow(&now.value) {
                return;
            }
            if let Some(sealed) = old.value.sealed {
                let ranks = Scope::Prefix(self.keys.ranks(sealed.number, sealed.plan));
                let ranks = self.store.backups[backup].mvcc.snapshot(&ranks);
                ops.extend(ranks.into_iter().map(|kv| Op::put(kv.key, kv.value)));
            }
            self.history_is_lost();
        }
        self.schedule(|| format!("{} is written again: {}", kv.key, String::from_utf8_lossy(&kv.value)));
        self.store.apply(self.now, &Request::Txn(Txn::of(ops)));
        self.changed();
    }
}
