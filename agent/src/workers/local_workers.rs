//! What a node has of its workers: their group, their socket, what watches them, a start that waits for GPUs, and
//! workers on their way to rest. Not for when to start or stop them.
//!
//! A node keeps its workers from one round to the next if each one that lives has registered as round-aware and
//! quiesces in time. Else it stops all of them. What other nodes' workers are plays no part: to a worker that goes on,
//! a peer that was stopped and started again is a newcomer like any other.

use std::sync::Arc;
use std::time::Duration;

use elastic_coordinator::job::{Keys, NodeId, Sealed};
use elastic_coordinator::node::Report;
use elastic_coordinator::rendezvous::{End, Start};
use elastic_coordinator::store::Store;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::workers::final_save::{self, Rescue, Rescuing};
use crate::workers::gpu_holders::GpuHolders;
use crate::workers::group::{Group, Moved};
use crate::workers::socket::{Awareness, WorkerSocket};
use crate::workers::supervisor::{Event, SupervisorError};
use crate::workers::watchdog::Watchdog;

/// This node's workers.
pub struct Local {
    /// They themselves.
    pub group: Group,
    /// Where they speak to the agent.
    pub socket: WorkerSocket,
    /// What watches them for hangs.
    pub watchdog: Watchdog,
    /// What they compute on.
    pub gpus: GpuHolders,
    /// A start that waits.
    pub pending: Option<Pending>,
    /// How long workers that know about rounds have to quiesce.
    pub quiesce_timeout: Duration,
    /// They were told that a round is forming.
    pub forming: bool,
    /// They are on their way to rest.
    pub resting: Option<Resting>,
    /// The last round that they were started in.
    pub seat: Option<Sealed>,
    /// What they have left in memory is being saved.
    pub rescuing: Option<Rescuing>,
    /// The agent was told twice to leave: nothing is waited for.
    pub hurried: bool,
}

/// Workers on their way to rest.
pub struct Resting {
    /// In which they must have quiesced, or be stopped.
    grace: Duration,
    /// When it began to count: they were told that a round is forming.
    since: Option<Instant>,
    quiesce: Duration,
}

impl Resting {
    fn overdue_at(&self) -> Option<Instant> {
        self.since.map(|since| since + self.quiesce)
    }
}

/// What becomes of workers on their way to rest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rest {
    /// Some have not quiesced yet.
    Wait,
    /// All that live have quiesced.
    Kept,
    /// They must be stopped.
    Stop,
}

/// Judges by what each living worker can do. One that has not registered yet is waited for beside one that is aware:
/// it was started a moment ago, to be the same.
fn rest(living: &[Awareness], overdue: bool) -> Rest {
    let any_aware = living.iter().any(|awareness| *awareness >= Awareness::Aware);
    let any_unaware = living.contains(&Awareness::Unaware);
    match living.iter().all(|awareness| *awareness == Awareness::Quiesced) {
        _ if !any_aware || any_unaware => Rest::Stop,
        true => Rest::Kept,
        false if overdue => Rest::Stop,
        false => Rest::Wait,
    }
}

/// Without a guard there are no workers.
pub fn lost(error: SupervisorError) -> Report {
    tracing::error!(%error, "the workers cannot be reached");
    Report::Stopped { master: None }
}

/// A start that waits until GPUs are free; dropped, it is given up.
pub struct Pending {
    start: Box<Start>,
    free: JoinHandle<()>,
}

impl Drop for Pending {
    fn drop(&mut self) {
        self.free.abort();
    }
}

impl Local {
    /// Starts the workers of a place, or lets the start wait for GPUs: see [`free`].
    pub fn start(&mut self, start: Box<Start>) -> Option<Report> {
        self.forming = false;
        self.seat = start.round.sealed;
        // Workers that quiesced hold theirs, and are to.
        if self.gpus.are_absent() || !self.group.living().is_empty() {
            return self.start_now(&start);
        }
        // Beside the agent, which sends the guard its deadlines meanwhile.
        let free = tokio::spawn(self.gpus.clone().free());
        self.pending = Some(Pending { start, free });
        None
    }

    /// Starts what waited.
    pub fn start_pending(&mut self) -> Option<Report> {
        let pending = self.pending.take()?;
        self.start_now(&pending.start)
    }

    fn start_now(&mut self, start: &Start) -> Option<Report> {
        let report = self.group.start(start, &self.socket);
        self.watch(report)
    }

    /// What has happened to the workers, and the report of it.
    pub async fn moved(&mut self, moved: Moved) -> Option<Report> {
        if let Moved::Workers(Event::Exited(exited)) = &moved {
            self.watchdog.ended(exited.local_rank);
        }
        let report = self.group.moved(moved, &self.socket).await;
        self.watch(report)
    }

    /// Workers are watched from when all of them run.
    fn watch(&self, report: Option<Report>) -> Option<Report> {
        if let Some(Report::Started(round)) = &report {
            self.watchdog.begin(*round, self.group.watched());
        }
        report
    }

