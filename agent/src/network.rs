//! The address at which peers reach this node, and the port its rank 0 will listen on. Not for connecting to anything.

use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, ToSocketAddrs, UdpSocket};
use std::os::fd::OwnedFd;

use elastic_coordinator::job::Endpoint;
use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};

use crate::cli::Rendezvous;

/// Why a port could not be reserved.
#[derive(Debug, thiserror::Error)]
#[error("reserve a port for rank 0 on {ip}: {source}; is the address this machine's, and are ports free?")]
pub struct ReserveError {
    /// Address that was tried.
    pub ip: IpAddr,
    /// The kernel's answer.
    pub source: io::Error,
}

/// Where an advertised address comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AddressSource {
    /// `--local-addr`.
    Flag,
    /// The interface that leads to the store, or the one that leads out.
    Route,
    /// This machine's own name, for want of a route.
    Hostname,
}

/// The address that other nodes are told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Advertised {
    /// Name or address; IPv6 without brackets.
    pub address: String,
    /// Why this one.
    pub source: AddressSource,
}

impl fmt::Display for Advertised {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let why = match self.source {
            AddressSource::Flag => "as --local-addr says",
            AddressSource::Route => "the interface that leads to the store",
            AddressSource::Hostname => {
                "this host's name, as no route is known; if peers cannot resolve it, set \
                                        --local-addr"
            }
        };
        write!(f, "{} ({why})", self.address)
    }
}

/// Addresses of the documentation networks (RFC 5737, RFC 3849): never on this machine, so they lead to the way out.
const ELSEWHERE: [SocketAddr; 2] = [
    SocketAddr::new(IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1)), 9),
    SocketAddr::new(IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1)), 9),
];

/// The address peers reach this node at: `local_addr` if given, else that of the interface which leads to the store,
/// else `hostname`. Resolves the store's name, which may take as long as the resolver does; sends nothing itself.
pub fn advertised_address(local_addr: Option<&str>, store: Option<&Endpoint>, hostname: &str) -> Advertised {
    if let Some(address) = local_addr {
        return Advertised { address: address.to_owned(), source: AddressSource::Flag };
    }
    let routed = match store {
        Some(endpoint) => route_to(endpoint),
        // A job on one machine.
        None => Some(IpAddr::V4(Ipv4Addr::LOCALHOST)),
    };
    match routed {
        Some(ip) => Advertised { address: ip.to_string(), source: AddressSource::Route },
        None => Advertised { address: hostname.to_owned(), source: AddressSource::Hostname },
    }
}

/// The address that peers are told. May take as long as the resolver does.
pub fn place(flag: Option<&str>, rendezvous: &Rendezvous, hostname: &str) -> Advertised {
    let stores = match rendezvous {
        Rendezvous::Standalone => &[][..],
        Rendezvous::Hosted { endpoint, .. } => std::slice::from_ref(endpoint),
        Rendezvous::Etcd { endpoints, .. } => endpoints,
    };
    let by_route = |store: &Endpoint| {
        let address = advertised_address(flag, Some(store), hostname);
        (address.source != AddressSource::Hostname).then_some(address)
    };
    let address = stores.iter().find_map(by_route);
    address.unwrap_or_else(|| advertised_address(flag, stores.first(), hostname))
}

/// Listens on the first of these addresses that the machine has.
///
/// # Errors
/// The last one's.
pub async fn listen(hosts: &[&str], port: u16) -> io::Result<tokio::net::TcpListener> {
    let mut last = io::Error::other("no address");
    for host in hosts {
        for address in tokio::net::lookup_host((*host, port)).await? {
            match elastic_coordinator::listener::listen(address) {
                Ok(listener) => return Ok(listener),
                Err(error) => last = error,
            }
        }
    }
    Err(last)
}

fn route_to(store: &Endpoint) -> Option<IpAddr> {
    let source = (store.host.as_str(), store.port).to_socket_addrs().ok()?.find_map(route_source)?;
    Some(for_peers(source, &store.host, || ELSEWHERE.into_iter().find_map(route_source)))
}

/// Debian gives a host's own name the address 127.0.1.1. That the store is here does not mean that the peers are: unless
/// the user himself wrote a loopback address, take the interface that leads out, where there is one.
fn for_peers(source: IpAddr, store: &str, way_out: impl FnOnce() -> Option<IpAddr>) -> IpAddr {
    if source.is_loopback() && !names_loopback(store) { way_out().unwrap_or(source) } else { source }
}

