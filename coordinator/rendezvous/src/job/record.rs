//! The JSON records that nodes and leaders write. What they mean together is in `rendezvous`.

use std::fmt;

use serde::de::{DeserializeOwned, Error};
use serde::{Deserialize, Deserializer, Serialize};

use super::{Advance, Checkpoint, Failure, Faults, NodeId, Release, Requester, Spec};
use crate::kv::{KeyValue, Revision};

/// A host and a port.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Endpoint {
    /// Name or address, without brackets.
    pub host: String,
    /// TCP port.
    pub port: u16,
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{}:{}", self.host, self.port)
        }
    }
}

/// What a node says of itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// Has no workers and wants a place: in exactly round `round` as a member of the one before, or, with no round
    /// named, in any as a newcomer.
    Waiting,
    /// Its workers of `round` run.
    Running,
    /// Its workers of `round` all ended well.
    Done,
    /// A worker of `round` failed, or the node lost its workers.
    Failed,
    /// Its workers of `round` run, and it wants to leave.
    Draining,
    /// It has stopped its workers for the forming `round`, and wants no place in it: it leaves, or it comes back when
    /// its new workers are warm.
    Stopped,
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

/// A node's own key, `nodes/<node>`. Written by that node alone.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeRecord {
    /// The node's name: stays the same over restarts of its agent.
    pub name: String,
    /// This agent process.
    pub incarnation: String,
    /// The machine, by its machine id.
    pub machine: String,
    /// The machine's boot.
    pub boot: String,
    /// Host name, for people.
    pub host: String,
    /// Where the agent listens for pulses.
    pub peer: Endpoint,
    /// Workers it would start.
    pub slots: u32,
    /// The workers' role name.
    pub role: String,
    /// What it is doing.
    pub phase: Phase,
    /// The round it speaks of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub round: Option<u64>,
    /// Why it failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<Failure>,
    /// The address it already holds for rank 0's bootstrap, when waiting.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub master: Option<Endpoint>,
    /// The group rank that it must have, where ranks are fixed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub place: Option<u32>,
    /// Whether its workers can be started without a place, and have been so before it joined.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub warms_up: bool,
    /// As it waits for a place: whether some of its workers of the last round have died, and it could start new ones
    /// ahead. Where the others are enough, they continue without it until those are warm.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub lacks_workers: bool,
    /// As it waits for a place, where a replica has several nodes: whether all its workers of the last round live, and
    /// can continue. Without that its replica's other workers cannot either.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub keeps_workers: bool,
    /// As it runs: whether the training is over, and its workers only end. No newcomer is admitted then.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub finished: bool,
    /// Whether it introduces its host to the workers' store of its round: it knows the job's secret, and was started
    /// without `workers_store_open`.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub introduces: bool,
    /// Its agent's release; none: the record names none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub release: Option<Release>,
    /// A digest of the workers' program and its arguments. Nodes of one job usually have the same.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub command: Option<String>,
}

impl NodeRecord {
    /// The node's id.
    pub fn id(&self) -> NodeId {
        NodeId::new(&self.name, &self.incarnation)
    }
}

/// A round's state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RoundState {
    /// Members are stopping, places are being given.
    Forming,
    /// Sealed: its members are at work.
    Running,
    /// All its members were done.
    Succeeded,
    /// It failed, and no restart was left, or the job stayed below its minimum.
    Failed,
    /// The operator ended the job.
    Closed,
}

impl RoundState {
    /// Whether the job has ended.
    pub fn is_final(self) -> bool {
        matches!(self, RoundState::Succeeded | RoundState::Failed | RoundState::Closed)
    }
}

impl fmt::Display for RoundState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

/// A round that was sealed: its number and the plan whose rank keys count.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sealed {
    /// The round's number.
    #[serde(deserialize_with = "counted")]
    pub number: u64,
    /// Mod revision of the `forming` record that it was sealed from.
    pub plan: Revision,
    /// How many nodes it has, each with a rank key under the plan.
    #[serde(default)]
    pub nodes: u32,
}

