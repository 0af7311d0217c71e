//! What an operator can see of jobs and ask of them, for the program that passes that on. The job's leader carries it
//! out.
//!
//! Everything an operator asks for is a change of the job's `desired` record, guarded by its mod revision ([`Wish`] says
//! which there are); of a job that has ended, the resume point can be dropped, or all of it deleted. Nodes are never
//! touched directly. Who asked is in the job's history: its line is written in the same transaction.

mod error;
mod wish;

use std::fmt::Display;
use std::sync::Arc;

use crate::removal::{RemovalError, Target, check, remove};
use elastic_rendezvous::job::overview::{Job, Overview};
use elastic_rendezvous::job::{
    Asked, Checkpoint, Desired, EventRecord, JobId, Keys, Requester, RoundRecord, Versioned, history, to_json,
};
use elastic_store::tls::MutualTls;
use elastic_store::{Guard, Op, Revision, Store, Txn};

pub use error::OperatorError;
pub use wish::{Wish, found};
use wish::{advice, granted};

/// How often a change is tried again that another operator's change overtook.
const TRIES: usize = 8;

/// Reads jobs and asks for changes.
#[derive(Clone)]
pub struct Operator {
    /// Where the jobs' records are.
    pub store: Arc<dyn Store>,
    /// Prefix of all jobs' keys.
    pub prefix: String,
    /// How agents are asked.
    pub tls: Option<MutualTls>,
}

/// The result of a wish.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Granted {
    /// What is desired of the job now.
    pub desired: Desired,
    /// What the one who asked should know, for people.
    pub advice: Option<String>,
}

impl Operator {
    /// On this store, for jobs under this prefix.
    pub fn new(store: Arc<dyn Store>, prefix: &str) -> Operator {
        Operator { store, prefix: prefix.to_owned(), tls: None }
    }

    /// Asks agents over this.
    #[must_use]
    pub fn over(self, tls: Option<MutualTls>) -> Operator {
        Operator { tls, ..self }
    }

    /// All jobs, and the revision at which they were read.
    pub async fn jobs(&self) -> Result<(Overview, Revision), OperatorError> {
        let (values, revision) = self.store.range(&Keys::jobs(&self.prefix)).await?;
        let mut overview = Overview::of(&self.prefix, &values);
        log_problems(&mut overview);
        Ok((overview, revision))
    }

    /// One job, and the revision at which it was read. One read, whether the job is there or not.
    pub async fn job(&self, id: &str) -> Result<(JobId, Job, Revision), OperatorError> {
        let no_such_job = || OperatorError::NoSuchJob { job: id.to_owned(), prefix: self.prefix.clone() };
        let name = id.parse::<JobId>().map_err(|_| no_such_job())?;
        let (values, revision) = self.store.range(Keys::new(&self.prefix, &name).root()).await?;
        let job = Overview::of(&self.prefix, &values).jobs.remove(&name).filter(|job| job.round.is_some());
        Ok((name, job.ok_or_else(no_such_job)?, revision))
    }

    /// Asks something of a job in somebody's name. Asking twice for the same changes nothing, and is reported once.
    /// After an unknown outcome it is worth another try.
    pub async fn ask(&self, id: &str, wish: &Wish, by: &Requester) -> Result<Granted, OperatorError> {
        for _ in 0..TRIES {
            let (name, job, _) = self.job(id).await?;
            let Some(round) = &job.round else { continue };
            if let Some(refusal) = job.refusal() {
                return Err(OperatorError::OtherProtocol { job: name, refusal });
            }
            if round.value.state.is_final() {
                return Err(OperatorError::Ended { job: name, state: round.value.state });
            }
            let before = job.desired.as_ref().map(|desired| desired.value.clone()).unwrap_or_default();
            let mut desired = granted(&name, &job, before.clone(), wish)?;
            let advice = advice(&job, &desired, wish);
            if desired == before {
                return Ok(Granted { desired, advice });
            }
            let line = Line::next(&job, round, wish, by);
            desired.asked = Some(Asked { by: by.clone(), at_ms: line.event.at_ms, event: line.number });
            let key = job.keys.desired();
            let revision = job.desired.as_ref().map_or(Revision::NONE, |desired| desired.modified);
            let put = Txn::of([Op::put(&key, to_json(&desired))]).guarded([Guard::modified(key, revision)]);
            if self.store.txn(line.with(put, &job)).await?.succeeded {
                return Ok(Granted { desired, advice });
            }
        }
        let job = self.job(id).await?.0;
        Err(OperatorError::Contended { job })
    }

    /// Drops the resume point of a job that has ended, so that its next generation begins again; `None` if it has none.
    /// Files are left alone. A job that has begun again meanwhile keeps its resume point. [`OperatorError::NotEnded`]
    /// while the job continues.
    pub async fn drop_checkpoint(&self, id: &str, by: &Requester) -> Result<Option<Checkpoint>, OperatorError> {
        for _ in 0..TRIES {
            let (name, job, _) = self.job(id).await?;
            let Some(round) = &job.round else { return Ok(None) };
            if !round.value.state.is_final() {
                return Err(OperatorError::NotEnded { job: name, state: round.value.state });
            }
            let Some(checkpoint) = job.checkpoint.clone() else { return Ok(None) };
            let line = Line::next(&job, round, format!("drop the checkpoint of step {}", checkpoint.value.step), by);
            let key = job.keys.checkpoint();
            let delete = Txn::of([Op::delete(&key)]).guarded([Guard::modified(key, checkpoint.modified)]);
            if self.store.txn(line.with(delete, &job)).await?.succeeded {
                return Ok(Some(checkpoint.value));
            }
        }
        let job = self.job(id).await?.0;
        Err(OperatorError::Contended { job })
    }

    /// Deletes the records of a job that has ended; how many keys there were. With `chosen`, the mod revision of `round`,
    /// only if the job has not changed since it was chosen. A dry run writes nothing.
    pub async fn delete(&self, job: &JobId, chosen: Option<Revision>, dry_run: bool) -> Result<i64, RemovalError> {
        let (prefix, now_ms) = (&self.prefix, elastic_store::clock::epoch_ms());
        let target = Target { prefix, job, chosen, now_ms, tls: self.tls.as_ref() };
        if dry_run { check(&*self.store, &target).await } else { remove(&*self.store, &target).await }
    }
}

/// The line of history that tells of a request.
struct Line {
    number: u64,
    event: EventRecord,
    /// The round's record as the request found it.
    round: Revision,
}

impl Line {
    fn next(job: &Job, round: &Versioned<RoundRecord>, what: impl Display, by: &Requester) -> Line {
        let event = EventRecord {
            at_ms: elastic_store::clock::epoch_ms(),
            round: round.value.number,
            state: round.value.state,
            reason: format!("asked by {by}: {what}"),
            evicted: Vec::new(),
            asked_by: Some(by.clone()),
        };
        let number = job.events.keys().next_back().map_or(0, |last| last.saturating_add(1));
        Line { number, event, round: round.modified }
    }

    /// Adds the line to what it tells of: both are written, or none. The round must be the one that it speaks of, so
    /// that nothing is asked of the next job of this id, either.
    fn with(&self, mut txn: Txn, job: &Job) -> Txn {
        txn.then.extend(history::write(&job.keys, self.number, &self.event));
        txn.guarded([Guard::modified(job.keys.round(), self.round), history::unwritten(&job.keys, self.number)])
    }
}

/// Logs the records that `overview` could not read, each once.
pub(crate) fn log_problems(overview: &mut Overview) {
    for problem in overview.problems.drain(..) {
        tracing::warn!("{problem}");
    }
}
