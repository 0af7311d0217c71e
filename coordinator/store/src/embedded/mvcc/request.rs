//! What can be asked of the store, and what it answers: etcd v3's requests as plain values.
//! Not the wire format: `crate::embedded` translates that.

use std::ops::Bound;
use std::sync::Arc;

use crate::{LeaseId, Revision};

/// A key's bytes, shared between the live map, the history and answers.
pub type Key = Arc<[u8]>;

/// A key as it stood after one write.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Record {
    /// The key.
    pub key: Key,
    /// The value.
    pub value: Vec<u8>,
    /// Revision at which the key came into being.
    pub create_revision: Revision,
    /// Revision of this write.
    pub mod_revision: Revision,
    /// Writes since the key came into being, this one included.
    pub version: i64,
    /// The lease the key hangs on.
    pub lease: Option<LeaseId>,
}

impl Record {
    /// Bytes it is charged for.
    pub(super) fn size(&self) -> usize {
        size_of(&self.key, &self.value)
    }
}

/// Bytes that a key and its value are charged for, with a flat sum for their bookkeeping.
pub(super) fn size_of(key: &[u8], value: &[u8]) -> usize {
    key.len() + value.len() + 128
}

/// A set of keys that are neighbours in key order.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum Span {
    /// One key.
    One(Vec<u8>),
    /// From the first, included, to the second, left out. Empty if they are not in order.
    Between(Vec<u8>, Vec<u8>),
    /// This key and all after it.
    From(Vec<u8>),
}

impl Span {
    /// What etcd means by a key and a range end: no end is one key, an end of one zero byte is everything from there.
    pub fn of(key: Vec<u8>, range_end: Vec<u8>) -> Span {
        match range_end.as_slice() {
            [] => Span::One(key),
            [0] => Span::From(key),
            _ => Span::Between(key, range_end),
        }
    }

    /// All keys that begin with these bytes.
    pub fn prefix(prefix: &[u8]) -> Span {
        if prefix.is_empty() {
            return Span::From(vec![0]);
        }
        let mut end = prefix.to_vec();
        while let Some(last) = end.pop() {
            if last < u8::MAX {
                end.push(last + 1);
                return Span::Between(prefix.to_vec(), end);
            }
        }
        Span::From(prefix.to_vec())
    }

    /// Its first key.
    pub fn start(&self) -> &[u8] {
        match self {
            Span::One(key) | Span::Between(key, _) | Span::From(key) => key,
        }
    }

    /// Bytes it takes to say it.
    pub(super) fn len(&self) -> usize {
        match self {
            Span::One(key) | Span::From(key) => key.len(),
            Span::Between(start, end) => start.len() + end.len(),
        }
    }

    /// Whether a key lies inside.
    pub fn contains(&self, key: &[u8]) -> bool {
        match self {
            Span::One(own) => own == key,
            Span::Between(start, end) => start.as_slice() <= key && key < end.as_slice(),
            Span::From(start) => start.as_slice() <= key,
        }
    }

    pub(super) fn bounds(&self) -> (Bound<&[u8]>, Bound<&[u8]>) {
        match self {
            Span::One(key) => (Bound::Included(key), Bound::Included(key)),
            // An ordered map refuses a start beyond the end, which etcd reads as "no keys".
            Span::Between(start, end) => (Bound::Included(start), Bound::Excluded(end.max(start))),
            Span::From(start) => (Bound::Included(start), Bound::Unbounded),
        }
    }
}

/// What a range is sorted by.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[allow(missing_docs)]
pub enum SortBy {
    Key,
    Version,
    CreateRevision,
    ModRevision,
    Value,
}

/// The order of a range's answer. Ties stay in key order.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Sort {
    /// By what.
    pub by: SortBy,
    /// Whether the greatest comes first.
    pub descending: bool,
}

/// Reads a span of keys.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Range {
    /// Which keys.
    pub span: Span,
    /// State at this revision instead of now.
    pub revision: Option<Revision>,
    /// At most so many keys.
    pub limit: Option<usize>,
    /// Order; without one, key order.
    pub sort: Option<Sort>,
    /// Leave out the values.
    pub keys_only: bool,
    /// Only count.
    pub count_only: bool,
    /// Only keys created at or before this, as etcd's locks ask.
    pub max_create_revision: Option<Revision>,
}

