//! The local worker group: starts it in a round, judges its end, stops it. When to do so is decided elsewhere.

mod ends;
mod nursery;
mod phase;
mod spawn;
mod state;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use elastic_node::GroupReport;
use elastic_proto::worker::Assignment;
use elastic_rendezvous::Start;
use elastic_rendezvous::job::{Endpoint, Failure, FailureClass, Spec};
use elastic_rendezvous::time::Time;
use rustix::process::Signal;
use tokio::sync::watch;

use crate::guard::{Exit, Guard};
use crate::machine::cpus::CpuSet;
use crate::machine::out_of_memory::{Counters, Victims};
use crate::machine::shortage::Shortage;
use crate::output::events::{self, Events};
use crate::output::logs::{History, Logs, WorkerLogs};
use crate::workers::WorkersOptions;
use crate::workers::checkpoints::for_workers;
use crate::workers::command::WorkerCommand;
use crate::workers::guard_client::{Event, GuardClient, GuardClientError, Refused, SpawnError};
use crate::workers::signals::Handled;
use crate::workers::socket::{RoundRequest, WorkerSocket};
use crate::workers::watchdog::{Verdict, Watched};
use crate::workers_store::fence::Known;
use crate::workers_store::rank0_port::Rank0Port;

use nursery::Nursery;
use phase::{GroupPhase, Input};
pub(crate) use spawn::Moved;
use spawn::{Held, Opening, Planned, Unstarted};
pub(crate) use state::GroupState;

/// How long to wait for what a dead worker left behind: its last lines of output, its last messages on the socket, its
/// error file.
const LAST_LINES: Duration = Duration::from_millis(500);

/// Settings of every group of this agent.
pub(crate) struct GroupSetup {
    pub job: String,
    pub node: String,
    /// The host's name, for people.
    pub host: String,
    pub slots: u32,
    /// What the command line says of the workers.
    pub options: WorkersOptions,
    /// What is known of the job's spec before the group has a place. Each place brings the whole spec.
    pub spec: Spec,
    pub command: WorkerCommand,
    pub directory: PathBuf,
    /// The address at which peers reach this node.
    pub address: String,
    /// The address on which the workers' store is served. None: a loopback address that peers reach this node at, else
    /// all.
    pub bind: Option<IpAddr>,
    /// The CPUs of each worker. If empty, each worker may use all CPUs of the agent.
    pub cpus: Vec<CpuSet>,
    pub signals: Vec<Handled>,
    /// The job, role and host that torchrun's events name, and where the events go.
    pub events: events::Source,
    /// Further environment variables for the workers, in addition to those of their places.
    pub env: Vec<(&'static str, OsString)>,
}

struct WorkerProcess {
    pid: i32,
    /// When its program began.
    since: Time,
    rank: u32,
    role_rank: u32,
    role_world_size: u32,
    /// Whether it has had a place in a round.
    placed: bool,
    logs: WorkerLogs,
    exit: Option<Exit>,
}

impl WorkerProcess {
    fn subject<'a>(&self, local_rank: u32, failure: Option<(i32, &'a str)>) -> events::Subject<'a> {
        events::Subject {
            local_rank,
            rank: self.rank,
            role_rank: self.role_rank,
            role_world_size: self.role_world_size,
            pid: self.pid,
            failure,
        }
    }

    /// The same failure as this worker's.
    fn failure(&self, local_rank: u32, failure: Failure) -> Failure {
        let pid = u32::try_from(self.pid).ok();
        Failure { rank: Some(self.rank), local_rank: Some(local_rank), pid, ..failure }
    }
}

/// Owns the workers of this node.
pub(crate) struct LocalGroup {
    setup: GroupSetup,
    guard: GuardClient,
    logs: Arc<Logs>,
    events: Events,
    /// The round of the most recently started workers.
    round: u64,
    workers: BTreeMap<u32, WorkerProcess>,
    /// Workers to be started once their files are open.
    opening: Option<Opening>,
    /// Workers that the guard was asked to start, and whose programs do not run yet.
    starting: BTreeMap<u32, WorkerProcess>,
    /// This host's shortage of resources for starting workers, and the report that it delays.
    shortage: Shortage,
    held: Option<Held>,
    starved: Option<String>,
    phase: GroupPhase,
    nursery: Nursery,
    /// The port at which the ranks find each other, if rank 0 is on this node.
    master: Rank0Port,
    /// The signal that told this node to leave.
    leaving: Option<Signal>,
    counters: Counters,
    /// The counters' values when the round began.
    victims: Victims,
    state: watch::Sender<GroupState>,
}

