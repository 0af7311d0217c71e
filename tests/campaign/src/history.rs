//! What happened in a job, in the order in which it happened: each change of each of its keys, as an observer at the
//! router sees them, and each line of its workers' trace.

use elastic_tests::prelude::*;
use std::sync::{MutexGuard, PoisonError};

use anyhow::Result;
use elastic_rendezvous::job::{NodeRecord, Phase, RoundRecord, RoundState};
use elastic_tests::trace::Tail;
use etcd_client::{ConnectOptions, EventType, GetOptions, WatchOptions};
use tokio::task::JoinHandle;

use super::cluster::Reach;

/// A key that was written or deleted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Change {
    /// When the observer saw it, since the job began.
    pub(crate) at: Duration,
    pub(crate) revision: i64,
    pub(crate) key: String,
    /// What it holds; none: it was deleted.
    pub(crate) value: Option<String>,
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Line {
    /// When the observer read it, since the job began.
    pub(crate) at: Duration,
    pub(crate) event: Value,
}

impl Line {
    pub(crate) fn is_step(&self) -> bool {
        self.event["event"] == "step"
    }
}

#[derive(Debug, Clone, Default)]
pub(crate) struct Events {
    pub(crate) changes: Vec<Change>,
    /// Revisions that the campaign itself wrote, as an operator or a disk might.
    pub(crate) ours: BTreeSet<i64>,
    /// Whether the store has forgotten changes before they were seen.
    pub(crate) gaps: bool,
    now: BTreeMap<String, String>,
}

impl Events {
    /// What a key of the job holds now.
    pub(crate) fn get(&self, key: &str) -> Option<&str> {
        self.now.get(key).map(String::as_str)
    }

    pub(crate) fn round(&self) -> Option<RoundRecord> {
        serde_json::from_str(self.get("round")?).ok()
    }

    /// Whether the job has come to its end.
    pub(crate) fn is_over(&self) -> bool {
        self.round()
            .is_some_and(|round| matches!(round.state, RoundState::Succeeded | RoundState::Failed | RoundState::Closed))
    }

    /// Whether a node is left out for its failures.
    pub(crate) fn leaves_out(&self) -> bool {
        self.round().is_some_and(|round| round.faults.iter().any(|faults| faults.excluded.is_some()))
    }

    pub(crate) fn nodes(&self) -> Vec<NodeRecord> {
        let nodes = self.now.iter().filter(|(key, _)| key.starts_with("nodes/"));
        nodes.filter_map(|(_, value)| serde_json::from_str(value).ok()).collect()
    }

    /// How many nodes are in this phase.
    pub(crate) fn nodes_in(&self, phase: Phase) -> usize {
        self.nodes().iter().filter(|node| node.phase == phase).count()
    }

    /// The name of the node that leads.
    pub(crate) fn leader(&self) -> Option<String> {
        let record: Value = serde_json::from_str(self.get("leader")?).ok()?;
        Some(record["node"].as_str()?.split(':').next()?.to_owned())
    }

    /// Takes a change down. What was seen already is passed over: the observer may have had to ask again.
    fn note(&mut self, change: Change) {
        let seen = |old: &Change| old.revision == change.revision && old.key == change.key;
        if self.changes.iter().rev().take_while(|old| old.revision >= change.revision).any(seen) {
            return;
        }
        match &change.value {
            Some(value) => self.now.insert(change.key.clone(), value.clone()),
            None => self.now.remove(&change.key),
        };
        self.changes.push(change);
    }
}

/// Watches a job.
#[derive(Debug)]
pub(crate) struct Observer {
    began: Instant,
    events: Arc<Mutex<Events>>,
    watching: JoinHandle<()>,
    trace: Tail,
    lines: Vec<Line>,
}

