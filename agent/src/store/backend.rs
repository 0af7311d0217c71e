//! The store a job meets through: etcd, a store that one of the agents serves, or a store inside this process alone.

use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use elastic_flags::written;
use elastic_rendezvous::job::{Endpoint, Timings};
use elastic_rendezvous::time::Time;
use elastic_store::embedded::MemoryStore;
use elastic_store::embedded::mvcc::Limits;
use elastic_store::embedded::{EmbeddedError, EmbeddedServer, Group, Options, Replicas, names_loopback};
use elastic_store::etcd::{EtcdConfig, EtcdStore, EtcdTls, EtcdUser, Secret};
use elastic_store::metered::{CallObserver, Metered};
use elastic_store::tls::MutualTls;
use elastic_store::{Store, StoreError};
use elastic_torchelastic::etcd_v2::EtcdV2;
use elastic_torchelastic::met_on_v2;
use futures::future::join_all;
use tokio::net::TcpStream;

use crate::machine::address::NetworkOptions;
use crate::machine::interfaces::{self, Interface};
use crate::store::choice::{Credentials, StoreChoice, StoreOptions, Tls};
use crate::store::participation::{JobPaths, JobStore};
use crate::store::seat;

/// Where Debian and related distributions keep the system certificates, for TLS without a CA of one's own.
const SYSTEM_CAS: [&str; 2] = ["/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt"];

/// Pause between two attempts to reach a store that does not answer yet.
pub(super) const AGAIN: Duration = Duration::from_millis(300);

/// How often the log mentions a wait for the store, after the first time.
const SELDOM: Duration = Duration::from_secs(30);

#[derive(Debug, thiserror::Error)]
pub(crate) enum BackendError {
    #[error(
        "{last}; gave up after join_timeout ({}): {advice}",
        written(*.within)
    )]
    NeverAnswered { last: Box<BackendError>, within: Duration, advice: String },
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Serve(#[from] EmbeddedError),
    #[error(
        "{what} offers etcd's v2 API and not v3: start all nodes of the job with --rdzv-conf api=v2 \
         (or --rdzv-backend=etcd-v2), which torchrun's --rdzv-backend=etcd speaks too"
    )]
    OnlyV2 { what: String },
    #[error("{0}")]
    Elsewhere(String),
    #[error("--rdzv-endpoint (or --master-addr): the name {host} cannot be resolved: {cause}")]
    Resolve { host: String, cause: String },
}

impl BackendError {
    /// Whether the same attempt may succeed a little later.
    fn is_transient(&self) -> bool {
        match self {
            BackendError::Store(error) => error.is_transient(),
            // For example, a pod's own name can be resolved only a moment after its agent starts.
            BackendError::Resolve { .. } => true,
            _ => false,
        }
    }
}

/// A store, and whether this process serves it.
pub(crate) struct Backend {
    /// The store, and the protocol by which nodes meet on it.
    pub rendezvous: JobStore,
    /// Whether other nodes depend on this process. Then it leaves last.
    pub serves: bool,
    /// Where agents serve the store from their memory, if another agent does: it is gone with most of them.
    pub hosts: Vec<Endpoint>,
    pub name: String,
    /// Those that hold the store together, if this process is one of them.
    pub group: Option<Arc<Group>>,
}

impl Backend {
    fn of(rendezvous: JobStore, name: String) -> Backend {
        Backend { rendezvous, serves: false, hosts: Vec::new(), name, group: None }
    }

    /// The store, if the nodes meet by our own protocol.
    pub(crate) fn store(&self) -> Option<&Arc<dyn Store>> {
        self.rendezvous.store()
    }

    /// From now on `observer` hears of each request to the store.
    pub(crate) fn observed_by(&mut self, observer: CallObserver) {
        if let JobStore::Store(store) = &mut self.rendezvous {
            *store = Arc::new(Metered::new(Arc::clone(store), observer));
        }
    }

    /// Waits until the agents that serve the store are certainly gone. That is so once most of their ports have refused
    /// for the time of a lease while no connection that was open before answers. This checks as often as a lease is
    /// renewed, by the job's `timings`. What they held in memory is lost with them. A service in front of the agent also
    /// refuses while its pod is not ready, but then open connections stay up. Never returns if another kind of store is
    /// used.
    pub(crate) async fn host_gone(&self, timings: impl Fn() -> Timings) {
        let Some(store) = self.store().filter(|_| !self.hosts.is_empty()) else { return std::future::pending().await };
        let mut gone_since: Option<Time> = None;
        loop {
            let timings = timings();
            let every = timings.renewal();
            tokio::time::sleep(every).await;
            let refuse = join_all(self.hosts.iter().map(|host| refuses(host, every))).await;
            let most = refuse.into_iter().filter(|&refuses| refuses).count() > self.hosts.len() / 2;
            // Any key will do: "no such key" is also an answer.
            let gone = most && !matches!(tokio::time::timeout(every, store.get("/")).await, Ok(Ok(_)));
            let now = elastic_store::clock::now();
            gone_since = gone_since.or(Some(now)).filter(|_| gone);
            if gone_since.is_some_and(|since| now.since(since) >= timings.lease_ttl) {
                return;
            }
        }
    }
}

