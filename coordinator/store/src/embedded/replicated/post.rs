//! Carries letters to one of the other agents: over the store's own port, with the TLS that its clients have.

use std::sync::Arc;
use std::time::Duration;

use elastic_proto::replication::Letter;
use elastic_proto::replication::letter::Body;
use elastic_proto::replication::replication_client::ReplicationClient;
use tokio::sync::Semaphore;
use tonic::Code;
use tonic::transport::{Channel, Endpoint};

use crate::etcd::EtcdConfig;
use crate::tls::MutualTls;

/// Letters under way to one agent; more are lost.
const UNDER_WAY: usize = 32;

/// How long a letter may take, and one with a whole state.
const LETTER: Duration = Duration::from_secs(1);
const STATE: Duration = Duration::from_secs(30);

/// Between two signs of life on a connection.
const PING: Duration = Duration::from_secs(1);

/// The way to one of the others.
pub(super) struct Post {
    endpoint: String,
    client: ReplicationClient<Channel>,
    places: Arc<Semaphore>,
    /// It has said that it was given other endpoints.
    refused: Arc<std::sync::atomic::AtomicBool>,
}

impl Post {
    /// Connects with the first letter.
    pub(super) fn to(endpoint: &str, tls: Option<&MutualTls>) -> Result<Post, String> {
        let uri = EtcdConfig::new([endpoint]).uris().map_err(|error| error.to_string())?.remove(0);
        let way = Endpoint::from_shared(uri).map_err(|error| format!("{endpoint}: {error}"))?;
        let way = way.connect_timeout(LETTER).http2_keep_alive_interval(PING).keep_alive_timeout(PING);
        let way = way.keep_alive_while_idle(true).tcp_nodelay(true);
        let channel = match tls {
            Some(tls) => way.connect_with_connector_lazy(tls.connector()),
            None => way.connect_lazy(),
        };
        let client = ReplicationClient::new(channel).max_encoding_message_size(usize::MAX);
        let (places, refused) = (Arc::new(Semaphore::new(UNDER_WAY)), Arc::default());
        Ok(Post { endpoint: endpoint.to_owned(), client, places, refused })
    }

    /// Sends a letter, or loses it.
    pub(super) fn send(&self, letter: Letter) {
        let Ok(place) = Arc::clone(&self.places).try_acquire_owned() else { return };
        let limit = if matches!(letter.body, Some(Body::Snapshot(_))) { STATE } else { LETTER };
        let (mut client, endpoint, refused) = (self.client.clone(), self.endpoint.clone(), Arc::clone(&self.refused));
        tokio::spawn(async move {
            let sent = tokio::time::timeout(limit, client.deliver(letter)).await;
            drop(place);
            if let Ok(Err(status)) = sent
                && status.code() == Code::FailedPrecondition
                && !refused.swap(true, std::sync::atomic::Ordering::Relaxed)
            {
                tracing::warn!(
                    "the agent at {endpoint} keeps no store with this one: {}; give all nodes one --rdzv-endpoint",
                    status.message()
                );
            }
        });
    }
}
