//! Waiting for a condition with a deadline. Tests wait for a condition, and do not just sleep.

use std::future::Future;
use std::time::{Duration, Instant};

/// The time between two checks of a condition.
const PERIOD: Duration = Duration::from_millis(20);

/// Polls `condition` until it yields a value. Panics, naming `what`, when that takes longer than `limit`.
pub async fn eventually<T, F, Fut>(what: &str, limit: Duration, mut condition: F) -> T
where
    F: FnMut() -> Fut,
    Fut: Future<Output = Option<T>>,
{
    let start = Instant::now();
    loop {
        if let Some(value) = condition().await {
            return value;
        }
        assert!(start.elapsed() < limit, "not within {limit:?}: {what}");
        tokio::time::sleep(PERIOD).await;
    }
}

/// Awaits `future`. Panics, naming `what`, when that takes longer than `limit`.
pub async fn within<F: Future>(what: &str, limit: Duration, future: F) -> F::Output {
    match tokio::time::timeout(limit, future).await {
        Ok(output) => output,
        Err(_) => panic!("not within {limit:?}: {what}"),
    }
}
