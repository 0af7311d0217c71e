//! Connecting to one member, and a call over that connection: deadlines, new tokens. Which member is used, and when a
//! call is sent again, is in `rotation`.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use etcd_client::{Channel, Client, ConnectOptions, Error};
use tokio::time::{Instant, timeout_at};
use tonic::transport::Endpoint;

use super::config::EtcdConfig;
use super::fault::{Fault, Repeat, chain};
use super::rotation::{self, Rotation};
use crate::{Result, StoreError};

/// Between two HTTP/2 pings on a connection with open streams. etcd hangs up on clients that ping more often than
/// every 5 s (`--grpc-keepalive-min-time`), so there is some distance.
const PING_INTERVAL: Duration = Duration::from_secs(6);

/// How long a ping's answer may take before the connection counts as dead. An etcd that thousands ask at once answers
/// pings late too, and all its connections would end together. At first, calls notice sooner that one is of no use.
const PING_TIMEOUT: Duration = Duration::from_secs(10);

/// How many new tokens a call or a watch takes before it believes that etcd refuses us. Each costs etcd a tenth of a
/// second of one core.
pub(super) const NEW_TOKENS: u32 = 3;

/// The longest pause before a further new token: about what a login takes.
const LONGEST_PAUSE_MS: u64 = 200;

pub(super) type Link = rotation::Link<Client>;

pub(super) struct MemberConnection {
    pub(super) config: EtcdConfig,
    pub(super) members: Rotation<Client>,
    /// Held while connecting, so that callers who find no connection make one, not many.
    dialling: tokio::sync::Mutex<()>,
}

impl MemberConnection {
    pub(super) fn new(config: EtcdConfig) -> Result<MemberConnection> {
        let members = Rotation::new(config.uris()?, config.seed);
        let connection = MemberConnection { config, members, dialling: Default::default() };
        for uri in connection.members.uris() {
            connection.endpoint(uri)?;
        }
        Ok(connection)
    }

    /// Who we are to etcd, for people.
    pub(super) fn who(&self) -> String {
        self.config.who()
    }

    fn endpoint(&self, uri: &str) -> Result<Endpoint> {
        let invalid = |error: &dyn std::error::Error| StoreError::Invalid(format!("etcd at {uri}: {}", chain(error)));
        let endpoint = Endpoint::from_shared(uri.to_owned())
            .map_err(|error| invalid(&error))?
            .connect_timeout(self.config.connect_timeout)
            .http2_keep_alive_interval(PING_INTERVAL)
            .keep_alive_timeout(PING_TIMEOUT);
        match &self.config.tls {
            // The transport does not say which file it is that cannot be used.
            Some(tls) => endpoint
                .tls_config(tls.load()?)
                .map_err(|error| tls.client_config().err().unwrap_or_else(|| invalid(&error))),
            None => Ok(endpoint),
        }
    }

    /// What a call may take now.
    pub(super) fn limit(&self) -> Duration {
        self.members.limit(self.config.call_timeout)
    }

    /// Runs a request against the current member, and against others as far as that is safe, within the call's deadline.
    pub(super) async fn call<T, F, Fut>(&self, repeat: Repeat, request: F) -> Result<T>
    where
        F: Fn(Arc<Link>) -> Fut,
        Fut: Future<Output = Result<T, Error>>,
    {
        self.members.call(repeat, self.config.call_timeout, |until| self.attempt(until, &request)).await
    }

