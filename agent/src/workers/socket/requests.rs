//! The requests that workers make on their socket, and the answers.

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;

use elastic_node::requests::{barrier, checkpoint};
use elastic_proto::worker::{Checkpoint, FromWorker, Running, ToWorker};
use elastic_rendezvous::job::{JobSecret, ProgressRecord, RoundRecord, RoundState, Versioned};
use elastic_store::Store;
use futures::future::BoxFuture;
use tokio::net::UnixStream;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::outgoing::Outgoing;
use super::state::{Said, Shared};
use crate::store::participation::{JobPaths, JobStore};
use crate::workers::checkpoints::record_of;
use crate::workers::guard_client;
use crate::workers::snapshot_memory;
use crate::workers_store::fence::Known;
use crate::workers_store::introduction::everywhere;

/// The most barriers and commits that one connection may have under way. Beyond this, nothing is read from the
/// connection until one of them is answered.
const UNDER_WAY: usize = 16;

/// Why commits are refused on etcd's v2 API.
const ONE_KEY_AT_A_TIME: &str = "\
    this job meets through etcd's v2 API, which writes one key at a time: checkpoint commits need the v3 API \
    (--rdzv-backend=etcd without api=v2, on every node); write checkpoints to shared files, as under torchrun";

/// Why commits are refused on a connection that has not registered.
const UNREGISTERED: &str = "only a worker that has registered can commit a checkpoint";

/// Requests of a connection that are not answered yet. They are given up when the connection closes. `None` once the
/// connection's other end is closed.
pub(super) struct Requests(Option<JoinSet<()>>);

impl Default for Requests {
    fn default() -> Requests {
        Requests(Some(JoinSet::new()))
    }
}

impl Requests {
    /// Begins another request, as soon as there is room for it.
    pub(super) async fn begin(&mut self, connection: &UnixStream, request: Request) {
        let Some(under_way) = &mut self.0 else { return };
        while under_way.try_join_next().is_some() {}
        if under_way.len() >= UNDER_WAY {
            tokio::select! {
                _ = under_way.join_next() => {}
                () = closed(connection) => {
                    self.0 = None;
                    return;
                }
            }
        }
        under_way.spawn(request);
    }
}

/// Waits until the other end of a connection is closed, even if there is still something left to read.
async fn closed(connection: &UnixStream) {
    // Registers a copy of the descriptor. Readiness that is cleared here must not be lost for the task that reads.
    let own = connection.as_fd().try_clone_to_owned();
    let Ok(own) = own.and_then(guard_client::readable) else {
        // Without a copy, requests end when the round does.
        return std::future::pending().await;
    };
    while let Ok(mut ready) = own.readable().await {
        if ready.ready().is_read_closed() {
            return;
        }
        ready.clear_ready();
    }
}

/// A request whose answer depends on other nodes or on the store.
type Request = BoxFuture<'static, ()>;

