//! Collective operations between the ranks of one round, over TCP.
//!
//! ```text
//! bootstrap   every rank finds every other through rank 0, and shows job, round and settings
//! peer_stream one operation's bytes to and from one peer; waiting, deadlines, lost peers
//! ring        all-reduce for large buffers          pairwise   all-reduce for small ones, broadcast
//! spread      from the ranks that hold the state, or parts of it, to those that do not, at once
//! ordered     all-reduce of shard sums in the fixed order of `tree`
//! order       the one or the other sum, as is asked for
//! recorder    the last operations and how far they came, for when one is given up
//! stop        the wish to stop, or to change over to a later round, for all that waits
//! ```
//!
//! Operations are called in the same order with the same sizes on every rank. The first error ends the group: what its
//! buffers then hold is undefined, and its peers will see it leave. Nothing is encrypted or authenticated, as with NCCL
//! and Gloo: the network between workers must be a trusted one.

mod bootstrap;
mod order;
mod ordered;
mod pairwise;
mod peer_stream;
pub mod recorder;
mod ring;
mod spread;
pub mod stop;
pub mod tree;

use std::cell::Cell;
use std::io;
use std::net::{Shutdown, TcpStream};
use std::time::{Duration, Instant};

use elastic_proto::worker::FailureClass;

use crate::stop::Stop;
pub use order::SumOrder;
use peer_stream::Interest;
use recorder::{Peer, Recorder};

/// Buffers up to this many bytes are reduced pairwise, in fewer turns; larger ones in a ring, in fewer bytes.
const PAIRWISE_BYTES: usize = 64 * 1024;

/// Bytes that are reduced and passed on at a time, so that receiving, adding and sending overlap.
const SEGMENT_BYTES: usize = 256 * 1024;

/// A rank's place among its peers, and what all of them must agree on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// The job's id.
    pub job: String,
    /// The round. A peer of another round is refused.
    pub round: u64,
    /// This process's rank.
    pub rank: u32,
    /// Ranks in the round.
    pub world_size: u32,
    /// Host of rank 0.
    pub master_addr: String,
    /// Port on which rank 0 listens, or, with `agent_store`, its agent's TCPStore.
    pub master_port: u16,
    /// Rank 0 listens where the kernel lets it, and says so in the store.
    pub agent_store: bool,
    /// What the ranks compute, in words. A peer with other settings is refused.
    pub settings: String,
}

/// How long to wait for peers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Patience {
    /// For all of them to appear.
    pub form: Duration,
    /// For one operation to end, from its start.
    pub operation: Duration,
}

/// Why a group cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum CollectiveError {
    /// A peer's connection ended, so the peer is gone.
    #[error("lost rank {rank}: {cause}")]
    PeerLost {
        /// The peer.
        rank: usize,
        /// What its socket said.
        cause: String,
    },
    /// A peer ended its part as planned while this rank still needed it.
    #[error("rank {rank} left")]
    PeerLeft {
        /// The peer.
        rank: usize,
    },
    /// Peers are connected but silent.
    #[error("rank {} sent nothing for {:.1} s; it hangs or is cut off (--peer-timeout sets the limit)",
        list_ranks(ranks), waited.as_secs_f64())]
    Stalled {
        /// Peers that still owe data.
        ranks: Vec<usize>,
        /// Time since the operation's start.
        waited: Duration,
    },
    /// Peers never appeared.
    #[error("rank {} did not appear within {:.1} s (--form-timeout sets the limit)",
        list_ranks(ranks), waited.as_secs_f64())]
    Missing {
        /// Who.
        ranks: Vec<usize>,
        /// Time since the start.
        waited: Duration,
    },
    /// The peer wants nothing to do with this process.
    #[error("refused by rank {rank}: {reason}")]
    Refused {
        /// The peer.
        rank: usize,
        /// Its reason.
        reason: String,
    },
    /// Ranks disagree on what comes next: a fault in the program.
    #[error("rank {rank} is at {theirs}, this rank at {ours}: the ranks do not run the same steps")]
    OutOfStep {
        /// The peer.
        rank: usize,
        /// The operation it is in.
        theirs: String,
        /// The operation this rank is in.
        ours: String,
    },
    /// A peer's port never answered.
    #[error("no connection to rank {rank} within {:.1} s (--form-timeout sets the limit): {cause}", waited.as_secs_f64())]
    Unreachable {
        /// The peer.
        rank: usize,
        /// Time since the start.
        waited: Duration,
        /// What the last attempt met.
        cause: Box<CollectiveError>,
    },
    /// An address cannot be used.
    #[error("cannot connect to {address}: {cause}")]
    Address {
        /// As given.
        address: String,
        /// Why.
        cause: String,
    },
    /// No port to be reached at.
    #[error("cannot listen on {addr}: {cause}{}", if cause.kind() == io::ErrorKind::AddrInUse {
        "; another program has MASTER_PORT, choose a free one" } else { "" })]
    Listen {
        /// Where.
        addr: String,
        /// Why.
        cause: io::Error,
    },
    /// NCCL or the device below it failed.
    #[error("NCCL: {cause}")]
    Nccl {
        /// What it says.
        cause: String,
        /// It says that a peer, or the way to one, is the cause.
        remote: bool,
    },
    /// NCCL keeps a thread in a call that does not end.
    #[error("NCCL does not come back from {what}; only an end of this process can end that")]
    Stuck {
        /// What it was asked for.
        what: &'static str,
    },
    /// A later round is forming.
    #[error("round {round} is forming")]
    Superseded {
        /// Its number.
        round: u64,
    },
    /// The stop flag was raised.
    #[error("stopped")]
    Stopped,
}

