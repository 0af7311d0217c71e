//! The one live copy of the embedded store: a lock around the state machine, its clock, and the subscriptions. The
//! rules about keys are in [`crate::embedded::mvcc`].
//!
//! Writers never wait for watchers. A subscription is a span and a place in the history; after each write the hub wakes
//! those whose span was touched and moves the others on. Each reads its events from the history at its own pace, so the
//! history is the only buffer, and one that falls behind its bound starts again from a snapshot.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use tokio::sync::Notify;

use super::command::{self, Answer};
use super::mvcc::{Compacted, Limits, Mvcc, MvccEvent, Record, Span};
use crate::{LeaseId, Revision};
use elastic_proto::replication::Command;
use elastic_rendezvous::time::Time;

/// Sleeps for a lease's end are cut into pieces of this length. The timer stops while the machine is suspended
/// and the clock that leases run on does not: so a lease that ended meanwhile is noticed this soon.
const LONGEST_SLEEP: Duration = Duration::from_secs(1);

/// What one delivery may hold before it ends at the next revision: well under what gRPC clients take in a message.
const BATCH_BYTES: usize = 512 << 10;

/// Where a replicated store would begin to choose the ids of leases; each grant in its log has one already.
pub(super) const FIRST_LEASE: LeaseId = LeaseId(1);

/// The embedded store's state, shared by the in-process store and the server.
#[derive(Debug)]
pub struct Hub {
    state: Mutex<State>,
    /// Told when a lease ends earlier than the expiry task believes, and when the hub is gone.
    expiry: Arc<Notify>,
    /// It changes by commands alone.
    idle: bool,
}

#[derive(Debug)]
struct State {
    mvcc: Mvcc,
    /// Up to here subscriptions have their events.
    published: Revision,
    subscriptions: BTreeMap<u64, Cursor>,
    next_subscription: u64,
    /// When the expiry task will look next.
    alarm: Option<Time>,
}

/// Where a subscription is in the history.
#[derive(Debug)]
struct Cursor {
    span: Span,
    next: Revision,
    /// Whether something in the span happened at or after `next`.
    pending: bool,
    wake: Arc<Notify>,
}

impl Hub {
    /// An empty store, and the task that ends its leases in time. That task lives in the tokio runtime this is called
    /// in, and as long as the hub.
    pub fn start(limits: Limits) -> Arc<Hub> {
        // Another store may have run here before, and its clients may still hold lease ids: start somewhere else.
        let first_lease = LeaseId(rand::random_range(1..i64::MAX / 2));
        let hub = Hub::of(Mvcc::new(limits, first_lease), false);
        tokio::spawn(end_leases(Arc::downgrade(&hub), hub.expiry.clone()));
        hub
    }

    /// An empty store that changes by commands alone, the passing of time among them. All such stores are the same.
    pub(super) fn idle(limits: Limits) -> Arc<Hub> {
        Hub::of(Mvcc::new(limits, FIRST_LEASE), true)
    }

    fn of(mvcc: Mvcc, idle: bool) -> Arc<Hub> {
        let state = State {
            published: mvcc.revision(),
            mvcc,
            subscriptions: BTreeMap::new(),
            next_subscription: 0,
            alarm: None,
        };
        Arc::new(Hub { state: Mutex::new(state), expiry: Arc::new(Notify::new()), idle })
    }

    /// Uses the store, with the time. Leases that are over by then have ended; what is written is published. Not for an
    /// idle one: what this process alone changed there would make it another store than that of the others.
    pub fn with<T>(&self, call: impl FnOnce(&mut Mvcc, Time) -> T) -> T {
        debug_assert!(!self.idle, "a store that others hold too changes by commands alone");
        let mut state = self.lock();
        let now = crate::clock::now();
        if !self.idle {
            state.mvcc.expire(now);
        }
        let result = call(&mut state.mvcc, now);
        state.publish();
        let next = state.mvcc.next_expiry();
        if next.is_some_and(|next| state.alarm.is_none_or(|alarm| next < alarm)) {
            state.alarm = next;
            self.expiry.notify_one();
        }
        result
    }

    /// Reads the store, and ends no lease.
    pub(super) fn look<T>(&self, read: impl FnOnce(&Mvcc) -> T) -> T {
        read(&self.lock().mvcc)
    }

    /// Carries out a command of a replicated store, and publishes what it wrote.
    pub(super) fn carry_out(&self, command: &Command) -> (Answer, Revision) {
        let mut state = self.lock();
        let done = command::carry_out(&mut state.mvcc, command);
        state.publish();
        done
    }

    /// Begins with another store. What followed the one before gets nothing more.
    pub(super) fn replace(&self, mvcc: Mvcc) {
        let mut state = self.lock();
        state.subscriptions.clear();
        state.published = mvcc.revision();
        state.mvcc = mvcc;
    }