/// The current round, `round`. Written by leaders alone, and by an agent that begins a generation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RoundRecord {
    /// Grows by one with each round, over all generations.
    #[serde(deserialize_with = "counted")]
    pub number: u64,
    /// Grows by one when a job is begun again.
    #[serde(deserialize_with = "counted")]
    pub generation: u64,
    /// Its state.
    pub state: RoundState,
    /// The last sealed round: while forming, the one whose members must have ended first; else this one. None where
    /// no member is left to wait for: no round was sealed yet, or all of the last one have left.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sealed: Option<Sealed>,
    /// Nodes in it, once sealed.
    #[serde(default)]
    pub group_world_size: u32,
    /// Workers in it, once sealed.
    #[serde(default)]
    pub world_size: u32,
    /// Where rank 0's bootstrap listens, once sealed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub master: Option<Endpoint>,
    /// Once sealed: all its members introduce their hosts to the workers' store, so that it serves no one else.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub members_only: bool,
    /// Restarts charged to the job so far.
    #[serde(default)]
    pub restarts: u32,
    /// Whether these got the job any further.
    #[serde(default, skip_serializing_if = "Advance::is_none")]
    pub advance: Advance,
    /// What is held against nodes: failures of their workers, and that they are excluded for them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub faults: Vec<Faults>,
    /// The checkpoint all its members resume from, once sealed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checkpoint: Option<Checkpoint>,
    /// While forming: names of members that their operator drains. They stop like one that leaves by itself.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub leaving: Vec<String>,
    /// While forming: an operator has paused the job. Members stop their workers as for a planned leave, and no round is
    /// sealed before the job is resumed.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub paused: bool,
    /// While forming: a generation begins with it that follows another one. The members that it waits for are that
    /// other's.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub begins_generation: bool,
    /// Why it came to be, for people.
    pub reason: String,
    /// The job's root cause, once failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cause: Option<Failure>,
}

impl RoundRecord {
    /// The reason of a round that begins a generation, where another generation was before.
    pub const BEGINS_AGAIN: &str = "the job begins again";

    /// A round that begins to form: it has nothing else yet.
    pub fn forming(number: u64, generation: u64, reason: impl Into<String>) -> RoundRecord {
        RoundRecord {
            number,
            generation,
            state: RoundState::Forming,
            sealed: None,
            group_world_size: 0,
            world_size: 0,
            master: None,
            members_only: false,
            restarts: 0,
            advance: Advance::default(),
            faults: Vec::new(),
            checkpoint: None,
            leaving: Vec::new(),
            paused: false,
            begins_generation: false,
            reason: reason.into(),
            cause: None,
        }
    }

    /// What its members and newcomers wait for changes with this: its number, its state, and whether it is paused.
    pub fn stage(&self) -> (u64, RoundState, bool) {
        (self.number, self.state, self.paused)
    }

    /// Whether this record can come after that one in the life of a job: numbers never fall, and what ran with a number
    /// does not form or run with it again.
    pub fn may_follow(&self, before: &RoundRecord) -> bool {
        let (this, that) = ((self.generation, self.number), (before.generation, before.number));
        let ran = self.number == before.number && before.state != RoundState::Forming;
        let again = match self.state {
            RoundState::Forming => ran,
            RoundState::Running => ran && self.sealed != before.sealed,
            _ => false,
        };
        this >= that && self.number >= before.number && !again
    }
}

/// A member's place, `rounds/<n>/<plan>/<node>`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankRecord {
    /// The node's position in the round.
    pub group_rank: u32,
    /// Global rank of its first worker.
    pub first_rank: u32,
    /// Its workers.
    pub slots: u32,
    /// Rank of its first worker among those of its role.
    pub role_rank_base: u32,
    /// Workers of its role.
    pub role_world_size: u32,
    /// The node's name.
    pub name: String,
    /// Its machine id.
    pub machine: String,
    /// Its machine's boot.
    pub boot: String,
    /// Where its agent listens for pulses.
    pub peer: Endpoint,
    /// The node with the ranks before; none for the first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub before: Option<NodeId>,
    /// Where a replica has several nodes: the round since which its nodes and their workers are the same. In that round
    /// no worker of an earlier one continues.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replica_since: Option<u64>,
}

