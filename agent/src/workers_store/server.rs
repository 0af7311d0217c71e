//! The store's sockets. One thread waits for all of them. The meaning of the requests is in `state.rs`.
//!
//! The store has a thread of its own, so that load on the store does not delay the agent's leases and pulses, and they
//! do not delay the store. For an idle connection the server holds only its descriptor. It reads no request from a
//! client that does not take its answers, and closes connections that break the protocol or the budget.

use std::collections::BTreeSet;
use std::io::{self, Read};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::thread::JoinHandle;
use std::time::Duration;

use elastic_node::random_bytes;
use elastic_rendezvous::time::Time;
use elastic_store::listener::{Share, keep_alive};
use rustix::buffer::spare_capacity;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;
use rustix::net::SocketFlags;

use super::budget::{Account, Full};
use super::fence::{ADMITTED, Entry, Fence, Known, Turn};
use super::output::Output;
use super::state::{Client, Reply, State, Violation};
use super::wire::Decoder;

/// Limits on what a store may cost this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WorkersStoreLimits {
    /// Bytes of keys, values, waits, half-read requests and unsent answers, with their overhead.
    pub memory: usize,
    /// Most connections at once. Beyond this, connections that have never sent anything are closed, the oldest first.
    pub connections: usize,
    /// How long a client may take to complete its first request once it has begun it. A client that sends nothing at
    /// all may stay while there is room: torch 1.13 opens a second connection that it hardly ever uses.
    pub first_request: Duration,
}

impl Default for WorkersStoreLimits {
    /// 256 MiB, 65,536 connections and 30 seconds.
    fn default() -> WorkersStoreLimits {
        WorkersStoreLimits { memory: 256 << 20, connections: 1 << 16, first_request: Duration::from_secs(30) }
    }
}

/// What a connection itself costs in the budget.
const CONNECTION: usize = 512;
/// Most bytes held of a first request. torch's first request is always smaller: it waits for the others or pings.
const FIRST_REQUEST: usize = 128 * 1024;
/// Most bytes read at once from a connection whose host has not been introduced. Its first are all that is kept.
const WAITING: usize = 1024;
/// Most bytes read at once from one connection.
const CHUNK: usize = 64 * 1024;
/// A client with this many unsent bytes is not read from.
const UNSENT: usize = 1 << 20;
/// Most events and new connections handled in one turn.
const TURN: usize = 256;
/// Pause after running out of descriptors or memory.
const BREATH: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
/// How many offenders the log names.
const NAMED: u32 = 8;

const NOT_INTRODUCED: &str = "no agent of this round has introduced that host; if workers have a network of their own, \
                              as in a container, give --rdzv-conf workers_store_open=true";

const LISTENER: u64 = u64::MAX;
const STOP: u64 = u64::MAX - 1;

/// A running store. Dropping it ends the store: its port refuses connections, and open connections are closed.
#[derive(Debug)]
pub struct TcpStore {
    stop: OwnedFd,
    thread: Option<JoinHandle<()>>,
}

impl TcpStore {
    /// Serves an empty store on a listening socket. Clients that connected before and are already gone leave nothing
    /// behind. With `members` it serves only hosts whose agent introduces itself.
    pub fn serve(listener: TcpListener, limits: WorkersStoreLimits, members: Option<Known>) -> io::Result<TcpStore> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        let stop = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let heard = stop.try_clone()?;
        listener.set_nonblocking(true)?;
        epoll::add(&epoll, &heard, EventData::new_u64(STOP), EventFlags::IN)?;
        epoll::add(&epoll, &listener, EventData::new_u64(LISTENER), EventFlags::IN)?;
        let early = early(&listener);
        let connections = limits.connections.min(Share::Workers.connections());
        // The thread needs little stack, and even a node that only waits has one.
        let builder = std::thread::Builder::new().name("elastic-store".into()).stack_size(256 * 1024);
        let thread = builder.spawn(move || {
            let account = Account::new(limits.memory);
            let mut server = Server {
                epoll,
                _stop: heard,
                listener,
                accepting: true,
                most: connections,
                clients: Clients { slots: Vec::new(), woken: Vec::new() },
                free: Vec::new(),
                strangers: BTreeSet::new(),
                begun: BTreeSet::new(),
                first_request: limits.first_request,
                fence: members.map(Fence::new),
                let_in: Vec::new(),
                accepted: 0,
                state: State::new(account.clone()),
                account: account.with_reserve(),
                complaints: 0,
            };
            early.into_iter().for_each(|client| server.welcome(client));
            server.run();
        })?;
        Ok(TcpStore { stop, thread: Some(thread) })
    }
}

