//! What the agent hears of its workers.

use std::time::Duration;

use elastic_rendezvous::time::Time;

use super::Refused;
use crate::guard::Exit;

/// A worker's end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Exited {
    /// Which worker of this node.
    pub local_rank: u32,
    /// Its process id, which may be in use again by now.
    pub pid: i32,
    /// How it ended.
    pub exit: Exit,
    /// When the guard saw it.
    pub at: Time,
}

/// What a [`GuardClient`](super::GuardClient) reports.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// A worker's program runs.
    Started {
        /// Which worker of this node.
        local_rank: u32,
        /// Its process id.
        pid: i32,
    },
    /// A worker was not started. No other event follows for it.
    NotStarted {
        /// Which worker of this node.
        local_rank: u32,
        /// Why.
        refused: Refused,
    },
    /// A worker has ended, by itself or because it was stopped.
    Exited(Exited),
    /// The deadline has passed, and everything got SIGKILL. Exits and [`Event::Stopped`] follow.
    DeadlineKilled {
        /// When the guard acted.
        at: Time,
    },
    /// Nothing is left that any worker started. This follows a stop or a passed deadline. It also follows the loss of
    /// the guard, if a stop was begun.
    Stopped,
    /// The workers are gone, and these processes that they started are not.
    Left {
        /// Their process ids.
        processes: Vec<i32>,
        /// How long they have until they get the stop signal.
        patience: Duration,
    },
    /// Some processes still live five seconds after SIGKILL. They wait in the kernel, or now belong to another user.
    Survivors {
        /// Each is written as `pid 4711 (python3, state D)`.
        processes: Vec<String>,
    },
    /// Workers are forked from the nursery from now on.
    Preloaded {
        /// The nursery's process id.
        pid: i32,
    },
    /// There is no nursery any more. Workers start as usual.
    NotPreloaded {
        /// Why it ended by itself or is of no use. None: it was killed with everything else.
        why: Option<String>,
    },
    /// The guard has ended before the agent, or was killed because it was frozen. Nothing can be started any more.
    GuardLost {
        /// How it ended.
        cause: String,
        /// Processes that could not be ended within five seconds, as in [`Event::Survivors`].
        survivors: Vec<String>,
    },
}
