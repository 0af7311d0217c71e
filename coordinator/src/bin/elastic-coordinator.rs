//! `elastic-coordinator`: leads every job under a prefix while it runs, and can serve the embedded store. No job needs
//! it: without it agents lead.

use std::io::IsTerminal;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs, UdpSocket};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use elastic_coordinator::flags::coordinator::Flags as Cli;
use elastic_coordinator::flags::{block_on, completion};
use elastic_coordinator::operator::Operator;
use elastic_coordinator::service::http::hosts::Hosts;
use elastic_coordinator::service::http::users::Users;
use elastic_coordinator::service::http::{self, Shown, Site};
use elastic_coordinator::service::retention::Policy;
use elastic_coordinator::service::{self, ServiceSetup, Shared};
use elastic_rendezvous::job::{Endpoint, LeaderRecord, NodeId};
use elastic_store::Store;
use elastic_store::embedded::{EmbeddedError, EmbeddedServer, Options, Replicas, names_loopback};
use elastic_store::etcd::{EtcdConfig, EtcdStore};
use elastic_store::listener::{self, Serves, listen};
use elastic_store::metered::Metered;
use elastic_store::tls::{MutualTls, ServerSettings, http_certificate};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tracing_subscriber::EnvFilter;

/// Where agents' pulses are taken unless told otherwise.
const PEER_PORT: u16 = 29410;

