//! Keep-alives: one stream for each lease, kept open between renewals.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use etcd_client::{Error, LeaseKeepAliveStream, LeaseKeeper};
use tokio::sync::Mutex as AsyncMutex;

use super::connection::Link;
use super::identity::Identity;
use crate::{LeaseId, Result, StoreError};

/// What a renewal came to: the time granted, `None` for a lease that is gone.
pub(super) type Renewal = Result<Option<Duration>>;

type Slot = Arc<AsyncMutex<Option<Stream>>>;

/// The open streams. A stream is taken out of its slot while it is used and put back when its answer has come, so that
/// a renewal that was given up leaves no late answer to be taken for the next one's.
#[derive(Default)]
pub(super) struct KeepAlives(Mutex<HashMap<LeaseId, Slot>>);

struct Stream {
    link: Arc<Link>,
    keeper: LeaseKeeper,
    answers: LeaseKeepAliveStream,
}

impl KeepAlives {
    fn slots(&self) -> MutexGuard<'_, HashMap<LeaseId, Slot>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn forget(&self, lease: LeaseId) {
        self.slots().remove(&lease);
    }

    /// Sends one renewal and awaits its answer.
    pub(super) async fn renew(&self, link: Arc<Link>, lease: LeaseId, identity: &Identity) -> Result<Renewal, Error> {
        let slot = self.slots().entry(lease).or_default().clone();
        let mut slot = slot.lock().await;
        let mut stream = match slot.take() {
            Some(stream) if Arc::ptr_eq(&stream.link, &link) => stream,
            _ => match link.client.lease_client().keep_alive(lease.0).await {
                Ok((keeper, answers)) => Stream { link, keeper, answers },
                // The client keeps the first answer to itself. This is its error for a lease that is gone, and for
                // more: etcd knows.
                Err(error @ Error::LeaseKeepAliveError(_)) => {
                    let left = link.client.lease_client().time_to_live(lease.0, None).await?;
                    return if left.ttl() > 0 { Err(error) } else { Ok(Ok(None)) };
                }
                Err(error) => return Err(error),
            },
        };
        // The client keeps the first answer's TTL to itself, so a new stream is asked once more.
        stream.keeper.keep_alive().await?;
        let answer = stream.answers.message().await?;
        let answer = answer.ok_or_else(|| Error::LeaseKeepAliveError("the stream of keep-alives ended".into()))?;
        if let Some(header) = answer.header()
            && let Err(lost) = identity.met(header.cluster_id(), &stream.link.uri)
        {
            return Ok(Err(lost));
        }
        let Ok(seconds @ 1..) = u64::try_from(answer.ttl()) else { return Ok(Ok(None)) };
        *slot = Some(stream);
        Ok(Ok(Some(Duration::from_secs(seconds))))
    }
}

/// A duration in the whole seconds that etcd counts in: never shorter than asked for.
pub(super) fn whole_seconds(ttl: Duration) -> Result<i64> {
    let seconds = ttl.as_secs().saturating_add(u64::from(ttl.subsec_nanos() > 0));
    match i64::try_from(seconds) {
        Ok(seconds @ 1..) => Ok(seconds),
        _ => Err(StoreError::Invalid(format!("a lease cannot last {ttl:?}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_is_never_shorter_than_asked_for() {
        assert_eq!(whole_seconds(Duration::from_millis(1)).unwrap(), 1);
        assert_eq!(whole_seconds(Duration::from_millis(10_000)).unwrap(), 10);
        assert_eq!(whole_seconds(Duration::from_millis(10_001)).unwrap(), 11);
        assert!(whole_seconds(Duration::ZERO).is_err());
        assert!(whole_seconds(Duration::MAX).is_err());
    }
}
