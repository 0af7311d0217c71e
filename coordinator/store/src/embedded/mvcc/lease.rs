//! Leases: which keys hang on them, and when they end.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::{Error, Key, Mvcc};
use crate::LeaseId;
use elastic_rendezvous::time::Time;

/// The longest lease etcd grants.
pub const MAX_TTL: Duration = Duration::from_secs(9_000_000_000);

/// What is known of a lease.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LeaseStatus {
    /// Time left, if no one renews it.
    pub left: Duration,
    /// Time it was granted for, and is renewed for.
    pub granted: Duration,
    /// The keys that hang on it, in order.
    pub keys: Vec<Key>,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct Lease {
    ttl: Duration,
    expires: Time,
    keys: BTreeSet<Key>,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(super) struct Leases {
    leases: BTreeMap<LeaseId, Lease>,
    /// The same leases by the time they end.
    queue: BTreeSet<(Time, LeaseId)>,
    next_id: LeaseId,
}

impl Leases {
    pub(super) fn new(first: LeaseId) -> Leases {
        Leases { leases: BTreeMap::new(), queue: BTreeSet::new(), next_id: first }
    }

    pub(super) fn exists(&self, id: LeaseId) -> bool {
        self.leases.contains_key(&id)
    }

    /// Takes a key off one lease and hangs it on another.
    pub(super) fn move_key(&mut self, key: &Key, from: Option<LeaseId>, to: Option<LeaseId>) {
        if let Some(lease) = from.and_then(|id| self.leases.get_mut(&id)) {
            lease.keys.remove(key);
        }
        if let Some(lease) = to.and_then(|id| self.leases.get_mut(&id)) {
            lease.keys.insert(key.clone());
        }
    }

    /// Where the store's own ids continue.
    pub(super) fn next_id(&self) -> LeaseId {
        self.next_id
    }

    /// Every lease: its time, and when that is up.
    pub(super) fn all(&self) -> impl Iterator<Item = (LeaseId, Duration, Time)> {
        self.leases.iter().map(|(&id, lease)| (id, lease.ttl, lease.expires))
    }

    pub(super) fn put(&mut self, id: LeaseId, ttl: Duration, expires: Time, keys: BTreeSet<Key>) {
        self.queue.insert((expires, id));
        self.leases.insert(id, Lease { ttl, expires, keys });
    }

    fn renew(&mut self, id: LeaseId, now: Time) -> Option<Duration> {
        let lease = self.leases.get_mut(&id)?;
        self.queue.remove(&(lease.expires, id));
        // A clock that seems to run backwards must not shorten what was promised.
        lease.expires = lease.expires.max(now + lease.ttl);
        self.queue.insert((lease.expires, id));
        Some(lease.ttl)
    }

    fn remove(&mut self, id: LeaseId) -> Option<Lease> {
        let lease = self.leases.remove(&id)?;
        self.queue.remove(&(lease.expires, id));
        Some(lease)
    }

    fn unused_id(&mut self) -> LeaseId {
        loop {
            let id = self.next_id;
            self.next_id = LeaseId(if id.0 < i64::MAX { id.0 + 1 } else { 1 });
            if id.0 > 0 && !self.exists(id) {
                return id;
            }
        }
    }
}

impl Mvcc {
    /// Grants a lease under the given id, or one of the store's choosing. The time is rounded up to whole seconds, as
    /// etcd counts, and raised to [`super::Limits::min_ttl`]; the answer says what it became.
    pub fn grant(&mut self, now: Time, id: Option<LeaseId>, ttl: Duration) -> Result<(LeaseId, Duration), Error> {
        self.expire(now);
        if ttl > MAX_TTL {
            return Err(Error::TtlTooLarge { max_seconds: MAX_TTL.as_secs() });
        }
        if id.is_some_and(|id| self.leases.exists(id)) {
            return Err(Error::LeaseExists);
        }
        if self.leases.leases.len() >= self.limits.leases {
            return Err(Error::NoSpace);
        }
        let id = id.unwrap_or_else(|| self.leases.unused_id());
        let seconds = ttl.as_secs() + u64::from(ttl.subsec_nanos() > 0);
        let ttl = Duration::from_secs(seconds).max(self.limits.min_ttl);
        self.leases.put(id, ttl, now + ttl, BTreeSet::new());
        Ok((id, ttl))
    }

    /// Renews a lease for its full time from `now`; `None` if it does not exist.
    pub fn keep_alive(&mut self, now: Time, id: LeaseId) -> Option<Duration> {
        self.expire(now);
        self.leases.renew(id, now)
    }

    /// Ends a lease and deletes its keys, in one revision.
    pub fn revoke(&mut self, now: Time, id: LeaseId) -> Result<(), Error> {
        self.expire(now);
        self.end_lease(id)
    }

    fn end_lease(&mut self, id: LeaseId) -> Result<(), Error> {
        let lease = self.leases.remove(id).ok_or(Error::LeaseNotFound)?;
        let at = self.revision.next();
        for key in &lease.keys {
            self.remove(at, key);
        }
        self.commit(at);
        Ok(())
    }

    /// Gives every lease its whole time again: another clock counts from now on, and what was left by the one before is
    /// not known. No lease is shorter for it.
    pub fn renew_all(&mut self, now: Time) {
        let Leases { leases, queue, .. } = &mut self.leases;
        queue.clear();
        for (id, lease) in leases {
            lease.expires = now + lease.ttl;
            queue.insert((lease.expires, *id));
        }
    }

    /// Ends the leases whose time is up, each in a revision of its own, the longest overdue first; returns them.
    pub fn expire(&mut self, now: Time) -> Vec<LeaseId> {
        let mut ended = Vec::new();
        while let Some(&(expires, id)) = self.leases.queue.first()
            && expires <= now
            && self.end_lease(id).is_ok()
        {
            ended.push(id);
        }
        ended
    }

    /// When the next lease ends unless it is renewed: the time to call [`Mvcc::expire`].
    pub fn next_expiry(&self) -> Option<Time> {
        self.leases.queue.first().map(|&(expires, _)| expires)
    }

    /// What is known of a lease; `None` if it does not exist, or its time is up.
    pub fn lease(&self, now: Time, id: LeaseId) -> Option<LeaseStatus> {
        let lease = self.leases.leases.get(&id).filter(|lease| lease.expires > now)?;
        Some(LeaseStatus {
            left: lease.expires.since(now),
            granted: lease.ttl,
            keys: lease.keys.iter().cloned().collect(),
        })
    }

    /// All leases, the soonest to end first.
    pub fn leases(&self) -> Vec<LeaseId> {
        self.leases.queue.iter().map(|&(_, id)| id).collect()
    }
}
