//! Keep-alives: one stream for each lease, kept open between renewals.
//!
//! etcd's `grpc-proxy` answers the first question of a stream at once, and each later one when it renews the lease by
//! itself, three times in a TTL. Where a kept stream is that slow and a new one is not, each renewal takes a new one.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use etcd_client::{Error, LeaseKeepAliveStream, LeaseKeeper, ResponseHeader};
use tokio::sync::Mutex as AsyncMutex;
use tokio::time::{Instant, timeout};

use super::connection::Link;
use super::identity::Identity;
use crate::{LeaseId, Result, StoreError};

/// What a renewal came to: the time granted, `None` for a lease that is gone.
pub(super) type Renewal = Result<Option<Duration>>;

/// How long a new stream may take to answer, where the one before was too slow, to be taken for quick.
const QUICK: Duration = Duration::from_millis(800);

/// The open streams. A stream is taken out of its slot while it is used and put back when its answer has come, so that
/// a renewal that was given up leaves no late answer to be taken for the next one's.
#[derive(Default)]
pub(super) struct KeepAlives(Mutex<HashMap<LeaseId, Arc<AsyncMutex<Slot>>>>);

#[derive(Default)]
struct Slot {
    stream: Option<Stream>,
    /// The time granted, as the member at the other end of this connection has told it.
    granted: Option<(Arc<Link>, Duration)>,
    /// Streams are slow when they are kept.
    keeps_none: bool,
    /// Until then the lease lives without another renewal.
    until: Option<Instant>,
}

struct Stream {
    link: Arc<Link>,
    keeper: LeaseKeeper,
    answers: LeaseKeepAliveStream,
}

impl KeepAlives {
    fn slots(&self) -> MutexGuard<'_, HashMap<LeaseId, Arc<AsyncMutex<Slot>>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A member has granted a lease over this connection: its first renewal need not ask for how long.
    pub(super) fn granted(&self, lease: LeaseId, link: Arc<Link>, seconds: i64) {
        let Ok(seconds) = u64::try_from(seconds) else { return };
        let (granted, now) = (Duration::from_secs(seconds), Instant::now());
        let slot = Slot { granted: Some((link, granted)), until: now.checked_add(granted), ..Slot::default() };
        let mut slots = self.slots();
        // Of leases that were never renewed, or are no more, no one says that they are gone.
        slots.retain(|_, slot| slot.try_lock().map_or(true, |slot| slot.until.is_none_or(|until| now < until)));
        slots.insert(lease, Arc::new(AsyncMutex::new(slot)));
    }

    pub(super) fn forget(&self, lease: LeaseId) {
        self.slots().remove(&lease);
    }

    /// Sends one renewal and awaits its answer; on a kept stream no longer than `patience`, then on a new one.
    pub(super) async fn renew(
        &self,
        link: Arc<Link>,
        lease: LeaseId,
        identity: &Identity,
        patience: Duration,
    ) -> Result<Renewal, Error> {
        let slot = self.slots().entry(lease).or_default().clone();
        let mut slot = slot.lock().await;
        let kept = slot.stream.take().filter(|stream| Arc::ptr_eq(&stream.link, &link));
        let was_kept = kept.is_some();
        if let Some(mut stream) = kept
            && let Ok(renewed) = timeout(patience, stream.renew(identity)).await
        {
            if let Ok(Ok(Some(granted))) = renewed {
                slot.stream = Some(stream);
                slot.until = Instant::now().checked_add(granted);
            }
            return renewed;
        }
        let begun = Instant::now();
        let (keeper, answers) = match link.client.lease_client().keep_alive(lease.0).await {
            Ok(opened) => opened,
            // The client keeps the first answer to itself. This is its error for a lease that is gone, and for more:
            // etcd knows.
            Err(error @ Error::LeaseKeepAliveError(_)) => {
                let left = link.client.lease_client().time_to_live(lease.0, None).await?;
                return if left.ttl() > 0 { Err(error) } else { Ok(Ok(None)) };
            }
            Err(error) => return Err(error),
        };
        slot.keeps_none |= was_kept && begun.elapsed() < QUICK;
        // The first answer's TTL and header are the client's secret too: so a new connection is asked for these.
        let granted = match slot.granted.take() {
            Some((told_by, granted)) if Arc::ptr_eq(&told_by, &link) => granted,
            _ => {
                let left = link.client.lease_client().time_to_live(lease.0, None).await?;
                if let Err(lost) = met(left.header(), identity, &link) {
                    return Ok(Err(lost));
                }
                let Ok(granted @ 1..) = u64::try_from(left.granted_ttl()) else { return Ok(Ok(None)) };
                Duration::from_secs(granted)
            }
        };
        slot.granted = Some((Arc::clone(&link), granted));
        slot.until = Instant::now().checked_add(granted);
        slot.stream = (!slot.keeps_none).then_some(Stream { link, keeper, answers });
        Ok(Ok(Some(granted)))
    }
}

impl Stream {
    async fn renew(&mut self, identity: &Identity) -> Result<Renewal, Error> {
        self.keeper.keep_alive().await?;
        let answer = self.answers.message().await?;
        let answer = answer.ok_or_else(|| Error::LeaseKeepAliveError("the stream of keep-alives ended".into()))?;
        if let Err(lost) = met(answer.header(), identity, &self.link) {
            return Ok(Err(lost));
        }
        Ok(Ok(u64::try_from(answer.ttl()).ok().filter(|ttl| *ttl > 0).map(Duration::from_secs)))
    }
}

fn met(header: Option<&ResponseHeader>, identity: &Identity, link: &Link) -> Result<()> {
    header.map_or(Ok(()), |header| identity.met(header.cluster_id(), &link.uri))
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
    use crate::Store;
    use crate::embedded::EmbeddedServer;
    use crate::etcd::{EtcdConfig, EtcdStore};

    #[tokio::test]
    async fn a_lease_that_was_never_renewed_is_forgotten() -> anyhow::Result<()> {
        let server = EmbeddedServer::bind("127.0.0.1:0".parse()?, false).await?;
        let store = EtcdStore::connect(EtcdConfig::new([server.address().to_string()]))?;
        tokio::spawn(server.serve(std::future::pending()));
        let is_known = |lease: &LeaseId| store.inner.keep_alives.slots().contains_key(lease);
        let second = Duration::from_secs(1);
        let (kept, left) = (store.grant(60 * second).await?, store.grant(second).await?);
        let begun = Instant::now();
        while is_known(&left) {
            assert!(begun.elapsed() < 30 * second, "it is still known");
            tokio::time::sleep(second / 20).await;
            store.revoke(store.grant(60 * second).await?).await?;
        }
        assert!(is_known(&kept), "one that lives is forgotten");
        Ok(())
    }

    #[test]
    fn a_lease_is_never_shorter_than_asked_for() {
        assert_eq!(whole_seconds(Duration::from_millis(1)).unwrap(), 1);
        assert_eq!(whole_seconds(Duration::from_millis(10_000)).unwrap(), 10);
        assert_eq!(whole_seconds(Duration::from_millis(10_001)).unwrap(), 11);
        assert!(whole_seconds(Duration::ZERO).is_err());
        assert!(whole_seconds(Duration::MAX).is_err());
    }
}
