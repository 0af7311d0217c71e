//! What a node waits for, apart from its workers' own events.
//!
//! ```text
//!   Settled ── a start or a warm-up waits ──▶ Pending ── GPUs are free ──▶ Settled or WarmingUp
//!   Settled, Pending ── warm up ──▶ WarmingUp ── all are warm, or are stopped ──▶ Settled
//!   Settled, Pending ── quiesce ──▶ Resting ── all are at rest, or are stopped ──▶ Settled
//!   Settled ── a start needs other workers ──▶ Replacing ── none of the old ones is left ──▶ Settled or Pending
//!   Settled ── conclude, with snapshots left ──▶ Saving ── saved, or given up ──▶ Settled
//! ```
//!
//! No event of workers makes the node give up a final save, because no workers are left by then.

use super::{Pending, Replacing, Resting, WarmingUp};
use crate::workers::final_save::Saving;

/// What the node waits for.
#[derive(Default)]
pub(crate) enum LocalPhase {
    #[default]
    Settled,
    /// GPUs that processes of an earlier round still hold, or a pause. Then workers are started.
    Pending(Pending),
    /// Workers that were started ahead of their round, and must warm up or be stopped.
    WarmingUp(WarmingUp),
    /// The end of workers that cannot continue in their node's new place. Then others are started there.
    Replacing(Replacing),
    /// Workers that must quiesce or be stopped.
    Resting(Resting),
    /// The final save of the snapshots that the workers left in memory. After it the workers can only be stopped.
    Saving(Saving),
}

impl LocalPhase {
    /// Waits for something else from now on, unless a final save is under way. Whatever the wait before needed is
    /// dropped, which ends that wait.
    pub(super) fn turn(&mut self, next: LocalPhase) {
        if !matches!(self, LocalPhase::Saving(_)) {
            *self = next;
        }
    }

    /// The final save is over, or given up.
    pub(super) fn saved(&mut self) {
        *self = LocalPhase::Settled;
    }
}

#[cfg(test)]
mod tests {
    use std::mem::discriminant;
    use std::time::Duration;

    use tokio::time::Instant;

    use super::*;
    use crate::workers::lifecycle::{Ahead, Waiting};

    fn each() -> [LocalPhase; 5] {
        let (grace, now) = (Duration::ZERO, Instant::now());
        let waiting = Waiting::Ahead(Ahead { round: 1, restarts: 0, grace });
        [
            LocalPhase::Settled,
            LocalPhase::Pending(Pending { waiting, free: Default::default() }),
            LocalPhase::WarmingUp(WarmingUp { grace, until: now }),
            LocalPhase::Resting(Resting { grace, began: now, quiesce: grace }),
            LocalPhase::Saving(Saving::default()),
        ]
    }

    #[test]
    fn a_new_wait_replaces_the_one_before_but_a_final_save_continues() {
        for before in 0..5 {
            for next in 0..5 {
                let [mut phase, expected] =
                    [before, if before == 4 { before } else { next }].map(|at| each().into_iter().nth(at).unwrap());
                phase.turn(each().into_iter().nth(next).unwrap());
                assert_eq!(discriminant(&phase), discriminant(&expected), "{before} {next}");
                phase.saved();
                assert!(matches!(phase, LocalPhase::Settled));
            }
        }
    }
}