    /// What each worker that lives, or is being started, can do.
    pub fn awareness(&self) -> Vec<Awareness> {
        let of = |local_rank| match self.group.has_started(local_rank) {
            true => self.socket.awareness(local_rank),
            false => Awareness::Unknown,
        };
        self.group.living().into_iter().map(of).collect()
    }

    /// A round is forming.
    pub fn forming(&mut self, round: u64, reason: &str) {
        self.forming = true;
        self.group.master().forming(round);
        self.socket.forming(round, reason, self.quiesce_timeout);
    }

    /// Lets workers quiesce once they have heard that a round is forming, or stops them, all within `grace`: see
    /// [`Local::settle`]. A start that waits is given up.
    pub fn quiesce(&mut self, grace: Duration) {
        self.pending = None;
        self.watchdog.end();
        self.group.rest();
        self.resting = Some(Resting { grace, since: None, quiesce: self.quiesce_timeout.min(grace) });
    }

    /// Looks whether workers on their way to rest have come there, or must be stopped. To be called after whatever
    /// happened.
    pub fn settle(&mut self) -> Option<Report> {
        self.resting.as_ref()?;
        let living = self.awareness();
        let resting = self.resting.as_mut()?;
        let now = Instant::now();
        if self.forming {
            resting.since.get_or_insert(now);
        }
        let overdue = resting.quiesce.is_zero() || resting.overdue_at().is_some_and(|at| now >= at);
        match rest(&living, overdue) {
            Rest::Wait => None,
            Rest::Kept => {
                self.resting = None;
                tracing::info!(workers = living.len(), "the workers have quiesced");
                Some(Report::Quiesced { master: self.group.master().offer() })
            }
            Rest::Stop => {
                let left = resting.grace.saturating_sub(resting.since.map_or(Duration::ZERO, |since| now - since));
                if overdue && !resting.quiesce.is_zero() {
                    tracing::warn!("a worker did not quiesce within quiesce_timeout: all are stopped");
                }
                self.stop(left).err().map(lost)
            }
        }
    }

    /// The node's part ends like this, and no worker is left: what they have left in memory is saved, if nobody goes on
    /// with it. The report where there is nothing to wait for.
    pub fn conclude(&mut self, store: Option<&Arc<dyn Store>>, keys: &Keys, node: NodeId, end: &End) -> Option<Report> {
        let matters = final_save::may_matter(end) && !self.hurried;
        let left = self.socket.left().filter(|_| matters);
        let (Some(left), Some(store), Some(seat)) = (left, store, self.seat) else { return Some(Report::Concluded) };
        let (store, keys) = (Arc::clone(store), keys.clone());
        self.rescuing = Some(Rescue { store, keys, node, seat, left }.begin());
        None
    }

    /// Begins to stop all workers, and gives up a start that waits; see [`Group::stop`].
    ///
    /// # Errors
    /// When the guard cannot be asked.
    pub fn stop(&mut self, grace: Duration) -> Result<(), SupervisorError> {
        self.pending = None;
        self.resting = None;
        self.watchdog.end();
        self.group.stop(grace)
    }
}

/// Waits until a start that waits need wait no longer; for ever if there is none. May be cancelled.
pub async fn free(pending: &mut Option<Pending>) {
    match pending {
        // Whatever came of it: it is no reason not to start.
        Some(pending) => drop((&mut pending.free).await),
        None => std::future::pending().await,
    }
}

/// Waits until workers on their way to rest may have come nearer to it, or are overdue; for ever if there are none. May
/// be cancelled.
pub async fn rest_moves(resting: Option<&Resting>, socket: &WorkerSocket) {
    match resting.map(Resting::overdue_at) {
        None => std::future::pending().await,
        Some(None) => socket.awareness_changed().await,
        Some(Some(at)) => tokio::select! {
            () = socket.awareness_changed() => {}
            () = tokio::time::sleep_until(at) => {}
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workers_stay_only_if_all_that_live_quiesce_in_time() {
        use Awareness::{Aware, Quiesced, Unaware, Unknown};
        for (living, in_time, overdue) in [
            (&[][..], Rest::Stop, Rest::Stop),
            (&[Unknown], Rest::Stop, Rest::Stop),
            (&[Unaware], Rest::Stop, Rest::Stop),
            (&[Unaware, Quiesced], Rest::Stop, Rest::Stop),
            (&[Unknown, Aware], Rest::Wait, Rest::Stop),
            (&[Unknown, Quiesced], Rest::Wait, Rest::Stop),
            (&[Aware, Quiesced], Rest::Wait, Rest::Stop),
            (&[Quiesced, Quiesced], Rest::Kept, Rest::Kept),
        ] {
            assert_eq!((rest(living, false), rest(living, true)), (in_time, overdue), "{living:?}");
        }
    }
}
