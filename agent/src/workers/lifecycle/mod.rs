//! Everything a node has for its workers: their group, their socket, the watchdog, a start that waits for GPUs, and the
//! wait for workers to quiesce. When to start or stop them is decided elsewhere.
//!
//! A node keeps its workers from one round to the next if every living worker has registered as round-aware and
//! quiesces in time. Otherwise it stops all of them. Other nodes' workers do not matter: to a worker that continues, a
//! peer that was stopped and started again is a newcomer like any other. Only a replica of several nodes keeps its
//! workers as a whole.

use std::sync::Arc;
use std::time::Duration;

use elastic_node::GroupReport;
use elastic_rendezvous::job::{Failure, Keys, NodeId, Sealed};
use elastic_rendezvous::{End, Outcome, Start};
use elastic_store::Store;
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::machine::identity::{NodeIdentity, process_runtime_dir};
use crate::workers::final_save::{self, FinalSave};
use crate::workers::gpu_holders::GpuHolders;
use crate::workers::group::{LocalGroup, Moved};
use crate::workers::guard_client::Event;
use crate::workers::socket::{Awareness, WorkerSocket};
use crate::workers::watchdog::Watchdog;

mod phase;
mod stay;
mod storm;

use phase::LocalPhase as Phase;
use stay::{Rest, Warmth, begins_replica, quiesce_time, rest, warmth};
use storm::Storm;

pub(crate) struct WorkersLifecycle {
    /// Its directory holds the socket.
    pub identity: NodeIdentity,
    pub group: LocalGroup,
    /// The socket on which they talk to the agent.
    pub socket: WorkerSocket,
    pub watchdog: Watchdog,
    /// The GPUs that the workers compute on.
    pub gpus: GpuHolders,
    /// What the node waits for now. [`wait`] waits for it.
    pub phase: Phase,
    /// How long round-aware workers have to quiesce at least.
    quiesce_timeout: Duration,
    /// How long workers that are started ahead have to warm up.
    warm_up_limit: Duration,
    /// When the agent told the workers that a round is forming, if it did.
    pub forming: Option<Instant>,
    /// The last round in which the workers were started.
    seat: Option<Sealed>,
    /// Restarts of workers that hardly ran.
    storm: Storm,
}

pub(crate) enum Waited {
    /// The GPUs are free, or the wait for them was long enough. This waited for them.
    GpusFree(Waiting),
    /// A worker may have quiesced or be warm, or is overdue.
    RestMoved,
    Saved,
}

/// Workers that are asked to quiesce.
pub(crate) struct Resting {
    /// The workers must be stopped if they have not quiesced within this time.
    grace: Duration,
    began: Instant,
    quiesce: Duration,
}

impl Resting {
    /// When both times begin to count: the workers have been asked to quiesce, and know that a round is forming.
    fn since(&self, forming: Option<Instant>) -> Option<Instant> {
        forming.map(|forming| forming.max(self.began))
    }
}

/// Workers that were started ahead of their round.
pub(crate) struct WarmingUp {
    /// The time in which to stop them if they cannot warm up.
    grace: Duration,
    /// When they must be warm.
    until: Instant,
}

/// What waits until GPUs are free.
#[derive(Clone)]
pub(crate) enum Waiting {
    /// The start of workers in their places.
    Start(Box<Start>),
    /// The start of workers ahead of their places.
    Ahead(Ahead),
}

/// A start of workers ahead of their places.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ahead {
    /// The round that forms without this node, or 0 before the node has joined. Logs are named after it.
    pub round: u64,
    /// Restarts charged to the job so far.
    pub restarts: u32,
    /// The time in which to stop the workers if they cannot warm up.
    pub grace: Duration,
}

/// A start that waits until the workers are gone whose replica is no more.
pub(crate) struct Replacing(Box<Start>);

/// A start that waits until GPUs are free. Dropping it gives the start up.
pub(crate) struct Pending {
    waiting: Waiting,
    free: JoinSet<()>,
}

