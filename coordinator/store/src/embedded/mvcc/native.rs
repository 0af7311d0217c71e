//! The state machine in the words of [`crate::store`]: for the in-process store and for simulations.

use super::{Compare, Delete, Key, Mvcc, MvccEvent, MvccRequest, Put, PutLease, Range, Record, Relation};
use super::{MvccTxn, Response, Sort, SortBy, Span, Target};
use crate as store;
use crate::{Guard, KeyValue, Op, OpResult, Scope, StoreError, TxnResult};
use elastic_rendezvous::time::Time;

impl Mvcc {
    /// Runs one of our transactions. An error changed nothing.
    pub fn apply(&mut self, now: Time, txn: &store::Txn) -> Result<TxnResult, StoreError> {
        let branch = |ops: &[Op]| ops.iter().map(request).collect::<Vec<_>>();
        let native = MvccTxn {
            compare: txn.when.iter().map(compare).collect(),
            success: branch(&txn.then),
            failure: branch(&txn.otherwise),
        };
        let done = self.txn(now, &native)?;
        let ops = if done.succeeded { &txn.then } else { &txn.otherwise };
        let results = ops.iter().zip(done.responses).map(|(op, response)| result(op, response));
        Ok(TxnResult { succeeded: done.succeeded, revision: done.revision, results: results.collect() })
    }

    /// Every key in scope, in key order.
    pub fn snapshot(&self, scope: &Scope) -> Vec<KeyValue> {
        self.records(&scope.into()).iter().map(|record| KeyValue::from(&**record)).collect()
    }
}

impl From<&Scope> for Span {
    fn from(scope: &Scope) -> Span {
        match scope {
            Scope::Key(key) => one(key),
            Scope::Prefix(prefix) => Span::prefix(prefix.as_bytes()),
        }
    }
}

fn one(key: &str) -> Span {
    Span::One(key.as_bytes().to_vec())
}

fn compare(guard: &Guard) -> Compare {
    let (span, target) = match guard {
        Guard::Created { key, revision } => (one(key), Target::CreateRevision(revision.0)),
        Guard::Modified { key, revision } => (one(key), Target::ModRevision(revision.0)),
        // No key that exists has create revision zero.
        Guard::Empty(prefix) => (Span::prefix(prefix.as_bytes()), Target::CreateRevision(0)),
    };
    Compare { span, target, relation: Relation::Equal }
}

fn request(op: &Op) -> MvccRequest {
    match op {
        Op::Get(key) => MvccRequest::Range(Range::of(one(key))),
        Op::Range(prefix) => MvccRequest::Range(Range::of(Span::prefix(prefix.as_bytes()))),
        Op::Last(prefix) => MvccRequest::Range(Range {
            sort: Some(Sort { by: SortBy::Key, descending: true }),
            limit: Some(1),
            ..Range::of(Span::prefix(prefix.as_bytes()))
        }),
        Op::Count(prefix) => {
            MvccRequest::Range(Range { count_only: true, ..Range::of(Span::prefix(prefix.as_bytes())) })
        }
        Op::Put { key, value, lease } => MvccRequest::Put(Put {
            key: key.as_bytes().to_vec(),
            value: Some(value.clone()),
            lease: lease.map_or(PutLease::None, PutLease::On),
            prev_kv: false,
        }),
        Op::Delete(key) => MvccRequest::Delete(Delete { span: one(key), prev_kv: false }),
        Op::DeletePrefix(prefix) => {
            MvccRequest::Delete(Delete { span: Span::prefix(prefix.as_bytes()), prev_kv: false })
        }
    }
}

fn result(op: &Op, response: Response) -> OpResult {
    match response {
        Response::Range(range) if matches!(op, Op::Count(..)) => OpResult::Count(range.count as i64),
        Response::Range(range) => {
            OpResult::Values(range.records.iter().map(|record| KeyValue::from(&**record)).collect())
        }
        Response::Delete { deleted, .. } => OpResult::Deleted(deleted as i64),
        Response::Put(_) => OpResult::Put,
    }
}

fn text(key: &Key) -> String {
    String::from_utf8_lossy(key).into_owned()
}

impl From<&Record> for KeyValue {
    fn from(record: &Record) -> KeyValue {
        KeyValue {
            key: text(&record.key),
            value: record.value.clone(),
            create_revision: record.create_revision,
            mod_revision: record.mod_revision,
            lease: record.lease,
        }
    }
}

impl From<&MvccEvent> for store::Event {
    fn from(event: &MvccEvent) -> store::Event {
        match &event.record {
            Some(record) => store::Event::Put(KeyValue::from(&**record)),
            None => store::Event::Delete { key: text(&event.key), revision: event.revision },
        }
    }
}
