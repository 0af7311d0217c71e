//! What every `Store` promises, one function for each promise, to be run on any implementation.
//! Faults that only a networked store can have are tested beside each such store.
//!
//! An implementation's test file is one line:
//!
//! ```ignore
//! elastic_tests::contract_suite!(memory, || async { Subject::new(store, compact) });
//! ```
//!
//! Each group of cases gets one subject and runs side by side on it, each case under a key prefix of its own.
//! Compaction touches everyone's history, so its cases run one after another on a subject of their own.

pub mod compaction;
pub mod lease;
pub mod txn;
pub mod watch;

use std::any::Any;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use elastic_store::{Event, Op, Result, Revision, Scope, Store, Txn, TxnResult, WatchUpdate, Watcher};
use tokio::task::JoinSet;

/// No case takes longer than this.
const CASE_LIMIT: Duration = Duration::from_secs(30);

/// No single update of a healthy watch takes longer than this.
const UPDATE_LIMIT: Duration = Duration::from_secs(10);

/// Compacts the store's history up to a revision.
pub type Compact = Arc<dyn Fn(Revision) -> Pin<Box<dyn Future<Output = ()> + Send>> + Send + Sync>;

/// A store to be held to the contract.
pub struct Subject {
    store: Arc<dyn Store>,
    compact: Compact,
    _keep: Box<dyn Any>,
}

impl Subject {
    /// A store, and the way to compact its history.
    pub fn new(store: Arc<dyn Store>, compact: Compact) -> Subject {
        Subject { store, compact, _keep: Box::new(()) }
    }

    /// Keeps something alive (a server) for as long as the subject is in use.
    #[must_use]
    pub fn keeping(mut self, what: impl Any) -> Subject {
        self._keep = Box::new(what);
        self
    }
}

/// What a case works with.
#[derive(Clone)]
pub struct Ctx {
    /// The store.
    pub store: Arc<dyn Store>,
    /// A prefix that no other case uses; ends in a slash.
    pub prefix: String,
    compact: Compact,
}

impl Ctx {
    /// A key under this case's prefix.
    pub fn key(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    /// Runs a transaction that must not fail.
    pub async fn txn(&self, txn: Txn) -> TxnResult {
        self.store.txn(txn).await.expect("transaction")
    }

    /// Writes a key and returns the revision.
    pub async fn put(&self, name: &str, value: &str) -> Revision {
        self.txn(Txn::of([Op::put(self.key(name), value)])).await.revision
    }

    /// The key's value, or nothing.
    pub async fn value(&self, name: &str) -> Option<String> {
        let kv = self.store.get(&self.key(name)).await.expect("get")?;
        Some(String::from_utf8(kv.value).expect("a value that is UTF-8"))
    }

    /// The store's revision now.
    pub async fn revision(&self) -> Revision {
        self.txn(Txn::of([Op::get(self.key("revision"))])).await.revision
    }

    /// Compacts everything up to `revision`.
    pub async fn compact(&self, revision: Revision) {
        (self.compact)(revision).await;
    }

    /// Watches everything under this case's prefix.
    pub async fn watch_all(&self, from: Revision) -> Watched {
        self.watch(Scope::Prefix(self.prefix.clone()), from).await
    }

    /// Watches a scope.
    pub async fn watch(&self, scope: Scope, from: Revision) -> Watched {
        Watched { watcher: self.store.watch(scope, from).await.expect("watch") }
    }
}

/// A watch with the patience of a test.
pub struct Watched {
    watcher: Watcher,
}

impl Watched {
    /// The next update.
    pub async fn update(&mut self) -> WatchUpdate {
        match tokio::time::timeout(UPDATE_LIMIT, self.watcher.recv()).await {
            Ok(Some(update)) => update,
            Ok(None) => panic!("the watch ended without a word"),
            Err(_) => panic!("the watch delivered nothing for {UPDATE_LIMIT:?}"),
        }
    }

