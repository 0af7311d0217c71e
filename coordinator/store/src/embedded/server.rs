//! Opens the port, puts the services together and runs them until told to stop.

use std::future::Future;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use elastic_proto::replication::replication_server::ReplicationServer;
use etcd_client::proto::{PbClusterServer, PbKvServer, PbLeaseServer, PbMaintenanceServer, PbWatchServer};
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, watch};
use tonic::service::Routes;
use tonic::transport::Server;

use super::admin::AdminService;
use super::cluster::{Closing, Cluster};
use super::gate::Gate;
use super::kv::KvService;
use super::lease::LeaseService;
use super::mvcc::Limits;
use super::replicated::{Group, Letters, Replicas};
use super::status::auth_not_enabled;
use super::watch::WatchService;
use super::{Hub, MemoryStore};
use crate::listener::{Port, Share, listen};
use crate::tls::MutualTls;

/// Room for what a message holds besides keys and values; etcd allows the same.
const MESSAGE_OVERHEAD: usize = 512 << 10;

/// How long connections have to end by themselves once the server is to stop.
const STOP_GRACE: Duration = Duration::from_secs(2);

/// Requests under way on one connection, streams among them.
const STREAMS: u32 = 512;

/// Whether this is a loopback address, or one of the names that mean a loopback address on every machine.
pub fn names_loopback(host: &str) -> bool {
    const NAMES: [&str; 5] = ["localhost", "localhost4", "localhost6", "ip6-localhost", "ip6-loopback"];
    let (name, domain) = host.split_once('.').unwrap_or((host, "localdomain"));
    let named = NAMES.iter().any(|known| name.eq_ignore_ascii_case(known)) && domain.starts_with("localdomain");
    named || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

/// Why the embedded store cannot be served.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)]
pub enum EmbeddedError {
    /// The address can be reached from other machines, without TLS, and no one said that it may be.
    #[error(
        "any host that reaches {address} could read and write the embedded store: give it certificates \
         (--peer-cert, --peer-key and --peer-ca), or a loopback address such as 127.0.0.1, or --allow-remote where the \
         network is trusted"
    )]
    Remote { address: SocketAddr },
    /// Another process listens there.
    #[error(
        "the embedded store cannot listen on {address}: another process does; choose another port, or 0 for a free one"
    )]
    InUse { address: SocketAddr },
    /// Listening there fails for another reason.
    #[error("the embedded store cannot listen on {address}: {cause}")]
    Listen { address: SocketAddr, cause: io::Error },
    /// The other agents that hold it cannot be written to.
    #[error("the embedded store cannot be kept together with others: {cause}")]
    Others { cause: String },
    /// The server ended by itself.
    #[error("the embedded store at {address} stopped serving: {cause}")]
    Serve { address: SocketAddr, cause: tonic::transport::Error },
}

/// How the embedded store is run.
#[derive(Clone, Debug)]
pub struct Options {
    /// Whether an address that other machines can reach is taken without TLS.
    pub allow_remote: bool,
    /// Serves those alone who show a certificate.
    pub tls: Option<MutualTls>,
    /// The agents that hold the store together; none for a store of this process alone.
    pub replicas: Option<Replicas>,
    /// Bounds on what it holds.
    pub limits: Limits,
    /// Most watches at a time, of all clients together. Each stream that carries watches counts as one more.
    pub watches: usize,
    /// How often a watch that asked for it hears of the store's progress. etcd's default is ten minutes.
    pub progress_every: Duration,
    /// How often a silent client is asked whether it is there, and how long it may take to answer.
    pub client_check: Duration,
}

impl Default for Options {
    fn default() -> Options {
        let (progress_every, client_check) = (Duration::from_secs(600), Duration::from_secs(10));
        let (limits, watches) = (Limits::default(), 1 << 16);
        Options { allow_remote: false, tls: None, replicas: None, limits, watches, progress_every, client_check }
    }
}

/// The embedded store with its port open. Clients can connect from now on; they are answered once it is served.
#[derive(Debug)]
pub struct EmbeddedServer {
    listener: TcpListener,
    address: SocketAddr,
    hub: Arc<Hub>,
    group: Option<Arc<Group>>,
    cluster: Cluster,
    options: Options,
}

impl EmbeddedServer {
    /// Opens an empty store on an address; port 0 takes a free one. Must be called within a tokio runtime.
    pub async fn bind(address: SocketAddr, allow_remote: bool) -> Result<EmbeddedServer, EmbeddedError> {
        EmbeddedServer::bind_with(address, Options { allow_remote, ..Options::default() }).await
    }

