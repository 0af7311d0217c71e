//! Barriers: a named point that all members of a round reach before any passes. Each node arrives once, for all its
//! workers.

use std::time::Duration;

use tokio::sync::watch;

use crate::Status;
use elastic_rendezvous::Credentials;
use elastic_rendezvous::job::{Keys, RoundState};
use elastic_store::{Guard, Op, OpResult, Revision, Scope, Store, StoreError, Txn, TxnResult, WatchUpdate};

/// Pause before a request is repeated that met no answer.
const AGAIN: Duration = Duration::from_millis(100);

/// Why a barrier was not passed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
pub enum BarrierError {
    /// This node is no member of a running round.
    #[error("this node is not a member of a running round, so it cannot meet others at barrier {0:?}")]
    NotMember(String),
    /// The round ended before all had arrived.
    #[error("round {round} ended before all its members reached barrier {name:?}")]
    RoundEnded { round: u64, name: String },
    /// Not all arrived in time.
    #[error("not all members of round {round} reached barrier {name:?} within {within:?}{hint}")]
    Timeout { round: u64, name: String, within: Duration, hint: &'static str },
    /// etcd refuses what a barrier needs.
    #[error("etcd refuses barrier {name:?}: {cause}")]
    Refused { name: String, cause: String },
    /// A name that cannot be part of a key.
    #[error("{0:?} is no name for a barrier: use letters, digits and ._- only")]
    Name(String),
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Meets the other members of the current round at `name`. A name serves once in a round.
///
/// The node that counts the full group writes the release, under a key outside the counted prefix; a waiter that sees
/// the round move reads the release once: present means passed, absent means an error, never a pass.
pub async fn meet(
    store: &dyn Store,
    keys: &Keys,
    status: &watch::Receiver<Status>,
    name: &str,
    within: Duration,
) -> Result<(), BarrierError> {
    check(name)?;
    let mut status = status.clone();
    let member = status.borrow_and_update().credentials.clone().filter(|member| {
        member.current.value.state == RoundState::Running && member.current.value.number == member.round
    });
    let Some(member) = member else { return Err(BarrierError::NotMember(name.to_owned())) };
    let round = member.round;
    let release = keys.release(round, name);

    let mut own = status.clone();
    let met = async {
        let mut member = member.clone();
        let since = loop {
            match insist(|| arrive(store, keys, &member, name)).await? {
                Arrived::Released => return Ok(()),
                Arrived::Waiting { since } => break since,
                // The round continues, and with it this barrier.
                Arrived::KeyGone => member = claimed_again(&mut own, &member).await,
            }
        };
        let mut watcher = store.watch(Scope::Key(release.clone()), since).await?;
        loop {
            match watcher.recv().await {
                Some(WatchUpdate::Events(events)) if !events.is_empty() => return Ok(()),
                Some(WatchUpdate::Snapshot { values, .. }) if !values.is_empty() => return Ok(()),
                Some(WatchUpdate::Broken(error)) => return Err(error.into()),
                Some(_) => {}
                None => return Err(BarrierError::RoundEnded { round, name: name.to_owned() }),
            }
        }
    };
    let over = moved(&mut status, member.current.modified);
    bounded(round, name, (within, ""), met, over, async { Ok(store.get(&release).await?.is_some()) }).await
}

/// Waits for `met` within this time, and no longer than the round, even for an answer of the store. Once the round is
/// `over`, `passed` says whether all had arrived. `hint` goes into the error of a timeout.
pub async fn bounded(
    round: u64,
    name: &str,
    (within, hint): (Duration, &'static str),
    met: impl Future<Output = Result<(), BarrierError>>,
    over: impl Future<Output = ()>,
    passed: impl Future<Output = Result<bool, BarrierError>>,
) -> Result<(), BarrierError> {
    let met = async {
        tokio::select! {
            met = met => met,
            () = over => match passed.await? {
                true => Ok(()),
                false => Err(BarrierError::RoundEnded { round, name: name.to_owned() }),
            },
        }
    };
    let timeout = |_| Err(BarrierError::Timeout { round, name: name.to_owned(), within, hint });
    tokio::time::timeout(within, met).await.unwrap_or_else(timeout)
}

/// Waits until the node knows of another round than the one that was written then.
async fn moved(status: &mut watch::Receiver<Status>, written: Revision) {
    // An error means that there is no node any more.
    let _ = status.wait_for(|status| status.round.as_ref().is_none_or(|now| now.modified != written)).await;
}

/// Waits until the node has written its key again, which went with its lease. If it was evicted, the round moves.
async fn claimed_again(status: &mut watch::Receiver<Status>, old: &Credentials) -> Credentials {
    let anew = |status: &Status| {
        status.credentials.as_ref().is_some_and(|new| new.round == old.round && new.created != old.created)
    };
    let new = status.wait_for(anew).await.map(|status| status.credentials.clone());
    match new {
        Ok(Some(new)) => new,
        // There is no node any more: its end is noticed beside this.
        _ => std::future::pending().await,
    }
}

/// Asks again for as long as no answer comes: to arrive twice is to arrive, and to look is always safe.
pub async fn insist<T, F: Future<Output = Result<T, BarrierError>>>(
    mut ask: impl FnMut() -> F,
) -> Result<T, BarrierError> {
    loop {
        match ask().await {
            Err(BarrierError::Store(error)) if error.is_transient() => tokio::time::sleep(AGAIN).await,
            result => return result,
        }
    }
}

/// Checks that `name` can be part of a key.
pub fn check(name: &str) -> Result<(), BarrierError> {
    let fits = !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || "._-".contains(c));
    if fits { Ok(()) } else { Err(BarrierError::Name(name.to_owned())) }
}

enum Arrived {
    Released,
    /// It has arrived, and the release was not there yet at the revision before this.
    Waiting {
        since: Revision,
    },
    /// This node's key is not the one that it was a member with: it went with its lease. The round is the same.
    KeyGone,
}

async fn arrive(store: &dyn Store, keys: &Keys, member: &Credentials, name: &str) -> Result<Arrived, BarrierError> {
    let guards = [
        Guard::created(keys.node(&member.node), member.created),
        Guard::modified(keys.round(), member.current.modified),
    ];
    let arrivals = keys.arrivals(member.round, name);
    let release = keys.release(member.round, name);
    let guarded = |then: Vec<Op>| Txn::of(then).guarded(guards.clone()).or_else([Op::get(keys.round())]);
    let refused = |result: &TxnResult| {
        let round = result.results.first().and_then(OpResult::value);
        if round.is_some_and(|round| round.mod_revision == member.current.modified) {
            return Ok(Arrived::KeyGone);
        }
        Err(BarrierError::RoundEnded { round: member.round, name: name.to_owned() })
    };
    let arrive =
        vec![Op::put(format!("{arrivals}{}", member.node), Vec::new()), Op::count(&arrivals), Op::get(&release)];
    let result = store.txn(guarded(arrive)).await?;
    if !result.succeeded {
        return refused(&result);
    }
    let everyone = i64::from(member.current.value.group_world_size);
    let full = matches!(result.results.get(1), Some(OpResult::Count(count)) if *count >= everyone);
    if result.results.get(2).and_then(OpResult::value).is_some() {
        return Ok(Arrived::Released);
    }
    if !full {
        return Ok(Arrived::Waiting { since: result.revision.next() });
    }
    let released = store.txn(guarded(vec![Op::put(&release, Vec::new())])).await?;
    if released.succeeded { Ok(Arrived::Released) } else { refused(&released) }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use elastic_rendezvous::job::{JobId, NodeId, RoundRecord, Versioned};
    use elastic_store::embedded::MemoryStore;
    use elastic_store::embedded::mvcc::Limits;

    #[tokio::test]
    async fn a_key_that_went_with_its_lease_and_was_written_again_ends_no_barrier() {
        let job: JobId = "J".parse().unwrap();
        let keys = Keys::new("/elastic", &job);
        let node = NodeId::new("a", "1");
        let store = MemoryStore::start(Limits::default());
        let record = json!({ "number": 1, "generation": 1, "state": "running", "group_world_size": 1, "reason": "r" });
        let value: RoundRecord = serde_json::from_value(record.clone()).unwrap();
        let put = async |key: String| store.txn(Txn::of([Op::put(key, record.to_string())])).await.unwrap().revision;
        // Given a member of a round that has lost its key
        let modified = put(keys.round()).await;
        let created = put(keys.node(&node)).await;
        store.delete(vec![], &keys.node(&node)).await.unwrap();
        let current = Versioned { value, created: modified, modified };
        let credentials = Credentials { node: node.clone(), created, round: 1, current: current.clone() };
        let (tell, status) = watch::channel(Status {
            credentials: Some(credentials.clone()),
            round: Some(current.clone()),
            ..Status::default()
        });
        let meet = || meet(&store, &keys, &status, "b", Duration::from_secs(10));
        let within = |time| tokio::time::timeout(time, meet());
        // then a barrier waits for it to be written again
        assert!(within(Duration::from_millis(50)).await.is_err());
        let (met, ()) = tokio::join!(meet(), async {
            let created = put(keys.node(&node)).await;
            tell.send_modify(|status| status.credentials = Some(Credentials { created, ..credentials.clone() }));
        });
        assert_eq!(met, Ok(()));
        // and where the round has moved, that is what it says
        let moved = put(keys.round()).await;
        tell.send_modify(|status| status.round = Some(Versioned { modified: moved, ..current.clone() }));
        let over = super::meet(&store, &keys, &status, "c", Duration::from_secs(10)).await;
        assert!(matches!(over, Err(BarrierError::RoundEnded { round: 1, .. })), "{over:?}");
    }
}
