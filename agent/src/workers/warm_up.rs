//! `--warm-up`: starts workers before the node joins. The other nodes pause while a node joins, so they need not wait
//! for what its workers load.
//!
//! To the rest of the agent, a worker that is ready looks like one that has quiesced: it waits for a place.

use std::time::Duration;

use elastic_coordinator::node::GroupReport;
use elastic_coordinator::rendezvous::Outcome;
use tokio::time::Instant;

use crate::workers::group::Moved;
use crate::workers::local_workers::LocalWorkers;
use crate::workers::signals::{Handled, Signals};
use crate::workers::socket::Awareness;
use crate::workers::supervisor::Event;

/// Whether the workers are ready.
#[derive(Debug, PartialEq, Eq)]
enum Warmth {
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

/// Starts the workers and waits until all are ready, for at most `limit`. If they are not ready by then, they are
/// stopped within `grace`, and start later in their round as usual. If a signal tells the agent to leave meanwhile,
/// returns early with this signal.
///
/// # Errors
/// The guard is lost, so nothing can be started any more.
pub async fn warm_up(
    local: &mut LocalWorkers,
    slots: u32,
    limit: Duration,
    grace: Duration,
    signals: &mut Signals,
) -> anyhow::Result<Option<Handled>> {
    if !local.gpus.are_absent() {
        tokio::select! {
            () = local.gpus.clone().free() => {}
            caught = signals.next() => return Ok(Some(caught)),
        }
    }
    tracing::info!(?limit, "the workers warm up before this node joins");
    let deadline = Instant::now() + limit;
    let mut stopping = false;
    local.group.start_ahead(&local.socket);
    loop {
        if !stopping {
            match warmth(slots as usize, &local.awareness(), Instant::now() >= deadline) {
                Warmth::Wait => {}
                Warmth::Warm => {
                    tracing::info!(workers = slots, "the workers are warm");
                    return Ok(None);
                }
                Warmth::Cold(why) => {
                    tracing::warn!("the workers cannot warm up: {why}; they are started in their round");
                    local.stop(grace)?;
                    stopping = true;
                }
            }
        }
        tokio::select! {
            moved = local.group.next() => {
                if let Moved::Workers(Event::GuardLost { cause, .. }) = &moved {
                    anyhow::bail!("the guard process of this node has ended: {cause}");
                }
                let stopped = matches!(moved, Moved::Workers(Event::Stopped));
                // No other report matters, because the node is in no round.
                if let Some(GroupReport::Ended { outcome: Outcome::Failed(failure), .. }) = local.moved(moved).await {
                    tracing::warn!("{}; the workers are started in their round", failure.message);
                    local.stop(grace)?;
                    stopping = true;
                }
                if stopped {
                    return Ok(None);
                }
            }
            () = local.socket.awareness_changed() => {}
            () = tokio::time::sleep_until(deadline), if !stopping => {}
            caught = signals.next() => return Ok(Some(caught)),
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
