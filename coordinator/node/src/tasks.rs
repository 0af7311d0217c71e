//! What runs beside the machines: tasks that end with their handle, watches, and deadlines.

use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinHandle;

use elastic_rendezvous::time::Time;
use elastic_store::{Revision, Scope, Store, WatchUpdate};

/// A task that ends when its handle is dropped.
pub struct AbortOnDrop(pub JoinHandle<()>);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Follows a scope until the receiver is gone. A watch that cannot be opened is tried again: the store is away.
pub fn watch(
    store: Arc<dyn Store>,
    scope: Scope,
    from: Revision,
    deliver: impl Fn(WatchUpdate) -> bool + Send + 'static,
) -> AbortOnDrop {
    const AGAIN: Duration = Duration::from_millis(200);
    AbortOnDrop(tokio::spawn(async move {
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

/// Between two rings, so that a deadline which cannot be met yet does not spin.
const LULL: Duration = Duration::from_millis(1);

/// Tells a loop that a deadline on the boot-time clock has passed.
///
/// It keeps when it rang last: a loop that is always busy begins a new wait each time, which must not start afresh.
#[derive(Default)]
pub struct Alarm {
    rang: Option<Time>,
}

impl Alarm {
    /// Waits until `deadline`; for ever if there is none. May be cancelled.
    pub async fn rings(&mut self, deadline: Option<Time>) {
        let Some(deadline) = deadline else { return std::future::pending().await };
        let at = self.rang.map_or(deadline, |rang| deadline.max(rang + LULL));
        let left = at.since(elastic_store::clock::now());
        if !left.is_zero() {
            tokio::time::sleep(left).await;
        }
        self.rang = Some(elastic_store::clock::now());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_loop_that_never_rests_hears_it_all_the_same() {
        let (mut alarm, begun) = (Alarm::default(), elastic_store::clock::now());
        let deadline = begun + Duration::from_millis(20);
        loop {
            let has_passed = elastic_store::clock::now() >= deadline;
            tokio::select! {
                biased;
                () = alarm.rings(Some(deadline)) => break,
                () = std::future::ready(()) => assert!(!has_passed, "a deadline that has passed rings at once"),
            }
        }
        assert!(elastic_store::clock::now() >= deadline);
    }

    #[tokio::test]
    async fn a_deadline_that_cannot_be_met_does_not_spin() {
        let (mut alarm, begun) = (Alarm::default(), elastic_store::clock::now());
        for _ in 0..10 {
            alarm.rings(Some(Time::ZERO)).await;
        }
        assert!(elastic_store::clock::now().since(begun) >= LULL * 9);
    }
}