impl WorkersLifecycle {
    /// The workers of a node on which none have been started yet.
    pub(crate) fn new(
        identity: NodeIdentity,
        group: LocalGroup,
        socket: WorkerSocket,
        watchdog: Watchdog,
        gpus: GpuHolders,
        quiesce_timeout: Duration,
        warm_up_limit: Duration,
    ) -> WorkersLifecycle {
        WorkersLifecycle {
            identity,
            group,
            socket,
            watchdog,
            gpus,
            phase: Phase::default(),
            quiesce_timeout,
            warm_up_limit,
            forming: None,
            seat: None,
            storm: Storm::default(),
        }
    }

    /// Adds to a failure how far this node's workers had come.
    pub(crate) fn with_step(&self, report: GroupReport) -> GroupReport {
        match report {
            GroupReport::Ended { round, outcome: Outcome::Failed(failure) } => {
                let step = self.socket.step_in(round);
                GroupReport::Ended { round, outcome: Outcome::Failed(Failure { step, ..failure }) }
            }
            other => other,
        }
    }

    /// Starts the workers of a place, or lets the start wait for free GPUs: see [`wait`].
    pub(crate) fn start(&mut self, start: Box<Start>) -> Option<GroupReport> {
        let (nodes, since) = (start.spec.nodes_per_replica, start.rank.replica_since);
        if begins_replica(nodes, since, start.round.number) && self.group.has_placed() {
            tracing::info!(round = start.round.number, "this node's replica has changed: starting new workers");
            // They are at rest, and have nothing to save that another replica would not have.
            self.stop(Duration::ZERO);
            self.phase.turn(Phase::Replacing(Replacing(start)));
            return None;
        }
        self.forming = None;
        self.group.follow(&start.spec);
        if self.seat.is_none() && !self.quiesce_timeout.is_zero() {
            self.socket.warn_of_steps_over(self.quiesce_time(Duration::MAX) / 2);
        }
        self.seat = start.round.sealed;
        // Other nodes wait for this start.
        let most = start.spec.timings.start_timeout / 3;
        let worked = self.socket.step_in(self.group.round()).is_some();
        let pause = self.storm.pause(start.round.restarts, &start.round.reason, worked, most, Instant::now());
        if !pause.is_zero() {
            tracing::warn!("{}", self.storm.story(pause));
        }
        self.when_free(Waiting::Start(start), pause)
    }

    /// Starts the workers that do not run, ahead of their places, or lets this wait for free GPUs: see [`wait`].
    /// [`WorkersLifecycle::settle`] reports when all are warm, or stops them if they cannot warm up.
    pub(crate) fn warm_up(&mut self, ahead: Ahead) {
        self.when_free(Waiting::Ahead(ahead), Duration::ZERO);
    }

    /// Starts workers once their GPUs are free, after a `pause` that the wait is part of.
    fn when_free(&mut self, waiting: Waiting, pause: Duration) -> Option<GroupReport> {
        // Workers that quiesced still hold their GPUs, as they should, and newcomers are to meet them at once.
        if (self.gpus.are_absent() && pause.is_zero()) || !self.group.living().is_empty() {
            return self.begin(waiting);
        }
        // This runs in its own task, because the agent must send the guard its deadlines meanwhile.
        let mut free = JoinSet::new();
        let gpus = self.gpus.clone().free(self.group.job_spec().timings.start_timeout);
        free.spawn(async move {
            tokio::join!(gpus, tokio::time::sleep(pause));
        });
        self.phase.turn(Phase::Pending(Pending { waiting, free }));
        None
    }

    fn begin(&mut self, waiting: Waiting) -> Option<GroupReport> {
        if !self.socket.path().exists()
            && let Err(error) = self.open_socket_again()
        {
            tracing::error!("workers that start now cannot reach this agent, whose socket was removed: {error:#}");
        }
        match waiting {
            Waiting::Start(start) => {
                self.phase.turn(Phase::Settled);
                let report = self.group.start(&start, &self.socket);
                self.watch(report)
            }
            Waiting::Ahead(Ahead { round, restarts, grace }) => {
                let until = Instant::now() + self.warm_up_limit;
                self.socket.ahead(until);
                self.group.start_ahead(restarts, round);
                self.phase.turn(Phase::WarmingUp(WarmingUp { grace, until }));
                None
            }
        }
    }

