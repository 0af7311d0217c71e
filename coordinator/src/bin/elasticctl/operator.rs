//! What an operator can see of jobs and ask of them. The job's leader carries it out.
//!
//! Everything an operator asks for is a change of the job's `desired` record, guarded by its mod revision; of a job that
//! has ended, the resume point can be dropped, or all of it deleted. Nodes are never touched directly.

use std::sync::Arc;

use elastic_coordinator::job::overview::{Job, Overview};
use elastic_coordinator::job::{Checkpoint, Desired, JobId, Keys, Phase, RoundState, to_json};
use elastic_coordinator::store::{Guard, Op, Revision, Scope, Store, StoreError, Txn, Watcher};

/// How often a change is tried again that another operator's change overtook.
const TRIES: usize = 5;

/// Why an operator's wish cannot be met. Every message says what is there instead.
#[derive(Debug, thiserror::Error)]
pub(crate) enum OperatorError {
    /// The store fails.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// No such job.
    #[error("there is no job {job:?} under {prefix}: {there}")]
    NoSuchJob {
        /// What was asked for.
        job: String,
        /// Where.
        prefix: String,
        /// The jobs that are there, for people.
        there: String,
    },
    /// No such node.
    #[error("job {job} has no node {node:?}: {there}")]
    NoSuchNode {
        /// The job.
        job: JobId,
        /// What was asked for.
        node: String,
        /// The nodes that are there, for people.
        there: String,
    },
    /// The job has ended.
    #[error("job {job} has {state} already: nothing can be asked of it; starting its agents again begins it anew")]
    Ended {
        /// The job.
        job: JobId,
        /// How.
        state: RoundState,
    },
    /// The job goes on, and its resume point with it.
    #[error("job {job} is {state}: its resume point can be dropped once it has ended (elasticctl close ends it)")]
    NotEnded {
        /// The job.
        job: JobId,
        /// Where it is.
        state: RoundState,
    },
    /// No such range of nodes.
    #[error("job {job} would have at least {min} and at most {max} nodes: it takes 1 <= MIN <= MAX")]
    Range {
        /// The job.
        job: JobId,
        /// Fewest.
        min: u32,
        /// Most.
        max: u32,
    },
    /// Others change the same record all the time.
    #[error("others keep changing what is asked of job {job}: try again")]
    Contended {
        /// The job.
        job: JobId,
    },
}

/// What is asked of a job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Wish {
    /// Nodes of this name leave and stay away.
    Drain(String),
    /// They may take part again.
    Undrain(String),
    /// Other bounds; `None` leaves one as it is.
    Nodes {
        /// Fewest.
        min: Option<u32>,
        /// Most.
        max: Option<u32>,
    },
    /// The job ends.
    Close,
}

/// Reads jobs and asks for changes.
pub(crate) struct Operator {
    pub(crate) store: Arc<dyn Store>,
    pub(crate) prefix: String,
}

impl Operator {
    /// On this store, for jobs under this prefix.
    pub(crate) fn new(store: Arc<dyn Store>, prefix: &str) -> Operator {
        Operator { store, prefix: prefix.to_owned() }
    }

    /// All jobs, and the revision at which they were read.
    ///
    /// # Errors
    /// The store's.
    pub(crate) async fn jobs(&self) -> Result<(Overview, Revision), OperatorError> {
        let (values, revision) = self.store.range(&Keys::jobs(&self.prefix)).await?;
        Ok((Overview::of(&self.prefix, &values), revision))
    }