impl Drop for TcpStore {
    fn drop(&mut self) {
        let told = rustix::io::write(&self.stop, &1_u64.to_ne_bytes());
        if let (Ok(_), Some(thread)) = (told, self.thread.take()) {
            // The thread ends at once. A panic in it has been reported.
            let _ = thread.join();
        }
    }
}

/// Clients that connected before the store was served, and are still there.
fn early(listener: &TcpListener) -> Vec<TcpStream> {
    let mut clients = Vec::new();
    while let Ok(client) = rustix::net::accept_with(listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
        if !is(&client, PollFlags::RDHUP) {
            clients.push(TcpStream::from(client));
        }
    }
    clients
}

/// Whether a socket is in this state now.
fn is(socket: impl AsFd, state: PollFlags) -> bool {
    let mut polled = [PollFd::new(&socket, state)];
    poll(&mut polled, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).is_ok_and(|ready| ready > 0)
}

#[derive(Debug)]
struct Connection {
    socket: TcpStream,
    peer: Option<SocketAddr>,
    /// Its place among the connections that have not sent a complete request yet.
    stranger: Option<u64>,
    /// When its first request, which has begun, must be complete.
    whole_by: Option<Time>,
    entry: Entry,
    decoder: Decoder,
    /// Bytes charged for what the decoder holds, and for the connection.
    charged: usize,
    output: Output,
    interest: EventFlags,
}

impl Connection {
    /// Bytes that it has sent, and that are no request yet.
    fn held(&self) -> usize {
        self.decoder.held() + self.entry.held()
    }

    /// Charges what the connection holds now.
    fn charge(&mut self, account: &Account) -> Result<(), Full> {
        let now = CONNECTION + self.held();
        if now > self.charged {
            account.take(now - self.charged)?;
        } else {
            account.give(self.charged - now);
        }
        self.charged = now;
        Ok(())
    }
}

/// All connections except the current one, and which of them got something to send.
struct Clients {
    slots: Vec<Option<Box<Connection>>>,
    woken: Vec<u32>,
}

struct Server {
    epoll: OwnedFd,
    _stop: OwnedFd,
    listener: TcpListener,
    accepting: bool,
    most: usize,
    clients: Clients,
    free: Vec<u32>,
    /// Connections that have sent nothing yet: when they came, and their slots.
    strangers: BTreeSet<(u64, u32)>,
    /// Connections that have begun their first request: when it must be complete, and their slots.
    begun: BTreeSet<(Time, u32)>,
    first_request: Duration,
    /// Who is served; `None` for everybody.
    fence: Option<Fence>,
    /// Connections of a host that has just been let in.
    let_in: Vec<u32>,
    accepted: u64,
    state: State,
    account: Account,
    complaints: u32,
}

enum Ending {
    /// The client closed it, or the network failed.
    Gone,
    /// The client has broken the protocol or a limit.
    Offence(String),
}

impl<E: Into<Violation>> From<E> for Ending {
    fn from(error: E) -> Ending {
        Ending::Offence(error.into().to_string())
    }
}

