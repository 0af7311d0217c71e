//! Collective operations between the ranks of one round, over TCP.
//!
//! ```text
//! identity    what ranks must have in common to meet, and how it differs
//! bootstrap   connects every rank with every other, through rank 0; compares job, round and settings
//! peer_stream one operation's bytes to and from one peer; waiting, deadlines, lost peers
//! pairwise    sums of small buffers, broadcast
//! spread      copies the state, or parts of it, from the ranks that hold it to the others, all at once; passes pieces
//! ordered     all-reduce of shard sums in the fixed order of `tree`
//! recorder    the last operations, and how far they came, for when one is given up
//! stop        the request to stop, or to change to a later round, for everything that waits
//! ```
//!
//! Operations are called in the same order with the same sizes on every rank. The first error ends the group: the
//! contents of its buffers are then undefined, and its peers see it leave. Nothing is encrypted or authenticated, as
//! with NCCL and Gloo: the network between workers must be a trusted one.

mod bootstrap;
pub mod identity;
mod ordered;
mod pairwise;
mod peer_stream;
pub mod recorder;
mod spread;
pub mod stop;
pub mod tree;

use std::cell::Cell;
use std::io;
use std::net::{Shutdown, TcpStream};
use std::time::{Duration, Instant};

use elastic_proto::worker::FailureClass;

use crate::stop::Stop;
use peer_stream::Interest;
use recorder::{Peer, Recorder};

/// This process's rank, where rank 0 listens, and what all ranks must agree on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupConfig {
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
    /// Whether rank 0 listens on any free port, and publishes it in the store.
    pub agent_store: bool,
    /// What the ranks compute, in words. A peer with different settings is refused.
    pub settings: String,
}

/// How long to wait for peers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Patience {
    /// Until all of them have connected.
    pub form: Duration,
    /// For the next byte of an operation.
    pub operation: Duration,
}

/// Why a group cannot continue.
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
    /// A peer left as planned while this rank still needed it.
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
        /// Time since the last byte, or since the operation's start.
        waited: Duration,
    },
    /// Peers did not connect in time.
    #[error("rank {} did not appear within {:.1} s (--form-timeout sets the limit)",
        list_ranks(ranks), waited.as_secs_f64())]
    Missing {
        /// These peers.
        ranks: Vec<usize>,
        /// Time since the start.
        waited: Duration,
    },
    /// A peer refused this process: it belongs to another group.
    #[error("rank {rank} refused this worker: {reason}")]
    Refused {
        /// The peer.
        rank: usize,
        /// Its reason.
        reason: String,
    },
    /// Ranks are in different operations: an error in the program.
    #[error("rank {rank} is at {theirs}, this rank at {ours}: the ranks do not run the same steps")]
    OutOfStep {
        /// The peer.
        rank: usize,
        /// The operation it is in.
        theirs: String,
        /// The operation this rank is in.
        ours: String,
    },
    /// There was no connection to a peer in time.
    #[error("no connection to rank {rank} within {:.1} s (--form-timeout sets the limit): {cause}", waited.as_secs_f64())]
    Unreachable {
        /// The peer.
        rank: usize,
        /// Time since the start.
        waited: Duration,
        /// The error of the last attempt.
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
    /// A port cannot be opened.
    #[error("cannot listen on {addr}: {cause}{}", if cause.kind() == io::ErrorKind::AddrInUse {
        "; another program has MASTER_PORT, choose a free one" } else { "" })]
    Listen {
        /// Where.
        addr: String,
        /// Why.
        cause: io::Error,
    },
    /// This process may open no more files.
    #[error(
        "cannot connect with all ranks: {cause} (the limit is {limit}, and {needed} are enough); raise it where this \
        worker is started (ulimit -n, LimitNOFILE)"
    )]
    Descriptors {
        /// The limit on open files.
        limit: u64,
        /// One that is high enough.
        needed: u64,
        /// What the system said.
        cause: String,
    },
    /// NCCL or the device below it failed.
    #[error("NCCL: {cause}")]
    Nccl {
        /// What it reports.
        cause: String,
        /// Whether it reports that a peer, or the connection to one, is the cause.
        remote: bool,
    },
    /// A call of NCCL does not return.
    #[error("NCCL hangs in {what}; only the end of this process stops it")]
    Stuck {
        /// The operation.
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
    /// Whether this rank or a peer has failed, as far as this rank can know.
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

    /// Whether this was planned: a stop, a later round, or a peer that left as planned.
    pub fn is_planned(&self) -> bool {
        matches!(self, Self::PeerLeft { .. } | Self::Superseded { .. } | Self::Stopped)
    }
}

