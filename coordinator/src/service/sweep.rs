//! Carries out what [`super::retention`] decides: deletes jobs that are kept no longer, a few at a time.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tokio::sync::mpsc;

use super::metrics::Metrics;
use super::retention::{Policy, expired};
use crate::operator::Operator;
use crate::removal::RemovalError;
use elastic_rendezvous::job::JobId;
use elastic_rendezvous::job::overview::Overview;
use elastic_rendezvous::time::Time;

/// How many deletions are under way at most: each may wait some seconds for hosts that do not answer.
const AT_ONCE: usize = 4;

/// How long a job is left alone whose agents have not left yet.
const SOON: Duration = Duration::from_secs(5);

/// How long a job is left alone that could not be deleted for another reason.
const LATER: Duration = Duration::from_secs(60);

pub(super) struct Swept {
    job: JobId,
    result: Result<i64, RemovalError>,
}

pub(super) struct Sweep {
    operator: Operator,
    policy: Policy,
    ends: mpsc::UnboundedSender<Swept>,
    under_way: BTreeSet<JobId>,
    /// Jobs to be left alone until then.
    later: BTreeMap<JobId, Time>,
}

impl Sweep {
    /// And where it says how deletions ended.
    pub(super) fn new(operator: Operator, policy: Policy) -> (Sweep, mpsc::UnboundedReceiver<Swept>) {
        let (ends, ended) = mpsc::unbounded_channel();
        let (under_way, later) = Default::default();
        (Sweep { operator, policy, ends, under_way, later }, ended)
    }

    pub(super) fn look(&mut self, overview: Option<&Overview>) {
        let Some(overview) = overview.filter(|_| !self.policy.keeps_all()) else { return };
        let (now, now_ms) = (elastic_store::clock::now(), elastic_store::clock::epoch_ms());
        self.later.retain(|_, until| now < *until);
        for job in expired(&overview.jobs, now_ms, self.policy) {
            if self.under_way.len() >= AT_ONCE {
                return;
            }
            if self.later.contains_key(&job) || !self.under_way.insert(job.clone()) {
                continue;
            }
            let chosen = overview.jobs[&job].round.as_ref().map(|round| round.modified);
            let (operator, ends) = (self.operator.clone(), self.ends.clone());
            tokio::spawn(async move {
                let result = operator.delete(&job, chosen, false).await;
                let _ = ends.send(Swept { job, result });
            });
        }
    }

    pub(super) fn swept(&mut self, swept: Swept, metrics: &Metrics) {
        let Swept { job, result } = swept;
        self.under_way.remove(&job);
        match result {
            Ok(keys) => {
                tracing::info!(%job, keys, "deleted: it is kept no longer (--keep-finished, --keep-finished-count)");
                metrics.deleted();
            }
            // Another replica or an operator was first, or it began again: the watch tells.
            Err(RemovalError::NoSuchJob { .. } | RemovalError::NotEnded { .. } | RemovalError::Changed { .. }) => {}
            // As ever right after a job's end.
            Err(error @ RemovalError::Agents { .. }) => {
                tracing::debug!(%job, "not deleted yet: {error}");
                self.later.insert(job, elastic_store::clock::now() + SOON);
            }
            Err(error) => {
                tracing::warn!(%job, "not deleted yet: {error}");
                self.later.insert(job, elastic_store::clock::now() + LATER);
            }
        }
    }
}