    /// One job, and the revision at which it was read.
    ///
    /// # Errors
    /// [`OperatorError::NoSuchJob`] names those that are there; the store's.
    pub(crate) async fn job(&self, id: &str) -> Result<(JobId, Job, Revision), OperatorError> {
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
    pub(crate) async fn follow(&self, job: &Job, from: Revision) -> Result<Watcher, OperatorError> {
        Ok(self.store.watch(Scope::Prefix(job.keys.events()), from).await?)
    }

    /// Asks something of a job. Returns the job as it was then, and what is desired of it now; asking twice for the same
    /// changes nothing.
    ///
    /// # Errors
    /// [`OperatorError`] says what does not fit; the store's, where an unknown outcome is worth another try.
    pub(crate) async fn ask(&self, id: &str, wish: &Wish) -> Result<(Job, Desired), OperatorError> {
        for _ in 0..TRIES {
            let (name, job, _) = self.job(id).await?;
            if let Some(round) = job.round.as_ref().filter(|round| round.value.state.is_final()) {
                return Err(OperatorError::Ended { job: name, state: round.value.state });
            }
            let before = job.desired.as_ref().map(|desired| desired.value.clone()).unwrap_or_default();
            let desired = granted(&name, &job, before.clone(), wish)?;
            if desired == before {
                return Ok((job, desired));
            }
            let key = job.keys.desired();
            let revision = job.desired.as_ref().map_or(Revision::NONE, |desired| desired.modified);
            let put = Op::put(&key, to_json(&desired));
            // Of a job that was deleted meanwhile nothing is asked: the next one of its id would find it.
            let life = job.round.as_ref().map_or(Revision::NONE, |round| round.created);
            let guards = vec![Guard::modified(key, revision), Guard::created(job.keys.round(), life)];
            if self.store.put(guards, put).await?.is_some() {
                return Ok((job, desired));
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
    pub(crate) async fn drop_checkpoint(&self, id: &str) -> Result<Option<Checkpoint>, OperatorError> {
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
}

/// What is desired once a wish is added.
fn granted(id: &JobId, job: &Job, mut desired: Desired, wish: &Wish) -> Result<Desired, OperatorError> {
    match wish {
        Wish::Close => desired.closed = true,
        Wish::Nodes { min, max } => {
            let (old_min, old_max) = job.range().unwrap_or((1, 1));
            let (min, max) = (min.unwrap_or(old_min), max.unwrap_or(old_max));
            if min == 0 || min > max {
                return Err(OperatorError::Range { job: id.clone(), min, max });
            }
            desired.min_nodes = Some(min);
            desired.max_nodes = Some(max);
        }
        Wish::Drain(node) => {
            let name = name_of(job, node).ok_or_else(|| no_such_node(id, job, node))?;
            if !desired.drain.contains(&name) {
                desired.drain.push(name);
            }
        }
        Wish::Undrain(node) => {
            let before = desired.drain.len();
            desired.drain.retain(|drained| drained != node);
            if desired.drain.len() == before {
                let drained = desired.drain.iter().cloned();
                let there = listing(drained, "drained are", "none is drained");
                return Err(OperatorError::NoSuchNode { job: id.clone(), node: node.clone(), there });
            }
        }
    }
    Ok(desired)
}

/// The name of a node that is here, given by name or by id.
fn name_of(job: &Job, node: &str) -> Option<String> {
    let mut records = job.nodes.iter();
    let found = records.find(|(id, record)| record.value.name == node || id.as_str() == node);
    found.map(|(_, record)| record.value.name.clone())
}

fn no_such_node(id: &JobId, job: &Job, node: &str) -> OperatorError {
    let names = job.nodes.values().map(|record| record.value.name.clone());
    let there = listing(names, "there are", "none is there");
    OperatorError::NoSuchNode { job: id.clone(), node: node.to_owned(), there }
}

/// At most ten names, for a message.
fn listing(names: impl Iterator<Item = String>, intro: &str, none: &str) -> String {
    const MOST: usize = 10;
    let names: Vec<String> = names.collect();
    match names.len() {
        0 => none.to_owned(),
        count if count > MOST => format!("{intro} {} and {} more", names[..MOST].join(", "), count - MOST),
        _ => format!("{intro} {}", names.join(", ")),
    }
}

/// What an operator should know about a drain just asked for: whether the job can go on without these nodes.
pub(crate) fn drain_advice(job: &Job, desired: &Desired) -> Option<String> {
    let staying = job.nodes.values().filter(|node| {
        !desired.drain.contains(&node.value.name) && !matches!(node.value.phase, Phase::Draining | Phase::Stopped)
    });
    let (staying, (min, _)) = (staying.count(), job.range()?);
    let join_timeout = job.spec.as_ref()?.timings.join_timeout;
    (staying < min as usize).then(|| {
        format!(
            "{staying} nodes stay and the job needs {min}: it waits for others, and fails after {join_timeout:?} without them"
        )
    })
}
