//! The ports that this node listens on for other nodes, and the ports that it holds for rank 0.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::os::fd::OwnedFd;

use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};

#[derive(Debug, thiserror::Error)]
#[error("reserve a port for rank 0 on {ip}: {source}; is the address this machine's, and are ports free?")]
pub(crate) struct ReserveError {
    pub ip: IpAddr,
    pub source: io::Error,
}

/// Listens for other agents: on `bind` if that is given, else on `address` alone if it is a loopback one, else on all
/// interfaces, because it is not known here which of them a peer comes in by.
pub(crate) fn listen(bind: Option<IpAddr>, address: &str, port: u16) -> io::Result<tokio::net::TcpListener> {
    let listen = |ip| elastic_store::listener::listen(SocketAddr::new(ip, port));
    match bind.or_else(|| address.parse().ok().filter(IpAddr::is_loopback)) {
        Some(ip) => listen(ip),
        None => listen(Ipv6Addr::UNSPECIFIED.into()).or_else(|_| listen(Ipv4Addr::UNSPECIFIED.into())),
    }
}

/// A TCP port that stays reserved for this agent until dropped. One process that sets SO_REUSEADDR may listen on it.
///
/// The socket is bound but does not listen. Linux lets a second socket share the port if both have SO_REUSEADDR, which
/// torch's TCPStore sets. So rank 0's port is known before rank 0 runs, and no other process can get it in between:
/// neither by asking for any free port nor for an outgoing connection.
#[derive(Debug)]
pub(crate) struct Reservation {
    _socket: OwnedFd,
    ip: IpAddr,
    port: u16,
}

/// The most connections that may wait to be accepted. The kernel caps this at `net.core.somaxconn`.
const BACKLOG: i32 = 1 << 14;

impl Reservation {
    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    /// Listens on the port, in this process.
    pub(crate) fn listen(&self) -> Result<TcpListener, ReserveError> {
        let listen = || {
            let socket = shared_socket(self.ip, self.port)?;
            rustix::net::listen(&socket, BACKLOG)?;
            Ok(TcpListener::from(socket))
        };
        listen().map_err(|source| ReserveError { ip: self.ip, source })
    }
}

/// Reserves a port that the kernel picks, on one address of this machine. If the address is unspecified, the port is
/// reserved on all addresses.
pub(crate) fn reserve_port(ip: IpAddr) -> Result<Reservation, ReserveError> {
    reserve(ip).map_err(|source| ReserveError { ip, source })
}

/// Reserves a port on all addresses. If the machine has IPv6, the port is reserved for IPv6 and IPv4 at once, as
/// TCPStore needs it.
pub(crate) fn reserve_any_port() -> Result<Reservation, ReserveError> {
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
    use std::net::{TcpStream, UdpSocket};

    use super::*;

    fn has_ipv6() -> bool {
        UdpSocket::bind("[::1]:0").is_ok()
    }

    /// Listens as TCPStore does: SO_REUSEADDR, then bind and listen. (The standard library sets SO_REUSEADDR for
    /// listeners.)
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
    fn a_reserved_port_is_silent_before_rank_0_and_still_held_after_it() {
        let ip = IpAddr::from(Ipv4Addr::LOCALHOST);
        let reservation = reserve_port(ip).unwrap();
        let refused = TcpStream::connect((ip, reservation.port())).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::ConnectionRefused);
        serve_once(&reservation, ip);
        // When rank 0 has died, a plain bind without SO_REUSEADDR still finds the port taken.
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
