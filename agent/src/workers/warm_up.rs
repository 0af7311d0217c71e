//! `--warm-up`: starts workers before the node joins. The other nodes pause while a node joins, so they need not wait
//! for what its workers load. A node whose workers fail does the same again while the other nodes continue.
//!
//! To the rest of the agent, a worker that is ready looks like one that has quiesced: it waits for a place.

use std::time::Duration;

use elastic_node::GroupReport;

use crate::workers::group::Moved;
use crate::workers::guard_client::Event;
use crate::workers::lifecycle::{Ahead, WorkersLifecycle, wait};
use crate::workers::signals::{Handled, Signals};

/// How the warm-up before the node joins has ended.
pub(crate) enum WarmedUp {
    /// All workers wait for their places.
    Warm,
    /// They could not be started ahead, and none is left. They are started in their round, as usual.
    Cold,
    /// A signal has told the agent to leave.
    Told(Handled),
}

/// Starts the workers before the node joins, and waits until all are ready, or are stopped within `grace`.
pub(crate) async fn warm_up(
    local: &mut WorkersLifecycle,
    grace: Duration,
    signals: &mut Signals,
) -> anyhow::Result<WarmedUp> {
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
