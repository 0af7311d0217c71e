//! Decides how a worker uses the agent's memory for snapshots, from one round to the next.

#![deny(clippy::disallowed_methods, clippy::disallowed_types)]

/// What this worker has done about the agent's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum AgentMemory {
    /// The worker has not asked for the memory.
    Unasked,
    /// It keeps snapshots there.
    Kept,
    /// It asked only to find what an earlier worker has left, and gives the memory back once the ranks agree.
    Looking,
    /// It kept snapshots there until this round, and gives the memory back once the ranks agree.
    Leaving,
    /// It has given the memory back.
    Returned,
}

impl AgentMemory {
    /// What follows in a new round, and whether the agent is asked for the memory. `keeps` says that this node keeps
    /// snapshots in that round, `held` that the worker holds a state, so that it need not look for one.
    pub(super) fn in_round(self, keeps: bool, held: bool) -> (AgentMemory, bool) {
        match (self, keeps) {
            // Its slots are still in use.
            (AgentMemory::Kept | AgentMemory::Leaving, true) => (AgentMemory::Kept, false),
            (_, true) => (AgentMemory::Kept, true),
            (AgentMemory::Unasked, false) if !held => (AgentMemory::Looking, true),
            (AgentMemory::Kept, false) => (AgentMemory::Leaving, false),
            (state, false) => (state, false),
        }
    }

    /// Whether the memory is to be given back.
    pub(super) fn is_to_return(self) -> bool {
        matches!(self, AgentMemory::Looking | AgentMemory::Leaving)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_round_keeps_looks_or_leaves() {
        use AgentMemory::{Kept, Leaving, Looking, Returned, Unasked};
        // Before; where the node keeps snapshots; where it does not, without a state and with one. True: it asks.
        for (before, keeps, without, with) in [
            (Unasked, (Kept, true), (Looking, true), (Unasked, false)),
            (Kept, (Kept, false), (Leaving, false), (Leaving, false)),
            (Looking, (Kept, true), (Looking, false), (Looking, false)),
            (Leaving, (Kept, false), (Leaving, false), (Leaving, false)),
            (Returned, (Kept, true), (Returned, false), (Returned, false)),
        ] {
            let rounds = [(true, false), (true, true), (false, false), (false, true)];
            let after = rounds.map(|(keeps, held)| before.in_round(keeps, held));
            assert_eq!(after, [keeps, keeps, without, with], "{before:?}");
        }
    }
}
