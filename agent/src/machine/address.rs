//! The address at which other nodes reach this one.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs, UdpSocket};

use elastic_coordinator::job::Endpoint;

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

/// The address that other nodes are told; `stores` are where the job meets. May take as long as the resolver does.
pub fn advertised(flag: Option<&str>, stores: &[Endpoint], hostname: &str) -> Advertised {
    let by_route = |store: &Endpoint| {
        let address = advertised_address(flag, Some(store), hostname);
        (address.source != AddressSource::Hostname).then_some(address)
    };
    let address = stores.iter().find_map(by_route);
    address.unwrap_or_else(|| advertised_address(flag, stores.first(), hostname))
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
}
