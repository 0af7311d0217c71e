//! One operation's bytes to and from one peer, over a socket that never blocks; and waiting for many sockets at once.

use std::io::{self, ErrorKind, IoSlice, IoSliceMut, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::RecvFlags;

use super::{CollectiveError, Group, Recorded, Traffic, recorder};
use crate::stop::GLANCE;

const HEADER: usize = 24;

/// The kind in the header by which a peer says that it leaves as planned.
const FAREWELL: u32 = 0;

/// The operations. A peer in another operation is out of step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(super) enum Kind {
    Ordered = 1,
    Broadcast = 2,
    Gather = 3,
    Spread = 4,
    Pass = 5,
}

/// An operation as its header names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct OperationHeader {
    number: u64,
    kind: u32,
    bytes: u64,
}

impl OperationHeader {
    fn header(self, word: u32) -> [u8; HEADER] {
        let mut header = [0; HEADER];
        header[..8].copy_from_slice(&self.number.to_le_bytes());
        header[8..16].copy_from_slice(&self.bytes.to_le_bytes());
        header[16..20].copy_from_slice(&self.kind.to_le_bytes());
        header[20..].copy_from_slice(&word.to_le_bytes());
        header
    }

    fn parse(header: &[u8; HEADER]) -> (OperationHeader, u32) {
        let long = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| header[at + i]));
        let short = |at: usize| u32::from_le_bytes(std::array::from_fn(|i| header[at + i]));
        (OperationHeader { number: long(0), bytes: long(8), kind: short(16) }, short(20))
    }
}

impl std::fmt::Display for OperationHeader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.kind {
            FAREWELL => write!(f, "its end"),
            kind => write!(f, "operation {} over TCP ({} of {} bytes)", self.number, name(kind), self.bytes),
        }
    }
}

fn name(kind: u32) -> &'static str {
    match kind {
        1 => "ordered sum",
        2 => "broadcast",
        3 => "gathering",
        4 => "spreading",
        5 => "passing",
        _ => "unknown operation",
    }
}

/// Says that this process leaves as planned.
pub(super) fn send_farewell(mut link: &TcpStream) -> io::Result<()> {
    link.write_all(&OperationHeader { number: 0, kind: FAREWELL, bytes: 0 }.header(0))
}

/// One operation with one peer, in both directions. Each direction starts with a header that names the operation.
#[derive(Debug)]
pub(super) struct PeerStream {
    pub(super) peer: usize,
    operation: OperationHeader,
    header_out: [u8; HEADER],
    header_sent: usize,
    header_in: [u8; HEADER],
    header_got: usize,
    /// The word in the peer's header, once that is received.
    pub(super) word: u32,
}

impl PeerStream {
    pub(super) fn new(peer: usize, operation: OperationHeader, word: u32) -> PeerStream {
        let header_out = operation.header(word);
        PeerStream { peer, operation, header_out, header_sent: 0, header_in: [0; HEADER], header_got: 0, word: 0 }
    }

    /// Whether the whole header is sent.
    pub(super) fn opened(&self) -> bool {
        self.header_sent == HEADER
    }

    /// Whether the peer's header is received.
    pub(super) fn heard(&self) -> bool {
        self.header_got == HEADER
    }

    /// Sends as much of the header and then of `body` as the socket takes. Returns how much of `body` is sent.
    pub(super) fn send(&mut self, group: &Group, body: &[u8]) -> Result<usize, CollectiveError> {
        let mut link = group.link(self.peer)?;
        let header = &self.header_out[self.header_sent..];
        if header.is_empty() && body.is_empty() {
            return Ok(0);
        }
        let taken = again(|| link.write_vectored(&[IoSlice::new(header), IoSlice::new(body)]), self.peer)?;
        let of_header = taken.min(header.len());
        self.header_sent += of_header;
        group.moved(taken);
        let sent = &group.traffic[self.peer].sent;
        sent.set(sent.get() + taken as u64);
        Ok(taken - of_header)
    }