impl Observer {
    /// Watches the keys of `job` in this etcd, and the trace that its workers write.
    pub(crate) fn new(etcd: Reach, job: &Keys, trace: &Path) -> Observer {
        let began = Instant::now();
        let events = Arc::new(Mutex::new(Events::default()));
        let watching = tokio::spawn(watch(etcd, job.root().to_owned(), Arc::clone(&events), began));
        Observer { began, events, watching, trace: Tail::new(trace), lines: Vec::new() }
    }

    /// What was seen in the store until now.
    pub(crate) fn events(&self) -> MutexGuard<'_, Events> {
        self.events.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn elapsed(&self) -> Duration {
        self.began.elapsed()
    }

    /// Reads what the trace has got meanwhile, and returns all of it.
    pub(crate) fn lines(&mut self) -> &[Line] {
        let at = self.elapsed();
        // A worker that is killed may leave a part of a line.
        let events = self.trace.lines().into_iter().filter_map(|line| serde_json::from_str(&line).ok());
        self.lines.extend(events.map(|event| Line { at, event }));
        &self.lines
    }

    /// The furthest step that the trace tells of.
    pub(crate) fn step(&mut self) -> u64 {
        let steps = self.lines().iter().rev().filter(|line| line.is_step()).take(1);
        steps.filter_map(|line| line.event["step"].as_u64()).next().unwrap_or(0)
    }
}

impl Drop for Observer {
    fn drop(&mut self) {
        self.watching.abort();
    }
}

/// How long the observer waits before it asks again.
const PAUSE: Duration = Duration::from_millis(50);

/// How long a member may take for its first answer.
const ANSWERS: Duration = Duration::from_millis(1500);

async fn watch(etcd: Reach, root: String, events: Arc<Mutex<Events>>, began: Instant) {
    let mut next = 1;
    loop {
        let _ = watch_once(&etcd, &root, &events, began, &mut next).await;
        tokio::time::sleep(PAUSE).await;
    }
}

async fn watch_once(etcd: &Reach, root: &str, events: &Mutex<Events>, began: Instant, next: &mut i64) -> Result<()> {
    let lock = || events.lock().unwrap_or_else(PoisonError::into_inner);
    for address in &etcd.addresses {
        let options = ConnectOptions::new()
            .with_connect_timeout(Duration::from_millis(300))
            .with_keep_alive(Duration::from_millis(500), Duration::from_millis(1000));
        // A member that cannot answer a linearizable read tells nothing new, nor does one that is long in greeting.
        let asked = tokio::time::timeout(ANSWERS, async {
            let mut client = etcd.connect(address, options).await?;
            client.get(root, None).await?;
            anyhow::Ok(client)
        });
        let Ok(Ok(mut client)) = asked.await else { continue };
        let from = WatchOptions::new().with_prefix().with_start_revision(*next).with_progress_notify();
        let mut stream = client.watch(root, Some(from)).await?;
        while let Some(response) = stream.message().await? {
            if response.canceled() {
                // It was compacted away: what is there now is all that is available.
                let all = client.get(root, Some(GetOptions::new().with_prefix())).await?;
                let mut events = lock();
                events.gaps = true;
                for pair in all.kvs() {
                    let value = Some(String::from_utf8_lossy(pair.value()).into_owned());
                    let key = below(pair.key(), root);
                    events.note(Change { at: began.elapsed(), revision: pair.mod_revision(), key, value });
                }
                *next = all.header().map_or(*next, |header| header.revision() + 1);
                break;
            }
            let mut events = lock();
            for event in response.events() {
                let Some(pair) = event.kv() else { continue };
                let value =
                    (event.event_type() == EventType::Put).then(|| String::from_utf8_lossy(pair.value()).into_owned());
                let key = below(pair.key(), root);
                events.note(Change { at: began.elapsed(), revision: pair.mod_revision(), key, value });
                *next = pair.mod_revision() + 1;
            }
        }
    }
    Ok(())
}

fn below(key: &[u8], root: &str) -> String {
    let key = String::from_utf8_lossy(key);
    key.strip_prefix(root).unwrap_or(&key).to_owned()
}
