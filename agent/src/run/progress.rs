//! Writes how far the job has come to the store, for `elasticctl` and dashboards: one [`ProgressRecord`] for the whole
//! job, by the node with group rank 0. Nothing waits for it, and nothing depends on it.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use elastic_node::Status;
use elastic_rendezvous::job::{Keys, ProgressRecord, RoundProgress, StepDone, Versioned, to_json};
use elastic_rendezvous::time::Time;
use elastic_store::{Guard, Op, Revision, Store, StoreError};
use tokio::sync::watch;
use tokio::time::MissedTickBehavior;

use crate::workers::socket::{Furthest, FurthestWorker};

/// Time between two records of a round: a thousand jobs cost their store a hundred writes a second.
const EVERY: Duration = Duration::from_secs(10);

/// The record that was last read or written.
enum Stored {
    Unknown,
    Known(Option<ProgressRecord>, Revision),
}

/// The job, as far as its records of progress need it.
#[derive(Clone, Copy)]
struct Life {
    generation: u64,
    /// Create revision of its round's key: a deleted job gets no record.
    created: Revision,
}

/// Gets the job's [goodput](ProgressRecord::goodput) each time this node checks for new steps; `None` while another node
/// writes the record, or while it is unknown.
pub(crate) type GoodputObserver = Arc<dyn Fn(Option<f64>) + Send + Sync>;

pub(crate) struct JobProgress {
    /// None where nodes meet by TorchElastic's protocol, which has no such record.
    store: Option<Arc<dyn Store>>,
    keys: Keys,
    status: watch::Receiver<Status>,
    furthest: FurthestWorker,
    goodput: Option<GoodputObserver>,
    life: Option<Life>,
    stored: Stored,
}

impl JobProgress {
    /// The progress of this job, as this node's workers report it.
    pub(crate) fn new(
        store: Option<&Arc<dyn Store>>,
        keys: &Keys,
        status: watch::Receiver<Status>,
        furthest: FurthestWorker,
        goodput: Option<GoodputObserver>,
    ) -> JobProgress {
        let (store, keys) = (store.cloned(), keys.clone());
        JobProgress { store, keys, status, furthest, goodput, life: None, stored: Stored::Unknown }
    }

    /// Writes a record whenever there are new steps: every ten seconds, and when a round ends. May be cancelled.
    pub(crate) async fn follow(&mut self) -> Infallible {
        if self.store.is_none() {
            return std::future::pending().await;
        }
        let mut due = tokio::time::interval(EVERY);
        due.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                _ = due.tick() => {}
                changed = self.status.changed() => if changed.is_err() {
                    // The driver has ended, and its node with it.
                    return std::future::pending().await;
                },
            }
            self.tell().await;
        }
    }

    pub(crate) async fn tell(&mut self) {
        if let Some(round) = &self.status.borrow_and_update().round {
            self.life = Some(Life { generation: round.value.generation, created: round.created });
        }
        if let Err(error) = self.write().await {
            tracing::debug!("the job's progress was not stored: {error}");
            self.stored = Stored::Unknown;
        }
        if let Some(observer) = &self.goodput {
            let is_ours = self.life.is_some_and(|life| self.seen(life.generation).is_some());
            observer(match &self.stored {
                Stored::Known(Some(record), _) if is_ours => record.goodput(),
                _ => None,
            });
        }
    }

    async fn write(&mut self) -> Result<(), StoreError> {
        let (Some(store), Some(life)) = (&self.store, self.life) else { return Ok(()) };
        let Some(now) = self.seen(life.generation) else { return Ok(()) };
        let key = self.keys.progress();
        // After a cancelled write the record is unknown: it is read again.
        for _ in 0..2 {
            if let Stored::Unknown = self.stored {
                let found = store.get(&key).await?;
                let revision = found.as_ref().map_or(Revision::NONE, |kv| kv.mod_revision);
                let record = found.as_ref().and_then(|kv| Versioned::parse(kv).ok()).map(|record| record.value);
                self.stored = Stored::Known(record, revision);
            }
            let Stored::Known(before, revision) = &self.stored else { return Ok(()) };
            if !is_news(before.as_ref(), &now) {
                return Ok(());
            }
            let record = ProgressRecord::after(before.as_ref(), &now);
            let guards = vec![Guard::modified(&key, *revision), Guard::created(self.keys.round(), life.created)];
            self.stored = match store.put(guards, Op::put(&key, to_json(&record))).await? {
                Some(revision) => Stored::Known(Some(record), revision),
                None => Stored::Unknown,
            };
        }
        Ok(())
    }

    /// What this node's workers have reported, if this node writes the record.
    fn seen(&self, generation: u64) -> Option<RoundProgress> {
        let Furthest { round, progress, .. } = (self.furthest)().filter(|furthest| furthest.group_rank == 0)?;
        let (now, now_ms) = (elastic_store::clock::now(), elastic_store::clock::epoch_ms());
        let done = |(step, at): (u64, Time)| {
            let ago = u64::try_from(now.since(at).as_millis()).unwrap_or(u64::MAX);
            StepDone { step, at_ms: now_ms.saturating_sub(ago) }
        };
        Some(RoundProgress {
            generation,
            round,
            first: done(progress.first),
            last: done(progress.last),
            total_steps: progress.total_steps,
            epoch: progress.epoch,
            loss: progress.loss,
        })
    }
}

/// Whether the record lacks these steps, and is not of a later round.
fn is_news(before: Option<&ProgressRecord>, now: &RoundProgress) -> bool {
    before.is_none_or(|before| before.round < now.round || (before.round == now.round && before.step != now.last.step))
}