/// Handles a message of a worker. Answers it at once, unless the answer depends on others. Then this returns the work
/// that gives the answer.
pub(super) async fn answer(
    connection: u64,
    message: FromWorker,
    line: &mpsc::Sender<Outgoing>,
    shared: &Arc<Shared>,
) -> Option<Request> {
    let local_rank = || {
        let registered = shared.state().connections.get(&connection).and_then(|connection| connection.registered);
        registered.map(|registered| registered.local_rank)
    };
    match message {
        FromWorker::Register { local_rank, round_aware, .. } => {
            let replies = shared.state().register(connection, local_rank, round_aware);
            for reply in replies {
                let _ = line.send(reply.into()).await;
            }
            shared.awareness.notify_one();
        }
        FromWorker::Progress { step, epoch, loss, total_steps } => {
            if let Some(rank) = local_rank() {
                shared.state().progressed(rank, step, Said { epoch, loss, total_steps });
            }
        }
        FromWorker::Failing { class, message } => {
            if let Some(rank) = local_rank() {
                shared.state().told.failing.insert(rank, (class, message));
            }
        }
        // Other nodes may arrive much later. The worker can send further messages meanwhile.
        FromWorker::Barrier { id, name } => return Some(meet(id, name, line.clone(), Arc::clone(shared))),
        FromWorker::Commit { id, checkpoint } => match publish(connection, id, checkpoint, line, shared) {
            Ok(request) => return Some(request),
            Err(message) => drop(line.send(refuse(Some(id), message).into()).await),
        },
        FromWorker::StepsDone { id } => {
            let (shared, answers) = (Arc::clone(shared), line.clone());
            return Some(Box::pin(async move { drop(answers.send(steps_done(&shared, id).await.into()).await) }));
        }
        FromWorker::RunningRound { id } => {
            let (shared, answers) = (Arc::clone(shared), line.clone());
            return Some(Box::pin(async move { drop(answers.send(running_round(&shared, id).await.into()).await) }));
        }
        FromWorker::Finished { finished } => {
            shared.state().finished = Some(finished);
            shared.finished.notify_one();
        }
        FromWorker::Memory { id, bytes, rescue } => {
            let reply = lend(shared, local_rank(), id, bytes, rescue);
            let _ = line.send(reply).await;
        }
        FromWorker::Forget => {
            if let Some(rank) = local_rank() {
                shared.state().memories.forget(rank);
            }
        }
        FromWorker::RequestRound { id, round, reason } => {
            let asked = shared.state().ask_round(connection, round, reason);
            let reply = match asked {
                Ok(()) => ToWorker::RoundRequested { id },
                Err(message) => refuse(Some(id), message),
            };
            let _ = line.send(reply.into()).await;
            shared.round_asked.notify_one();
        }
        FromWorker::Quiesced { .. } => {
            if let Err(message) = shared.state().quiesced(connection) {
                let _ = line.try_send(refuse(None, message).into());
            }
            shared.awareness.notify_one();
        }
    }
    None
}

/// The answer to a request that asking again does not help. `id` names the request.
fn refuse(id: Option<u64>, message: impl Into<String>) -> ToWorker {
    ToWorker::Error { id, message: message.into(), again: false }
}

/// Waits at the barrier `name` for the other nodes, and answers request `id`.
fn meet(id: u64, name: String, line: mpsc::Sender<Outgoing>, shared: Arc<Shared>) -> Request {
    Box::pin(async move {
        let Shared { rendezvous, paths, status, .. } = &*shared;
        let within = shared.state().barrier_timeout;
        let met = match rendezvous {
            JobStore::Store(store) => barrier::meet(&**store, &paths.keys, status, &name, within).await,
            JobStore::TorchElastic(etcd) => {
                elastic_torchelastic::meet_on_v2(etcd, &paths.paths, status, &name, within).await
            }
        };
        let reply = match met {
            Ok(()) => ToWorker::BarrierPassed { id },
            Err(error) => refuse(Some(id), error.to_string()),
        };
        let _ = line.send(reply.into()).await;
    })
}

/// How far the job is known to have come: the answer to request `id`.
async fn steps_done(shared: &Shared, id: u64) -> ToWorker {
    let (own, first) = {
        let state = shared.state();
        (state.furthest.map_or(0, |furthest| furthest.progress.last.0), state.first_round)
    };
    let Some(store) = shared.rendezvous.store() else { return ToWorker::StepsDone { id, step: own } };
    let from = first.filter(|_| shared.fresh).unwrap_or(0);
    match store.get(&shared.paths.keys.progress()).await {
        Ok(found) => {
            let record = found.and_then(|found| Versioned::<ProgressRecord>::parse(&found).ok());
            let record = record.map(|record| record.value).filter(|record| record.round >= from);
            ToWorker::StepsDone { id, step: own.max(record.map_or(0, |record| record.step)) }
        }
        Err(error) => ToWorker::Error { id: Some(id), message: error.to_string(), again: true },
    }
}

/// The round that other nodes run, and the time until workers that start ahead must register: the answer to request `id`.
async fn running_round(shared: &Shared, id: u64) -> ToWorker {
    let running = running(shared).await;
    let left = shared.state().ahead.map(|until| until.saturating_duration_since(Instant::now()));
    ToWorker::RunningRound { id, left_ms: left.unwrap_or_default().as_millis() as u64, running }
}