/// Whether this is a loopback address, or one of the names that mean one on every machine.
pub fn names_loopback(host: &str) -> bool {
    const NAMES: [&str; 5] = ["localhost", "localhost4", "localhost6", "ip6-localhost", "ip6-loopback"];
    let (name, domain) = host.split_once('.').unwrap_or((host, "localdomain"));
    let named = NAMES.iter().any(|known| name.eq_ignore_ascii_case(known)) && domain.starts_with("localdomain");
    named || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

/// The local address from which packets to `to` would leave. Connecting a UDP socket asks the routing table and sends
/// nothing.
fn route_source(to: SocketAddr) -> Option<IpAddr> {
    let any: IpAddr = if to.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = UdpSocket::bind((any, 0)).ok()?;
    socket.connect(to).ok()?;
    let source = socket.local_addr().ok()?.ip();
    (!source.is_unspecified()).then_some(source)
}

/// A TCP port that is this agent's until dropped, and that one process which sets SO_REUSEADDR may listen on.
///
/// The socket is bound but does not listen, which Linux lets a second socket share if both have SO_REUSEADDR; torch's
/// TCPStore has. So rank 0's port is known before rank 0 runs, and no other process can get it in between: neither by
/// asking for any port nor for an outgoing connection.
#[derive(Debug)]
pub struct Reservation {
    _socket: OwnedFd,
    ip: IpAddr,
    port: u16,
}

/// Connections that may wait to be accepted; the kernel makes of it what `net.core.somaxconn` allows.
const BACKLOG: i32 = 1 << 14;

impl Reservation {
    /// The port.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Listens on it, in this process.
    ///
    /// # Errors
    /// Another one listens there already, or no descriptor is left.
    pub fn listen(&self) -> Result<TcpListener, ReserveError> {
        let listen = || {
            let socket = shared_socket(self.ip, self.port)?;
            rustix::net::listen(&socket, BACKLOG)?;
            Ok(TcpListener::from(socket))
        };
        listen().map_err(|source| ReserveError { ip: self.ip, source })
    }
}

/// Reserves a port that the kernel picks, on one address of this machine or on an unspecified one for all.
///
/// # Errors
/// The address is not this machine's, or no port or descriptor is left.
pub fn reserve_port(ip: IpAddr) -> Result<Reservation, ReserveError> {
    reserve(ip).map_err(|source| ReserveError { ip, source })
}

/// Reserves a port on all addresses, IPv6 and IPv4 at once where the machine has IPv6, as TCPStore will want it.
///
/// # Errors
/// No port or descriptor is left.
pub fn reserve_any_port() -> Result<Reservation, ReserveError> {
    reserve_port(Ipv6Addr::UNSPECIFIED.into()).or_else(|_| reserve_port(Ipv4Addr::UNSPECIFIED.into()))
}

fn reserve(ip: IpAddr) -> io::Result<Reservation> {
    let socket = shared_socket(ip, 0)?;
    let bound = SocketAddr::try_from(rustix::net::getsockname(&socket)?)?;
    Ok(Reservation { _socket: socket, ip, port: bound.port() })
}

fn shared_socket(ip: IpAddr, port: u16) -> io::Result<OwnedFd> {
    let family = if ip.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let socket = rustix::net::socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    sockopt::set_socket_reuseaddr(&socket, true)?;
    if ip.is_ipv6() {
        sockopt::set_ipv6_v6only(&socket, false)?;
    }
    rustix::net::bind(&socket, &SocketAddr::new(ip, port))?;
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};

    use super::*;

    fn endpoint(host: &str) -> Endpoint {
        Endpoint { host: host.into(), port: 2379 }
    }

    fn has_ipv6() -> bool {
        UdpSocket::bind("[::1]:0").is_ok()
    }

    #[test]
    fn the_flag_goes_before_the_route_and_the_route_before_the_name() {
        let store = endpoint("127.0.0.1");
        fn address(flag: Option<&str>, store: Option<&Endpoint>) -> (String, AddressSource) {
            let advertised = advertised_address(flag, store, "myhost");
            (advertised.address, advertised.source)
        }
        assert_eq!(address(Some("node7"), Some(&store)), ("node7".into(), AddressSource::Flag));
        assert_eq!(address(None, Some(&store)), ("127.0.0.1".into(), AddressSource::Route));
        assert_eq!(address(None, Some(&endpoint("localhost"))).1, AddressSource::Route);
        assert_eq!(address(None, None), ("127.0.0.1".into(), AddressSource::Route));
        // `invalid` never resolves (RFC 6761).
        assert_eq!(address(None, Some(&endpoint("etcd.invalid"))), ("myhost".into(), AddressSource::Hostname));
        if has_ipv6() {
            assert_eq!(address(None, Some(&endpoint("::1"))), ("::1".into(), AddressSource::Route));
        }
    }

    #[test]
    fn the_own_name_on_loopback_is_not_what_peers_are_told_if_there_is_a_way_out() {
        let (debian, lan): (IpAddr, IpAddr) = ("127.0.1.1".parse().unwrap(), "10.0.0.5".parse().unwrap());
        let out = || Some(lan);
        assert_eq!(for_peers(debian, "node0", out), lan, "the host's own name");
        assert_eq!(for_peers(debian, "node0", || None), debian, "a machine without a network");
        for written in ["127.0.1.1", "LOCALHOST", "::1"] {
            assert_eq!(for_peers(debian, written, out), debian, "{written}: the user's wish");
        }
        assert_eq!(for_peers(lan, "node0", || unreachable!()), lan);
    }

    /// Listens as TCPStore does: SO_REUSEADDR, then bind and listen (the standard library sets it for listeners).
    fn serve_once(reservation: &Reservation, ip: IpAddr) {
        let listener = TcpListener::bind((ip, reservation.port())).expect("rank 0 gets the reserved port");
        let mut client = TcpStream::connect((ip, reservation.port())).unwrap();
        let (mut server, _) = listener.accept().unwrap();
        client.write_all(b"x").unwrap();
        let mut byte = [0];
        server.read_exact(&mut byte).unwrap();
        assert_eq!(&byte, b"x");
    }

    #[test]
    fn rank_0_can_listen_on_a_reserved_port() {
        let v4 = IpAddr::from(Ipv4Addr::LOCALHOST);
        serve_once(&reserve_port(v4).unwrap(), v4);
        serve_once(&reserve_any_port().unwrap(), v4);
        if has_ipv6() {
            let v6 = IpAddr::from(Ipv6Addr::LOCALHOST);
            serve_once(&reserve_port(v6).unwrap(), v6);
            serve_once(&reserve_any_port().unwrap(), v6);
        }
    }

    #[test]
    fn a_store_on_all_addresses_can_listen_on_a_reserved_port() {
        let reservation = reserve_any_port().unwrap();
        let any: IpAddr = if has_ipv6() { Ipv6Addr::UNSPECIFIED.into() } else { Ipv4Addr::UNSPECIFIED.into() };
        let _listener = TcpListener::bind((any, reservation.port())).unwrap();
        TcpStream::connect((Ipv4Addr::LOCALHOST, reservation.port())).unwrap();
    }

    #[test]
    fn nobody_answers_on_a_reserved_port_before_rank_0_and_after_it_the_port_is_still_held() {
        let ip = IpAddr::from(Ipv4Addr::LOCALHOST);
        let reservation = reserve_port(ip).unwrap();
        let refused = TcpStream::connect((ip, reservation.port())).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::ConnectionRefused);
        serve_once(&reservation, ip);
        // When rank 0 has died, a plain bind, without SO_REUSEADDR, still finds the port taken.
        assert_eq!(plain_bind(ip, reservation.port()), Err(rustix::io::Errno::ADDRINUSE));
    }

    fn plain_bind(ip: IpAddr, port: u16) -> Result<(), rustix::io::Errno> {
        let socket = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None)?;
        rustix::net::bind(&socket, &SocketAddr::new(ip, port))
    }

    #[test]
    fn reservations_never_share_a_port() {
        let held: Vec<Reservation> = (0..200).map(|_| reserve_any_port().unwrap()).collect();
        let mut ports: Vec<u16> = held.iter().map(Reservation::port).collect();
        ports.sort_unstable();
        ports.dedup();
        assert_eq!(ports.len(), held.len());
    }

    #[test]
    fn a_foreign_address_cannot_be_reserved() {
        let error = reserve_port("192.0.2.1".parse().unwrap()).unwrap_err().to_string();
        assert!(error.contains("192.0.2.1") && error.contains("is the address this machine's"), "{error}");
    }
}
