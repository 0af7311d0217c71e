//! What an operator can see of jobs and ask of them, for whoever passes that on. The job's leader carries it out.
//!
//! Everything an operator asks for is a change of the job's `desired` record, guarded by its mod revision ([`Wish`] says
//! which there are); of a job that has ended, the resume point can be dropped, or all of it deleted. Nodes are never
//! touched directly.

mod error;
mod wish;

use std::sync::Arc;

use crate::job::overview::{Job, Overview};
use crate::job::{Checkpoint, Desired, JobId, Keys, to_json};
use crate::removal::{RemovalError, Target, check, remove};
use crate::store::{Guard, Op, Revision, Scope, Store, Txn, Watcher};
use crate::time::date;
use error::listing;

pub use error::OperatorError;
pub use wish::{Wish, advice, granted};

/// How often a change is tried again that another operator's change overtook.
const TRIES: usize = 5;

/// Reads jobs and asks for changes.
#[derive(Clone)]
pub struct Operator {
    /// Where the jobs' records are.
    pub store: Arc<dyn Store>,
    /// Prefix of all jobs' keys.
    pub prefix: String,
}

/// What came of a wish.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Asked {
    /// What is desired of the job now.
    pub desired: Desired,
    /// What whoever asked should know, for people.
    pub advice: Option<String>,
}

impl Operator {
    /// On this store, for jobs under this prefix.
    pub fn new(store: Arc<dyn Store>, prefix: &str) -> Operator {
        Operator { store, prefix: prefix.to_owned() }
    }

    /// All jobs, and the revision at which they were read.
    ///
    /// # Errors
    /// The store's.
    pub async fn jobs(&self) -> Result<(Overview, Revision), OperatorError> {
        let (values, revision) = self.store.range(&Keys::jobs(&self.prefix)).await?;
        Ok((Overview::of(&self.prefix, &values), revision))
    }

    /// One job, and the revision at which it was read.
    ///
    /// # Errors
    /// [`OperatorError::NoSuchJob`] names those that are there; the store's.
    pub async fn job(&self, id: &str) -> Result<(JobId, Job, Revision), OperatorError> {
        if let Ok(job) = id.parse::<JobId>() {
            let (values, revision) = self.store.range(Keys::new(&self.prefix, &job).root()).await?;
            if let Some(found) = Overview::of(&self.prefix, &values).jobs.remove(&job).filter(|job| job.round.is_some())
            {
                return Ok((job, found, revision));
            }
        }
        let (overview, _) = self.jobs().await?;
        let there = overview.jobs.keys().map(ToString::to_string);
        Err(OperatorError::NoSuchJob {
            job: id.to_owned(),
            prefix: self.prefix.clone(),
            there: listing(there, "there are", "there is none at all; is --prefix right?"),
        })
    }

    /// Follows a job's keys from a revision on.
    ///
    /// # Errors
    /// The store's.
    pub async fn follow(&self, job: &Job, from: Revision) -> Result<Watcher, OperatorError> {
        Ok(self.store.watch(Scope::Prefix(job.keys.events()), from).await?)
    }

    /// Asks something of a job. Asking twice for the same changes nothing.
    ///
    /// # Errors
    /// [`OperatorError`] says what does not fit; the store's, where an unknown outcome is worth another try.
    pub async fn ask(&self, id: &str, wish: &Wish) -> Result<Asked, OperatorError> {
        for _ in 0..TRIES {
            let (name, job, _) = self.job(id).await?;
            if let Some(round) = job.round.as_ref().filter(|round| round.value.state.is_final()) {
                return Err(OperatorError::Ended { job: name, state: round.value.state });
            }
            let before = job.desired.as_ref().map(|desired| desired.value.clone()).unwrap_or_default();
            let desired = granted(&name, &job, before.clone(), wish)?;
            let advice = advice(&job, &desired, wish);
            if desired == before {
                return Ok(Asked { desired, advice });
            }
            let key = job.keys.desired();
            let revision = job.desired.as_ref().map_or(Revision::NONE, |desired| desired.modified);
            let put = Op::put(&key, to_json(&desired));
            // Of a job that was deleted meanwhile nothing is asked: the next one of its id would find it.
            let life = job.round.as_ref().map_or(Revision::NONE, |round| round.created);
            let guards = vec![Guard::modified(key, revision), Guard::created(job.keys.round(), life)];
            if self.store.put(guards, put).await?.is_some() {
                return Ok(Asked { desired, advice });
            }
        }
        let job = self.job(id).await?.0;
        Err(OperatorError::Contended { job })
    }

    /// Drops the resume point of a job that has ended, so that its next generation begins anew; `None` if it has none.
    /// Files are left alone. Guarded by the final record: a job that has begun again meanwhile keeps its resume point.
    ///
    /// # Errors
    /// [`OperatorError::NotEnded`] while the job goes on; the store's, where an unknown outcome is worth another try.
    pub async fn drop_checkpoint(&self, id: &str) -> Result<Option<Checkpoint>, OperatorError> {
        for _ in 0..TRIES {
            let (name, job, _) = self.job(id).await?;
            let Some(round) = &job.round else { return Ok(None) };
            if !round.value.state.is_final() {
                return Err(OperatorError::NotEnded { job: name, state: round.value.state });
            }
            let Some(checkpoint) = job.checkpoint else { return Ok(None) };
            let guards = [
                Guard::modified(job.keys.round(), round.modified),
                Guard::modified(job.keys.checkpoint(), checkpoint.modified),
            ];
            let delete = Txn::of([Op::delete(job.keys.checkpoint())]).guarded(guards);
            if self.store.txn(delete).await?.succeeded {
                return Ok(Some(checkpoint.value));
            }
        }
        let job = self.job(id).await?.0;
        Err(OperatorError::Contended { job })
    }

    /// Deletes the records of a job that has ended; how many keys there were. With `chosen`, the mod revision of `round`,
    /// only if the job is still as it was chosen.
    ///
    /// # Errors
    /// [`RemovalError`] says why nothing was deleted.
    pub async fn delete(&self, job: &JobId, chosen: Option<Revision>) -> Result<i64, RemovalError> {
        remove(&*self.store, &self.target(job, chosen)).await
    }

    /// How many keys [`Operator::delete`] would delete now. Nothing is written.
    ///
    /// # Errors
    /// [`RemovalError`] says why nothing would be deleted.
    pub async fn would_delete(&self, job: &JobId, chosen: Option<Revision>) -> Result<i64, RemovalError> {
        let keys = check(&*self.store, &self.target(job, chosen)).await?;
        Ok(i64::try_from(keys).unwrap_or(i64::MAX))
    }

    fn target<'a>(&'a self, job: &'a JobId, chosen: Option<Revision>) -> Target<'a> {
        Target { prefix: &self.prefix, job, chosen, now_ms: date::now_ms() }
    }
}