/// The round that other nodes run, with this host introduced to its store. None if none runs, or only what an agent
/// with `--fresh` leaves behind.
async fn running(shared: &Shared) -> Option<Running> {
    let store = shared.rendezvous.store().filter(|_| !shared.fresh || shared.state().first_round.is_some())?;
    let JobPaths { job, keys, .. } = &shared.paths;
    let round = Versioned::<RoundRecord>::parse(&store.get(&keys.round()).await.ok()??).ok()?.value;
    let master = round.master.filter(|_| round.state == RoundState::Running)?;
    if round.members_only {
        let secret = Versioned::<JobSecret>::parse(&store.get(&keys.secret()).await.ok()??).ok()?.value;
        let known = Known { secret, job: job.to_string(), round: round.number };
        everywhere(&master, &known).await.ok()?;
    }
    Some(Running { round: round.number, master_addr: master.host, master_port: master.port })
}

/// Lends memory for a snapshot to the worker `local_rank`: the answer to request `id`.
fn lend(shared: &Shared, local_rank: Option<u32>, id: u64, bytes: u64, rescue: Vec<String>) -> Outgoing {
    let spare = snapshot_memory::spare();
    let lent = match local_rank {
        // To look at what is there changes nothing about how it is saved.
        Some(rank) if bytes == 0 => shared.state().memories.lend_left(rank).map_err(|error| error.to_string()),
        Some(rank) => {
            let memories = &mut shared.state().memories;
            memories.saved_by(rank, rescue);
            memories.lend(rank, bytes, spare).map(|file| (file, bytes)).map_err(|error| error.to_string())
        }
        None => Err("only a worker that has registered can have memory".to_owned()),
    };
    match lent {
        Ok((file, bytes)) => Outgoing { message: ToWorker::Memory { id, bytes }, file: Some(file) },
        Err(message) => refuse(Some(id), message).into(),
    }
}

/// Begins to publish a checkpoint, unless nothing from this connection can be published.
fn publish(
    connection: u64,
    id: u64,
    checkpoint: Checkpoint,
    line: &mpsc::Sender<Outgoing>,
    shared: &Arc<Shared>,
) -> Result<Request, &'static str> {
    let store = shared.rendezvous.store().cloned().ok_or(ONE_KEY_AT_A_TIME)?;
    let pid = {
        let state = shared.state();
        let found = state.connections.get(&connection).filter(|connection| connection.registered.is_some());
        found.ok_or(UNREGISTERED)?.pid
    };
    let (shared, answers) = (Arc::clone(shared), line.clone());
    Ok(Box::pin(async move { drop(answers.send(commit(&*store, &shared, id, checkpoint, pid).await.into()).await) }))
}

/// Publishes a checkpoint that exists: the answer to request `id`.
async fn commit(store: &dyn Store, shared: &Shared, id: u64, checkpoint: Checkpoint, pid: Option<i32>) -> ToWorker {
    let (step, path) = (checkpoint.step, checkpoint.path.clone());
    let refuse = |message, again| ToWorker::Error { id: Some(id), message, again };
    // The file system may be slow.
    if tokio::task::spawn_blocking(move || is_missing(&path, pid)).await.unwrap_or(false) {
        return refuse(format!("step {step} is not published: there is nothing at {}", checkpoint.path), false);
    }
    match checkpoint::commit(store, &shared.paths.keys, &shared.status, record_of(checkpoint)).await {
        Ok(()) => ToWorker::Committed { id, step },
        Err(error) => refuse(error.to_string(), error.may_pass()),
    }
}

/// Whether a file is known to be missing. It must be missing both here and for the process that named it, which may run
/// in a container.
fn is_missing(path: &str, pid: Option<i32>) -> bool {
    let there = pid.map(|pid| format!("/proc/{pid}/root{path}"));
    [Some(path.to_owned()), there].into_iter().flatten().all(|path| {
        let found = std::fs::symlink_metadata(path);
        found.is_err_and(|error| matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_missing_if_no_worker_sees_it() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("manifest.json");
        let path = file.to_str().unwrap();
        let own = Some(std::process::id() as i32);
        assert!(is_missing(path, own) && is_missing(path, None));
        std::fs::write(&file, "{}").unwrap();
        assert!(!is_missing(path, own) && !is_missing(path, None));
        assert!(is_missing(&format!("{path}/x"), None), "what is no folder has nothing in it");
    }
}