impl CollectiveError {
    /// Whose fault it is, as far as this rank can know.
    pub fn class(&self) -> FailureClass {
        match self {
            Self::PeerLost { .. }
            | Self::PeerLeft { .. }
            | Self::Stalled { .. }
            | Self::Missing { .. }
            | Self::Unreachable { .. }
            | Self::Superseded { .. }
            | Self::Nccl { remote: true, .. } => FailureClass::Peer,
            _ => FailureClass::Own,
        }
    }

    /// Whether somebody wanted this: a stop, a later round, a peer that left in good order.
    pub fn is_planned(&self) -> bool {
        matches!(self, Self::PeerLeft { .. } | Self::Superseded { .. } | Self::Stopped)
    }
}

/// Ranks, for a reader.
pub fn list_ranks(ranks: &[usize]) -> String {
    ranks.iter().map(usize::to_string).collect::<Vec<_>>().join(", ")
}

/// The ranks of a round, connected each with each.
#[derive(Debug)]
pub struct Group {
    round: u64,
    rank: usize,
    world_size: usize,
    /// By rank; none at this one's place.
    links: Vec<Option<TcpStream>>,
    /// Peers that ended as they should and are not waited for.
    departed: Vec<bool>,
    /// Operations begun, over any transport.
    operations: u64,
    /// Those over these links. Peers compare it.
    exchanges: u64,
    patience: Patience,
    stop: Stop,
    staging: ordered::Staging,
    recorder: Recorder,
    /// The operation under way.
    recorded: Option<Recorded>,
    /// What it waited for last.
    interests: Vec<Interest>,
    /// Its bytes to and from each peer, by rank.
    traffic: Vec<Traffic>,
}

/// An operation in the recorder.
#[derive(Debug, Clone, Copy)]
struct Recorded {
    sequence: u64,
    /// Whether its bytes go through this group's links: else they are not known.
    own: bool,
}

#[derive(Debug, Default)]
struct Traffic {
    sent: Cell<u64>,
    received: Cell<u64>,
}

impl Group {
    /// Finds all peers of `place` and connects to each. Returns when this rank is connected to all. Gives up as soon as
    /// a later round forms; an operation does so when it has had its time.
    pub fn form(place: &Place, patience: Patience, stop: Stop) -> Result<Group, CollectiveError> {
        let links = bootstrap::connect(place, patience.form, &stop)?;
        Ok(Group {
            round: place.round,
            rank: place.rank as usize,
            world_size: place.world_size as usize,
            departed: vec![false; links.len()],
            traffic: links.iter().map(|_| Traffic::default()).collect(),
            links,
            operations: 0,
            exchanges: 0,
            patience,
            stop,
            staging: ordered::Staging::default(),
            recorder: Recorder::default(),
            recorded: None,
            interests: Vec::new(),
        })
    }

    /// Has its operations recorded where those of other rounds are.
    pub fn recorded_by(self, recorder: &Recorder) -> Group {
        Group { recorder: recorder.clone(), ..self }
    }

    /// Waits for its peers as `patience` says from now on.
    pub fn with_patience(self, patience: Patience) -> Group {
        Group { patience, ..self }
    }

    /// This process's rank.
    pub fn rank(&self) -> u32 {
        self.rank as u32
    }

    /// Ranks in the group.
    pub fn world_size(&self) -> u32 {
        self.world_size as u32
    }

    /// Replaces `data` by its sum over all ranks, which is the same in every bit on all of them. The order of the sum
    /// depends on their number: see [`ordered_sum`](Self::ordered_sum) for one that does not.
    pub fn all_reduce(&mut self, data: &mut [f32]) -> Result<(), CollectiveError> {
        let result = match self.world_size {
            1 => Ok(()),
            _ if size_of_val(data) <= PAIRWISE_BYTES => pairwise::all_reduce(self, data),
            _ => ring::all_reduce(self, data),
        };
        self.ended(result)
    }

