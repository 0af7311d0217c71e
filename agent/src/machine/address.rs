//! The address at which other nodes reach this one.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs, UdpSocket};

use elastic_rendezvous::job::Endpoint;
use elastic_store::embedded::names_loopback;
use elastic_store::tls::TlsFiles;

use crate::machine::interfaces;

/// How other nodes reach this one, as the command line says.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct NetworkOptions {
    /// The address that peers use, if it is given.
    pub local_addr: Option<String>,
    /// Whether gloo and NCCL are to use the interface whose address peers use.
    pub pin_interface: bool,
    /// The address on which this agent listens for other nodes. None: a loopback address that it advertises, else all.
    pub bind: Option<IpAddr>,
    /// The port on which it listens for other agents. 0: the kernel picks one.
    pub port: u16,
    /// Mutual TLS with other agents and coordinators, and to the store that one of them serves.
    pub tls: Option<TlsFiles>,
    /// Whether every host that reaches a store without TLS is trusted.
    pub insecure: bool,
}

impl NetworkOptions {
    /// Whether only this machine reaches what this agent listens on, for a job that meets there.
    pub(crate) fn stays_here(&self, store: &Endpoint) -> bool {
        self.bind.is_some_and(|ip| ip.is_loopback()) || names_loopback(&store.host)
    }

    /// Whether every host that reaches it can use a store that this agent serves there, and no flag says that this is
    /// meant.
    pub(crate) fn leaves_open(&self, store: &Endpoint) -> bool {
        self.tls.is_none() && !self.insecure && !self.stays_here(store)
    }
}

const BY_FLAG: &str = "as --local-addr says";
const BY_ROUTE: &str = "the interface that leads to the store";
const BY_NAME: &str = "this host's name, as no route is known; if peers cannot resolve it, set --local-addr";

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Advertised {
    /// A name or an address. An IPv6 address has no brackets.
    pub address: String,
    /// Why it is this one.
    why: &'static str,
}

impl fmt::Display for Advertised {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.address, self.why)
    }
}

/// Addresses of the documentation networks (RFC 5737, RFC 3849). They are never on this machine, so the route to them
/// is the way out.
const ELSEWHERE: [SocketAddr; 2] = [
    SocketAddr::new(IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1)), 9),
    SocketAddr::new(IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1)), 9),
];

/// The address at which peers reach this node: `flag` if it is given, else the address of the interface that leads to
/// the first store with a route, else `hostname`. Resolves the stores' names, which may take as long as the resolver
/// does. Sends nothing itself.
pub(crate) fn advertised(flag: Option<&str>, stores: &[Endpoint], hostname: &str) -> Advertised {
    let (address, why) = match flag {
        Some(address) => (address.to_owned(), BY_FLAG),
        // Without an endpoint the job runs on this machine alone.
        None if stores.is_empty() => (Ipv4Addr::LOCALHOST.to_string(), BY_ROUTE),
        None => match stores.iter().find_map(route_to) {
            Some(ip) => (ip.to_string(), BY_ROUTE),
            None => (hostname.to_owned(), BY_NAME),
        },
    };
    Advertised { address, why }
}

fn route_to(store: &Endpoint) -> Option<IpAddr> {
    let source = (store.host.as_str(), store.port).to_socket_addrs().ok()?.find_map(route_source)?;
    Some(for_peers(source, &store.host, || ELSEWHERE.into_iter().find_map(route_source)))
}

/// Chooses between the local address on the route to the store and the address of the way out.
///
/// Debian gives a host's own name the address 127.0.1.1. A store on this host does not mean that the peers are on it
/// too. So a loopback address is replaced by the address of the interface that leads out, where there is one, unless
/// the user wrote a loopback address.
fn for_peers(source: IpAddr, store: &str, way_out: impl FnOnce() -> Option<IpAddr>) -> IpAddr {
    if source.is_loopback() && !names_loopback(store) { way_out().unwrap_or(source) } else { source }
}

/// Why other nodes may not reach this one at an address that the user gave. Resolves a name, which may take as long as
/// the resolver does.
pub(crate) fn foreign(given: &str) -> Option<String> {
    let interfaces = interfaces::all().ok()?;
    let own = |ip: IpAddr| ip.is_loopback() || interfaces.iter().any(|interface| interface.ip == ip);
    const TRANSLATED: &str = "is no address of this machine, so it must be translated on the way; if it is another \
                              machine's, leave the flag out";
    let here = (given, 0).to_socket_addrs().map(|mut addresses| addresses.any(|address| own(address.ip())));
    let why = match here {
        Ok(true) => return None,
        Ok(false) => TRANSLATED.to_owned(),
        Err(error) => format!("cannot be resolved here: {error}"),
    };
    Some(format!("--local-addr (or --peer-port, --master-addr): {given} {why}"))
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

#[cfg(test)]
mod tests {
    use super::*;

    fn endpoint(host: &str) -> Endpoint {
        Endpoint { host: host.into(), port: 2379 }
    }

    fn has_ipv6() -> bool {
        UdpSocket::bind("[::1]:0").is_ok()
    }

    #[test]
    fn the_flag_goes_before_the_route_and_the_route_before_the_name() {
        let address = |flag: Option<&str>, stores: &[&str]| {
            let stores: Vec<Endpoint> = stores.iter().map(|host| endpoint(host)).collect();
            let advertised = advertised(flag, &stores, "myhost");
            (advertised.address, advertised.why)
        };
        assert_eq!(address(Some("node7"), &["127.0.0.1"]), ("node7".into(), BY_FLAG));
        assert_eq!(address(None, &["127.0.0.1"]), ("127.0.0.1".into(), BY_ROUTE));
        assert_eq!(address(None, &["localhost"]).1, BY_ROUTE);
        assert_eq!(address(None, &[]), ("127.0.0.1".into(), BY_ROUTE));
        // `invalid` never resolves (RFC 6761).
        assert_eq!(address(None, &["etcd.invalid"]), ("myhost".into(), BY_NAME));
        assert_eq!(address(None, &["etcd.invalid", "127.0.0.1"]), ("127.0.0.1".into(), BY_ROUTE));
        if has_ipv6() {
            assert_eq!(address(None, &["::1"]), ("::1".into(), BY_ROUTE));
        }
    }

    #[test]
    fn an_address_that_no_interface_has_is_named() {
        assert_eq!(foreign("127.0.0.1"), None);
        // RFC 5737
        assert!(foreign("192.0.2.7").is_some_and(|why| why.contains("192.0.2.7 is no address of this machine")));
        assert!(foreign("node.invalid").is_some_and(|why| why.contains("cannot be resolved here")));
    }

    #[test]
    fn the_own_name_on_loopback_is_not_announced_if_another_address_leads_out() {
        let (debian, lan): (IpAddr, IpAddr) = ("127.0.1.1".parse().unwrap(), "10.0.0.5".parse().unwrap());
        let out = || Some(lan);
        assert_eq!(for_peers(debian, "node0", out), lan, "the host's own name");
        assert_eq!(for_peers(debian, "node0", || None), debian, "a machine without a network");
        for written in ["127.0.1.1", "LOCALHOST", "::1"] {
            assert_eq!(for_peers(debian, written, out), debian, "{written}: the user's wish");
        }
        assert_eq!(for_peers(lan, "node0", || unreachable!()), lan);
    }
}
