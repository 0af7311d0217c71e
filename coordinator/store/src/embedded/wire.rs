//! etcd's messages to and from the state machine's values. Nothing is decided here: whatever both sides can express is
//! passed on unchanged. The numbers are those of etcd's `rpc.proto`.

use etcd_client::proto::{
    PbCompare, PbDeleteRequest, PbDeleteResponse, PbEvent, PbKeyValue, PbPutRequest, PbPutResponse, PbRangeRequest,
    PbRangeResponse, PbResponseHeader, PbResponseOp, PbTargetUnion, PbTxnOpRequest, PbTxnOpResponse, PbTxnRequest,
    PbTxnRequestOp, PbTxnResponse,
};
use tonic::Status;

use super::mvcc::{
    Compare, Delete, Error, MvccEvent, MvccRequest, MvccTxn, Put, PutLease, Range, RangeResponse, Record, Relation,
    Response, Sort, SortBy, Span, Target, TxnResponse,
};
use super::status::{self, not_here, status};
use crate::{LeaseId, Revision};

/// Zero is protobuf's "not said".
fn said(revision: i64) -> Option<Revision> {
    (revision > 0).then_some(Revision(revision))
}

pub(super) fn range(request: PbRangeRequest) -> Result<Range, Status> {
    let by = match request.sort_target {
        0 => SortBy::Key,
        1 => SortBy::Version,
        2 => SortBy::CreateRevision,
        3 => SortBy::ModRevision,
        4 => SortBy::Value,
        _ => return Err(status::invalid_sort()),
    };
    let sort = match request.sort_order {
        // Without an order, a target other than the key means ascending.
        0 => (by != SortBy::Key).then_some(Sort { by, descending: false }),
        1 => Some(Sort { by, descending: false }),
        2 => Some(Sort { by, descending: true }),
        _ => return Err(status::invalid_sort()),
    };
    if [request.min_mod_revision, request.max_mod_revision, request.min_create_revision] != [0; 3] {
        return Err(not_here("filter by mod revision or by smallest create revision"));
    }
    Ok(Range {
        span: Span::of(request.key, request.range_end),
        revision: said(request.revision),
        limit: usize::try_from(request.limit).ok().filter(|&limit| limit > 0),
        sort,
        keys_only: request.keys_only,
        count_only: request.count_only,
        max_create_revision: said(request.max_create_revision),
    })
}

pub(super) fn put(request: PbPutRequest) -> Result<Put, Status> {
    if request.ignore_value && !request.value.is_empty() {
        return Err(Status::invalid_argument("etcdserver: value is provided"));
    }
    if request.ignore_lease && request.lease != 0 {
        return Err(Status::invalid_argument("etcdserver: lease is provided"));
    }
    let lease = match request.lease {
        _ if request.ignore_lease => PutLease::Keep,
        0 => PutLease::None,
        id => PutLease::On(LeaseId(id)),
    };
    let value = (!request.ignore_value).then_some(request.value);
    Ok(Put { key: request.key, value, lease, prev_kv: request.prev_kv })
}

pub(super) fn delete(request: PbDeleteRequest) -> Delete {
    Delete { span: Span::of(request.key, request.range_end), prev_kv: request.prev_kv }
}

pub(super) fn txn(request: PbTxnRequest) -> Result<MvccTxn, Status> {
    Ok(MvccTxn {
        compare: request.compare.into_iter().map(compare).collect::<Result<_, _>>()?,
        success: request.success.into_iter().map(operation).collect::<Result<_, _>>()?,
        failure: request.failure.into_iter().map(operation).collect::<Result<_, _>>()?,
    })
}

fn operation(operation: PbTxnRequestOp) -> Result<MvccRequest, Status> {
    Ok(match operation.request {
        Some(PbTxnOpRequest::RequestRange(request)) => MvccRequest::Range(range(request)?),
        Some(PbTxnOpRequest::RequestPut(request)) => MvccRequest::Put(put(request)?),
        Some(PbTxnOpRequest::RequestDeleteRange(request)) => MvccRequest::Delete(delete(request)),
        Some(PbTxnOpRequest::RequestTxn(_)) => return Err(not_here("nested transactions")),
        None => return Err(status(Error::KeyNotFound)),
    })
}

