//! Starts workers: builds their specs, opens their files, then starts all of them at once. It can also start them ahead
//! of their round.
//!
//! Opening a file or reading a program may take longer than a lease lasts. So files are opened outside the agent's
//! task, which sends the guard its deadlines, and the guard's answers come as events.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use elastic_node::GroupReport;
use elastic_proto::worker::{Assignment, WARM_UP_ENV};
use tokio::task::{JoinError, JoinHandle};
use tokio::time::Instant;

use super::phase::Input;
use super::{LAST_LINES, LocalGroup, Refused, SpawnError, WorkerProcess};
use crate::machine::shortage::Next;
use crate::output::events;
use crate::output::logs::Stdio;
use crate::output::logs::WorkerLogs;
use crate::workers::environment::{LocalPlace, NodeFacts, own_device, without_place, worker_env};
use crate::workers::guard_client::{Event, WorkerSpec};
use crate::workers::socket::WorkerSocket;

/// The descriptors that a worker writes to, and what the agent keeps of its output.
type Files = Vec<(Stdio, WorkerLogs)>;

/// An event of a group's workers. [`LocalGroup::moved`] handles it.
#[derive(Debug)]
pub(crate) enum Moved {
    /// The files of the workers to be started are open.
    Opened(Result<Files, JoinError>),
    /// The pause after a shortage is over. This report can be sent now.
    Paused(GroupReport),
    /// It is time for a nursery.
    NurseryDue,
    Workers(Event),
}

pub(super) struct Planned {
    pub(super) local_rank: u32,
    pub(super) assignment: Assignment,
    pub(super) role_rank_base: u32,
    pub(super) role_world_size: u32,
}

#[derive(Debug)]
pub(super) struct Unstarted {
    pub(super) why: String,
    /// Whether the host is short of resources. Then the worker is not to blame.
    pub(super) shortage: bool,
}

impl Unstarted {
    fn of(why: String) -> Unstarted {
        Unstarted { why, shortage: false }
    }
}

impl From<SpawnError> for Unstarted {
    fn from(error: SpawnError) -> Unstarted {
        Unstarted { shortage: error.is_shortage(), why: error.to_string() }
    }
}

/// Workers whose files are being opened. If dropped, the workers are not started.
pub(super) struct Opening {
    planned: Vec<Planned>,
    files: JoinHandle<Files>,
}

impl Opening {
    pub(super) fn local_ranks(&self) -> impl Iterator<Item = u32> {
        self.planned.iter().map(|planned| planned.local_rank)
    }
}

/// Waits until the files are open. Waits for ever if there are none to open. The wait may be cancelled.
pub(super) async fn files(opening: &mut Option<Opening>) -> Result<Files, JoinError> {
    match opening {
        Some(opening) => (&mut opening.files).await,
        None => std::future::pending().await,
    }
}

/// The agent's working directory, which the guard shares. It may have another name by now, or another folder its name;
/// only if it is removed, its name is all that is left.
fn working_directory(named: &Path) -> PathBuf {
    let here = Path::new(".");
    let removed = std::fs::metadata(here).is_ok_and(|here| here.nlink() == 0);
    if removed { named.to_owned() } else { here.to_owned() }
}

/// A report that is held back until the pause after a shortage is over.
pub(super) struct Held {
    until: Instant,
    report: GroupReport,
}

/// Waits until the report can be sent. Waits for ever if there is none. The wait may be cancelled.
pub(super) async fn told(held: &mut Option<Held>) -> GroupReport {
    let Some(until) = held.as_ref().map(|held| held.until) else { return std::future::pending().await };
    tokio::time::sleep_until(until).await;
    match held.take() {
        Some(held) => held.report,
        None => std::future::pending().await,
    }
}

