//! Who refuses a connection: the host, whose kernel knows that no process listens there, or a firewall on the way, which
//! knows nothing of it. Firewalls answer by ICMP, unless they are set to send a TCP reset: then both look alike.
#![allow(unsafe_code)]

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use elastic_rendezvous::job::Endpoint;
use rustix::net::{RecvFlags, recv};
use tokio::net::{TcpSocket, lookup_host};

/// How a connection is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Knock {
    /// Something listens there.
    Accepted,
    /// The host says that nothing does.
    Refused,
    /// A firewall says so.
    Rejected,
    /// No one says anything.
    Unclear,
}

/// Connects to a port, and hangs up. Of a host with several addresses all must say the same.
pub(crate) async fn knock(peer: &Endpoint) -> Knock {
    let Ok(addresses) = lookup_host((peer.host.as_str(), peer.port)).await else { return Knock::Unclear };
    let mut all = None;
    for address in addresses {
        match knock_at(address).await.unwrap_or(Knock::Unclear) {
            Knock::Accepted => return Knock::Accepted,
            one if all.is_none_or(|all| all == one) => all = Some(one),
            _ => return Knock::Unclear,
        }
    }
    all.unwrap_or(Knock::Unclear)
}

async fn knock_at(address: SocketAddr) -> io::Result<Knock> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    keep_errors(&socket, address.is_ipv4())?;
    let same = socket.as_fd().try_clone_to_owned()?;
    Ok(match socket.connect(address).await {
        Ok(_) => Knock::Accepted,
        Err(error) if error.kind() != io::ErrorKind::ConnectionRefused => Knock::Unclear,
        Err(_) if has_errors(&same) => Knock::Rejected,
        Err(_) => Knock::Refused,
    })
}

/// Has the kernel keep what comes by ICMP for a socket that connects. Linux does so since 5.8.
fn keep_errors(socket: &TcpSocket, ipv4: bool) -> io::Result<()> {
    let (level, name) =
        if ipv4 { (libc::IPPROTO_IP, libc::IP_RECVERR) } else { (libc::IPPROTO_IPV6, libc::IPV6_RECVERR) };
    let on: libc::c_int = 1;
    // SAFETY: the descriptor is open, and the value is as long as is said.
    let code = unsafe {
        libc::setsockopt(socket.as_raw_fd(), level, name, (&raw const on).cast(), size_of_val(&on) as libc::socklen_t)
    };
    if code == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

fn has_errors(socket: &OwnedFd) -> bool {
    recv(socket, &mut [0_u8; 64], RecvFlags::ERRQUEUE | RecvFlags::DONTWAIT).is_ok()
}

#[cfg(test)]
pub(crate) mod tests {
    use std::net::{Ipv4Addr, SocketAddrV4, TcpStream};

    use rustix::net::{AddressFamily, SendFlags, SocketType, bind, getsockname, ipproto, listen, sendto, socket};

    use super::*;

    const SYN: u8 = 2;
    const ACK: u8 = 16;

    /// A port behind a firewall that rejects, while the result is kept. None where this user may not write such packets.
    pub(crate) fn rejecting() -> Option<(Endpoint, impl Sized)> {
        let raw = |protocol| socket(AddressFamily::INET, SocketType::RAW, Some(protocol)).ok();
        let (packets, answers) = (raw(ipproto::TCP)?, raw(ipproto::ICMP)?);
        let listener = socket(AddressFamily::INET, SocketType::STREAM, None).ok()?;
        bind(&listener, &SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0)).ok()?;
        listen(&listener, 0).ok()?;
        let address = SocketAddrV4::try_from(getsockname(&listener).ok()?).ok()?;
        // Its queue is full, so the kernel says nothing to others.
        let first = TcpStream::connect(address).ok()?;
        std::thread::spawn(move || {
            let mut packet = [0; 2048];
            while let Ok((length, _)) = recv(&packets, &mut packet, RecvFlags::empty()) {
                let header = usize::from(packet[0] & 15) * 4;
                let (to, flags) = (&packet[header + 2..header + 4], packet[header + 13]);
                if to == address.port().to_be_bytes() && flags & (SYN | ACK) == SYN && length >= header + 20 {
                    let answer = unreachable(&packet[..header + 8]);
                    let _ = sendto(&answers, &answer, SendFlags::empty(), &address);
                }
            }
        });
        Some((Endpoint { host: address.ip().to_string(), port: address.port() }, (listener, first)))
    }

    /// ICMP's answer to this packet: its port is unreachable (RFC 792).
    fn unreachable(packet: &[u8]) -> Vec<u8> {
        let mut answer = [&[3, 3, 0, 0, 0, 0, 0, 0], packet].concat();
        let sum: u32 = answer.chunks(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]]))).sum();
        let sum = (sum >> 16) + (sum & 0xffff);
        answer[2..4].copy_from_slice(&(!((sum >> 16) + sum) as u16).to_be_bytes());
        answer
    }
}
