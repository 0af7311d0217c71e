//! Reading: now or at a past revision, sorted, filtered, limited. Changes nothing.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::{Error, Key, Mvcc, Range, RangeResponse, Record, Sort, SortBy, Span};
use crate::Revision;

impl Mvcc {
    /// Reads a span of keys.
    pub fn range(&self, range: &Range) -> Result<RangeResponse, Error> {
        self.check_range(range)?;
        Ok(self.read(range))
    }

    /// Every record in a span, in key order.
    pub fn records(&self, span: &Span) -> Vec<Arc<Record>> {
        self.live.range::<[u8], _>(span.bounds()).map(|(_, record)| record.clone()).collect()
    }

    pub(super) fn check_range(&self, range: &Range) -> Result<(), Error> {
        if range.span.start().is_empty() {
            return Err(Error::EmptyKey);
        }
        match range.revision {
            Some(requested) if requested > self.revision => {
                Err(Error::FutureRevision { requested, current: self.revision })
            }
            Some(requested) => Ok(self.history.check(requested)?),
            None => Ok(()),
        }
    }

    /// Reads what [`Mvcc::check_range`] let through. Within a transaction it sees the writes before it.
    pub(super) fn read(&self, range: &Range) -> RangeResponse {
        if range.count_only {
            let count = match range.revision {
                None => self.live.range::<[u8], _>(range.span.bounds()).count(),
                Some(at) => self.state_at(&range.span, at).len(),
            };
            return RangeResponse { records: Vec::new(), more: false, count };
        }
        let mut records: Vec<Arc<Record>> = match range.revision {
            None => self.records(&range.span),
            Some(at) => self.state_at(&range.span, at).into_values().collect(),
        };
        let count = records.len();
        records.retain(|record| range.max_create_revision.is_none_or(|max| record.create_revision <= max));
        if let Some(sort) = range.sort {
            sort_records(&mut records, sort);
        }
        let more = range.limit.is_some_and(|limit| records.len() > limit);
        records.truncate(range.limit.unwrap_or(usize::MAX));
        if range.keys_only {
            for record in &mut records {
                *record = Arc::new(Record { value: Vec::new(), ..Record::clone(record) });
            }
        }
        RangeResponse { records, more, count }
    }

    /// The records of a span as they stood at a past revision: those of now, with every later event undone.
    fn state_at(&self, span: &Span, at: Revision) -> BTreeMap<Key, Arc<Record>> {
        let now = self.live.range::<[u8], _>(span.bounds());
        let mut state: BTreeMap<Key, Arc<Record>> = now.map(|(key, record)| (key.clone(), record.clone())).collect();
        // Of several later events of a key the first knows what was there at `at`.
        let mut before: BTreeMap<&Key, Option<&Arc<Record>>> = BTreeMap::new();
        for event in self.history.since(at.next()).filter(|event| span.contains(&event.key)) {
            before.entry(&event.key).or_insert(event.prev.as_ref());
        }
        for (key, prev) in before {
            match prev {
                Some(record) => state.insert(key.clone(), record.clone()),
                None => state.remove(key),
            };
        }
        state
    }
}

fn sort_records(records: &mut [Arc<Record>], sort: Sort) {
    records.sort_by(|a, b| {
        let order = match sort.by {
            SortBy::Key => a.key.cmp(&b.key),
            SortBy::Version => a.version.cmp(&b.version),
            SortBy::CreateRevision => a.create_revision.cmp(&b.create_revision),
            SortBy::ModRevision => a.mod_revision.cmp(&b.mod_revision),
            SortBy::Value => a.value.cmp(&b.value),
        };
        if sort.descending { order.reverse() } else { order }
    });
}
