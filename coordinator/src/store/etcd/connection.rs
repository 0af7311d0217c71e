//! One connection at a time to one member, and what happens when it fails: deadlines, fail-over, new tokens.
//! Not for what is asked over it.
//!
//! Our own rotation stands in for the client's balancer, which spreads calls over members without saying which one
//! failed, and goes on using one that has frozen.

use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use etcd_client::{Channel, Client, ConnectOptions, Error};
use tokio::sync::watch;
use tokio::time::{Instant, timeout_at};
use tonic::transport::Endpoint;

use super::config::EtcdConfig;
use super::fault::{Fault, chain};
use crate::store::{Result, StoreError};

/// Between two HTTP/2 pings on a connection with open streams. etcd hangs up on clients that ping more often than
/// every 5 s (`--grpc-keepalive-min-time`), so there is some distance.
const PING_INTERVAL: Duration = Duration::from_secs(6);

/// How long a ping's answer may take before the connection counts as dead.
const PING_TIMEOUT: Duration = Duration::from_secs(3);

/// A connection to one member, shared by calls and streams until one of them finds it broken.
pub(super) struct Link {
    pub(super) client: Client,
    pub(super) uri: String,
    retired: watch::Sender<bool>,
}

impl Link {
    /// Returns when somebody found the connection broken. Streams end with it: on a frozen member they would not
    /// notice for themselves for as long as a ping takes.
    pub(super) async fn retired(&self) {
        // Cannot fail: the sender lives in self.
        let _ = self.retired.subscribe().wait_for(|retired| *retired).await;
    }
}

/// What may be done when it is not known whether a request was carried out.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Repeat {
    /// Sending it again is harmless.
    Safe,
    /// It must not be sent twice.
    Never,
}

pub(super) struct Connection {
    config: EtcdConfig,
    uris: Vec<String>,
    state: Mutex<State>,
    /// Held while connecting, so that callers who find no connection make one, not many.
    dialling: tokio::sync::Mutex<()>,
}

#[derive(Default)]
struct State {
    /// The endpoint in use, or to be tried next.
    current: usize,
    link: Option<Arc<Link>>,
}

impl Connection {
    pub(super) fn new(config: EtcdConfig) -> Result<Connection> {
        let uris = config.uris()?;
        let connection = Connection { config, uris, state: Mutex::default(), dialling: Default::default() };
        for uri in &connection.uris {
            connection.endpoint(uri)?;
        }
        Ok(connection)
    }

    /// All endpoints, for messages.
    pub(super) fn endpoints(&self) -> String {
        self.uris.join(",")
    }

    pub(super) fn uris(&self) -> &[String] {
        &self.uris
    }