#[allow(clippy::print_stdout, clippy::print_stderr)]
fn main() -> ExitCode {
    let cli = Cli::read(std::env::args_os()).unwrap_or_else(|error| error.exit());
    if let Some(shell) = cli.print_completion {
        print!("{}", completion::<Cli>(shell));
        return ExitCode::SUCCESS;
    }
    set_up_log(cli.json_logs);
    // Each agent of each job that is led from here holds a connection.
    listener::share_descriptors(Serves { store: cli.embedded, workers: false });
    match block_on(run(cli)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("elastic-coordinator: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn set_up_log(json: bool) {
    let libraries = "h2=warn,hyper=warn,hyper_util=warn,tonic=warn,tower=warn";
    let level = std::env::var("LOGLEVEL").unwrap_or_else(|_| "info".into());
    let filter = EnvFilter::builder().parse_lossy(format!("{level},{libraries}"));
    let log = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .with_target(false);
    if json { log.json().init() } else { log.init() }
}

async fn run(cli: Cli) -> anyhow::Result<()> {
    let tls = cli.peers.tls().map_err(anyhow::Error::msg)?;
    let shared = Arc::new(Shared::new(tls.clone()));
    let (leave, leaving) = watch::channel(false);
    let mut serving = None;
    let store: Arc<dyn Store> = if cli.embedded {
        let options = Options { allow_remote: cli.allow_remote, tls: tls.clone(), ..Options::default() };
        let (server, store) = embedded(&cli, options).await?;
        let mut leaving = leaving.clone();
        serving = Some(tokio::spawn(server.serve(async move { drop(leaving.wait_for(|leave| *leave).await) })));
        store
    } else {
        Arc::new(cli.store.connect()?)
    };
    let peer_listen = peer_listen(&cli);
    let listener =
        listen(peer_listen).with_context(|| format!("take agents' pulses on {peer_listen} (--peer-listen)"))?;
    let peer = peer(&cli, listener.local_addr()?)?;
    let node = NodeId::new(&format!("coordinator-{peer}"), &uuid::Uuid::new_v4().to_string());
    tracing::info!(%node, prefix = cli.store.prefix, "taking agents' pulses at {peer}");
    let observed = Arc::clone(&shared);
    let observer = Arc::new(move |call, ok, took| observed.metrics.called(call, ok, took));
    let store: Arc<dyn Store> = Arc::new(Metered::new(store, observer));
    if let Some(address) = cli.http {
        let operator = Operator::new(Arc::clone(&store), &cli.store.prefix).over(tls.clone());
        serve_http(&cli, (address, &peer.host), Arc::clone(&shared), operator, tls.as_ref())?;
    }
    let setup = ServiceSetup {
        store,
        prefix: cli.store.prefix,
        record: LeaderRecord::new(node, peer, true),
        listener,
        tls,
        lease_ttl: Duration::from_secs(cli.lease_ttl),
        retention: Policy { keep: cli.keep_finished, count: cli.keep_finished_count },
        shared,
    };
    let led = match &mut serving {
        None => service::run(setup, signalled()).await.map_err(anyhow::Error::from),
        Some(serving) => tokio::select! {
            led = service::run(setup, signalled()) => led.map_err(anyhow::Error::from),
            served = serving => return Ok(served.context("the embedded store's task failed")??),
        },
    };
    // The store ends last, so that agents see the hand-over first.
    leave.send_replace(true);
    if let Some(serving) = serving {
        serving.await.context("the embedded store's task failed")??;
    }
    led
}

/// Where a member listens that has these addresses, if one of them is this machine's: at the address that was written, or
/// on all interfaces. The address that a host's name has on the host itself, often 127.0.1.1, says nothing about how
/// others reach it.
fn listens_at(member: &str, addresses: Vec<SocketAddr>) -> Vec<SocketAddr> {
    // A socket can be bound to other machines' addresses too, where `net.ipv4.ip_nonlocal_bind` is set.
    let is_own = |at: &SocketAddr| at.ip().is_loopback() || from_here_to(*at) == Some(at.ip());
    let own: Vec<SocketAddr> = addresses.into_iter().filter(is_own).collect();
    let Some(port) = own.first().map(SocketAddr::port) else { return own };
    if is_loopback(member) || member.parse::<SocketAddr>().is_ok() {
        return own;
    }
    [Ipv6Addr::UNSPECIFIED.into(), Ipv4Addr::UNSPECIFIED.into()].map(|ip: IpAddr| SocketAddr::new(ip, port)).to_vec()
}

/// Whether HOST:PORT is on this machine alone, wherever it is written.
fn is_loopback(at: &str) -> bool {
    let host = at.rsplit_once(':').map_or(at, |(host, _)| host);
    names_loopback(host.trim_matches(['[', ']']))
}

/// The embedded store: of this process alone, or held together with two others, at the first of the members' addresses
/// that is this machine's and free.
async fn embedded(cli: &Cli, options: Options) -> anyhow::Result<(EmbeddedServer, Arc<dyn Store>)> {
    if cli.members.is_empty() {
        let server = EmbeddedServer::bind_with(cli.listen, options).await?;
        let store = Arc::new(server.store());
        return Ok((server, store));
    }
    let mut config = EtcdConfig::new(cli.members.iter().cloned());
    config.peers = options.tls.clone();
    let mut tried = Vec::new();
    for (seat, member) in cli.members.iter().enumerate() {
        let found = match tokio::net::lookup_host(member).await {
            Ok(found) => found.collect(),
            Err(error) => {
                tried.push(format!("{member}: {error}"));
                continue;
            }
        };
        let addresses = listens_at(member, found);
        if addresses.is_empty() {
            tried.push(format!("{member}: this machine has no such address"));
        }
        for address in addresses {
            let replicas = Some(Replicas { endpoints: cli.members.clone(), seat });
            match EmbeddedServer::bind_with(address, Options { replicas, ..options.clone() }).await {
                Ok(server) => return Ok((server, Arc::new(EtcdStore::connect(config)?))),
                Err(error @ (EmbeddedError::InUse { .. } | EmbeddedError::Listen { .. })) => {
                    tried.push(format!("{member}: {error}"));
                }
                Err(error) => return Err(error.into()),
            }
        }
    }
    anyhow::bail!("this process cannot serve at any of --members: {}", tried.join("; "))
}

fn serve_http(
    cli: &Cli,
    (address, name): (SocketAddr, &str),
    shared: Arc<Shared>,
    operator: Operator,
    peers: Option<&MutualTls>,
) -> anyhow::Result<()> {
    let files = cli.http_cert.clone().zip(cli.http_key.clone());
    let own = files.map(|(certificate, key)| http_certificate(certificate, key)).transpose();
    let own = own.map_err(anyhow::Error::msg).context("--http-cert and --http-key")?;
    let peers = peers.filter(|_| !address.ip().is_loopback() && !cli.http_insecure).cloned();
    let tls: Option<ServerSettings> = match (own, peers) {
        (Some(own), _) => Some(Box::new(move || own.now())),
        (None, Some(peers)) => Some(Box::new(move || peers.server())),
        (None, None) => None,
    };
    let shown = match &cli.http_users {
        Some(file) => {
            anyhow::ensure!(
                tls.is_some() || address.ip().is_loopback() || cli.http_insecure,
                "--http-users over plain HTTP on {address}: everybody on the way could read the tokens. Give --http-cert \
                 and --http-key; or a loopback address; or --http-insecure, if a proxy before this port does TLS"
            );
            Shown::Users(Users::follow(file.clone()).map_err(anyhow::Error::msg).context("--http-users")?)
        }
        // Over TLS a browser compares the name that it called with the certificate.
        None if cli.http_jobs && tls.is_some() => Shown::Jobs(Hosts::Any),
        None if cli.http_jobs => Shown::Jobs(Hosts::known(cli.allowed_host.iter().cloned().chain([name.to_owned()]))),
        None => Shown::Monitoring,
    };
    let listener = listen(address).with_context(|| format!("serve HTTP on {address} (--http)"))?;
    let at = format!("{}://{}", if tls.is_some() { "https" } else { "http" }, listener.local_addr()?);
    tracing::info!("serving {at}/metrics, /live and /ready");
    match shown {
        Shown::Monitoring => {}
        Shown::Jobs(_) => tracing::info!("the page of all jobs is {at}/: anyone who reaches it can read their records"),
        Shown::Users(_) => tracing::info!("the page of all jobs is {at}/, for users with a token"),
    }
    tokio::spawn(http::serve(listener, Site { shared, operator, shown }, tls));
    Ok(())
}

/// Where to take agents' pulses. If only this machine can reach the store, only this machine can reach this port.
fn peer_listen(cli: &Cli) -> SocketAddr {
    let at = cli.embedded_at();
    let own = !at.is_empty() && at.iter().all(|at| is_loopback(at));
    let any = if own { Ipv4Addr::LOCALHOST } else { Ipv4Addr::UNSPECIFIED };
    cli.peer_listen.unwrap_or(SocketAddr::new(any.into(), PEER_PORT))
}

fn peer(cli: &Cli, bound: SocketAddr) -> anyhow::Result<Endpoint> {
    let Some(given) = &cli.peer_address else {
        let host = if bound.ip().is_unspecified() { outward(cli) } else { bound.ip() };
        return Ok(Endpoint { host: host.to_string(), port: bound.port() });
    };
    // An address alone, also an IPv6 one without brackets.
    let (host, port) = match given.parse::<IpAddr>() {
        Ok(_) => (given.clone(), bound.port()),
        Err(_) => elastic_flags::endpoint(given, bound.port()).with_context(|| format!("--peer-address {given}"))?,
    };
    Ok(Endpoint { host, port })
}

/// The address of this machine's interface that leads to the store, or, if the store is on this machine, to other
/// networks.
fn outward(cli: &Cli) -> IpAddr {
    // An address for documentation (RFC 5737), so it is never in this machine's network.
    const OUT: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1)), 9);
    let at = if cli.embedded { cli.embedded_at() } else { cli.store.etcd.clone() };
    let found = at
        .first()
        .and_then(|store| resolve(store))
        .and_then(from_here_to)
        .filter(|ip| !ip.is_loopback())
        .or_else(|| from_here_to(OUT));
    found.unwrap_or_else(|| {
        tracing::warn!("no network but loopback: agents on other machines need --peer-address");
        Ipv4Addr::LOCALHOST.into()
    })
}

