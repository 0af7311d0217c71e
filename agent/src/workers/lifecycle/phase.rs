//! What a node waits for, apart from its workers' own events.
//!
//! ```text
//!   Settled ── a start or a warm-up waits for GPUs ──▶ Pending ── they are free ──▶ Settled or WarmingUp
//!   Settled, Pending ── warm up ──▶ WarmingUp ── all are warm, or are stopped ──▶ Settled
//!   Settled, Pending ── quiesce ──▶ Resting ── all are at rest, or are stopped ──▶ Settled
//!   Settled ── conclude, with snapshots left ──▶ Saving ── saved, or given up ──▶ Settled
//! ```
//!
//! No event of workers makes the node give up a final save, because no workers are left by then.

/// What the node waits for. `P`, `W`, `R` and `S` hold what each wait needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum LocalPhase<P, W, R, S> {
    /// Nothing.
    #[default]
    Settled,
    /// GPUs that processes of an earlier round still hold. Then workers are started.
    Pending(P),
    /// Workers that were started ahead of their round, and must warm up or be stopped.
    WarmingUp(W),
    /// Workers that must quiesce or be stopped.
    Resting(R),
    /// The final save of the snapshots that the workers left in memory. After it the workers can only be stopped.
    Saving(S),
}

/// An event that changes the node's wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Input<P, W, R, S> {
    /// Workers are to be started when their GPUs are free.
    StartWhenFree(P),
    /// Workers are started ahead of their round.
    WarmUp(W),
    /// Workers are started now, instead of a start that waited.
    StartNow,
    /// Workers are to quiesce.
    Quiesce(R),
    /// Workers have quiesced, or are warm, or are to be stopped.
    AtRest,
    /// The snapshots that are left in memory are to be saved.
    Save(S),
    /// The final save is over, or given up.
    Saved,
}

impl<P, W, R, S> LocalPhase<P, W, R, S> {
    /// The phase after this input. Whatever the wait before it needed is dropped, which ends that wait.
    #[must_use]
    pub(crate) fn step(self, input: Input<P, W, R, S>) -> LocalPhase<P, W, R, S> {
        match (self, input) {
            (_, Input::Saved) => LocalPhase::Settled,
            (saving @ LocalPhase::Saving(_), _) => saving,
            (_, Input::StartWhenFree(pending)) => LocalPhase::Pending(pending),
            (_, Input::WarmUp(warming)) => LocalPhase::WarmingUp(warming),
            (_, Input::Quiesce(resting)) => LocalPhase::Resting(resting),
            (_, Input::Save(saving)) => LocalPhase::Saving(saving),
            (_, Input::StartNow | Input::AtRest) => LocalPhase::Settled,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Input::{AtRest, Quiesce, Save, Saved, StartNow, StartWhenFree, WarmUp};
    use super::LocalPhase::{Pending, Resting, Saving, Settled, WarmingUp};

    #[test]
    fn a_new_wait_replaces_the_one_before_but_a_final_save_goes_on() {
        for (before, input, after) in [
            (Settled, StartWhenFree(2), Pending(2)),
            (Settled, StartNow, Settled),
            (Settled, WarmUp(2), WarmingUp(2)),
            (Settled, Quiesce(2), Resting(2)),
            (Settled, AtRest, Settled),
            (Settled, Save(2), Saving(2)),
            (Pending(1), StartWhenFree(2), Pending(2)),
            (Pending(1), StartNow, Settled),
            (Pending(1), WarmUp(2), WarmingUp(2)),
            (Pending(1), Quiesce(2), Resting(2)),
            (Pending(1), AtRest, Settled),
            (Pending(1), Save(2), Saving(2)),
            (WarmingUp(1), StartWhenFree(2), Pending(2)),
            (WarmingUp(1), StartNow, Settled),
            (WarmingUp(1), WarmUp(2), WarmingUp(2)),
            (WarmingUp(1), Quiesce(2), Resting(2)),
            (WarmingUp(1), AtRest, Settled),
            (WarmingUp(1), Save(2), Saving(2)),
            (Resting(1), StartWhenFree(2), Pending(2)),
            (Resting(1), WarmUp(2), WarmingUp(2)),
            (Resting(1), StartNow, Settled),
            (Resting(1), Quiesce(2), Resting(2)),
            (Resting(1), AtRest, Settled),
            (Resting(1), Save(2), Saving(2)),
            (Saving(1), StartWhenFree(2), Saving(1)),
            (Saving(1), StartNow, Saving(1)),
            (Saving(1), WarmUp(2), Saving(1)),
            (Saving(1), Quiesce(2), Saving(1)),
            (Saving(1), AtRest, Saving(1)),
            (Saving(1), Save(2), Saving(1)),
            (Saving(1), Saved, Settled),
        ] {
            assert_eq!(before.step(input), after, "{before:?} {input:?}");
        }
    }
}
