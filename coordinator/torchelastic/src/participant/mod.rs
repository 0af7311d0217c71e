//! A node's own steps in TorchElastic's rendezvous, as a machine.
//!
//! ```text
//!            no one made one              all confirmed          ranks are known      all workers ended well
//!  seeking ─────────────────▶ making ─┐    ┌──────▶ exchanging ─────────▶ working ─────────────────────▶ done
//!   ▲   └──── joinable ───────────────┴▶ joined                             │                             │
//!   └───────── somebody waits, is gone, or failed; the version was replaced ┴─────────────────────────────┘
//! ```
//!
//! One request is on its way at a time. Whatever its outcome, the next one follows from what is known then, so an answer
//! that is lost costs a read and no more. At the same time run the watch and the upkeep of what has a time to live.

#![deny(clippy::disallowed_methods, clippy::disallowed_types)]

mod answers;
mod ending;
mod join;
mod member;

mod steps;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::time::Duration;

use super::keys::Paths;
use super::state::{JobEnd, RendezvousState};
use super::view::VersionView;
use crate::etcd_v2::{Answer, News, Request};
use elastic_node::Membership;
use elastic_rendezvous::job::{Endpoint, Failure, NodeRecord, RankRecord, RoundRecord, RoundState, Spec};
use elastic_rendezvous::time::Time;
use elastic_rendezvous::{Command, End, GroupReport, Start};
use elastic_store::StoreError;

/// Time to live of a state that is being made, of one that can be joined once the minimum is there, and of a frozen one.
const SETUP_TTL: u64 = 5;
const JOINABLE_TTL: u64 = 10;
const FROZEN_TTL: u64 = 10;
/// Time to live of all that is the job's, and how often a live node begins it again.
const RUN_TTL: u64 = 7200;
const RUN_UPKEEP: Duration = Duration::from_secs(1800);

/// torchrun looks ten times a second whether anybody waits. A version that it is in is not deleted before that time, or
/// it would continue in it.
const NOTICE: Duration = Duration::from_secs(1);
/// How long a sign of life may be missing while etcd was just away: a node that lives puts it back.
const PUT_BACK: Duration = Duration::from_secs(2);
/// How long at least a version can be joined; and where torchrun's nodes are near, which look again after a second.
const LAST_CALL: Duration = Duration::from_millis(300);
const TORCHRUNS_LAST_CALL: Duration = Duration::from_secs(3);
/// How long torchrun's nodes count as near after they were seen last.
const NEAR: Duration = Duration::from_secs(60);
/// How long torchrun waits for ranks and for the others' end.
const PATIENCE: Duration = Duration::from_secs(300);
/// How long a worker's error about a peer waits for news of that peer, before it counts as its own.
const BLAME: Duration = Duration::from_secs(1);
/// How long a leaving node without workers tries to tell the others.
const FAREWELL: Duration = Duration::from_secs(2);

const CLOSED_BY_TORCHRUN: &str =
    "a node that runs torchrun has failed for good, or was ended, and closed the rendezvous: its own output says why";

/// What a node is before it joins.
#[derive(Debug, Clone)]
pub struct ParticipantSetup {
    /// Who it is.
    pub record: NodeRecord,
    /// Nodes, restarts and timings. Unlike in our own protocol nothing compares them among nodes.
    pub spec: Spec,
    /// Where the job lives.
    pub paths: Paths,
    /// `TORCH_ELASTIC_WORKER_IDENTICAL=1`: all nodes have as many workers of one role, and no ranks are exchanged.
    pub identical: bool,
    /// Seeds the small delays that keep nodes apart.
    pub seed: u64,
}

/// What keeps itself by being refreshed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Upkeep {
    /// The node's sign of life.
    Rank,
    /// The job's directory.
    Run,
}

/// The inputs of a node.
#[derive(Debug, Clone)]
pub enum Input {
    /// It begins, or time has passed.
    Tick,
    /// The answer to [`Output::Ask`].
    Answered(Result<Answer, StoreError>),
    /// The answer to [`Output::Refresh`], which was sent then.
    Refreshed(Upkeep, Time, Result<Answer, StoreError>),
    /// What came out of [`Output::Watch`].
    News(Result<News, StoreError>),
    /// The agent's report about the local workers.
    Agent(GroupReport),
}