    pub(super) fn call_timeout(&self) -> Duration {
        self.config.call_timeout
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn endpoint(&self, uri: &str) -> Result<Endpoint> {
        let invalid = |error: &dyn std::error::Error| StoreError::Invalid(format!("etcd at {uri}: {}", chain(error)));
        let endpoint = Endpoint::from_shared(uri.to_owned())
            .map_err(|error| invalid(&error))?
            .connect_timeout(self.config.connect_timeout)
            .http2_keep_alive_interval(PING_INTERVAL)
            .keep_alive_timeout(PING_TIMEOUT);
        match &self.config.tls {
            Some(tls) => endpoint.tls_config(tls.load()?).map_err(|error| invalid(&error)),
            None => Ok(endpoint),
        }
    }

    /// Runs a request against the current member, and against others as far as that is safe, within the call's deadline.
    pub(super) async fn call<T, F, Fut>(&self, repeat: Repeat, request: F) -> Result<T>
    where
        F: Fn(Arc<Link>) -> Fut,
        Fut: Future<Output = Result<T, Error>>,
    {
        let deadline = Instant::now() + self.config.call_timeout;
        // One try for each member; a lone one gets a second, since the first may only find that it restarted.
        let tries = self.uris.len().max(2) as u32;
        let mut fault = Fault::NotSent("no time left".into());
        for left in (1..=tries).rev() {
            let now = Instant::now();
            // A member that does not answer must leave time for the others. A write is sent to one alone.
            let alone = self.uris.len() == 1 || repeat == Repeat::Never;
            let until = if alone { deadline } else { now + (deadline - now) / left };
            fault = match self.attempt(until, &request).await {
                Ok(answer) => return Ok(answer),
                Err(fault) => fault,
            };
            let again = match &fault {
                Fault::NotSent(_) => true,
                Fault::Unsure(_) => repeat == Repeat::Safe,
                Fault::StaleToken(_) | Fault::Refused(_) => false,
            };
            if !again || Instant::now() >= deadline {
                break;
            }
        }
        Err(fault.into_error(repeat == Repeat::Never, &self.endpoints()))
    }

    /// One try at the current member.
    async fn attempt<T, F, Fut>(&self, until: Instant, request: &F) -> Result<T, Fault>
    where
        F: Fn(Arc<Link>) -> Fut,
        Fut: Future<Output = Result<T, Error>>,
    {
        let link = self.link(until).await?;
        let mut fault = match self.send(&link, until, request).await {
            Err(fault) => fault,
            answer => return answer,
        };
        if let Fault::StaleToken(_) = fault {
            // Nothing was done, so what is repeated here is not a write. etcd forgets simple tokens after five
            // minutes and at each restart.
            fault = match self.send(&link, until, &async |link: Arc<Link>| link.client.refresh_token().await).await {
                Err(fault) => fault,
                Ok(()) => match self.send(&link, until, request).await {
                    Err(fault) => fault,
                    answer => return answer,
                },
            };
        }
        if let Fault::NotSent(_) | Fault::Unsure(_) = fault {
            self.retire(&link);
        }
        Err(fault)
    }

    async fn send<T, F, Fut>(&self, link: &Arc<Link>, until: Instant, request: &F) -> Result<T, Fault>
    where
        F: Fn(Arc<Link>) -> Fut,
        Fut: Future<Output = Result<T, Error>>,
    {
        match timeout_at(until, request(link.clone())).await {
            Ok(Ok(answer)) => Ok(answer),
            Ok(Err(error)) => Err(Fault::of(&error, &link.uri)),
            Err(_) => Err(Fault::Unsure(format!("{} does not answer", link.uri))),
        }
    }

    /// The connection in use, made if there is none.
    pub(super) async fn link(&self, until: Instant) -> Result<Arc<Link>, Fault> {
        if let Some(link) = self.state().link.clone() {
            return Ok(link);
        }
        let out_of_time = |_| Fault::NotSent("connecting takes too long".into());
        let _dialling = timeout_at(until, self.dialling.lock()).await.map_err(out_of_time)?;
        let current = {
            let state = self.state();
            if let Some(link) = state.link.clone() {
                return Ok(link);
            }
            state.current
        };
        let uri = &self.uris[current];
        let until = until.min(Instant::now() + self.config.connect_timeout);
        let dialled = match timeout_at(until, self.dial(uri)).await {
            Ok(dialled) => dialled,
            Err(_) => Err(Fault::NotSent(format!("{uri} does not accept a connection"))),
        };
        let mut state = self.state();
        match dialled {
            Ok(client) => {
                tracing::debug!(endpoint = %uri, "connected to etcd");
                let link = Arc::new(Link { client, uri: uri.clone(), retired: watch::Sender::new(false) });
                state.link = Some(link.clone());
                Ok(link)
            }
            Err(fault) => {
                state.current = (current + 1) % self.uris.len();
                Err(fault)
            }
        }
    }

    /// Takes a broken connection out of use; the next call tries the next member.
    pub(super) fn retire(&self, link: &Arc<Link>) {
        let mut state = self.state();
        if state.link.as_ref().is_some_and(|current| Arc::ptr_eq(current, link)) {
            state.link = None;
            state.current = (state.current + 1) % self.uris.len();
        }
        drop(state);
        link.retired.send_replace(true);
    }

    /// Connects and authenticates. Nothing that a caller asked for is sent here, so every failure proves that.
    async fn dial(&self, uri: &str) -> Result<Client, Fault> {
        let endpoint = self.endpoint(uri).map_err(Fault::Refused)?;
        let channel = endpoint.connect().await.map_err(|error| Fault::NotSent(format!("{uri}: {}", chain(&error))))?;
        let channel = Channel::Tonic(channel);
        // A member that has lost its leader says so at once, and ends its watches, which would fall silent otherwise.
        let options = ConnectOptions::new().with_require_leader(true);
        let Some(user) = &self.config.user else {
            return Client::from_channel(channel, Some(options)).await.map_err(|error| not_sent(&error, uri));
        };
        let known = options.clone().with_user(&user.name, user.password.reveal());
        match Client::from_channel(channel.clone(), Some(known)).await {
            Err(Error::GRpcStatus(status)) if status.message().contains("authentication is not enabled") => {
                tracing::warn!(endpoint = %uri, "etcd has authentication switched off: the user given is not needed");
                Client::from_channel(channel, Some(options)).await
            }
            outcome => outcome,
        }
        .map_err(|error| not_sent(&error, uri))
    }
}

fn not_sent(error: &Error, uri: &str) -> Fault {
    match Fault::of(error, uri) {
        Fault::Unsure(cause) | Fault::StaleToken(cause) => Fault::NotSent(format!("{uri}: {cause}")),
        fault => fault,
    }
}
