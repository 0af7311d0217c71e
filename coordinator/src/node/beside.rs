//! What runs beside the machines: tasks that end with their handle, watches, and sleeping until a time. Not for what
//! they report.

use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinHandle;

use crate::store::{Revision, Scope, Store, WatchUpdate};
use crate::time::Time;

/// A task that ends when its handle is dropped.
pub(crate) struct Beside(pub(crate) JoinHandle<()>);

impl Drop for Beside {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Follows a scope until the receiver is gone. A watch that cannot be opened is tried again: the store is away.
pub(crate) fn watch(
    store: Arc<dyn Store>,
    scope: Scope,
    from: Revision,
    deliver: impl Fn(WatchUpdate) -> bool + Send + 'static,
) -> Beside {
    const AGAIN: Duration = Duration::from_millis(200);
    Beside(tokio::spawn(async move {
        let mut watcher = loop {
            match store.watch(scope.clone(), from).await {
                Ok(watcher) => break watcher,
                Err(error) if error.is_transient() => tokio::time::sleep(AGAIN).await,
                Err(error) => {
                    deliver(WatchUpdate::Broken(error));
                    return;
                }
            }
        };
        while let Some(update) = watcher.recv().await {
            if !deliver(update) {
                return;
            }
        }
    }))
}

/// Sleeps until a time on the boot-time clock; for ever if there is none.
pub(crate) async fn sleep_until(time: Option<Time>) {
    match time {
        // At least a millisecond, so that a deadline which cannot be met yet does not spin.
        Some(time) => tokio::time::sleep(time.since(Time::now()).max(Duration::from_millis(1))).await,
        None => std::future::pending().await,
    }
}