/// What a node wants done.
#[derive(Debug, Clone, PartialEq)]
pub enum Output {
    /// Send this and answer with [`Input::Answered`]. There is never more than one.
    Ask(Request),
    /// Send this and answer with [`Input::Refreshed`].
    Refresh(Upkeep, Request),
    /// Wait for a change of anything in this directory from this index on; answer once, with [`Input::News`].
    Watch(String, u64),
    /// Pass this on to the agent.
    Agent(Command),
    /// The agent's part is over; its workers are gone.
    End(End),
}

impl From<Command> for Output {
    fn from(command: Command) -> Output {
        Output::Agent(command)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Workers {
    None,
    Alive,
    Stopping,
}

/// A version this node has a rank in.
#[derive(Debug, Clone, PartialEq, Eq)]
struct VersionRank {
    version: String,
    rank: u32,
}

#[derive(Debug, Clone, PartialEq)]
enum Stage {
    /// Ranks are being told.
    Exchanging(Time),
    Working,
    /// One failed, by its own account because of a peer.
    Blaming(Box<Failure>, Time),
    /// They ended well, and the others' end is awaited. Once counted: as which.
    Done {
        counted: Option<u32>,
        tried: Option<u32>,
        since: Time,
    },
}

/// How a version is made: step by step. Each step must succeed before its setup's time to live ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Making {
    Counter,
    Bump { number: u64, index: u64 },
    Directory(u64),
    Publish(u64),
}

#[derive(Debug, Clone, PartialEq)]
enum Mode {
    /// Looking for torchrun's other protocol, then making directories: so many are there.
    Opening(usize),
    /// Without a place.
    Seeking,
    Making(String, Making),
    /// In a version that can still be joined, since then, or is frozen.
    Joined(VersionRank, Time),
    /// In a version that is final, of that size.
    Member(VersionRank, u32, Stage),
    Ending(Box<Ending>),
    Over,
}

#[derive(Debug, Clone, PartialEq)]
struct Ending {
    end: End,
    /// The place it leaves, and the size of its version.
    place: Option<(VersionRank, u32)>,
    /// What the others can rely on.
    close: Option<JobEnd>,
    /// It makes room for a group without it.
    makes_room: bool,
    /// When it goes without having told the others; none before its workers are gone.
    by: Option<Time>,
}

/// What a compare-and-swap of the state is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Swap {
    Publish,
    Join(u32),
    Hold,
    Freeze,
    Confirm,
    Announce,
    Close,
}

#[derive(Debug, Clone, PartialEq)]
enum Call {
    Foreign,
    Open,
    ReadActive,
    ReadFiles(String),
    Setup(String),
    Make(Making),
    Swap(Swap, String),
    Free,
    OwnKey(VersionRank),
    DropKey(VersionRank),
    Tell { version: String, file: String, value: String },
    Count { version: String, number: u32, value: String },
}

#[derive(Debug, Clone)]
struct KeepAliveKey {
    place: VersionRank,
    /// When the last refresh that succeeded was sent.
    kept: Time,
    refresh_at: Time,
    asked: bool,
}

/// A node.
#[derive(Debug, Clone)]
pub struct Participant {
    setup: ParticipantSetup,
    id: String,
    view: VersionView,
    mode: Mode,
    workers: Workers,
    call: Option<Call>,
    retry_at: Time,
    watching: bool,
    watch_at: Time,
    key: Option<KeepAliveKey>,
    run_at: Option<Time>,
    run_asked: bool,
    /// When it was first seen that the version is to be given up.
    waits_since: Option<(String, Time)>,
    /// When nodes of torchrun's kind were seen last.
    torchruns: Option<Time>,
    /// Members whose sign of life is missing, and since when.
    missing: BTreeMap<u32, Time>,
    /// When the last refresh of a state that waits for a last call was sent.
    held_at: Time,
    /// When etcd last failed to answer, and with which words.
    away: Option<(Time, String)>,
    /// Since when there is no group that works.
    idle_since: Option<Time>,
    /// It was a member of some version, or waited beside one: the job's end is its own.
    takes_part: bool,
    restarts: u32,
    master: Option<Endpoint>,
    round: Option<RoundRecord>,
    said: Option<String>,
    wake: Option<Time>,
    random: u64,
    outputs: Vec<Output>,
}