async fn refuses(host: &Endpoint, within: Duration) -> bool {
    let dialled = tokio::time::timeout(within, TcpStream::connect((host.host.as_str(), host.port))).await;
    matches!(&dialled, Ok(Err(error)) if error.kind() == ErrorKind::ConnectionRefused)
}

/// The way to a store that an agent serves.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Way<'a> {
    pub tls: Option<&'a MutualTls>,
    /// Among others the address to serve it on. None: a loopback address that the endpoint names, else all.
    pub network: &'a NetworkOptions,
    /// Which store, and the form of advice.
    pub store: &'a StoreOptions,
}

/// How long to wait for a store, since when, and what a user can do if it does not answer.
pub(super) struct Patience {
    begun: Time,
    limit: Duration,
    advice: String,
}

impl Patience {
    pub(super) fn since(begun: Time, limit: Duration, advice: &str, way: Way<'_>) -> Patience {
        Patience { begun, limit, advice: way.store.in_form(advice.to_owned()) }
    }

    fn of(limit: Duration, advice: &str, way: Way<'_>) -> Patience {
        Patience::since(elastic_store::clock::now(), limit, advice, way)
    }
}

const RUNS: &str = "is it running, and is --rdzv-endpoint (or --master-addr) right?";

/// What a node should know that comes late.
const ENDED: &str = "If the job has ended, so has the agent that served its store, and this node waits in vain";

/// What to do where this agent does not serve the store and no other agent answers.
fn served_elsewhere(endpoint: &Endpoint, is_host: Option<bool>) -> String {
    let each = "on each machine that is the machine itself: give all nodes an address of one of them, as --rdzv-endpoint \
                or --master-addr";
    let one = "give one node --node-rank=0 or --rdzv-conf=is_host=1";
    match is_host {
        _ if names_loopback(&endpoint.host) => format!("another agent must serve it ({one}), and {each}. {ENDED}"),
        Some(_) => format!("another agent must serve it: {one}. {ENDED}"),
        None => format!(
            "no address of this machine, so the agent on the machine that has it serves the store; for an address that \
             none has, as a Service's, {one}. {ENDED}"
        ),
    }
}

/// Opens the job's store. If it does not answer yet, this waits for up to `patience`.
pub(crate) async fn open(paths: &JobPaths, way: Way<'_>, patience: Duration) -> Result<Backend, BackendError> {
    match &way.store.choice {
        StoreChoice::Standalone => {
            let store = Arc::new(MemoryStore::start(Limits::default()));
            Ok(Backend::of(JobStore::Store(store), "a store of this process".into()))
        }
        StoreChoice::Hosted { endpoint, is_host } => hosted(endpoint, *is_host, way, patience).await,
        StoreChoice::Replicated { endpoints } => seat::replicated(endpoints, way, patience).await,
        StoreChoice::Etcd { endpoints, tls, credentials, v2 } => {
            let patience = Patience::of(patience, RUNS, way);
            let config = etcd_config(endpoints, tls.as_ref(), credentials.as_ref())?;
            let client = EtcdV2::connect(config.clone())?;
            if *v2 {
                return etcd_v2(client, config, paths, &patience).await;
            }
            let backend = etcd(config, Some(&client), &patience).await?;
            // Most servers do not offer v2, so no node can meet there.
            match met_on_v2(&client, &paths.paths).await {
                Ok(Some(found)) => Err(BackendError::Elsewhere(found)),
                Ok(None) => Ok(backend),
                Err(error) => {
                    tracing::debug!(%error, "cannot find out whether torchrun nodes meet here");
                    Ok(backend)
                }
            }
        }
    }
}

/// How etcd is reached, as the command line says.
pub(crate) fn etcd_config(
    endpoints: &[Endpoint],
    tls: Option<&Tls>,
    credentials: Option<&Credentials>,
) -> Result<EtcdConfig, StoreError> {
    let mut config = EtcdConfig::new(endpoints.iter().map(ToString::to_string));
    if let Some(Tls { ca, client }) = tls {
        let ca = ca.clone().map_or_else(system_ca, Ok)?;
        config.tls = Some(EtcdTls { ca, client: client.clone(), server_name: None });
    }
    if let Some(Credentials { user, password_file }) = credentials {
        config.user = Some(EtcdUser { name: user.clone(), password: Secret::from_file(password_file)? });
    }
    Ok(config)
}