impl LocalGroup {
    /// The workers of this round cannot be started because the host is short of some resource. This is no worker's
    /// failure. The report is held back for a pause. A node that stays short leaves: see [`LocalGroup::starved`].
    pub(super) fn short(&mut self, why: &str) -> Option<GroupReport> {
        self.step(Input::Report);
        let message = format!("this node lacks a resource that starting workers needs: {why}");
        let report = self.lost(message.clone());
        // The other nodes wait at most `start_timeout` for this node's workers to run. So this node gives up earlier.
        match self.shortage.met(elastic_store::clock::now(), self.setup.spec.timings.start_timeout / 2) {
            Next::Again(pause) => {
                tracing::warn!("{message}; trying again in {pause:?}, at no cost to --max-restarts");
                self.held = Some(Held { until: Instant::now() + pause, report });
                None
            }
            Next::Leave => {
                self.starved = Some(message);
                Some(report)
            }
        }
    }

    /// Why this node leaves, after the host has been short of resources for starting workers for too long.
    pub(crate) fn starved(&mut self) -> Option<String> {
        self.starved.take()
    }

    /// Begins to start workers. Opens their files first.
    pub(super) fn open(&mut self, planned: Vec<Planned>, restarts: u32, round: u64) {
        let ranks: Vec<_> = planned.iter().map(|planned| (planned.local_rank, planned.assignment.rank)).collect();
        let logs = Arc::clone(&self.logs);
        let files = tokio::task::spawn_blocking(move || logs.begin_attempt(restarts, round).workers(&ranks));
        self.opening = Some(Opening { planned, files });
    }

    /// Asks the guard to start all workers whose files are open. All are asked for at once.
    pub(super) fn opened(&mut self, files: Result<Files, JoinError>, socket: &WorkerSocket) -> Option<GroupReport> {
        let planned = self.opening.take()?.planned;
        let files = match (files, planned.first()) {
            (Ok(files), _) => files,
            (Err(error), first) => {
                let (local_rank, rank) = first.map(|planned| (planned.local_rank, planned.assignment.rank))?;
                return self.unstarted(local_rank, rank, Unstarted::of(format!("cannot open its files: {error}")));
            }
        };
        for (planned, (stdio, logs)) in planned.into_iter().zip(files) {
            let (local_rank, rank) = (planned.local_rank, planned.assignment.rank);
            if let Err(error) = self.ask_for(&planned, logs.error_file(), stdio, socket) {
                return self.unstarted(local_rank, rank, error);
            }
            if self.phase.has_places() {
                self.logs.placed(local_rank, planned.assignment.round, rank);
            }
            let role_rank = planned.role_rank_base + local_rank;
            let role_world_size = planned.role_world_size;
            let (pid, since) = (0, elastic_store::clock::now());
            let worker =
                WorkerProcess { pid, since, rank, role_rank, role_world_size, placed: false, logs, exit: None };
            self.starting.insert(local_rank, worker);
        }
        None
    }

    fn ask_for(
        &mut self,
        planned: &Planned,
        error_file: Option<&Path>,
        stdio: Stdio,
        socket: &WorkerSocket,
    ) -> Result<(), Unstarted> {
        let spec = self.spec(planned, error_file, stdio, socket).map_err(Unstarted::of)?;
        Ok(self.guard.begin_spawn(spec)?)
    }

    pub(super) fn spec(
        &self,
        planned: &Planned,
        error_file: Option<&Path>,
        stdio: Stdio,
        socket: &WorkerSocket,
    ) -> Result<WorkerSpec, String> {
        let Planned { local_rank, assignment, role_rank_base, role_world_size } = planned;
        let place = LocalPlace {
            local_rank: *local_rank,
            local_world_size: self.setup.slots,
            role: &self.setup.options.role,
            role_rank_base: *role_rank_base,
            role_world_size: *role_world_size,
        };
        let signals = self.setup.signals.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
        let facts = NodeFacts {
            node: &self.setup.node,
            socket: socket.path(),
            max_restarts: self.setup.spec.max_restarts,
            agent_store: self.master.is_agent(),
            signals: &signals,
        };
        let lookup = |name: &str| std::env::var_os(name);
        let mut env: BTreeMap<OsString, OsString> = std::env::vars_os().collect();
        // The agent itself may run as a worker and have inherited this variable.
        env.remove(OsStr::new(WARM_UP_ENV));
        env.extend(worker_env(assignment, &place, &facts, error_file, &lookup));
        if self.setup.options.virtual_local_rank {
            env.extend(own_device(*local_rank, &lookup).map_err(|error| error.to_string())?);
        }
        env.extend(self.setup.env.iter().map(|(name, value)| ((*name).into(), value.clone())));
        if !self.phase.has_places() {
            without_place(&mut env);
        }
        let mut argv = vec![self.setup.command.program.clone().into_os_string()];
        argv.extend(self.setup.command.args(*local_rank, assignment.rank));
        let cpus = self.setup.cpus.get(*local_rank as usize).cloned().unwrap_or_default();
        let cwd = working_directory(&self.setup.directory);
        Ok(WorkerSpec { local_rank: *local_rank, argv, env, cwd, stdio, cpus })
    }