impl LocalGroup {
    /// A group without workers. Must be called within a tokio runtime.
    pub(crate) fn new(setup: GroupSetup, guard: Guard, logs: Logs) -> Result<LocalGroup, GuardClientError> {
        let master = Rank0Port::new(setup.options.store_host, setup.address.clone(), setup.bind);
        Ok(LocalGroup {
            events: Events::new(setup.events.clone()),
            nursery: Nursery::of(&setup.options.preload),
            setup,
            guard: GuardClient::new(guard)?,
            logs: Arc::new(logs),
            round: 0,
            workers: BTreeMap::new(),
            opening: None,
            starting: BTreeMap::new(),
            shortage: Shortage::default(),
            held: None,
            starved: None,
            phase: GroupPhase::default(),
            master,
            leaving: None,
            counters: Counters::find(),
            victims: Victims::default(),
            state: watch::Sender::default(),
        })
    }

    /// The process that starts and ends the workers.
    pub(crate) fn guard(&mut self) -> &mut GuardClient {
        &mut self.guard
    }

    /// The local ranks of the workers that run, or are being started.
    pub(crate) fn living(&self) -> Vec<u32> {
        let running = self.workers.iter().filter(|(_, worker)| worker.exit.is_none());
        let planned = self.opening.iter().flat_map(Opening::local_ranks);
        running.map(|(local_rank, _)| *local_rank).chain(self.starting.keys().copied()).chain(planned).collect()
    }

    /// Whether a worker lives that has had a place in a round.
    pub(crate) fn has_placed(&self) -> bool {
        self.workers.values().any(|worker| worker.exit.is_none() && worker.placed)
    }

    /// The job's spec, as the newest place brought it.
    pub(crate) fn job_spec(&self) -> &Spec {
        &self.setup.spec
    }

    /// From now on the job's spec is this.
    pub(crate) fn follow(&mut self, spec: &Spec) {
        self.setup.spec.clone_from(spec);
    }

    /// The round of the workers that were started last.
    pub(crate) fn round(&self) -> u64 {
        self.round
    }

    pub(crate) fn slots(&self) -> u32 {
        self.setup.slots
    }

    /// Whether this worker's program is known to run or to have run.
    pub(crate) fn has_started(&self, local_rank: u32) -> bool {
        self.workers.contains_key(&local_rank)
    }

    /// The workers that run, for the watchdog.
    pub(crate) fn watched(&self) -> Vec<Watched> {
        let running = self.workers.iter().filter(|(_, worker)| worker.exit.is_none());
        running
            .map(|(local_rank, worker)| Watched {
                local_rank: *local_rank,
                pid: worker.pid,
                directory: worker.logs.error_file().and_then(Path::parent).map(Path::to_owned),
            })
            .collect()
    }

    /// Ends a worker that hangs. Reports its failure at once, because no signal ends a worker that is stuck in the
    /// kernel.
    pub(crate) fn condemn(&mut self, verdict: Verdict) -> Option<GroupReport> {
        let worker = self.workers.get(&verdict.local_rank).filter(|worker| worker.exit.is_none())?;
        if !self.phase.is_running() || verdict.round != self.round {
            return None;
        }
        self.phase = self.phase.step(Input::Report);
        let message = format!("the worker hangs: {}", verdict.message);
        tracing::warn!(round = self.round, rank = worker.rank, pid = worker.pid, "{message}");
        let failure = worker.failure(verdict.local_rank, self.failure(FailureClass::Own, message).bounded());
        let how = (-verdict.signal.as_raw(), failure.message.as_str());
        self.events.worker(events::EventState::Failed, &worker.subject(verdict.local_rank, Some(how)));
        self.guard.signal(verdict.local_rank, verdict.signal);
        Some(self.failed(failure))
    }

    /// A worker's group is broken, and no round is forming. Reports this as a failure, though no worker has ended: the
    /// workers quiesce and meet in the next round. Ignored if the round is over, or its end is reported already.
    pub(crate) fn ask_round(&mut self, request: RoundRequest) -> Option<GroupReport> {
        let worker = self.workers.get(&request.local_rank).filter(|worker| worker.exit.is_none())?;
        if !self.phase.is_running() || request.round != self.round {
            return None;
        }
        let message = format!("the worker asks for a new round: {}", request.reason);
        tracing::warn!(round = self.round, rank = worker.rank, pid = worker.pid, "{message}");
        let failure = worker.failure(request.local_rank, self.failure(FailureClass::Peer, message).bounded());
        self.step(Input::Report);
        Some(self.failed(failure))
    }

    pub(crate) fn log_directory(&self) -> Option<&Path> {
        self.logs.directory()
    }