impl Range {
    /// All keys of a span, now, in key order.
    pub fn of(span: Span) -> Range {
        Range {
            span,
            revision: None,
            limit: None,
            sort: None,
            keys_only: false,
            count_only: false,
            max_create_revision: None,
        }
    }
}

/// The lease part of a put.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum PutLease {
    /// Hang the key on no lease.
    None,
    /// Hang it on this one.
    On(LeaseId),
    /// Leave it where it hangs; the key must exist.
    Keep,
}

/// Writes a key.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Put {
    /// The key.
    pub key: Vec<u8>,
    /// The value; `None` keeps the one it has, and the key must exist.
    pub value: Option<Vec<u8>>,
    /// The lease.
    pub lease: PutLease,
    /// Answer with the record that was replaced.
    pub prev_kv: bool,
}

/// Deletes a span of keys.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Delete {
    /// Which keys.
    pub span: Span,
    /// Answer with the records that were deleted.
    pub prev_kv: bool,
}

/// One operation.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum MvccRequest {
    /// A read.
    Range(Range),
    /// A write.
    Put(Put),
    /// A deletion.
    Delete(Delete),
}

/// What a condition looks at, and what it is held against.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum Target {
    /// The record's version; zero if the key is absent.
    Version(i64),
    /// The record's create revision; zero if the key is absent.
    CreateRevision(i64),
    /// The record's mod revision; zero if the key is absent.
    ModRevision(i64),
    /// The value. Never true of an absent key.
    Value(Vec<u8>),
    /// The id of the lease; zero for none.
    Lease(i64),
}

/// How what is found must relate to the target.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[allow(missing_docs)]
pub enum Relation {
    Equal,
    NotEqual,
    Greater,
    Less,
}

/// A condition. Over several keys it must hold for each; over none it is judged as for an absent key.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Compare {
    /// Which keys.
    pub span: Span,
    /// What of them, against what.
    pub target: Target,
    /// How.
    pub relation: Relation,
}

/// If all conditions hold `success`, else `failure`; atomic, and all its writes share one revision.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub struct MvccTxn {
    /// The conditions.
    pub compare: Vec<Compare>,
    /// Done if all hold.
    pub success: Vec<MvccRequest>,
    /// Done if one does not.
    pub failure: Vec<MvccRequest>,
}

impl MvccTxn {
    /// One unconditional operation.
    pub fn one(request: MvccRequest) -> MvccTxn {
        MvccTxn { compare: Vec::new(), success: vec![request], failure: Vec::new() }
    }
}

/// Answer to a [`Range`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RangeResponse {
    /// The records, sorted, filtered and limited as asked; none if only the count was wanted.
    pub records: Vec<Arc<Record>>,
    /// Whether the limit left some out.
    pub more: bool,
    /// Keys in the span at that revision, whatever the limit and filters.
    pub count: usize,
}

/// Answer to one operation.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Response {
    /// To a range.
    Range(RangeResponse),
    /// To a put: what it replaced, if that was wanted.
    Put(Option<Arc<Record>>),
    /// To a deletion.
    Delete {
        /// How many keys.
        deleted: usize,
        /// Them, if that was wanted.
        prev: Vec<Arc<Record>>,
    },
}

/// Answer to a whole transaction.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TxnResponse {
    /// Whether the conditions held.
    pub succeeded: bool,
    /// One answer for each operation of the branch taken.
    pub responses: Vec<Response>,
    /// The store's revision after it.
    pub revision: Revision,
}

/// One change of one key.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct MvccEvent {
    /// The key.
    pub key: Key,
    /// When.
    pub revision: Revision,
    /// The record written; `None` if the key was deleted.
    pub record: Option<Arc<Record>>,
    /// The record before this revision.
    pub prev: Option<Arc<Record>>,
}

impl MvccEvent {
    /// Bytes it is charged for. The record before is charged too: once older history is gone, no one else holds it.
    pub fn size(&self) -> usize {
        let record = self.record.as_ref().map_or(0, |record| record.size());
        let prev = self.prev.as_ref().map_or(0, |record| record.size());
        size_of(&self.key, &[]) + record + prev
    }
}
