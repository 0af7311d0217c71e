//! Carries letters to one of the other agents: over the store's own port, with the TLS that its clients have.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use elastic_proto::replication::Letter;
use elastic_proto::replication::letter::Body;
use elastic_proto::replication::replication_client::ReplicationClient;
use tokio::sync::Semaphore;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status};

use crate::etcd::EtcdConfig;
use crate::etcd::fault::cause_of;
use crate::tls::MutualTls;

/// Letters under way to one agent; more are lost.
const UNDER_WAY: usize = 32;

/// How long a letter may take, and one with a whole state.
const LETTER: Duration = Duration::from_secs(1);
const STATE: Duration = Duration::from_secs(30);

/// Between two signs of life on a connection.
const PING: Duration = Duration::from_secs(1);

/// A way on which no letter arrives for this long is worth a warning.
const CUT: Duration = Duration::from_secs(5);

/// The way to one of the others.
pub(super) struct Post {
    endpoint: String,
    client: ReplicationClient<Channel>,
    places: Arc<Semaphore>,
    state: Arc<Mutex<State>>,
}

/// What is known of a way.
#[derive(Default)]
struct State {
    /// It has said that it was given other endpoints.
    refused: bool,
    /// Since when no letter has arrived, and whether that was said.
    cut: Option<(Instant, bool)>,
    /// It knows that this process leaves, or has ended itself.
    knows: bool,
}

impl State {
    /// What to warn of after a letter arrived or did not.
    fn note(&mut self, sent: Result<(), &Status>, now: Instant) -> Option<String> {
        let status = match sent {
            Ok(()) => {
                self.cut = None;
                return None;
            }
            Err(status) => status,
        };
        if status.code() == Code::FailedPrecondition {
            let refused = std::mem::replace(&mut self.refused, true);
            return (!refused).then(|| format!("keeps no store with this one: {}", status.message()));
        }
        let (since, said) = self.cut.get_or_insert((now, false));
        let is_long = now.duration_since(*since) >= CUT && !*said;
        *said |= is_long;
        is_long.then(|| format!("is not reached: {}", cause_of(status)))
    }
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
        let (places, state) = (Arc::new(Semaphore::new(UNDER_WAY)), Arc::default());
        Ok(Post { endpoint: endpoint.to_owned(), client, places, state })
    }

    /// Whether the other knows that this process leaves, or has ended itself.
    pub(super) fn knows_of_leave(&self) -> bool {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).knows
    }

    /// Sends a letter, or loses it.
    pub(super) fn send(&self, letter: Letter) {
        let Ok(place) = Arc::clone(&self.places).try_acquire_owned() else { return };
        let limit = if matches!(letter.body, Some(Body::Snapshot(_))) { STATE } else { LETTER };
        let leaves = letter.leaves;
        let (mut client, endpoint, state) = (self.client.clone(), self.endpoint.clone(), Arc::clone(&self.state));
        tokio::spawn(async move {
            let sent = tokio::time::timeout(limit, client.deliver(letter)).await;
            drop(place);
            let late = || Status::deadline_exceeded("it does not answer");
            let sent = sent.unwrap_or_else(|_| Err(late())).map(drop);
            let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
            state.knows |= leaves && sent.as_ref().map_or_else(is_refused, |()| true);
            if let Some(warning) = state.note(sent.as_ref().map(|_| ()), Instant::now()) {
                tracing::warn!("the store's process at {endpoint} {warning}");
            }
        });
    }
}

/// Whether nothing listens there any more.
fn is_refused(status: &Status) -> bool {
    let mut source = std::error::Error::source(status);
    while let Some(error) = source {
        if error.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::ConnectionRefused) {
            return true;
        }
        source = error.source();
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_last_word_counts_once_it_was_taken_or_no_one_is_left_to_take_it() -> anyhow::Result<()> {
        let listener = std::net::TcpListener::bind("127.0.0.1:0")?;
        let post = Post::to(&listener.local_addr()?.to_string(), None).map_err(anyhow::Error::msg)?;
        let last_word = || Letter { leaves: true, ..Letter::default() };
        // It connects, and is not heard
        post.send(last_word());
        while post.places.available_permits() < UNDER_WAY {
            tokio::time::sleep(LETTER / 20).await;
        }
        assert!(!post.knows_of_leave());
        drop(listener);
        let known = async {
            while !post.knows_of_leave() {
                post.send(last_word());
                tokio::time::sleep(LETTER / 20).await;
            }
        };
        tokio::time::timeout(30 * LETTER, known).await?;
        Ok(())
    }

    #[test]
    fn a_way_that_is_cut_brings_one_warning() {
        let (mut state, begun) = (State::default(), Instant::now());
        let failed = Status::unavailable("no certificate");
        let mut note = |sent: Result<(), &Status>, seconds| state.note(sent, begun + Duration::from_secs(seconds));
        assert_eq!(note(Err(&failed), 0), None);
        assert_eq!(note(Ok(()), 4), None);
        assert_eq!(note(Err(&failed), 6), None);
        assert_eq!(note(Err(&failed), 12).unwrap(), "is not reached: no certificate");
        assert_eq!(note(Err(&failed), 20), None);
        let other = Status::failed_precondition("it is another's");
        assert!(note(Err(&other), 21).unwrap().contains("it is another's"));
        assert_eq!(note(Err(&other), 22), None);
    }
}