    /// A worker's program now runs.
    pub(super) fn started(&mut self, local_rank: u32, pid: i32) -> Option<GroupReport> {
        let placed = self.phase.has_places();
        let worker =
            WorkerProcess { pid, since: elastic_store::clock::now(), placed, ..self.starting.remove(&local_rank)? };
        if placed {
            tracing::info!(round = self.round, rank = worker.rank, local_rank, pid, "worker started");
            self.events.worker(events::EventState::Start, &worker.subject(local_rank, None));
        } else {
            tracing::info!(local_rank, pid, "worker started ahead of its round");
        }
        self.workers.insert(local_rank, worker);
        self.all_started()
    }

    /// The report once all workers of a place run, unless something else happened meanwhile.
    pub(super) fn all_started(&mut self) -> Option<GroupReport> {
        if self.opening.is_some() || !self.starting.is_empty() {
            return None;
        }
        self.publish();
        self.nursery = self.nursery.workers_run(Instant::now());
        if !self.phase.is_running() {
            return None;
        }
        self.shortage.is_over();
        Some(GroupReport::Started(self.round))
    }

    /// A worker could not be started, or must not be.
    pub(super) async fn not_started(&mut self, local_rank: u32, refused: Refused) -> Option<GroupReport> {
        let worker = self.starting.remove(&local_rank)?;
        if !self.phase.reports_unstarted() {
            return None;
        }
        if refused.is_late() {
            self.step(Input::Report);
            return Some(self.lost(SpawnError::DeadlinePassed.to_string()));
        }
        // Finding the reason may take long on some file systems.
        let explaining = tokio::task::spawn_blocking(move || Unstarted::from(refused.explain()));
        let explained = tokio::time::timeout(LAST_LINES, explaining).await.ok().and_then(Result::ok);
        let silent = || Unstarted::of("the file system with its program does not answer".to_owned());
        self.unstarted(local_rank, worker.rank, explained.unwrap_or_else(silent))
    }

    /// Begins to start the workers that do not run, before their places are known. Until they have places, their ends
    /// are not failures. Their output goes to the attempt of this round, after so many restarts.
    pub(crate) fn start_ahead(&mut self, restarts: u32, round: u64) {
        self.workers.retain(|_, worker| worker.exit.is_none());
        self.step(Input::StartAhead);
        let missing = (0..self.setup.slots).filter(|local_rank| !self.workers.contains_key(local_rank));
        let planned: Vec<Planned> = missing.map(|local_rank| self.without_place(local_rank)).collect();
        self.end_remains(&planned);
        self.open(planned, restarts, round);
    }

    /// A worker whose place is not known yet. These are placeholders: the variables of a place are removed from its
    /// environment again.
    pub(super) fn without_place(&self, local_rank: u32) -> Planned {
        let slots = self.setup.slots;
        let assignment = Assignment {
            job: self.setup.job.clone(),
            round: 0,
            rank: local_rank,
            world_size: slots,
            group_rank: 0,
            group_world_size: 1,
            master_addr: String::new(),
            master_port: 0,
            restart_count: 0,
            nodes_per_replica: None,
            checkpoint: None,
        };
        Planned { local_rank, assignment, role_rank_base: 0, role_world_size: slots }
    }
}
