//! A watch that outlives its connections: it continues after the last revision delivered, and lists again where history
//! was compacted away.

use std::sync::Arc;
use std::time::Duration;

use backon::{BackoffBuilder, ExponentialBuilder};
use etcd_client::{Error, WatchOptions, WatchResponse, WatchStream};
use tokio::sync::mpsc::Sender;
use tokio::time::{Instant, timeout_at};

use super::connection::{Link, NEW_TOKENS};
use super::fault::{Fault, of_words};
use super::refusal::{self, Rights};
use super::{Inner, convert};
use crate::{Op, OpResult, Result, Revision, Scope, StoreError, Txn, TxnResult, WatchUpdate};

/// Updates that wait for a slow reader before the connection's flow control makes etcd wait.
pub(super) const UPDATES_AHEAD: usize = 16;

/// Why a session on one connection ended.
enum End {
    Unwanted,
    Broken(StoreError),
    /// Continue at once: the reason for it has been dealt with.
    Again,
    Failed(String),
}

impl From<StoreError> for End {
    fn from(error: StoreError) -> End {
        match error {
            StoreError::Lost { .. } | StoreError::Denied { .. } | StoreError::Invalid(_) => End::Broken(error),
            error => End::Failed(error.to_string()),
        }
    }
}

pub(super) struct Watch {
    pub(super) store: Arc<Inner>,
    pub(super) scope: Scope,
    /// The first revision not yet delivered.
    pub(super) next: Revision,
    pub(super) updates: Sender<WatchUpdate>,
    /// etcd has let us watch this before.
    pub(super) allowed: bool,
}

impl Watch {
    /// Runs until no one listens or the watch is broken for good.
    pub(super) async fn run(mut self) {
        let backoff = ExponentialBuilder::default()
            .with_min_delay(Duration::from_millis(50))
            .with_max_delay(Duration::from_secs(2))
            .with_jitter()
            .with_jitter_seed(rand::random())
            .without_max_times();
        let mut pauses = backoff.build();
        let mut reconnected = false;
        let mut refusals = 0;
        loop {
            let before = self.next;
            let end = self.session(reconnected, &mut refusals).await;
            reconnected = true;
            if self.next != before {
                pauses = backoff.build();
            }
            let cause = match end {
                End::Unwanted => return,
                End::Again => continue,
                // It let us in before: somebody changed a password or took a permission away, and may fix it. Calls
                // say so meanwhile.
                End::Broken(error @ StoreError::Denied { .. }) if self.allowed => error.to_string(),
                End::Broken(error) => {
                    // If no one listens, there is no one to tell.
                    let _ = self.updates.send(WatchUpdate::Broken(error)).await;
                    return;
                }
                End::Failed(cause) => cause,
            };
            tracing::debug!(scope = ?self.scope, next = %self.next, %cause, "watch interrupted");
            let pause = pauses.next().unwrap_or_default();
            tokio::select! {
                () = self.updates.closed() => return,
                () = tokio::time::sleep(pause) => {}
            }
        }
    }

    /// Watches over one connection. `refusals` counts those since the watch last worked.
    async fn session(&mut self, reconnected: bool, refusals: &mut u32) -> End {
        if reconnected {
            // A store that was emptied would leave us waiting for revisions that it has yet to reach: a linearizable
            // read finds out.
            let (Scope::Key(key) | Scope::Prefix(key)) = &self.scope;
            let key = if key.is_empty() { "\0" } else { key };
            if let Err(error) = self.store.transact(Txn::of([Op::get(key)])).await {
                return error.into();
            }
        }
        let (link, mut stream) = match self.open().await {
            Ok(opened) => opened,
            Err(end) => return end,
        };
        loop {
            let response = tokio::select! {
                () = self.updates.closed() => return End::Unwanted,
                () = link.retired() => return End::Failed(format!("the connection to {} failed", link.uri)),
                response = stream.message() => response,
            };
            let response = match response {
                Ok(Some(response)) => response,
                Ok(None) => return End::Failed("etcd ended the stream".into()),
                Err(error) => return self.fault(&link, &error),
            };
            if response.canceled() {
                return self.canceled(&link, &response, refusals).await;
            }
            link.hear();
            *refusals = 0;
            self.allowed = true;
            if let Err(end) = self.deliver(&link, response).await {
                return end;
            }
        }
    }

    /// Opens the stream and awaits etcd's word that the watch exists.
    async fn open(&self) -> Result<(Arc<Link>, WatchStream), End> {
        let sent = Instant::now();
        let deadline = sent + self.store.connection.limit();
        let at = self.store.connection.members.endpoints();
        let link =
            self.store.connection.link(deadline).await.map_err(|fault| End::from(fault.into_error(false, &at)))?;
        let mut options = WatchOptions::new().with_start_revision(self.next.0);
        let key = match &self.scope {
            Scope::Key(key) => key,
            Scope::Prefix(prefix) => {
                options = options.with_prefix();
                prefix
            }
        };
        // etcd delivers up to a thousand revisions in one message when it replays, and never splits one unless asked
        // to; so a limit here could stop a watch for good.
        let mut client = link.client.watch_client().max_decoding_message_size(usize::MAX);
        match timeout_at(deadline, client.watch(key.as_str(), Some(options))).await {
            Ok(Ok(stream)) => Ok((link, stream)),
            Ok(Err(error)) => Err(self.fault(&link, &error)),
            Err(_) => {
                let late = Fault::Late(format!("{} does not answer", link.uri));
                Err(self.store.connection.members.judge(&link, sent, late).into_error(false, &at).into())
            }
        }
    }

