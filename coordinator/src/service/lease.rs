//! A replica's lease: granted, renewed, granted again when it is lost.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::sleep;

use elastic_rendezvous::time::Time;
use elastic_store::{LeaseId, Store};

const RETRY: Duration = Duration::from_millis(300);

/// Keeps a lease for ever. `held` tells which one it is; none while the store has not confirmed it for `ttl`.
pub(super) async fn keep(store: Arc<dyn Store>, ttl: Duration, held: watch::Sender<Option<LeaseId>>) {
    let mut failing = false;
    loop {
        let sent = elastic_store::clock::now();
        match store.grant(ttl).await {
            Ok(lease) => {
                failing = false;
                held.send_replace(Some(lease));
                renew(store.as_ref(), lease, ttl, sent, &held).await;
                tracing::warn!("the lease is gone; asking for another");
                held.send_replace(None);
            }
            Err(error) => {
                if !std::mem::replace(&mut failing, true) {
                    tracing::warn!("{error}; no lease yet");
                }
                sleep(RETRY).await;
            }
        }
    }
}

/// Renews until the store says that the lease is gone. One that was out of reach for long may still be there: etcd
/// gives all leases more time when it elects.
async fn renew(
    store: &dyn Store,
    lease: LeaseId,
    ttl: Duration,
    mut renewed: Time,
    held: &watch::Sender<Option<LeaseId>>,
) {
    let mut pause = ttl / 5;
    loop {
        sleep(pause).await;
        let sent = elastic_store::clock::now();
        match store.keep_alive(lease).await {
            Ok(Some(_)) => {
                renewed = sent;
                pause = ttl / 5;
                held.send_if_modified(|old| old.replace(lease).is_none());
            }
            Ok(None) => return,
            Err(error) => {
                pause = RETRY;
                if elastic_store::clock::now().since(renewed) >= ttl
                    && held.send_if_modified(|old| old.take().is_some())
                {
                    tracing::warn!("{error}; the lease may be gone");
                }
            }
        }
    }
}
