//! The store on an etcd cluster, API v3. It is no general client: it does only what [`Store`] asks for.
//!
//! | module | what it is |
//! |---|---|
//! | `config` | endpoints, TLS, credentials, deadlines |
//! | `rotation` | which member is in use, and when a call is sent again |
//! | `connection` | one connection at a time; deadlines, new tokens |
//! | `fault` | what a failure proves about what happened |
//! | `identity` | whether this is still the store that we knew |
//! | `convert` | between our transactions and etcd's |
//! | `watch` | a watch that outlives its connections |
//! | `lease` | one keep-alive stream for each lease |
//! | `probe` | what is wrong with an endpoint |
//! | `examine` | what a member says of itself, for operators |
//! | `refusal` | whom etcd refuses, and what for |
//! | `releases` | which releases of etcd have faults |
//! | `tls` | the files as rustls takes them, for what is no gRPC |
//!
//! What is repeated: a call that only reads, once at each other member; a write only where it certainly was not sent.
//! Everything else is for the caller, who can read back what happened.

mod config;
mod connection;
mod convert;
mod examine;
pub mod fault;
mod identity;
mod lease;
mod probe;
mod refusal;
mod releases;
pub mod rotation;
pub mod tls;
mod watch;

pub use config::{EtcdConfig, EtcdTls, EtcdUser, Secret};
pub use examine::{Alarm, MemberStatus};
pub use releases::{FAULTS, ReleaseFault, faults_of, lowest_fit};

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use etcd_client::ResponseHeader;
use futures::future::join_all;
use tokio::sync::mpsc;

use self::connection::MemberConnection;
use self::fault::Repeat;
use self::identity::Identity;
use self::lease::{KeepAlives, whole_seconds};
use self::refusal::Rights;
use self::watch::{UPDATES_AHEAD, Watch};
use super::{LeaseId, Op, Result, Revision, Scope, Store, StoreError, Txn, TxnResult, Watcher};

/// The largest answer that a read may have.
const MAX_ANSWER: usize = 256 * 1024 * 1024;

/// A [`Store`] on etcd. Cheap to clone; clones share the connection.
#[derive(Clone)]
pub struct EtcdStore {
    inner: Arc<Inner>,
}

struct Inner {
    connection: MemberConnection,
    identity: Identity,
    keep_alives: KeepAlives,
}

/// The etcd that answered a probe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Probe {
    /// The endpoint that answered.
    pub endpoint: String,
    /// The etcd version it runs; [`UNTOLD`], where it does not tell us.
    pub version: String,
}

/// Told where the version is not: some releases tell theirs to root alone.
pub const UNTOLD: &str = "of a version that it tells to its root user alone";

impl EtcdStore {
    /// Takes the configuration. No connection is made yet: etcd need not be up.
    pub fn connect(config: EtcdConfig) -> Result<EtcdStore> {
        let connection = MemberConnection::new(config)?;
        let (identity, keep_alives) = Default::default();
        Ok(EtcdStore { inner: Arc::new(Inner { connection, identity, keep_alives }) })
    }

    /// Asks whether the cluster is there, ready (it has a quorum) and lets us in, and if not, what is wrong: which
    /// takes up to a second more than a call.
    ///
    /// # Errors
    /// - [`StoreError::Unavailable`]: nothing listens, or there is no quorum. Worth another try.
    /// - [`StoreError::Tls`]: one side speaks TLS and the other does not, or a certificate is not trusted.
    /// - [`StoreError::Denied`]: wrong or missing credentials.
    /// - [`StoreError::NotV3`]: what answers is not etcd, or is too old.
    pub async fn probe(&self) -> Result<Probe> {
        match self.inner.probe().await {
            Ok(probe) => Ok(probe),
            Err(failure) => {
                let uris = self.inner.connection.members.uris();
                let told = join_all(uris.iter().map(|uri| probe::explain(uri, failure.clone()))).await;
                // Of several endpoints' troubles, one that will not pass by itself tells most.
                Err(told.into_iter().find(|error| !error.is_transient()).unwrap_or(failure))
            }
        }
    }
}

impl Inner {
    fn met(&self, header: Option<&ResponseHeader>) -> Result<()> {
        header.map_or(Ok(()), |header| self.identity.met(header.cluster_id(), &self.connection.members.endpoints()))
    }

    fn not_v3(&self, cause: &str) -> StoreError {
        StoreError::NotV3 { endpoints: self.connection.members.endpoints(), cause: cause.into() }
    }

