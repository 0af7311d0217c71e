//! The Unix socket on which workers talk to the agent: JSON lines as in [`elastic_proto::worker`]. Starting and
//! stopping workers is in `group.rs`.

mod conversation;
mod requests;

use std::collections::BTreeMap;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use elastic_node::Status;
use elastic_proto::worker::{Assignment, FailureClass, ToWorker};
use elastic_rendezvous::time::Time;
use tokio::net::UnixListener;
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{Notify, mpsc, watch};
use tokio::time::timeout;

use crate::store::participation::{JobPaths, JobStore};
use crate::workers::snapshot_memory::{Left, Memories};
use crate::workers::watchdog::Steps;
use conversation::{Outgoing, converse};

/// The most lines that are queued for a worker that does not read. Beyond this, answers wait, and the next news of a
/// round closes the connection: a worker that misses one could wait for ever.
const WAITING: usize = 256;

/// The socket cannot be created.
#[derive(Debug, thiserror::Error)]
#[error("cannot open the workers' socket at {}: {cause}", .path.display())]
pub struct SocketError {
    path: PathBuf,
    cause: io::Error,
}

/// How far a worker has come in a round, as it reported.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Progress {
    /// The first step that it reported, and when.
    pub first: (u64, Time),
    /// Its newest step, and when it first reported that.
    pub last: (u64, Time),
    /// Epoch, counted from 0.
    pub epoch: Option<u64>,
    /// The newest training loss.
    pub loss: Option<f64>,
    /// Steps planned in all.
    pub total_steps: Option<u64>,
}

/// How far the furthest worker of this node has come, in the newest round with a reported step. It is known
/// until a worker of another round reports one.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Furthest {
    /// The round.
    pub round: u64,
    /// The node's position in the round.
    pub group_rank: u32,
    /// What the worker reported.
    pub progress: Progress,
}

/// Looks the furthest worker up.
pub(crate) type FurthestWorker = Arc<dyn Fn() -> Option<Furthest> + Send + Sync>;

/// What a worker can do when a round forms, as far as it has told the agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Awareness {
    /// It has not registered.
    Unknown,
    /// It must be stopped.
    Unaware,
    /// It can quiesce.
    Aware,
    /// It has quiesced.
    Quiesced,
}

/// What may come with a step.
struct Said {
    epoch: Option<u64>,
    loss: Option<f64>,
    total_steps: Option<u64>,
}

/// What the workers of the current round have reported.
#[derive(Debug, Default)]
struct Told {
    failing: BTreeMap<u32, (FailureClass, String)>,
    progress: BTreeMap<u32, Progress>,
}

/// A worker's request for another round.
#[derive(Debug)]
pub struct RoundRequest {
    /// The worker.
    pub local_rank: u32,
    /// The round that it wants to leave.
    pub round: u64,
    /// Why, for people.
    pub reason: String,
}

/// State shared by all connections.
struct Shared {
    rendezvous: JobStore,
    paths: JobPaths,
    status: watch::Receiver<Status>,
    state: Mutex<SocketState>,
    /// Notified when a connection was read to its end.
    ended: Notify,
    /// Notified when a worker's awareness may have changed.
    awareness: Notify,
    /// Notified when a worker has asked for another round.
    round_asked: Notify,
}

/// A worker's connection, until it is read to its end.
struct Connection {
    line: mpsc::Sender<Outgoing>,
    /// Closes the connection.
    let_go: Arc<Notify>,
    registered: Option<Registered>,
    /// The process id of the peer that opened it.
    pid: Option<i32>,
}

impl Connection {
    /// Sends the worker news of rounds, or closes the connection if there is no room for it.
    fn tell(&self, message: ToWorker) {
        if let Err(TrySendError::Full(_)) = self.line.try_send(message.into()) {
            tracing::warn!(pid = self.pid, "a worker does not read its agent's messages: closing its connection");
            self.let_go.notify_one();
        }
    }
}

#[derive(Clone, Copy)]
struct Registered {
    local_rank: u32,
    aware: bool,
    quiesced: bool,
    /// Whether the worker has received its first place.
    welcomed: bool,
}

#[derive(Default)]
struct SocketState {
    /// The places of this node's workers, by local rank. Empty while no workers run.
    places: Vec<Assignment>,
    /// How long a worker waits at a barrier.
    barrier_timeout: Duration,
    /// Whether the workers were started before they had places.
    ahead: bool,
    told: Told,
    furthest: Option<Furthest>,
    /// What the agent told the workers about the round that is forming.
    forming: Option<ToWorker>,
    /// The first request for another round, until it is taken.
    round_asked: Option<RoundRequest>,
    /// The workers' memory that outlives them.
    memories: Memories,
    next: u64,
    connections: BTreeMap<u64, Connection>,
}

impl SocketState {
    /// What the connections that have registered can do.
    fn registered(&self) -> impl Iterator<Item = Registered> {
        self.connections.values().filter_map(|connection| connection.registered)
    }

