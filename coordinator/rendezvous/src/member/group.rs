//! What a driver asks of the agent that owns a node's workers, and what the agent reports. Both protocols use it.

use std::time::Duration;

use super::End;
use crate::job::{Endpoint, Failure, JobSecret, NodeId, RankRecord, RoundRecord, Spec};
use crate::time::Time;

/// What the agent is asked to do with its workers.
#[derive(Debug, Clone, PartialEq)]
pub enum Command {
    /// Start the workers of this place, or give it to those that quiesced; report [`GroupReport::Started`], later
    /// [`GroupReport::Ended`].
    Start(Box<Start>),
    /// Let workers quiesce once a round is forming, or stop them if they cannot, all within this time; report
    /// [`GroupReport::Quiesced`] or [`GroupReport::Stopped`].
    Quiesce(Duration),
    /// Start new workers instead of those that are gone, without places; report [`GroupReport::Quiesced`] when all
    /// are warm. If they cannot warm up, stop all and report [`GroupReport::Stopped`].
    WarmUp {
        /// The round that forms without this node.
        round: u64,
        /// Restarts charged to the job so far.
        restarts: u32,
        /// The time in which to stop them.
        grace: Duration,
    },
    /// Stop all workers, politely first, within this time; report [`GroupReport::Stopped`].
    Stop(Duration),
    /// Kill all workers at once; report [`GroupReport::Stopped`].
    Kill,
    /// Workers must not outlive this time, whatever happens to the agent. `None`: there are none.
    Fence(Option<Time>),
    /// The node leaves: from the stop signal on, workers have this long.
    Leaving(Duration),
    /// A round is forming: its number and the reason.
    Forming(u64, String),
    /// A line for the log.
    Say(String),
    /// The part of this node ends like this, and its workers are gone. Its key stays until [`GroupReport::Concluded`].
    /// A driver adds this command where the agent asked for it; no machine does.
    Conclude(NodeId, Box<End>),
}

/// What the agent reports of its workers, and what it asks.
#[derive(Debug, Clone, PartialEq)]
pub enum GroupReport {
    /// All workers of the round were started.
    Started(u64),
    /// Workers of the round ended by themselves.
    Ended {
        /// The round.
        round: u64,
        /// How.
        outcome: Outcome,
    },
    /// No worker is left, and none of their children.
    Stopped {
        /// A fresh address held for rank 0's bootstrap of the next round.
        master: Option<Endpoint>,
    },
    /// The workers that are left have quiesced: they touch nothing until they are given their next place.
    Quiesced {
        /// A fresh address held for rank 0's bootstrap of the next round.
        master: Option<Endpoint>,
        /// Whether none of the workers has died.
        whole: bool,
    },
    /// Whether the training of this round is over, and the workers only end.
    Finished {
        /// The round.
        round: u64,
        /// Whether it is.
        finished: bool,
    },
    /// Leave as planned; reported again: leave at once.
    Drain,
    /// The answer to [`Command::Conclude`]: nothing is left to do.
    Concluded,
}

/// How local workers ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// All exited with success.
    Done,
    /// One failed; the others may still run.
    Failed(Failure),
}

/// A place to start workers in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Start {
    /// The round as sealed.
    pub round: RoundRecord,
    /// The node's place in it.
    pub rank: RankRecord,
    /// The job's own spec, whatever this node was started with.
    pub spec: Spec,
    /// The job's secret, as this node has read it.
    pub secret: Option<JobSecret>,
}
