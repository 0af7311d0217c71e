//! The Unix socket on which workers talk to the agent: JSON lines as in [`elastic_proto::worker`]. Starting and
//! stopping workers is in `group.rs`.

mod conversation;
mod outgoing;
mod requests;
mod state;

use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use elastic_node::Status;
use elastic_proto::worker::{Assignment, FailureClass, ToWorker};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{Notify, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};

use crate::store::participation::{JobPaths, JobStore};
use crate::workers::snapshot_memory::Left;
use crate::workers::watchdog::Steps;
use conversation::converse;
pub(crate) use state::{Awareness, Furthest, RoundRequest};
use state::{Connection, Registered, Shared, StepTimes, Told};

/// The socket cannot be created.
#[derive(Debug, thiserror::Error)]
#[error("cannot open the workers' socket at {}: {cause}", .path.display())]
pub struct SocketError {
    path: PathBuf,
    cause: io::Error,
}

/// Looks the furthest worker up.
pub(crate) type FurthestWorker = Arc<dyn Fn() -> Option<Furthest> + Send + Sync>;

/// The agent's end of the workers' socket. Dropping it removes the socket's file.
pub struct WorkerSocket {
    path: PathBuf,
    shared: Arc<Shared>,
    /// Takes connections at the path.
    listening: JoinSet<()>,
}

impl WorkerSocket {
    /// Listens at `path`, for this user alone. `fresh`: what the job did before counts for nothing. Must be called within
    /// a tokio runtime.
    pub fn open(
        path: &Path,
        (rendezvous, paths): (JobStore, JobPaths),
        status: watch::Receiver<Status>,
        fresh: bool,
    ) -> Result<WorkerSocket, SocketError> {
        let shared = Arc::new(Shared {
            rendezvous,
            paths,
            status,
            fresh,
            state: Mutex::default(),
            heard: Notify::new(),
            awareness: Notify::new(),
            round_asked: Notify::new(),
            finished: Notify::new(),
        });
        let listening = listen(path, &shared)?;
        Ok(WorkerSocket { path: path.to_owned(), shared, listening })
    }

    /// Listens at another path, for workers that start from now on. Connections stay.
    pub fn move_to(&mut self, path: PathBuf) -> Result<(), SocketError> {
        self.listening = listen(&path, &self.shared)?;
        self.path = path;
        Ok(())
    }

    /// The socket's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Workers without places are being started, and are to register by `until`. A worker that registers counts as
    /// quiesced until it has a place.
    pub fn ahead(&self, until: Instant) {
        let mut state = self.shared.state();
        state.ahead = Some(until);
        state.places.clear();
    }

    /// From now on, workers run in these places. Workers that have quiesced receive their places. Earlier reports are
    /// forgotten.
    pub fn begin(&self, places: Vec<Assignment>) {
        let mut state = self.shared.state();
        state.told = Told::default();
        (state.forming, state.ahead, state.round_asked, state.finished) = (None, None, None, None);
        state.first_round = state.first_round.or(places.first().map(|place| place.round));
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

    /// Waits until a worker says whether the training is over. The wait may be cancelled.
    pub async fn finished(&self) -> bool {
        loop {
            let finished = self.shared.state().finished.take();
            match finished {
                Some(finished) => return finished,
                None => self.shared.finished.notified().await,
            }
        }
    }

    /// Tells the workers that the node is leaving.
    pub fn draining(&self, grace: Duration) {
        self.tell_all(&ToWorker::Draining { grace_ms: grace.as_millis() as u64 });
    }

    /// Waits for at most `limit` until all that an exited worker sent is read. Its exit may be known before that, and
    /// before its connection is taken. A child of the worker may hold one open: its end is not waited for.
    pub async fn heard_out(&self, local_rank: u32, limit: Duration) {
        // A connection that has not registered yet may also be this worker's.
        let is_its = |connection: &Connection| connection.registered.is_none_or(|it| it.local_rank == local_rank);
        let _ = timeout(limit, async {
            // Connections are taken in turn: when this one is over, the worker's are known.
            if let Ok(mut last) = UnixStream::connect(&self.path).await {
                let _ = last.shutdown().await;
                let _ = last.read(&mut [0]).await;
            }
            for connection in self.shared.state().connections.values_mut().filter(|connection| is_its(connection)) {
                connection.heard = false;
                connection.asked.notify_one();
            }
            loop {
                let mut heard = std::pin::pin!(self.shared.heard.notified());
                heard.as_mut().enable();
                if self.shared.state().connections.values().filter(|one| is_its(one)).all(|one| one.heard) {
                    return;
                }
                heard.await;
            }
        })
        .await;
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

    /// How long a step takes, by the worker that takes longest; 0 where no worker has reported enough steps.
    pub fn step_time(&self) -> Duration {
        self.shared.state().step_times.values().filter_map(StepTimes::step).max().unwrap_or_default()
    }

    /// Steps that take longer than this are warned of, once.
    pub fn warn_of_steps_over(&self, time: Duration) {
        self.shared.state().longest_step = Some(time);
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

/// Takes connections at this path, until the result is dropped.
fn listen(path: &Path, shared: &Arc<Shared>) -> Result<JoinSet<()>, SocketError> {
    let failed = |cause| SocketError { path: path.to_owned(), cause };
    let listener = UnixListener::bind(path).map_err(failed)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600)).map_err(failed)?;
    let (serving, mut listening) = (Arc::clone(shared), JoinSet::new());
    listening.spawn(async move {
        loop {
            match listener.accept().await {
                Ok((stream, _)) => drop(tokio::spawn(converse(stream, Arc::clone(&serving)))),
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a worker's connection");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            }
        }
    });
    Ok(listening)
}

impl Drop for WorkerSocket {
    fn drop(&mut self) {
        // This is only tidying. The directory belongs to this agent, and a leftover socket does no harm.
        let _ = std::fs::remove_file(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    #[tokio::test]
    async fn what_a_worker_said_counts_though_its_connection_was_not_taken_before_its_end() {
        let folder = tempfile::tempdir().unwrap();
        let (path, job) = (folder.path().join("socket"), "job".parse().unwrap());
        let store = JobStore::Store(Arc::new(elastic_store::embedded::MemoryStore::start(Default::default())));
        let (keys, v2) =
            (elastic_rendezvous::job::Keys::new("/x", &job), elastic_torchelastic::Paths::new("/x", "job"));
        let paths = JobPaths { job, keys, paths: v2 };
        let socket = WorkerSocket::open(&path, (store, paths), watch::channel(Status::default()).1, true).unwrap();
        // Given a worker ahead of its round that says why it fails and ends, before the agent looks
        socket.ahead(Instant::now() + Duration::from_secs(60));
        let mut worker = std::os::unix::net::UnixStream::connect(&path).unwrap();
        writeln!(worker, r#"{{"type":"register","local_rank":0,"pid":1}}"#).unwrap();
        writeln!(worker, r#"{{"type":"failing","class":"permanent","message":"m"}}"#).unwrap();
        drop(worker);
        // then the agent knows it
        socket.heard_out(0, Duration::from_secs(60)).await;
        assert_eq!(socket.failing(0), Some((FailureClass::Permanent, "m".to_owned())));
    }
}
