//! Publishing a checkpoint: moving the job's resume point, under the fence. Not for writing the checkpoint itself.

use tokio::sync::watch;

use crate::job::{Checkpoint, Keys, RoundState, Versioned, to_json};
use crate::node::Status;
use crate::rendezvous::Credentials;
use crate::store::{Guard, Op, OpResult, Revision, Store, StoreError, Txn};

/// Tries while the round moves or an outcome is unknown.
const TRIES: u32 = 8;

/// Why a checkpoint was not published.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CommitError {
    /// This node is no member of the current round: whatever it wrote must not count.
    #[error("this node is not a member of the current round, so step {0} is not published")]
    Fenced(u64),
    /// The job has a newer checkpoint, or another of the same step.
    #[error("the job already has a checkpoint of step {published}, so step {step} is not published")]
    NotNewer {
        /// The step offered.
        step: u64,
        /// The step published.
        published: u64,
    },
    /// The record under `checkpoint` is not ours.
    #[error("{0}")]
    Foreign(String),
    /// The round kept moving.
    #[error("the round kept changing, so step {0} is not published: offer it again")]
    Unsettled(u64),
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Whether a member of `credentials.round` may still publish: while that round runs, and while the next is forming, so
/// that a leaver's last checkpoint counts.
fn may_commit(credentials: &Credentials) -> bool {
    let current = &credentials.current.value;
    match current.state {
        RoundState::Running => current.number == credentials.round,
        RoundState::Forming => current.sealed.is_some_and(|sealed| sealed.number == credentials.round),
        _ => false,
    }
}

/// The transaction that publishes `checkpoint`, guarded by the node's own key, by the round, and by the pointer as last
/// read.
pub fn commit_txn(keys: &Keys, credentials: &Credentials, checkpoint: &Checkpoint, pointer: Revision) -> Txn {
    Txn::of([Op::put(keys.checkpoint(), to_json(checkpoint))]).guarded([
        Guard::created(keys.node(&credentials.node), credentials.created),
        Guard::modified(keys.round(), credentials.current.modified),
        Guard::modified(keys.checkpoint(), pointer),
    ])
}

/// Publishes a checkpoint as the job's resume point. The step only grows.
///
/// An unknown outcome is read back, so `Ok` means that it is published, and [`CommitError::Fenced`] that it never will
/// be by this call.
pub async fn commit(
    store: &dyn Store,
    keys: &Keys,
    status: &watch::Receiver<Status>,
    mut checkpoint: Checkpoint,
) -> Result<(), CommitError> {
    let step = checkpoint.step;
    for _ in 0..TRIES {
        let credentials = status.borrow().credentials.clone().filter(may_commit);
        let Some(credentials) = credentials else { return Err(CommitError::Fenced(step)) };
        checkpoint.round = credentials.round;
        let read = store.txn(Txn::of([Op::get(keys.checkpoint()), Op::get(keys.round())])).await?;
        let value = |at: usize| read.results.get(at).and_then(OpResult::value);
        let pointer = value(0).map(Versioned::<Checkpoint>::parse).transpose().map_err(CommitError::Foreign)?;
        if let Some(pointer) = &pointer {
            if pointer.value == checkpoint {
                return Ok(());
            }
            if pointer.value.step >= step {
                return Err(CommitError::NotNewer { step, published: pointer.value.step });
            }
        }
        let pointer = pointer.map_or(Revision::NONE, |pointer| pointer.modified);
        match store.txn(commit_txn(keys, &credentials, &checkpoint, pointer)).await {
            Ok(result) if result.succeeded => return Ok(()),
            Err(error) if !error.outcome_unknown() => return Err(error.into()),
            // A guard did not hold, or the outcome is unknown: look again.
            _ => {}
        }
        let behind = value(1).is_some_and(|round| round.mod_revision > credentials.current.modified);
        if behind {
            wait_for_news(status.clone(), credentials.current.modified).await;
        }
    }
    Err(CommitError::Unsettled(step))
}

/// Waits a moment for the node to learn of a round newer than `known`.
async fn wait_for_news(mut status: watch::Receiver<Status>, known: Revision) {
    const MOMENT: std::time::Duration = std::time::Duration::from_secs(1);
    let newer = status.wait_for(|status| status.round.as_ref().is_none_or(|round| round.modified > known));
    // If nothing comes the next try will say what is wrong.
    let _ = tokio::time::timeout(MOMENT, newer).await;
}
