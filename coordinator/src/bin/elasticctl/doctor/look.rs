//! Asks each endpoint by itself: its name, its port, who answers, how fast. What it means is judged in `etcd`.
//!
//! All endpoints are asked at once. Whatever does not answer is given up after seconds, so that one look takes less than
//! half a minute however broken things are.

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use elastic_coordinator::flags::{PeerFlags, StoreFlags};
use elastic_store::etcd::{Alarm, EtcdConfig, EtcdStore, EtcdTls, MemberStatus, tls};
use elastic_store::{Op, Store, StoreError};
use elastic_torchelastic::etcd_v2::EtcdV2;
use futures::future::join_all;
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::certificates::{Shown, Whose};
use super::greet::{self, Greeting};

/// The longest that a name may take to resolve, and a port to accept.
const REACH: Duration = Duration::from_secs(3);

/// How many requests a median is of, and how long they may take together.
const SAMPLES: usize = 9;
const SAMPLING: Duration = Duration::from_secs(2);

/// The lease of what is written, so that nothing stays if we are interrupted.
const LEASE: Duration = Duration::from_secs(30);

#[derive(Debug, Default)]
pub(super) struct Cluster {
    pub(super) endpoints: Vec<Endpoint>,
    /// The certificates in the files that the flags name.
    pub(super) files: Vec<Shown>,
    /// We are one of its users.
    pub(super) users: bool,
}

/// What one showed. What comes after something that failed was not asked: it is `None`.
#[derive(Debug)]
pub(super) struct Endpoint {
    /// `host:port`.
    pub(super) address: String,
    pub(super) resolved: Result<Vec<SocketAddr>, String>,
    pub(super) accepted: Option<Result<Duration, String>>,
    pub(super) greeting: Option<Greeting>,
    /// Whether an etcd answers there that has a quorum and lets us in.
    pub(super) answers: Option<Result<(), StoreError>>,
    pub(super) status: Option<Result<MemberStatus, StoreError>>,
    /// The client URLs of each member of its cluster.
    pub(super) members: Option<Result<Vec<Vec<String>>, StoreError>>,
    pub(super) alarms: Option<Result<Vec<(u64, Alarm)>, StoreError>>,
    /// The median of linearizable reads.
    pub(super) read: Option<Result<Duration, StoreError>>,
    /// The median of writes, each of them followed by a delete.
    pub(super) write: Option<Result<Duration, StoreError>>,
    /// What the v2 API holds.
    pub(super) v2: Option<Result<Vec<String>, StoreError>>,
}

impl Endpoint {
    pub(super) fn unseen(address: &str) -> Endpoint {
        Endpoint {
            address: address.to_owned(),
            resolved: Ok(Vec::new()),
            accepted: None,
            greeting: None,
            answers: None,
            status: None,
            members: None,
            alarms: None,
            read: None,
            write: None,
            v2: None,
        }
    }
}

pub(super) async fn look(flags: &StoreFlags, peers: &PeerFlags) -> Result<Cluster, StoreError> {
    let config = flags.config()?;
    let uris = EtcdStore::connect(config.clone())?.endpoints().to_vec();
    let endpoints = uris.iter().map(|uri| {
        let mut alone = config.clone();
        alone.endpoints = vec![uri.clone()];
        look_at(uri, alone, &flags.prefix)
    });
    let endpoints = join_all(endpoints).await.into_iter().collect::<Result<_, _>>()?;
    let mut files = config.tls.as_ref().map(files).transpose()?.unwrap_or_default();
    if let Some(peers) = peers.files() {
        files.push(shown(Whose::Peers, &peers.certificate)?);
        files.push(shown(Whose::PeersAuthority, &peers.authority)?);
    }
    Ok(Cluster { endpoints, files, users: config.user.is_some() })
}

fn files(tls: &EtcdTls) -> Result<Vec<Shown>, StoreError> {
    let client = tls.client.iter().map(|(certificate, _)| (Whose::Ours, certificate));
    client.chain([(Whose::Cas, &tls.ca)]).map(|(whose, file)| shown(whose, file)).collect()
}