/// The address that the kernel would send from; nothing is sent.
fn from_here_to(to: SocketAddr) -> Option<IpAddr> {
    let any: IpAddr = if to.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = UdpSocket::bind((any, 0)).ok()?;
    socket.connect(to).ok()?;
    Some(socket.local_addr().ok()?.ip()).filter(|ip| !ip.is_unspecified())
}

fn resolve(etcd: &str) -> Option<SocketAddr> {
    let address = etcd.split_once("://").map_or(etcd, |(_, address)| address).trim_end_matches('/');
    let mut found = address.to_socket_addrs().or_else(|_| (address, 2379).to_socket_addrs()).ok()?;
    found.next()
}

async fn signalled() {
    let (Ok(mut terminate), Ok(mut interrupt)) = (signal(SignalKind::terminate()), signal(SignalKind::interrupt()))
    else {
        return std::future::pending().await;
    };
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_member_by_its_name_listens_for_other_machines() {
        for (member, has, expected) in [
            // As Debian writes a host's own name.
            ("c0:7", "127.0.1.1:7", &["[::]:7", "0.0.0.0:7"][..]),
            ("localhost:7", "127.0.0.1:7", &["127.0.0.1:7"]),
            ("127.0.1.1:7", "127.0.1.1:7", &["127.0.1.1:7"]),
            ("[::1]:7", "[::1]:7", &["[::1]:7"]),
            // An address for documentation (RFC 5737), so no machine has it.
            ("c1:7", "192.0.2.1:7", &[]),
            ("192.0.2.1:7", "192.0.2.1:7", &[]),
        ] {
            let found = listens_at(member, vec![has.parse().unwrap()]);
            assert_eq!(found.iter().map(SocketAddr::to_string).collect::<Vec<_>>(), expected, "{member}");
        }
    }

    #[test]
    fn pulses_are_taken_where_agents_can_be() {
        for (flags, expected) in [
            (&["--etcd", "etcd0:2379"][..], "0.0.0.0:29410"),
            (&["--embedded"], "127.0.0.1:29410"),
            (&["--embedded", "--listen", "0.0.0.0:29400", "--allow-remote"], "0.0.0.0:29410"),
            (&["--embedded", "--peer-listen", "0.0.0.0:7"], "0.0.0.0:7"),
            (&["--embedded", "--members", "10.0.0.1:1,10.0.0.2:1,127.0.0.1:1"], "0.0.0.0:29410"),
            (&["--embedded", "--members", "127.0.0.1:1,127.0.0.1:2,127.0.0.1:3"], "127.0.0.1:29410"),
            (&["--embedded", "--members", "localhost:1,[::1]:2,localhost:3"], "127.0.0.1:29410"),
        ] {
            let cli = Cli::read(["elastic-coordinator"].iter().chain(flags)).unwrap();
            assert_eq!(peer_listen(&cli).to_string(), expected, "{flags:?}");
        }
    }
}
