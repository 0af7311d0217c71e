//! Waiting for a condition with a deadline. Tests wait for a condition, and do not just sleep.

use std::future::Future;
use std::os::unix::process::ExitStatusExt;
use std::process::Child;
use std::time::{Duration, Instant};

/// How often a condition is looked at.
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

/// Waits for the end of a process: its exit code, or minus the signal. Panics, naming `what`, when that takes longer
/// than `limit`.
pub async fn exit(child: &mut Child, what: &str, limit: Duration) -> i32 {
    let ended = || std::future::ready(child.try_wait().unwrap_or_else(|error| panic!("wait for {what}: {error}")));
    let status = eventually(&format!("{what} ends"), limit, ended).await;
    status.code().unwrap_or_else(|| -status.signal().unwrap_or_default())
}