    /// What a failed stream means for the connection and for the watch.
    fn fault(&self, link: &Arc<Link>, error: &Error) -> End {
        let fault = Fault::of(error, &link.uri);
        match self.store.connection.members.judge(link, Instant::now(), fault) {
            // The read that comes before the next session brings a new token.
            Fault::StaleToken(cause) => End::Failed(cause),
            fault => fault.into_error(false, &link.uri).into(),
        }
    }

    /// etcd ended this one watch: for compaction, or because it does not let us.
    async fn canceled(&mut self, link: &Arc<Link>, response: &WatchResponse, refusals: &mut u32) -> End {
        if response.compact_revision() > 0 {
            return self.list_anew().await.map_or_else(|end| end, |()| End::Again);
        }
        let connection = &self.store.connection;
        let cause = response.cancel_reason().to_owned();
        let fault = of_words(&cause, &link.uri);
        if let Some(Fault::StaleToken(_) | Fault::Refused(StoreError::Denied { .. })) = fault {
            // A watch with a token that is out of date is refused in the same words as one that is not allowed, and a
            // new token can be out of date again: a refusal is believed that outlasts some.
            *refusals += 1;
            if *refusals >= NEW_TOKENS {
                let refused = StoreError::Denied { endpoints: link.uri.clone(), cause };
                return End::Broken(refusal::told(refused, &connection.who(), &Rights::of_watch(&self.scope)));
            }
            if let Err(fault) = connection.renew_token(link, Instant::now() + connection.limit()).await {
                return fault.into_error(false, &link.uri).into();
            }
        }
        End::Failed(cause)
    }

    /// Replaces lost history by the present state.
    async fn list_anew(&mut self) -> Result<(), End> {
        let op = match &self.scope {
            Scope::Key(key) => Op::get(key),
            Scope::Prefix(prefix) => Op::range(prefix),
        };
        let TxnResult { revision, results, .. } = self.store.transact(Txn::of([op])).await?;
        let values = results.into_iter().next().map(OpResult::into_values).unwrap_or_default();
        self.send(WatchUpdate::Snapshot { revision, values }).await?;
        self.next = revision.next();
        Ok(())
    }

    async fn deliver(&mut self, link: &Link, response: WatchResponse) -> Result<(), End> {
        if let Some(header) = response.header() {
            self.store.identity.met(header.cluster_id(), &link.uri)?;
        }
        let mut events: Vec<_> = response.0.events.into_iter().filter_map(convert::event).collect();
        events.retain(|event| event.revision() >= self.next);
        let Some(last) = events.last().map(|event| event.revision()) else { return Ok(()) };
        self.send(WatchUpdate::Events(events)).await?;
        self.store.identity.reached(last);
        self.next = last.next();
        Ok(())
    }

    async fn send(&self, update: WatchUpdate) -> Result<(), End> {
        self.updates.send(update).await.map_err(|_| End::Unwanted)
    }
}

#[cfg(test)]
mod tests {
    use etcd_client::proto::{PbEvent, PbKeyValue, PbResponseHeader, PbWatchResponse};
    use etcd_client::{Channel, Client};
    use tonic::transport::Endpoint;

    use super::*;
    use crate::etcd::{EtcdConfig, EtcdStore};

    fn response(revision: i64, events: Vec<PbEvent>) -> WatchResponse {
        let header = PbResponseHeader { revision, ..Default::default() };
        WatchResponse(PbWatchResponse { header: Some(header), events, ..Default::default() })
    }

    /// Some releases can send one before what it counts as sent.
    #[tokio::test]
    async fn a_notification_of_progress_skips_nothing() {
        // Given a watch that has come to revision 5
        let store = EtcdStore::connect(EtcdConfig::new(["127.0.0.1:1"])).unwrap().inner;
        let channel = Endpoint::from_static("http://127.0.0.1:1").connect_lazy();
        let client = Client::from_channel(Channel::Tonic(channel), None).await.unwrap();
        let link = store.connection.members.connected("http://127.0.0.1:1", client);
        let (updates, mut told) = tokio::sync::mpsc::channel(UPDATES_AHEAD);
        let scope = Scope::Prefix("/w/".into());
        let mut watch = Watch { store, scope, next: Revision(6), updates, allowed: true };

        // when etcd says that it is at 9, and then sends what happened at 7, then that is news
        assert!(watch.deliver(&link, response(9, Vec::new())).await.is_ok());
        assert!(told.try_recv().is_err() && watch.next == Revision(6));
        let kv = PbKeyValue { key: b"/w/a".to_vec(), mod_revision: 7, ..Default::default() };
        let put = PbEvent { kv: Some(kv), ..Default::default() };
        assert!(watch.deliver(&link, response(9, vec![put])).await.is_ok());
        let update = told.recv().await.unwrap();
        assert!(matches!(&update, WatchUpdate::Events(events) if events[0].revision() == Revision(7)), "{update:?}");
    }
}
