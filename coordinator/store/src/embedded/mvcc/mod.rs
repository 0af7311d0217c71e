//! A key-value store with etcd v3's semantics as a pure state machine: time is an argument, nothing is random. The
//! server is `crate::embedded`; the [`crate::Store`] is its `MemoryStore`.
//!
//! The live keys are one ordered map; the past is one log of events, each with the record it replaced. Everything else
//! follows from these two: a watch reads the log forwards, a historical range undoes it backwards, and compaction
//! drops its front. Whatever takes `now` first lets go of the leases whose time is up by then.
//!
//! The semantics follow etcd's documented API (<https://etcd.io/docs/v3.6/learning/api/>) and the observed behaviour of
//! its releases.

#![deny(clippy::disallowed_methods, clippy::disallowed_types)]

mod error;
mod history;
mod lease;
mod native;
mod range;
mod request;
mod snapshot;
mod txn;

#[cfg(test)]
mod tests;

pub use error::Error;
pub use history::Compacted;
pub use lease::{LeaseStatus, MAX_TTL};
pub use request::{
    Compare, Delete, Key, MvccEvent, MvccRequest, MvccTxn, Put, PutLease, Range, RangeResponse, Record, Relation,
    Response, Sort, SortBy, Span, Target, TxnResponse,
};

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use crate::{LeaseId, Revision};
use history::History;
use lease::Leases;

/// Bounds on what the store holds and takes.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Limits {
    /// Conditions, or operations in a branch, of one transaction. etcd's default is 128.
    pub txn_ops: usize,
    /// Bytes of keys and values in one request. etcd's default is 1.5 MiB.
    pub request_bytes: usize,
    /// Bytes of live keys and values; a write that would exceed it is refused with [`Error::NoSpace`].
    pub live_bytes: usize,
    /// Live keys; the same.
    pub live_keys: usize,
    /// Leases; the same.
    pub leases: usize,
    /// Revisions of history kept; older ones are compacted away by themselves.
    pub history_revisions: i64,
    /// Bytes of history kept; the same. The newest revision is always kept.
    pub history_bytes: usize,
    /// Shortest lease; a shorter wish is raised to it. etcd's is one and a half election timeouts in whole seconds,
    /// which by default makes two.
    pub min_ttl: Duration,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            txn_ops: 128,
            request_bytes: 3 << 19,
            live_bytes: 64 << 20,
            live_keys: 1 << 18,
            leases: 1 << 16,
            history_revisions: 10_000,
            history_bytes: 32 << 20,
            min_ttl: Duration::from_secs(2),
        }
    }
}

/// The store's whole state. A clone is an independent fork.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Mvcc {
    limits: Limits,
    revision: Revision,
    live: BTreeMap<Key, Arc<Record>>,
    live_bytes: usize,
    history: History,
    leases: Leases,
}

impl Mvcc {
    /// An empty store. Like etcd's its revision is 1, so the first write has revision 2. `first_lease` is where the
    /// ids of leases that no one chose an id for start: a store that takes another's place starts elsewhere, so that a
    /// client of the old one cannot renew a stranger's lease.
    pub fn new(limits: Limits, first_lease: LeaseId) -> Mvcc {
        Mvcc {
            limits,
            revision: Revision(1),
            live: BTreeMap::new(),
            live_bytes: 0,
            history: History::default(),
            leases: Leases::new(first_lease),
        }
    }

    /// Its bounds.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Revision of the last write.
    pub fn revision(&self) -> Revision {
        self.revision
    }

    /// Bytes charged for live keys and history together.
    pub fn size(&self) -> usize {
        self.live_bytes + self.history.bytes()
    }

    /// Writes a record over whatever is there, as part of revision `at`.
    fn write(&mut self, at: Revision, key: &[u8], value: Vec<u8>, lease: Option<LeaseId>) -> Option<Arc<Record>> {
        let prev = self.live.get(key).cloned();
        let key = prev.as_ref().map_or_else(|| Key::from(key), |prev| prev.key.clone());
        let record = Arc::new(Record {
            key: key.clone(),
            value,
            create_revision: prev.as_ref().map_or(at, |prev| prev.create_revision),
            mod_revision: at,
            version: prev.as_ref().map_or(1, |prev| prev.version + 1),
            lease,
        });
        self.leases.move_key(&key, prev.as_ref().and_then(|prev| prev.lease), lease);
        self.live_bytes = self.live_bytes + record.size() - prev.as_ref().map_or(0, |prev| prev.size());
        self.live.insert(key.clone(), record.clone());
        self.history.push(MvccEvent { key, revision: at, record: Some(record), prev: prev.clone() });
        prev
    }

    /// Deletes a record as part of revision `at`.
    fn remove(&mut self, at: Revision, key: &[u8]) -> Option<Arc<Record>> {
        let prev = self.live.remove(key)?;
        self.leases.move_key(&prev.key, prev.lease, None);
        self.live_bytes -= prev.size();
        self.history.push(MvccEvent { key: prev.key.clone(), revision: at, record: None, prev: Some(prev.clone()) });
        Some(prev)
    }

    /// Ends a revision: counts it if anything was written, and forgets what is now too old.
    fn commit(&mut self, at: Revision) {
        if self.history.newest() == Some(at) {
            self.revision = at;
            self.history.trim(&self.limits, at);
        }
    }
}