    /// Receives what has arrived of the header and then into `body`. Returns how much of `body` is filled.
    pub(super) fn receive(&mut self, group: &Group, body: &mut [u8]) -> Result<usize, CollectiveError> {
        let mut link = group.link(self.peer)?;
        let header = &mut self.header_in[self.header_got..];
        let missing = header.len();
        if missing == 0 && body.is_empty() {
            return Ok(0);
        }
        let peer = self.peer;
        let got = again(
            || match link.read_vectored(&mut [IoSliceMut::new(header), IoSliceMut::new(body)]) {
                Ok(0) => Err(io::Error::new(ErrorKind::UnexpectedEof, "it closed its connection")),
                result => result,
            },
            peer,
        )?;
        let of_header = got.min(missing);
        self.header_got += of_header;
        group.moved(got);
        let received = &group.traffic[peer].received;
        received.set(received.get() + got as u64);
        if of_header > 0 && self.heard() {
            let (theirs, word) = OperationHeader::parse(&self.header_in);
            if theirs.kind == FAREWELL {
                return Err(CollectiveError::PeerLeft { rank: peer });
            }
            if theirs != self.operation {
                let (theirs, ours) = (theirs.to_string(), self.operation.to_string());
                return Err(CollectiveError::OutOfStep { rank: peer, theirs, ours });
            }
            self.word = word;
        }
        Ok(got - of_header)
    }
}

/// Repeats `call` while it is interrupted. A socket that is full or empty moves 0 bytes.
fn again(mut call: impl FnMut() -> io::Result<usize>, rank: usize) -> Result<usize, CollectiveError> {
    loop {
        match call() {
            Ok(bytes) => return Ok(bytes),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(0),
            Err(error) => return Err(CollectiveError::PeerLost { rank, cause: error.to_string() }),
        }
    }
}

/// Buffers that go to a peer and come from it at the same time.
pub(super) struct Exchange<'a> {
    pub(super) peer_stream: PeerStream,
    /// None where nothing is sent, not even a header.
    out: Option<&'a [u8]>,
    sent: usize,
    into: Option<&'a mut [u8]>,
    got: usize,
    /// What follows when those are through.
    more_out: std::vec::IntoIter<&'a [u8]>,
    more_into: std::vec::IntoIter<&'a mut [u8]>,
}

impl<'a> Exchange<'a> {
    pub(super) fn new(peer_stream: PeerStream, out: Option<&'a [u8]>, into: Option<&'a mut [u8]>) -> Exchange<'a> {
        let (more_out, more_into) = Default::default();
        Exchange { peer_stream, out, sent: 0, into, got: 0, more_out, more_into }
    }

    /// Of buffers in pieces. Where there are none the header goes alone.
    pub(super) fn in_pieces(peer_stream: PeerStream, out: Vec<&'a [u8]>, into: Vec<&'a mut [u8]>) -> Exchange<'a> {
        let (more_out, more_into) = (out.into_iter(), into.into_iter());
        Exchange { more_out, more_into, ..Exchange::new(peer_stream, Some(&[]), Some(&mut [])) }
    }

    /// Takes up the next pieces.
    fn advance(&mut self) {
        while let Some(out) = self.out.filter(|out| self.sent == out.len()).and_then(|_| self.more_out.next()) {
            (self.out, self.sent) = (Some(out), 0);
        }
        while self.into.as_ref().is_some_and(|into| self.got == into.len())
            && let Some(into) = self.more_into.next()
        {
            (self.into, self.got) = (Some(into), 0);
        }
    }

    fn interest(&self) -> Option<Interest> {
        let send = self.out.is_some_and(|out| !self.peer_stream.opened() || self.sent < out.len());
        let receive = self.into.as_ref().is_some_and(|into| !self.peer_stream.heard() || self.got < into.len());
        (send || receive).then_some(Interest { peer: self.peer_stream.peer, send, receive })
    }

    /// Sends and receives as much as the socket allows. Returns whether anything moved.
    fn turn(&mut self, group: &Group) -> Result<bool, CollectiveError> {
        let Some(Interest { send, receive, .. }) = self.interest() else { return Ok(false) };
        let before = (self.peer_stream.opened(), self.peer_stream.heard());
        let mut moved = 0;
        if let Some(out) = self.out.filter(|_| send) {
            let sent = self.peer_stream.send(group, &out[self.sent..])?;
            (self.sent, moved) = (self.sent + sent, sent);
        }
        if let Some(into) = self.into.as_mut().filter(|_| receive) {
            let got = self.peer_stream.receive(group, &mut into[self.got..])?;
            (self.got, moved) = (self.got + got, moved + got);
        }
        self.advance();
        Ok(moved > 0 || before != (self.peer_stream.opened(), self.peer_stream.heard()))
    }
}

