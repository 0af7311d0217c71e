//! The whole state as a message, for a store that begins with another's. The bounds are not part of it.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use elastic_proto::replication as wire;
use elastic_rendezvous::time::Time;
use prost::Message;

use super::{Key, Limits, Mvcc, MvccEvent, Record};
use crate::{LeaseId, Revision};

impl Limits {
    /// More bytes than the saved state of any store with these bounds has: its leases and last revision come on top.
    pub fn saved_bytes(&self) -> usize {
        self.live_bytes.saturating_add(2 * self.history_bytes).saturating_add(64 << 20)
    }
}

impl Mvcc {
    /// The state, for [`Mvcc::restored`].
    pub fn saved(&self) -> Vec<u8> {
        let event = |event: &MvccEvent| wire::Event {
            key: event.key.to_vec(),
            revision: event.revision.0.cast_unsigned(),
            record: event.record.as_deref().map(record),
            prev: event.prev.as_deref().map(record),
        };
        let state = wire::State {
            revision: self.revision.0.cast_unsigned(),
            oldest: self.history.oldest().0.cast_unsigned(),
            next_lease: self.leases.next_id().0.cast_unsigned(),
            live: self.live.values().map(|live| record(live)).collect(),
            history: self.history.since(Revision::NONE).map(event).collect(),
            leases: self.leases.all().map(|(id, ttl, expires)| lease(id, ttl, expires)).collect(),
        };
        state.encode_to_vec()
    }

    /// The store that was saved. An error: these bytes are no store's.
    pub fn restored(limits: Limits, bytes: &[u8]) -> Result<Mvcc, prost::DecodeError> {
        let state = wire::State::decode(bytes)?;
        let mut mvcc = Mvcc::new(limits, LeaseId(state.next_lease.cast_signed()));
        mvcc.revision = Revision(state.revision.cast_signed());
        for lease in state.leases {
            let (ttl, expires) =
                (Duration::from_nanos(lease.ttl), Time::from_zero(Duration::from_nanos(lease.expires)));
            mvcc.leases.put(LeaseId(lease.id.cast_signed()), ttl, expires, BTreeSet::new());
        }
        for live in state.live.into_iter().map(restored) {
            mvcc.live_bytes += live.size();
            mvcc.leases.move_key(&live.key, None, live.lease);
            mvcc.live.insert(live.key.clone(), live);
        }
        for event in state.history {
            let key = Key::from(event.key);
            // What is both live and an event's is one record.
            let shared = |from: wire::Record| {
                let live = mvcc.live.get(&key).filter(|live| live.mod_revision.0.cast_unsigned() == from.mod_revision);
                live.cloned().unwrap_or_else(|| restored(from))
            };
            let (record, prev) = (event.record.map(shared), event.prev.map(shared));
            let revision = Revision(event.revision.cast_signed());
            mvcc.history.push(MvccEvent { key, revision, record, prev });
        }
        mvcc.history.compact(Revision(state.oldest.cast_signed()));
        Ok(mvcc)
    }
}

fn record(record: &Record) -> wire::Record {
    wire::Record {
        key: record.key.to_vec(),
        value: record.value.clone(),
        create_revision: record.create_revision.0.cast_unsigned(),
        mod_revision: record.mod_revision.0.cast_unsigned(),
        version: record.version.cast_unsigned(),
        lease: record.lease.map_or(0, |lease| lease.0.cast_unsigned()),
    }
}

fn restored(record: wire::Record) -> Arc<Record> {
    Arc::new(Record {
        key: Key::from(record.key),
        value: record.value,
        create_revision: Revision(record.create_revision.cast_signed()),
        mod_revision: Revision(record.mod_revision.cast_signed()),
        version: record.version.cast_signed(),
        lease: (record.lease != 0).then_some(LeaseId(record.lease.cast_signed())),
    })
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

fn lease(id: LeaseId, ttl: Duration, expires: Time) -> wire::Lease {
    wire::Lease { id: id.0.cast_unsigned(), ttl: nanos(ttl), expires: nanos(expires.as_duration()) }
}
