//! Barriers: a named point that all members of a round reach before any passes. Not for workers of one node: each node
//! arrives once.

mod on_v2;

pub use on_v2::meet_on_v2;

use std::time::Duration;

use tokio::sync::watch;

use crate::job::{Keys, RoundState};
use crate::node::Status;
use crate::rendezvous::Credentials;
use crate::store::{Guard, Op, OpResult, Revision, Scope, Store, StoreError, Txn, WatchUpdate};

/// Pause before a request is repeated that met no answer.
const AGAIN: Duration = Duration::from_millis(100);

/// Why a barrier was not passed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BarrierError {
    /// This node is no member of a running round.
    #[error("this node is not a member of a running round, so it cannot meet others at barrier {0:?}")]
    NotMember(String),
    /// The round ended before all had arrived.
    #[error("round {round} ended before all its members reached barrier {name:?}")]
    RoundEnded {
        /// The round.
        round: u64,
        /// The barrier.
        name: String,
    },
    /// Not all arrived in time.
    #[error("not all members of round {round} reached barrier {name:?} within {within:?}{hint}")]
    Timeout {
        /// The round.
        round: u64,
        /// The barrier.
        name: String,
        /// The time given.
        within: Duration,
        /// What may be the reason.
        hint: &'static str,
    },
    /// etcd refuses what a barrier needs.
    #[error("etcd refuses barrier {name:?}: {cause}")]
    Refused {
        /// The barrier.
        name: String,
        /// Its words.
        cause: String,
    },
    /// A name that cannot be part of a key.
    #[error("{0:?} is no name for a barrier: use letters, digits and ._- only")]
    Name(String),
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Meets the other members of the current round at `name`. A name serves once in a round.
///
/// Whoever counts the full group writes the release, under a key outside the counted prefix; a waiter that sees the
/// round move reads the release once: present means passed, absent means an error, never a pass.
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

    let met = async {
        let read = insist(|| arrive(store, keys, &member, name)).await?;
        if read.released {
            return Ok(());
        }
        let mut watcher = store.watch(Scope::Key(release.clone()), read.revision).await?;
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
    // Whatever is being waited for, be it an answer of the store: nothing outlives the round.
    let met = async {
        tokio::select! {
            met = met => met,
            () = moved(&mut status, member.current.modified) => match store.get(&release).await? {
                Some(_) => Ok(()),
                None => Err(BarrierError::RoundEnded { round, name: name.to_owned() }),
            },
        }
    };
    match tokio::time::timeout(within, met).await {
        Ok(result) => result,
        Err(_) => Err(BarrierError::Timeout { round, name: name.to_owned(), within, hint: "" }),
    }
}

/// Waits until the node knows of another round than the one that was written then.
async fn moved(status: &mut watch::Receiver<Status>, written: Revision) {
    // An error means that there is no node any more.
    let _ = status.wait_for(|status| status.round.as_ref().is_none_or(|now| now.modified != written)).await;
}

/// Asks again for as long as no answer comes: to arrive twice is to arrive, and to look is always safe.
async fn insist<T, F: Future<Output = Result<T, BarrierError>>>(mut ask: impl FnMut() -> F) -> Result<T, BarrierError> {
    loop {
        match ask().await {
            Err(BarrierError::Store(error)) if error.is_transient() => tokio::time::sleep(AGAIN).await,
            result => return result,
        }
    }
}

fn check(name: &str) -> Result<(), BarrierError> {
    let fits = !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || "._-".contains(c));
    if fits { Ok(()) } else { Err(BarrierError::Name(name.to_owned())) }
}

struct Arrived {
    released: bool,
    revision: Revision,
}

async fn arrive(store: &dyn Store, keys: &Keys, member: &Credentials, name: &str) -> Result<Arrived, BarrierError> {
    let guards = [
        Guard::created(keys.node(&member.node), member.created),
        Guard::modified(keys.round(), member.current.modified),
    ];
    let arrivals = keys.arrivals(member.round, name);
    let release = keys.release(member.round, name);
    let arrive =
        Txn::of([Op::put(format!("{arrivals}{}", member.node), Vec::new()), Op::count(&arrivals), Op::get(&release)]);
    let result = store.txn(arrive.guarded(guards.clone())).await?;
    let ended = || BarrierError::RoundEnded { round: member.round, name: name.to_owned() };
    if !result.succeeded {
        return Err(ended());
    }
    let everyone = i64::from(member.current.value.group_world_size);
    let full = matches!(result.results.get(1), Some(OpResult::Count(count)) if *count >= everyone);
    let mut released = result.results.get(2).and_then(OpResult::value).is_some();
    if full && !released {
        if !store.txn(Txn::of([Op::put(&release, Vec::new())]).guarded(guards)).await?.succeeded {
            return Err(ended());
        }
        released = true;
    }
    Ok(Arrived { released, revision: result.revision.next() })
}