    /// Listens for the workers elsewhere: the socket's file is gone, perhaps with its folder.
    fn open_socket_again(&mut self) -> anyhow::Result<()> {
        self.identity.settle_again(&process_runtime_dir())?;
        self.group.guard().hold(self.identity.lock_fd())?;
        let (path, gone) = (self.identity.fresh_socket(), self.socket.path().display().to_string());
        self.socket.move_to(path)?;
        tracing::warn!(
            "{gone} was removed: workers that start now reach this agent at {}",
            self.socket.path().display()
        );
        Ok(())
    }

    /// Continues after a [`wait`], and returns its report if there is one. [`WorkersLifecycle::settle`] decides what
    /// happens to workers that were asked to quiesce.
    pub(crate) fn waited(&mut self, waited: Waited) -> Option<GroupReport> {
        match waited {
            Waited::GpusFree(waiting) => self.begin(waiting),
            Waited::RestMoved => None,
            Waited::Saved => {
                self.phase.saved();
                Some(GroupReport::Concluded)
            }
        }
    }

    /// A second signal asks the agent to leave. Gives up a final save that is under way, and returns the report
    /// of it.
    pub(crate) fn give_up_saving(&mut self) -> Option<GroupReport> {
        let Phase::Saving(_) = self.phase else { return None };
        self.phase.saved();
        tracing::warn!("the newest snapshot in memory is not saved: saving was interrupted");
        Some(GroupReport::Concluded)
    }

    /// Handles an event of the workers, and returns the report of it.
    pub(crate) async fn moved(&mut self, moved: Moved) -> Option<GroupReport> {
        if let Moved::Workers(Event::Exited(exited)) = &moved {
            self.watchdog.ended(exited.local_rank);
        }
        let report = self.group.moved(moved, &self.socket).await;
        if let (Phase::Replacing(Replacing(start)), Some(GroupReport::Stopped { .. })) = (&self.phase, &report) {
            let start = start.clone();
            return self.start(start);
        }
        if matches!(self.phase, Phase::WarmingUp(_))
            && let Some(GroupReport::Ended { outcome: Outcome::Failed(failure), .. }) = &report
        {
            // It has no place, so it fails no round. It is missing, so the others are stopped.
            tracing::warn!("{}", failure.message);
            return None;
        }
        self.watch(report)
    }

    /// Lets the watchdog begin once all workers run.
    fn watch(&self, report: Option<GroupReport>) -> Option<GroupReport> {
        if let Some(GroupReport::Started(round)) = &report {
            self.watchdog.begin(*round, self.group.watched());
        }
        report
    }

    /// What each worker can do that lives or is being started.
    pub(crate) fn awareness(&self) -> Vec<Awareness> {
        let of = |local_rank| match self.group.has_started(local_rank) {
            true => self.socket.awareness(local_rank),
            false => Awareness::Unknown,
        };
        self.group.living().into_iter().map(of).collect()
    }

    /// Tells the workers that a round is forming.
    pub(crate) fn forming(&mut self, round: u64, reason: &str) {
        self.forming.get_or_insert_with(Instant::now);
        self.group.master().forming(round);
        self.socket.forming(round, reason, self.quiesce_time(self.socket.step_time()));
    }

    /// How long workers have to quiesce whose steps take so long. The rest of the grace is for the stop of those that do
    /// not.
    fn quiesce_time(&self, step: Duration) -> Duration {
        quiesce_time(self.quiesce_timeout, step, self.group.job_spec().timings.stop_grace * 3 / 4)
    }

    /// Asks the workers to quiesce once they know that a round is forming, or stops them, all within `grace`:
    /// see [`WorkersLifecycle::settle`]. Gives up a start that waits.
    pub(crate) fn quiesce(&mut self, grace: Duration) {
        if let Phase::Replacing(_) = self.phase {
            return self.stop(grace);
        }
        self.watchdog.end();
        self.group.rest();
        let quiesce = self.quiesce_time(self.socket.step_time()).min(grace);
        self.phase.turn(Phase::Resting(Resting { grace, began: Instant::now(), quiesce }));
    }

