//! How the ranks of a round find each other.
//!
//! Rank 0 listens on the master's port. If its agent serves a store there, rank 0 listens on any free port and
//! publishes it in the store. Every other rank opens a port, says hello to rank 0, and gets all addresses once all
//! ranks have come. Then each rank connects to the ranks below it and accepts those above. Each connection starts with
//! a hello that carries job, round, rank and settings. A peer that does not belong to the group gets the reason.

mod limits;
mod store;

use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::ops::Range;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tracing::{debug, warn};

use super::{CollectiveError, GroupConfig};
use crate::identity::{RunIdentity, listed};
use crate::stop::{GLANCE, Stop};

/// The start of each message, which distinguishes a peer from another program.
const MAGIC: [u8; 8] = *b"ELASTIC1";
const PREFIX: usize = MAGIC.len() + 4;
/// The longest hello, whose settings are a line of words, and the longest answer, which has an address for each rank.
const MAX_HELLO: usize = 16 * 1024;
/// The longest settings that a hello has in full. Were each of their characters escaped, the hello would still not be
/// too long.
const MAX_SETTINGS: usize = 2 * 1024;
const MAX_ANSWER: usize = 16 * 1024 * 1024;
/// How long a connection may be open without a hello.
const HELLO_TIME: Duration = Duration::from_secs(5);
/// The time of one attempt to connect. A stop may have to wait this long.
const CONNECT_TIME: Duration = Duration::from_secs(1);

#[derive(Debug, Serialize, Deserialize)]
struct Hello {
    job: String,
    round: u64,
    rank: u32,
    world_size: u32,
    settings: String,
    /// The port where this rank accepts those above it. The receiver of the hello sees its address.
    port: u16,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Answer {
    /// By rank, from 1; empty when another rank than 0 answers.
    Welcome(Vec<SocketAddr>),
    Refused(String),
}

/// One bootstrap.
struct Bootstrap<'a> {
    config: &'a GroupConfig,
    stop: &'a Stop,
    started: Instant,
    time: Duration,
}

/// Connects to all peers. Returns the sockets by rank; they do not block, and send without delay.
pub(super) fn connect(
    config: &GroupConfig,
    time: Duration,
    stop: &Stop,
) -> Result<Vec<Option<TcpStream>>, CollectiveError> {
    let mut links: Vec<Option<TcpStream>> = (0..config.world_size).map(|_| None).collect();
    if config.world_size > 1 {
        limits::raise(config.world_size);
        let bootstrap = Bootstrap { config, stop, started: Instant::now(), time };
        if config.rank == 0 { bootstrap.lead(&mut links)? } else { bootstrap.follow(&mut links)? }
    }
    Ok(links)
}

