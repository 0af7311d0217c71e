//! A store that counts what is asked of it.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use elastic_store::{LeaseId, Result, Revision, Scope, Store, Txn, TxnResult, Watcher};

/// The kind under which keys that were read are counted.
pub const KEYS: &str = "keys read";

/// Passes every call on to another store, and counts it by kind; and the keys that reads return.
pub struct CountingStore {
    inner: Arc<dyn Store>,
    counts: Mutex<BTreeMap<&'static str, u64>>,
}

impl CountingStore {
    /// Counts what goes to `inner`.
    pub fn new(inner: Arc<dyn Store>) -> CountingStore {
        CountingStore { inner, counts: Mutex::default() }
    }

    /// Calls by kind since this was asked last.
    pub fn take(&self) -> BTreeMap<&'static str, u64> {
        std::mem::take(&mut *self.counts.lock().unwrap())
    }

    fn count(&self, kind: &'static str) {
        self.add(kind, 1);
    }

    fn add(&self, kind: &'static str, more: u64) {
        *self.counts.lock().unwrap().entry(kind).or_default() += more;
    }
}

#[async_trait::async_trait]
impl Store for CountingStore {
    async fn txn(&self, txn: Txn) -> Result<TxnResult> {
        self.count(if txn.is_write() { "write" } else { "read" });
        let result = self.inner.txn(txn).await;
        let keys = result.iter().flat_map(|result| &result.results).map(|result| result.values().len()).sum::<usize>();
        self.add(KEYS, keys as u64);
        result
    }

    async fn watch(&self, scope: Scope, from: Revision) -> Result<Watcher> {
        self.count("watch");
        self.inner.watch(scope, from).await
    }

    async fn grant(&self, ttl: Duration) -> Result<LeaseId> {
        self.count("grant");
        self.inner.grant(ttl).await
    }

    async fn keep_alive(&self, lease: LeaseId) -> Result<Option<Duration>> {
        self.count("keep-alive");
        self.inner.keep_alive(lease).await
    }

    async fn revoke(&self, lease: LeaseId) -> Result<()> {
        self.count("revoke");
        self.inner.revoke(lease).await
    }
}