impl Server {
    fn run(mut self) {
        let mut events = Vec::with_capacity(TURN);
        let mut chunk = vec![0; CHUNK];
        loop {
            let timeout = self.timeout();
            match epoll::wait(&self.epoll, spare_capacity(&mut events), timeout.as_ref()) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => {
                    tracing::error!(%error, "the workers' store has failed");
                    return;
                }
            }
            if !self.accepting && events.is_empty() {
                self.set_accepting(true);
            }
            for event in events.drain(..) {
                match event.data.u64() {
                    STOP => return,
                    LISTENER => self.accept(),
                    slot => self.serve(slot as u32, event.flags, &mut chunk),
                }
            }
            self.end_slow_strangers();
        }
    }

    fn timeout(&self) -> Option<Timespec> {
        let breath = (!self.accepting).then_some(BREATH);
        let whole = self.begun.first().map(|&(by, _)| by.since(elastic_store::clock::now()));
        // Rounded up by a millisecond: a wait that is too short would wake the thread again and again.
        let whole = whole.and_then(|left| Timespec::try_from(left + Duration::from_millis(1)).ok());
        breath.into_iter().chain(whole).min()
    }

    fn end_slow_strangers(&mut self) {
        while let Some(&(by, slot)) = self.begun.first()
            && by <= elastic_store::clock::now()
        {
            self.begun.remove(&(by, slot));
            if let Some(connection) = self.clients.slots[slot as usize].take() {
                let why = match connection.entry {
                    Entry::Served => "its first request takes too long",
                    _ => NOT_INTRODUCED,
                };
                self.close(slot, connection, Ending::Offence(why.to_owned()));
            }
        }
    }

    fn accept(&mut self) {
        for _ in 0..TURN {
            if self.open() >= self.most {
                if !is(&self.listener, PollFlags::IN) {
                    return;
                }
                if !self.make_room() {
                    return self.set_accepting(false);
                }
            }
            let socket = match rustix::net::accept_with(&self.listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
                Ok(socket) => TcpStream::from(socket),
                Err(Errno::AGAIN) => return,
                // The client has given up.
                Err(Errno::CONNABORTED | Errno::INTR) => continue,
                Err(error) => {
                    self.complain(|| format!("the workers' store takes no new connections for a moment: {error}"));
                    return self.set_accepting(false);
                }
            };
            self.welcome(socket);
        }
    }

    fn welcome(&mut self, socket: TcpStream) {
        if let Err(error) = self.enter(socket) {
            self.complain(|| format!("the workers' store refused a connection: {error}"));
        }
    }

    fn enter(&mut self, socket: TcpStream) -> io::Result<()> {
        socket.set_nodelay(true)?;
        // A worker may be silent for hours, but a connection to a dead host must be noticed.
        keep_alive(&socket)?;
        self.account.take(CONNECTION).map_err(io::Error::other)?;
        let slot = self.free.pop().unwrap_or(self.clients.slots.len() as u32);
        let known = epoll::add(&self.epoll, &socket, EventData::new_u64(slot.into()), EventFlags::IN);
        if slot as usize == self.clients.slots.len() {
            self.clients.slots.push(None);
        }
        if let Err(error) = known {
            self.account.give(CONNECTION);
            self.free.push(slot);
            return Err(error.into());
        }
        self.accepted += 1;
        self.strangers.insert((self.accepted, slot));
        self.clients.slots[slot as usize] = Some(Box::new(Connection {
            peer: socket.peer_addr().ok(),
            socket,
            stranger: Some(self.accepted),
            whole_by: None,
            entry: if self.fence.is_some() { Entry::Waits(Vec::new()) } else { Entry::Served },
            decoder: Decoder::default(),
            charged: CONNECTION,
            output: Output::new(self.account.clone()),
            interest: EventFlags::IN,
        }));
        Ok(())
    }

    fn open(&self) -> usize {
        self.clients.slots.len() - self.free.len()
    }

    fn make_room(&mut self) -> bool {
        let Some(&(_, slot)) = self.strangers.first() else { return false };
        if let Some(connection) = self.clients.slots[slot as usize].take() {
            self.close(slot, connection, Ending::Gone);
        }
        true
    }

    /// Pauses accepting or ends the pause. Without a pause, the listener would report the same error again and again.
    fn set_accepting(&mut self, accepting: bool) {
        let interest = if accepting { EventFlags::IN } else { EventFlags::empty() };
        let set = epoll::modify(&self.epoll, &self.listener, EventData::new_u64(LISTENER), interest).is_ok();
        self.accepting = accepting == set;
    }

    fn serve(&mut self, slot: u32, flags: EventFlags, chunk: &mut [u8]) {
        // The connection was closed earlier in this turn.
        let Some(mut connection) = self.clients.slots[slot as usize].take() else { return };
        let read = if flags.intersects(EventFlags::IN | EventFlags::HUP | EventFlags::ERR) {
            self.read(slot, &mut connection, chunk)
        } else {
            Ok(())
        };
        self.answer(slot, connection, read);
        while let Some(slot) = self.let_in.pop() {
            let Some(mut connection) = self.clients.slots[slot as usize].take() else { continue };
            let heard = self.hear(slot, &mut connection, &[]);
            self.answer(slot, connection, heard);
        }
        while let Some(woken) = self.clients.woken.pop() {
            let Some(connection) = self.clients.slots[woken as usize].take() else { continue };
            self.answer(woken, connection, Ok(()));
        }
    }

    /// Sends a connection what there is for it, or closes it.
    fn answer(&mut self, slot: u32, mut connection: Box<Connection>, heard: Result<(), Ending>) {
        match heard.and_then(|()| self.send(slot, &mut connection)) {
            Ok(()) => self.clients.slots[slot as usize] = Some(connection),
            Err(ending) => self.close(slot, connection, ending),
        }
    }

    fn read(&mut self, slot: u32, connection: &mut Connection, chunk: &mut [u8]) -> Result<(), Ending> {
        let most = if connection.entry == Entry::Served { chunk.len() } else { WAITING };
        let count = match (&connection.socket).read(&mut chunk[..most]) {
            Ok(0) => return Err(Ending::Gone),
            Ok(count) => count,
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {
                return Ok(());
            }
            Err(_) => return Err(Ending::Gone),
        };
        self.hear(slot, connection, &chunk[..count])?;
        if connection.stranger.is_some() && connection.held() > 0 {
            if connection.held() > FIRST_REQUEST {
                return Err(Ending::Offence("its first request is too long".into()));
            }
            let by = *connection.whole_by.get_or_insert_with(|| elastic_store::clock::now() + self.first_request);
            self.begun.insert((by, slot));
        }
        Ok(connection.charge(&self.account)?)
    }

    /// Takes what a connection has sent, if its host is let in, and keeps it until then.
    fn hear(&mut self, slot: u32, connection: &mut Connection, bytes: &[u8]) -> Result<(), Ending> {
        let (Some(fence), false) = (&mut self.fence, connection.entry == Entry::Served) else {
            return self.apply(slot, connection, bytes);
        };
        // A socket for IPv6 and IPv4 at once tells the latter's addresses as the former's.
        let host = |connection: &Connection| connection.peer.map(|peer| peer.ip().to_canonical());
        let from = host(connection);
        match fence.heard(&mut connection.entry, from, bytes, || random_bytes().ok()) {
            Turn::Wait => {}
            Turn::Serve(said) => self.apply(slot, connection, &said)?,
            Turn::Ask(nonce) => {
                for byte in nonce {
                    connection.output.push(Reply::Byte(byte)).map_err(Violation::from)?;
                }
            }
            Turn::Admit => {
                connection.output.push(Reply::Byte(ADMITTED)).map_err(Violation::from)?;
                let waits = |open: &Connection| open.entry.is_held() && host(open) == from;
                let slots = self.clients.slots.iter().zip(0..);
                self.let_in.extend(slots.filter(|(open, _)| open.as_deref().is_some_and(waits)).map(|(_, slot)| slot));
            }
            Turn::Refuse => return Err(Ending::Offence("it does not know the job's secret".into())),
        }
        Ok(())
    }

    fn apply(&mut self, slot: u32, connection: &mut Connection, bytes: &[u8]) -> Result<(), Ending> {
        let Server { state, clients, strangers, begun, .. } = self;
        let Connection { decoder, output, stranger, whole_by, .. } = connection;
        let own = Client(slot);
        decoder.feed(bytes, |request| {
            if let Some(since) = stranger.take() {
                strangers.remove(&(since, slot));
                whole_by.take().map(|by| begun.remove(&(by, slot)));
            }
            let mut full = Ok(());
            state.apply(own, request, &mut |client, reply| {
                if client == own {
                    full = full.and_then(|()| output.push(reply));
                } else if let Some(Some(other)) = clients.slots.get_mut(client.0 as usize) {
                    // One byte: room for it was reserved when the wait was accepted.
                    let _ = other.output.push(reply);
                    clients.woken.push(client.0);
                }
            })?;
            full.map_err(Violation::from)
        })?;
        Ok(connection.charge(&self.account)?)
    }

    /// Sends what the connection takes now, and sets the events to wait for.
    fn send(&mut self, slot: u32, connection: &mut Connection) -> Result<(), Ending> {
        connection.output.send(&connection.socket).map_err(|_| Ending::Gone)?;
        let mut interest = EventFlags::empty();
        if !connection.output.is_empty() {
            interest |= EventFlags::OUT;
        }
        if connection.output.len() < UNSENT && !connection.entry.is_held() {
            interest |= EventFlags::IN;
        }
        if interest != connection.interest {
            let data = EventData::new_u64(slot.into());
            epoll::modify(&self.epoll, &connection.socket, data, interest).map_err(|_| Ending::Gone)?;
            connection.interest = interest;
        }
        Ok(())
    }

    fn close(&mut self, slot: u32, connection: Box<Connection>, ending: Ending) {
        self.state.cancel(Client(slot));
        self.account.give(connection.charged);
        if let Some(since) = connection.stranger {
            self.strangers.remove(&(since, slot));
        }
        if let Some(by) = connection.whole_by {
            self.begun.remove(&(by, slot));
        }
        if let Ending::Offence(why) = ending {
            let peer = connection.peer.map(|peer| format!(", from {peer}")).unwrap_or_default();
            self.complain(|| format!("closed a connection to the workers' store{peer}: {why}"));
        }
        self.free.push(slot);
        drop(connection);
        if !self.accepting {
            self.set_accepting(true);
        }
    }

    /// Logs an offence. Limited, because a client that breaks the protocol may do so often.
    fn complain(&mut self, what: impl FnOnce() -> String) {
        self.complaints = self.complaints.saturating_add(1);
        if self.complaints <= NAMED {
            let last = if self.complaints == NAMED { "; no more of this kind will be named" } else { "" };
            tracing::warn!("{}{last}", what());
        }
    }
}
