//! A store whose calls are counted and timed.

use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;

use super::{LeaseId, Result, Revision, Scope, Store, Txn, TxnResult, Watcher};

/// Hears of each call that was answered: its kind (read, write, watch, grant, keep_alive, revoke), whether the store
/// carried it out, and how long that took. A transaction whose guards did not hold was carried out.
pub type CallObserver = Arc<dyn Fn(&'static str, bool, Duration) + Send + Sync>;

/// A store whose calls an observer hears of.
pub struct Metered {
    store: Arc<dyn Store>,
    observer: CallObserver,
}

impl Metered {
    /// Tells `observer` of the calls on `store`.
    pub fn new(store: Arc<dyn Store>, observer: CallObserver) -> Metered {
        Metered { store, observer }
    }

    async fn timed<T>(&self, call: &'static str, work: impl Future<Output = Result<T>> + Send) -> Result<T> {
        let begun = Instant::now();
        let result = work.await;
        (self.observer)(call, result.is_ok(), begun.elapsed());
        result
    }
}

#[async_trait]
impl Store for Metered {
    async fn txn(&self, txn: Txn) -> Result<TxnResult> {
        let call = if txn.is_write() { "write" } else { "read" };
        self.timed(call, self.store.txn(txn)).await
    }

    async fn watch(&self, scope: Scope, from: Revision) -> Result<Watcher> {
        self.timed("watch", self.store.watch(scope, from)).await
    }

    async fn grant(&self, ttl: Duration) -> Result<LeaseId> {
        self.timed("grant", self.store.grant(ttl)).await
    }

    async fn keep_alive(&self, lease: LeaseId) -> Result<Option<Duration>> {
        self.timed("keep_alive", self.store.keep_alive(lease)).await
    }

    async fn revoke(&self, lease: LeaseId) -> Result<()> {
        self.timed("revoke", self.store.revoke(lease)).await
    }
}
