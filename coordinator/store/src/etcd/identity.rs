//! Which cluster we talk to and how far its history had got: this shows whether the store was restored or emptied.
//! Safety within one cluster comes from the guards.

use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::{Result, Revision, StoreError};

/// What is known of the store's identity. Once it is lost it stays lost.
#[derive(Default)]
pub(super) struct Identity(Mutex<Seen>);

#[derive(Default)]
struct Seen {
    cluster: Option<u64>,
    revision: Revision,
    lost: Option<String>,
}

impl Identity {
    fn seen(&self) -> MutexGuard<'_, Seen> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The revision that no linearizable answer to a request sent from now on may fall below. [`StoreError::Lost`], if
    /// the store was found lost before.
    pub(super) fn floor(&self) -> Result<Revision> {
        let seen = self.seen();
        match &seen.lost {
            Some(cause) => Err(StoreError::Lost { cause: cause.clone() }),
            None => Ok(seen.revision),
        }
    }

    /// Notes which cluster answered. [`StoreError::Lost`], if it is another one than before. What etcd's `grpc-proxy`
    /// answers by itself names none (0).
    pub(super) fn met(&self, cluster: u64, at: &str) -> Result<()> {
        if cluster == 0 {
            return Ok(());
        }
        let known = *self.seen().cluster.get_or_insert(cluster);
        if known == cluster {
            return Ok(());
        }
        Err(self.lose(format!(
            "the store at {at} belongs to cluster {cluster:x}, and it was cluster {known:x} before; \
             it was replaced, or the endpoints name two clusters"
        )))
    }

    /// Notes a revision that the store was seen to have reached.
    pub(super) fn reached(&self, revision: Revision) {
        let mut seen = self.seen();
        seen.revision = seen.revision.max(revision);
    }

    pub(super) fn went_back(&self, floor: Revision, answer: Revision, at: &str) -> StoreError {
        self.lose(format!(
            "the store at {at} is at revision {answer}, and it was at {floor} before; \
             it was emptied, or restored from a backup"
        ))
    }

    fn lose(&self, cause: String) -> StoreError {
        StoreError::Lost { cause: self.seen().lost.get_or_insert(cause).clone() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_cluster_is_another_store_for_good() {
        let identity = Identity::default();
        identity.met(0, "a proxy").unwrap();
        identity.met(7, "a").unwrap();
        identity.met(7, "b").unwrap();
        identity.met(0, "a proxy").unwrap();
        assert!(matches!(identity.met(8, "c"), Err(StoreError::Lost { .. })));
        assert!(matches!(identity.floor(), Err(StoreError::Lost { .. })), "no further request is sent");
    }

    #[test]
    fn the_floor_only_rises() {
        let identity = Identity::default();
        for revision in [3, 9, 5] {
            identity.reached(Revision(revision));
        }
        assert_eq!(identity.floor().unwrap(), Revision(9));
    }
}