/// Ranks as text.
pub fn list_ranks(ranks: &[usize]) -> String {
    ranks.iter().map(usize::to_string).collect::<Vec<_>>().join(", ")
}

/// The ranks of a round, each connected with every other.
#[derive(Debug)]
pub struct Group {
    round: u64,
    rank: usize,
    world_size: usize,
    /// The connections by rank; none for this rank itself.
    links: Vec<Option<TcpStream>>,
    /// Whether each peer has left as planned, by rank.
    departed: Vec<bool>,
    /// Operations begun, over any transport.
    operations: u64,
    /// Operations begun over these links. Peers compare this number.
    exchanges: u64,
    patience: Patience,
    stop: Stop,
    staging: ordered::Staging,
    recorder: Recorder,
    /// The operation under way.
    recorded: Option<Recorded>,
    /// What the operation waited for last.
    interests: Vec<Interest>,
    /// The operation's bytes to and from each peer, by rank.
    traffic: Vec<Traffic>,
    /// When the last of them moved.
    last_byte: Cell<Instant>,
}

/// An operation in the recorder.
#[derive(Debug, Clone, Copy)]
struct Recorded {
    sequence: u64,
    /// Whether its bytes go through this group's links. If not, their number is not known.
    own: bool,
}

#[derive(Debug, Default)]
struct Traffic {
    sent: Cell<u64>,
    received: Cell<u64>,
}

impl Group {
    /// Finds all peers of `config` and connects to each. Gives up as soon as a later round forms. An operation does so
    /// only when [`Forming::give_up`](stop::Forming::give_up) has come.
    pub fn form(config: &GroupConfig, patience: Patience, stop: Stop) -> Result<Group, CollectiveError> {
        let links = bootstrap::connect(config, patience.form, &stop)?;
        Ok(Group {
            round: config.round,
            rank: config.rank as usize,
            world_size: config.world_size as usize,
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
            last_byte: Cell::new(Instant::now()),
        })
    }

    /// Records its operations in `recorder`, where those of other rounds are.
    pub fn recorded_by(self, recorder: &Recorder) -> Group {
        Group { recorder: recorder.clone(), ..self }
    }

    /// The same group, with another patience from now on.
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

    /// Adds the shards' buffers in the order of [`tree`]. All ranks get the same bits, and the bits are the same for
    /// every number of ranks. At the call, `sum` holds the partial sum of the first of this rank's
    /// [nodes](tree::nodes_of), and `rest` has those of the other nodes, in their order. On a rank without shards the
    /// contents of `sum` do not count. The ranks' `vote`s are sent with the sum, and the result is the bitwise OR of all
    /// votes.
    ///
    /// After an error the contents of `sum` are undefined.
    ///
    /// # Panics
    /// When `rest` does not fit the rank's nodes or the length of `sum`.
    pub fn ordered_sum(
        &mut self,
        shards: u32,
        rest: &[&[f32]],
        sum: &mut [f32],
        vote: u32,
    ) -> Result<u32, CollectiveError> {
        let result = ordered::sum(self, shards, rest, sum, (ordered::Finished::ToAll, vote));
        self.ended(result)
    }

