//! Transactions: first everything that can be refused, then the conditions, then the writes, which cannot fail.

use std::cmp::Ordering;
use std::collections::BTreeSet;
use std::sync::Arc;

use super::request::size_of;
use super::{
    Branch, Compare, Error, Mvcc, MvccRequest, MvccTxn, Put, PutLease, Range, Record, Relation, Response, Span, Target,
    TxnResponse,
};
use crate::store::Revision;
use crate::time::Time;

impl Mvcc {
    /// Runs a transaction; a single put or deletion is one with a single operation. An error changed nothing.
    ///
    /// # Errors
    /// All but those of leases' own calls.
    pub fn txn(&mut self, now: Time, txn: &MvccTxn) -> Result<TxnResponse, Error> {
        self.expire(now);
        check_form(txn, self.limits.txn_ops)?;
        check_size(txn, self.limits.request_bytes)?;
        writes_of(&txn.success)?;
        writes_of(&txn.failure)?;
        let chosen = self.choose(txn);
        let mut growth = Growth::default();
        self.check_puts(&chosen, &mut growth)?;
        self.check_ranges(&chosen)?;
        self.check_space(&growth)?;
        let at = self.revision.next();
        let branch = self.run(at, &chosen);
        self.commit(at);
        Ok(TxnResponse { branch, revision: self.revision })
    }

    /// Judges all conditions, nested ones too, on the state before the transaction.
    fn choose<'a>(&self, txn: &'a MvccTxn) -> Chosen<'a> {
        let succeeded = txn.compare.iter().all(|compare| self.holds(compare));
        let requests = if succeeded { &txn.success } else { &txn.failure };
        let steps = requests
            .iter()
            .map(|request| match request {
                MvccRequest::Txn(txn) => Step::Txn(self.choose(txn)),
                MvccRequest::Range(range) => Step::Range(range),
                MvccRequest::Put(put) => Step::Put(put),
                MvccRequest::Delete(delete) => Step::Delete(&delete.span, delete.prev_kv),
            })
            .collect();
        Chosen { succeeded, steps }
    }

    fn holds(&self, compare: &Compare) -> bool {
        let mut found = self.live.range::<[u8], _>(compare.span.bounds()).map(|(_, record)| record).peekable();
        if found.peek().is_none() {
            return relates(compare, None);
        }
        found.all(|record| relates(compare, Some(record)))
    }

    fn check_puts(&self, chosen: &Chosen, growth: &mut Growth) -> Result<(), Error> {
        for step in &chosen.steps {
            match step {
                Step::Put(put) => {
                    let old = self.live.get(put.key.as_slice());
                    if old.is_none() && (put.value.is_none() || put.lease == PutLease::Keep) {
                        return Err(Error::KeyNotFound);
                    }
                    if let PutLease::On(lease) = put.lease
                        && !self.leases.exists(lease)
                    {
                        return Err(Error::LeaseNotFound);
                    }
                    growth.add(put, old);
                }
                Step::Txn(inner) => self.check_puts(inner, growth)?,
                Step::Range(_) | Step::Delete(..) => {}
            }
        }
        Ok(())
    }

    fn check_ranges(&self, chosen: &Chosen) -> Result<(), Error> {
        chosen.steps.iter().try_for_each(|step| match step {
            Step::Range(range) => self.check_range(range),
            Step::Txn(inner) => self.check_ranges(inner),
            Step::Put(_) | Step::Delete(..) => Ok(()),
        })
    }

    /// Refuses growth beyond the bounds. What does not grow is let through, so that a full store can still be used.
    fn check_space(&self, growth: &Growth) -> Result<(), Error> {
        let bytes = growth.gained > growth.given_up
            && self.live_bytes + growth.gained - growth.given_up > self.limits.live_bytes;
        let keys = growth.keys > 0 && self.live.len() + growth.keys > self.limits.live_keys;
        if bytes || keys { Err(Error::NoSpace) } else { Ok(()) }
    }

    fn run(&mut self, at: Revision, chosen: &Chosen) -> Branch {
        let responses = chosen
            .steps
            .iter()
            .map(|step| match step {
                Step::Range(range) => Response::Range(self.read(range)),
                Step::Put(put) => Response::Put(self.put(at, put).filter(|_| put.prev_kv)),
                Step::Delete(span, prev_kv) => {
                    let prev = self.delete(at, span);
                    Response::Delete { deleted: prev.len(), prev: if *prev_kv { prev } else { Vec::new() } }
                }
                Step::Txn(inner) => Response::Txn(self.run(at, inner)),
            })
            .collect();
        Branch { succeeded: chosen.succeeded, responses }
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

/// A transaction whose conditions have been judged: what will be done.
struct Chosen<'a> {
    succeeded: bool,
    steps: Vec<Step<'a>>,
}