    /// Checks whether workers that were asked to quiesce, or are to warm up, have done so, or must be stopped. Call this
    /// after every event.
    pub(crate) fn settle(&mut self) -> Option<GroupReport> {
        let resting = match &self.phase {
            Phase::Resting(resting) => resting,
            Phase::WarmingUp(warming) => {
                let (grace, overdue) = (warming.grace, Instant::now() >= warming.until);
                let warmth = warmth(self.group.slots() as usize, &self.awareness(), overdue);
                return self.warmed(warmth, grace);
            }
            Phase::Settled | Phase::Pending(_) | Phase::Replacing(_) | Phase::Saving(_) => return None,
        };
        let living = self.awareness();
        let waited = resting.since(self.forming).map(|since| since.elapsed());
        let overdue = resting.quiesce.is_zero() || waited.is_some_and(|waited| waited >= resting.quiesce);
        match rest(&living, overdue) {
            Rest::Wait => None,
            Rest::Kept => {
                self.phase.turn(Phase::Settled);
                tracing::info!(workers = living.len(), "the workers have quiesced");
                let whole = living.len() == self.group.slots() as usize;
                Some(GroupReport::Quiesced { master: self.group.master().offer(), whole })
            }
            Rest::Stop => {
                let left = resting.grace.saturating_sub(waited.unwrap_or_default());
                if overdue && !resting.quiesce.is_zero() {
                    let time = resting.quiesce;
                    tracing::warn!("a worker did not quiesce within {time:?}: stopping all workers (quiesce_timeout)");
                }
                self.stop(left);
                None
            }
        }
    }

    fn warmed(&mut self, warmth: Warmth, grace: Duration) -> Option<GroupReport> {
        match warmth {
            Warmth::Wait => None,
            Warmth::Warm => {
                self.phase.turn(Phase::Settled);
                tracing::info!(workers = self.group.slots(), "the workers are warm");
                Some(GroupReport::Quiesced { master: self.group.master().offer(), whole: true })
            }
            Warmth::Cold(why) => {
                tracing::warn!("the workers cannot warm up: {why}; they will start in their round");
                self.stop(grace);
                None
            }
        }
    }

    /// The node's part has ended with `end`, and no worker is left. Begins to save what the workers left in memory, if
    /// no other node continues with it and there is time. Returns the report if there is nothing to wait for.
    pub(crate) fn conclude(
        &mut self,
        store: Option<&Arc<dyn Store>>,
        keys: &Keys,
        node: NodeId,
        end: &End,
        in_haste: bool,
    ) -> Option<GroupReport> {
        let matters = final_save::may_matter(end) && !in_haste;
        let left = self.socket.left().filter(|_| matters);
        let (Some(left), Some(store), Some(seat)) = (left, store, self.seat) else {
            return Some(GroupReport::Concluded);
        };
        let (store, keys) = (Arc::clone(store), keys.clone());
        self.phase.turn(Phase::Saving(FinalSave { store, keys, node, seat, left }.begin()));
        None
    }

    /// Begins to stop all workers, and gives up a start that waits. See [`LocalGroup::stop`].
    pub(crate) fn stop(&mut self, grace: Duration) {
        self.phase.turn(Phase::Settled);
        self.watchdog.end();
        // A round that forms waits for this.
        self.group.stop(grace, self.forming.is_some());
    }
}

/// Waits for the event that the phase waits for. Waits for ever if it waits for nothing. The wait may be cancelled.
pub(crate) async fn wait(phase: &mut Phase, forming: Option<Instant>, socket: &WorkerSocket) -> Waited {
    match phase {
        Phase::Settled | Phase::Replacing(_) => std::future::pending().await,
        Phase::Pending(pending) => {
            // Whatever the result, the workers can be started.
            pending.free.join_next().await;
            Waited::GpusFree(pending.waiting.clone())
        }
        Phase::WarmingUp(warming) => {
            tokio::select! {
                () = socket.awareness_changed() => {}
                () = tokio::time::sleep_until(warming.until) => {}
            }
            Waited::RestMoved
        }
        Phase::Resting(resting) => {
            match resting.since(forming).map(|since| since + resting.quiesce) {
                None => socket.awareness_changed().await,
                Some(overdue) => tokio::select! {
                    () = socket.awareness_changed() => {}
                    () = tokio::time::sleep_until(overdue) => {}
                },
            }
            Waited::RestMoved
        }
        Phase::Saving(saving) => {
            final_save::done(saving).await;
            Waited::Saved
        }
    }
}
