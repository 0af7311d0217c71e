//! What a server answered, with revisions counted from the case's beginning.

use etcd_client::Error;
use etcd_client::proto::{PbEvent, PbKeyValue, PbRangeResponse, PbResponseHeader, PbTxnOpResponse, PbTxnResponse};

/// An answer that can be compared with another server's.
#[derive(Debug, PartialEq)]
pub(crate) enum Answer {
    Txn(PbTxnResponse),
    /// A range's, with the store's revision.
    Range(PbRangeResponse, i64),
    /// What a put or deletion gives back, how many it deleted, and the store's revision.
    Written(Vec<PbKeyValue>, i64, i64),
    /// Success with nothing more to say than the store's revision.
    Done(i64),
    /// A lease's time and keys; -1 where it is gone.
    Lease(i64, Vec<Vec<u8>>),
    /// A refusal: code and text.
    Refused(i32, String),
    Event(PbEvent),
    /// A watch that was canceled, with the oldest revision left.
    Canceled(i64),
}

impl Answer {
    pub(crate) fn refused(error: Error) -> Answer {
        match error {
            Error::GRpcStatus(status) => Answer::Refused(status.code() as i32, status.message().to_owned()),
            other => panic!("no answer: {other}"),
        }
    }

    pub(crate) fn txn(mut response: PbTxnResponse, base: i64) -> Answer {
        let revision = revision(&response.header, base);
        localize_txn(&mut response, base);
        response.header = Some(PbResponseHeader { revision, ..PbResponseHeader::default() });
        Answer::Txn(response)
    }

    pub(crate) fn range(mut response: PbRangeResponse, base: i64) -> Answer {
        let revision = revision(&response.header, base);
        localize_range(&mut response, base);
        Answer::Range(response, revision)
    }

    pub(crate) fn written(
        header: &Option<PbResponseHeader>,
        mut prev: Vec<PbKeyValue>,
        deleted: i64,
        base: i64,
    ) -> Answer {
        prev.iter_mut().for_each(|kv| localize(kv, base));
        Answer::Written(prev, deleted, revision(header, base))
    }
}

/// The store's revision by a header, from the base on.
pub(crate) fn revision(header: &Option<PbResponseHeader>, base: i64) -> i64 {
    header.as_ref().expect("a header").revision - base
}

fn localize(kv: &mut PbKeyValue, base: i64) {
    for revision in [&mut kv.create_revision, &mut kv.mod_revision] {
        // Zero represents none.
        *revision -= if *revision == 0 { 0 } else { base };
    }
}

pub(crate) fn localize_event(event: &mut PbEvent, base: i64) {
    event.kv.iter_mut().chain(&mut event.prev_kv).for_each(|kv| localize(kv, base));
}

fn localize_range(range: &mut PbRangeResponse, base: i64) {
    range.header = None;
    for kv in &mut range.kvs {
        localize(kv, base);
        // Etcd 3.7 reads keys without values from its index, which has no leases.
        kv.lease = if kv.value.is_empty() { 0 } else { kv.lease };
    }
}

fn localize_txn(txn: &mut PbTxnResponse, base: i64) {
    txn.header = None;
    for response in &mut txn.responses {
        match response.response.as_mut().expect("an answer to each operation") {
            PbTxnOpResponse::ResponseRange(range) => localize_range(range, base),
            PbTxnOpResponse::ResponsePut(put) => {
                put.header = None;
                put.prev_kv.iter_mut().for_each(|kv| localize(kv, base));
            }
            PbTxnOpResponse::ResponseDeleteRange(delete) => {
                delete.header = None;
                delete.prev_kvs.iter_mut().for_each(|kv| localize(kv, base));
            }
            PbTxnOpResponse::ResponseTxn(_) => panic!("an answer to a nested transaction, which was not asked"),
        }
    }
}