    async fn attempt<T, F, Fut>(&self, until: Instant, request: &F) -> Result<T, Fault>
    where
        F: Fn(Arc<Link>) -> Fut,
        Fut: Future<Output = Result<T, Error>>,
    {
        let link = self.link(until).await?;
        let sent = Instant::now();
        let mut fault = match self.send(&link, until, request).await {
            Err(fault) => fault,
            answer => return answer,
        };
        // Nothing was done, so what is repeated here is not a write. etcd forgets simple tokens after five minutes and at
        // each restart. Others are out of date with each change of users and roles: while an administrator makes some, a
        // new token can be at once.
        for renewal in 0..NEW_TOKENS {
            if self.config.user.is_none() || !matches!(fault, Fault::StaleToken(_)) {
                break;
            }
            if renewal > 0 {
                // The administrator's program logs in for each change, which takes it as long as us: the one would end
                // with the other again and again.
                tokio::time::sleep(Duration::from_millis(rand::random_range(0..=LONGEST_PAUSE_MS))).await;
            }
            fault = match self.renew_token(&link, until).await {
                Err(fault) => fault,
                Ok(()) => match self.send(&link, until, request).await {
                    Err(fault) => fault,
                    answer => return answer,
                },
            };
        }
        Err(self.members.judge(&link, sent, fault))
    }

    async fn send<T, F, Fut>(&self, link: &Arc<Link>, until: Instant, request: &F) -> Result<T, Fault>
    where
        F: Fn(Arc<Link>) -> Fut,
        Fut: Future<Output = Result<T, Error>>,
    {
        let fault = match timeout_at(until, request(link.clone())).await {
            Ok(Ok(answer)) => {
                link.hear();
                return Ok(answer);
            }
            Ok(Err(error)) => Fault::of(&error, &link.uri),
            Err(_) => return Err(Fault::Late(format!("{} does not answer", link.uri))),
        };
        if !matches!(fault, Fault::Unsure(_)) {
            link.hear();
        }
        Err(fault)
    }

    /// The connection in use, made if there is none.
    pub(super) async fn link(&self, until: Instant) -> Result<Arc<Link>, Fault> {
        if let Some(link) = self.members.link() {
            return Ok(link);
        }
        let out_of_time = |_| Fault::NotSent("connecting takes too long".into());
        let _dialling = timeout_at(until, self.dialling.lock()).await.map_err(out_of_time)?;
        if let Some(link) = self.members.link() {
            return Ok(link);
        }
        let uri = self.members.uri();
        let until = until.min(Instant::now() + self.config.connect_timeout);
        let dialled = match timeout_at(until, self.dial(uri)).await {
            Ok(dialled) => dialled,
            Err(_) => Err(Fault::NotSent(format!("{uri} does not accept a connection"))),
        };
        match dialled {
            Ok(client) => {
                tracing::debug!(endpoint = %uri, "connected to etcd");
                Ok(self.members.connected(uri, client))
            }
            Err(fault) => {
                self.members.pass();
                Err(fault)
            }
        }
    }

    /// Has etcd give us a new token, over the same connection: the watches on it do not notice. The password is read
    /// again, since a changed one is what ends tokens early.
    pub(super) async fn renew_token(&self, link: &Arc<Link>, until: Instant) -> Result<(), Fault> {
        let Some(user) = &self.config.user else { return Ok(()) };
        let credentials = (user.name.clone(), user.password.reveal());
        let log_in = async |link: Arc<Link>| link.client.clone().update_user(Some(credentials.clone())).await;
        self.send(link, until, &log_in).await
    }

    /// Connects and authenticates. Nothing that a caller asked for is sent here, so every failure proves that.
    async fn dial(&self, uri: &str) -> Result<Client, Fault> {
        // The files could be used when we began: somebody is just writing them again.
        let endpoint = self.endpoint(uri).map_err(|error| Fault::NotSent(error.to_string()))?;
        let connected = match &self.config.peers {
            Some(peers) => endpoint.connect_with_connector(peers.connector()).await,
            None => endpoint.connect().await,
        };
        let channel = connected.map_err(|error| Fault::NotSent(format!("{uri}: {}", chain(&error))))?;
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
        Fault::Unsure(cause) | Fault::Late(cause) | Fault::StaleToken(cause) | Fault::Later { cause, .. } => {
            Fault::NotSent(format!("{uri}: {cause}"))
        }
        fault => fault,
    }
}