    /// The events of the next update, which must be events.
    pub async fn events(&mut self) -> Vec<Event> {
        match self.update().await {
            WatchUpdate::Events(events) => events,
            other => panic!("events expected, got {other:?}"),
        }
    }

    /// Collects at least `count` events, and checks the order that every watch keeps.
    pub async fn collect(&mut self, count: usize) -> Vec<Event> {
        let mut all: Vec<Event> = Vec::new();
        while all.len() < count {
            let events = self.events().await;
            assert!(!events.is_empty(), "an update carries events");
            assert!(
                events.windows(2).all(|pair| pair[0].revision() <= pair[1].revision()),
                "events of an update are in order of revision: {events:?}"
            );
            if let Some(last) = all.last() {
                assert!(last.revision() < events[0].revision(), "no revision is repeated or split over two updates");
            }
            all.extend(events);
        }
        all
    }
}

/// One promise.
pub struct Case {
    /// Its name.
    pub name: &'static str,
    /// Panics where the promise is broken.
    pub run: fn(Ctx) -> Pin<Box<dyn Future<Output = ()> + Send>>,
}

/// Lists async functions as [`Case`]s.
#[macro_export]
macro_rules! contract_cases {
    ($($case:ident),+ $(,)?) => {
        &[$($crate::contract::Case { name: stringify!($case), run: |ctx| Box::pin($case(ctx)) }),+]
    };
}

/// Runs cases on one subject, `width` at a time, and panics with the list of those that failed.
pub async fn run(subject: Subject, cases: &[Case], width: usize) {
    let mut failed = Vec::new();
    for batch in cases.chunks(width.max(1)) {
        let mut running = JoinSet::new();
        let mut names = std::collections::BTreeMap::new();
        for case in batch {
            let ctx = Ctx {
                store: subject.store.clone(),
                prefix: format!("/contract/{}/{}/", std::process::id(), case.name),
                compact: subject.compact.clone(),
            };
            let future = tokio::time::timeout(CASE_LIMIT, (case.run)(ctx));
            let task = running.spawn(async move { future.await.is_ok() });
            names.insert(task.id(), case.name);
        }
        while let Some(outcome) = running.join_next_with_id().await {
            match outcome {
                Ok((_, true)) => {}
                Ok((id, false)) => failed.push(format!("{}: not within {CASE_LIMIT:?}", names[&id])),
                Err(error) => failed.push(format!("{}: panicked (see above)", names[&error.id()])),
            }
        }
    }
    assert!(failed.is_empty(), "promises broken:\n  {}", failed.join("\n  "));
}

/// Runs a group on a fresh subject, on a current-thread runtime, as the agent does.
pub fn run_group<F, Fut>(factory: F, cases: &[Case], width: usize)
where
    F: FnOnce() -> Fut,
    Fut: Future<Output = Subject>,
{
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("runtime");
    runtime.block_on(async {
        let subject = factory().await;
        run(subject, cases, width).await;
    });
}

/// The whole contract as tests of module `$name`. `$factory`: a function without arguments that returns a future of a
/// [`Subject`], called once for each group.
#[macro_export]
macro_rules! contract_suite {
    ($name:ident, $factory:expr) => {
        mod $name {
            #[allow(unused_imports)]
            use super::*;

            #[test]
            fn transactions() {
                $crate::contract::run_group($factory, $crate::contract::txn::CASES, usize::MAX);
            }

            #[test]
            fn watches() {
                $crate::contract::run_group($factory, $crate::contract::watch::CASES, usize::MAX);
            }

            #[test]
            fn leases() {
                $crate::contract::run_group($factory, $crate::contract::lease::CASES, usize::MAX);
            }

            #[test]
            fn compaction() {
                $crate::contract::run_group($factory, $crate::contract::compaction::CASES, 1);
            }
        }
    };
}

/// Whether a call was refused as wrong in itself.
pub(crate) fn is_invalid<T>(result: &Result<T>) -> bool {
    matches!(result, Err(elastic_store::StoreError::Invalid(_)))
}
