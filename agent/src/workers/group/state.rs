//! The group's state, as shown to others.

use elastic_rendezvous::time::Time;
use serde::Serialize;

/// The workers of this node.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub(crate) struct GroupState {
    /// The round that they were started in. 0 before the first round.
    pub round: u64,
    /// Empty while no workers run.
    pub workers: Vec<WorkerState>,
    /// When the guard kills the workers, unless the agent gives it a later time before. Code that waits for changes of
    /// this state is not woken for a change of this time.
    #[serde(skip)]
    pub fence: Option<Time>,
}

/// One worker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct WorkerState {
    /// `LOCAL_RANK`.
    pub local_rank: u32,
    /// `RANK`.
    pub rank: u32,
    /// Process id.
    pub pid: i32,
    /// How it ended, if it has.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exit: Option<String>,
}