/// Moves all bytes.
pub(super) fn run(group: &mut Group, exchanges: &mut [Exchange<'_>]) -> Result<(), CollectiveError> {
    loop {
        let mut moved = false;
        for exchange in &mut *exchanges {
            moved |= exchange.turn(group)?;
        }
        let interests: Vec<Interest> = exchanges.iter().filter_map(Exchange::interest).collect();
        if interests.is_empty() {
            return Ok(());
        }
        if !moved {
            group.wait(&interests)?;
        }
    }
}

/// What an operation waits for from one peer.
#[derive(Debug, Clone, Copy)]
pub(super) struct Interest {
    pub(super) peer: usize,
    pub(super) send: bool,
    pub(super) receive: bool,
}

impl Group {
    /// Numbers the next operation, and records it. The number in the header counts only operations over these links:
    /// when NCCL fails for one rank in one of a step's sums, that rank says so in its next operation here, and by then
    /// other ranks have begun more sums over NCCL.
    pub(super) fn begin(&mut self, kind: Kind, bytes: usize) -> OperationHeader {
        let now = self.note("tcp", name(kind as u32), bytes as u64);
        self.last_byte.set(now);
        self.exchanges += 1;
        OperationHeader { number: self.exchanges, kind: kind as u32, bytes: bytes as u64 }
    }

    /// Notes that so many bytes have moved: peers have their whole time again.
    fn moved(&self, bytes: usize) {
        if bytes > 0 {
            self.last_byte.set(Instant::now());
        }
    }

    /// Numbers and records an operation of these ranks, over any transport.
    pub fn note(&mut self, transport: &'static str, name: &'static str, bytes: u64) -> Instant {
        self.operations += 1;
        let (round, number, now) = (self.round, self.operations, Instant::now());
        let sequence = self.recorder.begin(recorder::Operation { round, number, transport, name, bytes }, now);
        self.recorded = Some(Recorded { sequence, own: transport == "tcp" });
        self.interests.clear();
        for Traffic { sent, received } in &self.traffic {
            sent.set(0);
            received.set(0);
        }
        now
    }

    fn link(&self, peer: usize) -> Result<&TcpStream, CollectiveError> {
        let gone = || CollectiveError::PeerLeft { rank: peer };
        self.links[peer].as_ref().filter(|_| !self.departed[peer]).ok_or_else(gone)
    }

    /// Sleeps until one of `interests` can move bytes. It also fails when a peer dies with which this operation
    /// exchanges nothing: a later operation would fail for that, and the error now names the cause.
    ///
    /// The time that peers have counts from the last byte that moved, since the time of a whole operation depends on
    /// its length and the network.
    pub(super) fn wait(&mut self, interests: &[Interest]) -> Result<(), CollectiveError> {
        self.interests.clear();
        self.interests.extend_from_slice(interests);
        loop {
            self.look_up()?;
            let waited = self.last_byte.get().elapsed();
            let left = self.patience.operation.saturating_sub(waited);
            if left.is_zero() {
                let mut ranks: Vec<usize> = interests.iter().filter(|i| i.receive).map(|i| i.peer).collect();
                if ranks.is_empty() {
                    ranks = interests.iter().map(|i| i.peer).collect();
                }
                return Err(CollectiveError::Stalled { ranks, waited });
            }
            if self.poll(interests, left.min(GLANCE))? {
                return Ok(());
            }
        }
    }

    /// Fails at a stop, and when a later round forms, once the time for the step under way is over.
    fn look_up(&self) -> Result<(), CollectiveError> {
        self.stop.check(self.round, Instant::now())
    }

    /// Fails when a wait would fail: at a stop, for a later round, when a peer is dead. It is for a caller that waits
    /// for something else than this group's bytes.
    pub fn watch(&mut self) -> Result<(), CollectiveError> {
        self.look_up()?;
        self.poll(&[], Duration::ZERO).map(drop)
    }

    /// Whether a peer has sent bytes that this rank does not wait for yet: the peer is already in a later operation.
    pub fn is_behind(&mut self) -> bool {
        let interests: Vec<Interest> =
            (0..self.world_size).map(|peer| Interest { peer, send: false, receive: true }).collect();
        self.poll(&interests, Duration::ZERO).unwrap_or(false)
    }

    /// Whether a wanted socket became ready within `time`.
    fn poll(&mut self, interests: &[Interest], time: Duration) -> Result<bool, CollectiveError> {
        let mut peers = Vec::with_capacity(self.world_size);
        let mut fds = Vec::with_capacity(self.world_size);
        for (peer, link) in self.links.iter().enumerate() {
            let Some(link) = link.as_ref().filter(|_| !self.departed[peer]) else { continue };
            let (mut flags, mut wanted) = (PollFlags::RDHUP, false);
            for interest in interests.iter().filter(|interest| interest.peer == peer) {
                flags.set(PollFlags::OUT, interest.send || flags.contains(PollFlags::OUT));
                flags.set(PollFlags::IN, interest.receive || flags.contains(PollFlags::IN));
                wanted = true;
            }
            peers.push((peer, wanted));
            fds.push(PollFd::new(link, flags));
        }
        let time = Timespec { tv_sec: time.as_secs() as _, tv_nsec: i64::from(time.subsec_nanos()) as _ };
        if poll(&mut fds, Some(&time)).unwrap_or(0) == 0 {
            return Ok(false); // Nothing yet, or a signal came.
        }
        let events: Vec<PollFlags> = fds.iter().map(PollFd::revents).collect();
        let mut ready = false;
        for (&(peer, wanted), &events) in peers.iter().zip(&events).filter(|(_, events)| !events.is_empty()) {
            if wanted {
                // Data that came before a peer's death is read first. A later read then reports the death.
                ready = true;
            } else if events.intersects(PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR) {
                self.judge_end(peer)?;
            }
        }
        Ok(ready)
    }

    /// Tells a planned end from a death by the last bytes that the peer has sent.
    fn judge_end(&mut self, peer: usize) -> Result<(), CollectiveError> {
        let mut last = [0u8; HEADER + 1];
        let got = rustix::net::recv(self.link(peer)?, &mut last[..], RecvFlags::PEEK | RecvFlags::DONTWAIT);
        let farewell = OperationHeader { number: 0, kind: FAREWELL, bytes: 0 }.header(0);
        match got {
            Ok((_, HEADER)) if last[..HEADER] == farewell => {
                self.departed[peer] = true;
                Ok(())
            }
            Ok(_) => Err(CollectiveError::PeerLost { rank: peer, cause: "it closed its connection".to_owned() }),
            Err(error) => Err(CollectiveError::PeerLost { rank: peer, cause: io::Error::from(error).to_string() }),
        }
    }
}
