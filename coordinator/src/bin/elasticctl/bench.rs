//! `elasticctl bench`: how fast etcd answers what jobs ask it.

use std::fmt::Display;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use elastic_coordinator::job::Timings;
use elastic_coordinator::store::{Event, LeaseId, Op, Revision, Scope, Store, StoreError, WatchUpdate, Watcher};
use futures::future::join_all;
use serde_json::{Value, json};
use tokio::time::Instant;
use uuid::Uuid;

use crate::table::table;

/// The lease of what is written, beyond the time that writing takes: nothing stays if we are interrupted.
const LEASE: Duration = Duration::from_secs(60);

/// Where requests fail, this is waited before the next one.
const PAUSE: Duration = Duration::from_millis(100);

/// A watch that is silent for so long after a write counts as failed.
const HEARD: Duration = Duration::from_secs(5);

/// How one kind of request went.
#[derive(Debug, Default)]
pub(crate) struct Sample {
    operation: &'static str,
    clients: usize,
    /// How long each took that was answered, the quickest first.
    took: Vec<Duration>,
    over: Duration,
    failed: usize,
    last_error: Option<String>,
}

impl Sample {
    fn per_second(&self) -> f64 {
        self.took.len() as f64 / self.over.as_secs_f64().max(f64::EPSILON)
    }

    /// The time that this part of all requests took at most, by nearest rank; none where none was answered.
    fn quantile(&self, part: f64) -> Option<Duration> {
        let rank = (self.took.len() as f64 * part).ceil() as usize;
        self.took.get(rank.saturating_sub(1)).copied()
    }
}

/// Asks for each kind of request for so long, by one client and by `clients` at once.
///
/// # Errors
/// The store's, if nothing can be written to begin with.
pub(crate) async fn run(
    store: &Arc<dyn Store>,
    prefix: &str,
    each: Duration,
    clients: usize,
) -> Result<Vec<Sample>, StoreError> {
    let root = format!("{}/v1/bench/{}/", prefix.trim_end_matches('/'), Uuid::new_v4());
    let lease = store.grant(LEASE + each * 5).await?;
    let samples = measure(store, &root, lease, each, clients).await;
    // If this fails, the lease lapses by itself.
    let _ = store.revoke(lease).await;
    samples
}

async fn measure(
    store: &Arc<dyn Store>,
    root: &str,
    lease: LeaseId,
    each: Duration,
    clients: usize,
) -> Result<Vec<Sample>, StoreError> {
    let key = |client: usize| format!("{root}{client}");
    let write = async |client: usize| {
        store.put(Vec::new(), Op::put_leased(key(client), "elasticctl bench", lease)).await.map(drop)
    };
    let read = async |client: usize| store.get(&key(client)).await.map(drop);
    write(0).await?;
    let mut samples = Vec::new();
    for clients in if clients > 1 { vec![1, clients] } else { vec![1] } {
        samples.push(sample("read", clients, each, read).await);
        samples.push(sample("write", clients, each, write).await);
    }
    samples.push(events(store, root, lease, each).await?);
    Ok(samples)
}

/// Asks again and again, until the time is over.
async fn sample<E: Display>(
    operation: &'static str,
    clients: usize,
    each: Duration,
    ask: impl AsyncFn(usize) -> Result<(), E>,
) -> Sample {
    let begun = Instant::now();
    let one = async |client: usize| {
        let mut own = Sample::default();
        while begun.elapsed() < each {
            let asked = Instant::now();
            match ask(client).await {
                Ok(()) => own.took.push(asked.elapsed()),
                Err(error) => {
                    (own.failed, own.last_error) = (own.failed + 1, Some(error.to_string()));
                    tokio::time::sleep(PAUSE).await;
                }
            }
        }
        own
    };
    let mut all = Sample { operation, clients, ..Sample::default() };
    for own in join_all((0..clients).map(one)).await {
        all.took.extend(own.took);
        all.failed += own.failed;
        all.last_error = own.last_error.or(all.last_error);
    }
    all.over = begun.elapsed();
    all.took.sort_unstable();
    all
}

/// From the beginning of a write until a watch tells of it.
async fn events(store: &Arc<dyn Store>, root: &str, lease: LeaseId, each: Duration) -> Result<Sample, StoreError> {
    let key = format!("{root}event");
    let begun = store.put(Vec::new(), Op::put_leased(&key, "begin", lease)).await?.unwrap_or(Revision::NONE);
    let watcher = tokio::sync::Mutex::new(store.watch(Scope::Key(key.clone()), begun.next()).await?);
    let told = async |_| {
        let revision = store.put(Vec::new(), Op::put_leased(&key, "event", lease)).await?;
        let mut watcher = watcher.lock().await;
        let heard = heard(&mut watcher, revision.unwrap_or(Revision::NONE));
        let late = || format!("a watch did not tell of a write within {HEARD:?}");
        tokio::time::timeout(HEARD, heard).await.with_context(late)?
    };
    Ok(sample("event", 1, each, told).await)
}

