//! Why an operator's request is refused, for the program that passes it on. What is refused is decided where the
//! request is handled.

use crate::removal::RemovalError;
use elastic_rendezvous::job::{JobId, RoundState};
use elastic_store::StoreError;

/// Why an operator's wish cannot be met. Every message says what is there instead.
#[derive(Debug, thiserror::Error)]
pub enum OperatorError {
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
    #[error("job {job} has {state} already: it takes no more requests. To run it again, start its agents again")]
    Ended {
        /// The job.
        job: JobId,
        /// How.
        state: RoundState,
    },
    /// Its protocol is not ours.
    #[error("nothing can be asked of job {job}: {refusal}")]
    OtherProtocol {
        /// The job.
        job: JobId,
        /// Why not, and what to do.
        refusal: String,
    },
    /// The job continues, and its resume point with it.
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
    /// Nothing is to be set.
    #[error("none of min, max and priority is given: name at least one")]
    NothingToSet,
    /// Others change the same record all the time.
    #[error("others keep changing job {job}: try again")]
    Contended {
        /// The job.
        job: JobId,
    },
    /// The job cannot be deleted.
    #[error(transparent)]
    Removal(#[from] RemovalError),
}

/// At most ten names, for a message.
pub(super) fn listing(names: impl Iterator<Item = String>, intro: &str, none: &str) -> String {
    const MOST: usize = 10;
    let names: Vec<String> = names.collect();
    match names.len() {
        0 => none.to_owned(),
        count if count > MOST => format!("{intro} {} and {} more", names[..MOST].join(", "), count - MOST),
        _ => format!("{intro} {}", names.join(", ")),
    }
}
