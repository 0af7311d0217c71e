//! What can go wrong between us and a store, and what may be done about it.

use super::Revision;

/// Why a store call failed. Every message names the store, the cause, and what to do where there is something to do.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// No endpoint could be reached, or none has a quorum. Nothing was written.
    #[error("the store at {endpoints} cannot be reached: {cause}")]
    Unavailable {
        /// Where we tried.
        endpoints: String,
        /// The last failure.
        cause: String,
    },
    /// A write was sent and its answer did not come: it may or may not have happened.
    #[error("the store at {endpoints} did not answer a write ({cause}); whether it happened is unknown")]
    Unknown {
        /// Where we tried.
        endpoints: String,
        /// Why no answer came.
        cause: String,
    },
    /// A read or watch at a revision that was compacted away.
    #[error("revision {requested} was compacted away; the oldest left is {oldest}")]
    Compacted {
        /// What was asked for.
        requested: Revision,
        /// The oldest revision still held, if known (else zero).
        oldest: Revision,
    },
    /// A put named a lease that does not exist.
    #[error("the lease is gone: it expired or was revoked")]
    LeaseGone,
    /// The store wants credentials, or refuses ours.
    #[error("the store at {endpoints} refuses us: {cause}")]
    Denied {
        /// Where we tried.
        endpoints: String,
        /// The store's words.
        cause: String,
    },
    /// The store has no space left and takes no writes.
    #[error(
        "the store at {endpoints} is out of space and takes no writes: compact and defragment it, then `etcdctl alarm \
         disarm`"
    )]
    NoSpace {
        /// Where we tried.
        endpoints: String,
    },
    /// What answers there is no etcd with the v3 API.
    #[error("what answers at {endpoints} does not speak etcd's v3 API: {cause}")]
    NotV3 {
        /// Where we tried.
        endpoints: String,
        /// What it said.
        cause: String,
    },
    /// What answers there does not offer etcd's v2 API.
    #[error("what answers at {endpoints} does not offer etcd's v2 API: {cause}")]
    NotV2 {
        /// Where we tried.
        endpoints: String,
        /// What it is, and what to do.
        cause: String,
    },
    /// TLS to the store fails: one side speaks it and the other does not, or one does not trust the other.
    #[error("TLS to the store at {endpoints} fails: {cause}")]
    Tls {
        /// Where we tried.
        endpoints: String,
        /// What does not match, and what to change.
        cause: String,
    },
    /// The store is another cluster than before, or went back in history (restored from a backup, or emptied).
    #[error("store lost: {cause}")]
    Lost {
        /// What differs.
        cause: String,
    },
    /// The request itself is wrong: an endpoint that cannot be parsed, a certificate that cannot be read.
    #[error("{0}")]
    Invalid(String),
}

impl StoreError {
    /// A record is older than it was known to be before.
    pub fn went_back(key: &str, read: Revision, known: Revision) -> StoreError {
        let cause = format!(
            "the record at {key} is of revision {read}, and was of {known} before: the store was restored from a backup"
        );
        StoreError::Lost { cause }
    }

    /// Whether the same call may succeed later without anybody changing anything.
    pub fn is_transient(&self) -> bool {
        matches!(self, StoreError::Unavailable { .. } | StoreError::Unknown { .. })
    }

    /// Whether a write may have happened all the same.
    pub fn outcome_unknown(&self) -> bool {
        matches!(self, StoreError::Unknown { .. })
    }
}
