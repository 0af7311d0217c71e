//! Agents and the hosts they run on, as plain state.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use elastic_rendezvous::job::{Endpoint, JobSecret, Keys, NodeId, NodeRecord, samples};
use elastic_rendezvous::time::Time;
use elastic_rendezvous::{
    End, Leader, LeaderInput, LeaderOutput, Member, MemberInput, MemberOutput, MemberSetup, Start,
};
use elastic_store::Revision;

use crate::clock::Clock;
use crate::scenario::Scenario;

pub(crate) struct Host {
    pub(crate) clock: Clock,
    pub(crate) up: bool,
    pub(crate) boot: u32,
    /// The host cannot reach the store.
    pub(crate) cut_off: bool,
}

/// What reaches a process.
#[derive(Debug, Clone)]
pub(crate) enum Input {
    Member(MemberInput),
    Leader(Revision, LeaderInput),
    /// A member opens a stream.
    Hello {
        from: usize,
        stream: u64,
        node: NodeId,
    },
    /// A member's beat: when it was sent, and the newest probe seen.
    Beat {
        from: usize,
        stream: u64,
        node: NodeId,
        sent: Time,
        probe: u64,
        echo: Option<Time>,
    },
    /// The leader's answer to a beat: when it was said, on the leader's clock.
    Word {
        stream: u64,
        said: Time,
        sent: Time,
        term: Revision,
        word: elastic_rendezvous::Word,
    },
    /// The leader asks for a beat at once.
    Probe {
        stream: u64,
        number: u64,
    },
    /// A stream that was opened to this process ended.
    Closed {
        stream: u64,
    },
}

/// A node's local worker group.
pub(crate) struct Tree {
    pub(crate) id: u64,
    pub(crate) round: u64,
    /// Its workers have all exited.
    pub(crate) quiet: bool,
    /// Its workers live, and touch nothing until they are given a place.
    pub(crate) at_rest: bool,
    /// One of its workers has died.
    pub(crate) short: bool,
}

/// How far workers that know about rounds are on their way to rest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Rest {
    No,
    /// To quiesce within this time, once a round is forming.
    Asked(Duration),
    Begun,
    /// New workers are being started without a place, beside those at rest.
    WarmingUp,
}

/// A member's stream to its leader.
#[derive(Clone)]
pub(crate) struct Stream {
    pub(crate) id: u64,
    pub(crate) leader: NodeId,
    pub(crate) port: u16,
    pub(crate) open: bool,
    /// Being dialled since: after patience runs out the death is not confirmed, and it begins again.
    pub(crate) term: Revision,
    pub(crate) probe: u64,
    /// When the newest word was said that came over it.
    pub(crate) echo: Option<Time>,
}

/// One agent process.
pub(crate) struct Process {
    pub(crate) host: usize,
    pub(crate) alive: bool,
    pub(crate) frozen: bool,
    /// It will freeze between its next step and what that step asks for, for so long.
    pub(crate) trips: Option<u64>,
    /// The same of the next record that its leader writes.
    pub(crate) stalls: Option<u64>,
    /// What a step asked for before the process froze.
    pub(crate) held: Vec<MemberOutput>,
    pub(crate) held_by_leader: Vec<LeaderOutput>,
    /// It was there when history was lost, so it may know of what is not true any more.
    pub(crate) before: bool,
    pub(crate) backlog: VecDeque<Input>,
    /// Counts the incarnations of this process: whatever is meant for an earlier one is dropped.
    pub(crate) life: u32,
    pub(crate) member: Member,
    pub(crate) leader: Option<Leader>,
    /// Nodes' keys that the watch has reported to the leader in this term, and their newest revisions.
    pub(crate) told: BTreeMap<NodeId, Revision>,
    pub(crate) end: Option<End>,
    pub(crate) tree: Option<Tree>,
    pub(crate) start: Option<Start>,
    /// The member knows that its workers are gone, or there never were any.
    pub(crate) stopped_told: bool,
    /// Stopping was asked for.
    pub(crate) stop_asked: bool,
    pub(crate) rest: Rest,
    /// The workers know that a round is forming.
    pub(crate) forming_told: bool,
    /// The guard's deadline.
    pub(crate) fence: Option<Time>,
    pub(crate) stream: Option<Stream>,
    /// Streams opened to it: the stream, the other process, its node.
    pub(crate) streams: Vec<(u64, usize, NodeId)>,
    pub(crate) tick_at: u64,
    /// Ticks that changed nothing, one right after the other.
    pub(crate) spins: u32,
    pub(crate) drained: bool,
    /// The operator asked for it to leave, at some time.
    pub(crate) sent_away: bool,
    /// The operator evicted it.
    pub(crate) evicted_by_operator: bool,
}

impl Process {
    pub(crate) fn id(&self) -> NodeId {
        self.member.id()
    }

    pub(crate) fn at_work(&self) -> Option<u64> {
        self.tree.as_ref().filter(|tree| !tree.quiet && !tree.at_rest).map(|tree| tree.round)
    }
}

/// Builds a node's setup. Ports are process numbers, so no two processes ever share one.
pub(crate) fn setup(
    scenario: &Scenario,
    keys: &Keys,
    host: usize,
    boot: u32,
    process: usize,
    life: u32,
) -> MemberSetup {
    let name = format!("n{}", if scenario.clash && host == 1 { 0 } else { host });
    let record = NodeRecord {
        incarnation: format!("p{process}l{life}"),
        machine: format!("machine-{host}"),
        boot: format!("boot-{boot}"),
        peer: Endpoint { host: name.clone(), port: process as u16 },
        slots: scenario.slots[host],
        role: if host % 3 == 2 { "reader".into() } else { "default".into() },
        master: Some(Endpoint { host: name.clone(), port: 29_400 }),
        place: scenario.place(host),
        warms_up: scenario.warms_up(host),
        introduces: true,
        ..samples::node(&name)
    };
    MemberSetup {
        record,
        spec: scenario.spec.clone(),
        keys: keys.clone(),
        secret: JobSecret::of([7; JobSecret::LENGTH]),
        may_lead: true,
        seed: (process as u64 + 1) * 7919 + u64::from(life),
    }
}
