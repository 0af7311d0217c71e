//! The embedded store without a network: what the agent that hosts it uses, and tests.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::{Notify, mpsc};

use super::mvcc::{Error, Limits};
use super::{Hub, Subscription};
use crate::{
    Event, KeyValue, LeaseId, Result, Revision, Scope, Store, StoreError, Txn, TxnResult, WatchUpdate, Watcher,
};

/// Updates that wait for a slow watcher; what comes after them waits in the history.
const UPDATES_AHEAD: usize = 16;

/// A store in this process. Clones share it.
#[derive(Clone, Debug)]
pub struct MemoryStore {
    hub: Arc<Hub>,
}

impl MemoryStore {
    /// A new, empty store. Must be called within a tokio runtime, which ends its leases in time.
    pub fn start(limits: Limits) -> MemoryStore {
        MemoryStore::on(Hub::start(limits))
    }

    /// A store on a hub that others use too.
    pub fn on(hub: Arc<Hub>) -> MemoryStore {
        MemoryStore { hub }
    }

    /// The hub it is on.
    pub fn hub(&self) -> &Arc<Hub> {
        &self.hub
    }
}

#[async_trait]
impl Store for MemoryStore {
    async fn txn(&self, txn: Txn) -> Result<TxnResult> {
        // Nothing here ever waits, so a caller in a loop would starve its runtime.
        tokio::task::coop::consume_budget().await;
        self.hub.with(|mvcc, now| mvcc.apply(now, &txn))
    }

    async fn watch(&self, scope: Scope, from: Revision) -> Result<Watcher> {
        if from <= Revision::NONE {
            return Err(StoreError::Invalid(format!("a watch must start at a revision, and {from} is none")));
        }
        let wake = Arc::new(Notify::new());
        let (subscription, _) = self.hub.subscribe((&scope).into(), Some(from), wake.clone());
        let (updates, watcher) = mpsc::channel(UPDATES_AHEAD);
        tokio::spawn(deliver(subscription, wake, updates));
        Ok(watcher)
    }

    async fn grant(&self, ttl: Duration) -> Result<LeaseId> {
        Ok(self.hub.with(|mvcc, now| mvcc.grant(now, None, ttl))?.0)
    }

    async fn keep_alive(&self, lease: LeaseId) -> Result<Option<Duration>> {
        Ok(self.hub.with(|mvcc, now| mvcc.keep_alive(now, lease)))
    }

    async fn revoke(&self, lease: LeaseId) -> Result<()> {
        match self.hub.with(|mvcc, now| mvcc.revoke(now, lease)) {
            Ok(()) | Err(Error::LeaseNotFound) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

/// Moves events from the history to a watcher until it is dropped.
async fn deliver(subscription: Subscription, wake: Arc<Notify>, updates: mpsc::Sender<WatchUpdate>) {
    loop {
        let update = match subscription.take() {
            Ok(Some(batch)) => WatchUpdate::Events(batch.events.iter().map(Event::from).collect()),
            Err(_compacted) => {
                let (revision, records) = subscription.resync();
                let values = records.iter().map(|record| KeyValue::from(&**record)).collect();
                WatchUpdate::Snapshot { revision, values }
            }
            Ok(None) => tokio::select! {
                () = wake.notified() => continue,
                () = updates.closed() => return,
            },
        };
        if updates.send(update).await.is_err() {
            return;
        }
    }
}
