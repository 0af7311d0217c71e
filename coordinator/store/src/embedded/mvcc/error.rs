//! Why the state machine refuses a request.

use crate::{Revision, StoreError};

/// A refused request; nothing was changed. The texts are ours, the cases etcd's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
pub enum Error {
    #[error("revision {requested} was compacted away; the oldest left is {oldest}")]
    Compacted { requested: Revision, oldest: Revision },
    #[error("revision {requested} lies ahead; the store is at {current}")]
    FutureRevision { requested: Revision, current: Revision },
    #[error("a key is empty")]
    EmptyKey,
    #[error("a put that keeps the value or the lease needs a key that exists")]
    KeyNotFound,
    #[error("a transaction writes one key twice")]
    DuplicateKey,
    #[error("a transaction has more than {max} conditions or operations in a branch")]
    TooManyOps { max: usize },
    #[error("a request has {bytes} bytes of keys and values; at most {max} are taken")]
    TooLarge { bytes: usize, max: usize },
    #[error("the lease does not exist: it expired, was revoked or never was")]
    LeaseNotFound,
    #[error("the lease exists already")]
    LeaseExists,
    #[error("a lease of more than {max_seconds} s")]
    TtlTooLarge { max_seconds: u64 },
    #[error("the store is full")]
    NoSpace,
}

impl From<Error> for StoreError {
    fn from(error: Error) -> StoreError {
        match error {
            Error::Compacted { requested, oldest } => StoreError::Compacted { requested, oldest },
            Error::LeaseNotFound => StoreError::LeaseGone,
            Error::NoSpace => StoreError::NoSpace { endpoints: "embedded".into() },
            other => StoreError::Invalid(format!("the embedded store refuses the request: {other}")),
        }
    }
}