    /// Like [`EmbeddedServer::bind`], with all options.
    pub async fn bind_with(address: SocketAddr, options: Options) -> Result<EmbeddedServer, EmbeddedError> {
        if !options.allow_remote && options.tls.is_none() && !address.ip().to_canonical().is_loopback() {
            return Err(EmbeddedError::Remote { address });
        }
        let open = || {
            let listener = listen(address)?;
            let bound = listener.local_addr()?;
            Ok((listener, bound))
        };
        let (listener, address) = open().map_err(|cause: io::Error| match cause.kind() {
            io::ErrorKind::AddrInUse => EmbeddedError::InUse { address },
            _ => EmbeddedError::Listen { address, cause },
        })?;
        let start = if options.replicas.is_some() { Hub::idle } else { Hub::start };
        let hub = start(options.limits.clone());
        let group = options.replicas.clone().map(|replicas| Group::start(hub.clone(), replicas, options.tls.as_ref()));
        let group = group.transpose().map_err(|cause| EmbeddedError::Others { cause })?;
        Ok(EmbeddedServer { listener, address, hub, group, cluster: Cluster::new(), options })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The same store for this process, without the network. Not for one that others hold too.
    pub fn store(&self) -> MemoryStore {
        MemoryStore::on(self.hub.clone())
    }

    /// This process's part in a store that others hold too.
    pub fn group(&self) -> Option<Arc<Group>> {
        self.group.clone()
    }

    /// Answers clients until `shutdown` completes; then ends their streams and returns within two seconds or so.
    pub async fn serve(self, shutdown: impl Future<Output = ()>) -> Result<(), EmbeddedError> {
        let EmbeddedServer { listener, address, hub, group, cluster, options } = self;
        let (close, closing) = watch::channel(());
        let closing = Closing(closing);
        let gate = match &group {
            Some(group) => Gate::Replicated(Arc::clone(group)),
            None => Gate::Alone { hub, cluster, closing: closing.clone() },
        };
        match &group {
            Some(_) => tracing::info!(%address, "this process is one of three that hold the store in memory"),
            None => tracing::info!(
                %address,
                cluster = format_args!("{:x}", cluster.id()),
                "serving the embedded store: it is held in this process's memory, for one machine and trials; \
                 production is etcd"
            ),
        }
        let message = options.limits.request_bytes + MESSAGE_OVERHEAD;
        let admin = AdminService { gate: gate.clone(), address };
        let kv = KvService { gate: gate.clone() };
        let lease = LeaseService { gate: gate.clone() };
        let (places, progress_every) = (Arc::new(Semaphore::new(options.watches)), options.progress_every);
        let watch = WatchService { gate, places, progress_every };
        let routes = Routes::new(PbKvServer::new(kv).max_decoding_message_size(message))
            .add_service(PbLeaseServer::new(lease))
            .add_service(PbWatchServer::new(watch))
            .add_service(PbMaintenanceServer::new(admin.clone()))
            .add_service(PbClusterServer::new(admin));
        let no_login = || async { auth_not_enabled().into_http::<axum::body::Body>() };
        let routes = match group {
            Some(group) => {
                let letter = options.limits.saved_bytes();
                routes.add_service(ReplicationServer::new(Letters(group)).max_decoding_message_size(letter))
            }
            None => routes,
        };
        let router = routes.into_axum_router().route("/etcdserverpb.Auth/{method}", axum::routing::post(no_login));
        let serving = Server::builder()
            .max_concurrent_streams(STREAMS)
            .http2_keepalive_interval(Some(options.client_check))
            .http2_keepalive_timeout(Some(options.client_check))
            .add_routes(Routes::from(router))
            .serve_with_incoming_shutdown(
                Port::new(listener, Share::Store).incoming(options.tls),
                closing.clone().closed(),
            );
        let stop = async {
            shutdown.await;
            drop(close);
            tokio::time::sleep(STOP_GRACE).await;
        };
        tokio::select! {
            served = serving => served.map_err(|cause| EmbeddedError::Serve { address, cause }),
            // A client that reads nothing would keep its connection open for ever.
            () = stop => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::listener::blackhole_proxy::BlackholeProxy;

    const WITHIN: Duration = Duration::from_secs(20);

    #[tokio::test]
    async fn a_client_in_a_black_hole_leaves_no_watch() -> anyhow::Result<()> {
        let options = Options { client_check: Duration::from_millis(50), ..Options::default() };
        let server = EmbeddedServer::bind_with("127.0.0.1:0".parse()?, options).await?;
        let (hub, address) = (server.hub.clone(), server.address());
        tokio::spawn(server.serve(std::future::pending()));
        let hole = BlackholeProxy::before(address).await?;
        let mut client = etcd_client::Client::connect([hole.address.to_string()], None).await?;
        let _watch = client.watch("key", None).await?;
        assert_eq!(hub.subscriptions(), 1);
        hole.swallow();
        let gone = async {
            while hub.subscriptions() > 0 {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(WITHIN, gone).await.expect("its watch ends");
        Ok(())
    }
}
