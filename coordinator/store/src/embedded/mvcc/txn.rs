//! Transactions: first everything that can be refused, then the conditions, then the writes, which cannot fail.

use std::cmp::Ordering;
use std::collections::BTreeSet;
use std::sync::Arc;

use super::request::size_of;
use super::{
    Compare, Error, Mvcc, MvccRequest, MvccTxn, Put, PutLease, Record, Relation, Response, Span, Target, TxnResponse,
};
use crate::Revision;
use elastic_rendezvous::time::Time;

impl Mvcc {
    /// Runs a transaction; a single put or deletion is one with a single operation. An error changed nothing.
    pub fn txn(&mut self, now: Time, txn: &MvccTxn) -> Result<TxnResponse, Error> {
        self.expire(now);
        check_form(txn, self.limits.txn_ops)?;
        check_size(txn, self.limits.request_bytes)?;
        check_duplicates(&txn.success)?;
        check_duplicates(&txn.failure)?;
        let succeeded = txn.compare.iter().all(|compare| self.holds(compare));
        let requests = if succeeded { &txn.success } else { &txn.failure };
        self.check(requests)?;
        let at = self.revision.next();
        let responses = requests.iter().map(|request| self.run(at, request)).collect();
        self.commit(at);
        Ok(TxnResponse { succeeded, responses, revision: self.revision })
    }

    fn holds(&self, compare: &Compare) -> bool {
        let mut found = self.live.range::<[u8], _>(compare.span.bounds()).map(|(_, record)| record).peekable();
        if found.peek().is_none() {
            return relates(compare, None);
        }
        found.all(|record| relates(compare, Some(record)))
    }

    /// Refuses what cannot be read, puts that lack what they need, and growth beyond the bounds. What does not grow is
    /// let through, so that a full store can still be used. Of several faults it names the one that etcd 3.7 names.
    fn check(&self, requests: &[MvccRequest]) -> Result<(), Error> {
        let (mut gained, mut given_up, mut keys) = (0, 0, 0);
        for request in requests {
            let put = match request {
                MvccRequest::Put(put) => put,
                MvccRequest::Range(range) => {
                    self.check_range(range)?;
                    continue;
                }
                MvccRequest::Delete(_) => continue,
            };
            let old = self.live.get(put.key.as_slice());
            if let PutLease::On(lease) = put.lease
                && !self.leases.exists(lease)
            {
                return Err(Error::LeaseNotFound);
            }
            if old.is_none() && (put.value.is_none() || put.lease == PutLease::Keep) {
                return Err(Error::KeyNotFound);
            }
            if let Some(value) = &put.value {
                gained += size_of(&put.key, value);
                given_up += old.map_or(0, |record| record.size());
            }
            keys += usize::from(old.is_none());
        }
        let bytes_full = gained > given_up && self.live_bytes + gained - given_up > self.limits.live_bytes;
        let keys_full = keys > 0 && self.live.len() + keys > self.limits.live_keys;
        if bytes_full || keys_full { Err(Error::NoSpace) } else { Ok(()) }
    }

    fn run(&mut self, at: Revision, request: &MvccRequest) -> Response {
        match request {
            MvccRequest::Range(range) => Response::Range(self.read(range)),
            MvccRequest::Put(put) => Response::Put(self.put(at, put).filter(|_| put.prev_kv)),
            MvccRequest::Delete(delete) => {
                let prev = self.delete(at, &delete.span);
                Response::Delete { deleted: prev.len(), prev: if delete.prev_kv { prev } else { Vec::new() } }
            }
        }
    }

    fn put(&mut self, at: Revision, put: &Put) -> Option<Arc<Record>> {
        let old = self.live.get(put.key.as_slice());
        let kept = || old.map(|record| record.value.clone()).unwrap_or_default();
        let value = put.value.clone().unwrap_or_else(kept);
        let lease = match put.lease {
            PutLease::None => None,
            PutLease::On(lease) => Some(lease),
            PutLease::Keep => old.and_then(|record| record.lease),
        };
        self.write(at, &put.key, value, lease)
    }

    fn delete(&mut self, at: Revision, span: &Span) -> Vec<Arc<Record>> {
        let keys: Vec<_> = self.live.range::<[u8], _>(span.bounds()).map(|(key, _)| key.clone()).collect();
        keys.iter().filter_map(|key| self.remove(at, key)).collect()
    }
}

fn relates(compare: &Compare, record: Option<&Arc<Record>>) -> bool {
    let order = match &compare.target {
        Target::Version(wanted) => record.map_or(0, |record| record.version).cmp(wanted),
        Target::CreateRevision(wanted) => record.map_or(0, |record| record.create_revision.0).cmp(wanted),
        Target::ModRevision(wanted) => record.map_or(0, |record| record.mod_revision.0).cmp(wanted),
        Target::Lease(wanted) => record.and_then(|record| record.lease).map_or(0, |lease| lease.0).cmp(wanted),
        Target::Value(wanted) => match record {
            Some(record) => record.value.cmp(wanted),
            None => return false,
        },
    };
    match compare.relation {
        Relation::Equal => order == Ordering::Equal,
        Relation::NotEqual => order != Ordering::Equal,
        Relation::Greater => order == Ordering::Greater,
        Relation::Less => order == Ordering::Less,
    }
}

fn check_form(txn: &MvccTxn, max: usize) -> Result<(), Error> {
    if txn.compare.len().max(txn.success.len()).max(txn.failure.len()) > max {
        return Err(Error::TooManyOps { max });
    }
    let compared = txn.compare.iter().map(|compare| compare.span.start());
    let requested = txn.success.iter().chain(&txn.failure).map(|request| match request {
        MvccRequest::Range(range) => range.span.start(),
        MvccRequest::Put(put) => put.key.as_slice(),
        MvccRequest::Delete(delete) => delete.span.start(),
    });
    if compared.chain(requested).any(<[u8]>::is_empty) { Err(Error::EmptyKey) } else { Ok(()) }
}

fn check_size(txn: &MvccTxn, max: usize) -> Result<(), Error> {
    let compares = txn.compare.iter().map(|compare| {
        let value = if let Target::Value(value) = &compare.target { value.len() } else { 0 };
        compare.span.len() + value
    });
    let requests = txn.success.iter().chain(&txn.failure).map(|request| match request {
        MvccRequest::Range(range) => range.span.len(),
        MvccRequest::Put(put) => put.key.len() + put.value.as_ref().map_or(0, Vec::len),
        MvccRequest::Delete(delete) => delete.span.len(),
    });
    let bytes = compares.chain(requests).sum();
    if bytes > max { Err(Error::TooLarge { bytes, max }) } else { Ok(()) }
}

/// Refuses a put of a key that another put writes or a deletion covers.
fn check_duplicates(requests: &[MvccRequest]) -> Result<(), Error> {
    let mut puts = BTreeSet::new();
    for request in requests {
        let MvccRequest::Put(put) = request else { continue };
        let deleted = requests.iter().any(|other| match other {
            MvccRequest::Delete(delete) => delete.span.contains(&put.key),
            _ => false,
        });
        if deleted || !puts.insert(&put.key) {
            return Err(Error::DuplicateKey);
        }
    }
    Ok(())
}