fn shown(whose: Whose, file: &Path) -> Result<Shown, StoreError> {
    Ok(Shown { whose, of: file.display().to_string(), certificates: tls::certificates(file)? })
}

async fn look_at(uri: &str, config: EtcdConfig, prefix: &str) -> Result<Endpoint, StoreError> {
    let address = uri.split_once("://").map_or(uri, |(_, address)| address);
    let mut seen = Endpoint::unseen(address);
    seen.resolved = resolve(address).await;
    let Ok(addresses) = &seen.resolved else { return Ok(seen) };
    let accepted = seen.accepted.insert(accept(addresses).await);
    if accepted.is_err() {
        return Ok(seen);
    }
    let store = EtcdStore::connect(config.clone())?;
    let (greeting, answers) = tokio::join!(greet::etcd(addresses, address, config.tls.as_ref()), store.probe());
    seen.greeting = Some(greeting?);
    let answers = seen.answers.insert(answers.map(drop));
    // Who refuses us may still say how it is.
    if !matches!(answers, Ok(()) | Err(StoreError::Denied { .. })) {
        return Ok(seen);
    }
    let let_in = answers.is_ok();
    seen.status = Some(store.status().await);
    if let_in {
        seen.members = Some(store.members().await);
        seen.alarms = Some(store.alarms().await);
        seen.read = Some(reads(&store, prefix).await);
        seen.write = Some(writes(&store, prefix).await);
        seen.v2 = Some(EtcdV2::connect(config)?.probe().await.map(|found| found.keys));
    }
    Ok(seen)
}

/// What this gives, if it takes no longer than [`REACH`].
pub(super) async fn within<T, E: ToString>(work: impl Future<Output = Result<T, E>>) -> Result<T, String> {
    match timeout(REACH, work).await {
        Ok(done) => done.map_err(|error| error.to_string()),
        Err(_) => Err(format!("no answer within {} s", REACH.as_secs())),
    }
}

pub(super) async fn resolve(address: &str) -> Result<Vec<SocketAddr>, String> {
    Ok(within(tokio::net::lookup_host(address)).await?.collect())
}

/// How long it took until one of these accepted a connection.
async fn accept(addresses: &[SocketAddr]) -> Result<Duration, String> {
    let begun = elastic_store::clock::now();
    within(TcpStream::connect(addresses)).await?;
    Ok(elastic_store::clock::now().since(begun))
}

/// A key that no one else uses, outside all jobs.
fn scratch(prefix: &str) -> String {
    format!("{}/v1/doctor/{}", prefix.trim_end_matches('/'), uuid::Uuid::new_v4())
}

async fn reads(store: &EtcdStore, prefix: &str) -> Result<Duration, StoreError> {
    let key = scratch(prefix);
    median(async || {
        let begun = elastic_store::clock::now();
        store.get(&key).await?;
        Ok(elastic_store::clock::now().since(begun))
    })
    .await
}

async fn writes(store: &EtcdStore, prefix: &str) -> Result<Duration, StoreError> {
    let key = scratch(prefix);
    let lease = store.grant(LEASE).await?;
    let written = median(async || {
        let begun = elastic_store::clock::now();
        store.put(Vec::new(), Op::put_leased(&key, "elasticctl doctor", lease)).await?;
        let took = elastic_store::clock::now().since(begun);
        store.put(Vec::new(), Op::delete(&key)).await?;
        Ok(took)
    })
    .await;
    // It takes along what a failed delete left; if it fails too, the lease lapses by itself.
    let _ = store.revoke(lease).await;
    written
}

async fn median(sample: impl AsyncFn() -> Result<Duration, StoreError>) -> Result<Duration, StoreError> {
    let begun = elastic_store::clock::now();
    let mut took = vec![sample().await?];
    while took.len() < SAMPLES && elastic_store::clock::now().since(begun) < SAMPLING {
        took.push(sample().await?);
    }
    took.sort();
    Ok(took[took.len() / 2])
}
