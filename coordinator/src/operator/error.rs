//! Why an operator's request is refused, for the program that passes it on. What is refused is decided where the
//! request is handled.

use super::wish::LONGEST_NODE;
use crate::removal::{self, RemovalError};
use elastic_rendezvous::job::{JobId, RoundState};
use elastic_store::StoreError;

/// Why an operator's wish cannot be met. Every message says what is there instead.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum OperatorError {
    /// The store fails.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// No such job.
    #[error("there is no job {job:?} under {prefix}: `elasticctl jobs` lists those that are there. Is --prefix right?")]
    NoSuchJob { job: String, prefix: String },
    /// No such node.
    #[error("job {job} has no node {node:?}: {there}")]
    NoSuchNode { job: JobId, node: String, there: String },
    /// A name that no node can have.
    #[error(
        "no node has a name like {node:?}: it has letters, digits and ._-:@+= alone, and at most {LONGEST_NODE} bytes \
         with its incarnation"
    )]
    BadNode { node: String },
    /// The job has ended.
    #[error("job {job} has {state} already: it takes no more requests. To run it again, start its agents again")]
    Ended { job: JobId, state: RoundState },
    /// Its protocol is not ours.
    #[error("nothing can be asked of job {job}: {refusal}")]
    OtherProtocol { job: JobId, refusal: String },
    /// The job continues, and its resume point with it.
    #[error("job {job} is {state}: its resume point can be dropped once it has ended (elasticctl close ends it)")]
    NotEnded { job: JobId, state: RoundState },
    /// No such range of nodes.
    #[error("job {job} would have at least {min} and at most {max} nodes: it takes 1 <= MIN <= MAX")]
    Range { job: JobId, min: u32, max: u32 },
    /// Nothing is to be set.
    #[error("none of min, max and priority is given: name at least one")]
    NothingToSet,
    /// Others change the same record all the time.
    #[error("others keep changing job {job}: try again")]
    Contended { job: JobId },
    /// The job cannot be deleted.
    #[error(transparent)]
    Removal(#[from] RemovalError),
}

/// At most ten names after an introduction, for a message; `none` where there are none.
pub(super) fn listing(names: impl Iterator<Item = String>, intro: &str, none: &str) -> String {
    match removal::listing(names) {
        names if names.is_empty() => none.to_owned(),
        names => format!("{intro} {names}"),
    }
}