impl Participant {
    /// A node that has not joined yet. Feed it an [`Input::Tick`] to begin.
    pub fn new(setup: ParticipantSetup) -> Participant {
        Participant {
            id: setup.record.id().to_string(),
            view: VersionView::new(setup.paths.clone()),
            master: setup.record.master.clone(),
            random: setup.seed | 1,
            setup,
            mode: Mode::Opening(0),
            workers: Workers::None,
            call: None,
            retry_at: Time::ZERO,
            watching: false,
            watch_at: Time::ZERO,
            key: None,
            run_at: None,
            run_asked: false,
            waits_since: None,
            torchruns: None,
            missing: BTreeMap::new(),
            held_at: Time::ZERO,
            away: None,
            idle_since: None,
            takes_part: false,
            restarts: 0,
            round: None,
            said: None,
            wake: None,
            outputs: Vec::new(),
        }
    }

    /// Takes what happened; returns what to do about it.
    pub fn step(&mut self, now: Time, input: Input) -> Vec<Output> {
        if self.mode != Mode::Over {
            self.wake = None;
            self.take(now, input);
            self.settle(now);
        }
        std::mem::take(&mut self.outputs)
    }

    /// When it wants to be called again. To be called early is harmless.
    pub fn deadline(&self) -> Option<Time> {
        self.wake
    }

    /// The version at hand, in our own protocol's words.
    pub fn round(&self) -> Option<&RoundRecord> {
        self.round.as_ref()
    }

    /// Where its workers run, if they do.
    pub fn at_work(&self) -> Option<Membership> {
        match &self.mode {
            &Mode::Member(ref place, group_world_size, ref stage) if !matches!(stage, Stage::Exchanging(_)) => {
                Some(Membership { version: number(&place.version), group_rank: place.rank, group_world_size })
            }
            _ => None,
        }
    }

    fn put(&mut self, output: impl Into<Output>) {
        self.outputs.push(output.into());
    }

    /// Says a line, unless it was the last one said.
    fn say(&mut self, line: impl Into<String>) {
        let line = line.into();
        if self.said.as_ref() != Some(&line) {
            self.said = Some(line.clone());
            self.put(Command::Say(line));
        }
    }

    fn wake_at(&mut self, at: Time) {
        self.wake = Some(self.wake.map_or(at, |wake| wake.min(at)));
    }

    /// Whether that time has come; if not, it is called again then.
    fn is_time(&mut self, now: Time, at: Time) -> bool {
        if now < at {
            self.wake_at(at);
        }
        now >= at
    }

    /// Time to live of a sign of life, in etcd's whole seconds.
    fn ttl(&self) -> u64 {
        self.setup.spec.timings.lease_ttl.as_secs().max(2)
    }

    /// A number below `bound`, for delays that keep nodes apart (xorshift64).
    fn jitter(&mut self, bound: Duration) -> Duration {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        Duration::from_nanos(self.random % (bound.as_nanos() as u64).max(1))
    }

    fn start(&mut self, place: &VersionRank, seat: super::exchange::Ranks, size: u32) {
        let reason = format!("version {} is final, with {size} nodes", place.version);
        let round = RoundRecord {
            state: RoundState::Running,
            group_world_size: size,
            world_size: seat.world_size,
            master: Some(seat.master),
            restarts: self.restarts,
            ..RoundRecord::forming(number(&place.version), 1, &reason)
        };
        let record = &self.setup.record;
        let rank = RankRecord {
            group_rank: place.rank,
            first_rank: seat.first_rank,
            slots: record.slots,
            role_rank_base: seat.role_rank_base,
            role_world_size: seat.role_world_size,
            name: record.name.clone(),
            machine: record.machine.clone(),
            boot: record.boot.clone(),
            peer: record.peer.clone(),
            before: None,
            replica_since: None,
        };
        self.round = Some(round.clone());
        self.idle_since = None;
        self.workers = Workers::Alive;
        let spec = self.setup.spec.clone();
        self.put(Command::Start(Box::new(Start { round, rank, spec, secret: None })));
    }

    /// Tells the workers to stop, if there may be any.
    fn stop(&mut self, grace: Duration) {
        if self.workers == Workers::Alive {
            self.workers = Workers::Stopping;
            self.put(Command::Stop(grace));
        }
    }
}

fn number(version: &str) -> u64 {
    version.parse().unwrap_or(0)
}

/// The members of a state that no elastic agent is.
fn torchruns(state: &RendezvousState) -> impl Iterator<Item = u32> {
    (0..state.size()).filter(|rank| !state.agents.contains_key(rank))
}