fn compare(compare: PbCompare) -> Result<Compare, Status> {
    // The target is named twice on the wire; where the two disagree etcd compares with the type's zero.
    let union = compare.target_union;
    let target = match (compare.target, union) {
        (0, Some(PbTargetUnion::Version(version))) => Target::Version(version),
        (0, _) => Target::Version(0),
        (1, Some(PbTargetUnion::CreateRevision(revision))) => Target::CreateRevision(revision),
        (1, _) => Target::CreateRevision(0),
        (2, Some(PbTargetUnion::ModRevision(revision))) => Target::ModRevision(revision),
        (2, _) => Target::ModRevision(0),
        (3, Some(PbTargetUnion::Value(value))) => Target::Value(value),
        (3, _) => Target::Value(Vec::new()),
        (4, Some(PbTargetUnion::Lease(lease))) => Target::Lease(lease),
        (4, _) => Target::Lease(0),
        _ => return Err(Status::invalid_argument("a condition looks at a field that is not known here")),
    };
    let relation = match compare.result {
        0 => Relation::Equal,
        1 => Relation::Greater,
        2 => Relation::Less,
        3 => Relation::NotEqual,
        _ => return Err(Status::invalid_argument("a condition compares in a way that is not known here")),
    };
    Ok(Compare { span: Span::of(compare.key, compare.range_end), target, relation })
}

pub(super) fn key_value(record: &Record) -> PbKeyValue {
    PbKeyValue {
        key: record.key.to_vec(),
        value: record.value.clone(),
        create_revision: record.create_revision.0,
        mod_revision: record.mod_revision.0,
        version: record.version,
        lease: record.lease.map_or(0, |lease| lease.0),
    }
}

pub(super) fn event(event: &MvccEvent, prev_kv: bool) -> PbEvent {
    const PUT: i32 = 0;
    const DELETE: i32 = 1;
    let kv = match &event.record {
        Some(record) => key_value(record),
        None => PbKeyValue { key: event.key.to_vec(), mod_revision: event.revision.0, ..PbKeyValue::default() },
    };
    PbEvent {
        r#type: if event.record.is_some() { PUT } else { DELETE },
        kv: Some(kv),
        prev_kv: event.prev.as_ref().filter(|_| prev_kv).map(|record| key_value(record)),
    }
}

pub(super) fn range_response(header: PbResponseHeader, response: RangeResponse) -> PbRangeResponse {
    PbRangeResponse {
        header: Some(header),
        kvs: response.records.iter().map(|record| key_value(record)).collect(),
        more: response.more,
        count: response.count as i64,
    }
}

/// Answers inside a transaction carry only the revision in their headers.
pub(super) fn txn_response(header: PbResponseHeader, done: TxnResponse) -> PbTxnResponse {
    let inner = PbResponseHeader { revision: header.revision, ..PbResponseHeader::default() };
    let responses = done.responses.into_iter().map(|response| PbResponseOp {
        response: Some(match response {
            Response::Range(response) => PbTxnOpResponse::ResponseRange(range_response(inner, response)),
            Response::Put(prev) => PbTxnOpResponse::ResponsePut(PbPutResponse {
                header: Some(inner),
                prev_kv: prev.map(|record| key_value(&record)),
            }),
            Response::Delete { deleted, prev } => PbTxnOpResponse::ResponseDeleteRange(PbDeleteResponse {
                header: Some(inner),
                deleted: deleted as i64,
                prev_kvs: prev.iter().map(|record| key_value(record)).collect(),
            }),
        }),
    });
    PbTxnResponse { header: Some(header), succeeded: done.succeeded, responses: responses.collect() }
}
