//! `--warm-up`: starts workers before the node joins. The other nodes pause while a node joins, so they need not wait
//! for what its workers load. A node whose workers fail does the same again while the others go on.
//!
//! To the rest of the agent, a worker that is ready looks like one that has quiesced: it waits for a place.

use std::time::Duration;

use elastic_coordinator::node::GroupReport;
use tokio::time::Instant;

use crate::workers::group::Moved;
use crate::workers::local_workers::{Ahead, LocalWorkers, wait};
use crate::workers::signals::{Handled, Signals};
use crate::workers::socket::Awareness;
use crate::workers::supervisor::Event;

/// Workers that were started ahead of their round.
pub struct WarmingUp {
    /// The time in which to stop them if they cannot warm up.
    pub(super) grace: Duration,
    /// When they must be warm.
    pub(super) until: Instant,
}

impl WarmingUp {
    /// Whether they are warm: `slots` workers that are to be ready, of which those that live can do this.
    pub(super) fn warmth(&self, slots: u32, living: &[Awareness], now: Instant) -> Warmth {
        warmth(slots as usize, living, now >= self.until)
    }
}

/// Whether the workers are ready.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Warmth {
    /// Some are not ready yet.
    Wait,
    /// All are ready.
    Warm,
    /// They cannot be started ahead, for this reason.
    Cold(&'static str),
}

/// Decides by what each living worker can do. `slots` is how many workers there should be. Either all workers of a node
/// stay, or none.
fn warmth(slots: usize, living: &[Awareness], overdue: bool) -> Warmth {
    if living.len() < slots {
        return Warmth::Cold("one has ended");
    }
    if living.contains(&Awareness::Unaware) {
        return Warmth::Cold("one has not registered as round-aware, so it needs its place when it starts");
    }
    match living.iter().all(|awareness| *awareness == Awareness::Quiesced) {
        true => Warmth::Warm,
        false if overdue => Warmth::Cold("one has not registered in time; --warm-up sets the limit"),
        false => Warmth::Wait,
    }
}

/// How the warm-up before the node joins has ended.
pub enum WarmedUp {
    /// All workers wait for their places.
    Warm,
    /// They could not be started ahead, and none is left. They are started in their round, as usual.
    Cold,
    /// A signal has told the agent to leave.
    Told(Handled),
}

/// Starts the workers before the node joins, and waits until all are ready, or are stopped within `grace`.
///
/// # Errors
/// The guard is lost, so nothing can be started any more.
pub async fn warm_up(local: &mut LocalWorkers, grace: Duration, signals: &mut Signals) -> anyhow::Result<WarmedUp> {
    tracing::info!("the workers warm up before this node joins");
    // Their output goes to the first attempt.
    local.warm_up(Ahead { round: 0, restarts: 0, grace });
    loop {
        let report = tokio::select! {
            moved = local.group.next() => {
                if let Moved::Workers(Event::GuardLost { cause, .. }) = &moved {
                    anyhow::bail!("the guard process of this node has ended: {cause}");
                }
                local.moved(moved).await
            }
            waited = wait(&mut local.phase, local.forming, &local.socket) => local.waited(waited),
            caught = signals.next() => return Ok(WarmedUp::Told(caught)),
        };
        for report in report.into_iter().chain(local.settle()) {
            match report {
                GroupReport::Quiesced { .. } => return Ok(WarmedUp::Warm),
                GroupReport::Stopped { .. } => return Ok(WarmedUp::Cold),
                // No other report matters, because the node is in no round.
                _ => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_workers_are_warm_or_none_is_kept() {
        use Awareness::{Aware, Quiesced, Unaware, Unknown};
        let cold = |living: &[Awareness], overdue| matches!(warmth(2, living, overdue), Warmth::Cold(_));
        for living in [&[][..], &[Quiesced], &[Unaware, Quiesced], &[Unaware, Unknown]] {
            assert!(cold(living, false) && cold(living, true), "{living:?}");
        }
        for living in [[Unknown, Unknown], [Unknown, Quiesced], [Aware, Quiesced]] {
            assert_eq!(warmth(2, &living, false), Warmth::Wait, "{living:?}");
            assert!(cold(&living, true), "{living:?}");
        }
        assert_eq!(warmth(2, &[Quiesced, Quiesced], true), Warmth::Warm);
    }
}
