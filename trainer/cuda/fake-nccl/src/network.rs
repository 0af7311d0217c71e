//! How the stand-in's processes find each other and exchange bytes: sockets on loopback between each two. Everything
//! can be cancelled at any time.

use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};
use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// `ncclUniqueId`: here a port, and a number that only the communicator's ranks know.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Id(pub(crate) [u8; 128]);

/// Bytes for a rank.
pub(crate) type Frame = (usize, Vec<u8>);

const PAUSE: Duration = Duration::from_millis(1);

/// Opens a port where the ranks of one communicator meet, once.
pub(crate) fn serve_root() -> Id {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let (port, secret) = (listener.local_addr().unwrap().port(), RandomState::new().hash_one(0));
    std::thread::spawn(move || {
        let mut ranks: BTreeMap<u64, (TcpStream, u64)> = BTreeMap::new();
        let never = AtomicBool::new(false);
        while let Ok((visitor, _)) = listener.accept() {
            let Some([theirs, rank, all, port]) = read_numbers(&visitor, &never) else { continue };
            if theirs == secret {
                ranks.insert(rank, (visitor, port));
            }
            if ranks.len() as u64 == all {
                break;
            }
        }
        let ports: Vec<u8> = ranks.values().flat_map(|(_, port)| port.to_le_bytes()).collect();
        for (visitor, _) in ranks.values_mut() {
            let _ = visitor.write_all(&ports);
        }
    });
    let mut id = Id([0; 128]);
    id.0[..8].copy_from_slice(&secret.to_le_bytes());
    id.0[8..10].copy_from_slice(&port.to_le_bytes());
    id
}

/// Connects to the other ranks. `None` if it is cancelled, or no process listens on the id's port.
pub(crate) fn meet(id: Id, rank: usize, ranks: usize, cancel: &AtomicBool) -> Option<Mesh> {
    let secret = u64::from_le_bytes(id.0[..8].try_into().unwrap());
    let port = u16::from_le_bytes(id.0[8..10].try_into().unwrap());
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).ok()?;
    listener.set_nonblocking(true).ok()?;
    let own = listener.local_addr().ok()?.port();
    let root = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).ok()?;
    write_numbers(&root, [secret, rank as u64, ranks as u64, u64::from(own)], cancel)?;
    let mut ports = vec![0; ranks * 8];
    read(&root, &mut ports, cancel)?;
    let ports: Vec<u16> = ports.chunks(8).map(|port| u64::from_le_bytes(port.try_into().unwrap()) as u16).collect();
    Mesh::connect(secret, rank, &ports, &listener, cancel)
}

/// The ranks of a communicator, each connected to all others.
pub(crate) struct Mesh {
    rank: usize,
    /// None at this rank's own place.
    links: Vec<Option<TcpStream>>,
}

impl Mesh {
    fn connect(secret: u64, rank: usize, ports: &[u16], listener: &TcpListener, cancel: &AtomicBool) -> Option<Mesh> {
        let mut links: Vec<Option<TcpStream>> = ports.iter().map(|_| None).collect();
        for peer in 0..rank {
            let link = TcpStream::connect((Ipv4Addr::LOCALHOST, ports[peer])).ok()?;
            write_numbers(&link, [secret, rank as u64], cancel)?;
            links[peer] = Some(link);
        }
        while links.iter().enumerate().any(|(peer, link)| peer > rank && link.is_none()) {
            if cancel.load(Ordering::SeqCst) {
                return None;
            }
            let Ok((visitor, _)) = listener.accept() else {
                std::thread::sleep(PAUSE);
                continue;
            };
            if let Some([theirs, peer]) = read_numbers(&visitor, cancel)
                && theirs == secret
            {
                *links.get_mut(peer as usize)? = Some(visitor);
            }
        }
        Some(Mesh { rank, links })
    }

    pub(crate) fn rank(&self) -> usize {
        self.rank
    }

    pub(crate) fn ranks(&self) -> usize {
        self.links.len()
    }

    /// Sends frames, and receives frames from the given ranks and of the given lengths, in order. `None` if it is
    /// cancelled, or if a peer is gone and deaths are `seen`.
    pub(crate) fn exchange(
        &self,
        out: Vec<Frame>,
        into: &[(usize, usize)],
        cancel: &AtomicBool,
        seen: bool,
    ) -> Option<Vec<Vec<u8>>> {
        let received = std::thread::scope(|scope| {
            let mut by_peer: BTreeMap<usize, Vec<u8>> = BTreeMap::new();
            for (peer, bytes) in out {
                let stream = by_peer.entry(peer).or_default();
                stream.extend((bytes.len() as u64).to_le_bytes());
                stream.extend(bytes);
            }
            let writers: Vec<_> = by_peer
                .into_iter()
                .map(|(peer, bytes)| scope.spawn(move || write(self.links[peer].as_ref()?, &bytes, cancel)))
                .collect();
            let frames: Option<Vec<Vec<u8>>> = into
                .iter()
                .map(|&(peer, length)| {
                    let link = self.links[peer].as_ref()?;
                    let [theirs] = read_numbers(link, cancel)?;
                    // Another length means that the ranks do different operations. Then nothing is received.
                    let mut frame = vec![0; (theirs == length as u64).then_some(length)?];
                    read(link, &mut frame, cancel).map(|()| frame)
                })
                .collect();
            let written: Vec<Option<()>> = writers.into_iter().map(|writer| writer.join().unwrap()).collect();
            frames.filter(|_| written.iter().all(Option::is_some))
        });
        while received.is_none() && !seen && !cancel.load(Ordering::SeqCst) {
            std::thread::sleep(PAUSE);
        }
        received
    }
}

fn write_numbers<const N: usize>(link: &TcpStream, numbers: [u64; N], cancel: &AtomicBool) -> Option<()> {
    let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
    write(link, &bytes, cancel)
}

fn write(mut link: &TcpStream, mut bytes: &[u8], cancel: &AtomicBool) -> Option<()> {
    link.set_write_timeout(Some(PAUSE)).ok()?;
    while !bytes.is_empty() {
        match link.write(bytes) {
            Ok(0) => return None,
            Ok(sent) => bytes = &bytes[sent..],
            Err(error) if is_passing(&error) => {}
            Err(_) => return None,
        }
        if cancel.load(Ordering::SeqCst) {
            return None;
        }
    }
    Some(())
}

fn read_numbers<const N: usize>(link: &TcpStream, cancel: &AtomicBool) -> Option<[u64; N]> {
    let mut bytes = vec![0; N * 8];
    read(link, &mut bytes, cancel)?;
    Some(std::array::from_fn(|i| u64::from_le_bytes(bytes[8 * i..8 * i + 8].try_into().unwrap())))
}

fn read(mut link: &TcpStream, mut into: &mut [u8], cancel: &AtomicBool) -> Option<()> {
    link.set_nonblocking(false).ok()?;
    link.set_read_timeout(Some(PAUSE)).ok()?;
    while !into.is_empty() {
        match link.read(into) {
            Ok(0) => return None,
            Ok(got) => into = &mut into[got..],
            Err(error) if is_passing(&error) => {}
            Err(_) => return None,
        }
        if cancel.load(Ordering::SeqCst) {
            return None;
        }
    }
    Some(())
}

fn is_passing(error: &std::io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted)
}