async fn etcd_v2(
    client: EtcdV2,
    config: EtcdConfig,
    paths: &JobPaths,
    patience: &Patience,
) -> Result<Backend, BackendError> {
    let name = format!("etcd at {} (v2 API)", config.endpoints.join(", "));
    let probe = until_it_answers(patience, || client.probe()).await?;
    tracing::info!(endpoint = %probe.endpoint, version = %probe.version, "etcd answers, over its v2 API");
    // Our own nodes that were started without api=v2 would form a second group.
    let nodes = EtcdStore::connect(config)?.range(&paths.keys.nodes()).await;
    if nodes.is_ok_and(|(nodes, _)| !nodes.is_empty()) {
        return Err(BackendError::Elsewhere(format!(
            "nodes of this job's id meet through etcd's v3 API (their records are under {}); this one \
         would begin a second group. Start it without api=v2, or all with it, or under another --rdzv-id",
            paths.keys.nodes()
        )));
    }
    Ok(Backend::of(JobStore::TorchElastic(client), name))
}

fn system_ca() -> Result<std::path::PathBuf, StoreError> {
    SYSTEM_CAS.iter().map(std::path::PathBuf::from).find(|path| path.exists()).ok_or_else(|| {
        StoreError::Invalid("no system certificates are installed: name the CA with --rdzv-conf cacert=FILE".into())
    })
}

/// Opens etcd by its v3 API. `v2` is asked only where v3 does not answer.
pub(super) async fn etcd(
    config: EtcdConfig,
    v2: Option<&EtcdV2>,
    patience: &Patience,
) -> Result<Backend, BackendError> {
    let name = format!("etcd at {}", config.endpoints.join(", "));
    let store = EtcdStore::connect(config)?;
    let probe = async || {
        let failure = match store.probe().await {
            Ok(probe) => return Ok(Ok(probe)),
            Err(failure) => failure,
        };
        let Some(v2) = v2 else { return Err(failure) };
        match v2.probe().await {
            // The server is up. Either it has come up only now, or it has no v3 API.
            Ok(found) => Ok(store.probe().await.map_err(|_| found.version)),
            Err(_) => Err(failure),
        }
    };
    match until_it_answers(patience, probe).await? {
        Ok(probe) => {
            tracing::info!(endpoint = %probe.endpoint, version = %probe.version, "etcd answers");
            Ok(Backend::of(JobStore::Store(Arc::new(store)), name))
        }
        Err(version) => Err(BackendError::OnlyV2 { what: format!("{name}, version {version},") }),
    }
}

/// Retries for up to the limit while there is no answer.
async fn until_it_answers<T, E: Into<BackendError>>(
    Patience { begun, limit, advice }: &Patience,
    ask: impl AsyncFn() -> Result<T, E>,
) -> Result<T, BackendError> {
    let mut said: Option<Time> = None;
    loop {
        match ask().await.map_err(E::into) {
            Ok(found) => return Ok(found),
            Err(error) if !error.is_transient() => return Err(error),
            Err(last) if elastic_store::clock::now().since(*begun) >= *limit => {
                let advice = advice.clone();
                return Err(BackendError::NeverAnswered { last: Box::new(last), within: *limit, advice });
            }
            Err(error) => {
                let now = elastic_store::clock::now();
                if said.is_none_or(|at| now.since(at) >= SELDOM) {
                    said = Some(now);
                    tracing::warn!("{error}; waiting for it, up to join_timeout ({}): {advice}", written(*limit));
                }
                tokio::time::sleep(AGAIN).await;
            }
        }
    }
}