    /// Registers a worker on a connection. Returns the messages to send to it.
    fn register(&mut self, id: u64, local_rank: u32, aware: bool) -> Vec<ToWorker> {
        let place = self.places.get(local_rank as usize).cloned();
        if place.is_none() && !self.ahead {
            let message = format!("no worker of this node has local rank {local_rank} just now");
            return vec![ToWorker::Error { id: None, message, again: false }];
        }
        let welcomed = place.is_some();
        if let Some(connection) = self.connections.get_mut(&id) {
            connection.registered = Some(Registered { local_rank, aware, quiesced: aware && !welcomed, welcomed });
        }
        // The worker may register so late that the next round is already forming.
        let forming = self.forming.clone().filter(|_| welcomed);
        place.map(ToWorker::Welcome).into_iter().chain(forming).collect()
    }

    /// Records that the worker of this local rank has done `step` steps.
    fn progressed(&mut self, local_rank: u32, step: u64, said: Said) {
        let now = (step, elastic_store::clock::now());
        let before = self.told.progress.get(&local_rank);
        let progress = Progress {
            // A worker that goes back to an earlier step counts from there.
            first: before.map(|before| before.first).filter(|first| first.0 <= step).unwrap_or(now),
            last: before.map(|before| before.last).filter(|last| last.0 == step).unwrap_or(now),
            epoch: said.epoch,
            loss: said.loss.or(before.and_then(|before| before.loss)),
            total_steps: said.total_steps,
        };
        self.told.progress.insert(local_rank, progress);
        let Some(place) = self.places.get(local_rank as usize) else { return };
        let (round, group_rank) = (place.round, place.group_rank);
        if self.furthest.is_none_or(|furthest| furthest.round != round || furthest.progress.last.0 <= step) {
            self.furthest = Some(Furthest { round, group_rank, progress });
        }
    }

    /// Records that the worker of a connection asks for another round instead of `round`.
    fn ask_round(&mut self, id: u64, round: u64, reason: String) -> Result<(), &'static str> {
        let worker = self.connections.get(&id).and_then(|connection| connection.registered);
        let Some(Registered { local_rank, aware: true, .. }) = worker else {
            return Err("only a worker that has registered with `round_aware` can ask for a round");
        };
        self.round_asked.get_or_insert(RoundRequest { local_rank, round, reason });
        Ok(())
    }

    /// Records that the worker of a connection has quiesced.
    fn quiesced(&mut self, id: u64) -> Result<(), &'static str> {
        let worker = self.connections.get_mut(&id).and_then(|connection| connection.registered.as_mut());
        match worker {
            Some(worker) if worker.aware && self.forming.is_some() => {
                worker.quiesced = true;
                Ok(())
            }
            Some(worker) if worker.aware => Err("no round is forming, so there is nothing to quiesce for"),
            _ => Err("only a worker that has registered with `round_aware` can quiesce"),
        }
    }
}

