//! A node's own steps, as a machine: it joins, waits for a place, starts workers, reports, stops, and leaves. It does
//! no IO and decides nothing about other nodes.
//!
//! ```text
//!              seat in running n             all workers ended well
//!   joining ─▶ waiting ─────────▶ working n ─────────────────────▶ done n
//!               ▲  ▲                │   │ a worker failed             │
//!               │  │      forming   │   └──────────▶ failed n         │
//!               │  └────────────────┴──── n+1 ◀───────┴──── n+1 ◀─────┘
//!               ├─ newcomer again, if the round continued without it
//!               └─ warming up, if workers of it died, and the round continues without it
//! ```
//!
//! On the way back to `waiting` the workers are stopped, or they quiesce: workers that know about rounds stay as they
//! are, touch nothing, and continue in the next place. To everybody else both are the same.
//!
//! This is its `Mode`. `Workers` says whether workers are alive, since they outlive a mode while they stop, and
//! `fence.rs` how long they may be. From any mode it may come to its end: `ending` or `evicted` until no worker is
//! left, then `over`.
//!
//! | module | what it is |
//! |---|---|
//! | `step` | takes an input, then does what is due |
//! | `timers` | when it wants to be called |
//! | `join` | reading the job, beginning it or its next generation |
//! | `rounds` | what news of the round mean, and finding its place |
//! | `own_key` | bringing its key to what it wants to say |
//! | `lease` | the lease that this key hangs on |
//! | `group` | what drivers and the agent say about the workers |
//! | `fence` | how long its workers may live |
//! | `leadership` | who leads, and when it campaigns |
//! | `leaving` | how its part ends |

mod fence;
mod group;
mod join;
mod leadership;
mod lease;
mod leaving;
mod own_key;
mod rounds;
mod step;
#[cfg(test)]
mod tests;
mod timers;

use std::collections::BTreeSet;
use std::time::Duration;

use crate::job::{
    Endpoint, Failure, JobSecret, Keys, LeaderRecord, NodeId, NodeRecord, RoundRecord, RoundState, Spec, Versioned,
};
use crate::kv::{LeaseId, Revision, Scope, StoreError, Txn, TxnResult, WatchUpdate};
use crate::time::Time;

use self::fence::Proofs;
pub use self::group::{Command, GroupReport, Outcome, Start};
use self::join::Joining;
use self::leadership::Leadership;
use self::lease::Lease;
use self::own_key::OwnKey;
use self::rounds::SeatLookup;
use self::timers::Timers;
use super::leader::Word;
use super::view::Former;

/// What a node is before it joins.
#[derive(Debug, Clone)]
pub struct MemberSetup {
    /// Who it is; its phase and round are set by its steps.
    pub record: NodeRecord,
    /// What it was started with; the job's own spec must agree.
    pub spec: Spec,
    /// Where the job lives.
    pub keys: Keys,
    /// The secret of the job, if this node begins it or its next generation.
    pub secret: JobSecret,
    /// Whether it may lead. Agents may; a driver that only observes may not.
    pub may_lead: bool,
    /// Seeds the small delays that keep campaigns apart.
    pub seed: u64,
}

/// Which of a node's transactions was answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Call {
    /// Reading the job.
    Join,
    /// Beginning a job or a generation.
    Begin,
    /// Writing its own key.
    Own,
    /// Reading the round, the leader and its own key after an unknown outcome.
    ReadBack,
    /// Reading its place.
    Seat,
    /// Writing the `leader` key.
    Campaign,
}

/// The inputs of a node.
#[derive(Debug, Clone)]
pub enum MemberInput {
    /// It begins, or time has passed.
    Tick,
    /// The answer to a transaction.
    Answered {
        /// Which.
        call: Call,
        /// When it was sent.
        sent: Time,
        /// The answer.
        result: Result<TxnResult, StoreError>,
    },
    /// The answer to a lease request.
    Leased {
        /// When it was sent: the lease's time counts from here.
        sent: Time,
        /// The answer.
        result: Result<LeaseId, StoreError>,
    },
    /// The answer to a renewal: whether the lease still exists.
    Renewed {
        /// When it was sent.
        sent: Time,
        /// The lease.
        lease: LeaseId,
        /// The answer.
        result: Result<bool, StoreError>,
    },
    /// News from a watch that it asked for.
    Watched(WatchUpdate),
    /// The leader's answer to a beat.
    Word {
        /// When the beat was sent.
        sent: Time,
        /// The leader's term.
        term: Revision,
        /// What it said.
        word: Word,
    },
    /// The death of the leader of this term is confirmed.
    LeaderDead(Revision),
    /// The agent's report about the local workers.
    Agent(GroupReport),
}