impl Bootstrap<'_> {
    fn lead(&self, links: &mut [Option<TcpStream>]) -> Result<(), CollectiveError> {
        let master = self.resolve_master()?;
        let at = listening(master.ip());
        let listener = if self.config.agent_store {
            let listener = listen(SocketAddr::new(at, 0))?;
            let port = listener.local_addr().map_err(|cause| listen_error(master, cause))?.port();
            let (_, store) = self.dial(0, || Ok(master))?;
            self.publish(&store, port)?;
            listener
        } else {
            listen(SocketAddr::new(at, master.port()))?
        };
        let mut ports = vec![0; links.len()];
        self.accept(&listener, 1..links.len(), links, |rank, port| ports[rank] = port)?;
        for (rank, link) in links.iter().enumerate() {
            let Some(link) = link else { continue };
            let lost = |cause: io::Error| CollectiveError::PeerLost { rank, cause: cause.to_string() };
            // A member on this host may have come through the loopback device, where other hosts cannot reach it. They
            // reach it at the address at which they have reached this process.
            let here = link.local_addr().map_err(lost)?.ip();
            let mut addresses = Vec::with_capacity(links.len() - 1);
            for (other, port) in links.iter().zip(&ports).skip(1) {
                let seen = other.as_ref().map_or(Ok(here), |other| other.peer_addr().map(|addr| addr.ip()));
                let seen = seen.map_err(lost)?;
                addresses.push(SocketAddr::new(if seen.is_loopback() { here } else { seen }, *port));
            }
            self.send(link, rank, &Answer::Welcome(addresses))?;
        }
        Ok(())
    }

    fn follow(&self, links: &mut [Option<TcpStream>]) -> Result<(), CollectiveError> {
        let rank = self.config.rank as usize;
        let (master, zero) = self.dial(0, || {
            let master = self.resolve_master()?;
            if self.config.agent_store { self.look_up(master) } else { Ok(master) }
        })?;
        let listener = listen(SocketAddr::new(listening(master.ip()), 0))?;
        let port = listener.local_addr().map_err(|cause| listen_error(master, cause))?.port();
        let addresses = self.greet(&zero, 0, port)?;
        links[0] = Some(zero);
        for (peer, address) in (1..rank).zip(addresses) {
            let (_, link) = self.dial(peer, || Ok(address))?;
            self.greet(&link, peer, port)?;
            links[peer] = Some(link);
        }
        self.accept(&listener, rank + 1..links.len(), links, |_, _| {})
    }

    /// Says hello, waits for the answer, and returns its addresses.
    fn greet(&self, link: &TcpStream, rank: usize, port: u16) -> Result<Vec<SocketAddr>, CollectiveError> {
        let GroupConfig { job, round, rank: own_rank, world_size, settings, .. } = self.config.clone();
        let settings = shortened(settings);
        self.send(link, rank, &Hello { job, round, rank: own_rank, world_size, settings, port })?;
        let mut message = Message::default();
        loop {
            match message.read(link, MAX_ANSWER) {
                Ok(Some(Answer::Welcome(addresses))) => return Ok(addresses),
                Ok(Some(Answer::Refused(reason))) => return Err(CollectiveError::Refused { rank, reason }),
                Ok(None) => self.wait(&[(link, PollFlags::IN)], &[rank])?,
                Err(error) => return Err(CollectiveError::PeerLost { rank, cause: error.to_string() }),
            };
        }
    }

    /// Accepts the peers in `expected`, and calls `on_hello` with each one's rank and port. Rank 0 answers later, when
    /// it knows all addresses; the other ranks answer at once.
    fn accept(
        &self,
        listener: &TcpListener,
        expected: Range<usize>,
        links: &mut [Option<TcpStream>],
        mut on_hello: impl FnMut(usize, u16),
    ) -> Result<(), CollectiveError> {
        let own = |cause| CollectiveError::Listen { addr: "the bootstrap's port".to_owned(), cause };
        listener.set_nonblocking(true).map_err(own)?;
        let mut visitors: Vec<(TcpStream, Message, Instant)> = Vec::new();
        loop {
            let missing: Vec<usize> = expected.clone().filter(|&rank| links[rank].is_none()).collect();
            if missing.is_empty() {
                return Ok(());
            }
            while let Some((visitor, address)) = self.accepted(listener)? {
                debug!(%address, "a peer connects");
                // There is room for every peer and 16 others. Then the connection that was silent longest is closed.
                if visitors.len() > links.len() + 16 {
                    visitors.remove(0);
                }
                if prepare(&visitor).is_ok() {
                    visitors.push((visitor, Message::default(), Instant::now()));
                }
            }
            for (visitor, mut message, since) in std::mem::take(&mut visitors) {
                match message.read::<Hello>(&visitor, MAX_HELLO) {
                    Ok(None) if since.elapsed() < HELLO_TIME => visitors.push((visitor, message, since)),
                    Ok(None) => debug!("a connection sent no hello in time"),
                    Err(error) => debug!(%error, "a connection does not speak this protocol"),
                    Ok(Some(hello)) => match self.judge(&hello, &expected, links) {
                        Ok(rank) => {
                            if self.config.rank > 0 {
                                self.send(&visitor, rank, &Answer::Welcome(Vec::new()))?;
                            }
                            on_hello(rank, hello.port);
                            links[rank] = Some(visitor);
                        }
                        Err(reason) => {
                            warn!(%reason, "refused a peer");
                            // The group is not at fault if the answer cannot be sent.
                            let _ = self.send(&visitor, hello.rank as usize, &Answer::Refused(reason));
                        }
                    },
                }
            }
            let mut watched = vec![(None, PollFd::new(listener, PollFlags::IN))];
            watched.extend(visitors.iter().map(|(visitor, ..)| (None, PollFd::new(visitor, PollFlags::IN))));
            let present = links.iter().enumerate().filter_map(|(rank, link)| Some((rank, link.as_ref()?)));
            watched.extend(present.map(|(rank, link)| (Some(rank), PollFd::new(link, PollFlags::RDHUP))));
            if expected.clone().any(|rank| links[rank].is_none()) {
                self.wait_for(watched, &missing)?;
            }
        }
    }

    /// The next connection, if there is one. Too few descriptors are an error: with one more in the queue, a wait for
    /// the listener would return at once, again and again.
    fn accepted(&self, listener: &TcpListener) -> Result<Option<(TcpStream, SocketAddr)>, CollectiveError> {
        match listener.accept() {
            Ok(accepted) => Ok(Some(accepted)),
            Err(error) => limits::descriptors(&error, self.config.world_size).map_or(Ok(None), Err),
        }
    }

    /// The rank of the peer that sends this hello, or why it is refused.
    fn judge(&self, hello: &Hello, expected: &Range<usize>, links: &[Option<TcpStream>]) -> Result<usize, String> {
        let GroupConfig { job, round, rank, world_size, settings, .. } = self.config;
        let rank_there = hello.rank as usize;
        if hello.job != *job {
            Err(format!("this is job {job}, not {}", hello.job))
        } else if hello.round != *round {
            Err(format!("this is round {round} of job {job}, not round {}", hello.round))
        } else if hello.world_size != *world_size {
            Err(format!("this world has {world_size} ranks, not {}", hello.world_size))
        } else if hello.settings != shortened(settings.clone()) {
            let read = |words: &str| RunIdentity::parse(words);
            let differences = read(&shortened(settings.clone())).differences(&read(&hello.settings));
            Err(format!("rank {rank} does not run the same as rank {rank_there}, but {}", listed(&differences)))
        } else if !expected.contains(&rank_there) {
            Err(format!("rank {rank} does not expect a rank {rank_there}"))
        } else if links[rank_there].is_some() {
            Err(format!("rank {rank_there} is here already"))
        } else {
            Ok(rank_there)
        }
    }

    /// Connects to a peer, and tries again until it listens.
    fn dial(
        &self,
        rank: usize,
        address: impl Fn() -> Result<SocketAddr, CollectiveError>,
    ) -> Result<(SocketAddr, TcpStream), CollectiveError> {
        let mut pause = Duration::from_millis(2);
        loop {
            let result = address().and_then(|address| {
                let link = TcpStream::connect_timeout(&address, CONNECT_TIME.min(self.left().max(GLANCE)));
                let link = link.and_then(|link| prepare(&link).map(|()| link));
                link.map(|link| (address, link)).map_err(|cause| {
                    match limits::descriptors(&cause, self.config.world_size) {
                        Some(error) => error,
                        None => CollectiveError::Address { address: address.to_string(), cause: cause.to_string() },
                    }
                })
            });
            let error = match result {
                Ok(connected) => return Ok(connected),
                Err(error @ CollectiveError::Descriptors { .. }) => return Err(error),
                Err(error) => error,
            };
            debug!(rank, %error, "cannot connect yet");
            if self.left().is_zero() {
                return Err(CollectiveError::Unreachable {
                    rank,
                    waited: self.started.elapsed(),
                    cause: Box::new(error),
                });
            }
            self.wait(&[], &[rank])?;
            std::thread::sleep(pause);
            pause = (pause * 2).min(GLANCE);
        }
    }

    fn resolve_master(&self) -> Result<SocketAddr, CollectiveError> {
        let GroupConfig { master_addr, master_port, .. } = self.config;
        let error = |cause: String| CollectiveError::Address { address: master_addr.clone(), cause };
        let found: Vec<_> =
            (master_addr.as_str(), *master_port).to_socket_addrs().map_err(|cause| error(cause.to_string()))?.collect();
        let first = found.iter().find(|addr| addr.is_ipv4()).or(found.first());
        first.copied().ok_or_else(|| error("it has no address".to_owned()))
    }

    fn send<T: Serialize>(&self, link: &TcpStream, rank: usize, message: &T) -> Result<(), CollectiveError> {
        let lost = |cause: String| CollectiveError::PeerLost { rank, cause };
        let body = serde_json::to_vec(message).map_err(|error| lost(error.to_string()))?;
        let prefix = [&MAGIC[..], &(body.len() as u32).to_le_bytes()].concat();
        self.write(link, rank, &[prefix, body].concat(), lost)
    }

    /// Writes all bytes to a socket of `rank`'s.
    fn write(
        &self,
        mut link: &TcpStream,
        rank: usize,
        mut bytes: &[u8],
        failed: impl Fn(String) -> CollectiveError,
    ) -> Result<(), CollectiveError> {
        while !bytes.is_empty() {
            match link.write(bytes) {
                Ok(count) => bytes = &bytes[count..],
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => self.wait(&[(link, PollFlags::OUT)], &[rank])?,
                Err(error) => return Err(failed(error.to_string())),
            }
        }
        Ok(())
    }

    fn left(&self) -> Duration {
        self.time.saturating_sub(self.started.elapsed())
    }

    /// Sleeps until a socket is ready, at most for [`GLANCE`]. Fails at the deadline, at a stop, or when a later round
    /// forms.
    fn wait(&self, links: &[(&TcpStream, PollFlags)], missing: &[usize]) -> Result<(), CollectiveError> {
        self.wait_for(links.iter().map(|(link, flags)| (None, PollFd::new(*link, *flags))).collect(), missing)
    }

    /// As [`wait`](Self::wait). It also fails when the socket of a rank reports its end.
    fn wait_for(&self, watched: Vec<(Option<usize>, PollFd<'_>)>, missing: &[usize]) -> Result<(), CollectiveError> {
        if self.stop.is_raised() {
            return Err(CollectiveError::Stopped);
        }
        if let Some(forming) = self.stop.forming_after(self.config.round) {
            return Err(CollectiveError::Superseded { round: forming.round });
        }
        if self.left().is_zero() {
            return Err(CollectiveError::Missing { ranks: missing.to_vec(), waited: self.started.elapsed() });
        }
        let (ranks, mut fds): (Vec<_>, Vec<_>) = watched.into_iter().unzip();
        if fds.is_empty() {
            return Ok(());
        }
        let nanoseconds = i64::from(self.left().min(GLANCE).subsec_nanos());
        let ready = poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: nanoseconds as _ })).unwrap_or(0);
        let ended = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR;
        for (rank, fd) in ranks.iter().zip(&fds).filter(|_| ready > 0) {
            if let (Some(rank), true) = (*rank, fd.revents().intersects(ended)) {
                let cause = "it closed its connection before the group was complete".to_owned();
                return Err(CollectiveError::PeerLost { rank, cause });
            }
        }
        Ok(())
    }
}

