//! The key-value service as one narrow trait. `elastic_tests::contract` holds every implementation to it.

use std::time::Duration;

use async_trait::async_trait;
use elastic_rendezvous::kv::{
    Guard, KeyValue, LeaseId, Op, OpResult, Result, Revision, Scope, Txn, TxnResult, WatchUpdate,
};
use tokio::sync::mpsc;

/// A running watch. Dropping it ends it.
pub type Watcher = mpsc::Receiver<WatchUpdate>;

/// A key-value service with revisions, guarded transactions, watches and leases.
///
/// Every call ends within its implementation's deadline. An implementation repeats a write only if it is certain that the
/// first try did nothing. Where that is unknown, the error says so: [`crate::StoreError::outcome_unknown`].
#[async_trait]
pub trait Store: Send + Sync {
    /// Runs a transaction. Reads are linearizable.
    async fn txn(&self, txn: Txn) -> Result<TxnResult>;

    /// Watches a scope: every event from `from` on, once and in order, across reconnections. `from` must not be zero.
    /// Where that history is compacted away already, the watch begins with a [`WatchUpdate::Snapshot`].
    async fn watch(&self, scope: Scope, from: Revision) -> Result<Watcher>;

    /// Grants a lease. Its time counts from when the call was sent.
    async fn grant(&self, ttl: Duration) -> Result<LeaseId>;

    /// Renews a lease. `None`: the lease does not exist any more. The new time counts from when the call was *sent*.
    async fn keep_alive(&self, lease: LeaseId) -> Result<Option<Duration>>;

    /// Ends a lease and deletes its keys. Not an error if it is gone already.
    async fn revoke(&self, lease: LeaseId) -> Result<()>;

    /// Reads one key.
    async fn get(&self, key: &str) -> Result<Option<KeyValue>> {
        let result = self.txn(Txn::of([Op::get(key)])).await?;
        Ok(result.results.first().and_then(OpResult::value).cloned())
    }

    /// Reads all keys with a prefix, and the revision at which they were read.
    async fn range(&self, prefix: &str) -> Result<(Vec<KeyValue>, Revision)> {
        let mut result = self.txn(Txn::of([Op::range(prefix)])).await?;
        let values = match result.results.pop() {
            Some(OpResult::Values(values)) => values,
            _ => Vec::new(),
        };
        Ok((values, result.revision))
    }

    /// Writes a key if the guards hold; the revision of the write, or `None` if they do not.
    async fn put(&self, guards: Vec<Guard>, op: Op) -> Result<Option<Revision>> {
        let result = self.txn(Txn::of([op]).guarded(guards)).await?;
        Ok(result.succeeded.then_some(result.revision))
    }

    /// Deletes a key if the guards hold; whether they did.
    async fn delete(&self, guards: Vec<Guard>, key: &str) -> Result<bool> {
        Ok(self.txn(Txn::of([Op::delete(key)]).guarded(guards)).await?.succeeded)
    }
}