/// How an agent's part in a job ends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum End {
    /// The job succeeded.
    Succeeded,
    /// The job failed, with its one root cause.
    Failed(Option<Failure>, String),
    /// The operator closed the job.
    Closed,
    /// The node left as planned.
    Drained,
    /// The node may not take part.
    Refused(String),
    /// The store is another one than before, or refuses us.
    StoreLost(String),
}

/// What a node wants done.
#[derive(Debug, Clone, PartialEq)]
pub enum MemberOutput {
    /// Run this transaction and answer with [`MemberInput::Answered`].
    Txn(Call, Txn),
    /// Grant a lease of this time to live.
    Grant(Duration),
    /// Renew this lease.
    Renew(LeaseId),
    /// Give this lease up.
    Revoke(LeaseId),
    /// Watch this and report with [`MemberInput::Watched`].
    Watch(Scope, Revision),
    /// End the old pulse stream; open one to this leader.
    Pulse(Option<(Revision, LeaderRecord)>),
    /// It leads from now on, in this term, after that leader.
    Lead(Revision, Option<Former>),
    /// It leads no more.
    StopLeading,
    /// Pass this on to the agent.
    Agent(Command),
    /// This incarnation was evicted, and its workers are gone: join again as a new one.
    Rejoin(String),
    /// The agent's part is over; its workers are gone.
    End(End),
    /// The secret of the job that it has joined. None where the store has lost it.
    Secret(Option<JobSecret>),
    /// A line for the log that asks somebody to do something.
    Warn(String),
}

impl From<Command> for MemberOutput {
    fn from(command: Command) -> MemberOutput {
        MemberOutput::Agent(command)
    }
}

impl From<GroupReport> for MemberInput {
    fn from(report: GroupReport) -> MemberInput {
        MemberInput::Agent(report)
    }
}

/// What proves a member's right to commit: see `elastic_coordinator::workers`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Credentials {
    /// The node.
    pub node: NodeId,
    /// Its own key's create revision.
    pub created: Revision,
    /// The round it is a member of.
    pub round: u64,
    /// The `round` record as last seen.
    pub current: Versioned<RoundRecord>,
}

/// Local workers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Workers {
    /// There are none.
    None,
    /// Those of this round may be alive.
    Alive(u64),
    /// Those of this round had to quiesce, or to end if they cannot.
    Quiescing(u64),
    /// They are alive, and at rest.
    Quiesced,
    /// Those that are left are at rest, and others have died.
    Short,
    /// Some are being started before their next place is known, and the others are at rest.
    WarmingUp,
    /// They had to end, and may take their grace: those of this round, unless they were at rest.
    Stopping(Option<u64>),
    /// Started before the node had ever had a place, they had to end. They have touched nothing, so no fence point
    /// is theirs.
    Dismissed,
    /// They were killed; the last of them is being waited for.
    Killed,
}

/// What the node is up to.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Mode {
    /// Reading the job, agreeing on its spec.
    Joining,
    /// Without workers, waiting for a place: as a member of the last round in exactly this one, or as a newcomer.
    Waiting(Option<u64>),
    /// Its workers of this round are being started.
    Starting(u64),
    /// They run.
    Running(u64),
    /// They ended well.
    Done(u64),
    /// One of them failed.
    Failed(u64, Failure),
    /// This round runs without it, and new workers are started instead of those that died. When they are warm, it
    /// wants a place again.
    WarmingUp(u64),
    /// A planned leave from this round; once another is forming, the workers are stopped for that one.
    Leaving(u64, Option<u64>),
    /// Workers are being stopped; then the node ends like this.
    Ending(End),
    /// Workers are being killed after an eviction.
    Evicted(String),
    /// Nothing follows.
    Over,
}

impl Workers {
    /// Whether none of them can do anything: there are none, or they have quiesced.
    fn are_at_rest(self) -> bool {
        matches!(self, Workers::None | Workers::Quiesced | Workers::Short)
    }
}

/// Whether it was asked to leave as planned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Leave {
    /// It stays.
    No,
    /// It was asked.
    Asked,
    /// It was asked again: at once.
    Hurried,
}