    /// What readers of the workers' output look up.
    pub(crate) fn output_history(&self) -> History {
        self.logs.history()
    }

    /// This node leaves. Workers are stopped with the signal that the agent itself got. A failing exit from now on is
    /// of class [`FailureClass::Signalled`], because its sender may have signalled the workers, too.
    pub(crate) fn leave(&mut self, signal: Signal) {
        self.leaving = Some(signal);
    }

    /// The port at which the ranks find each other, if rank 0 is here.
    pub(crate) fn master(&mut self) -> &mut Rank0Port {
        &mut self.master
    }

    /// The workers are about to quiesce or stop. From now on an exit is not a failure.
    pub(crate) fn rest(&mut self) {
        self.step(Input::Report);
    }

    fn step(&mut self, input: Input) {
        self.phase = self.phase.step(input);
    }

    /// Begins to start the workers of a place. Workers that have quiesced, or that were started ahead, take their
    /// places in the same processes. Reports that all run, or how one failed. The report comes at once, or later from
    /// [`LocalGroup::moved`].
    pub(crate) fn start(&mut self, start: &Start, socket: &WorkerSocket) -> Option<GroupReport> {
        let round = start.round.number;
        self.round = round;
        self.workers.retain(|_, worker| worker.exit.is_none());
        let secret = start.secret.clone().filter(|_| start.round.members_only);
        let members = secret.map(|secret| Known { secret, job: self.setup.job.clone(), round });
        let rank_0 = start.rank.group_rank == 0;
        if let Err(error) = self.master.begin(round, rank_0, start.round.master.as_ref(), members) {
            self.step(Input::Report);
            if error.is_shortage() {
                return self.short(&error.to_string());
            }
            return Some(self.failed(self.failure(FailureClass::Own, error.to_string()).bounded()));
        }
        self.step(Input::Start);
        let places: Vec<Assignment> = (0..self.setup.slots).map(|local| self.assignment(start, local)).collect();
        socket.of_generation(start.round.generation, start.spec.timings.join_timeout);
        socket.begin(places.clone());
        self.events.placed(events::NodeInRound {
            group_rank: Some(start.rank.group_rank),
            group_world_size: Some(start.round.group_world_size),
            restarts: start.round.restarts,
        });
        self.victims = self.counters.read();
        let (role_rank_base, role_world_size) = (start.rank.role_rank_base, start.rank.role_world_size);
        let mut planned = Vec::new();
        for (local_rank, assignment) in (0u32..).zip(places) {
            let Some(worker) = self.workers.get_mut(&local_rank) else {
                planned.push(Planned { local_rank, assignment, role_rank_base, role_world_size });
                continue;
            };
            tracing::info!(round, rank = assignment.rank, local_rank, pid = worker.pid, "worker continues");
            self.logs.placed(local_rank, round, assignment.rank);
            worker.rank = assignment.rank;
            (worker.role_rank, worker.role_world_size) = (role_rank_base + local_rank, role_world_size);
            if !std::mem::replace(&mut worker.placed, true) {
                self.events.worker(events::EventState::Start, &worker.subject(local_rank, None));
            }
        }
        if planned.is_empty() {
            return self.all_started();
        }
        self.end_remains(&planned);
        self.open(planned, start.round.restarts, round);
        None
    }

    /// Ends the processes that dead workers have left in their process groups, if other workers live on. A full stop has
    /// ended them with the rest.
    fn end_remains(&mut self, planned: &[Planned]) {
        for Planned { local_rank, .. } in planned {
            if !self.workers.is_empty() {
                self.guard.signal(*local_rank, Signal::KILL);
            }
        }
    }

    fn unstarted(&mut self, local_rank: u32, rank: u32, Unstarted { why, shortage }: Unstarted) -> Option<GroupReport> {
        let message = format!("worker {local_rank} could not be started: {why}");
        if shortage {
            return self.short(&message);
        }
        self.step(Input::Report);
        let failure =
            Failure { rank: Some(rank), local_rank: Some(local_rank), ..self.failure(FailureClass::Own, message) };
        Some(self.failed(failure.bounded()))
    }

    /// Writes to torchrun's events how the node's part ended: successfully, or with this error.
    pub(crate) fn conclude(&self, error: Option<&str>) {
        let state = if error.is_none() { events::EventState::Succeeded } else { events::EventState::Failed };
        self.events.agent(state, error);
    }