/// Waits until a watch has told of a revision.
async fn heard(watcher: &mut Watcher, revision: Revision) -> anyhow::Result<()> {
    loop {
        match watcher.recv().await {
            Some(WatchUpdate::Events(events)) => {
                let of = |event: &Event| match event {
                    Event::Put(kv) => kv.mod_revision,
                    Event::Delete { revision, .. } => *revision,
                };
                if events.iter().any(|event| of(event) >= revision) {
                    return Ok(());
                }
            }
            Some(WatchUpdate::Snapshot { revision: at, .. }) if at >= revision => return Ok(()),
            Some(WatchUpdate::Snapshot { .. }) => {}
            Some(WatchUpdate::Broken(error)) => return Err(error.into()),
            None => anyhow::bail!("the watch has ended"),
        }
    }
}

/// The shortest `lease_ttl` at which a write takes a tenth of it at most, in 99 cases of 100, and that leaves room for
/// the default margin; none where no write was answered.
fn shortest_lease(samples: &[Sample]) -> Option<Duration> {
    let writes = samples.iter().filter(|sample| sample.operation == "write");
    let slow = writes.filter_map(|sample| sample.quantile(0.99)).max()?;
    let tenfold = Duration::from_secs((slow * 10).as_secs_f64().ceil() as u64);
    Some(tenfold.max(Timings::default().margin * 4))
}

fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1000.0
}

/// For people.
pub(crate) fn text(samples: &[Sample]) -> String {
    let shown = |time: Option<Duration>| time.map_or_else(|| "-".to_owned(), |time| format!("{:.2} ms", millis(time)));
    let rows: Vec<_> = samples
        .iter()
        .map(|sample| {
            vec![
                sample.operation.to_owned(),
                sample.clients.to_string(),
                format!("{:.0}", sample.per_second()),
                shown(sample.quantile(0.5)),
                shown(sample.quantile(0.99)),
                shown(sample.quantile(1.0)),
                sample.failed.to_string(),
            ]
        })
        .collect();
    let mut text = table(&["REQUEST", "CLIENTS", "A SECOND", "MEDIAN", "99 %", "SLOWEST", "FAILED"], &rows);
    if let Some(error) = samples.iter().find_map(|sample| sample.last_error.as_ref()) {
        text.push_str(&format!("\nrequests failed, one of them by: {error}\n"));
    }
    if let Some(lease) = shortest_lease(samples) {
        text.push_str(&format!(
            "\nfrom here, a lease_ttl of {} s and more fits: ten times a slow write\n",
            lease.as_secs()
        ));
    }
    text
}

/// For programs: times in milliseconds.
pub(crate) fn json(samples: &[Sample]) -> Value {
    let one = |sample: &Sample| {
        json!({
            "request": sample.operation,
            "clients": sample.clients,
            "per_second": sample.per_second(),
            "median_ms": sample.quantile(0.5).map(millis),
            "p99_ms": sample.quantile(0.99).map(millis),
            "slowest_ms": sample.quantile(1.0).map(millis),
            "failed": sample.failed,
            "last_error": sample.last_error,
        })
    };
    json!({
        "requests": samples.iter().map(one).collect::<Vec<_>>(),
        "shortest_lease_ttl_ms": shortest_lease(samples).map(millis),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(operation: &'static str, millis: impl Iterator<Item = u64>) -> Sample {
        let took: Vec<_> = millis.map(Duration::from_millis).collect();
        Sample { operation, clients: 1, took, over: Duration::from_secs(2), ..Sample::default() }
    }

    #[test]
    fn figures_are_of_the_nearest_rank() {
        let hundred = sample("write", 1..=100);
        let quantile = |part| hundred.quantile(part).map(|time| time.as_millis());
        assert_eq!([0.5, 0.99, 1.0].map(quantile), [Some(50), Some(99), Some(100)]);
        assert_eq!(hundred.per_second(), 50.0);
        let one = sample("read", 7..=7);
        assert_eq!([0.5, 0.99, 1.0].map(|part| one.quantile(part).map(|time| time.as_millis())), [Some(7); 3]);
        assert_eq!(sample("read", 0..0).quantile(0.5), None);
    }

    #[test]
    fn the_lease_fits_slow_writes_and_the_margin() {
        let seconds = |samples: &[Sample]| shortest_lease(samples).map(|lease| lease.as_secs());
        assert_eq!(seconds(&[sample("write", 1..=3), sample("read", 9000..=9000)]), Some(4));
        assert_eq!(seconds(&[sample("write", 1..=3), sample("write", 812..=812)]), Some(9));
        assert_eq!(seconds(&[sample("write", 0..0)]), None);
        let failed = Sample { failed: 3, last_error: Some("no leader".into()), ..sample("write", 0..0) };
        let text = text(&[failed]);
        assert!(text.contains("by: no leader") && !text.contains("lease_ttl"), "{text}");
    }
}