enum Step<'a> {
    Range(&'a Range),
    Put(&'a Put),
    Delete(&'a Span, bool),
    Txn(Chosen<'a>),
}

/// What the puts of a transaction would add to the live keys.
#[derive(Default)]
struct Growth {
    gained: usize,
    given_up: usize,
    keys: usize,
}

impl Growth {
    fn add(&mut self, put: &Put, old: Option<&Arc<Record>>) {
        if let Some(value) = &put.value {
            self.gained += size_of(&put.key, value);
            self.given_up += old.map_or(0, |record| record.size());
        }
        self.keys += usize::from(old.is_none());
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

/// Counts and empty keys. As in etcd, a nested transaction has what its parent's widest part left over.
fn check_form(txn: &MvccTxn, budget: usize) -> Result<(), Error> {
    let widest = txn.compare.len().max(txn.success.len()).max(txn.failure.len());
    if widest > budget {
        return Err(Error::TooManyOps { max: budget });
    }
    if txn.compare.iter().any(|compare| compare.span.start().is_empty()) {
        return Err(Error::EmptyKey);
    }
    for request in txn.success.iter().chain(&txn.failure) {
        let key = match request {
            MvccRequest::Txn(inner) => {
                check_form(inner, budget - widest)?;
                continue;
            }
            MvccRequest::Range(range) => range.span.start(),
            MvccRequest::Put(put) => &put.key,
            MvccRequest::Delete(delete) => delete.span.start(),
        };
        if key.is_empty() {
            return Err(Error::EmptyKey);
        }
    }
    Ok(())
}

fn check_size(txn: &MvccTxn, max: usize) -> Result<(), Error> {
    let bytes = bytes_of(txn);
    if bytes > max { Err(Error::TooLarge { bytes, max }) } else { Ok(()) }
}

fn bytes_of(txn: &MvccTxn) -> usize {
    let compares = txn.compare.iter().map(|compare| {
        let value = if let Target::Value(value) = &compare.target { value.len() } else { 0 };
        compare.span.len() + value
    });
    let requests = txn.success.iter().chain(&txn.failure).map(|request| match request {
        MvccRequest::Range(range) => range.span.len(),
        MvccRequest::Put(put) => put.key.len() + put.value.as_ref().map_or(0, Vec::len),
        MvccRequest::Delete(delete) => delete.span.len(),
        MvccRequest::Txn(inner) => bytes_of(inner),
    });
    compares.chain(requests).sum()
}

/// What a list of requests may write, whichever branches are taken.
struct Writes<'a> {
    puts: BTreeSet<&'a [u8]>,
    deletes: Vec<&'a Span>,
}

impl<'a> Writes<'a> {
    fn put(&mut self, key: &'a [u8]) -> Result<(), Error> {
        if self.deletes.iter().any(|span| span.contains(key)) || !self.puts.insert(key) {
            return Err(Error::DuplicateKey);
        }
        Ok(())
    }
}

/// Finds keys written twice, by etcd's rule: a put conflicts with another put of its key and with any deletion over it,
/// unless the two are in opposite branches of one nested transaction. Like etcd it overlooks a deletion in a nested
/// transaction that follows the put in another nested one; the order of operations decides that.
fn writes_of(requests: &[MvccRequest]) -> Result<Writes<'_>, Error> {
    let deletes = requests.iter().filter_map(|request| match request {
        MvccRequest::Delete(delete) => Some(&delete.span),
        _ => None,
    });
    let mut writes = Writes { puts: BTreeSet::new(), deletes: deletes.collect() };
    for request in requests {
        if let MvccRequest::Txn(inner) = request {
            let (then, otherwise) = (writes_of(&inner.success)?, writes_of(&inner.failure)?);
            for key in then.puts.union(&otherwise.puts) {
                writes.put(key)?;
            }
            writes.deletes.extend(then.deletes);
            writes.deletes.extend(otherwise.deletes);
        }
    }
    for request in requests {
        if let MvccRequest::Put(put) = request {
            writes.put(&put.key)?;
        }
    }
    Ok(writes)
}