/// Follows torchrun's rule: the agent on the machine that the endpoint names serves the store. Of several agents on
/// that machine, the first one serves it.
async fn hosted(
    endpoint: &Endpoint,
    is_host: Option<bool>,
    way: Way<'_>,
    patience: Duration,
) -> Result<Backend, BackendError> {
    let begun = elastic_store::clock::now();
    let own = match is_host {
        Some(is_host) => is_host,
        None => {
            let patience = Patience::of(patience, &format!("{RUNS} {ENDED}"), way);
            let addresses = until_it_answers(&patience, || resolve(endpoint)).await?;
            are_own(&addresses, &interfaces::all().unwrap_or_default())
        }
    };
    if own {
        match serve(endpoint, None, way, patience).await {
            Ok(server) => {
                let (store, address) = (Arc::new(server.store()), server.address());
                tokio::spawn(async move {
                    if let Err(error) = server.serve(std::future::pending()).await {
                        tracing::error!(%error, "the store that this agent serves has failed");
                    }
                });
                tracing::info!(%endpoint, %address, "this agent serves the job's store: it leads, and leaves last");
                if way.network.leaves_open(endpoint) {
                    tracing::warn!("{}", open_to_all(endpoint));
                }
                let name = format!("the store served here at {endpoint}");
                return Ok(Backend { serves: true, ..Backend::of(JobStore::Store(store), name) });
            }
            // Another agent of this machine was first.
            Err(BackendError::Serve(EmbeddedError::InUse { .. })) if is_host.is_none() => {}
            Err(error) => return Err(error),
        }
    }
    let mut config = EtcdConfig::new([endpoint.to_string()]);
    config.peers = way.tls.cloned();
    // What speaks our TLS is no etcd of before v3.
    let v2 = way.tls.is_none().then(|| EtcdV2::connect(config.clone())).transpose()?;
    let advice = served_elsewhere(endpoint, if own { Some(true) } else { is_host });
    let patience = Patience::since(begun, patience, &advice, way);
    let backend = etcd(config, v2.as_ref(), &patience).await.map_err(|error| match error {
        BackendError::Store(StoreError::Tls { endpoints, .. }) if way.tls.is_none() => {
            let cause =
                "it speaks TLS: give this node --peer-cert, --peer-key and --peer-ca, as the node that serves it has";
            StoreError::Tls { endpoints, cause: cause.to_owned() }.into()
        }
        error => error,
    })?;
    Ok(Backend { name: format!("the store served at {endpoint}"), hosts: vec![endpoint.clone()], ..backend })
}

/// What the agent that serves a store says of it if every host can use it.
pub(super) fn open_to_all(store: &Endpoint) -> String {
    format!(
        "any host that reaches port {} of {} can read and change the job's store, and so what its workers load: to close \
         it, give every node --peer-cert FILE --peer-key FILE --peer-ca FILE (elasticctl certs makes the files); \
         --insecure says that this is meant, --require-peer-tls refuses it",
        store.port, store.host
    )
}

/// Listens on the address that was given for it, else on all interfaces, unless the user wrote a loopback address. The
/// address that a host's name has on the host itself, often 127.0.1.1, says nothing about how other hosts reach it.
pub(super) async fn serve(
    endpoint: &Endpoint,
    replicas: Option<Replicas>,
    way: Way<'_>,
    patience: Duration,
) -> Result<EmbeddedServer, BackendError> {
    let everywhere = [IpAddr::from(Ipv6Addr::UNSPECIFIED), IpAddr::from(Ipv4Addr::UNSPECIFIED)];
    let addresses = if let Some(ip) = way.network.bind {
        vec![SocketAddr::new(ip, endpoint.port)]
    } else if names_loopback(&endpoint.host) {
        until_it_answers(&Patience::of(patience, RUNS, way), || resolve(endpoint)).await?
    } else {
        everywhere.map(|ip| SocketAddr::new(ip, endpoint.port)).to_vec()
    };
    let mut last = BackendError::Resolve { host: endpoint.host.clone(), cause: "it has no address".into() };
    for address in addresses {
        // The address is named as the place to meet, so others must be able to reach it.
        let (tls, replicas) = (way.tls.cloned(), replicas.clone());
        let options = Options { allow_remote: true, tls, replicas, ..Options::default() };
        match EmbeddedServer::bind_with(address, options).await {
            Ok(server) => return Ok(server),
            Err(error @ EmbeddedError::InUse { .. }) => return Err(error.into()),
            // This host has no IPv6.
            Err(error) => last = error.into(),
        }
    }
    Err(last)
}

pub(super) async fn resolve(endpoint: &Endpoint) -> Result<Vec<SocketAddr>, BackendError> {
    match tokio::net::lookup_host((endpoint.host.as_str(), endpoint.port)).await {
        Ok(addresses) => Ok(addresses.collect()),
        Err(error) => Err(BackendError::Resolve { host: endpoint.host.clone(), cause: error.to_string() }),
    }
}

/// Whether these addresses lead to this machine. Asks for the interfaces, because `net.ipv4.ip_nonlocal_bind` lets a
/// process bind addresses of other machines.
pub(super) fn are_own(addresses: &[SocketAddr], interfaces: &[Interface]) -> bool {
    let own = |ip: IpAddr| ip.is_loopback() || interfaces.iter().any(|interface| interface.ip == ip);
    addresses.iter().any(|address| own(address.ip()))
}