    async fn probe(&self) -> Result<Probe> {
        let ask = async |link: Arc<connection::Link>| {
            let status = link.client.maintenance_client().status().await?;
            Ok((link.uri.clone(), status))
        };
        let (endpoint, version) = match self.connection.call(Repeat::Safe, ask).await {
            Ok((endpoint, status)) => {
                self.met(status.header())?;
                (endpoint, status.version().to_owned())
            }
            // So do 3.5.28 to 3.5.31, and 3.6.9 to 3.6.11. Whether we are let in is seen below.
            Err(StoreError::Denied { endpoints, cause }) if cause.contains("permission denied") => {
                (endpoints, UNTOLD.to_owned())
            }
            Err(error) => return Err(error),
        };
        // A member answers for itself even without a quorum; a linearizable read needs one. Whether we may read this
        // very key does not matter.
        match self.transact(Txn::of([Op::get("elastic")])).await {
            Err(StoreError::Denied { cause, .. }) if cause.contains("permission denied") => {}
            outcome => drop(outcome?),
        }
        Ok(Probe { endpoint, version })
    }

    async fn transact(&self, txn: Txn) -> Result<TxnResult> {
        let repeat = if txn.is_write() { Repeat::Never } else { Repeat::Safe };
        let request = convert::request(&txn);
        let mut stale_before = false;
        loop {
            let floor = self.identity.floor()?;
            let response = self
                .connection
                .call(repeat, async |link| {
                    let mut client = link.client.kv_client().max_decoding_message_size(MAX_ANSWER);
                    client.txn(request.clone()).await
                })
                .await
                .map_err(|error| refusal::told(error, &self.connection.who(), &Rights::of_txn(&txn)))?;
            self.met(response.header())?;
            let result = convert::result(&txn, response).ok_or_else(|| self.not_v3("its answer does not fit"))?;
            if result.revision >= floor {
                self.identity.reached(result.revision);
                return Ok(result);
            }
            // The answer to a write is exact. A read can be stale once after a pause of the server (etcd before 3.5.28
            // and 3.6.9), so it is asked again before the worst is believed.
            if txn.is_write() || stale_before {
                return Err(self.identity.went_back(floor, result.revision, &self.connection.members.endpoints()));
            }
            stale_before = true;
        }
    }
}

#[async_trait]
impl Store for EtcdStore {
    async fn txn(&self, txn: Txn) -> Result<TxnResult> {
        self.inner.transact(txn).await
    }

    async fn watch(&self, scope: Scope, from: Revision) -> Result<Watcher> {
        if from <= Revision::NONE {
            return Err(StoreError::Invalid("a watch begins at a revision above zero".into()));
        }
        self.inner.identity.floor()?;
        let (updates, watcher) = mpsc::channel(UPDATES_AHEAD);
        tokio::spawn(Watch { store: self.inner.clone(), scope, next: from, updates, allowed: false }.run());
        Ok(watcher)
    }

    async fn grant(&self, ttl: Duration) -> Result<LeaseId> {
        let seconds = whole_seconds(ttl)?;
        let inner = &self.inner;
        inner.identity.floor()?;
        let ask = async |link: Arc<connection::Link>| {
            let granted = link.client.lease_client().grant(seconds, None).await?;
            Ok((link, granted))
        };
        let (link, granted) = inner.connection.call(Repeat::Never, ask).await?;
        inner.met(granted.header())?;
        let lease = LeaseId(granted.id());
        inner.keep_alives.granted(lease, link, granted.ttl());
        Ok(lease)
    }

    async fn keep_alive(&self, lease: LeaseId) -> Result<Option<Duration>> {
        let inner = &self.inner;
        inner.identity.floor()?;
        let connection = &inner.connection;
        // A new stream needs some of the call's time too.
        let patience = connection.limit() * 2 / 3;
        let renewal = connection
            .call(Repeat::Safe, async |link| inner.keep_alives.renew(link, lease, &inner.identity, patience).await)
            .await
            .map_err(|error| refusal::told(error, &connection.who(), &Rights::of_lease()))?;
        if let Ok(None) = renewal {
            inner.keep_alives.forget(lease);
        }
        renewal
    }

    async fn revoke(&self, lease: LeaseId) -> Result<()> {
        let inner = &self.inner;
        inner.identity.floor()?;
        inner.keep_alives.forget(lease);
        let revoked =
            inner.connection.call(Repeat::Never, async |link| link.client.lease_client().revoke(lease.0).await).await;
        match revoked {
            Ok(revoked) => inner.met(revoked.header()),
            Err(StoreError::LeaseGone) => Ok(()),
            Err(error) => Err(error),
        }
    }
}