    /// As [`ordered_sum`](Self::ordered_sum), but only owners get the sum: each rank that of its
    /// [chunk](tree::SumPlan::owned_chunk) and of the chunk whose [second](tree::SumPlan::second) owner it is.
    /// Elsewhere the contents of `sum` are undefined. All ranks get the votes. Another operation of all ranks must follow
    /// before one [leaves](Self::leave), since others may not have read all that it sent.
    ///
    /// # Panics
    /// When `rest` does not fit the rank's nodes or the length of `sum`.
    pub fn sum_to_owners(
        &mut self,
        shards: u32,
        rest: &[&[f32]],
        sum: &mut [f32],
        vote: u32,
    ) -> Result<u32, CollectiveError> {
        let result = ordered::sum(self, shards, rest, sum, (ordered::Finished::ToOwners, vote));
        self.ended(result)
    }

    /// Copies rank 0's `data` to all ranks. The length must be the same on all ranks.
    pub fn broadcast(&mut self, data: &mut [u8]) -> Result<(), CollectiveError> {
        let result = pairwise::broadcast(self, data);
        self.ended(result)
    }

    /// The `values` of all ranks, by rank.
    pub fn gather<const N: usize>(&mut self, values: [u64; N]) -> Result<Vec<[u64; N]>, CollectiveError> {
        let result = spread::gather(self, values);
        self.ended(result)
    }

    /// Copies `data` from the ranks for which `holds` is set to all others. `holds` is by rank, and all holders have
    /// the same data; each sends its part to all others. The length must be the same on all ranks.
    ///
    /// # Panics
    /// When no rank holds it.
    pub fn spread(&mut self, holds: &[bool], data: &mut [u8]) -> Result<(), CollectiveError> {
        let result = spread::spread(self, holds, data);
        self.ended(result)
    }

    /// Copies each rank's part of `data` to all others. The parts follow each other, and `ends` has the end of each, by
    /// rank. The length must be the same on all ranks.
    pub fn share(&mut self, ends: &[usize], data: &mut [u8]) -> Result<(), CollectiveError> {
        self.share_where(ends, |_, _| true, data)
    }

    /// As [`share`](Self::share), but a rank's part goes only to the ranks that it `goes` to: from the first, to the
    /// second. It must say the same on all ranks.
    pub fn share_where(
        &mut self,
        ends: &[usize],
        goes: impl Fn(usize, usize) -> bool,
        data: &mut [u8],
    ) -> Result<(), CollectiveError> {
        let result = spread::share(self, ends, goes, data);
        self.ended(result)
    }

    /// Sends each piece of `out` to its rank, and fills each piece of `into` from its rank. The pieces between two ranks
    /// have the same lengths and order on both, and `total` is the same number on all ranks. A rank may be left out.
    pub fn pass(
        &mut self,
        total: usize,
        out: Vec<(usize, &[u8])>,
        into: Vec<(usize, &mut [u8])>,
    ) -> Result<(), CollectiveError> {
        let result = spread::pass(self, total, out, into);
        self.ended(result)
    }

    /// Returns when all ranks have called it.
    pub fn barrier(&mut self) -> Result<(), CollectiveError> {
        self.gather([0]).map(drop)
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

    /// The round.
    pub fn round(&self) -> u64 {
        self.round
    }

    /// How long to wait for peers.
    pub fn patience(&self) -> Patience {
        self.patience
    }

    /// How far the operation under way, which `error` has ended, has come with each peer. A peer that is gone may be
    /// noticed before the operation has waited for any.
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

    /// Leaves as planned: it does not disturb peers that still wait for other ranks. If the group is dropped without
    /// this call, the peers take this rank for dead.
    pub fn leave(self) {
        for link in self.links.iter().flatten() {
            // A peer that is gone needs no farewell.
            let _ = peer_stream::send_farewell(link).and_then(|()| link.shutdown(Shutdown::Write));
        }
    }
}