    /// Follows a span from a revision on, or from the next one. `wake` is notified when [`Subscription::take`] has
    /// something to give; several subscriptions may share one. Also answers the store's revision.
    pub fn subscribe(
        self: &Arc<Hub>,
        span: Span,
        from: Option<Revision>,
        wake: Arc<Notify>,
    ) -> (Subscription, Revision) {
        let mut state = self.lock();
        let current = state.mvcc.revision();
        let id = state.next_subscription;
        state.next_subscription += 1;
        let next = from.unwrap_or(current.next());
        // A cursor in the past is looked into at once, even if nothing is there.
        let pending = next <= current;
        if pending {
            wake.notify_one();
        }
        state.subscriptions.insert(id, Cursor { span, next, pending, wake });
        (Subscription { hub: self.clone(), id }, current)
    }

    #[cfg(test)]
    pub(super) fn subscriptions(&self) -> usize {
        self.lock().subscriptions.len()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic in the middle of a write would be a bug in the state machine. Continuing to serve is better than a
        // second panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Hub {
    fn drop(&mut self) {
        self.expiry.notify_one();
    }
}

impl State {
    /// Wakes the subscriptions that recent events concern and moves the others past them.
    fn publish(&mut self) {
        let current = self.mvcc.revision();
        if current == self.published {
            return;
        }
        let whole_past = Span::From(Vec::new());
        // A single call can write more than the history keeps; then everybody has to look.
        let recent: Option<Vec<&MvccEvent>> =
            self.mvcc.events(&whole_past, self.published.next()).ok().map(Iterator::collect);
        for cursor in self.subscriptions.values_mut().filter(|cursor| !cursor.pending && cursor.next <= current) {
            cursor.pending = recent.as_ref().is_none_or(|recent| {
                recent.iter().any(|event| event.revision >= cursor.next && cursor.span.contains(&event.key))
            });
            if cursor.pending {
                cursor.wake.notify_one();
            } else {
                cursor.next = current.next();
            }
        }
        self.published = current;
    }
}

/// Events in order, never a part of a revision; all up to `revision` that lie in the span have now been given.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Batch {
    /// The events.
    pub events: Vec<MvccEvent>,
    /// How far they go.
    pub revision: Revision,
}

/// A place in the history that belongs to one watcher. Dropping it ends it.
#[derive(Debug)]
pub struct Subscription {
    hub: Arc<Hub>,
    id: u64,
}

impl Subscription {
    /// The next events, if there are any. [`Compacted`] if some of them are gone; continue with
    /// [`Subscription::resync`].
    pub fn take(&self) -> Result<Option<Batch>, Compacted> {
        let mut state = self.hub.lock();
        let State { mvcc, subscriptions, .. } = &mut *state;
        let Some(cursor) = subscriptions.get_mut(&self.id).filter(|cursor| cursor.pending) else {
            return Ok(None);
        };
        let (mut events, mut bytes, mut more): (Vec<MvccEvent>, usize, bool) = (Vec::new(), 0, false);
        for event in mvcc.events(&cursor.span, cursor.next)? {
            if bytes >= BATCH_BYTES && events.last().is_some_and(|last| last.revision < event.revision) {
                more = true;
                break;
            }
            bytes += event.size();
            events.push(event.clone());
        }
        let revision = if more { events.last().map_or(cursor.next, |last| last.revision) } else { mvcc.revision() };
        cursor.next = cursor.next.max(revision.next());
        cursor.pending = more;
        Ok(if events.is_empty() { None } else { Some(Batch { events, revision }) })
    }

    /// Everything in the span, in key order, and its revision; the subscription continues from there.
    pub fn resync(&self) -> (Revision, Vec<Arc<Record>>) {
        let mut state = self.hub.lock();
        let State { mvcc, subscriptions, .. } = &mut *state;
        let current = mvcc.revision();
        let Some(cursor) = subscriptions.get_mut(&self.id) else {
            return (current, Vec::new());
        };
        cursor.next = current.next();
        cursor.pending = false;
        (current, mvcc.records(&cursor.span))
    }

    /// The store's revision, if all events up to it have been taken.
    pub fn caught_up(&self) -> Option<Revision> {
        let state = self.hub.lock();
        let pending = state.subscriptions.get(&self.id).is_some_and(|cursor| cursor.pending);
        (!pending).then_some(state.mvcc.revision())
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        self.hub.lock().subscriptions.remove(&self.id);
    }
}

/// Ends leases when their time is up, until the hub is gone.
async fn end_leases(hub: Weak<Hub>, changed: Arc<Notify>) {
    loop {
        let sleep = {
            let Some(hub) = hub.upgrade() else { return };
            // Using the store at all ends what is due.
            let next = hub.with(|mvcc, now| mvcc.next_expiry().map(|at| (at, at.since(now).min(LONGEST_SLEEP))));
            hub.lock().alarm = next.map(|(at, _)| at);
            next.map(|(_, sleep)| sleep)
        };
        match sleep {
            Some(sleep) => {
                let _ = tokio::time::timeout(sleep, changed.notified()).await;
            }
            None => changed.notified().await,
        }
    }
}