impl Shared {
    fn state(&self) -> std::sync::MutexGuard<'_, SocketState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The agent's end of the workers' socket. Dropping it removes the socket's file.
pub struct WorkerSocket {
    path: PathBuf,
    shared: Arc<Shared>,
}

impl WorkerSocket {
    /// Listens at `path`, for this user alone. Must be called within a tokio runtime.
    ///
    /// # Errors
    /// [`SocketError`] names the path.
    pub fn open(
        path: &Path,
        rendezvous: JobStore,
        paths: JobPaths,
        status: watch::Receiver<Status>,
    ) -> Result<WorkerSocket, SocketError> {
        let failed = |cause| SocketError { path: path.to_owned(), cause };
        let listener = UnixListener::bind(path).map_err(failed)?;
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600)).map_err(failed)?;
        let shared = Arc::new(Shared {
            rendezvous,
            paths,
            status,
            state: Mutex::default(),
            ended: Notify::new(),
            awareness: Notify::new(),
            round_asked: Notify::new(),
        });
        let serving = Arc::clone(&shared);
        tokio::spawn(async move {
            loop {
                match listener.accept().await {
                    Ok((stream, _)) => {
                        tokio::spawn(converse(stream, Arc::clone(&serving)));
                    }
                    Err(error) => {
                        tracing::warn!(%error, "cannot accept a worker's connection");
                        tokio::time::sleep(Duration::from_millis(100)).await;
                    }
                }
            }
        });
        Ok(WorkerSocket { path: path.to_owned(), shared })
    }

    /// The socket's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Workers without places are being started. A worker that registers counts as quiesced until it has a place.
    pub fn ahead(&self) {
        let mut state = self.shared.state();
        state.ahead = true;
        state.places.clear();
    }

    /// From now on, workers run in these places. Workers that have quiesced receive their places. Earlier reports are
    /// forgotten.
    pub fn begin(&self, places: Vec<Assignment>) {
        let mut state = self.shared.state();
        state.told = Told::default();
        (state.forming, state.ahead, state.round_asked) = (None, false, None);
        for connection in state.connections.values_mut() {
            let Some(registered) = connection.registered.as_mut().filter(|registered| registered.quiesced) else {
                continue;
            };
            registered.quiesced = false;
            if let Some(place) = places.get(registered.local_rank as usize) {
                let known = std::mem::replace(&mut registered.welcomed, true);
                let told = if known { ToWorker::Assignment } else { ToWorker::Welcome };
                connection.tell(told(place.clone()));
            }
        }
        state.places = places;
    }

    /// Workers that are started from now on belong to this generation of the job. Memory that another generation left
    /// is dropped. The job's spec says how long they wait at a barrier.
    pub fn of_generation(&self, generation: u64, barrier_timeout: Duration) {
        let mut state = self.shared.state();
        state.memories.begin(generation);
        state.barrier_timeout = barrier_timeout;
    }

    /// Memory that workers left and that can be saved without them.
    pub fn left(&self) -> Option<Left> {
        self.shared.state().memories.left()
    }

    /// Tells the workers that a round is forming. Round-aware workers have `quiesce` to quiesce.
    pub fn forming(&self, round: u64, reason: &str, quiesce: Duration) {
        let quiesce_ms = quiesce.as_millis() as u64;
        let forming = ToWorker::Forming { round, reason: reason.to_owned(), quiesce_ms };
        self.tell_all(&forming);
        self.shared.state().forming = Some(forming);
    }

    /// What a worker can do when a round forms. If a script has several connections, the most capable one counts,
    /// because the others may not know about rounds.
    pub fn awareness(&self, local_rank: u32) -> Awareness {
        let state = self.shared.state();
        let all = state.registered().filter(|registered| registered.local_rank == local_rank);
        let all = all.map(|registered| match registered {
            Registered { quiesced: true, .. } => Awareness::Quiesced,
            Registered { aware: true, .. } => Awareness::Aware,
            Registered { .. } => Awareness::Unaware,
        });
        all.max().unwrap_or(Awareness::Unknown)
    }

    /// Waits until some worker's awareness may have changed since the last wait.
    pub async fn awareness_changed(&self) {
        self.shared.awareness.notified().await;
    }

    /// Waits until a worker asks for another round. The wait may be cancelled.
    pub async fn round_asked(&self) -> RoundRequest {
        loop {
            let asked = self.shared.state().round_asked.take();
            match asked {
                Some(asked) => return asked,
                None => self.shared.round_asked.notified().await,
            }
        }
    }

    /// Tells the workers that the node is leaving.
    pub fn draining(&self, grace: Duration) {
        self.tell_all(&ToWorker::Draining { grace_ms: grace.as_millis() as u64 });
    }

    /// Waits until everything that an exited worker sent has been read, for at most `limit`. A worker's exit can be
    /// known before its last messages are read.
    pub async fn heard_out(&self, local_rank: u32, limit: Duration) {
        let heard_out = async {
            loop {
                let mut ended = std::pin::pin!(self.shared.ended.notified());
                ended.as_mut().enable();
                // A connection that has not registered yet may also be this worker's.
                let is_its = |connection: &Connection| {
                    connection.registered.is_none_or(|registered| registered.local_rank == local_rank)
                };
                if !self.shared.state().connections.values().any(is_its) {
                    return;
                }
                ended.await;
            }
        };
        // A child of the worker may hold a connection open. After `limit` this is no longer waited for.
        let _ = timeout(limit, heard_out).await;
    }

    /// The reason that a worker gave for failing.
    pub fn failing(&self, local_rank: u32) -> Option<(FailureClass, String)> {
        self.shared.state().told.failing.get(&local_rank).cloned()
    }

    /// How far the furthest worker has come, for a reader that looks it up later.
    pub fn furthest(&self) -> FurthestWorker {
        let shared = Arc::clone(&self.shared);
        Arc::new(move || shared.state().furthest)
    }

    /// The furthest step that a worker has reported in this round.
    pub fn step_in(&self, round: u64) -> Option<u64> {
        let furthest = self.shared.state().furthest.filter(|furthest| furthest.round == round)?;
        Some(furthest.progress.last.0)
    }

    /// The workers' steps, for a reader that looks them up later.
    pub fn steps(&self) -> Steps {
        let shared = Arc::clone(&self.shared);
        Arc::new(move |local_rank| Some(shared.state().told.progress.get(&local_rank)?.last))
    }

    fn tell_all(&self, message: &ToWorker) {
        for connection in self.shared.state().connections.values() {
            connection.tell(message.clone());
        }
    }
}

impl Drop for WorkerSocket {
    fn drop(&mut self) {
        // This is only tidying. The directory belongs to this agent, and a leftover socket does no harm.
        let _ = std::fs::remove_file(&self.path);
    }
}
