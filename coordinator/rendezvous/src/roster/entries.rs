//! What a leader knows of one node: its key, its place in the last sealed round, its pulses.

use crate::job::{Fate, NodeRecord, RankRecord};
use crate::kv::Revision;
use crate::time::Time;

/// A node whose key is there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Present {
    /// What it says.
    pub record: NodeRecord,
    /// When its key came into being: newcomers are served in this order.
    pub created: Revision,
    /// When it last spoke.
    pub modified: Revision,
    /// When the leader first saw the key.
    pub arrived: Time,
    /// When the leader first saw what it says now.
    pub said: Time,
}

/// A member of the last sealed round.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SealedMember {
    /// Its place.
    pub rank: RankRecord,
    /// It has said that it started this round's workers. After that all that keeps them alive is seen by the leader:
    /// its pulses and the writes of its key.
    pub started: bool,
    /// Since when its key is gone.
    pub absent: Option<Time>,
    /// It said that it stopped for the forming round, and went: nothing of it is left to wait for.
    pub left: bool,
    /// It was evicted.
    pub evicted: Option<Evicted>,
}

/// What is known of an evicted member.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Evicted {
    /// When this leader evicted it, or found its tombstone.
    pub at: Time,
    /// What was known of its workers.
    pub fate: Fate,
}

/// What the pulses told of a node.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Contact {
    /// When its stream to this leader was opened in this term.
    pub opened: Option<Time>,
    /// When it was last heard.
    pub heard: Option<Time>,
    /// When the word was sent that its newest beat answers: it was here, and followed this leader, after that.
    pub echoed: Option<Time>,
    /// The newest probe it answered.
    pub probe: u64,
    /// Its death is confirmed.
    pub dead: bool,
}
