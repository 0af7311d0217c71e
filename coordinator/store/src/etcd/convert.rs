//! Between our transactions and events and etcd's.

use etcd_client::proto::{PbEvent, PbKeyValue, PbTxnOpResponse};
use etcd_client::{
    Compare, CompareOp, DeleteOptions, EventType, GetOptions, PutOptions, SortOrder, SortTarget, TxnOp, TxnResponse,
};

use crate::{Event, Guard, KeyValue, LeaseId, Op, OpResult, Revision, Txn, TxnResult};

pub(super) fn request(txn: &Txn) -> etcd_client::Txn {
    etcd_client::Txn::new()
        .when(txn.when.iter().map(compare).collect::<Vec<_>>())
        .and_then(txn.then.iter().map(operation).collect::<Vec<_>>())
        .or_else(txn.otherwise.iter().map(operation).collect::<Vec<_>>())
}

fn compare(guard: &Guard) -> Compare {
    match guard {
        Guard::Created { key, revision } => Compare::create_revision(key.as_str(), CompareOp::Equal, revision.0),
        Guard::Modified { key, revision } => Compare::mod_revision(key.as_str(), CompareOp::Equal, revision.0),
        // A comparison of a range holds if it holds for every key in it. No key has create revision zero, so this one
        // holds for an empty range alone. All keys are the range from \0 to \0.
        Guard::Empty(prefix) if prefix.is_empty() => {
            Compare::create_revision("\0", CompareOp::Equal, 0).with_range("\0")
        }
        Guard::Empty(prefix) => Compare::create_revision(prefix.as_str(), CompareOp::Equal, 0).with_prefix(),
    }
}

fn operation(op: &Op) -> TxnOp {
    match op {
        Op::Get(key) => TxnOp::get(key.as_str(), None),
        Op::Range(prefix) => TxnOp::get(prefix.as_str(), Some(GetOptions::new().with_prefix())),
        Op::Last(prefix) => {
            let last = GetOptions::new().with_prefix().with_sort(SortTarget::Key, SortOrder::Descend).with_limit(1);
            TxnOp::get(prefix.as_str(), Some(last))
        }
        Op::Count(prefix) => TxnOp::get(prefix.as_str(), Some(GetOptions::new().with_prefix().with_count_only())),
        Op::Put { key, value, lease } => {
            let options = lease.map(|lease| PutOptions::new().with_lease(lease.0));
            TxnOp::put(key.as_str(), value.as_slice(), options)
        }
        Op::Delete(key) => TxnOp::delete(key.as_str(), None),
        Op::DeletePrefix(prefix) => TxnOp::delete(prefix.as_str(), Some(DeleteOptions::new().with_prefix())),
    }
}

/// The result of a transaction, or `None` if the answer does not fit the request.
pub(super) fn result(txn: &Txn, response: TxnResponse) -> Option<TxnResult> {
    let response = response.0;
    let branch = if response.succeeded { &txn.then } else { &txn.otherwise };
    if branch.len() != response.responses.len() {
        return None;
    }
    let results = branch.iter().zip(response.responses).map(|(op, answer)| op_result(op, answer.response?));
    Some(TxnResult {
        succeeded: response.succeeded,
        revision: Revision(response.header?.revision),
        results: results.collect::<Option<_>>()?,
    })
}

fn op_result(op: &Op, response: PbTxnOpResponse) -> Option<OpResult> {
    match (op, response) {
        (Op::Count(..), PbTxnOpResponse::ResponseRange(range)) => Some(OpResult::Count(range.count)),
        (Op::Get(..) | Op::Range(..) | Op::Last(..), PbTxnOpResponse::ResponseRange(range)) => {
            Some(OpResult::Values(range.kvs.into_iter().map(key_value).collect()))
        }
        (Op::Put { .. }, PbTxnOpResponse::ResponsePut(_)) => Some(OpResult::Put),
        (Op::Delete(..) | Op::DeletePrefix(..), PbTxnOpResponse::ResponseDeleteRange(deleted)) => {
            Some(OpResult::Deleted(deleted.deleted))
        }
        _ => None,
    }
}

fn key_value(kv: PbKeyValue) -> KeyValue {
    KeyValue {
        key: text(kv.key),
        value: kv.value,
        create_revision: Revision(kv.create_revision),
        mod_revision: Revision(kv.mod_revision),
        lease: (kv.lease != 0).then_some(LeaseId(kv.lease)),
    }
}

/// An event, or `None` for a kind that does not exist in the v3 API.
pub(super) fn event(event: PbEvent) -> Option<Event> {
    let kv = event.kv?;
    match EventType::try_from(event.r#type).ok()? {
        EventType::Put => Some(Event::Put(key_value(kv))),
        EventType::Delete => Some(Event::Delete { key: text(kv.key), revision: Revision(kv.mod_revision) }),
    }
}

fn text(key: Vec<u8>) -> String {
    String::from_utf8(key).unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned())
}