/// Who decides, `leader`. Its mod revision is the term.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaderRecord {
    /// The node, or the coordinator's replica.
    pub node: NodeId,
    /// Where it takes pulses.
    pub peer: Endpoint,
    /// Whether it is a replica of the coordinator service: no member of any round.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub coordinator: bool,
    /// Its release; none: the record names none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub release: Option<Release>,
}

impl LeaderRecord {
    /// A leader of this build.
    pub fn new(node: NodeId, peer: Endpoint, coordinator: bool) -> LeaderRecord {
        LeaderRecord { node, peer, coordinator, release: Some(Release::ours()) }
    }

    /// Who holds a `leader` key.
    ///
    /// # Errors
    /// Why no one does: what is there is not one of ours, or hangs on no lease, which would never end it. Who
    /// campaigns writes over it.
    pub fn held(kv: &KeyValue) -> Result<Versioned<LeaderRecord>, String> {
        let record = Versioned::parse(kv)?;
        if kv.lease.is_some() {
            return Ok(record);
        }
        let key = &kv.key;
        Err(format!("the record at {key} hangs on no lease, so nothing would end it: was it written by hand?"))
    }
}

/// What is known of an evicted node's workers at its eviction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Fate {
    /// Nothing: it may still be at work until its fence point, so the next round waits for that.
    Unknown,
    /// Its lease lapsed and it is silent: past its fence point, unless its whole group is cut off from the store.
    Fenced,
    /// Confirmed dead.
    Dead,
}

/// An evicted node, `evicted/<node>`. Kept while it is a member of the last sealed round, and then for some minutes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tombstone {
    /// The sealed round it was evicted from; zero if it had no place yet.
    pub round: u64,
    /// How much is known of its workers.
    pub fate: Fate,
    /// Why, for people.
    pub reason: String,
    /// It must not come back: its agent ends with the reason.
    #[serde(default)]
    pub refused: bool,
    /// The operator drains nodes of this name, and it has no place: its agent ends as one that left as planned.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub drained: bool,
}

/// A line of the job's history, `events/<number>`: what the leader did, or what an operator asked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EventRecord {
    /// Milliseconds since the Unix epoch on the writer's clock. For people: nothing in a job's life is decided by it.
    /// Only how long the records of an ended job are kept is counted from it.
    pub at_ms: u64,
    /// The round it led to; of a request, the round in which it was made.
    pub round: u64,
    /// That round's state.
    pub state: RoundState,
    /// What happened.
    pub reason: String,
    /// Nodes evicted by it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub evicted: Vec<NodeId>,
    /// The operator who asked for it; none where the leader did it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub asked_by: Option<Requester>,
}

/// A record and its place in history.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Versioned<T> {
    /// The record.
    pub value: T,
    /// When the key came into being.
    pub created: Revision,
    /// When it was last written.
    pub modified: Revision,
}

impl Versioned<Spec> {
    /// Reads a spec, whose values must fit together; the error names the key.
    pub fn parse_spec(kv: &KeyValue) -> Result<Versioned<Spec>, String> {
        let spec = Versioned::<Spec>::parse(kv)?;
        let problem = |error| format!("the record at {} cannot work ({error}): was it written by hand?", kv.key);
        spec.value.check().map_err(problem)?;
        Ok(spec)
    }
}

impl<T: DeserializeOwned> Versioned<T> {
    /// Reads a record; the error names the key.
    pub fn parse(kv: &KeyValue) -> Result<Versioned<T>, String> {
        let value = serde_json::from_slice(&kv.value).map_err(|error| {
            format!(
                "the record at {} is not one of ours ({error}): was it written by hand or by another version?",
                kv.key
            )
        })?;
        Ok(Versioned { value, created: kv.create_revision, modified: kv.mod_revision })
    }
}

/// A number that grows by one at a time. Who wrote one that could not grow has not counted.
fn counted<'de, D: Deserializer<'de>>(json: D) -> Result<u64, D::Error> {
    let number = u64::deserialize(json)?;
    // What every reader of JSON can tell from its neighbours.
    if number < 1 << 53 { Ok(number) } else { Err(D::Error::custom(format!("{number} was not reached by counting"))) }
}

/// Writes a record. Ours hold nothing that JSON cannot.
pub fn to_json<T: Serialize>(record: &T) -> Vec<u8> {
    serde_json::to_vec(record).unwrap_or_default()
}
