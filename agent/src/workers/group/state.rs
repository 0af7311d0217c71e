//! What others see of this node's workers.

use elastic_rendezvous::time::Time;
use serde::Serialize;
use tokio::sync::watch;

use super::LocalGroup;

/// The workers of this node, as shown to others.
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

impl GroupState {
    /// How many workers run.
    pub(crate) fn running(&self) -> usize {
        self.workers.iter().filter(|worker| worker.exit.is_none()).count()
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct WorkerState {
    pub local_rank: u32,
    pub rank: u32,
    pub pid: i32,
    /// How it ended, if it has.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exit: Option<String>,
}

impl LocalGroup {
    /// The workers' state, as it changes.
    pub(crate) fn state(&self) -> watch::Receiver<GroupState> {
        self.state.subscribe()
    }

    pub(super) fn publish(&self) {
        let workers = self.workers.iter().map(|(local_rank, worker)| WorkerState {
            local_rank: *local_rank,
            rank: worker.rank,
            pid: worker.pid,
            exit: worker.exit.map(|exit| exit.to_string()),
        });
        let workers = workers.collect();
        self.state.send_modify(|state| {
            (state.round, state.workers) = (self.round, workers);
        });
    }
}
