//! What a leader takes in and gives out.

use std::time::Duration;

use crate::job::{Endpoint, NodeId};
use crate::kv::{Revision, Scope, StoreError, Txn, TxnResult, WatchUpdate};
use crate::time::Time;

/// The inputs of a leader.
#[derive(Debug, Clone)]
pub enum LeaderInput {
    /// Its term begins, or time has passed.
    Tick,
    /// The answer to its transaction.
    Answered {
        /// When the transaction was sent.
        sent: Time,
        /// The answer.
        result: Result<TxnResult, StoreError>,
    },
    /// News from a watch that it asked for.
    Watched(WatchUpdate),
    /// A member opened its pulse stream.
    Opened(NodeId),
    /// A member was heard.
    Heard {
        /// Which.
        node: NodeId,
        /// The newest probe that it has seen.
        probe: u64,
        /// When the newest word was sent that it has seen.
        echo: Option<Time>,
    },
    /// A member's stream ended. Only a hint.
    Closed(NodeId),
    /// A node's death is confirmed.
    Dead(NodeId),
}

/// What a leader wants done.
#[derive(Debug, Clone, PartialEq)]
pub enum LeaderOutput {
    /// Run this transaction and answer with [`LeaderInput::Answered`]. There is never more than one under way.
    Txn(Txn),
    /// Watch this and report with [`LeaderInput::Watched`].
    Watch(Scope, Revision),
    /// Ask every member for a pulse that carries this number.
    Probe(u64),
    /// Find out whether this node is dead: its stream ended, or its key is gone. Report only a confirmed death.
    Suspect(NodeId, Endpoint),
    /// The term is over: another leads. Nothing follows.
    Deposed,
    /// The term is over: for this reason the store tells it nothing more. Nothing follows. Anyone who holds the
    /// `leader` key must let go of it, or no one leads.
    Broken(StoreError),
    /// A line for the log.
    Say(String),
    /// A line for the log that asks somebody to do something.
    Warn(String),
}

/// The leader's word to a member, as its pulse carries it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Word {
    /// The current round's number.
    pub round: u64,
    /// The mod revision of its record.
    pub revision: Revision,
    /// Whether it runs.
    pub running: bool,
    /// How long ago the leader last proved that it leads and that this is the round.
    pub proof_age: Duration,
    /// Every member of the round was heard at most this long ago.
    pub all_heard: Option<Duration>,
}