/// A node.
#[derive(Debug, Clone)]
pub struct Member {
    setup: MemberSetup,
    /// What the job agreed on; the own spec until that is read.
    spec: Spec,
    mode: Mode,
    workers: Workers,
    leave: Leave,
    /// What it knows of the job before it has joined; `None` after that.
    joining: Option<Joining>,
    timers: Timers,
    lease: Lease,
    /// When that lease was granted.
    granted: Time,
    /// When it was last known to be good.
    renewed: Time,
    /// How long the store took for its last answer to a transaction.
    answered_in: Duration,
    proofs: Proofs,
    own: OwnKey,
    leadership: Leadership,
    /// The store refuses what this node writes, or its renewals, as far as it has said last.
    refused: bool,
    round: Option<Versioned<RoundRecord>>,
    /// When that came into its stage, where this node saw it do so.
    stage_since: Option<Time>,
    /// The revision of the `round` record under which this node is known not to be evicted.
    validated: Revision,
    seat: SeatLookup,
    /// An address held for rank 0's bootstrap of the next round.
    master: Option<Endpoint>,
    /// The round whose training is over, as its workers said last.
    finished: Option<u64>,
    /// The job's secret, once read.
    secret: Option<JobSecret>,
    /// Transactions under way.
    calls: Vec<Call>,
    /// Calls that failed in a row.
    failures: u32,
    /// The fence point as last told.
    fence: Option<Time>,
    /// What was said last, so that it is not said at every try.
    told: Option<String>,
    /// What was warned of: once is enough.
    warned: BTreeSet<String>,
    random: u64,
}

impl Member {
    /// A node that has not joined yet. Feed it a [`MemberInput::Tick`] to begin.
    pub fn new(setup: MemberSetup) -> Member {
        Member {
            spec: setup.spec.clone(),
            master: setup.record.master.clone(),
            own: OwnKey::new(&setup.keys, &setup.record),
            random: setup.seed | 1,
            setup,
            mode: Mode::Joining,
            workers: Workers::None,
            leave: Leave::No,
            joining: Some(Joining::default()),
            timers: Timers::new(),
            lease: Lease::None,
            granted: Time::ZERO,
            renewed: Time::ZERO,
            answered_in: Duration::ZERO,
            proofs: Proofs::default(),
            leadership: Leadership::default(),
            refused: false,
            finished: None,
            secret: None,
            round: None,
            stage_since: None,
            validated: Revision::NONE,
            seat: SeatLookup::default(),
            calls: Vec::new(),
            failures: 0,
            fence: None,
            told: None,
            warned: BTreeSet::new(),
        }
    }

    /// The node's id.
    pub fn id(&self) -> NodeId {
        self.setup.record.id()
    }

    /// What the job agreed on.
    pub fn spec(&self) -> &Spec {
        &self.spec
    }

    /// The round as last seen.
    pub fn round(&self) -> Option<&Versioned<RoundRecord>> {
        self.round.as_ref()
    }

    /// The round's stage, and since when it is in that, where this node saw it begin.
    pub fn stage_seen(&self) -> Option<((u64, RoundState, bool), Time)> {
        Some((self.round.as_ref()?.value.stage(), self.stage_since?))
    }

    /// The term it leads in.
    pub fn leading(&self) -> Option<Revision> {
        self.leadership.own_term
    }

    /// What it is up to, in a word: for status pages and for tests that want to know what they have reached.
    pub fn mode_name(&self) -> &'static str {
        match self.mode {
            Mode::Joining => "joining",
            Mode::Waiting(_) => "waiting",
            Mode::Starting(_) => "starting",
            Mode::Running(_) => "running",
            Mode::Done(_) => "done",
            Mode::Failed(..) => "failed",
            Mode::WarmingUp(_) => "warming up",
            Mode::Leaving(..) => "leaving",
            Mode::Ending(_) => "ending",
            Mode::Evicted(_) => "evicted",
            Mode::Over => "over",
        }
    }

    /// Its part in the job is over.
    pub fn is_over(&self) -> bool {
        self.mode == Mode::Over
    }

    /// What lets it commit in the round it is a member of; `None` while it is a member of none.
    pub fn credentials(&self) -> Option<Credentials> {
        let round = match (&self.mode, self.workers) {
            (Mode::Starting(round) | Mode::Running(round), _) => *round,
            // A worker that must end may save first: the commit is guarded as any other.
            (_, Workers::Alive(round) | Workers::Quiescing(round) | Workers::Stopping(Some(round))) => round,
            _ => return None,
        };
        Some(Credentials { node: self.id(), created: self.own.created()?, round, current: self.round.clone()? })
    }

    /// A number below `bound`, for delays that keep nodes apart (xorshift64).
    fn jitter(&mut self, bound: Duration) -> Duration {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        Duration::from_nanos(self.random % (bound.as_nanos() as u64).max(1))
    }
}