/// A message as it arrives. No byte after it is read, since those belong to the first operation.
#[derive(Debug, Default)]
struct Message {
    bytes: Vec<u8>,
}

impl Message {
    /// The message, or none if it is not complete yet.
    fn read<T: DeserializeOwned>(&mut self, mut link: &TcpStream, limit: usize) -> io::Result<Option<T>> {
        let invalid = |what: String| io::Error::new(ErrorKind::InvalidData, what);
        loop {
            let wanted = match self.bytes.get(..PREFIX) {
                None => PREFIX,
                Some(prefix) if prefix[..MAGIC.len()] != MAGIC => return Err(invalid("unknown greeting".to_owned())),
                Some(prefix) => {
                    let length = u32::from_le_bytes(std::array::from_fn(|i| prefix[MAGIC.len() + i])) as usize;
                    if length > limit {
                        return Err(invalid(format!("a message of {length} bytes")));
                    }
                    PREFIX + length
                }
            };
            let have = self.bytes.len();
            if have == wanted && have > PREFIX {
                let message = serde_json::from_slice(&self.bytes[PREFIX..]);
                return message.map(Some).map_err(|error| invalid(error.to_string()));
            }
            self.bytes.resize(wanted, 0);
            let result = link.read(&mut self.bytes[have..]);
            self.bytes.truncate(have + result.as_ref().copied().unwrap_or(0));
            match result {
                Ok(0) => return Err(io::Error::new(ErrorKind::UnexpectedEof, "it closed its connection")),
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(None),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }
}

/// Settings as a hello has them: the beginning of long ones, and a checksum of all.
fn shortened(settings: String) -> String {
    if settings.len() <= MAX_SETTINGS {
        return settings;
    }
    let beginning: String = settings.chars().take(MAX_SETTINGS).collect();
    format!("{beginning}… ({} bytes, crc32c:{:08x})", settings.len(), crc32c::crc32c(settings.as_bytes()))
}

fn prepare(link: &TcpStream) -> io::Result<()> {
    link.set_nodelay(true)?;
    link.set_nonblocking(true)
}

/// Opens a port. The standard library sets SO_REUSEADDR; without it, the port that an agent holds (bound, not
/// listening) would be refused.
fn listen(address: SocketAddr) -> Result<TcpListener, CollectiveError> {
    TcpListener::bind(address).map_err(|cause| listen_error(address, cause))
}

fn listen_error(address: SocketAddr, cause: io::Error) -> CollectiveError {
    CollectiveError::Listen { addr: address.to_string(), cause }
}

/// The address at which a rank listens, given the master's. If the master's is a loopback address, all ranks are on
/// this host, and no other host needs to reach it.
fn listening(master: IpAddr) -> IpAddr {
    match master {
        master if master.is_loopback() => master,
        IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_settings_differ_where_only_their_ends_do() {
        let long = |end: &str| shortened("é".repeat(20_000) + end);
        assert!(long("a").len() < MAX_HELLO && long("a") == long("a") && long("a") != long("b"));
        assert_eq!(shortened("--lr 1".to_owned()), "--lr 1");
    }

    #[test]
    fn ranks_of_one_host_are_not_reached_from_others() {
        for (master, listens) in [
            ("127.0.0.1", "127.0.0.1"),
            ("127.0.1.1", "127.0.1.1"),
            ("::1", "::1"),
            ("10.0.0.7", "0.0.0.0"),
            ("fd00::7", "::"),
        ] {
            let (master, listens): (IpAddr, IpAddr) = (master.parse().unwrap(), listens.parse().unwrap());
            assert_eq!(listening(master), listens);
        }
    }
}