    fn assignment(&self, start: &Start, local_rank: u32) -> Assignment {
        let round = &start.round;
        let master = round.master.clone().unwrap_or(Endpoint { host: self.setup.address.clone(), port: 0 });
        Assignment {
            job: self.setup.job.clone(),
            round: round.number,
            rank: start.rank.first_rank + local_rank,
            world_size: round.world_size,
            group_rank: start.rank.group_rank,
            group_world_size: round.group_world_size,
            master_addr: master.host,
            master_port: master.port,
            restart_count: round.restarts,
            nodes_per_replica: Some(start.spec.nodes_per_replica).filter(|nodes| *nodes > 1),
            checkpoint: round.checkpoint.clone().map(for_workers),
        }
    }

    /// Ends whatever is left, and the guard. Then waits until all output of the workers is in its files and queued for
    /// the console. Gives up when no output has moved for `patience`.
    pub(crate) async fn close(self, patience: Duration) {
        self.guard.close().await;
        if !self.logs.finish(patience).await {
            tracing::warn!("the workers' last output is not shown: the console or the log files hang");
        }
    }

    /// Begins to stop all workers. [`GroupReport::Stopped`] comes from [`LocalGroup::moved`] when no process is left.
    ///
    /// Workers that have all succeeded may have left processes that still work, such as an upload. Half of the grace is
    /// for these to end by themselves, unless `in_haste`.
    pub(crate) fn stop(&mut self, grace: Duration, in_haste: bool) {
        self.step(Input::Stop);
        (self.opening, self.held) = (None, None);
        let signal = if grace.is_zero() { Signal::KILL } else { self.leaving.unwrap_or(Signal::TERM) };
        let succeeded = |worker: &WorkerProcess| worker.exit.is_some_and(Exit::success);
        let all_done = self.workers.len() == self.setup.slots as usize && self.workers.values().all(succeeded);
        if all_done && !in_haste && !grace.is_zero() && self.leaving.is_none() {
            self.guard.begin_end(grace / 2, signal, grace / 2);
        } else {
            self.guard.begin_stop(signal, grace);
        }
    }

    /// Sets the time after which the guard kills the workers.
    pub(crate) fn fence(&mut self, until: Option<Time>) {
        self.state.send_if_modified(|state| {
            state.fence = until;
            false
        });
        self.guard.set_deadline(until);
    }

    /// Waits for the next event of the workers. Never ends. The wait may be cancelled.
    pub(crate) async fn next(&mut self) -> Moved {
        tokio::select! {
            files = spawn::files(&mut self.opening) => Moved::Opened(files),
            report = spawn::told(&mut self.held) => Moved::Paused(report),
            () = nursery::due(self.nursery) => Moved::NurseryDue,
            event = self.guard.next_event() => Moved::Workers(event),
        }
    }

    /// Handles an event, and returns the report that it means for the protocol.
    pub(crate) async fn moved(&mut self, moved: Moved, socket: &WorkerSocket) -> Option<GroupReport> {
        let event = match moved {
            Moved::Opened(files) => return self.opened(files, socket),
            Moved::Paused(report) => return Some(report),
            Moved::NurseryDue => {
                self.begin_nursery(socket);
                return None;
            }
            Moved::Workers(event) => event,
        };
        match event {
            Event::Started { local_rank, pid } => self.started(local_rank, pid),
            Event::NotStarted { local_rank, refused } => self.not_started(local_rank, refused).await,
            Event::Exited(exited) => self.exited(exited, socket).await,
            Event::Stopped if self.phase.is_stopping() => {
                self.step(Input::Gone);
                self.events.seeking();
                self.workers.clear();
                self.starting.clear();
                self.publish();
                socket.begin(Vec::new());
                Some(GroupReport::Stopped { master: self.master.offer() })
            }
            Event::Stopped => None,
            Event::Preloaded { pid } => {
                self.preloaded(pid);
                None
            }
            Event::NotPreloaded { why } => {
                self.without_nursery(why);
                None
            }
            Event::Left { processes, patience } => {
                ends::name_left(processes, patience).await;
                None
            }
            Event::DeadlineKilled { .. } => {
                let message = "its workers were killed at the fence point: the round could not be proven in time";
                tracing::error!("{message}");
                self.opening = None;
                // The deadline killed the workers, so their exits say nothing about the workers themselves.
                let unreported = self.phase.is_unreported();
                self.step(Input::Report);
                unreported.then(|| self.lost(message.to_owned()))
            }
            Event::Survivors { processes } => {
                tracing::error!("processes live after SIGKILL, so this node cannot continue: {}", processes.join(", "));
                None
            }
            Event::GuardLost { cause, survivors } => {
                tracing::error!(?survivors, "the guard process has ended ({cause}), and with it the workers");
                self.step(Input::Report);
                self.opening = None;
                self.starting.clear();
                Some(self.lost(format!("the guard process of this node has ended: {cause}")))
            }
        }
    }
}