    /// Adds the shards' buffers in the order of [`tree`]. The sum is the same on all ranks and for every number of ranks.
    /// `sum`, where it will be, holds that of the first node of this rank's [`tree::cover`]; `rest` are those of the others,
    /// in their order. What a rank without shards has in `sum` does not count. The ranks' `vote`s travel along; the answer
    /// has each bit that any of them set.
    ///
    /// After an error `sum` may hold anything.
    ///
    /// # Panics
    /// When `rest` does not fit the rank's cover or the length of `sum`.
    pub fn ordered_sum(
        &mut self,
        shards: u32,
        rest: &[&[f32]],
        sum: &mut [f32],
        vote: u32,
    ) -> Result<u32, CollectiveError> {
        let result = ordered::sum(self, shards, rest, sum, vote);
        self.ended(result)
    }

    /// Copies rank 0's `data` to all ranks. The length must be the same everywhere.
    pub fn broadcast(&mut self, data: &mut [u8]) -> Result<(), CollectiveError> {
        let result = pairwise::broadcast(self, data);
        self.ended(result)
    }

    /// Each rank's `values`, by rank.
    pub fn gather<const N: usize>(&mut self, values: [u64; N]) -> Result<Vec<[u64; N]>, CollectiveError> {
        let result = spread::gather(self, values);
        self.ended(result)
    }

    /// Copies `data` from the ranks for which `holds` is set, by rank, and which hold the same, to all others. Each
    /// sends its part to everyone. The length must be the same everywhere.
    ///
    /// # Panics
    /// When no rank holds it.
    pub fn spread(&mut self, holds: &[bool], data: &mut [u8]) -> Result<(), CollectiveError> {
        let result = spread::spread(self, holds, data);
        self.ended(result)
    }

    /// Copies each rank's part of `data` to all others. The parts lie one behind another; `ends` says where, by rank. The
    /// length must be the same everywhere. Time counts from the last byte that has come.
    pub fn share(&mut self, ends: &[usize], data: &mut [u8]) -> Result<(), CollectiveError> {
        let result = spread::share(self, ends, data);
        self.ended(result)
    }

    /// Returns when all ranks have called it.
    pub fn barrier(&mut self) -> Result<(), CollectiveError> {
        self.all_reduce(&mut [0.0])
    }

    /// Records how the operation under way ended.
    pub fn ended<T>(&mut self, result: Result<T, CollectiveError>) -> Result<T, CollectiveError> {
        let Some(Recorded { sequence, own }) = self.recorded.take() else { return result };
        match &result {
            Ok(_) => self.recorder.done(sequence, Instant::now()),
            Err(error) => {
                let peers = if own { self.how_far(error) } else { Vec::new() };
                self.recorder.give_up(sequence, Instant::now(), peers);
            }
        }
        result
    }

    /// Numbers and records an operation that another transport does for these ranks.
    pub fn begin_beside(&mut self, transport: &'static str, name: &'static str, bytes: u64) -> Instant {
        self.note(transport, name, bytes)
    }

    /// The round.
    pub fn round(&self) -> u64 {
        self.round
    }

    /// How long peers are waited for.
    pub fn patience(&self) -> Patience {
        self.patience
    }

    /// How far the operation under way, which `error` has ended, is with each peer. One that is gone may be noticed
    /// before anybody is waited for.
    fn how_far(&self, error: &CollectiveError) -> Vec<Peer> {
        let gone = match error {
            CollectiveError::PeerLost { rank, .. } | CollectiveError::PeerLeft { rank } => Some(*rank),
            _ => None,
        };
        let owes = |rank| {
            gone == Some(rank) || self.interests.iter().any(|interest| interest.peer == rank && interest.receive)
        };
        let peers = self.traffic.iter().enumerate().filter(|(rank, _)| *rank != self.rank);
        let peer = |(rank, traffic): (usize, &Traffic)| {
            let Traffic { sent, received } = traffic;
            Peer { rank, received: received.get(), sent: sent.get(), owes: owes(rank) }
        };
        peers.map(peer).collect()
    }

    /// Leaves as planned: peers that still wait for others are not disturbed. Dropping the group without it looks to
    /// the peers like a death.
    pub fn leave(self) {
        for link in self.links.iter().flatten() {
            // A peer that is gone already needs no farewell.
            let _ = peer_stream::send_farewell(link).and_then(|()| link.shutdown(Shutdown::Write));
        }
    }
}
